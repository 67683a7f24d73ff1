"""The producer's loop: takes chunks, steps the sender, writes frames, hears answers.

World-generic; `pk.client.producer` is the thread-safe façade over it.  Per broker one *link*: a
PRODUCE stream with a writer that encodes and sends frames in order, and a reader that hands answers
to the machine.

Invariants
  E1  the machine is stepped on the loop only; effects are performed in the order they came.
  E2  a frame the machine gave up is not written any more; frames are encoded ahead of their turn
      and sent in order; a batch is encoded by one thread at a time.
  E3  memory is released exactly once per piece, when its outcome is known.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from pk import errors
from pk.client.accumulator import FULL_SHARE, Batch, Piece, batch_limit, cut, place, sizes, split
from pk.client.cluster import Cluster
from pk.client.futures import Delivery, resolve
from pk.client.intake import FRONT_MS, Budget, Chunk, Columns, Intake
from pk.client.partitioner import Sticky
from pk.client.sender import Sender
from pk.client.sender_events import (
    Add,
    Broken,
    Event,
    Fail,
    Frame,
    IdGranted,
    Outcome,
    Replied,
    Result,
    SenderOptions,
    Wake,
    Written,
)
from pk.client.waiting import Monitor
from pk.effects import Effect, Publish, Respond, Send, SetTimer
from pk.log.storage import Buffer
from pk.types import NONE, PartitionKey
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import head_of, open_stream
from pk.world import Disconnected, Stream, StreamKind, World

_log = logging.getLogger("pk.client")

#: So many frames of a broker are encoded at once.
AHEAD = 3
#: A broker that lives says hello at once.
HELLO_TIMEOUT_MS = 5_000
#: Runs CPU-bound work off the loop, a few at a time; in the simulator, at once.
Compute = Callable[[Callable[[], Any]], Awaitable[Any]]


def acks_of(text: str) -> int:
    return {"0": 0, "1": 1}.get(text, NONE)


class ProduceEngine:
    """One producer.  `options` are resolved (settings.PRODUCER)."""

    def __init__(
        self,
        world: World,
        cluster: Cluster,
        options: Mapping[str, Any],
        *,
        idempotent: bool,
        compute: Compute | None = None,
    ) -> None:
        self.world = world
        self.cluster = cluster
        self.options = options
        self.idempotent = idempotent
        self.acks = acks_of(options["acks"])
        self.compute = compute
        self.budget = Budget(options["buffer_memory"])
        self.done = Monitor()
        self.intakes: dict[str, Intake] = {}
        self.marked: dict[str, Intake] = {}  #: something was left there
        self.fatal: errors.PkError | None = None
        self._linger_ms = float(options["linger_ms"])
        self._front_ms = min(FRONT_MS, self._linger_ms)
        self._sender = Sender(
            SenderOptions(
                acks=self.acks,
                idempotent=idempotent,
                max_in_flight=options["max_in_flight"],
                batch_size=options["batch_size"],
                delivery_timeout_ms=options["delivery_timeout_ms"],
                request_timeout_ms=options["request_timeout_ms"],
                retry_backoff_ms=options["retry_backoff_ms"],
                retry_backoff_max_ms=options["retry_backoff_max_ms"],
            ),
            cluster.metadata,
            world.rng,
        )
        self._outstanding: dict[int, Delivery] = {}
        self._links: dict[int, _Link] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._encoders: dict[Batch, asyncio.Task[list[Buffer]]] = {}  #: who encodes it last
        self._closed = False
        cluster.on_change.append(self._on_metadata)

    @property
    def identity(self) -> tuple[int, int]:
        """Producer id and epoch as granted last; safe in any thread."""
        return self._sender.granted

    # -- what the façade calls, on the loop --------------------------------------------------------

    def start(self) -> None:
        self.cluster.start()

    async def open(self, topic: str, timeout_ms: int) -> Intake:
        """The door of a topic; asks for its metadata first.  Raises what the broker says of it."""
        found = self.intakes.get(topic)
        if found is None:
            await self.cluster.topic(topic, timeout_ms)
            found = self.intakes.get(topic)
            if self.fatal is not None:  # closed meanwhile: no record may enter any more
                raise self.fatal
        if found is None:
            size = self.options["batch_size"]
            found = Intake(
                topic,
                min(size, max(self.budget.limit // 4, 1024)),
                Sticky(size - size // FULL_SHARE, self.world.rng),
                self.budget,
                self.done,
            )
            self.intakes[topic] = found
        return found

    def poke(self) -> None:
        """Take what was left at the doors, and send what is ripe."""
        now_ms = self.world.clock.monotonic_ms()
        again: float | None = None
        for topic in list(self.marked):
            intake = self.marked[topic]
            before = int(now_ms - self._front_ms)
            for taken in intake.take(before):
                self._admit(intake, taken, now_ms)
            since = intake.open_since
            if since is None:
                if not intake.sealed:
                    self.marked.pop(topic, None)
                    if intake.chunk is not None or intake.sealed:
                        self.marked[topic] = intake  # left there meanwhile, by another thread
            elif again is None or since + self._front_ms < again:
                again = since + self._front_ms
        self.step(Wake())
        if again is not None:
            self._set_timer("front", max(0.0, again - now_ms), self.poke)

    def begin_flush(self) -> list[Delivery]:
        """Send everything now; what must be done for the flush to be done."""
        now_ms = self.world.clock.monotonic_ms()
        for intake in list(self.intakes.values()):
            for taken in intake.take(0, ready=True):
                self._admit(intake, taken, now_ms)
        self.step(Wake(flush=True))
        return list(self._outstanding.values())

    async def flush(self, timeout_ms: int) -> None:
        """Wait until everything handed over before has an outcome.  Raises `TimeoutError`."""
        loop = asyncio.get_running_loop()
        for delivery in self.begin_flush():
            settled: asyncio.Future[None] = loop.create_future()
            with delivery.monitor.lock:
                if delivery.done:
                    continue
                if delivery.waiters is None:
                    delivery.waiters = []
                delivery.waiters.append(partial(_set, settled))
            async with asyncio.timeout(timeout_ms / 1000):
                await settled

    async def close(self, error: errors.PkError | None = None) -> None:
        """Fail what is left, end the streams."""
        if self._closed:
            return
        reason = error or errors.ClosedError("the producer was closed")
        self._refuse(reason)
        now_ms = self.world.clock.monotonic_ms()
        for intake in self.intakes.values():
            for taken in intake.take(0, ready=True):
                self._admit(intake, taken, now_ms)
        self.step(Fail(reason))
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        for link in list(self._links.values()):
            await link.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*list(self._tasks), return_exceptions=True)
        await self.cluster.close()

    def _refuse(self, error: errors.PkError) -> None:
        self.fatal = error
        for intake in self.intakes.values():
            intake.close(error)
        self.budget.close(error)

    # -- taking ------------------------------------------------------------------------------------

    def _admit(self, intake: Intake, taken: Chunk | Columns, now_ms: int) -> None:
        """Split by partition and hand the pieces to the machine."""
        topic = self.cluster.metadata.topics.get(intake.topic)
        size = taken.size if isinstance(taken, Chunk) else sum(run[3] for run in taken.pieces)
        try:
            if topic is None:
                raise self.cluster.metadata.problems.get(
                    intake.topic
                ) or errors.UnknownTopicOrPartition(f"topic {intake.topic} does not exist any more")
            batch_size = batch_limit(self.options["batch_size"], topic.configs)
            if isinstance(taken, Chunk):
                runs = self._runs(intake, taken, batch_size)
            else:
                runs = taken.pieces
        except Exception as cause:
            error = (
                cause if isinstance(cause, errors.PkError) else errors.InternalError(repr(cause))
            )
            if isinstance(taken, Chunk):
                taken.count = len(taken.values) or taken.count
            taken.fail_unsplit(error)
            self.budget.release(size)
            return
        ready_ms = now_ms if taken.ready else int(taken.opened_ms + self._linger_ms)
        pieces = []
        for partition, first, rows, run_size in runs:
            part = taken.add_part(partition, first, rows.num_rows)
            pieces.append(Piece(rows, run_size, part, taken.stamp_ms, taken.opened_ms, ready_ms))
        taken.split = True
        if isinstance(taken, Columns):
            taken.pieces = []  # the rows are the machine's now: a kept future must not keep them
        self._outstanding[id(taken)] = taken
        for piece in pieces:
            key = PartitionKey(topic.topic_id, piece.part.partition)
            self.step(Add(intake.topic, key, piece, batch_size))

    def _on_metadata(self) -> None:
        for link in list(self._links.values()):
            link.follow()
        self.step(Wake())

    def _runs(
        self, intake: Intake, chunk: Chunk, batch_size: int
    ) -> list[tuple[int, int, Any, int]]:
        rows, explicit = chunk.rows()
        topic = self.cluster.metadata.topics[intake.topic]
        available = self.cluster.metadata.available(topic)
        with intake.sticky_lock:
            chosen = place(rows, explicit, topic.partitions, intake.sticky, available, chunk.size)
        runs = split(rows, chosen, chunk)
        if chunk.size > batch_size:  # the topic takes less than a chunk at once
            runs = [piece for run in runs for piece in cut(run, batch_size)]
        if len(runs) == 1:
            return [(*runs[0], chunk.size)]
        each = [int(sizes(run).sum()) for _, _, run in runs]
        each[-1] = chunk.size - sum(each[:-1])  # E3: together exactly what was reserved
        return [(*run, size) for run, size in zip(runs, each, strict=True)]

    # -- the machine -------------------------------------------------------------------------------

    def step(self, event: Event) -> None:
        if self._closed:
            return
        for effect in self._sender.step(event, self.world.clock.monotonic_ms()):
            self._perform(effect)
        if self._sender.fatal is not None and self.fatal is None:
            self._refuse(self._sender.fatal)

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Send):
            self._link(effect.peer).put(effect.message)
        elif isinstance(effect, Respond):
            self._settle(effect.request, effect.reply)
        elif isinstance(effect, SetTimer):
            if effect.at_ms is None:
                self._cancel_timer("sender")
            else:
                wait = effect.at_ms - self.world.clock.monotonic_ms()
                self._set_timer("sender", wait, lambda: self.step(Wake()))
        elif isinstance(effect, Publish):
            if effect.name == "metadata":
                self.cluster.want_metadata()
            elif effect.name == "producer_id":
                self._spawn(self._fetch_id())
            elif effect.name == "reset":
                self._link(effect.value).reset()

    def _settle(self, batch: Batch, outcome: Outcome) -> None:
        offsets, offset = [], outcome.base_offset
        for piece in batch.pieces:
            offsets.append(offset)
            offset += piece.count if offset != NONE else 0
        parts = [piece.part for piece in batch.pieces]
        self.budget.release(batch.size)
        resolve(parts, offsets, append_time_ms=outcome.append_time_ms, error=outcome.error)
        for part in parts:
            if part.delivery.done:
                self._outstanding.pop(id(part.delivery), None)

    async def _fetch_id(self) -> None:
        request = wire.InitProducerIdRequest(producer_id=NONE, producer_epoch=NONE)
        tries = 0
        while not self._closed:
            try:
                reply = await self.cluster.call_any(
                    request, timeout_ms=self.options["request_timeout_ms"]
                )
            except errors.RetriableError as cause:
                tries += 1
                _log.debug("no producer id yet: %s", cause)
                await self.world.clock.sleep_ms(self.cluster.backoff(tries))
                continue
            except errors.PkError as cause:
                self.step(Fail(cause))
                return
            assert isinstance(reply, wire.InitProducerIdReply)
            self.step(IdGranted(reply.producer_id, reply.producer_epoch))
            return

    # -- encoding ----------------------------------------------------------------------------------

    def encode(
        self, frame: Frame, build: Callable[[Frame], list[Buffer]]
    ) -> asyncio.Task[list[Buffer]]:
        """Begin to build the frame off the loop, behind older ones with the same batch (E2)."""
        earlier = {self._encoders[batch] for batch in frame.batches if batch in self._encoders}

        async def work() -> list[Buffer]:
            assert self.compute is not None
            if earlier:
                await asyncio.wait(earlier)
            found: list[Buffer] = await self.compute(partial(build, frame))
            return found

        task = asyncio.get_running_loop().create_task(work())
        self._tasks[task] = None
        for batch in frame.batches:
            self._encoders[batch] = task
        task.add_done_callback(partial(self._encoded, frame))
        return task

    def _encoded(self, frame: Frame, task: asyncio.Task[list[Buffer]]) -> None:
        self._forget_task(task)
        for batch in frame.batches:
            if self._encoders.get(batch) is task:
                del self._encoders[batch]
        if not task.cancelled():
            task.exception()  # of a frame that was given up nobody else asks

    # -- plumbing ----------------------------------------------------------------------------------

    def _link(self, node: int) -> _Link:
        found = self._links.get(node)
        if found is None:
            found = self._links[node] = _Link(self, node)
        return found

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._forget_task)

    def _forget_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)

    def _set_timer(self, name: str, wait_ms: float, call: Callable[[], None]) -> None:
        self._cancel_timer(name)
        loop = asyncio.get_running_loop()
        self._timers[name] = loop.call_later(max(0.0, wait_ms) / 1000, call)

    def _cancel_timer(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()


class _Link:
    """The PRODUCE stream to one broker."""

    def __init__(self, engine: ProduceEngine, node: int) -> None:
        self._engine = engine
        self._node = node
        self._queue: deque[Frame] = deque()
        self._encoding: dict[int, asyncio.Task[list[Buffer]]] = {}  #: by correlation id
        self._filled = asyncio.Event()
        self._stream: Stream | None = None
        self._address = ""  #: where the stream leads
        self._reader: asyncio.Task[None] | None = None
        self._writer = asyncio.get_running_loop().create_task(self._write())

    def put(self, frame: Frame) -> None:
        self._queue.append(frame)
        self._filled.set()

    def follow(self) -> None:
        """A broker that came back elsewhere does not answer where it was."""
        address = self._engine.cluster.metadata.brokers.get(self._node, self._address)
        if self._stream is not None and address != self._address:
            self._broke(errors.BrokerUnavailable(f"broker {self._node} moved to {address}"))

    def reset(self) -> None:
        """The machine gave up every frame of this broker: forget them, and the stream."""
        self._clear()
        self._drop_stream()

    def _clear(self) -> None:
        self._queue.clear()
        self._encoding.clear()  # what is under way ends by itself, nobody waits for it

    async def close(self) -> None:
        self.reset()
        self._writer.cancel()
        await asyncio.gather(self._writer, return_exceptions=True)

    def _drop_stream(self) -> None:
        stream, self._stream = self._stream, None
        reader, self._reader = self._reader, None
        if stream is not None:
            stream.close()
        if reader is not None and reader is not asyncio.current_task():
            reader.cancel()

    def _broke(self, error: errors.PkError) -> None:
        unsent = frozenset(frame.correlation_id for frame in self._queue)
        self._clear()
        self._drop_stream()
        self._engine.step(Broken(self._node, error, unsent))

    async def _write(self) -> None:
        while True:
            while not self._queue:
                self._filled.clear()
                await self._filled.wait()
            try:
                stream = self._stream or await self._connect()
            except errors.PkError as cause:
                if not cause.retriable:
                    _log.error("cannot produce to broker %d: %s", self._node, cause)
                self._broke(errors.BrokerUnavailable(cause.message))
                continue
            if not self._queue:
                continue  # given up meanwhile (E2)
            frame = self._queue[0]
            if not frame.open:  # everything in it went to another leader meanwhile (E2)
                self._queue.popleft()
                self._encoding.pop(frame.correlation_id, None)
                continue
            try:
                pieces = await self._encoded(frame)
            except Exception as cause:
                if self._queue and self._queue[0] is frame:
                    self._queue.popleft()
                    self._refuse(frame, cause)
                continue
            if stream is not self._stream or not self._queue or self._queue[0] is not frame:
                continue
            self._queue.popleft()
            try:
                await stream.send(*pieces)
            except Disconnected as cause:
                if stream is self._stream:
                    self._broke(errors.BrokerUnavailable(f"broker {self._node}: {cause}"))
                continue
            if self._engine.acks == 0:
                self._engine.step(Written(frame.correlation_id))

    def _refuse(self, frame: Frame, cause: Exception) -> None:
        """The frame cannot be written at all: its batches fail, the others go on."""
        if not isinstance(cause, errors.PkError):
            _log.error("cannot encode a batch", exc_info=cause)
            cause = errors.InternalError(f"cannot encode a batch: {cause!r}")
        results = [Result(index, cause) for index in range(len(frame.batches))]
        self._engine.step(Replied(frame.correlation_id, results))

    async def _connect(self) -> Stream:
        engine = self._engine
        address = engine.cluster.metadata.brokers.get(self._node)
        if address is None:
            raise errors.BrokerUnavailable(f"broker {self._node} is not known any more")
        try:
            patience_ms = min(HELLO_TIMEOUT_MS, engine.options["request_timeout_ms"])
            async with asyncio.timeout(patience_ms / 1000):
                stream, _ = await open_stream(
                    engine.world.network, address, StreamKind.PRODUCE, engine.cluster.hello
                )
        except TimeoutError:
            raise errors.BrokerUnavailable(f"{address}: no answer to the hello") from None
        self._stream, self._address = stream, address
        self._reader = asyncio.get_running_loop().create_task(self._read(stream))
        return stream

    async def _encoded(self, frame: Frame) -> list[Buffer]:
        """The bytes of the first frame; those behind it are begun, too, if they are to be
        compressed: that takes longer than all else, and has threads of its own."""
        if self._engine.options["compression"] == "none" or self._engine.compute is None:
            return self._build(frame)
        for each in itertools.islice(self._queue, AHEAD):
            if each.correlation_id not in self._encoding:
                self._encoding[each.correlation_id] = self._engine.encode(each, self._build)
        task = self._encoding[frame.correlation_id]
        await asyncio.wait([task])
        self._encoding.pop(frame.correlation_id, None)
        return task.result()

    def _build(self, frame: Frame) -> list[Buffer]:
        options = self._engine.options
        codec, level = options["compression"], options["compression_level"]
        payload: list[Buffer] = []
        request = wire.ProduceRequest(
            acks=self._engine.acks,
            timeout_ms=max(1, options["request_timeout_ms"] * 9 // 10),
        )
        for batch, epoch in zip(frame.batches, frame.epochs, strict=True):
            parts = batch.encode(codec, level)
            request.partitions.add(
                topic_id=batch.key.topic_id,
                partition=batch.key.partition,
                current_leader_epoch=epoch,
                batch_bytes=sum(map(len, parts)),
            )
            payload += parts
        return frames.pieces(head_of(request, correlation_id=frame.correlation_id), payload)

    async def _read(self, stream: Stream) -> None:
        why: errors.PkError
        try:
            while (raw := await stream.recv()) is not None:
                frame = frames.decode(raw)
                if frame.head.HasField("error"):
                    raise frames.raise_error(frame.head.error)
                reply = frame.head.produce_reply
                self._engine.step(
                    Replied(frame.head.correlation_id, list(map(_result, reply.results)))
                )
            why = errors.BrokerUnavailable(f"broker {self._node} closed the stream")
        except Disconnected as cause:
            why = errors.BrokerUnavailable(f"broker {self._node}: {cause}")
        except errors.PkError as cause:
            _log.warning("broker %d refused the produce stream: %s", self._node, cause)
            why = errors.BrokerUnavailable(f"broker {self._node}: {cause.message}")
        if stream is self._stream:
            self._broke(why)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _result(result: wire.ProduceResult) -> Result:
    if result.HasField("error"):
        return Result(result.index, frames.raise_error(result.error), log_start=result.log_start)
    return Result(
        result.index, None, result.base_offset, result.log_append_time_ms or NONE, result.log_start
    )
