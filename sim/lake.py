"""A simulated Delta table of batches that log and table get together (rule X11).

The table outlives every process: a commit that has left its driver is executed even if the driver
dies, and perhaps long afterwards.  The driver then does not know whether it was.

Model
  K1  A read returns the newest txn of an application.  While the table is away, reads and commits
      raise `TierUnavailable`.
  K2  A commit is atomic and has txn(app, version).  As in Delta, it is skipped if the table has
      this version of the application, or a later one.
  K3  A commit may be late: its driver gets an error, and the table gets the commit later.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from pk import errors
from pk.sim.network import NOBODY
from pk.sim.options import LAKE_URL
from pk.sim.oracle import RecordId
from pk.sim.world import SimClock, SimWorld
from pk.types import NONE

URL, TABLE_ID = f"{LAKE_URL}/both", "table"
#: How long a request to the table, and its reply, take: usually, and while it is slow.
DELAY_MS, SLOW_MS = (0.5, 20.0), (20.0, 2_500.0)
#: How long each fault lasts, and how late a late commit is.
AWAY_MS, LATE_MS = (300.0, 12_000.0), (300.0, 12_000.0)
#: After so long the driver of a late commit gives up.
GIVES_UP_MS = (20.0, 500.0)
After = Callable[[float, Callable[[], None]], None]


class LakeState(NamedTuple):
    """Implements `TableState`."""

    table_id: str
    version: int | None
    retention: str = ""


class LakeRead(NamedTuple):
    """A read that succeeded: what it found, and when."""

    at_ms: float
    app: str
    version: int  #: NONE = no txn


class LakeCommit(NamedTuple):
    """A commit of the table."""

    at_ms: float
    app: str
    version: int
    rows: tuple[RecordId, ...]


class SimLake:
    """The table.  Implements `TableReader`."""

    def __init__(self, world: SimWorld) -> None:
        self.away = self.slow = self.late = False
        self.commits: list[LakeCommit] = []
        self.reads: list[LakeRead] = []
        self.counts: dict[str, int] = {}
        self._txns: dict[str, int] = {}
        self._world = world
        self._clock = SimClock(world.loop)
        self._rng: random.Random = world.random("lake")

    async def read(self, url: str, app: str) -> LakeState:
        """Return the newest state of the table."""
        assert url == URL, url
        await self._wait()
        self._check_away("reads refused by the lake")
        found = self._txns.get(app, NONE)
        self.reads.append(LakeRead(self._now_ms, app, found))
        await self._wait()
        return LakeState(TABLE_ID, None if found == NONE else found)

    async def append(self, app: str, version: int, rows: tuple[RecordId, ...]) -> None:
        """Append rows under txn(app, version).

        Raises `TierUnavailable`: the table gets them later, or it does not.
        """
        self._check_away("commits refused by the lake")
        late, self.late = self.late, False
        delay_ms = self._rng.uniform(*LATE_MS) if late else self._delay_ms
        at_us = self._world.loop.now_us + int(delay_ms * 1000)
        self._world.loop.call_at_us(at_us, lambda: self._land(app, version, rows), context=NOBODY)
        if late:
            self._count("commits late in the lake")
            await self._clock.sleep_ms(self._rng.uniform(*GIVES_UP_MS))
            raise errors.TierUnavailable("the lake: no answer to a commit")
        await self._clock.sleep_ms(delay_ms)
        await self._wait()

    def has(self, app: str, version: int) -> bool:
        """Return whether the table has txn(app, version)."""
        return self._txns.get(app, NONE) >= version

    def _land(self, app: str, version: int, rows: tuple[RecordId, ...]) -> None:
        if self.has(app, version):
            self._count("commits skipped by the lake")
            return
        self._txns[app] = version
        self.commits.append(LakeCommit(self._now_ms, app, version, rows))
        self._world.record(f"the lake has {app} {version}")

    @property
    def _now_ms(self) -> float:
        return self._world.loop.now_us / 1000

    @property
    def _delay_ms(self) -> float:
        return self._rng.uniform(*(SLOW_MS if self.slow else DELAY_MS))

    async def _wait(self) -> None:
        await self._clock.sleep_ms(self._delay_ms)

    def _check_away(self, what: str) -> None:
        if self.away:
            self._count(what)
            raise errors.TierUnavailable("the lake is away")

    def _count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1


class LakeFaults:
    """Begins the faults of the table; the arguments are those of `TransactionFaults`."""

    def __init__(
        self, lake: SimLake, rng: random.Random, after: After, meet: Callable[[str], None]
    ) -> None:
        self._lake = lake
        self._rng = rng
        self._after = after
        self._meet = meet
        self.begin: dict[str, Callable[[], None]] = {
            "lake_away": self._away,
            "lake_slow": self._slow,
            "lake_late": self._late,
        }

    def _away(self) -> None:
        """Refuse every read of the table and every commit to it for a while."""
        lake = self._lake
        if lake.away:
            return
        self._meet("lakes away")
        lake.away = True

        def undo() -> None:
            lake.away = False

        self._after(self._rng.uniform(*AWAY_MS), undo)

    def _slow(self) -> None:
        """Let the table be slow for a while."""
        lake = self._lake
        lake.slow = True

        def undo() -> None:
            lake.slow = False

        self._after(self._rng.uniform(*AWAY_MS), undo)

    def _late(self) -> None:
        """Let the next commit be late (K3)."""
        lake = self._lake
        lake.late = True

        def undo() -> None:
            lake.late = False

        self._after(self._rng.uniform(*AWAY_MS), undo)
