"""The consumer: `poll` returns records and `poll_batches` Arrow batches of its partitions.

Frames arrive on the client's loop thread and wait, bounded by credit; checking, decompressing and
decoding them happens in the thread that polls, so the two overlap.  Only one thread at a time may
use a consumer: another gets `InvalidRequest`, except from `close`.  A fork ends a consumer.

An error that concerns a partition is raised once, by the next poll.  Later polls continue with the
other partitions.  Without a group, `subscribe` takes all partitions.  Partitions that are created
later are read from their first offset.  With a group_id, see client/group_consumer.py.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Unpack, cast

import pyarrow as pa

from pk import errors
from pk.client import arguments, connection
from pk.client.consumer_metrics import ConsumedCounts, ConsumerMetrics
from pk.client.deserialization import OnDeserializeError, RecordDeserializer, RowFailed
from pk.client.fetch_buffer import FetchBuffer, FetchedRows, UndecodableBatch
from pk.client.fetch_engine import FetchEngine
from pk.client.fetcher_events import CompletedFetch, Consumed, FetcherEvent, FetchError, Pause, Seek
from pk.client.group_consumer import GroupConsumer, Listener
from pk.client.group_membership import GroupMembership
from pk.client.network_client import NetworkClient
from pk.client.offsets import EARLIEST, LATEST, OFFSET_MAX
from pk.client.option_types import ConsumerOptions
from pk.client.options import bootstrap_of, consumer_options, network_options
from pk.client.records import ConsumerRecords
from pk.client.snapshots import SnapshotConsumer
from pk.client.waiting import OneThread, WakeupSignal, one_thread
from pk.clock import monotonic_s
from pk.log.batch import TIMESTAMP_MS_MAX
from pk.types import Record, TopicPartition

#: While a broker has enough credit, it gets more in portions of fetch_buffer_bytes / _PORTIONS.
_PORTIONS = 8


class OffsetAndTimestamp(NamedTuple):
    """The first offset at or after a time, and its timestamp."""

    offset: int
    timestamp_ms: int


class Consumer(GroupConsumer, SnapshotConsumer, ConsumerMetrics):
    """Reads records of assigned or subscribed partitions.  For one thread at a time.

    bootstrap: "host:port,…", or a list of addresses.
    key_deserializer, value_deserializer: "string", "json", `f(data)`, `f(topic, data)`; None: bytes
    on_deserialize_error: "raise", "skip", or `f(record, error)` (client/deserialization), such as a
        `DeadLetterTopic`
    options: the consumer settings of docs/settings.md; Kafka's dotted names are accepted.

    Raises `InvalidOption` or `InvalidConfig` for an option that is unknown or out of bounds.

        >>> with Consumer("localhost:9092", auto_offset_reset="earliest") as consumer:
        ...     consumer.subscribe("events")
        ...     records = consumer.poll(timeout_s=30)
        ...     [(record.offset, record.key, record.value) for record in records]
        [(0, b'key', b'value')]
    """

    def __init__(
        self,
        bootstrap: str | Iterable[str] | None = None,
        *,
        key_deserializer: Any = None,
        value_deserializer: Any = None,
        on_deserialize_error: str | OnDeserializeError = "raise",
        **options: Unpack[ConsumerOptions],
    ) -> None:
        super().__init__()
        given = cast("dict[str, Any]", options)
        bootstrap = bootstrap_of(bootstrap, given)
        self._options = o = consumer_options(given)
        self._deserializer = RecordDeserializer(
            key_deserializer, value_deserializer, on_deserialize_error, connection.warn
        )
        self._wakeup = WakeupSignal()
        self._one_thread = OneThread()
        self._counts = ConsumedCounts()
        self._lines: deque[ConsumerRecords] = deque()  #: rows that are handed out record by record
        #: by node: bytes consumed whose credit is not returned yet
        self._eaten: dict[int, int] = {}
        self._closed = False
        self._ending = threading.Lock()
        with connection.opening() as self._thread:
            world = self._thread.world
            self._cluster = NetworkClient(world, bootstrap, **network_options(o))
            self._engine = FetchEngine(world, self._cluster, o)
            if o["group_id"]:
                self._membership = GroupMembership(world, self._cluster, o)
                self._membership.on_change = self._wakeup.set
        engine = self._engine
        engine.on_ready = self._wakeup.set
        self._fetch_buffer = FetchBuffer(
            engine.ready, engine.fetcher.position_id, engine.decoded, self._consumed
        )
        #: Positions at which a batch failed its checksum once.
        self._doubted: dict[TopicPartition, int] = {}
        connection.close_at_exit(self, self.close, self._lines.clear)

    # -- what to read ------------------------------------------------------------------------------

    @one_thread
    def subscribe(
        self,
        topics: str | Sequence[str] | None = None,
        *,
        pattern: str | re.Pattern[str] | None = None,
        on_assigned: Listener | None = None,
        on_revoked: Listener | None = None,
        on_lost: Listener | None = None,
    ) -> None:
        """Read all partitions of `topics`, or of those whose whole name matches `pattern`.

        With a group_id, the members of the group share these partitions.  Polls call the listeners
        with the partitions that come or go: `on_revoked` may commit them, `on_lost` (default:
        `on_revoked`) may not.  Without a group, partitions that are added later are read from their
        first offset on.  Raises `InvalidOption` unless one of topics and pattern is given,
        `InvalidTopic`.
        """
        if (topics is None) == (pattern is None):
            raise errors.InvalidOption("subscribe takes topics or a pattern, one of both")
        listed = [topics] if isinstance(topics, str) else topics
        names = None if listed is None else arguments.topics(listed, "topics")
        compiled = None if pattern is None else arguments.pattern(pattern, "pattern")
        if not names and compiled is None:
            self.unsubscribe()
            return
        self._listen(on_assigned, on_revoked, on_lost)
        member = self._membership
        if member is not None:
            if not member.subscribed:
                self._take({}, {})
            self._call(lambda: member.subscribe(names, compiled))
            return
        self._drop_lines(())
        self._call(lambda: self._engine.subscribe(names, compiled))
        self._fetch_buffer.forget()

    def unsubscribe(self) -> None:
        """Read no partition any more; a member leaves its group."""
        self.assign([])

    @one_thread
    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read exactly these partitions; the positions of those already assigned are kept.

        A member leaves its group; committed offsets are not used.  Raises `InvalidPartitions`.
        """
        places = arguments.places(partitions)
        self._leave_group()
        self._call(lambda: self._engine.assign(places))
        self._drop_lines(places)
        self._fetch_buffer.purge()

    def assignment(self) -> list[TopicPartition]:
        """Return the partitions that are read now."""
        found: list[TopicPartition] = self._call(lambda: self._engine.fetcher.assignment)
        return found

    @one_thread
    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Make the next poll of an assigned partition begin at `offset`.

        Raises `TypeError` if it is not an integer, `InvalidOption` outside of [0, 2^63 - 1].
        """
        whole = arguments.whole(offset, "offset", None, OFFSET_MAX)
        if whole < 0:
            raise errors.InvalidOption(
                f"offset {whole} is negative; see seek_to_beginning and seek_to_end"
            )
        self._seek(arguments.place(partition), whole)

    @one_thread
    def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        """Seek to the first offset of these partitions, or of all assigned partitions."""
        for place in arguments.places(partitions) or self.assignment():
            self._seek(place, EARLIEST)

    @one_thread
    def seek_to_end(self, *partitions: TopicPartition) -> None:
        """Seek behind the last readable offset of these partitions, or of all assigned
        partitions.
        """
        for place in arguments.places(partitions) or self.assignment():
            self._seek(place, LATEST)

    def _seek(self, place: TopicPartition, offset: int) -> None:
        def seek() -> int | None:
            self._engine.step(Seek(place, offset))
            return self._engine.fetcher.position_id(place)

        position_id = self._call(seek)
        self._fetch_buffer.begin(place, position_id, offset if offset >= 0 else None)
        self._drop_lines([each.place for each in self._lines if each.place != place])

    @one_thread
    def pause(self, *partitions: TopicPartition) -> None:
        """Return no records of these partitions from polls until `resume`; fetched data is kept."""
        places = arguments.places(partitions)
        self._call(lambda: self._engine.step(Pause(places, True)))

    @one_thread
    def resume(self, *partitions: TopicPartition) -> None:
        """Let poll give records of these partitions again."""
        places = arguments.places(partitions)
        self._call(lambda: self._engine.step(Pause(places, False)))
        self._wakeup.set()

    def paused(self) -> list[TopicPartition]:
        """The partitions that are paused, sorted."""
        self._check_open()
        return sorted(self._engine.fetcher.paused)

    # -- reading -----------------------------------------------------------------------------------

    @one_thread
    def poll_batches(self, timeout_s: float = 1.0) -> list[tuple[TopicPartition, pa.RecordBatch]]:
        """Return decoded batches (offset, timestamp, key, value, headers), at most about
        max_poll_records rows.

        Returns [] if nothing came within `timeout_s`.  Offsets within a partition only grow, and
        may have gaps.
        """
        timeout_s = arguments.seconds(timeout_s)
        found = self._gather(self._options["max_poll_records"], timeout_s, cut=False)
        return [(item.place, item.rows) for item in found]

    @one_thread
    def poll(self, timeout_s: float = 1.0) -> list[Record]:
        """Return at most max_poll_records records; [] if nothing came within `timeout_s`.

        If the next record cannot be deserialised, this raises `SerializationError` with
        `details["topic"]`, `["partition"]` and `["offset"]`, unless on_deserialize_error says
        otherwise.  It raises again until a seek passes the record.  The records before it are
        returned first.

        A range that the broker cannot read, damaged in its only copy, raises `DataLoss` once, with
        `details["offset"]` and `details["next_offset"]`.  The next poll continues behind the range.
        """
        timeout_s = arguments.seconds(timeout_s)
        lines: Sequence[ConsumerRecords] | deque[ConsumerRecords] = self._lines
        if not any(lines):
            lines = self._poll_lines(timeout_s)
        found: list[Record] = []
        for each in lines:
            found += each
        self._lines.clear()
        return found

    def _poll_lines(self, timeout_s: float) -> list[ConsumerRecords]:
        """Return the records of `poll` before `Record` objects are made."""
        deadline = monotonic_s() + timeout_s
        while True:
            slices = self._gather(self._options["max_poll_records"], timeout_s, cut=True)
            found = self._deserialised(slices)
            if found or not slices:
                return found
            timeout_s = max(0.0, deadline - monotonic_s())  # all of them were left out

    def _deserialised(self, slices: Sequence[FetchedRows]) -> list[ConsumerRecords]:
        """Return the records of the rows; from a failing row on, rows are put back."""
        found: list[ConsumerRecords] = []
        try:
            for index, item in enumerate(slices):
                try:
                    found += self._deserializer.records(item)
                except RowFailed as failed:
                    found += failed.good
                    slices = [failed.rest, *slices[index + 1 :]]
                    if not found:
                        raise failed.error from failed.error.__cause__
                    self._put_back(slices)
                    return found
        except BaseException:  # Ctrl-C, too
            self._put_back(slices)
            raise
        return found

    def _put_back(self, slices: Sequence[FetchedRows]) -> None:
        """Put rows back, to be returned next and in this order."""
        for each in reversed(slices):
            self._counts.records -= each.rows.num_rows
            self._fetch_buffer.put_back(each)

    def _gather(self, limit: int, timeout_s: float, *, cut: bool) -> list[FetchedRows]:
        """Take about `limit` rows from the buffer.  With `cut`, a batch is cut at the limit.

        An error ends the gathering.  It is raised at once if there is nothing to return, else by
        the next call.  Rows are never lost: rows that were taken are returned, or put back.
        """
        found: list[FetchedRows] = []
        deadline: float | None = None
        try:
            while True:
                if not found:
                    self._follow_group()
                while limit > 0:
                    item = self._take_rows(limit if cut else None, quiet=bool(found))
                    if item is None:
                        break
                    found.append(item)
                    limit -= item.rows.num_rows
                    self._counts.records += item.rows.num_rows
                if found:
                    self._counts.polls += 1
                    return found
                deadline = self._wait(deadline, timeout_s)
                if deadline is None:
                    return found
        except BaseException:  # Ctrl-C
            self._put_back(found)
            raise

    def __iter__(self) -> Iterator[Record]:
        """Yield record by record.  Waits for the next record without limit, until `close`."""
        return chain.from_iterable(self._each_lines())

    def _each_lines(self) -> Iterator[ConsumerRecords]:
        while self._refill():
            yield self._lines[0]

    def __next__(self) -> Record:
        while self._refill():
            for record in self._lines[0]:
                return record
        raise StopIteration

    @one_thread
    def _refill(self) -> bool:
        """Fetch records to hand out; False once the consumer is closed and all were handed out."""
        while True:
            while self._lines:
                if self._lines[0]:
                    return True
                self._lines.popleft()
            if self._closed:
                return False
            try:
                self._lines.extend(self._poll_lines(1.0))
            except errors.ClosedError:
                return False

    def _take_rows(self, limit: int | None, *, quiet: bool) -> FetchedRows | None:
        """Return the next rows that are neither paused nor void; raises a pending error.

        `quiet`: returns None instead of raising, and leaves the error for the next call.
        """
        if quiet and (self._closed or self._engine.has_error()):
            return None
        if not quiet:
            self._check_open()
            told = self._engine.take_error()
            if told is not None:
                self._raise(told)
        try:
            return self._fetch_buffer.take(self._engine.fetcher.paused, limit)
        except UndecodableBatch as bad:
            self._unreadable(bad, quiet=quiet)
            return None

    def _unreadable(self, bad: UndecodableBatch, *, quiet: bool) -> None:
        """Handle a batch that cannot be read, without skipping data in silence (rule L9).

        A batch whose checksum does not match is fetched again before the error is reported.  The
        broker checks that batch first and so learns whether its disk or the network damaged it.  A
        loss is raised once, and the position moves behind it.  Every other error is raised again
        until a seek passes it.
        """
        place, cause = bad.place, bad.cause
        if isinstance(cause, errors.DataLoss) and not quiet:
            end = int(cause.details.get("next_offset", bad.position))
            self._seek(place, end)
            raise type(cause)(
                f"{place}: {cause.message}; the consumer goes on at offset {end}",
                **{**cause.details, "position": str(end)},
            ) from cause
        self._seek(place, bad.position)
        doubted = isinstance(cause, errors.CorruptBatch | errors.InvalidRecord)
        if quiet or (doubted and self._doubted.get(place) != bad.position):
            if doubted:
                self._doubted[place] = bad.position
            return
        self._doubted.pop(place, None)
        raise type(cause)(
            f"{place} at offset {bad.position}: {cause.message}; seek past it to go on",
            **{**cause.details, "position": str(bad.position)},
        ) from cause

    def _raise(self, told: FetchError) -> NoReturn:
        """Raise an error to the application, and choose the position of the next poll.

        After a truncation it is the application's last position, or the point of the truncation if
        that is lower (KIP-320).  In a topic that was created again it is the first offset.
        """
        error, place = told.error, told.place
        if isinstance(error, errors.TopicRecreated) and place is not None:
            self._seek(place, EARLIEST)
        if isinstance(error, errors.LogTruncated) and place is not None:
            end = int(error.details["end_offset"])
            seen = self._next_record_of(place)
            if seen is None:
                seen = self._fetch_buffer.last(place)
            self._seek(place, end if seen is None else min(seen, end))
        raise error

    def _consumed(self, fetched: CompletedFetch) -> None:
        """Return credit to a broker in portions, because each return wakes the loop's thread."""
        if not fetched.payload:
            return
        node = fetched.node
        size = self._eaten.pop(node, 0) + len(fetched.payload)
        portion: int = self._options["fetch_buffer_bytes"] // _PORTIONS
        if size < portion and self._engine.fetcher.well_supplied(node):
            self._eaten[node] = size
        else:
            self._post(Consumed(node, size))

    def _owing(self) -> list[int]:
        """Return the brokers that need credit now, and whose credit was held back until now."""
        return [node for node in self._eaten if not self._engine.fetcher.well_supplied(node)]

    def _wait(self, deadline: float | None, timeout_s: float) -> float | None:
        """Wait until something arrives; None if the time is up."""
        now = monotonic_s()
        deadline = now + timeout_s if deadline is None else deadline
        if now >= deadline:
            return None
        engine, fetch_buffer = self._engine, self._fetch_buffer
        for node in self._owing():
            self._post(Consumed(node, self._eaten.pop(node)))
        with self._polling():
            self._wakeup.wait_for(
                lambda: (
                    engine.problems
                    or self._closed
                    or self._group_waits()
                    or fetch_buffer.waits(engine.fetcher.paused)
                    or self._owing()
                ),
                deadline - now,
            )
        return deadline

    # -- offsets -----------------------------------------------------------------------------------

    @one_thread
    def position(self, partition: TopicPartition, timeout_s: float | None = None) -> int:
        """The offset at which the next poll of an assigned partition begins.

        timeout_s: seconds; None = default_api_timeout_ms.  Raises `InvalidRequest` if the partition
        is not assigned, `RequestTimedOut`.
        """
        place = arguments.place(partition)
        if place not in self.assignment():
            raise errors.InvalidRequest(f"{place} is not assigned to this consumer")
        seconds = self._api_s(timeout_s)
        deadline = monotonic_s() + seconds
        while True:
            self._check_open()
            told = self._engine.take_error(place)
            if told is not None:
                self._raise(told)
            found = self._next_record_of(place)
            if found is None:
                found = self._fetch_buffer.position(place)
            if found is not None:
                return found
            left = deadline - monotonic_s()
            if left <= 0:
                raise errors.RequestTimedOut(f"{place}: no position within {seconds:g} s")
            self._wakeup.wait_for(
                lambda: (
                    self._closed
                    or self._engine.has_error(place)
                    or self._fetch_buffer.position(place) is not None
                ),
                left,
            )

    def beginning_offsets(
        self, partitions: Iterable[TopicPartition], timeout_s: float | None = None
    ) -> dict[TopicPartition, int]:
        """Return the first offset of each partition."""
        return self._special_offsets(partitions, EARLIEST, timeout_s)

    def end_offsets(
        self, partitions: Iterable[TopicPartition], timeout_s: float | None = None
    ) -> dict[TopicPartition, int]:
        """Return the offset behind the last readable record of each partition: the last stable
        offset, or the high watermark if read_uncommitted.
        """
        return self._special_offsets(partitions, LATEST, timeout_s)

    def _special_offsets(
        self, partitions: Iterable[TopicPartition], special: int, timeout_s: float | None
    ) -> dict[TopicPartition, int]:
        places = arguments.places(partitions)
        found = self._lookup(dict.fromkeys(places, special), timeout_s)
        return {place: found[place][0] for place in places}

    def offsets_for_times(
        self, timestamps: Mapping[TopicPartition, int], timeout_s: float | None = None
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """Return the first offset whose timestamp is >= the given ms; None if there is none."""
        wanted = {
            place: arguments.whole(stamp, f"timestamps[{place}]", 0, TIMESTAMP_MS_MAX)
            for place, stamp in arguments.by_place(timestamps, "timestamps", "times in ms").items()
        }
        found = self._lookup(wanted, timeout_s)
        return {
            place: OffsetAndTimestamp(*found[place]) if found[place][0] >= 0 else None
            for place in wanted
        }

    def _lookup(
        self, wanted: dict[TopicPartition, int], timeout_s: float | None
    ) -> dict[TopicPartition, tuple[int, int]]:
        seconds = self._api_s(timeout_s)
        self._check_open()
        work = self._engine.offsets(wanted, wanted, int(seconds * 1000))
        found: dict[TopicPartition, tuple[int, int]] = self._thread.run(work, seconds)
        return found

    def partitions_for(self, topic: str, timeout_s: float | None = None) -> list[TopicPartition]:
        """The partitions of a topic.  Raises `UnknownTopicOrPartition`, `RequestTimedOut`."""
        seconds = self._api_s(timeout_s)
        self._check_open()
        work = self._cluster.topic(arguments.topic(topic), int(seconds * 1000))
        found = self._thread.run(work, seconds)
        return [TopicPartition(topic, partition) for partition in range(found.partitions)]

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop reading and disconnect.  Idempotent; raises `InvalidRequest` in a delivery
        callback.
        """
        self._thread.must_not_block()
        try:
            if not self._closed and not self._one_thread.busy():
                with contextlib.suppress(errors.PkError):
                    self._give_up_all()
        finally:
            self._end()

    def _end(self) -> None:
        with self._ending:  # if several threads close, one does the work
            if self._closed:
                return
            self._closed = True
        self._wakeup.set()
        connection.end(self, self._thread, self._close_all())

    def __enter__(self) -> Consumer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _call(self, function: Any) -> Any:
        """Run a function of the engine on the loop's thread."""
        self._check_open()

        async def call() -> Any:
            return function()

        return self._thread.run(call())

    def _post(self, event: FetcherEvent) -> None:
        if not self._closed:
            with contextlib.suppress(RuntimeError):  # closed meanwhile by another thread
                self._thread.loop.call_soon_threadsafe(self._engine.step, event)
