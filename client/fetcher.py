"""The consumer's peer: where it stands in each partition, what each broker is asked, what comes
back.

A Machine.  Positions are set once on a broker's fetch stream; the broker then sends and advances by
itself while it has credit (rule P4).  Every setting gets a new `position_id`; what comes back under
an older one is dropped, so nothing of before a seek, a pause or a change of leader is ever
delivered after it.

A partition (a *slot*) goes through these states, and back when an answer refuses it:

    unknown topic → no offset → no leader → set on a node

A step back that was caused by an error waits a back-off first.

Invariants
  F1  offsets are delivered in order, each once, from the position on: a frame is accepted only if
      its position id is that of the slot's last setting, and then moves the frontier to its
      next_offset (rule L12), never by counting.
  F2  bytes delivered and not consumed, plus credit at the broker, <= fetch_buffer_bytes per broker
      (one batch larger than that travels alone).
  F3  an offset that is out of range is reset by policy, or reported once; never skipped in silence.
  F4  what is said of a position (data, a look-up's answer, a complaint) carries the id of that
      position and is void once the slot has another: a seek and a new assignment settle all that
      came before them, wherever it waits.  Only that a topic went away (rule L8) is said of the
      assignment: a seek chooses an offset, it does not choose another log.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from functools import partial

from pk import errors
from pk.backoff import Backoff, client_jitter, exponential_ms
from pk.client.fetcher_events import (
    Arrived,
    Ask,
    Assign,
    Broken,
    Complaint,
    Consumed,
    Event,
    Fetched,
    FetcherOptions,
    OffsetFound,
    OffsetWanted,
    Pause,
    PositionSet,
    Seek,
    Wake,
)
from pk.client.metadata import Leader, Metadata
from pk.client.offsets import EARLIEST, LATEST
from pk.effects import Effect, Publish, Send, SetTimer
from pk.log import batch as batches
from pk.types import NONE, PartitionKey, TopicPartition

#: The first back-off from a leader that was just elected: it catches up, or hears of it, at once.
EARLY_MS = 20
_JUST_ELECTED = (
    errors.OffsetNotAvailable, errors.UnknownLeaderEpoch, errors.FencedLeaderEpoch,
    errors.NotLeaderOrFollower,
)  # fmt: skip

_LENGTH_EPOCH = struct.Struct("<ii")  # of a batch header, from byte 8


class _Slot:
    """One assigned partition."""

    __slots__ = (
        "asking", "assigned_id", "backoff", "failing_ms", "fetched_epoch", "halted", "key",
        "leader", "next", "node", "paused", "place", "position_id", "retry_ms", "set_id", "special",
    )  # fmt: skip

    def __init__(self, place: TopicPartition, assigned_id: int, backoff: Backoff) -> None:
        self.place = place
        self.assigned_id = assigned_id  #: another each time the partition is assigned
        self.key: PartitionKey | None = None
        self.next: int | None = None  #: the frontier: what the broker is asked for next
        self.special: int | None = None  #: LATEST or EARLIEST, to be looked up; None = by policy
        self.asking = False  #: a look-up is under way
        self.node: int | None = None  #: where the position is set
        self.position_id = 0  #: of the application's last choice; older frames are not handed out
        self.set_id = 0  #: of the setting on a stream; frames under another are not accepted
        self.fetched_epoch = NONE  #: of the last batch before the frontier (KIP-320)
        self.paused = False
        self.halted = False  #: told the application; waits for a seek
        self.retry_ms = 0
        self.backoff = backoff
        self.failing_ms: int | None = None
        self.leader: Leader | None = None  #: as of the last look at the metadata


class _Session:
    """One fetch stream."""

    __slots__ = ("ask", "backoff", "buffered", "credit", "live", "retry_ms", "returned")

    def __init__(self, backoff: Backoff) -> None:
        self.live = False
        self.buffered = 0  #: delivered, not consumed; outlives the stream
        self.credit = 0  #: granted and not used, as far as we know
        self.returned = 0  #: consumed, not granted again
        self.ask = Ask()
        self.retry_ms = 0
        self.backoff = backoff


class Fetcher:
    """The machine.  `metadata` is shared with the shell, which tells of changes by `Wake`."""

    def __init__(self, options: FetcherOptions, metadata: Metadata, rng: random.Random) -> None:
        self.options = options
        self.metadata = metadata
        bounds_ms = (options.retry_backoff_ms, options.retry_backoff_max_ms)
        self._new_backoff = partial(Backoff, bounds_ms, client_jitter(rng))
        self._slots: dict[TopicPartition, _Slot] = {}
        self._by_key: dict[PartitionKey, _Slot] = {}
        self._sessions: dict[int, _Session] = {}
        self._next_id = 0  #: of the last assignment, position or setting; each is another
        self.paused: frozenset[TopicPartition] = frozenset()  #: replaced, never changed
        self._todo: dict[TopicPartition, None] = {}  #: slots that are not set anywhere
        self._effects: list[Effect] = []
        self._timer: int | None = None
        self._steps: dict[type, Callable[..., None]] = {
            Assign: self._on_assign, Seek: self._on_seek, Pause: self._on_pause,
            Arrived: self._on_arrived, Broken: self._on_broken, Consumed: self._on_consumed,
            OffsetFound: self._on_offset, Wake: self._on_wake,
        }  # fmt: skip

    # -- look-ups ----------------------------------------------------------------------------------

    @property
    def assignment(self) -> list[TopicPartition]:
        return list(self._slots)

    def position_id(self, place: TopicPartition) -> int | None:
        """What is said under another id is old (F4); safe in any thread."""
        slot = self._slots.get(place)
        return None if slot is None else slot.position_id

    def stands(self, told: Complaint) -> bool:
        """Whether a complaint is still to be told (F4); safe in any thread."""
        if told.place is None:
            return True
        slot = self._slots.get(told.place)
        return slot is not None and told.about in (slot.position_id, slot.assigned_id)

    def well_supplied(self, node: int) -> bool:
        """Whether the broker has credit for half the buffer: no hurry to give any back.  Safe in
        any thread, for whoever has taken all that arrived: what comes later is taken later.
        """
        session = self._sessions.get(node)
        return session is not None and session.credit * 2 >= self.options.buffer_bytes

    def frontier(self, place: TopicPartition) -> int | None:
        slot = self._slots.get(place)
        return None if slot is None else slot.next

    # -- events ------------------------------------------------------------------------------------

    def step(self, event: Event, now_ms: int) -> Sequence[Effect]:
        self._effects = []
        self._steps[type(event)](event, now_ms)
        self._pump(now_ms)
        return self._effects

    def _on_wake(self, event: Wake, now_ms: int) -> None:
        self._timer = None
        for slot in self._slots.values():  # leaders may have moved, topics gone
            if slot.node is not None and slot.key is not None:
                leader = self.metadata.leader(slot.key)
                gone = self.metadata.loss_of(slot.key) is not None
                if gone or (leader is not None and leader.node != slot.node):
                    self._unset(slot)

    def _on_assign(self, event: Assign, now_ms: int) -> None:
        for place in [place for place in self._slots if place not in event.places]:
            slot = self._slots.pop(place)
            self._unset(slot)
            self._todo.pop(place, None)
            if slot.key is not None:
                self._by_key.pop(slot.key, None)
        for place, start in event.places.items():
            if place in self._slots:
                continue
            slot = self._slots[place] = _Slot(place, self._new_id(), self._new_backoff())
            self._place(slot, start)
        self._note_paused()

    def _on_seek(self, event: Seek, now_ms: int) -> None:
        slot = self._slots.get(event.place)
        if slot is None:
            raise errors.InvalidRequest(f"{event.place} is not assigned to this consumer")
        self._unset(slot)
        slot.retry_ms = 0
        slot.backoff.reset()
        self._place(slot, event.offset)

    def _place(self, slot: _Slot, start: int | None) -> None:
        """A new beginning: nothing that is under way counts any more."""
        slot.position_id = self._new_id()
        slot.halted = slot.asking = False
        slot.failing_ms = None
        slot.fetched_epoch = NONE
        slot.next = start if start is not None and start >= 0 else None
        slot.special = start if start is not None and start < 0 else None
        self._todo[slot.place] = None

    def _on_pause(self, event: Pause, now_ms: int) -> None:
        for place in event.places:  # all of them or none
            if place not in self._slots:
                raise errors.InvalidRequest(f"{place} is not assigned to this consumer")
        for place in event.places:
            slot = self._slots[place]
            if event.paused and not slot.paused:
                slot.paused = True
                self._unset(slot)
            elif slot.paused and not event.paused:
                slot.paused = False
                self._todo[place] = None
        self._note_paused()

    def _note_paused(self) -> None:
        self.paused = frozenset([place for place, slot in self._slots.items() if slot.paused])

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _on_broken(self, event: Broken, now_ms: int) -> None:
        session = self._sessions.get(event.node)
        if session is None:
            return
        session.live = False
        session.credit = session.returned = 0
        session.ask = Ask()
        session.retry_ms = now_ms + int(session.backoff.next_ms())
        self._want_metadata()
        for slot in self._slots.values():
            if slot.node == event.node:
                slot.node = None
                self._todo[slot.place] = None

    def _on_consumed(self, event: Consumed, now_ms: int) -> None:
        if not event.size:
            return  # a position that was looked up came from no stream
        session = self._sessions[event.node]
        session.buffered -= event.size
        assert session.buffered >= 0, session.buffered
        self._give_back(session, event.size)

    def _give_back(self, session: _Session, size: int) -> None:
        """Room for `size` bytes: grant it again, in portions."""
        if not session.live:
            return
        session.returned += size
        if session.credit <= 0 or session.returned >= self.options.buffer_bytes // 4:
            session.ask.credit += session.returned
            session.credit += session.returned
            session.returned = 0

    # -- frames ------------------------------------------------------------------------------------

    def _on_arrived(self, event: Arrived, now_ms: int) -> None:
        session = self._sessions[event.node]
        session.backoff.reset()
        size = len(event.payload)
        session.credit -= size
        slot = self._by_key.get(event.key)
        if slot is None or slot.node != event.node or slot.set_id != event.position_id:
            self._give_back(session, size)  # of before a seek, a pause, another leader
            return
        assert slot.next is not None
        if event.error is not None:
            self._give_back(session, size)
            slot.node = None  # an error ends the position
            self._todo[slot.place] = None
            self._refused(slot, event.error, event.log_start, now_ms)
            return
        if event.diverging is not None:
            self._give_back(session, size)
            slot.node = None
            self._truncated(slot, *event.diverging)
            return
        slot.backoff.reset()
        slot.failing_ms = None
        position, slot.next = slot.next, max(slot.next, event.next_offset)
        if size:
            slot.fetched_epoch = last_epoch(event.payload)
        session.buffered += size
        fetched = Fetched(
            slot.place, slot.position_id, event.node, event.payload, position, slot.next,
            event.aborted, event.high_watermark, event.last_stable_offset,
        )  # fmt: skip
        self._effects.append(Publish("data", fetched))

    def _refused(self, slot: _Slot, error: errors.PkError, log_start: int, now_ms: int) -> None:
        """What an error said of a position means for it."""
        if isinstance(error, errors.OffsetOutOfRange):
            self._out_of_range(slot, error)
            return
        if isinstance(error, errors.DataLoss) and slot.next is not None:
            self._lost(slot, error)
            return
        wait = int(slot.backoff.next_ms())
        if isinstance(error, _JUST_ELECTED):
            wait = exponential_ms(EARLY_MS, wait, slot.backoff.attempts)
        slot.retry_ms = now_ms + wait
        if isinstance(error, errors.OffsetNotAvailable | errors.UnknownLeaderEpoch):
            self._want_metadata()
            return  # a new leader catches up: wait, never reset (KIP-207)
        if error.retriable or isinstance(error, errors.UnknownTopicId):
            self._want_metadata()
            if self._lasts(slot, now_ms):
                self._complain(slot, error)
            return
        slot.retry_ms = now_ms + self.options.retry_backoff_max_ms
        self._complain(slot, error)

    def _lost(self, slot: _Slot, error: errors.DataLoss) -> None:
        """Rule L9: told in its place among the data, once; the reader's seek goes on behind it."""
        assert slot.next is not None
        slot.halted = True
        slot.backoff.reset()
        lost = Fetched(
            slot.place, slot.position_id, NONE, memoryview(b""), slot.next, slot.next, (), NONE,
            NONE, error,
        )  # fmt: skip
        self._effects.append(Publish("data", lost))

    def _out_of_range(self, slot: _Slot, error: errors.PkError) -> None:
        policy = self.options.auto_offset_reset
        if policy == "none":
            slot.halted = True
            self._complain(
                slot,
                errors.NoOffsetForPartition(
                    f"{slot.place}: position {slot.next} is out of range ({error.message}) and "
                    "auto_offset_reset is none: seek, or choose earliest or latest",
                    **error.details,
                ),
            )
            return
        self._effects.append(Publish("reset", (slot.place, slot.next, policy, error.message)))
        slot.next = None  # the position id stays: what was fetched below is still good
        slot.special = EARLIEST if policy == "earliest" else LATEST
        slot.fetched_epoch = NONE

    def _truncated(self, slot: _Slot, epoch: int, end_offset: int) -> None:
        """KIP-320: the log was cut below the frontier.  Say so; the shell seeks to what the
        application has.
        """
        before = slot.next
        self._place(slot, None)
        slot.halted = True
        self._complain(
            slot,
            errors.LogTruncated(
                f"{slot.place}: an unclean election removed offsets from {end_offset} "
                f"(epoch {epoch}) on; this consumer had fetched up to {before}",
                topic=slot.place.topic, partition=str(slot.place.partition),
                diverging_epoch=str(epoch), end_offset=str(end_offset),
            ),
        )  # fmt: skip

    def _on_offset(self, event: OffsetFound, now_ms: int) -> None:
        slot = self._slots.get(event.place)
        if slot is None or slot.position_id != event.position_id or not slot.asking:
            return
        slot.asking = False
        self._todo[slot.place] = None
        if event.error is not None:
            self._refused(slot, event.error, NONE, now_ms)
            return
        slot.backoff.reset()
        slot.failing_ms = None
        slot.next = event.offset
        at = slot.next
        found = Fetched(
            slot.place, slot.position_id, NONE, memoryview(b""), at, at, (), NONE, NONE
        )  # in its place behind what was fetched before a reset
        self._effects.append(Publish("data", found))

    # -- asking ------------------------------------------------------------------------------------

    def _pump(self, now_ms: int) -> None:
        wake: int | None = None
        for place in list(self._todo):
            slot = self._slots[place]
            paused = slot.paused and slot.next is not None  # a position is looked up all the same
            if paused or slot.halted or slot.asking or slot.node is not None:
                del self._todo[place]
                continue
            when = self._advance(slot, now_ms)
            if when is None:
                self._todo.pop(place, None)
            elif wake is None or when < wake:
                wake = when
        for node, session in self._sessions.items():
            ask = session.ask
            if ask.positions or ask.forgotten or ask.credit:
                session.ask = Ask()
                self._effects.append(Send(node, ask))
        if wake is not None:
            wake = max(wake, now_ms + 1)
        if wake != self._timer:
            self._timer = wake
            self._effects.append(SetTimer("fetcher", wake))

    def _advance(self, slot: _Slot, now_ms: int) -> int | None:
        """Take the next step for a slot; a time = look again then, None = done or waiting for an
        answer.
        """
        leader = None if slot.key is None else self.metadata.leader(slot.key)
        if leader is not None and leader != slot.leader:
            self._new_leader(slot, leader)
        if slot.retry_ms > now_ms:
            return slot.retry_ms
        if not self._identify(slot):
            self._want_metadata()
            problem = self.metadata.problem(*slot.place)
            if problem is not None and self._lasts(slot, now_ms):
                self._complain(slot, problem)
            return now_ms + self.options.retry_backoff_max_ms
        assert slot.key is not None
        leader = self.metadata.leader(slot.key)
        if leader is None:
            return self._leaderless(slot, now_ms)
        if slot.next is None:
            special = slot.special
            if special is None:
                policy = self.options.auto_offset_reset
                if policy == "none":
                    slot.halted = True
                    self._complain(
                        slot,
                        errors.NoOffsetForPartition(
                            f"{slot.place} has no position and auto_offset_reset is none: "
                            "seek first, or choose earliest or latest"
                        ),
                    )
                    return None
                special = EARLIEST if policy == "earliest" else LATEST
            slot.asking = True
            wanted = OffsetWanted(
                leader.node, slot.place, slot.key, leader.epoch, special, slot.position_id
            )
            self._effects.append(Publish("offset", wanted))
            return None
        session = self._session(leader.node)
        if session.retry_ms > now_ms:
            return session.retry_ms
        self._set(slot, leader.node, leader.epoch, session)
        return None

    def _new_leader(self, slot: _Slot, leader: Leader) -> None:
        """Whoever was just elected is alive: no back-off of before counts any more."""
        slot.leader = leader
        slot.retry_ms = 0
        slot.backoff.reset()
        session = self._sessions.get(leader.node)
        if session is not None:
            session.retry_ms = 0
            session.backoff.reset()

    def _lasts(self, slot: _Slot, now_ms: int) -> bool:
        """Whether it is time to say, once more, that nothing comes of a slot."""
        if slot.failing_ms is None:
            slot.failing_ms = now_ms
        elif now_ms - slot.failing_ms >= self.options.complain_ms:
            slot.failing_ms = now_ms
            return True
        return False

    def _leaderless(self, slot: _Slot, now_ms: int) -> int:
        """When to look again; what it waits for is said once it lasts."""
        assert slot.key is not None
        self._want_metadata()
        if self._lasts(slot, now_ms):
            self._effects.append(
                Publish("leaderless", (slot.place, self.metadata.waits_for(slot.key)))
            )
        slot.retry_ms = now_ms + int(slot.backoff.next_ms())
        return slot.retry_ms

    def _identify(self, slot: _Slot) -> bool:
        """Bind the slot to a topic id; a topic that went away is reported once (rule L8)."""
        if slot.key is not None:
            loss = self.metadata.loss_of(slot.key)
            if loss is None:
                return True
            self._by_key.pop(slot.key, None)
            slot.key = None
            self._effects.append(Publish("error", Complaint(slot.place, slot.assigned_id, loss)))
            self._place(slot, EARLIEST if isinstance(loss, errors.TopicRecreated) else None)
        topic = self.metadata.topics.get(slot.place.topic)
        if topic is None or not 0 <= slot.place.partition < topic.partitions:
            return False
        slot.key = PartitionKey(topic.topic_id, slot.place.partition)
        self._by_key[slot.key] = slot
        return True

    def _set(self, slot: _Slot, node: int, epoch: int, session: _Session) -> None:
        if not session.live:
            session.live = True
            session.credit = max(1, self.options.buffer_bytes - session.buffered)
            session.returned = 0
            session.ask = Ask(credit=session.credit)
        assert slot.key is not None
        assert slot.next is not None
        slot.node = node
        slot.set_id = self._new_id() & 0xFFFFFFFF
        session.ask.positions.append(
            PositionSet(slot.key, epoch, slot.next, slot.fetched_epoch, slot.set_id)
        )

    def _unset(self, slot: _Slot) -> None:
        """Take the position off its stream; what is still on its way counts no more."""
        if slot.node is not None:
            session = self._sessions[slot.node]
            key = slot.key
            assert key is not None
            kept = [each for each in session.ask.positions if each.key != key]
            if len(kept) < len(session.ask.positions):
                session.ask.positions = kept
            elif session.live:
                session.ask.forgotten.append(key)
            slot.node = None
        self._todo[slot.place] = None

    def _complain(self, slot: _Slot, error: errors.PkError) -> None:
        """Of the slot's present position (F4)."""
        self._effects.append(Publish("error", Complaint(slot.place, slot.position_id, error)))

    def _want_metadata(self) -> None:
        self.metadata.want()
        self._effects.append(Publish("metadata", None))

    def _session(self, node: int) -> _Session:
        found = self._sessions.get(node)
        if found is None:
            found = self._sessions[node] = _Session(self._new_backoff())
        return found


def last_epoch(payload: memoryview) -> int:
    """The leader epoch of the last whole batch; lengths are checked when the batches are
    decoded.
    """
    at, size, epoch = 0, len(payload), NONE
    while size - at >= batches.HEADER_BYTES:
        length, found = _LENGTH_EPOCH.unpack_from(payload, at + 8)
        if length < batches.HEADER_BYTES or length > size - at:
            break
        at, epoch = at + length, found
    return epoch
