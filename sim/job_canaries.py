"""The canaries of jobs: rules X5, X7, X8 and X9 broken, and what notices it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from pk.server.runtime.replayed_host import ReplayedHost
from pk.server.transactions.machine import TransactionCoordinator
from pk.server.transactions.participants import events, state
from pk.sim.canary import SAFE, THREE, Canary
from pk.sim.transaction_canaries import TORN, answered_before_the_commit
from pk.types import NONE

TORN_BATCHES = f"{TORN} V24 V25"


def _unnamed_committed(stack: ExitStack) -> None:
    """Commit every participant of a committed batch, whether or not the driver named it."""
    prepared = events.prepared_event

    def all_of_them(ids: Any, known: Any) -> Any:
        event = prepared(ids, known)
        markers = (each._replace(commit=known.state.committed) for each in event.markers)
        return event._replace(markers=tuple(markers))

    stack.enter_context(patch.object(events, "prepared_event", all_of_them))


def _batches_forgotten(stack: ExitStack) -> None:
    """Let a coordinator that takes over forget which batches are committed."""
    start = ReplayedHost.start

    async def forgetful(self: Any) -> None:
        await start(self)
        if isinstance(self.machine, TransactionCoordinator):
            jobs = self.machine.jobs
            for members in jobs._members.values():
                members.history.clear()
            for name, job in jobs._jobs.items():
                jobs._jobs[name] = replace(job, last_committed=NONE)

    stack.enter_context(patch.object(ReplayedHost, "start", forgetful))


def _run_not_fenced(stack: ExitStack) -> None:
    """Let a run that was superseded go on as the current one."""

    def current(known: Any, run: str, now_ms: int) -> Any:
        return known if known.run == run else replace(known, run=run, updated_ms=now_ms)

    stack.enter_context(patch.object(state, "in_run", current))


JOB_CANARIES: dict[str, Canary] = {
    "a participant that no commit names is committed": Canary(
        "X7", _unnamed_committed, TORN_BATCHES, SAFE, (),
        nodes=THREE, copies=3, jobs=2, pace_ms=(10, 60),
    ),
    "committed batches forgotten at a failover": Canary(
        "X9", _batches_forgotten, TORN_BATCHES, SAFE, ("kill_coordinator",),
        nodes=THREE, copies=3, jobs=2, fault_ms=8_000, pace_ms=(10, 60),
    ),
    "a superseded run that is not fenced": Canary(
        "X8", _run_not_fenced, TORN_BATCHES, SAFE, (),
        nodes=THREE, copies=3, jobs=3, fault_ms=8_000, pace_ms=(10, 60),
    ),
    # The disk of the coordinator has no room for the prepare record.
    "a batch's commit answered before its prepare is committed": Canary(
        "X7", answered_before_the_commit, TORN_BATCHES, SAFE, ("coordinator_full",),
        nodes=THREE, copies=3, jobs=2, fault_ms=10_000, fault_every_ms=(200, 1_000),
        pace_ms=(10, 60),
    ),
}  # fmt: skip
