"""The produce stream: receives frames of batches, validates and appends them, sends answers.

World-generic.  A stream has three tasks.  The *reader* reads frames from the socket and starts
their validation.  The *appender* appends the validated frames in the order of arrival.  The
*replier* sends the answers.  Heavy frames are validated off the loop (CRC, structure,
decompression, every length: rule L13), light ones on the loop.  No byte of a payload is copied
here: batches are views into the frame until the writer of the directory writes them.  So the
process copies a byte twice, both times in the kernel: from the socket into the frame, and from the
frame into the page cache.

Invariants
  D1  A stream is FIFO: batches are decided in the order of arrival, hence in order per partition.
      Answers of different partitions may overtake each other (rule L7).
  D2  Each entry is answered exactly once; with acks=0 never.
  D3  A stream has at most PRODUCE_FRAMES_QUEUED_MAX frames and OWED_MAX answers.  Beyond these
      bounds, and while the write queue of the directory is full, the socket is not read.
  D4  When a stream breaks, batches that are not decided are cancelled.  Decided batches are
      written, and their answers dropped.  When a stream ends cleanly, all its batches are decided
      (acks=0 has no other confirmation), except for D5.
  D5  A producer uses one stream.  Once the producer has sent a batch on a newer stream, the broker
      refuses its batches on older streams: the producer has given them up, and only answers on the
      newest stream count (L6).  A producer of transactions is its pair of producer id and epoch:
      the producer ids of a job pass from one task to another (X5).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from pk import errors, limits
from pk.log import batch as batches
from pk.log import columns
from pk.log.batch import HEADER_BYTES, Header
from pk.server.handlers.appends import Appends
from pk.server.handlers.unverified import UnverifiedBatches
from pk.server.replica.context import Environment
from pk.server.replica.delayed_produce import DelayedProduce, ProduceTiming
from pk.server.replica.leader import ACKS_ALL
from pk.server.replica.purgatory import ProducePurgatory
from pk.tasks import TaskRegistry, awaited
from pk.transactional_ids import is_transactional
from pk.types import NONE, PartitionKey
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import error_head, head_of
from pk.world import Disconnected, Stream

#: Frames up to this weight are validated on the loop.  Measured: 70 µs for 1 MiB uncompressed,
#: 400–500 µs for 1 MiB to decompress, 300 µs and a contended GIL for a thread.
INLINE_WEIGHT = 2 * limits.MIB
COMPRESSED_WEIGHT = 16  #: the weight of one byte of a body that must be decompressed
#: Most answers outstanding of one stream before its socket is read again.
OWED_MAX = 4_096
TIMEOUT_DEFAULT_MS = 30_000

HeaderOrError = Header | errors.PkError


class _Entry(NamedTuple):
    """One batch of a frame, and the topic settings for its validation."""

    key: PartitionKey
    leader_epoch: int
    batch: memoryview
    size_max: int
    decoded_max: int


class _Job:
    """A frame between the socket and the log."""

    __slots__ = (
        "acks",
        "checked",
        "checking",
        "correlation_id",
        "deadline_ms",
        "entries",
        "received_s",
    )

    def __init__(
        self,
        correlation_id: int,
        acks: int,
        deadline_ms: int,
        entries: list[_Entry],
        received_s: float,
    ) -> None:
        self.received_s = received_s
        self.correlation_id = correlation_id
        self.acks = acks
        self.deadline_ms = deadline_ms
        self.entries = entries
        self.checked: list[HeaderOrError] | None = None
        self.checking: Awaitable[list[HeaderOrError]] | None = None


def weight(entries: list[_Entry]) -> int:
    """The cost of validation in bytes of an uncompressed batch.

    It is computed from unvalidated fields.
    """
    total = 0
    for entry in entries:
        raw = entry.batch
        total += len(raw)
        if len(raw) >= HEADER_BYTES + 4 and raw[24] & 0b11:
            total += COMPRESSED_WEIGHT * int.from_bytes(
                raw[HEADER_BYTES : HEADER_BYTES + 4], "little"
            )
    return total


def check_entries(entries: list[_Entry]) -> list[HeaderOrError]:
    """Return each entry's validated header, or the reason to refuse it.  Thread-safe."""
    found: list[HeaderOrError] = []
    for entry in entries:
        try:
            header = batches.check(entry.batch, entry.size_max)
            columns.validate_body(entry.batch, header, entry.decoded_max)
            found.append(header)
        except errors.PkError as refusal:
            found.append(refusal)
    return found


#: A producer id, with the epoch of a transaction or NONE (D5).
Speaker = tuple[int, int]


def speaker_of(header: Header) -> Speaker:
    """Return what tells the producer of a batch from others."""
    epoch = header.producer_epoch if is_transactional(header.producer_id) else NONE
    return header.producer_id, epoch


@dataclass(slots=True)
class ProducerStream:
    """The producer that sent last on one produce stream (D5)."""

    number: int  #: number of the stream; a newer stream has a higher one
    speaker: Speaker | None = None
    given_up: Speaker | None = None  #: the last producer that uses a newer stream instead


class ProducerStreams:
    """The produce streams of one broker, by the producer that uses them (D5)."""

    def __init__(self) -> None:
        self.speakers: dict[Speaker, ProducerStream] = {}  #: by producer: its newest stream
        self._opened = 0  #: number of produce streams so far

    def open(self) -> ProducerStream:
        """Return the entry of a stream that was accepted just now."""
        self._opened += 1
        return ProducerStream(self._opened)


class ProduceStream:
    """One accepted produce stream."""

    def __init__(
        self,
        env: Environment,
        appends: Appends,
        producers: ProducerStreams,
        purgatory: ProducePurgatory[DelayedProduce],
        stream: Stream,
    ) -> None:
        self._env = env
        self._clock = env.clock
        self._now_s = asyncio.get_running_loop().time
        self._appends = appends
        self._producers = producers
        self._purgatory = purgatory
        self._stream = stream
        self._speaker = producers.open()
        self._unverified = UnverifiedBatches(appends, env.clock, self._check_speaker, env.bug)
        self._jobs: deque[_Job] = deque()
        self._job_ready = asyncio.Event()
        self._job_taken = asyncio.Event()
        self._checks = TaskRegistry(awaited)
        self._finished = False
        self._owed = 0
        self._answers: dict[int, wire.ProduceReply] = {}
        self._answer_ready = asyncio.Event()
        self._answer_sent = asyncio.Event()
        self._delayed: dict[
            DelayedProduce, None
        ] = {}  #: parked or running; dropped when the stream ends

    async def serve(self) -> None:
        """Serve until the stream ends."""
        tasks = TaskRegistry()
        appender = tasks.spawn(self._append_jobs())
        tasks.spawn(self._send_answers())
        try:
            await self._read()
            self._finished = True
            self._job_ready.set()
            await appender  # D4: after a clean end every batch is decided
            await self._unverified.idle()
        except Disconnected:
            pass
        except errors.PkError as refusal:
            await self._refuse(refusal)
        finally:
            await tasks.close()
            await self._unverified.close()
            await self._checks.close()
            for delayed in self._delayed:
                delayed.sink = None
                if delayed.parked is not None:
                    self._purgatory.forget(delayed.parked)
            self._fall_silent()
            self._stream.close()

    async def _refuse(self, refusal: errors.PkError) -> None:
        """End an unusable stream with an error."""
        try:
            await self._stream.send(frames.encode(error_head(0, refusal)))
        except Disconnected:
            pass

    # -- reader ----------------------------------------------------------------------------------

    async def _read(self) -> None:
        while (raw := await self._stream.recv()) is not None:
            job = self._job_of(frames.decode(raw))
            self._env.metrics.produced(len(raw))
            if weight(job.entries) <= INLINE_WEIGHT:
                job.checked = check_entries(job.entries)
                if not self._jobs and self._append_at_once(job):
                    await self._owed_room()
                    continue
            else:
                disk = self._appends.any_disk()
                check = partial(check_entries, job.entries)
                job.checking = self._checks.spawn(disk.compute(check))
            self._jobs.append(job)
            self._job_ready.set()
            while len(self._jobs) >= limits.PRODUCE_FRAMES_QUEUED_MAX:  # D3
                self._job_taken.clear()
                await self._job_taken.wait()
            await self._owed_room()

    async def _owed_room(self) -> None:
        while self._owed > OWED_MAX:
            self._answer_sent.clear()
            await self._answer_sent.wait()

    def _job_of(self, frame: frames.Frame) -> _Job:
        """Return the entries of a frame as views.

        Raises if the sizes do not add up, which ends the stream: D1 could not be kept.
        """
        if frame.head.WhichOneof("body") != "produce":
            raise errors.InvalidRequest("a produce stream carries produce requests only")
        request = frame.head.produce
        if request.acks not in (0, 1, ACKS_ALL):
            raise errors.InvalidRequest(f"acks {request.acks} is none of 0, 1, -1")
        if len(request.partitions) > limits.PRODUCE_BATCHES_MAX:
            raise errors.InvalidRequest(
                f"{len(request.partitions)} batches in one frame; "
                f"{limits.PRODUCE_BATCHES_MAX} are allowed"
            )
        entries: list[_Entry] = []
        position = 0
        for item in request.partitions:
            end = position + item.batch_bytes
            key = PartitionKey(item.topic_id, item.partition)
            size_max, decoded_max = self._appends.batch_bounds(key)
            entries.append(
                _Entry(
                    key,
                    item.current_leader_epoch,
                    frame.payload[position:end],
                    size_max,
                    decoded_max,
                )
            )
            position = end
        if position != len(frame.payload):
            raise errors.CorruptBatch(
                f"a frame announces {position} bytes of batches and has {len(frame.payload)}"
            )
        timeout_ms = request.timeout_ms if request.timeout_ms > 0 else TIMEOUT_DEFAULT_MS
        deadline_ms = self._clock.monotonic_ms() + timeout_ms
        return _Job(frame.head.correlation_id, request.acks, deadline_ms, entries, self._now_s())

    # -- appender --------------------------------------------------------------------------------

    def _append_at_once(self, job: _Job) -> bool:
        """Append a small frame at once; False if the write queue of a directory is full."""
        if any(self._appends.full(entry.key) for entry in job.entries):
            return False
        for index in range(len(job.entries)):
            self._append(job, index)
        return True

    async def _append_jobs(self) -> None:
        while True:
            while not self._jobs:
                if self._finished:
                    return
                self._job_ready.clear()
                await self._job_ready.wait()
            job = self._jobs[0]
            if job.checked is None:
                assert job.checking is not None
                job.checked = await job.checking
            for index, entry in enumerate(job.entries):
                if self._appends.full(entry.key):
                    # D3: the socket is not read meanwhile
                    await self._appends.room(entry.key)
                self._append(job, index)
            self._jobs.popleft()
            self._job_taken.set()

    def _append(self, job: _Job, index: int) -> None:
        entry = job.entries[index]
        assert job.checked is not None
        checked = job.checked[index]
        delayed = DelayedProduce(
            self._answered, job.correlation_id, index, job.acks, job.deadline_ms
        )
        timing = delayed.timing = ProduceTiming(self._now_s, job.received_s)
        if job.acks:
            self._owed += 1
            self._delayed[delayed] = None
        try:
            if isinstance(checked, errors.PkError):
                raise checked
            self._hear(checked)
            timing.appended()
            if checked.transactional and self._unverified.hold(
                entry.key, checked, entry.batch, entry.leader_epoch, delayed
            ):
                return
            self._appends.append(entry.key, checked, entry.batch, entry.leader_epoch, delayed)
        except errors.PkError as refusal:
            delayed.answer(refusal)
        except Exception as bug:
            self._env.bug("append", bug)
            delayed.answer(errors.InternalError(f"append: {bug!r}"))

    def _hear(self, header: Header) -> None:
        """Note the stream of a producer (D5).  Raises `BrokerUnavailable` on an older stream."""
        if header.producer_id == NONE:
            return
        speaker = speaker_of(header)
        mine, speakers = self._speaker, self._producers.speakers
        if speaker != mine.speaker and speaker != mine.given_up:
            self._fall_silent()
            other = speakers.get(speaker)
            if other is not None and other.number > mine.number:
                mine.given_up = speaker
            else:
                if other is not None:
                    other.given_up, other.speaker = speaker, None
                speakers[speaker] = mine
                mine.speaker = speaker
        self._check_speaker(header)

    def _check_speaker(self, header: Header) -> None:
        """Raise `BrokerUnavailable` if the producer of a batch uses a newer stream (D5)."""
        if self._speaker.given_up is not None and self._speaker.given_up == speaker_of(header):
            raise errors.BrokerUnavailable("its producer uses a newer stream")

    def _fall_silent(self) -> None:
        mine = self._speaker
        if mine.speaker is not None:
            del self._producers.speakers[mine.speaker]
            mine.speaker = None

    # -- replier ---------------------------------------------------------------------------------

    def _answered(self, delayed: DelayedProduce, error: errors.PkError | None) -> None:
        self._env.metrics.answered(delayed, self._now_s())
        if error is not None:
            self._env.metrics.refused(error)
        if not delayed.acks:
            return
        self._delayed.pop(delayed, None)
        reply = self._answers.get(delayed.correlation_id)
        if reply is None:
            reply = self._answers[delayed.correlation_id] = wire.ProduceReply()
        if error is None:
            reply.results.add(
                index=delayed.index,
                base_offset=delayed.base_offset,
                last_offset=delayed.last_offset,
                log_append_time_ms=delayed.append_time_ms,
                log_start=delayed.log_start,
                leader_epoch=delayed.leader_epoch,
            )
        else:
            hint = error.details.get("leader")
            reply.results.add(
                index=delayed.index,
                error=frames.error_of(error),
                base_offset=NONE,
                last_offset=NONE,
                log_append_time_ms=NONE,
                leader_epoch=delayed.leader_epoch,
                leader_hint=int(hint) if hint is not None else NONE,
            )
        self._answer_ready.set()

    async def _send_answers(self) -> None:
        try:
            while True:
                while not self._answers:
                    self._answer_ready.clear()
                    await self._answer_ready.wait()
                answers, self._answers = self._answers, {}
                for correlation_id, reply in answers.items():
                    await self._stream.send(
                        frames.encode(head_of(reply, correlation_id=correlation_id))
                    )
                    self._owed -= len(reply.results)
                self._answer_sent.set()
        except Disconnected:
            return  # the reader notices too and ends the stream
