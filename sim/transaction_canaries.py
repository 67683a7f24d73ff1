"""The canaries of transactions: rules X1, X3, X6 and L11 broken, and what notices it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from pk import errors
from pk.log.aborted import AbortedRanges
from pk.log.producers import Producers
from pk.log.validate import MarkerResult
from pk.server.handlers.appends import Appends
from pk.server.runtime.replayed_host import ReplayedHost
from pk.server.transactions import endings, state
from pk.server.transactions.ids import decision
from pk.server.transactions.machine import TransactionCoordinator
from pk.server.transactions.state import PairRelation, Phase
from pk.sim.canary import SAFE, THREE, TIERED, Canary

TORN = "V7 V9 V19 V20 V21 V22 V23"


def _any_marker_taken(stack: ExitStack) -> None:
    """Let a marker of an older coordinator, which comes late, end the producer's next transaction.

    The marker has the epoch of that transaction and not a greater one.
    """
    apply = Producers._apply_markers

    def trusting(self: Producers, markers: Any, *args: Any) -> Any:
        for marker in markers:
            known = self._by_id.get(marker.producer_id)
            if known is not None and known.epoch == marker.producer_epoch:
                self._by_id[marker.producer_id] = known._replace(epoch=known.epoch - 1)
        return apply(self, markers, *args)

    stack.enter_context(patch.object(Producers, "_apply_markers", trusting))
    stack.enter_context(patch("pk.log.validate.check_marker", lambda *_: MarkerResult.APPEND))


def answered_before_the_commit(stack: ExitStack) -> None:
    """Let a coordinator answer before its records are committed."""
    whole = ReplayedHost._round

    async def hasty(self: Any) -> None:
        if not isinstance(self.machine, TransactionCoordinator):
            await whole(self)
            return
        replies: list[Any] = []
        while self._queue:
            command, future = self._queue.popleft()
            if not future.done():
                self._decide(command, future, replies)
        for future, reply, _ in replies:
            if future.done():
                continue
            if isinstance(reply, Exception):
                future.set_exception(reply)
            else:
                future.set_result(reply)
        try:
            if self._log.committed < self._log.end:
                await self._log.commit()
        except errors.RetriableError as failure:
            await self._start_over(failure, replies)
            return
        for _, _, effects in replies:
            self._on_effects(effects)

    stack.enter_context(patch.object(ReplayedHost, "_round", hasty))


def _open_transactions_not_counted(stack: ExitStack) -> None:
    """Let the last stable offset pass open transactions."""
    stack.enter_context(
        patch.object(Producers, "last_stable_offset", lambda _self, high_watermark: high_watermark)
    )


def _not_verified(stack: ExitStack) -> None:
    """Append the first batch of a transaction without a question to its coordinator."""
    stack.enter_context(patch.object(Appends, "unverified", lambda *_: False))


def _epoch_not_bumped(stack: ExitStack) -> None:
    """Let a new instance get the epoch that its predecessor has."""
    initialized = state.initialized

    def same(known: Any, *args: Any) -> Any:
        found = initialized(known, *args)
        began = known.updated_ms != args[-1]  # otherwise the id is new
        return replace(found, current=known.current) if began else found

    stack.enter_context(patch.object(state, "initialized", same))


def _aborted_rows_copied(stack: ExitStack) -> None:
    """Copy the records of aborted transactions to the table."""
    for name in ("convert", "uploads"):
        none = patch(f"pk.tiering.{name}.AbortedRanges", lambda _: AbortedRanges(()))
        stack.enter_context(none)


def _any_end_repeated(stack: ExitStack) -> None:
    """Answer a repeated EndTxn as done, whatever the decision was."""

    def done(_ids: Any, known: Any, *_: Any) -> Any:
        return decision(endings._end_reply(known.after_end))

    ends: Any = endings._END
    places = ((PairRelation.CURRENT, Phase.PREPARED), (PairRelation.PREVIOUS, Phase.IDLE))
    stack.enter_context(patch.dict(ends, dict.fromkeys(places, done)))


TRANSACTION_CANARIES: dict[str, Canary] = {
    "marker of an older coordinator taken": Canary(
        "X1", _any_marker_taken, TORN, SAFE, ("late_control",),
        nodes=THREE, copies=3, fault_ms=6_000, fault_every_ms=(40, 120), pace_ms=(8, 40),
        transactions=3,
    ),
    # The disk of the coordinator has no room for the prepare record.
    "commit answered before prepare is committed": Canary(
        "X1", answered_before_the_commit, TORN, SAFE, ("coordinator_full",),
        nodes=THREE, copies=3, fault_ms=10_000, fault_every_ms=(200, 1_000), pace_ms=(10, 60),
        transactions=3,
    ),
    "LSO past an open transaction": Canary(
        "L11", _open_transactions_not_counted, f"V4 {TORN}", SAFE, ("kill_coordinator",),
        nodes=THREE, copies=3, transactions=3, pace_ms=(10, 60),
    ),
    "verification skipped": Canary(
        "X6", _not_verified, TORN, SAFE, ("kill_coordinator",),
        nodes=THREE, copies=3, transactions=3, pace_ms=(10, 60),
    ),
    "epoch not bumped": Canary(
        "X1", _epoch_not_bumped, TORN, SAFE, ("kill_coordinator",),
        nodes=THREE, copies=3, transactions=3, fault_ms=8_000, pace_ms=(10, 60),
    ),
    "aborted rows copied to the table": Canary(
        "X3", _aborted_rows_copied, TORN, TIERED, ("kill_coordinator",),
        fault_ms=6_000, transactions=3, pace_ms=(10, 60),
    ),
    # The transaction times out, and its producer asks for the commit after that.
    "a commit acknowledged that was an abort": Canary(
        "X1", _any_end_repeated, TORN, SAFE, ("late_control",),
        nodes=THREE, copies=3, fault_ms=8_000, transactions=3, pace_ms=(10, 60),
    ),
}  # fmt: skip
