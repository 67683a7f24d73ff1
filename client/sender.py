"""The producer's peer: which batch goes when to whom, and what each answer means.

A Machine: pieces, replies, breaks and metadata in; in-flight requests and results out.  It never
sees bytes: a shell encodes the batches of an `InFlightRequest` when it writes it, requests to one
broker in the order they were sent.

Per partition, batches without a sequence wait; batches with one are *unresolved* until acknowledged
or failed, in sequence order.  Re-sends go first, in order; new batches follow while they are at
most five from the oldest unresolved one on, which is as many as the broker remembers (KIP-98).

Idempotence (rule L6).  A failed batch that had a sequence leaves a *gap*: nothing new is sent; what
is in flight is awaited; batches whose earlier attempt may have been stored are asked for again
under their old sequence until the answer is definite; only then does the partition begin a new
epoch at sequence 0 and the rest is sent again in order (KIP-360).  A gap behind an acknowledged
batch means the broker lost it: fatal.

A partition whose leadership moved is not waited for at its old leader: what is in flight there is
unknown, and asked for again from the new one.  Should the old one still get to it, the leader epoch
that it was sent under refuses it.  Without idempotence the old leader has MOVED_GRACE_MS to answer.

Invariants
  N1  batches of a partition are appended in the order their pieces came (idempotent; else with one
      in flight).
  N2  a batch that may have been stored is never sent again under another sequence, and without
      idempotence never sent again at all (rule L7).
  N3  at most `max_in_flight` frames per broker that are not stuck (`Node.free_ms`); a partition has
      batches in flight to one broker only: the leader that the metadata names.
  N4  every piece is resolved: stored, failed, or DeliveryTimedOut after delivery_timeout_ms.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

from pk import errors, limits
from pk.backoff import Backoff, client_jitter, exponential_ms
from pk.client.metadata import Leader, Metadata
from pk.client.producer_batch import ProducerBatch
from pk.client.sender_events import (
    Add,
    Broken,
    Event,
    Fail,
    IdGranted,
    InFlightRequest,
    Replied,
    Result,
    SenderOptions,
    Wake,
    Written,
)
from pk.client.sender_state import NOT_STORED, OUT_OF_SIGHT, STALE, Node, Partition, ending, refusal
from pk.effects import Effect, Publish, Respond, Send, SetTimer
from pk.types import NONE, PartitionKey

EPOCH_MAX = 2**15 - 1
#: How long a deposed leader may still say what became of a batch that cannot be sent again.
MOVED_GRACE_MS = 1_000
#: The first back-off from a leader that does not know of its office yet.
EARLY_MS = 20
#: "Offer this partition once more": not a time.
_AGAIN = -1


class Sender:
    """The machine.  `metadata` is shared with the shell, which tells of changes by `Wake`."""

    def __init__(self, options: SenderOptions, metadata: Metadata, rng: random.Random) -> None:
        self.options = options
        self.metadata = metadata
        bounds_ms = (options.retry_backoff_ms, options.retry_backoff_max_ms)
        self._new_backoff = partial(Backoff, bounds_ms, client_jitter(rng))
        self._active: dict[PartitionKey, Partition] = {}  #: with anything to do, fair order
        self._idle: dict[PartitionKey, Partition] = {}  #: remembered for their sequences
        self._nodes: dict[int, Node] = {}
        self._flights: dict[int, InFlightRequest] = {}
        self._next_correlation = 1
        self.producer_id = NONE
        self.epoch = NONE
        self.granted = (NONE, NONE)  #: both, as they came last; replaced at once
        self._id_wanted = False
        self.fatal: errors.PkError | None = None
        self._flushing = False
        self._effects: list[Effect] = []
        self._timer: int | None = None
        self._steps: dict[type, Callable[..., None]] = {
            Add: self._on_add, Replied: self._on_replied, Broken: self._on_broken,
            Written: self._on_written, IdGranted: self._on_id, Fail: self._on_fail,
            Wake: self._on_wake,
        }  # fmt: skip

    @property
    def empty(self) -> bool:
        """Nothing waits and nothing is unresolved."""
        return not self._active

    def step(self, event: Event, now_ms: int) -> Sequence[Effect]:
        self._effects = []
        self._steps[type(event)](event, now_ms)
        if not isinstance(event, Add):  # pieces come in bursts, each burst is followed by a Wake
            if self._timer is not None and self._timer <= now_ms:
                self._timer = None
                self._expire(now_ms)  # every deadline is in the timer
            self._pump(now_ms)
        return self._effects

    # -- events ------------------------------------------------------------------------------------

    def _on_add(self, event: Add, now_ms: int) -> None:
        if self.fatal is not None:
            refused = ProducerBatch(event.topic, event.key, event.piece)
            self._respond(refused, Result(error=self.fatal))
            return
        partition = self._active.get(event.key)
        if partition is None:
            partition = self._idle.pop(event.key, None) or Partition(
                event.topic, event.key, event.batch_size, self._new_backoff()
            )
            self._active[event.key] = partition
        partition.batch_size = event.batch_size
        partition.add(event.piece)

    def _on_wake(self, event: Wake, now_ms: int) -> None:
        self._flushing = self._flushing or event.flush

    def _on_id(self, event: IdGranted, now_ms: int) -> None:
        self.producer_id, self.epoch = self.granted = event.producer_id, event.epoch
        self._id_wanted = False

    def _on_written(self, event: Written, now_ms: int) -> None:
        frame = self._flights.get(event.correlation_id)
        if frame is not None and self.options.acks == 0:
            for index in sorted(frame.open):
                self._settle(frame, Result(index), now_ms)
            self._close_frame(frame)

    def _on_replied(self, event: Replied, now_ms: int) -> None:
        frame = self._flights.get(event.correlation_id)
        if frame is None:
            return  # late: the frame was given up
        node = self._nodes[frame.node]
        node.backoff.reset()
        for result in event.results:
            if result.index in frame.open and self.fatal is None:
                self._settle(frame, result, now_ms)
        if not frame.open:
            self._close_frame(frame)

    def _on_broken(self, event: Broken, now_ms: int) -> None:
        node = self._nodes.get(event.node)
        if node is None:
            return
        node.retry_ms = now_ms + int(node.backoff.next_ms())
        self._want_metadata()
        for frame in list(node.frames.values()):
            for index in sorted(frame.open):
                batch = frame.batches[index]
                frame.open.discard(index)
                batch.flight = None
                if frame.correlation_id in event.unsent:
                    self._retry(batch, errors.BrokerUnavailable(event.error.message), now_ms)
                else:
                    self._unknown(batch, event.error, now_ms)
            self._close_frame(frame)

    def _on_fail(self, event: Fail, now_ms: int) -> None:
        self.fatal = event.error
        for partition in list(self._active.values()):
            for batch in [*partition.unresolved, *partition.waiting]:
                if not batch.expired:
                    self._respond(batch, Result(error=ending(batch, event.error)))
            partition.unresolved.clear()
            partition.waiting.clear()
        self._active.clear()
        self._idle.clear()
        for frame in list(self._flights.values()):
            self._close_frame(frame)

    # -- answers -----------------------------------------------------------------------------------

    def _settle(self, frame: InFlightRequest, result: Result, now_ms: int) -> None:
        batch = frame.batches[result.index]
        frame.open.discard(result.index)
        batch.flight = None
        partition = self._active[batch.key]
        error = result.error
        if error is None:
            self._stored(partition, batch, result)
        elif isinstance(error, errors.OutOfOrderSequence | errors.UnknownProducerId):
            batch.unknown = False  # the broker does not have it
            self._out_of_order(partition, batch, error, result.log_start, now_ms)
        elif isinstance(error, errors.InvalidProducerEpoch) and self.options.idempotent:
            batch.unknown = False
            self.producer_id = NONE  # this id is spoilt: begin with another
            self._keep_or_drop(partition, batch)
            partition.gap = True
        elif isinstance(error, NOT_STORED) and "appended" not in error.details:
            self._retry(batch, error, now_ms, frame.epochs[result.index])
        elif error.retriable:
            self._unknown(batch, error, now_ms)
        else:
            self._failed(partition, batch, refusal(batch, error))

    def _stored(self, partition: Partition, batch: ProducerBatch, result: Result) -> None:
        partition.unresolved.remove(batch)
        partition.backoff.reset()
        partition.retry_ms = 0
        partition.problem = None
        if batch.sequence != NONE and batch.epoch == partition.epoch:
            partition.acked_sequence = (batch.next_sequence - 1) & 0x7FFFFFFF
            partition.acked_offset = max(
                partition.acked_offset, result.base_offset + batch.count - 1
            )
        if not batch.expired:
            self._respond(batch, result)

    def _failed(self, partition: Partition, batch: ProducerBatch, error: errors.PkError) -> None:
        if batch in partition.unresolved:
            partition.unresolved.remove(batch)
            if batch.sequence != NONE:
                partition.gap = True
        else:
            partition.waiting.remove(batch)
        if not batch.expired:
            self._respond(batch, Result(error=error))

    def _keep_or_drop(self, partition: Partition, batch: ProducerBatch) -> None:
        """A batch that was not stored stays for its next attempt, unless its caller gave it up."""
        if batch.expired:
            self._failed(partition, batch, errors.DeliveryTimedOut())

    def _retry(
        self, batch: ProducerBatch, error: errors.PkError, now_ms: int, epoch: int = NONE
    ) -> None:
        """`batch` was not stored by this attempt, which was made under that leader epoch."""
        partition = self._active[batch.key]
        partition.problem = error
        if isinstance(error, STALE):
            self._want_metadata()
        loss = self.metadata.loss_of(batch.key)
        if loss is not None:
            self._failed(partition, batch, loss)
            return
        self._keep_or_drop(partition, batch)
        if partition.retry_ms > now_ms:
            return  # of the same round as one that failed before
        wait = int(partition.backoff.next_ms())
        leader = self.metadata.leader(batch.key)
        if isinstance(error, STALE) and leader is not None and epoch != NONE:
            # Who was asked was deposed: on to the next one; or it will hear soon that it leads.
            early = exponential_ms(EARLY_MS, wait, partition.backoff.attempts)
            wait = 0 if epoch < leader.epoch else early
        partition.retry_ms = now_ms + wait

    def _unknown(self, batch: ProducerBatch, error: errors.PkError, now_ms: int) -> None:
        """`batch` may have been stored."""
        partition = self._active[batch.key]
        if not self.options.idempotent:
            self._failed(
                partition, batch,
                errors.OutcomeUnknown(
                    f"{error.message}; it may have been stored, so it is not sent again"
                ),
            )  # fmt: skip
            return
        if not batch.unknown:
            batch.unknown, batch.unknown_epoch = True, batch.asked_epoch
        self._retry(batch, error, now_ms)

    def _out_of_order(
        self,
        partition: Partition,
        batch: ProducerBatch,
        error: errors.PkError,
        log_start: int,
        now_ms: int,
    ) -> None:
        first = partition.unresolved[0] is batch
        if first and not partition.gap:
            acked = partition.acked_sequence != NONE
            forgotten = isinstance(error, errors.UnknownProducerId) or (
                log_start > partition.acked_offset  # retention or delete-records took the rest
            )
            if acked and not forgotten:
                self._fatal(
                    errors.OutOfOrderSequence(
                        f"acknowledged records of {partition.topic}-{partition.key.partition} up "
                        f"to offset {partition.acked_offset} are no longer in the log (the broker "
                        f"lost them, for instance with its page cache): {error.message}",
                        topic=partition.topic, partition=str(partition.key.partition),
                    ),
                    now_ms,
                )  # fmt: skip
                return
            partition.gap = True
            if partition.backoff.attempts:  # the first gap is closed at once
                partition.retry_ms = now_ms + int(partition.backoff.wait_ms())
            partition.backoff.failed()
        self._keep_or_drop(partition, batch)

    # -- leaders -----------------------------------------------------------------------------------

    def _new_leader(self, partition: Partition, leader: Leader) -> None:
        """Whoever was just elected is alive: no back-off of before counts any more."""
        partition.leader = leader
        partition.retry_ms = 0
        partition.backoff.reset()
        node = self._nodes.get(leader.node)
        if node is not None:
            node.retry_ms = 0
            node.backoff.reset()

    def _leave(self, partition: Partition, leader: Leader, now_ms: int) -> int | None:
        """Do not wait for brokers that lead no more; a time = only from then on."""
        away = [
            (batch, frame)
            for batch in partition.unresolved
            if batch.flight is not None
            and (frame := self._flights[batch.flight]).node != leader.node
        ]
        if not away:
            partition.left_ms = None
            return None
        if partition.left_ms is None:
            partition.left_ms = now_ms
        patience_ms = 0 if self.options.idempotent else MOVED_GRACE_MS
        if now_ms < partition.left_ms + patience_ms:
            return partition.left_ms + patience_ms
        for batch, frame in away:
            frame.open.discard(frame.batches.index(batch))
            if not frame.open:
                self._close_frame(frame)
            batch.flight = None
            why = f"broker {frame.node} leads {partition.topic}-{partition.key.partition} no more"
            self._unknown(batch, errors.NotLeaderOrFollower(why), now_ms)
        partition.left_ms = None
        partition.retry_ms = 0
        partition.backoff.reset()
        return None

    def _fatal(self, error: errors.PkError, now_ms: int) -> None:
        self._on_fail(Fail(error), now_ms)

    # -- epochs ------------------------------------------------------------------------------------

    def _mend(self, partition: Partition) -> bool:
        """Close a gap if nothing is uncertain any more; True if the partition may send new
        sequences.
        """
        if not partition.gap:
            return True
        if partition.in_flight or any(batch.unknown for batch in partition.unresolved):
            return False
        if partition.producer_id == self.producer_id and partition.epoch < EPOCH_MAX:
            partition.epoch += 1
        else:
            if partition.producer_id == self.producer_id:
                self.producer_id = NONE
            if self.producer_id == NONE:
                self._want_id()
                return False
            partition.producer_id, partition.epoch = self.producer_id, self.epoch
        partition.gap = False
        partition.acked_sequence = NONE
        partition.sequence = 0
        for batch in partition.unresolved:
            self._number(partition, batch)
        return True

    def _number(self, partition: Partition, batch: ProducerBatch) -> None:
        batch.producer_id, batch.epoch = partition.producer_id, partition.epoch
        batch.sequence = partition.sequence
        batch.number = partition.number
        partition.sequence = batch.next_sequence
        partition.number += 1

    def _want_id(self) -> None:
        if not self._id_wanted:
            self._id_wanted = True
            self._effects.append(Publish("producer_id", None))

    def _want_metadata(self) -> None:
        self.metadata.want()
        self._effects.append(Publish("metadata", None))

    # -- time --------------------------------------------------------------------------------------

    def _node(self, node_id: int) -> Node:
        found = self._nodes.get(node_id)
        if found is None:
            found = self._nodes[node_id] = Node(self._new_backoff())
        return found

    def _expire(self, now_ms: int) -> None:
        for frame in list(self._flights.values()):
            if frame.deadline_ms <= now_ms:
                reason = f"no answer within {self.options.request_timeout_ms} ms"
                self._effects.append(Publish("reset", frame.node))
                self._on_broken(Broken(frame.node, errors.RequestTimedOut(reason)), now_ms)
        horizon = now_ms - self.options.delivery_timeout_ms
        for partition in list(self._active.values()):
            while partition.waiting and partition.waiting[0].created_ms <= horizon:
                self._failed(
                    partition,
                    partition.waiting[0],
                    self._timed_out(partition, "never sent"),
                )
            for batch in [b for b in partition.unresolved if b.created_ms <= horizon]:
                if batch.expired:
                    continue
                known = not batch.unknown and batch.flight is None
                error = self._timed_out(
                    partition, "not stored" if known else "it may have been stored"
                )
                if batch.flight is None:
                    self._failed(partition, batch, error)
                else:  # its frame is still out: keep the place in the sequence
                    batch.expired = True
                    self._respond(batch, Result(error=error))

    def _timed_out(self, partition: Partition, what: str) -> errors.DeliveryTimedOut:
        idless = self.options.idempotent and self.producer_id == NONE
        cause = partition.obstacle(self.metadata, idless=idless)
        error = errors.DeliveryTimedOut(
            f"{partition.topic}-{partition.key.partition}: no acknowledgement within "
            f"delivery_timeout_ms={self.options.delivery_timeout_ms}: {what}"
            + (f"; {cause}" if cause else "")
        )
        if cause:  # the cluster's own failure, and it lasts
            setattr(error, "acts", "operator")  # noqa: B010 - the class says what holds otherwise
        return error

    # -- sending -----------------------------------------------------------------------------------

    def _pump(self, now_ms: int) -> None:
        wake: int | None = None
        if self.options.idempotent and self.producer_id == NONE and self._active:
            self._want_id()
        candidates = list(self._active)
        while candidates:  # as often as there is room in another frame
            frames: dict[int, InFlightRequest] = {}
            used: dict[int, int] = {}
            again: list[PartitionKey] = []
            for key in candidates:
                partition = self._active[key]
                if partition.idle:
                    self._idle[key] = self._active.pop(key)
                    continue
                when = self._offer(partition, frames, used, now_ms)
                if when == _AGAIN:
                    again.append(key)
                elif when is not None and (wake is None or when < wake):
                    wake = when
            for frame in frames.values():
                self._launch(frame)
            candidates = again
        if self._flushing and not self._active:
            self._flushing = False
        self._set_timer(wake, now_ms)

    def _offer(
        self,
        partition: Partition,
        frames: dict[int, InFlightRequest],
        used: dict[int, int],
        now_ms: int,
    ) -> int | None:
        """Put the partition's next batch into its leader's frame; or say when to look again."""
        horizon = self._deadline(partition, now_ms)
        leader = self.metadata.leader(partition.key)
        if leader is not None and leader != partition.leader:
            self._new_leader(partition, leader)
        if partition.retry_ms > now_ms:
            return min(partition.retry_ms, horizon)
        if leader is None:
            loss = self.metadata.loss_of(partition.key)
            if loss is not None:
                self._lost(partition, loss)
                return None
            self._want_metadata()
            partition.retry_ms = now_ms + int(partition.backoff.next_ms())
            return min(partition.retry_ms, horizon)
        later = self._leave(partition, leader, now_ms)
        if later is not None:
            return min(later, horizon)  # N3
        node = self._node(leader.node)
        if node.retry_ms > now_ms:
            return min(node.retry_ms, horizon)
        frame = frames.get(leader.node)
        free_ms = node.free_ms(self.options)
        if frame is None and free_ms > now_ms:
            return min(free_ms, horizon)
        for gone in partition.out_of_sight(leader):
            self._failed(partition, gone, errors.OutcomeUnknown(OUT_OF_SIGHT))
        batch, later = self._next_batch(partition, now_ms)
        if batch is None:
            return horizon if later is None else min(later, horizon)
        if frame is None:
            frame = InFlightRequest(
                self._next_correlation,
                leader.node,
                [],
                [],
                now_ms + self.options.request_timeout_ms,
            )
            self._next_correlation += 1
            frames[leader.node] = frame
            used[leader.node] = 0
        elif used[leader.node] + batch.size > self.options.frame_bytes:
            return _AGAIN  # in the next frame
        used[leader.node] += batch.size
        self._enter(partition, frame, batch, leader.epoch)
        return _AGAIN

    def _next_batch(
        self, partition: Partition, now_ms: int
    ) -> tuple[ProducerBatch | None, int | None]:
        """The batch to send now, or None and when one will be ripe."""
        whole = self._mend(partition)
        for batch in partition.unresolved:
            if batch.flight is None and (whole or batch.unknown):
                return batch, None
            if not whole and batch.unknown:
                return None, None  # one question at a time
        if not whole or not self._room(partition):
            return None, None
        if self.options.idempotent and partition.producer_id == NONE:
            if self.producer_id == NONE:
                return None, None
            partition.producer_id, partition.epoch = self.producer_id, self.epoch
        ready_ms = partition.ready_ms()
        if ready_ms is None:
            return None, None
        if ready_ms > now_ms and not self._flushing:
            return None, ready_ms
        return partition.waiting[0], None

    def _room(self, partition: Partition) -> bool:
        """Whether one more batch may be numbered: the broker must still know the oldest unresolved
        one.
        """
        if not partition.unresolved:
            return True
        if not self.options.idempotent:
            return len(partition.unresolved) < self.options.max_in_flight
        return partition.number - partition.unresolved[0].number < limits.IN_FLIGHT_MAX

    def _enter(
        self, partition: Partition, frame: InFlightRequest, batch: ProducerBatch, epoch: int
    ) -> None:
        if partition.waiting and partition.waiting[0] is batch:
            partition.waiting.popleft()
            partition.unresolved.append(batch)
            if self.options.idempotent:
                self._number(partition, batch)
        batch.flight, batch.asked_epoch = frame.correlation_id, epoch
        self._flights[frame.correlation_id] = frame
        frame.open.add(len(frame.batches))
        frame.batches.append(batch)
        frame.epochs.append(epoch)

    def _launch(self, frame: InFlightRequest) -> None:
        self._nodes[frame.node].frames[frame.correlation_id] = frame
        self._effects.append(Send(frame.node, frame))
        for batch in frame.batches:  # fair: who was served goes to the end of the line
            self._active[batch.key] = self._active.pop(batch.key)

    def _lost(self, partition: Partition, loss: errors.PkError) -> None:
        for batch in [*partition.unresolved, *partition.waiting]:
            if batch.flight is None:
                self._failed(partition, batch, loss)

    def _deadline(self, partition: Partition, now_ms: int) -> int:
        """When the next thing of this partition expires."""
        oldest = now_ms
        for batch in partition.unresolved:
            if not batch.expired:
                oldest = min(oldest, batch.created_ms)
        if partition.waiting:
            oldest = min(oldest, partition.waiting[0].created_ms)
        return oldest + self.options.delivery_timeout_ms

    def _close_frame(self, frame: InFlightRequest) -> None:
        self._flights.pop(frame.correlation_id, None)
        self._nodes[frame.node].frames.pop(frame.correlation_id, None)

    def _respond(self, batch: ProducerBatch, result: Result) -> None:
        self._effects.append(Respond(batch, result))

    def _set_timer(self, wake: int | None, now_ms: int) -> None:
        for frame in self._flights.values():
            if wake is None or frame.deadline_ms < wake:
                wake = frame.deadline_ms
        if wake is not None:
            wake = max(wake, now_ms + 1)
        if wake != self._timer:
            self._timer = wake
            self._effects.append(SetTimer("sender", wake))
