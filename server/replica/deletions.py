"""Deletions that wait until every replica that may lead next knows of them (rule T9).

Sans-IO.  A log start is *known* once each in-sync replica has moved its own log start there.  Only
then is a deletion acknowledged, and only then may rows leave the table: a leader that was replaced
cannot get the word of replicas that follow its successor, so it cannot delete in the table that all
replicas share, whether it reaches the controller or not.

Invariants
  D1  a waiting deletion is answered once: known, or refused because another broker leads
  D2  what was known in an earlier leader epoch does not count: the in-sync replicas are others
"""

from __future__ import annotations

import asyncio

from pk import errors
from pk.types import NONE, Offset


class Deletions:
    """The deletions of one partition that were carried out here and are not yet known."""

    def __init__(self) -> None:
        self._known: Offset = NONE
        self._waiting: list[tuple[Offset, asyncio.Future[None]]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def new_epoch(self) -> None:
        """This replica leads in a new epoch (D2)."""
        self._known = NONE

    def wait(self, before: Offset) -> asyncio.Future[None]:
        """Done when `before` is known; fails if this replica stops leading."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((before, future))
        return future

    def log_start_known(self, known: Offset, name: str, *, leads: bool) -> bool:
        """The log start that is known now.  True if it grew."""
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
