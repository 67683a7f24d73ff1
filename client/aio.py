"""Clients for asyncio: `AsyncProducer` and `AsyncConsumer`, over the engines of the others.

The network runs on the loop thread that all clients of the process share, so heartbeats and retries
go on while the application's loop computes.  What would block, such as a poll, a flush or a commit,
runs on one thread of the client's own, one call at a time and in the order of the calls.  `send` of
an open topic stays on the caller's thread.

    >>> async with AsyncProducer("localhost:9092") as producer:
    ...     stored = await producer.send_and_wait("events", b"value")
    ...     stored.offset
    0

Invariants
  N1  A coroutine that is cancelled while it polls costs no record: the next poll of the same kind
      returns what the cancelled one got.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, Unpack

import pyarrow as pa

from pk import errors
from pk.client.consumer import Consumer
from pk.client.deserialization import OnDeserializeError
from pk.client.futures import BatchFuture, SendFuture
from pk.client.option_types import ConsumerOptions, ProducerOptions
from pk.client.producer import Producer
from pk.client.record_set import Headers, OnDelivery
from pk.clock import monotonic_s
from pk.types import Record, RecordMetadata, TopicPartition

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C")
#: A poll waits in pieces of this length, so that other calls and a close need not wait longer.
_PIECE_S = 0.2


class _Off(Protocol[C]):
    """A client with a thread of its own for what blocks."""

    _client: C

    def _run(self, call: Callable[[], T]) -> asyncio.Future[T]: ...


def _off_loop(
    method: Callable[Concatenate[C, P], T],
) -> Callable[Concatenate[_Off[C], P], Coroutine[Any, Any, T]]:
    """Make a coroutine of a client's method: it runs on the client's own thread."""

    @functools.wraps(method)
    async def call(self: _Off[C], /, *arguments: P.args, **named: P.kwargs) -> T:
        return await self._run(functools.partial(method, self._client, *arguments, **named))

    return call


class _OwnThread:
    """One thread, which runs the blocking calls of a client in their order."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, name)

    def _run(self, call: Callable[[], T]) -> asyncio.Future[T]:
        try:
            return asyncio.get_running_loop().run_in_executor(self._executor, call)
        except RuntimeError as cause:
            raise errors.ClosedError("the client was closed") from cause

    async def _ended(self, close: Callable[[], None]) -> None:
        """Close the client, also if this coroutine is cancelled meanwhile."""
        with contextlib.suppress(errors.ClosedError):
            closing = self._run(close)
            self._executor.shutdown(wait=False)
            await asyncio.shield(closing)


class AsyncProducer(_OwnThread):
    """A `Producer` for coroutines; the arguments are those of `Producer`."""

    def __init__(
        self,
        bootstrap: str | Iterable[str] | None = None,
        *,
        key_serializer: Any = None,
        value_serializer: Any = None,
        **options: Unpack[ProducerOptions],
    ) -> None:
        self._client = Producer(
            bootstrap, key_serializer=key_serializer, value_serializer=value_serializer, **options
        )
        super().__init__("pk-async-producer")

    async def send(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        headers: Headers | Mapping[str, bytes | None] | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> SendFuture:
        """Hand one record over, and return its future, which can be awaited.

        Waits only while buffer_memory is full or the topic is new to the producer.  The arguments
        and errors are those of `Producer.send`.
        """
        given = (topic, value, key, headers, partition, timestamp_ms, on_delivery)
        if self._client._would_block(topic):
            return await self._run(functools.partial(self._client.send, *given))
        return self._client.send(*given)

    async def send_and_wait(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        headers: Headers | Mapping[str, bytes | None] | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> RecordMetadata:
        """Send one record and wait until it is stored; raises its error."""
        return await (await self.send(topic, value, key, headers, partition, timestamp_ms))

    async def send_batch(self, topic: str, batch: pa.RecordBatch) -> BatchFuture:
        """Hand the rows of an Arrow batch over (`Producer.send_batch`)."""
        return await self._run(functools.partial(self._client.send_batch, topic, batch))

    flush = _off_loop(Producer.flush)
    partitions_for = _off_loop(Producer.partitions_for)
    init_transactions = _off_loop(Producer.init_transactions)
    begin_transaction = _off_loop(Producer.begin_transaction)
    commit_transaction = _off_loop(Producer.commit_transaction)
    abort_transaction = _off_loop(Producer.abort_transaction)

    @contextlib.asynccontextmanager
    async def transaction(self, timeout_s: float | None = None) -> AsyncIterator[None]:
        """Begin a transaction; commit it at the end of the block, abort it after an exception
        (`Producer.transaction`).
        """
        block = self._client.transaction(timeout_s)
        await self._run(block.__enter__)
        try:
            yield
        except BaseException as error:
            leave = functools.partial(block.__exit__, type(error), error, error.__traceback__)
            if not await asyncio.shield(self._run(leave)):
                raise
        else:
            await self._run(functools.partial(block.__exit__, None, None, None))

    def metrics(self) -> dict[str, int]:
        """Return the metrics (`Producer.metrics`)."""
        return self._client.metrics()

    async def close(self) -> None:
        """Send what is left, and disconnect.  Idempotent."""
        await self._ended(self._client.close)

    async def __aenter__(self) -> AsyncProducer:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


class AsyncConsumer(_OwnThread):
    """A `Consumer` for coroutines; the arguments are those of `Consumer`.

    Deserialisers, and the listeners of a group, run on the consumer's own thread.

        >>> async with AsyncConsumer("localhost:9092", group_id="app") as consumer:
        ...     await consumer.subscribe("events")
        ...     async for record in consumer:
        ...         await handle(record)
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
        self._client = Consumer(
            bootstrap,
            key_deserializer=key_deserializer,
            value_deserializer=value_deserializer,
            on_deserialize_error=on_deserialize_error,
            **options,
        )
        #: the polls of each kind that run; one that is left over was cancelled (N1)
        self._pending: dict[str, asyncio.Future[Any]] = {}
        super().__init__("pk-async-consumer")

    async def poll(self, timeout_s: float = 1.0) -> list[Record]:
        """Return at most max_poll_records records; [] if nothing came (`Consumer.poll`)."""
        found: list[Record] = await self._polled(self._client.poll, timeout_s)
        return found

    async def poll_batches(
        self, timeout_s: float = 1.0
    ) -> list[tuple[TopicPartition, pa.RecordBatch]]:
        """Return decoded Arrow batches (`Consumer.poll_batches`)."""
        found: list[tuple[TopicPartition, pa.RecordBatch]]
        found = await self._polled(self._client.poll_batches, timeout_s)
        return found

    async def _polled(self, poll: Callable[[float], list[Any]], timeout_s: float) -> list[Any]:
        deadline = monotonic_s() + timeout_s
        while True:
            left = deadline - monotonic_s()
            pending = self._pending.get(poll.__name__)
            if pending is None:
                pending = self._run(functools.partial(poll, max(0.0, min(left, _PIECE_S))))
                self._pending[poll.__name__] = pending
            await asyncio.wait([pending])
            self._pending.pop(poll.__name__, None)
            found: list[Any] = pending.result()
            if found or left <= 0:
                return found

    async def __aiter__(self) -> AsyncIterator[Record]:
        """Yield record by record, until the consumer is closed."""
        with contextlib.suppress(errors.ClosedError):
            while True:
                for record in await self.poll(1.0):
                    yield record

    subscribe = _off_loop(Consumer.subscribe)
    unsubscribe = _off_loop(Consumer.unsubscribe)
    assign = _off_loop(Consumer.assign)
    assignment = _off_loop(Consumer.assignment)
    seek = _off_loop(Consumer.seek)
    seek_to_beginning = _off_loop(Consumer.seek_to_beginning)
    seek_to_end = _off_loop(Consumer.seek_to_end)
    pause = _off_loop(Consumer.pause)
    resume = _off_loop(Consumer.resume)
    position = _off_loop(Consumer.position)
    commit = _off_loop(Consumer.commit)
    committed = _off_loop(Consumer.committed)
    beginning_offsets = _off_loop(Consumer.beginning_offsets)
    end_offsets = _off_loop(Consumer.end_offsets)
    offsets_for_times = _off_loop(Consumer.offsets_for_times)
    partitions_for = _off_loop(Consumer.partitions_for)
    current_lag = _off_loop(Consumer.current_lag)
    metrics = _off_loop(Consumer.metrics)

    async def close(self) -> None:
        """Stop reading, leave the group, and disconnect.  Idempotent."""
        await self._ended(self._client.close)

    async def __aenter__(self) -> AsyncConsumer:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
