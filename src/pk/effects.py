"""The two shapes of every piece of distributed logic, and what such a piece may ask of the world.

A `Machine` is a protocol peer: events in, effects out.  A `Replayed` machine is durable truth over
a log: `decide` reads, `apply` mutates, replay is recovery.  Neither knows a clock, a socket, a file
or a random number that was not handed in; the runtime performs what they return.

Rules
  E1  `step` and `apply` are the only mutators.
  E2  `Write.then` happens only after the level it names was reached (docs/PROTOCOL.md L1).
  E3  effects are per request or per batch, never per record; they are slotted, not frozen (rule
      P7).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

E_contra = TypeVar("E_contra", contravariant=True)
C_contra = TypeVar("C_contra", contravariant=True)
R = TypeVar("R")


class Level(enum.IntEnum):
    """How far a write got (rule L1)."""

    WRITTEN = 1  #: write(2) returned: survives the death of the process
    SYNCED = 2  #: fdatasync returned: survives a power loss


@dataclass(slots=True)
class Write:
    """Perform `ops` (append, truncate, checkpoint …) in order; `then` once `level` is reached."""

    ops: Sequence[Any]
    level: Level
    then: Sequence[Effect] = ()


@dataclass(slots=True)
class Send:
    """Send `message` to `peer`; nothing is promised about its arrival."""

    peer: Any
    message: Any


@dataclass(slots=True)
class Respond:
    """Answer `request` with `reply`: a message, or a `PkError`."""

    request: Any
    reply: Any


@dataclass(slots=True)
class SetTimer:
    """Wake the machine at `at_ms` with `key`; the same key replaces, None cancels."""

    key: Any
    at_ms: int | None


@dataclass(slots=True)
class Publish:
    """Make `value` the next event of this process's other machines that listen to `name`."""

    name: str
    value: Any


Effect = Write | Send | Respond | SetTimer | Publish


@dataclass(slots=True)
class Decision(Generic[R]):
    """What a `Replayed` machine answers: records to append, the reply they justify, effects."""

    records: Sequence[R]
    reply: Any
    effects: Sequence[Effect] = field(default=())


class Machine(Protocol[E_contra]):
    """A protocol peer: quorum, leader, follower, client sender, cleaner, tier copier."""

    def step(self, event: E_contra, now_ms: int) -> Sequence[Effect]: ...


class Replayed(Protocol[C_contra, R]):
    """Durable truth over a log: controller, groups, transactions."""

    def decide(self, command: C_contra, now_ms: int) -> Decision[R]: ...

    def apply(self, offset: int, record: R) -> None: ...
