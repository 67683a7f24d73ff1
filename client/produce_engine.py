"""The producer's loop: takes chunks, steps the sender, writes frames, hears answers.

World-generic; `pk.client.producer` is the thread-safe façade over it.  Per broker one *link*: a
PRODUCE stream with a writer that encodes and sends frames in order, and a reader that hands answers
to the machine.

Invariants
  E1  the machine is stepped on the loop only; effects are performed in the order they came.
  E2  a frame the machine gave up is not written any more; frames are encoded ahead of their turn
      and sent in order; a batch is encoded by one thread at a time.
  E3  memory is released exactly once per piece, when its outcome is known.
  E4  what was sent to a topic that the metadata do not name waits, in order, until they do:
      `max_block_ms`, at most `delivery_timeout_ms`; only then it fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any

from pk import errors
from pk.client.accumulator import FRONT_MS, Budget, Chunk, Columns, RecordAccumulator
from pk.client.cluster import Cluster
from pk.client.endings import given_up
from pk.client.futures import Delivery, resolve
from pk.client.partitioner import Sticky
from pk.client.pending_topics import Handed, PendingTopics
from pk.client.produce_link import Link
from pk.client.producer_batch import FULL_SHARE, Piece, ProducerBatch
from pk.client.rows import batch_limit, cut, place, sizes, split
from pk.client.sender import Sender
from pk.client.sender_events import (
    Add,
    Event,
    Fail,
    IdGranted,
    InFlightRequest,
    Result,
    SenderOptions,
    Wake,
)
from pk.client.waiting import Monitor
from pk.effects import Effect, Publish, Respond, Send, SetTimer
from pk.log.storage import Buffer
from pk.types import NONE, PartitionKey
from pk.wire import pk_pb2 as wire
from pk.world import World

_log = logging.getLogger("pk.client")

#: How often a topic that something waits for is asked for again.
LOOK_AGAIN_MS = 500
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
        self.accumulators: dict[str, RecordAccumulator] = {}
        self.marked: dict[str, RecordAccumulator] = {}  #: something was left there
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
        self._pending = PendingTopics(min(options["max_block_ms"], options["delivery_timeout_ms"]))
        self._outstanding: dict[int, Delivery] = {}
        self._links: dict[int, Link] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._encoders: dict[ProducerBatch, asyncio.Task[list[Buffer]]] = {}  #: who encodes it last
        self._closed = False
        cluster.on_change.append(self._on_metadata)

    @property
    def identity(self) -> tuple[int, int]:
        """Producer id and epoch as granted last; safe in any thread."""
        return self._sender.granted

    # -- what the façade calls, on the loop --------------------------------------------------------

    def start(self) -> None:
        self.cluster.start()

    async def open(
        self, topic: str, timeout_ms: int, unknown_ms: int | None = None
    ) -> RecordAccumulator:
        """The door of a topic, once the metadata name it (`Cluster.topic`).  Raises what the broker
        says of it.
        """
        await self.cluster.topic(topic, timeout_ms, unknown_ms)
        if self.fatal is not None:  # closed meanwhile: no record may enter any more
            raise self.fatal
        found = self.accumulators.get(topic)
        if found is None:
            size = self.options["batch_size"]
            found = RecordAccumulator(
                topic,
                min(size, max(self.budget.limit // 4, 1024)),
                Sticky(size - size // FULL_SHARE, self.world.rng),
                self.budget,
                self.done,
            )
            self.accumulators[topic] = found
        return found

    def poke(self) -> None:
        """Take what was left at the doors, and send what is ripe."""
        now_ms = self.world.clock.monotonic_ms()
        again: float | None = None
        for topic in list(self.marked):
            accumulator = self.marked[topic]
            before = int(now_ms - self._front_ms)
            for taken in accumulator.take(before):
                self._admit(accumulator, taken, now_ms)
            since = accumulator.open_since
            if since is None:
                if not accumulator.sealed:
                    self.marked.pop(topic, None)
                    if accumulator.chunk is not None or accumulator.sealed:
                        self.marked[topic] = accumulator  # left there meanwhile, by another thread
            elif again is None or since + self._front_ms < again:
                again = since + self._front_ms
        self.step(Wake())
        if again is not None:
            self._set_timer("front", max(0.0, again - now_ms), self.poke)

    def begin_flush(self) -> list[Delivery]:
        """Send everything now; what must be done for the flush to be done."""
        now_ms = self.world.clock.monotonic_ms()
        for accumulator in list(self.accumulators.values()):
            for taken in accumulator.take(0, ready=True):
                self._admit(accumulator, taken, now_ms)
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
        for accumulator in self.accumulators.values():
            for taken in accumulator.take(0, ready=True):
                self._admit(accumulator, taken, now_ms)
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
        for accumulator in self.accumulators.values():
            accumulator.close(error)
        for topic in self._pending.topics():
            self._fail(self._pending.take(topic), error)
        self.budget.close(error)

    # -- taking ------------------------------------------------------------------------------------

    def _admit(self, accumulator: RecordAccumulator, taken: Chunk | Columns, now_ms: int) -> None:
        """To the machine, if it is known where to; else it waits (E4)."""
        name = accumulator.topic
        if self.fatal is None and (name in self._pending or self._unknown(name)):
            self._outstanding[id(taken)] = taken
            self._pending.add(accumulator, taken)
            self._look_again()
        else:
            self._hand_over(accumulator, taken, now_ms)

    def _unknown(self, name: str) -> bool:
        """Whether the metadata lack a topic, without another reason than that."""
        metadata = self.cluster.metadata
        problem = metadata.problems.get(name)
        lacks = problem is None or isinstance(problem, errors.UnknownTopicOrPartition)
        return lacks and name not in metadata.topics

    def _look_again(self) -> None:
        """Ask for the topics that something waits for, now and until none is left (E4)."""
        if "pending" not in self._timers:
            self.cluster.want_metadata()
            wait = self._pending.next_ms() - self.world.clock.monotonic_ms()
            self._set_timer("pending", min(wait, LOOK_AGAIN_MS), self._settle_pending)

    def _settle_pending(self) -> None:
        """Hand over what is known by now, fail what has waited for long enough."""
        self._cancel_timer("pending")
        now_ms = self.world.clock.monotonic_ms()
        for name in self._pending.topics():
            if self._unknown(name):
                nothing = errors.UnknownTopicOrPartition(f"topic {name} does not exist any more")
                error = given_up(self.cluster.metadata.problems.get(name) or nothing)
                self._fail(self._pending.expired(name, now_ms), error)
                continue
            for accumulator, taken in self._pending.take(name):
                self._hand_over(accumulator, taken, now_ms)
        if self._pending:
            self._look_again()

    def _fail(self, handed: Iterable[Handed], error: errors.PkError) -> None:
        """What was never split by partition."""
        for _, taken in handed:
            size = _size(taken)
            if isinstance(taken, Chunk):
                taken.count = len(taken.values) or taken.count
            taken.fail_unsplit(error)
            self.budget.release(size)
            self._outstanding.pop(id(taken), None)

    def _hand_over(
        self, accumulator: RecordAccumulator, taken: Chunk | Columns, now_ms: int
    ) -> None:
        """Split by partition and hand the pieces to the machine."""
        topic = self.cluster.metadata.topics.get(accumulator.topic)
        try:
            if topic is None:
                raise self.fatal or self.cluster.metadata.problems[accumulator.topic]
            batch_size = batch_limit(self.options["batch_size"], topic.configs)
            if isinstance(taken, Chunk):
                runs = self._runs(accumulator, taken, batch_size)
            else:
                runs = taken.pieces
        except Exception as cause:
            error = (
                cause if isinstance(cause, errors.PkError) else errors.InternalError(repr(cause))
            )
            self._fail([(accumulator, taken)], error)
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
            self.step(Add(accumulator.topic, key, piece, batch_size))

    def _on_metadata(self) -> None:
        for link in list(self._links.values()):
            link.follow()
        if self._pending:
            self._settle_pending()
        self.step(Wake())

    def _runs(
        self, accumulator: RecordAccumulator, chunk: Chunk, batch_size: int
    ) -> list[tuple[int, int, Any, int]]:
        rows, explicit = chunk.rows()
        topic = self.cluster.metadata.topics[accumulator.topic]
        available = self.cluster.metadata.available(topic)
        with accumulator.sticky_lock:
            chosen = place(
                rows, explicit, topic.partitions, accumulator.sticky, available, chunk.size
            )
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

    def _settle(self, batch: ProducerBatch, result: Result) -> None:
        offsets, offset = [], result.base_offset
        for piece in batch.pieces:
            offsets.append(offset)
            offset += piece.count if offset != NONE else 0
        parts = [piece.part for piece in batch.pieces]
        self.budget.release(batch.size)
        resolve(parts, offsets, append_time_ms=result.append_time_ms, error=result.error)
        for part in parts:
            if part.delivery.done:
                self._outstanding.pop(id(part.delivery), None)

    async def _fetch_id(self) -> None:
        request = wire.InitProducerIdRequest(producer_id=NONE, producer_epoch=NONE)
        backoff = self.cluster.new_backoff()
        while not self._closed:
            try:
                reply = await self.cluster.call_any(
                    request, timeout_ms=self.options["request_timeout_ms"]
                )
            except errors.RetriableError as cause:
                _log.debug("no producer id yet: %s", cause)
                await self.world.clock.sleep_ms(backoff.next_ms())
                continue
            except errors.PkError as cause:
                self.step(Fail(cause))
                return
            assert isinstance(reply, wire.InitProducerIdReply)
            self.step(IdGranted(reply.producer_id, reply.producer_epoch))
            return

    # -- encoding ----------------------------------------------------------------------------------

    def encode(
        self, frame: InFlightRequest, build: Callable[[InFlightRequest], list[Buffer]]
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

    def _encoded(self, frame: InFlightRequest, task: asyncio.Task[list[Buffer]]) -> None:
        self._forget_task(task)
        for batch in frame.batches:
            if self._encoders.get(batch) is task:
                del self._encoders[batch]
        if not task.cancelled():
            task.exception()  # of a frame that was given up nobody else asks

    # -- plumbing ----------------------------------------------------------------------------------

    def _link(self, node: int) -> Link:
        found = self._links.get(node)
        if found is None:
            found = self._links[node] = Link(self, node)
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


def _size(taken: Chunk | Columns) -> int:
    return taken.size if isinstance(taken, Chunk) else sum(run[3] for run in taken.pieces)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
