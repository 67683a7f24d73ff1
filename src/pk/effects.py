"""The two shapes of distributed logic, and the effects that they may request.

A `Machine` is a protocol peer: events in, effects out.  A `Replayed` machine is durable state over
a log: `decide` reads, `apply` mutates, and recovery replays the log.  Neither uses a clock, a
socket, a file or a random number that was not passed in; the runtime performs the effects that they
return.

Rules
  E1  `step` and `apply` are the only mutators.
  E2  `Write.then` happens only after the named level was reached (docs/PROTOCOL.md L1).
  E3  Effects are per request or per batch, never per record.  They use slots and are not frozen
      (rule P7).
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
    """How durable a write is (rule L1)."""

    WRITTEN = 1  #: write(2) returned: survives a crash of the process
    SYNCED = 2  #: fdatasync returned: survives a power loss


@dataclass(slots=True)
class Write:
    """Perform `ops` (append, truncate, checkpoint …) in order; `then` follows once `level` is
    reached.
    """

    ops: Sequence[Any]
    level: Level
    then: Sequence[Effect] = ()


@dataclass(slots=True)
class Send:
    """Send `message` to `peer`; its arrival is not guaranteed."""

    peer: Any
    message: Any


@dataclass(slots=True)
class Respond:
    """Answer `request` with `reply`: a message, or a `PkError`."""

    request: Any
    reply: Any


@dataclass(slots=True)
class SetTimer:
    """Wake the machine at `at_ms` with `key`; the same key replaces the timer, None cancels it."""

    key: Any
    at_ms: int | None


@dataclass(slots=True)
class Publish:
    """Deliver `value` as an event to the other machines of this process that listen to `name`."""

    name: str
    value: Any


Effect = Write | Send | Respond | SetTimer | Publish


@dataclass(slots=True)
class Decision(Generic[R]):
    """The result of `decide`: records to append, the reply once they are appended, effects."""

    records: Sequence[R]
    reply: Any
    effects: Sequence[Effect] = field(default=())


class Machine(Protocol[E_contra]):
    """A protocol peer: quorum, leader, follower, client sender, cleaner, tier copier."""

    def step(self, event: E_contra, now_ms: int) -> Sequence[Effect]: ...


class Replayed(Protocol[C_contra, R]):
    """Durable state over a log: controller, groups, transactions."""

    def decide(self, command: C_contra, now_ms: int) -> Decision[R]: ...

    def apply(self, offset: int, record: R) -> None: ...
