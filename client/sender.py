"""The producer's state machine: which batch is sent when to which broker, and how responses count.

A Machine: record slices, responses, lost connections and metadata in; requests and outcomes out. It
never sees bytes.  A shell encodes the batches of an `InFlightRequest` when it writes the request,
and writes the requests to one broker in order.

Per partition, new batches wait without a sequence.  A batch with a sequence is *unresolved* until
it is acknowledged or failed; unresolved batches are kept in sequence order.  Re-sends go first, in
order.  New batches follow while at most five sequences are in use from the oldest unresolved batch
on, because the broker remembers five (KIP-98).

Idempotence (rule L6).  A failed batch that had a sequence leaves a *gap*.  The partition then sends
nothing new and waits for what is in flight.  Batches that an earlier attempt may have stored are
sent again under their old sequence until the answer is definite.  Only then does the partition
begin a new epoch at sequence 0, and the rest is sent again in order (KIP-360).  A gap behind an
acknowledged batch means that the broker lost that batch: a fatal error.

When the leadership of a partition moves, the producer does not wait for the old leader.  The
outcome of batches in flight there is unknown, and they are sent again to the new leader.  If the
old leader handles the request later, the request's leader epoch makes it refuse.  Without
idempotence the old leader has MOVED_GRACE_MS to answer.

Invariants
  N1  Batches of a partition are appended in the order their slices came.  Without idempotence this
      holds only with one request in flight.
  N2  A batch that may have been stored is never sent again under another sequence.  Without
      idempotence it is never sent again at all (rule L7).
  N3  At most `max_in_flight` requests per broker are in flight, stuck ones not counted
      (`_free_ms`).  A partition has batches in flight to one broker only: the leader that the
      metadata name.
  N4  Every slice is resolved: stored, failed, or DeliveryTimedOut after delivery_timeout_ms.
  N5  With a transactional id, each transaction has a pair (producer id, epoch) of its own, and the
      sender never changes it.  After the first batch that failed, no other batch of the transaction
      is sent (`_abandon`).
  N6  Partitions that fail in one step, equally often, are tried again in one step: a step looks at
      every partition with work.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from pk import errors, limits
from pk.backoff import CommonJitter, Retry, exponential_ms
from pk.client.endings import NOT_STORED, OUT_OF_SIGHT, STALE, perhaps_stored, refused_batch
from pk.client.metadata import LeaderAndEpoch, Metadata
from pk.client.producer_batch import (
    FAR_MS,
    InFlightRequest,
    PartitionBatches,
    PartitionResponse,
    ProducerBatch,
)
from pk.client.record_set import RecordSlice
from pk.client.sender_events import (
    BeginTransaction,
    ConnectionLost,
    FailTransaction,
    ForceClose,
    ProduceResponse,
    ProducerIdGranted,
    SenderEvent,
    Wakeup,
)
from pk.effects import Effect, Publish, Respond, Send, SetTimer
from pk.types import NONE, PartitionKey

EPOCH_MAX = 2**15 - 1
#: A leader or its coordinator knows a newer epoch of the producer.
FENCED = (errors.InvalidProducerEpoch, errors.ProducerFenced)
#: How long an old leader may still answer for a batch that cannot be sent again.
MOVED_GRACE_MS = 1_000
#: The first back-off from a leader that has not learned of its election yet.
EARLY_MS = 20
#: A request without an answer for this time is stuck: a replica of one of its partitions is down.
STUCK_MS = 500
#: `_offer` returns this for "offer this partition once more": it is not a time.
_AGAIN = -1

# -- the machine -----------------------------------------------------------------------------------


class Sender:
    """The machine.  `options` are resolved (settings.PRODUCER); the shell reports changes of
    `metadata` by `Wakeup`.
    """

    def __init__(self, options: Mapping[str, Any], metadata: Metadata, rng: random.Random) -> None:
        self.metadata = metadata
        self.fatal: errors.PkError | None = None
        self.granted = (NONE, NONE)  #: producer id and epoch as granted last; replaced as a whole
        self._idempotent: bool = options["enable_idempotence"]
        self._transactional = bool(options["transactional_id"])
        self.handed = False  #: a batch of the transaction was put into a request
        self.failed: errors.PkError | None = None  #: the first error of the transaction
        self._max_in_flight: int = options["max_in_flight"]
        self._request_timeout_ms: int = options["request_timeout_ms"]
        self._delivery_timeout_ms: int = options["delivery_timeout_ms"]
        bounds_ms = (options["retry_backoff_ms"], options["retry_backoff_max_ms"])
        self._jitter = CommonJitter(rng)  #: of the partitions that fail in one step (N6)
        self._new_retry = partial(Retry, bounds_ms, self._jitter)
        #: partitions with work, in fair order
        self._active: dict[PartitionKey, PartitionBatches] = {}
        #: partitions without work, kept for their sequences
        self._idle: dict[PartitionKey, PartitionBatches] = {}
        self._nodes: defaultdict[int, Retry] = defaultdict(self._new_retry)  #: brokers
        self._in_flight: dict[int, InFlightRequest] = {}  #: by correlation id, oldest first
        self._next_correlation = 1
        self._producer_id, self._epoch = NONE, NONE
        self._id_wanted = False
        self._flushing = False
        self._effects: list[Effect] = []
        self._timer: int | None = None
        self._steps: dict[type, Callable[..., None]] = {
            ProduceResponse: self._on_response, ConnectionLost: self._on_lost,
            ProducerIdGranted: self._on_producer_id, BeginTransaction: self._on_begin,
            FailTransaction: self._on_fail, ForceClose: self._on_close, Wakeup: self._on_wakeup,
        }  # fmt: skip

    @property
    def requests_in_flight(self) -> int:
        return len(self._in_flight)

    def step(self, event: SenderEvent, now_ms: int) -> Sequence[Effect]:
        """Handle `event`; returns the effects that the shell performs in order."""
        self._effects = []
        self._jitter.renew()
        self._steps[type(event)](event, now_ms)
        if self._timer is not None and self._timer <= now_ms:
            self._timer = None
            self._expire(now_ms)  # the timer covers every deadline
        self._pump(now_ms)
        return self._effects

    def append(self, key: PartitionKey, records: RecordSlice, batch_size: int) -> None:
        """Take a slice for a partition whose batches have at most `batch_size` bytes.

        It is sent by a later step: slices come in bursts, and each burst ends with a Wakeup.
        """
        assert self.fatal is None
        found = self._active.get(key)
        if found is None:
            found = self._idle.pop(key, None) or PartitionBatches(
                records.records.topic, key, self._new_retry()
            )
            self._active[key] = found
        found.add(records, batch_size)

    # -- events ------------------------------------------------------------------------------------

    def _on_wakeup(self, event: Wakeup, now_ms: int) -> None:
        self._flushing = self._flushing or event.flush

    def _on_producer_id(self, event: ProducerIdGranted, now_ms: int) -> None:
        self._producer_id, self._epoch = self.granted = event.producer_id, event.epoch
        self._id_wanted = False

    def _on_begin(self, event: BeginTransaction, now_ms: int) -> None:
        assert self.idle, "the transaction before has ended"
        self._producer_id, self._epoch = self.granted = event.producer_id, event.epoch
        self.handed, self.failed = False, None

    def _on_fail(self, event: FailTransaction, now_ms: int) -> None:
        self.failed = self.failed or event.error

    @property
    def idle(self) -> bool:
        """Whether every batch has an outcome, and none waits for an answer."""
        return all(partition.idle for partition in self._active.values())

    def _on_response(self, event: ProduceResponse, now_ms: int) -> None:
        request = self._in_flight.get(event.correlation_id)
        if request is None:
            return  # the request was given up before this response
        self._nodes[request.node].reset()
        for response in event.partitions:
            at = response.index
            batch = request.batches[at] if 0 <= at < len(request.batches) else None
            if batch is not None and batch.request is request and self.fatal is None:
                self._settle(batch, response, now_ms)

    def _on_lost(self, event: ConnectionLost, now_ms: int) -> None:
        self._nodes[event.node].postpone(now_ms)
        self._want_metadata()
        for request in [each for each in self._in_flight.values() if each.node == event.node]:
            for batch in [each for each in request.batches if each.request is request]:
                self._take_back(batch)
                if request.correlation_id in event.unsent:
                    self._retry(batch, errors.BrokerUnavailable(event.error.message), now_ms)
                else:
                    self._unknown(batch, event.error, now_ms)

    def _on_close(self, event: ForceClose, now_ms: int) -> None:
        self.fatal = event.error
        for partition in self._active.values():
            for batch in [*partition.unresolved, *partition.waiting]:
                sent = batch.request is not None or batch.unknown
                error = perhaps_stored(event.error) if sent else event.error
                self._respond(batch, PartitionResponse(error=error))
        for known in (self._active, self._idle, self._in_flight):
            known.clear()

    # -- answers -----------------------------------------------------------------------------------

    def _take_back(self, batch: ProducerBatch) -> InFlightRequest:
        """Take `batch` out of its request; a request without batches is closed."""
        request, batch.request = batch.request, None
        assert request is not None
        request.open -= 1
        if not request.open:
            self._in_flight.pop(request.correlation_id, None)
        return request

    def _settle(self, batch: ProducerBatch, response: PartitionResponse, now_ms: int) -> None:
        """Handle a broker's response for a batch."""
        self._take_back(batch)
        partition, error = batch.partition, response.error
        if error is None:
            partition.acknowledge(batch, response.base_offset)
            self._respond(batch, response)
        elif isinstance(error, errors.OutOfOrderSequence | errors.UnknownProducerId):
            batch.unknown_epoch = None  # the broker does not have this batch
            self._out_of_order(batch, error, response.log_start, now_ms)
        elif isinstance(error, FENCED) and self._transactional:
            self._failed(batch, error)
        elif isinstance(error, errors.InvalidProducerEpoch) and self._idempotent:
            batch.unknown_epoch = None
            self._producer_id = NONE  # this producer id is unusable: request another
            self._keep_or_drop(batch)
            partition.gap = True
        elif isinstance(error, NOT_STORED) and "appended" not in error.details:
            self._retry(batch, error, now_ms, batch.asked_epoch)
        elif error.retriable:
            self._unknown(batch, error, now_ms)
        else:
            self._failed(batch, refused_batch(error, unknown=batch.unknown))

    def _failed(self, batch: ProducerBatch, error: errors.PkError) -> None:
        batch.partition.remove(batch)
        self._respond(batch, PartitionResponse(error=error))

    def _keep_or_drop(self, batch: ProducerBatch) -> None:
        """Keep a batch that was not stored for its next attempt, unless its futures timed out
        already.
        """
        if batch.expired:
            batch.partition.remove(batch)

    def _retry(
        self, batch: ProducerBatch, error: errors.PkError, now_ms: int, epoch: int = NONE
    ) -> None:
        """Schedule another attempt for `batch`, which the attempt under leader epoch `epoch` did
        not store.
        """
        partition = batch.partition
        partition.problem = error
        if isinstance(error, STALE):
            self._want_metadata()
        loss = self.metadata.loss_of(partition.key)
        if loss is not None:
            self._failed(batch, loss)
            return
        self._keep_or_drop(batch)
        retry = partition.retry
        if retry.at_ms > now_ms:
            return  # another batch of the same request has backed off already
        wait = int(retry.next_ms())
        leader = self.metadata.leader(partition.key)
        if isinstance(error, STALE) and leader is not None and epoch != NONE:
            # Another leader was elected already, or this broker learns of its own election soon.
            early = exponential_ms(EARLY_MS, wait, retry.attempts)
            wait = 0 if epoch < leader.epoch else early
        retry.at_ms = now_ms + wait

    def _unknown(self, batch: ProducerBatch, error: errors.PkError, now_ms: int) -> None:
        """Handle an attempt that may have stored `batch`: send it again if idempotent, otherwise
        fail it.
        """
        if not self._idempotent:
            message = f"{error.message}; it may have been stored, so it is not sent again"
            self._failed(batch, errors.OutcomeUnknown(message))
            return
        if not batch.unknown:
            batch.unknown_epoch = batch.asked_epoch
        self._retry(batch, error, now_ms)

    def _out_of_order(
        self, batch: ProducerBatch, error: errors.PkError, log_start: int, now_ms: int
    ) -> None:
        """Handle the refusal of a broker that lacks the batch before `batch`.

        If the earlier batch was acknowledged, the broker has lost it (rule L6).
        """
        partition = batch.partition
        if partition.unresolved[0] is batch and not partition.gap:
            if self._transactional:  # N5
                self._failed(batch, error)
                return
            forgotten = isinstance(error, errors.UnknownProducerId) or (
                # retention or delete-records removed the earlier batches
                log_start > partition.acked_offset
            )
            if partition.acked and not forgotten:
                lost = errors.OutOfOrderSequence(
                    f"acknowledged records of {partition} up to offset {partition.acked_offset} "
                    "are no longer in the log (the broker lost them, for instance with its page "
                    f"cache): {error.message}",
                    topic=partition.topic, partition=str(partition.key.partition),
                )  # fmt: skip
                self._on_close(ForceClose(lost), now_ms)
                return
            partition.gap = True
            retry = partition.retry
            if retry.attempts:  # the first gap is closed immediately
                retry.at_ms = now_ms + int(retry.wait_ms())
            retry.failed()
        self._keep_or_drop(batch)

    def _respond(self, batch: ProducerBatch, response: PartitionResponse) -> None:
        if not batch.expired:  # otherwise its futures have an outcome already
            self._effects.append(Respond(batch, response))
            if response.error is not None and self._transactional:
                self.failed = self.failed or response.error

    def _abandon(self) -> None:
        """Fail every batch of the failed transaction that is in no request, and those in a request
        to a broker that leads the partition no more.  A leader refuses them once the transaction is
        aborted (X1).
        """
        assert self.failed is not None
        error: errors.PkError = self.failed
        if not isinstance(error, errors.TransactionAborted):
            error = errors.TransactionAborted(
                f"another record of the transaction failed: {error.message}; call abort_transaction"
            )
        for partition in self._active.values():
            leader = self.metadata.leader(partition.key)
            for batch in [*partition.unresolved, *partition.waiting]:
                if batch.request is not None and leader is not None:
                    if batch.request.node == leader.node:
                        continue
                    self._take_back(batch)
                if batch.request is None:
                    self._failed(batch, error)

    # -- leaders and epochs ------------------------------------------------------------------------

    def _leave(self, partition: PartitionBatches, leader: LeaderAndEpoch, now_ms: int) -> int:
        """Take batches back from brokers that are no longer the leader.

        Without idempotence the sender first waits for the responses of these brokers.  Returns the
        time at which this wait ends.
        """
        away = [
            batch
            for batch in partition.unresolved
            if batch.request is not None and batch.request.node != leader.node
        ]
        if not away:
            partition.left_ms = None
            return now_ms
        if partition.left_ms is None:
            partition.left_ms = now_ms
        until_ms = partition.left_ms + (0 if self._idempotent else MOVED_GRACE_MS)
        if now_ms < until_ms:
            return until_ms
        for batch in away:
            why = f"broker {self._take_back(batch).node} leads {partition} no more"
            self._unknown(batch, errors.NotLeaderOrFollower(why), now_ms)
        partition.left_ms = None
        partition.retry.reset()
        return now_ms

    def _mend(self, partition: PartitionBatches) -> bool:
        """Close a gap once the outcome of every earlier attempt is known.

        Returns whether the partition may send batches with new sequences.
        """
        if not partition.gap:
            return True
        if self._transactional:  # N5
            return False
        if any(batch.request is not None or batch.unknown for batch in partition.unresolved):
            return False
        if partition.producer_id == self._producer_id and partition.epoch < EPOCH_MAX:
            partition.begin_epoch(partition.producer_id, partition.epoch + 1)
            return True
        if partition.producer_id == self._producer_id:
            self._producer_id = NONE
        if self._producer_id == NONE:
            self._want_id()
            return False
        partition.begin_epoch(self._producer_id, self._epoch)
        return True

    def _want_id(self) -> None:
        if not self._id_wanted:
            self._id_wanted = True
            self._effects.append(Publish("producer_id", None))

    def _want_metadata(self) -> None:
        self.metadata.want()
        self._effects.append(Publish("metadata", None))

    # -- time --------------------------------------------------------------------------------------

    def _expire(self, now_ms: int) -> None:
        for request in list(self._in_flight.values()):
            if request.deadline_ms <= now_ms:
                self._effects.append(Publish("reset", request.node))
                error = errors.RequestTimedOut(f"no answer within {self._request_timeout_ms} ms")
                self._on_lost(ConnectionLost(request.node, error), now_ms)
        horizon = now_ms - self._delivery_timeout_ms
        for partition in list(self._active.values()):
            while partition.waiting and partition.waiting[0].created_ms <= horizon:
                late = self._timed_out(partition, "never sent")
                self._failed(partition.waiting[0], late)
            for batch in [
                b for b in partition.unresolved if b.created_ms <= horizon and not b.expired
            ]:
                known = batch.request is None and not batch.unknown
                what = "not stored" if known else "it may have been stored"
                self._respond(batch, PartitionResponse(error=self._timed_out(partition, what)))
                batch.expired = True
                if batch.request is None:
                    partition.remove(batch)  # a batch in flight keeps its place in the sequence

    def _timed_out(self, partition: PartitionBatches, what: str) -> errors.DeliveryTimedOut:
        cause = ""  # what an operator must mend
        if self.metadata.leader(partition.key) is None:
            cause = "; " + self.metadata.without_leader("the partition", partition.key)
        elif self._idempotent and self._producer_id == NONE:
            cause = "; no producer id could be had from the broker"
        elif partition.problem is not None:
            cause = f"; the last attempt: {partition.problem.message}"
        error = errors.DeliveryTimedOut(
            f"{partition}: no acknowledgement within "
            f"delivery_timeout_ms={self._delivery_timeout_ms}: {what}{cause}"
        )
        if cause:  # a lasting failure of the cluster
            setattr(error, "acts", "operator")  # noqa: B010 - differs from the class's default
        return error

    def _free_ms(self, node: int) -> int:
        """Return when another request may be sent to a broker; 0 = now.

        A stuck request does not count.  Otherwise a partition with a stopped replica would use up
        all places, and all other partitions of the broker would wait for it.  The number of stuck
        requests is bounded by the batches that a partition may have in flight.
        """
        deadlines = [r.deadline_ms for r in self._in_flight.values() if r.node == node]
        if len(deadlines) < self._max_in_flight:
            return 0
        return deadlines[-self._max_in_flight] - self._request_timeout_ms + STUCK_MS

    def _set_timer(self, wake: int, now_ms: int) -> None:
        wake = min([wake, *(request.deadline_ms for request in self._in_flight.values())])
        at_ms = None if wake == FAR_MS else max(wake, now_ms + 1)
        if at_ms != self._timer:
            self._timer = at_ms
            self._effects.append(SetTimer("sender", at_ms))

    # -- sending -----------------------------------------------------------------------------------

    def _pump(self, now_ms: int) -> None:
        """Send every batch that may be sent, and set the timer for the others."""
        wake = FAR_MS
        if self.failed is not None:
            self._abandon()
        if self._idempotent and self._producer_id == NONE and self._active:
            self._want_id()
        candidates = list(self._active)
        while candidates:  # again while there is room in another request
            requests: dict[int, InFlightRequest] = {}
            again: list[PartitionKey] = []
            for key in candidates:
                partition = self._active[key]
                if partition.idle:
                    self._idle[key] = self._active.pop(key)
                    continue
                when = self._offer(partition, requests, now_ms)
                if when == _AGAIN:
                    again.append(key)
                else:
                    wake = min(wake, when, partition.created_ms() + self._delivery_timeout_ms)
            for request in requests.values():
                self._effects.append(Send(request.node, request))
                for batch in request.batches:  # fair: a served partition moves to the end
                    key = batch.partition.key
                    self._active[key] = self._active.pop(key)
            candidates = again
        self._flushing = self._flushing and bool(self._active)
        self._set_timer(wake, now_ms)

    def _offer(
        self, partition: PartitionBatches, requests: dict[int, InFlightRequest], now_ms: int
    ) -> int:
        """Put the next batch of a partition into the request to its leader, or return when to try
        again.
        """
        leader = self.metadata.leader(partition.key)
        if leader is not None and leader != partition.leader:
            # The new leader is alive: back-off from before its election no longer counts.
            partition.leader = leader
            partition.retry.reset()
            self._nodes[leader.node].reset()
        if partition.retry.at_ms > now_ms:
            return partition.retry.at_ms
        if leader is None:
            return self._without_leader(partition, now_ms)
        if partition.unresolved:
            if partition.in_flight_to(leader.node):
                partition.left_ms = None
                return FAR_MS  # a response comes next
            later = self._leave(partition, leader, now_ms)
            if later > now_ms:
                return later  # N3
        else:
            partition.left_ms = None
        node = self._nodes[leader.node]
        request = requests.get(leader.node)
        free_ms = 0 if request is not None else self._free_ms(leader.node)
        if max(node.at_ms, free_ms) > now_ms:
            return node.at_ms if node.at_ms > now_ms else free_ms
        for gone in partition.out_of_sight(leader):
            self._failed(gone, errors.OutcomeUnknown(OUT_OF_SIGHT))
        batch, later = self._next_batch(partition, now_ms)
        if batch is None:
            return later
        if request is None:
            request = InFlightRequest(
                self._next_correlation, leader.node, now_ms + self._request_timeout_ms
            )
            self._next_correlation += 1
            self._in_flight[request.correlation_id] = requests[leader.node] = request
        elif (
            request.size + batch.size > limits.FRAME_BYTES
            or len(request.batches) == limits.PRODUCE_BATCHES_MAX
        ):
            return _AGAIN  # the batch goes into the next request
        if partition.waiting and partition.waiting[0] is batch:
            partition.unresolved.append(partition.waiting.popleft())
            if self._idempotent:
                partition.number_batch(batch)
        request.add(batch, leader.epoch)
        self.handed = True
        # A response comes next, if no other batch waits.
        return FAR_MS if partition.in_flight_to(leader.node) else _AGAIN

    def _without_leader(self, partition: PartitionBatches, now_ms: int) -> int:
        loss = self.metadata.loss_of(partition.key)
        if loss is None:
            self._want_metadata()
            partition.retry.postpone(now_ms)
            return partition.retry.at_ms
        for batch in [*partition.unresolved, *partition.waiting]:
            if batch.request is None:
                self._failed(batch, loss)
        return FAR_MS

    def _next_batch(
        self, partition: PartitionBatches, now_ms: int
    ) -> tuple[ProducerBatch | None, int]:
        """Return the next batch to send.  If none is ready, return when one will be."""
        if self._transactional and partition.pair != self.granted:
            partition.begin_epoch(*self.granted)  # N5; all batches before have an outcome
        whole = self._mend(partition)
        for batch in partition.unresolved:
            if batch.request is None and (whole or batch.unknown):
                return batch, now_ms
            if not whole and batch.unknown:
                return None, FAR_MS  # one uncertain batch at a time
        limit = limits.IN_FLIGHT_MAX if self._idempotent else self._max_in_flight
        if not whole or not partition.waiting or partition.numbered >= limit:
            return None, FAR_MS
        if self._idempotent and partition.producer_id == NONE:
            if self._producer_id == NONE:
                return None, FAR_MS
            partition.producer_id, partition.epoch = self._producer_id, self._epoch
        ready_ms = partition.ready_ms()
        if ready_ms > now_ms and not self._flushing:
            return None, ready_ms
        return partition.waiting[0], now_ms
