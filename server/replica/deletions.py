"""Deletions of records that wait until every replica that may lead next has them (rule T9).

Sans-IO.  A log start is *known* once each in-sync replica has moved its own log start there.  Only
then does the leader acknowledge the deletion, and only then may the rows leave the table.  The
in-sync replicas confirm nothing to a leader that was replaced, because they follow its successor.
So a replaced leader cannot delete rows of the table that all replicas share, whether it reaches the
controller or not.

Invariants
  D1  A waiting deletion is answered once: the log start is known, or another broker leads.
  D2  A log start that was known in an earlier leader epoch does not count in the next epoch, which
      may have other in-sync replicas.
"""

from __future__ import annotations

import asyncio

from pk import errors
from pk.types import NONE, Offset


class Deletions:
    """The deletions of one partition that its leader carried out and that are not yet known."""

    def __init__(self) -> None:
        self._known: Offset = NONE
        self._waiting: list[tuple[Offset, asyncio.Future[None]]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def new_epoch(self) -> None:
        """Begin a new leader epoch, in which no log start is known yet (D2)."""
        self._known = NONE

    def wait(self, before: Offset) -> asyncio.Future[None]:
        """Return a future that is done when `before` is known; it fails when leadership ends."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((before, future))
        return future

    def log_start_known(self, known: Offset, name: str, *, leads: bool) -> bool:
        """Answer the deletions that the known log start covers; return whether it has grown."""
        grew, self._known = known > self._known, known
        waiting, self._waiting = self._waiting, []
        for before, future in waiting:
            if future.done():
                continue
            if not leads:
                future.set_exception(errors.NotLeaderOrFollower(f"{name}: another broker leads"))
            elif known >= before:
                future.set_result(None)
            else:
                self._waiting.append((before, future))
        return grew
