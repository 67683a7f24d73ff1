"""The PRODUCE stream to one broker: frames are encoded and written in order, answers are handed to
the producer's machine.

World-generic; the engine (client/produce_engine, whose rule is kept here: client/produce_engine E2)
owns one per broker.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from pk import errors
from pk.client.cluster import Cluster
from pk.client.sender_events import Broken, Event, InFlightRequest, Replied, Result, Written
from pk.log.storage import Buffer
from pk.types import NONE
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import head_of, open_stream
from pk.world import Disconnected, Stream, StreamKind, World

_log = logging.getLogger("pk.client")

#: So many frames of a broker are encoded at once.
AHEAD = 3
#: A broker that lives says hello at once.
HELLO_TIMEOUT_MS = 5_000


class Engine(Protocol):
    """What a link asks of its engine (produce_engine.py)."""

    @property
    def world(self) -> World: ...

    @property
    def cluster(self) -> Cluster: ...

    @property
    def options(self) -> Mapping[str, Any]: ...

    @property
    def acks(self) -> int: ...

    @property
    def compute(self) -> Callable[..., Any] | None: ...

    def step(self, event: Event) -> None: ...

    def encode(
        self, frame: InFlightRequest, build: Callable[[InFlightRequest], list[Buffer]]
    ) -> asyncio.Task[list[Buffer]]: ...


class Link:
    """The PRODUCE stream to one broker."""

    def __init__(self, engine: Engine, node: int) -> None:
        self._engine = engine
        self._node = node
        self._queue: deque[InFlightRequest] = deque()
        self._encoding: dict[int, asyncio.Task[list[Buffer]]] = {}  #: by correlation id
        self._filled = asyncio.Event()
        self._stream: Stream | None = None
        self._address = ""  #: where the stream leads
        self._reader: asyncio.Task[None] | None = None
        self._writer = asyncio.get_running_loop().create_task(self._write())

    def put(self, frame: InFlightRequest) -> None:
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
                continue  # given up meanwhile (client/produce_engine E2)
            frame = self._queue[0]
            # everything in it went to another leader meanwhile (client/produce_engine E2)
            if not frame.open:
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

    def _refuse(self, frame: InFlightRequest, cause: Exception) -> None:
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

    async def _encoded(self, frame: InFlightRequest) -> list[Buffer]:
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

    def _build(self, frame: InFlightRequest) -> list[Buffer]:
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


def _result(result: wire.ProduceResult) -> Result:
    if result.HasField("error"):
        return Result(result.index, frames.raise_error(result.error), log_start=result.log_start)
    return Result(
        result.index, None, result.base_offset, result.log_append_time_ms or NONE, result.log_start
    )
