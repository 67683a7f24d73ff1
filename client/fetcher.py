"""The state of a consumer's partitions: positions, fetch requests to each broker, and their
responses.

A Machine.  A position is set once on a broker's fetch stream.  The broker then sends data and
advances the position by itself while it has credit (rule P4).  Every setting gets a new
`position_id`, and a frame with an older id is dropped.  Data from before a seek, a pause or a
change of leader is therefore never delivered after it.

A partition goes through these states.  It returns to an earlier state when a broker refuses the
position:

    unknown topic → no offset → no leader → set on a node

After an error the partition waits for a back-off before its next attempt.

Invariants
  F1  Offsets are delivered in order, each once, from the position on.  A frame is accepted only if
      its position id is that of the partition's last setting.  An accepted frame moves the frontier
      to the frame's next_offset (rule L12); offsets are never counted.
  F2  The bytes delivered and not consumed, plus the credit at the broker, are at most
      fetch_buffer_bytes per broker.  One batch larger than that is delivered alone.
  F3  An offset that is out of range is reset by policy, or reported once.  It is never skipped in
      silence.
  F4  Data, the answer to an offset look-up, and an error carry the id of the position that they
      concern.  They are void once the partition has another position: a seek or a new assignment
      invalidates everything before it.  Only the error for a deleted or re-created topic (rule L8)
      carries the id of the assignment, because a seek chooses an offset and not another log.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from pk import errors
from pk.backoff import Backoff, client_jitter, exponential_ms
from pk.client.fetch_state import AssignedPartition, NodeSession
from pk.client.fetcher_events import (
    Assign,
    CompletedFetch,
    Consumed,
    FetchedPartition,
    FetcherEvent,
    FetcherOptions,
    FetchError,
    FetchPosition,
    FetchRequestData,
    OffsetFound,
    OffsetWanted,
    Pause,
    Refresh,
    Seek,
    StreamClosed,
)
from pk.client.metadata import LeaderAndEpoch, Metadata
from pk.client.offsets import EARLIEST, LATEST
from pk.effects import Effect, Publish, Send, SetTimer
from pk.log import batch as batches
from pk.types import NONE, PartitionKey, TopicPartition

#: The first back-off from a newly elected leader, which soon catches up or learns of its election.
EARLY_MS = 20
_JUST_ELECTED = (
    errors.OffsetNotAvailable, errors.UnknownLeaderEpoch, errors.FencedLeaderEpoch,
    errors.NotLeaderOrFollower,
)  # fmt: skip

_LENGTH = struct.Struct("<i")  # a field of a batch header, at byte 8


class Fetcher:
    """The machine.  It shares `metadata` with its shell, which sends a `Refresh` after each
    change.
    """

    def __init__(self, options: FetcherOptions, metadata: Metadata, rng: random.Random) -> None:
        self.options = options
        self.metadata = metadata
        bounds_ms = (options.retry_backoff_ms, options.retry_backoff_max_ms)
        self._new_backoff = partial(Backoff, bounds_ms, client_jitter(rng))
        self._partitions: dict[TopicPartition, AssignedPartition] = {}
        self._by_key: dict[PartitionKey, AssignedPartition] = {}
        self._sessions: dict[int, NodeSession] = {}
        self._next_id = 0  #: the last id given to an assignment, position or setting
        self.paused: frozenset[TopicPartition] = frozenset()  #: replaced as a whole, never modified
        #: partitions whose position is not set on a stream
        self._todo: dict[TopicPartition, None] = {}
        self._effects: list[Effect] = []
        self._timer: int | None = None
        self._steps: dict[type, Callable[..., None]] = {
            Assign: self._on_assign, Seek: self._on_seek, Pause: self._on_pause,
            FetchedPartition: self._on_fetched_partition, StreamClosed: self._on_stream_closed,
            Consumed: self._on_consumed, OffsetFound: self._on_offset, Refresh: self._on_refresh,
        }  # fmt: skip

    # -- look-ups ----------------------------------------------------------------------------------

    @property
    def assignment(self) -> list[TopicPartition]:
        return list(self._partitions)

    def readable_end(self, place: TopicPartition, *, committed: bool) -> int | None:
        """Return the last readable offset that a fetch named; None = not known.  Safe in any
        thread.
        """
        state = self._partitions.get(place)
        if state is None:
            return None
        end = state.last_stable_offset if committed else state.high_watermark
        return None if end < 0 else end

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes that were fetched and not consumed yet.  Safe in any thread."""
        return sum(session.buffered for session in list(self._sessions.values()))

    def position_id(self, place: TopicPartition) -> int | None:
        """Return the current position id; data with an older id is void (F4).  Safe in any
        thread.
        """
        state = self._partitions.get(place)
        return None if state is None else state.position_id

    def keys_of(
        self, position_ids: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, PartitionKey | None]:
        """Return the partitions with the topic ids under which these positions were set; None = no
        metadata of the topic have come yet.

        A position of a topic that was deleted or created again meanwhile is absent (rule L8).
        """
        found: dict[TopicPartition, PartitionKey | None] = {}
        for place, position_id in position_ids.items():
            state = self._partitions.get(place)
            if state is None or position_id < state.bound_id:
                continue
            if state.key is not None or state.bound_id == state.assigned_id:
                found[place] = state.key
        return found

    def stands(self, told: FetchError) -> bool:
        """Return whether an error is still valid and must be reported (F4).  Safe in any thread."""
        if told.place is None:
            return True
        state = self._partitions.get(told.place)
        return state is not None and told.about in (state.position_id, state.assigned_id)

    def well_supplied(self, node: int) -> bool:
        """Return whether the broker has credit for half the buffer, so that returning credit can
        wait.  Safe in any thread that has consumed everything that arrived; later data is consumed
        later.
        """
        session = self._sessions.get(node)
        return session is not None and session.credit * 2 >= self.options.buffer_bytes

    def frontier(self, place: TopicPartition) -> int | None:
        state = self._partitions.get(place)
        return None if state is None else state.next

    # -- events ------------------------------------------------------------------------------------

    def step(self, event: FetcherEvent, now_ms: int) -> Sequence[Effect]:
        self._effects = []
        self._steps[type(event)](event, now_ms)
        self._pump(now_ms)
        return self._effects

    def _on_refresh(self, event: Refresh, now_ms: int) -> None:
        self._timer = None
        for state in self._partitions.values():  # leaders may have changed, topics may be deleted
            if state.node is not None and state.key is not None:
                leader = self.metadata.leader(state.key)
                gone = self.metadata.loss_of(state.key) is not None
                if gone or (leader is not None and leader.node != state.node):
                    self._unset(state)

    def _on_assign(self, event: Assign, now_ms: int) -> None:
        for place, state in list(self._partitions.items()):
            wanted = event.keys.get(place)
            if place in event.places and wanted in (None, state.key):
                continue
            del self._partitions[place]
            self._unset(state)
            self._todo.pop(place, None)
            if state.key is not None:
                self._by_key.pop(state.key, None)
        for place, start in event.places.items():
            if place in self._partitions:
                continue
            state = self._partitions[place] = AssignedPartition(
                place, self._new_id(), self._new_backoff()
            )
            self._bind(state, event.keys.get(place))
            self._place(state, start)
        self._note_paused()

    def _on_seek(self, event: Seek, now_ms: int) -> None:
        state = self._partitions.get(event.place)
        if state is None:
            raise errors.InvalidRequest(f"{event.place} is not assigned to this consumer")
        self._unset(state)
        state.retry_ms = 0
        state.backoff.reset()
        self._place(state, event.offset)

    def _bind(self, state: AssignedPartition, key: PartitionKey | None) -> None:
        state.key = key
        if key is not None:
            self._by_key[key] = state

    def _place(self, state: AssignedPartition, start: int | None) -> None:
        """Start at a new position and invalidate everything that is in progress."""
        state.position_id = self._new_id()
        state.halted = state.asking = False
        state.failing_ms = None
        state.fetched_epoch = NONE
        state.next = start if start is not None and start >= 0 else None
        state.special = start if start is not None and start < 0 else None
        self._todo[state.place] = None

    def _on_pause(self, event: Pause, now_ms: int) -> None:
        for place in event.places:  # pause all of them, or none
            if place not in self._partitions:
                raise errors.InvalidRequest(f"{place} is not assigned to this consumer")
        for place in event.places:
            state = self._partitions[place]
            if event.paused and not state.paused:
                state.paused = True
                self._unset(state)
            elif state.paused and not event.paused:
                state.paused = False
                self._todo[place] = None
        self._note_paused()

    def _note_paused(self) -> None:
        self.paused = frozenset(
            [place for place, state in self._partitions.items() if state.paused]
        )

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _on_stream_closed(self, event: StreamClosed, now_ms: int) -> None:
        session = self._sessions.get(event.node)
        if session is None:
            return
        session.live = False
        session.credit = session.returned = 0
        session.ask = FetchRequestData()
        session.retry_ms = now_ms + int(session.backoff.next_ms())
        self._want_metadata()
        for state in self._partitions.values():
            if state.node == event.node:
                state.node = None
                self._todo[state.place] = None

    def _on_consumed(self, event: Consumed, now_ms: int) -> None:
        if not event.size:
            return  # a looked-up position did not come from a stream
        session = self._sessions[event.node]
        session.buffered -= event.size
        assert session.buffered >= 0, session.buffered
        self._give_back(session, event.size)

    def _give_back(self, session: NodeSession, size: int) -> None:
        """Note that `size` bytes of the buffer are free, and grant them to the broker in
        portions.
        """
        if not session.live:
            return
        session.returned += size
        if session.credit <= 0 or session.returned >= self.options.buffer_bytes // 4:
            session.ask.credit += session.returned
            session.credit += session.returned
            session.returned = 0

    # -- frames ------------------------------------------------------------------------------------

    def _on_fetched_partition(self, event: FetchedPartition, now_ms: int) -> None:
        session = self._sessions[event.node]
        session.backoff.reset()
        size = len(event.payload)
        session.credit -= size
        state = self._by_key.get(event.key)
        if state is None or state.node != event.node or state.set_id != event.position_id:
            self._give_back(session, size)  # from before a seek, pause or change of leader
            return
        assert state.next is not None
        if event.error is not None:
            self._give_back(session, size)
            state.node = None  # the broker removes the position after an error
            self._todo[state.place] = None
            self._refused(state, event.error, event.log_start, now_ms)
            return
        if event.diverging is not None:
            self._give_back(session, size)
            state.node = None
            self._truncated(state, *event.diverging)
            return
        state.backoff.reset()
        state.failing_ms = None
        state.high_watermark = event.high_watermark
        state.last_stable_offset = event.last_stable_offset
        position, state.next = state.next, max(state.next, event.next_offset)
        if size or state.next > position:
            state.fetched_epoch = last_epoch(event.payload, state.next)
        session.buffered += size
        fetched = CompletedFetch(
            state.place, state.position_id, event.node, event.payload, position, state.next,
            event.aborted, event.high_watermark, event.last_stable_offset, event.dense,
        )  # fmt: skip
        self._effects.append(Publish("data", fetched))

    def _refused(
        self, state: AssignedPartition, error: errors.PkError, log_start: int, now_ms: int
    ) -> None:
        """Handle an error that a broker returned for a position: reset, report, or retry later."""
        if isinstance(error, errors.OffsetOutOfRange):
            self._out_of_range(state, error)
            return
        if isinstance(error, errors.DataLoss) and state.next is not None:
            self._lost(state, error)
            return
        wait = int(state.backoff.next_ms())
        if isinstance(error, _JUST_ELECTED):
            wait = exponential_ms(EARLY_MS, wait, state.backoff.attempts)
        state.retry_ms = now_ms + wait
        if isinstance(error, errors.OffsetNotAvailable | errors.UnknownLeaderEpoch):
            self._want_metadata()
            return  # a new leader is catching up: wait, never reset (KIP-207)
        if error.retriable or isinstance(error, errors.UnknownTopicId):
            self._want_metadata()
            if self._lasts(state, now_ms):
                self._report(state, error)
            return
        state.retry_ms = now_ms + self.options.retry_backoff_max_ms
        self._report(state, error)

    def _lost(self, state: AssignedPartition, error: errors.DataLoss) -> None:
        """Report a loss once, in order behind the data that was fetched before it (rule L9).

        The reader then seeks past the lost range.
        """
        assert state.next is not None
        state.halted = True
        state.backoff.reset()
        lost = CompletedFetch(
            state.place, state.position_id, NONE, memoryview(b""), state.next, state.next, (), NONE,
            NONE, loss=error,
        )  # fmt: skip
        self._effects.append(Publish("data", lost))

    def _out_of_range(self, state: AssignedPartition, error: errors.PkError) -> None:
        policy = self.options.auto_offset_reset
        if policy == "none":
            state.halted = True
            self._report(
                state,
                errors.NoOffsetForPartition(
                    f"{state.place}: position {state.next} is out of range ({error.message}) and "
                    "auto_offset_reset is none: seek, or choose earliest or latest",
                    **error.details,
                ),
            )
            return
        self._effects.append(Publish("reset", (state.place, state.next, policy, error.message)))
        state.next = None  # the position id stays: data fetched before the reset is still valid
        state.special = EARLIEST if policy == "earliest" else LATEST
        state.fetched_epoch = NONE

    def _truncated(self, state: AssignedPartition, epoch: int, end_offset: int) -> None:
        """Report that the log was truncated below the frontier (KIP-320).  The shell then seeks to
        the last offset that the application has read.
        """
        before = state.next
        self._place(state, None)
        state.halted = True
        self._report(
            state,
            errors.LogTruncated(
                f"{state.place}: an unclean election removed offsets from {end_offset} "
                f"(epoch {epoch}) on; this consumer had fetched up to {before}",
                topic=state.place.topic, partition=str(state.place.partition),
                diverging_epoch=str(epoch), end_offset=str(end_offset),
            ),
        )  # fmt: skip

    def _on_offset(self, event: OffsetFound, now_ms: int) -> None:
        state = self._partitions.get(event.place)
        if state is None or state.position_id != event.position_id or not state.asking:
            return
        state.asking = False
        self._todo[state.place] = None
        if event.error is not None:
            self._refused(state, event.error, NONE, now_ms)
            return
        state.backoff.reset()
        state.failing_ms = None
        state.next = event.offset
        at = state.next
        found = CompletedFetch(
            state.place, state.position_id, NONE, memoryview(b""), at, at, (), NONE, NONE
        )  # ordered behind the data that was fetched before a reset
        self._effects.append(Publish("data", found))

    # -- asking ------------------------------------------------------------------------------------

    def _pump(self, now_ms: int) -> None:
        wake: int | None = None
        for place in list(self._todo):
            state = self._partitions[place]
            paused = state.paused and state.next is not None  # a paused position is still looked up
            if paused or state.halted or state.asking or state.node is not None:
                del self._todo[place]
                continue
            when = self._advance(state, now_ms)
            if when is None:
                self._todo.pop(place, None)
            elif wake is None or when < wake:
                wake = when
        for node, session in self._sessions.items():
            ask = session.ask
            if ask.positions or ask.forgotten or ask.credit:
                session.ask = FetchRequestData()
                self._effects.append(Send(node, ask))
        if wake is not None:
            wake = max(wake, now_ms + 1)
        if wake != self._timer:
            self._timer = wake
            self._effects.append(SetTimer("fetcher", wake))

    def _advance(self, state: AssignedPartition, now_ms: int) -> int | None:
        """Take the next step for a partition.

        Returns the time of the next attempt; None if the partition is done or waits for an event.
        """
        leader = None if state.key is None else self.metadata.leader(state.key)
        if leader is not None and leader != state.leader:
            self._new_leader(state, leader)
        if state.retry_ms > now_ms:
            return state.retry_ms
        if not self._identify(state):
            self._want_metadata()
            problem = self.metadata.problem(*state.place)
            if problem is not None and self._lasts(state, now_ms):
                self._report(state, problem)
            return now_ms + self.options.retry_backoff_max_ms
        assert state.key is not None
        leader = self.metadata.leader(state.key)
        if leader is None:
            return self._leaderless(state, now_ms)
        if state.next is None:
            special = state.special
            if special is None:
                policy = self.options.auto_offset_reset
                if policy == "none":
                    state.halted = True
                    self._report(
                        state,
                        errors.NoOffsetForPartition(
                            f"{state.place} has no position and auto_offset_reset is none: "
                            "seek first, or choose earliest or latest"
                        ),
                    )
                    return None
                special = EARLIEST if policy == "earliest" else LATEST
            state.asking = True
            wanted = OffsetWanted(
                leader.node, state.place, state.key, leader.epoch, special, state.position_id
            )
            self._effects.append(Publish("offset", wanted))
            return None
        session = self._session(leader.node)
        if session.retry_ms > now_ms:
            return session.retry_ms
        self._set(state, leader.node, leader.epoch, session)
        return None

    def _new_leader(self, state: AssignedPartition, leader: LeaderAndEpoch) -> None:
        """Note a newly elected leader and end the back-off that older failures began."""
        state.leader = leader
        state.retry_ms = 0
        state.backoff.reset()
        session = self._sessions.get(leader.node)
        if session is not None:
            session.retry_ms = 0
            session.backoff.reset()

    def _lasts(self, state: AssignedPartition, now_ms: int) -> bool:
        """Return whether the partition has failed for `report_after_ms` since its last report or
        success.
        """
        if state.failing_ms is None:
            state.failing_ms = now_ms
        elif now_ms - state.failing_ms >= self.options.report_after_ms:
            state.failing_ms = now_ms
            return True
        return False

    def _leaderless(self, state: AssignedPartition, now_ms: int) -> int:
        """Return when to look again.  After `report_after_ms` the missing brokers are reported."""
        assert state.key is not None
        self._want_metadata()
        if self._lasts(state, now_ms):
            self._effects.append(
                Publish("leaderless", (state.place, self.metadata.waits_for(state.key)))
            )
        state.retry_ms = now_ms + int(state.backoff.next_ms())
        return state.retry_ms

    def _identify(self, state: AssignedPartition) -> bool:
        """Bind the partition to a topic id.  A topic that was deleted or re-created is reported
        once (rule L8).
        """
        if state.key is not None:
            loss = self.metadata.loss_of(state.key)
            if loss is None:
                return True
            self._by_key.pop(state.key, None)
            state.key = None
            self._effects.append(Publish("error", FetchError(state.place, state.assigned_id, loss)))
            self._place(state, EARLIEST if isinstance(loss, errors.TopicRecreated) else None)
            state.bound_id = state.position_id
        topic = self.metadata.topics.get(state.place.topic)
        if topic is None or not 0 <= state.place.partition < topic.partitions:
            return False
        self._bind(state, PartitionKey(topic.topic_id, state.place.partition))
        return True

    def _set(self, state: AssignedPartition, node: int, epoch: int, session: NodeSession) -> None:
        if not session.live:
            session.live = True
            session.credit = max(1, self.options.buffer_bytes - session.buffered)
            session.returned = 0
            session.ask = FetchRequestData(credit=session.credit)
        assert state.key is not None
        assert state.next is not None
        state.node = node
        state.set_id = self._new_id() & 0xFFFFFFFF
        session.ask.positions.append(
            FetchPosition(state.key, epoch, state.next, state.fetched_epoch, state.set_id)
        )

    def _unset(self, state: AssignedPartition) -> None:
        """Remove the position from its stream; frames that are still in transit are then
        dropped.
        """
        if state.node is not None:
            session = self._sessions[state.node]
            key = state.key
            assert key is not None
            kept = [each for each in session.ask.positions if each.key != key]
            if len(kept) < len(session.ask.positions):
                session.ask.positions = kept
            elif session.live:
                session.ask.forgotten.append(key)
            state.node = None
        self._todo[state.place] = None

    def _report(self, state: AssignedPartition, error: errors.PkError) -> None:
        """Report an error of the partition's current position (F4)."""
        self._effects.append(Publish("error", FetchError(state.place, state.position_id, error)))

    def _want_metadata(self) -> None:
        self.metadata.want()
        self._effects.append(Publish("metadata", None))

    def _session(self, node: int) -> NodeSession:
        found = self._sessions.get(node)
        if found is None:
            found = self._sessions[node] = NodeSession(self._new_backoff())
        return found


def last_epoch(payload: memoryview, next_offset: int) -> int:
    """Return the leader epoch of the offset before `next_offset`; NONE = it is unknown.

    `payload` has the batches below `next_offset`.  An answer from the tier may end with a range
    without rows (rule L12), which may be of later epochs than the last batch.  The lengths of the
    batches are checked later, when they are decoded.
    """
    at, size, last = 0, len(payload), NONE
    while size - at >= batches.HEADER_BYTES:
        (length,) = _LENGTH.unpack_from(payload, at + 8)
        if length < batches.HEADER_BYTES or length > size - at:
            break
        at, last = at + length, at
    if last == NONE:
        return NONE
    header = batches.read_header(payload, last)
    return header.leader_epoch if header.next_offset >= next_offset else NONE
