"""The shell of the TransactionManager: asks the coordinator, and connects it with the producer's
engine.

World-generic; `pk.client.producer_transactions` has the blocking calls over it.

Invariants
  D1  The machine is stepped on the loop only, and never inside another step of it: an event that
      an effect causes waits until the effects before it are performed.
  D2  Every call ends within its time-out, with an outcome or with `RequestTimedOut`.  The work of a
      call that timed out goes on until the engine closes.
  D3  One request is sent at a time, and the machine gets one answer to each.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message

from pk import errors
from pk.client.group_types import ConsumerGroupMetadata, OffsetAndMetadata
from pk.client.network_client import NetworkClient
from pk.client.produce_engine import ProduceEngine
from pk.client.sender_events import ForceClose
from pk.client.transaction_manager import (
    BatchesSettled,
    BatchFailed,
    BatchHanded,
    CallGivenUp,
    CallMade,
    ManagerState,
    Replied,
    RetryDue,
    SuccessLost,
    TransactionCall,
    TransactionEvent,
    TransactionManager,
)
from pk.client.transaction_offsets import TransactionOffsets
from pk.effects import Effect, Publish, Respond, Send, SetTimer
from pk.tasks import TaskRegistry
from pk.types import TopicPartition
from pk.world import World

_log = logging.getLogger("pk.client")

#: What the caller of a call that timed out does; the work goes on meanwhile.
_TIMED_OUT = {
    TransactionCall.INIT: "call init_transactions again",
    TransactionCall.COMMIT: (
        "whether the transaction is committed is not known yet: call commit_transaction again"
    ),
    TransactionCall.ABORT: "call abort_transaction again",
}


class TransactionEngine:
    """The transactions of one producer.  `options` are resolved (settings.PRODUCER)."""

    def __init__(
        self,
        world: World,
        cluster: NetworkClient,
        engine: ProduceEngine,
        options: Mapping[str, Any],
    ) -> None:
        self.manager = TransactionManager(options, world.rng)
        self._world = world
        self._cluster = cluster
        self._engine = engine
        self._request_timeout_ms: int = options["request_timeout_ms"]
        self._offsets = TransactionOffsets(world, cluster, self._request_timeout_ms)
        self._tasks = TaskRegistry()
        self._timer: asyncio.TimerHandle | None = None
        self._events: deque[TransactionEvent] = deque()
        self._stepping = False
        #: the futures of the threads that wait for each call
        self._waiting: dict[TransactionCall, list[asyncio.Future[errors.PkError | None]]] = {}
        self._closed = False
        engine.on_step = self._on_engine_step
        engine.refuse(self.manager.refusal(TransactionCall.SEND))

    # -- calls -------------------------------------------------------------------------------------

    async def call(self, call: TransactionCall, timeout_ms: int) -> None:
        """Make a call and wait for its outcome.  Raises its error, or `RequestTimedOut`; the same
        call then continues to wait.
        """
        if self._closed:
            raise errors.ClosedError("the producer was closed")
        self._cluster.start()  # a coordinator that leaves the metadata holds up no call
        outcome: asyncio.Future[errors.PkError | None]
        outcome = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(call, [])
        waiting.append(outcome)
        self._step(CallMade(call))
        try:
            await asyncio.wait([outcome], timeout=timeout_ms / 1000)
        except asyncio.CancelledError:
            # On a busy machine the outcome and the end of the time-out meet in one turn of the
            # loop.  A failure leaves a state that says the same to the next call.
            if outcome.done() and outcome.result() is None and len(waiting) == 1:
                self._step(SuccessLost(call))
            raise
        finally:
            if not outcome.done():
                waiting.remove(outcome)
                if not waiting:
                    self._step(CallGivenUp(call))
        if not outcome.done():
            raise errors.RequestTimedOut(
                f"{call.value}: no outcome within {timeout_ms} ms{self._obstacle()}; "
                f"{_TIMED_OUT.get(call, 'call it again')}"
            )
        error = outcome.result()
        if error is not None:
            raise error

    async def send_offsets(
        self,
        offsets: Mapping[TopicPartition, OffsetAndMetadata],
        group: ConsumerGroupMetadata,
        timeout_ms: int,
    ) -> None:
        """Commit offsets of a group with the transaction.  After a failure it can only be aborted
        (client/transaction_offsets F3).

        Raises `InvalidTxnState` outside a transaction, `TransactionAborted` after a refusal of the
        group's coordinator or without an answer.
        """
        self._open_pair()
        if not offsets:
            return
        self._step(BatchHanded())  # the coordinator of the transaction may know of it
        try:
            await self._offsets.send(self._open_pair, offsets, group, timeout_ms)
        except errors.PkError as failure:
            self._step(BatchFailed(failure))
            raise (self.manager.refusal(TransactionCall.SEND) or failure) from failure
        except asyncio.CancelledError:
            self._step(BatchFailed(errors.RequestTimedOut("the offsets have no outcome")))
            raise
        finally:
            self._on_engine_step()

    def _open_pair(self) -> tuple[int, int]:
        """Return the pair of the open transaction.  Raises the error of `send` without one."""
        refusal = self.manager.refusal(TransactionCall.SEND)
        if refusal is not None:
            raise refusal
        return self.manager.pair

    def _obstacle(self) -> str:
        """Return what the call waits for, as words for its error."""
        if self.manager.ending:
            return " (records of the transaction are not acknowledged yet)"
        problem = self.manager.problem
        return "" if problem is None else f" ({problem.message})"

    @property
    def open(self) -> bool:
        """Whether a transaction is open that `close` has to abort."""
        return self.manager.state in (ManagerState.IN_TRANSACTION, ManagerState.ABORTABLE_ERROR)

    async def finish(self, timeout_ms: int) -> None:
        """End the transaction before the producer closes: wait for a commit that timed out, abort
        an open transaction.  A failure is logged; the coordinator then aborts the transaction after
        transaction_timeout_ms.
        """
        committing = self.manager.state is ManagerState.COMMITTING
        if not committing and not self.open and self.manager.state is not ManagerState.ABORTING:
            return
        if self.open:
            _log.warning(
                "%s: the producer is closed in a transaction, which is aborted",
                self.manager.transactional_id,
            )
        call = TransactionCall.COMMIT if committing else TransactionCall.ABORT
        try:
            await self.call(call, timeout_ms)
        except errors.PkError as cause:
            _log.warning("closing: %s", cause.message)

    async def close(self) -> None:
        """End the requests; calls that still wait raise `ClosedError`."""
        self._closed = True
        self._set_timer(None)
        for waiting in self._waiting.values():
            for each in waiting:
                if not each.done():
                    each.set_result(errors.ClosedError("the producer was closed"))
        await self._tasks.close()

    # -- the machine -------------------------------------------------------------------------------

    def _on_engine_step(self) -> None:
        """Report what the last step of the sender changed."""
        manager, engine = self.manager, self._engine
        if engine.sender.handed and not manager.handed:
            self._step(BatchHanded())
        if engine.sender.failed is not None and manager.committable:
            self._step(BatchFailed(engine.sender.failed))
        if manager.ending and engine.settled and not self._offsets.in_flight:
            self._step(BatchesSettled())

    def _step(self, event: TransactionEvent) -> None:
        """Step the machine and perform its effects (D1)."""
        self._events.append(event)
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._events and not self._closed:
                now_ms = self._world.clock.monotonic_ms()
                for effect in self.manager.step(self._events.popleft(), now_ms):
                    self._perform(effect)
        finally:
            self._stepping = False

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Send):
            self._tasks.spawn(self._ask(effect))
        elif isinstance(effect, Respond):
            for each in self._waiting.pop(effect.request, []):
                if not each.done():
                    each.set_result(effect.reply)
        elif isinstance(effect, SetTimer):
            self._set_timer(effect.at_ms)
        elif isinstance(effect, Publish):
            if effect.name == "begin":
                self._engine.begin_transaction(*effect.value)
            elif effect.name == "commit":
                self._engine.refuse(effect.value)
                self._engine.poke(flush=True)
            elif effect.name == "discard":
                self._engine.discard(effect.value)
            elif effect.name == "fatal":
                name, error = self.manager.transactional_id, effect.value
                _log.error("producer %s can send nothing more: %s", name, error.message)
                self._engine.step(ForceClose(effect.value))

    async def _ask(self, effect: Send) -> None:
        """Send one request, and hand the answer or the error to the machine (D3)."""
        answer: Message | errors.PkError
        timeout_ms = self._request_timeout_ms
        try:
            if effect.peer is None:
                answer = await self._cluster.call_any(effect.message, timeout_ms=timeout_ms)
            else:
                address = effect.peer.address
                answer = await self._cluster.call_at(address, effect.message, timeout_ms=timeout_ms)
        except errors.PkError as cause:
            _log.debug("%s: %s", effect.message.DESCRIPTOR.name, cause)
            answer = cause
        except Exception as bug:  # without an answer the machine would wait for ever
            _log.exception("%s", effect.message.DESCRIPTOR.name)
            answer = errors.InternalError(f"{effect.message.DESCRIPTOR.name}: {bug!r}")
        self._step(Replied(answer))

    def _set_timer(self, at_ms: int | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if at_ms is not None:
            wait_s = max(0.0, at_ms - self._world.clock.monotonic_ms()) / 1000
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(wait_s, self._step, RetryDue())
