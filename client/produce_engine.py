"""The producer's loop: takes record sets, steps the sender, writes requests, reads responses.

World-generic; `pk.client.producer` is the thread-safe façade over it.  Per broker there is one
`ProduceConnection`: a writer that encodes and sends requests in order, and a reader that hands
responses to the machine.

Invariants
  E1  The machine is stepped on the loop only.  Effects are performed in the order they came.
  E2  A request that the machine gave up is not written any more.  Requests are encoded ahead of
      their turn and sent in order.  A batch is encoded by one thread at a time.
  E3  Memory is released exactly once per slice, when its outcome is known.
  E4  Records of a topic that the metadata do not contain wait in its accumulator, in order, until
      the topic appears.  They fail after `max_block_ms`, at most `delivery_timeout_ms`.
  E5  A producer with a transactional id accepts records in a transaction only.  A record that was
      accepted and fails, fails the transaction.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from pk import errors, limits
from pk.client.accumulator import (
    FULL_SHARE,
    OPEN_MS,
    BufferPool,
    RecordAccumulator,
)
from pk.client.endings import given_up
from pk.client.network_client import NetworkClient
from pk.client.partitioner import Sticky
from pk.client.producer_batch import InFlightRequest, PartitionResponse, ProducerBatch
from pk.client.producer_metrics import ProducedCounts
from pk.client.record_set import BatchOutcome, RecordSet, resolve
from pk.client.rows import batch_limit
from pk.client.sender import Sender
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
from pk.client.waiting import Monitor
from pk.effects import Effect, Publish, Respond, Send, SetTimer
from pk.log.storage import Buffer
from pk.machine_timers import MachineTimers
from pk.tasks import TaskRegistry
from pk.types import NONE, PartitionKey
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import head_of
from pk.world import Disconnected, Stream, StreamKind, World

_log = logging.getLogger("pk.client")

#: How often a missing topic with waiting records is asked for again.
LOOK_AGAIN_MS = 500
#: Number of requests to one broker that are encoded at the same time.
AHEAD = 3
#: Requests up to this size are compressed on the loop: a change of threads would take longer.
INLINE_BYTES = 32 * limits.KIB
#: Runs CPU-bound work off the loop, a few at a time; in the simulator, inline.
Compute = Callable[[Callable[[], Any]], Coroutine[Any, Any, Any]]


class ProduceEngine:
    """The engine of one producer.  `options` are resolved (settings.PRODUCER)."""

    def __init__(
        self,
        world: World,
        cluster: NetworkClient,
        options: Mapping[str, Any],
        *,
        compute: Compute | None = None,
    ) -> None:
        self.world = world
        self.cluster = cluster
        self.options = options
        self.compute = compute
        self.pool = BufferPool(options["buffer_memory"])
        self.counts = ProducedCounts()
        self.monitor = Monitor()  #: notified when a record's outcome is known
        self.accumulators: dict[str, RecordAccumulator] = {}
        #: those that may hold records, by their number in `accumulators` (client/accumulator I4)
        self._busy: dict[int, RecordAccumulator] = {}
        self.fatal: errors.PkError | None = None
        #: called after each step of the machine that may change the state of a transaction
        self.on_step: Callable[[], None] | None = None
        self._discarding: errors.PkError | None = None  #: accepted records fail with it
        self._open_ms = min(OPEN_MS, float(options["linger_ms"]))
        self._topic_wait_ms = min(options["max_block_ms"], options["delivery_timeout_ms"])
        #: the machine; the TransactionEngine beside it reads `handed` and `failed`
        self.sender = Sender(options, cluster.metadata, world.rng)
        self._outstanding: dict[int, RecordSet] = {}  #: record sets handed to the sender, by `id`
        self._streams: dict[int, ProduceConnection] = {}
        self._timers = MachineTimers(world.clock)
        self.tasks = TaskRegistry()
        self._closed = False
        cluster.on_change.append(self._on_metadata)

    # -- what the façade calls, on the loop --------------------------------------------------------

    async def open(
        self, topic: str, timeout_ms: int, unknown_ms: int | None = None
    ) -> RecordAccumulator:
        """Return the accumulator of a topic once the metadata contain the topic
        (`NetworkClient.topic`).

        Raises the error that a broker returned for the topic.
        """
        await self.cluster.topic(topic, timeout_ms, unknown_ms)
        if self.fatal is not None:  # closed meanwhile: records are refused from now on
            raise self.fatal
        found = self.accumulators.get(topic)
        if found is None:
            size = self.options["batch_size"]
            sticky = Sticky(size - size // FULL_SHARE, self.world.rng)
            found = self.accumulators[topic] = RecordAccumulator(
                topic, self.options, sticky, self.pool, self.monitor, self.world.clock,
                self._busy, len(self.accumulators),
            )  # fmt: skip
        return found

    def poke(self, *, flush: bool = False) -> None:
        """Take the records from the accumulators, and send the batches that are ready.

        `flush`: records and batches do not wait for more.
        """
        now_ms = self.world.clock.monotonic_ms()
        opened_ms: list[int] = []
        for number in sorted(self._busy):  # one step of the interpreter: other threads add
            accumulator = self._busy.pop(number, None)
            if accumulator is None:  # a step of the machine within this loop has poked, too
                continue
            accumulator.seal(int(now_ms - self._open_ms), ready=flush)
            self._drain(accumulator, now_ms)
            if (records := accumulator.open) is not None:
                opened_ms.append(records.opened_ms)
            if records is not None or accumulator.sealed:
                self._busy[number] = accumulator
        self.step(Wakeup(flush))
        if opened_ms:
            self._timers.set("open", min(opened_ms) + self._open_ms, self.poke)

    def begin_flush(self) -> list[RecordSet]:
        """Send everything now; returns the record sets whose outcomes the flush must wait for."""
        self.poke(flush=True)
        waiting = [list(accumulator.sealed) for accumulator in self.accumulators.values()]
        return [*self._outstanding.values(), *itertools.chain(*waiting)]

    # -- transactions (client/transaction_engine) --------------------------------------------------

    @property
    def settled(self) -> bool:
        """Whether every accepted record has an outcome, and no batch waits for an answer."""
        return (
            not self._outstanding
            and self.sender.idle
            and all(not each.sealed and each.open is None for each in self.accumulators.values())
        )

    def begin_transaction(self, producer_id: int, epoch: int) -> None:
        """Accept records again; they are sent under this pair, from sequence 0 on (X1)."""
        self._discarding = None
        self.step(BeginTransaction(producer_id, epoch))
        self.pool.refusal = None

    def refuse(self, error: errors.PkError | None) -> None:
        """Refuse records with `error` until the next transaction begins."""
        self.pool.refusal = error
        for accumulator in self.accumulators.values():
            accumulator.close()

    def discard(self, error: errors.PkError) -> None:
        """Refuse records, and fail those accepted, unless a broker may have got them."""
        self.refuse(error)
        self._discarding = error
        self.step(FailTransaction(error))
        self.poke()

    async def close(self) -> None:
        """Fail all unresolved records and end the streams."""
        if self._closed:
            return
        self.step(ForceClose(errors.ClosedError("the producer was closed")))
        self._closed = True
        self._timers.close()
        for stream in self._streams.values():
            stream.reset()
        await self.tasks.close()
        await self.cluster.close()

    # -- record sets -------------------------------------------------------------------------------

    def _drain(self, accumulator: RecordAccumulator, now_ms: int) -> None:
        """Split sealed record sets by partition and hand the slices to the machine.

        If the metadata lack the topic, its record sets wait in the accumulator (E4).
        """
        metadata, name = self.cluster.metadata, accumulator.topic
        problem = metadata.problems.get(name) or errors.UnknownTopicOrPartition(
            f"topic {name} does not exist any more"
        )
        lacks = isinstance(problem, errors.UnknownTopicOrPartition)
        while accumulator.sealed:
            topic = metadata.topics.get(name)
            until_ms = accumulator.sealed[0].opened_ms + self._topic_wait_ms
            if topic is None and lacks and until_ms > now_ms and self._discarding is None:
                if "topic" not in self._timers:
                    self.cluster.want_metadata()
                    self._timers.set(
                        "topic", min(until_ms, now_ms + LOOK_AGAIN_MS), self._look_again
                    )
                return
            records = accumulator.sealed.popleft()
            try:
                if self._discarding is not None:
                    raise self._discarding
                if topic is None:
                    raise given_up(problem) if lacks else problem
                if records.slices is None:  # `send_batch` has split its records already
                    available = partial(metadata.available, topic)
                    if not accumulator.split_few(records, topic, available):
                        accumulator.split(records, *records.columns(), topic, available())
            except Exception as cause:
                typed = cause if isinstance(cause, errors.PkError) else None
                self._fail(records, typed or errors.InternalError(repr(cause)))
                continue
            self._outstanding[id(records)] = records
            batch_size = batch_limit(accumulator.batch_size, topic.configs)
            if self._closed:
                return
            for each in records.slices or ():
                key = PartitionKey(topic.topic_id, each.partition)
                self.sender.append(key, each, batch_size)

    def _fail(self, records: RecordSet, error: errors.PkError) -> None:
        """Fail records that were not handed to the machine."""
        self.pool.release(records.size)
        records.fail(error)
        if self.on_step is not None and self.fatal is None:
            self.step(FailTransaction(error))  # E5

    def _on_metadata(self) -> None:
        for stream in list(self._streams.values()):
            stream.follow()
        self._look_again()

    def _look_again(self) -> None:
        """Hand over, or fail, the records that waited for their topic (E4)."""
        self._timers.set("topic", None, self.poke)
        self.poke()

    # -- the machine -------------------------------------------------------------------------------

    def step(self, event: SenderEvent) -> None:
        """Step the machine and perform its effects."""
        if self._closed:
            return
        released = 0
        settled: list[Respond] = []
        for effect in self.sender.step(event, self.world.clock.monotonic_ms()):
            if type(effect) is Respond:
                settled.append(effect)  # the batches of a response get their outcomes together
                continue
            if settled:
                released += self._settle(settled)
                settled = []
            self._perform(effect)
        if settled:
            released += self._settle(settled)
        if released:
            self.pool.release(released)
        if self.sender.fatal is not None and self.fatal is None:
            self.fatal = self.sender.fatal
            self.refuse(self.fatal)
            for accumulator in self.accumulators.values():
                while accumulator.sealed:
                    self._fail(accumulator.sealed.popleft(), self.fatal)
        if self.on_step is not None:
            self.on_step()

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Send):
            self._stream(effect.peer).put(effect.message)
        elif isinstance(effect, SetTimer):
            self._timers.set("sender", effect.at_ms, lambda: self.step(Wakeup()))
        elif isinstance(effect, Publish):
            if effect.name == "metadata":
                self.cluster.want_metadata()
            elif effect.name == "producer_id":
                self.tasks.spawn(self._init_producer_id())
            elif effect.name == "reset":
                self._stream(effect.value).reset()

    def _settle(self, settled: list[Respond]) -> int:
        """Give the futures of batches their outcomes; returns the memory to be released."""
        released = 0
        outcomes = []
        for each in settled:
            batch: ProducerBatch = each.request
            response: PartitionResponse = each.reply
            self.counts.settled(batch.count, response.error is not None)
            outcomes.append(
                BatchOutcome(
                    batch.slices, response.base_offset, response.append_time_ms, response.error
                )
            )
            released += batch.size
        resolve(outcomes)
        for outcome in outcomes:
            for part in outcome.slices:
                if not part.records.unresolved:
                    self._outstanding.pop(id(part.records), None)
        return released

    async def _init_producer_id(self) -> None:
        request = wire.InitProducerIdRequest(producer_id=NONE, producer_epoch=NONE)
        timeout_ms = self.options["request_timeout_ms"]
        backoff = self.cluster.new_backoff()
        while not self._closed:
            try:
                reply = await self.cluster.call_any(request, timeout_ms=timeout_ms)
            except errors.RetriableError as cause:
                _log.debug("no producer id yet: %s", cause)
                await self.world.clock.sleep_ms(backoff.next_ms())
                continue
            except errors.PkError as cause:
                self.step(ForceClose(cause))
                return
            assert isinstance(reply, wire.InitProducerIdReply)
            self.step(ProducerIdGranted(reply.producer_id, reply.producer_epoch))
            return

    # -- streams -----------------------------------------------------------------------------------

    def _stream(self, node: int) -> ProduceConnection:
        found = self._streams.get(node)
        if found is None:
            found = self._streams[node] = ProduceConnection(
                self.cluster, self.options, self.compute, self.tasks, self.step, node
            )
        return found


class ProduceConnection:
    """The PRODUCE stream to one broker."""

    def __init__(
        self,
        cluster: NetworkClient,
        options: Mapping[str, Any],
        compute: Compute | None,
        tasks: TaskRegistry,
        step: Callable[[SenderEvent], None],
        node: int,
    ) -> None:
        self._cluster = cluster
        self._options = options
        self._acks = {"0": 0, "1": 1}.get(options["acks"], NONE)
        self._codec: tuple[str, int] = (options["compression"], options["compression_level"])
        self._compute = compute
        self._tasks = tasks  #: of the engine, with which they end
        self._step = step
        self._node = node
        self._requests: deque[InFlightRequest] = deque()  #: requests not written yet
        self._filled = asyncio.Event()
        self._stream: Stream | None = None
        self._address = ""  #: the address that the stream is connected to
        tasks.spawn(self._write())

    def put(self, request: InFlightRequest) -> None:
        self._requests.append(request)
        self._filled.set()

    def follow(self) -> None:
        """End the stream if its broker has moved to another address."""
        address = self._cluster.metadata.brokers.get(self._node, self._address)
        if self._stream is not None and address != self._address:
            self._lost(f"broker {self._node} moved to {address}")

    def reset(self) -> None:
        """Forget all requests and the stream: the machine has given up every request to this
        broker.
        """
        self._requests.clear()
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()  # its reader ends

    def _lost(self, why: str) -> None:
        unsent = frozenset(request.correlation_id for request in self._requests)
        self.reset()
        self._step(ConnectionLost(self._node, errors.BrokerUnavailable(why), unsent))

    async def _write(self) -> None:
        while True:
            while not self._requests:
                self._filled.clear()
                await self._filled.wait()
            if self._stream is None:
                await self._connect()
                continue  # the machine may have given the request up meanwhile (E2)
            stream, request = self._stream, self._requests[0]
            if not request.open:  # all its batches went to another leader meanwhile (E2)
                self._requests.popleft()
                continue
            encoded = await self._encoded(request)
            if not self._requests or self._requests[0] is not request:
                continue  # the stream was reset meanwhile
            self._requests.popleft()
            if isinstance(encoded, errors.PkError):
                self._answer(request, encoded)
                continue
            try:
                await stream.send(*encoded)
            except Disconnected as cause:
                if stream is self._stream:
                    self._lost(f"broker {self._node}: {cause}")
                continue
            if self._acks == 0:  # with acks=0 no response follows
                self._answer(request)

    def _answer(self, request: InFlightRequest, error: errors.PkError | None = None) -> None:
        """Give the machine a response to all batches of a request in place of the broker's."""
        responses = [PartitionResponse(index, error) for index in range(len(request.batches))]
        self._step(ProduceResponse(request.correlation_id, responses))

    async def _connect(self) -> None:
        cluster = self._cluster
        timeout_ms = self._options["request_timeout_ms"]
        try:
            self._stream, self._address = await cluster.open_stream(
                self._node, StreamKind.PRODUCE, timeout_ms
            )
        except errors.PkError as cause:
            if not cause.retriable:
                _log.error("cannot produce to broker %d: %s", self._node, cause)
            self._lost(cause.message)
        else:
            self._tasks.spawn(self._read(self._stream))

    async def _encoded(self, request: InFlightRequest) -> list[Buffer] | errors.PkError:
        """Return the bytes of the first request, or why a batch of it cannot be encoded.  With
        compression this also starts encoding the requests behind it on other threads, because
        encoding takes longest.
        """
        try:
            threads = self._codec[0] != "none" and self._compute is not None
            begun = any(batch.encoding is not None for batch in request.batches)
            if threads and (begun or request.size > INLINE_BYTES):
                assert self._compute is not None
                ahead = itertools.islice(self._requests, AHEAD)
                for batch in itertools.chain.from_iterable(each.batches for each in ahead):
                    if batch.encoding is None:
                        work = self._compute(partial(batch.encode, *self._codec))
                        batch.encoding = self._tasks.spawn(work)
                        batch.encoding.add_done_callback(lambda t: t.cancelled() or t.exception())
                encodings = [batch.encoding for batch in request.batches]
                await asyncio.wait(encodings)
                for each in encodings:
                    each.result()  # raises the error of the batch
            return self._encode(request)
        except errors.PkError as cause:
            return cause
        except Exception as bug:
            _log.exception("cannot encode a batch")
            return errors.InternalError(f"cannot encode a batch: {bug!r}")

    def _encode(self, request: InFlightRequest) -> list[Buffer]:
        payload: list[Buffer] = []
        timeout_ms = max(1, self._options["request_timeout_ms"] * 9 // 10)
        head = wire.ProduceRequest(acks=self._acks, timeout_ms=timeout_ms)
        add = head.partitions.add
        for batch, epoch in zip(request.batches, request.epochs, strict=True):
            encoded = batch.encode(*self._codec)
            topic_id, partition = batch.partition.key
            add(
                topic_id=topic_id, partition=partition, current_leader_epoch=epoch,
                batch_bytes=sum(map(len, encoded)),
            )  # fmt: skip
            payload += encoded
        pieces = frames.pieces(head_of(head, correlation_id=request.correlation_id), payload)
        return [b"".join(pieces)] if request.size <= INLINE_BYTES else pieces

    async def _read(self, stream: Stream) -> None:
        try:
            while (raw := await stream.recv()) is not None:
                head = frames.decode(raw).head
                if head.HasField("error"):
                    raise frames.raise_error(head.error)
                responses = list(map(_response, head.produce_reply.results))
                self._step(ProduceResponse(head.correlation_id, responses))
            why = f"broker {self._node} closed the stream"
        except Disconnected as cause:
            why = f"broker {self._node}: {cause}"
        except errors.PkError as cause:
            _log.warning("broker %d refused the produce stream: %s", self._node, cause)
            why = f"broker {self._node}: {cause.message}"
        if stream is self._stream:
            self._lost(why)


def _response(result: wire.ProduceResult) -> PartitionResponse:
    error = frames.raise_error(result.error) if result.HasField("error") else None
    stamp = result.log_append_time_ms or NONE
    return PartitionResponse(result.index, error, result.base_offset, stamp, result.log_start)
