"""The producer: `send` a record or `send_batch` a pa.RecordBatch; a future returns the outcome.

Safe to share between threads.  `send` appends to lists and returns.  The client's loop thread
chooses partitions, builds batches and sends frames.  An idempotent producer sends nothing twice or
out of order.  With acks=all the producer is idempotent unless this is switched off
(docs/PROTOCOL.md L6, L7).

Delivery callbacks run on the loop thread, in the order of the offsets of a partition.  They may
send, but must not block: `flush`, `close` and other blocking calls raise an error in a callback.
An exception of a callback is logged.  `flush` returns when the callbacks of all records sent before
have returned.  A producer does not survive a fork.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any, Unpack, cast

import pyarrow as pa

from pk import errors
from pk.client import arguments, connection
from pk.client.accumulator import RecordAccumulator
from pk.client.endings import no_partition
from pk.client.futures import BatchFuture, SendFuture
from pk.client.metadata import TopicMetadata
from pk.client.network_client import NetworkClient
from pk.client.option_types import ProducerOptions
from pk.client.options import bootstrap_of, network_options, producer_options
from pk.client.produce_engine import ProduceEngine
from pk.client.producer_transactions import ProducerTransactions
from pk.client.record_arguments import (
    check_size,
    header_list,
    normalise,
    record_batch,
    record_size,
)
from pk.client.record_set import Headers, OnDelivery, RecordSet
from pk.client.serializers import serializer
from pk.client.transaction_engine import TransactionEngine
from pk.clock import monotonic_s

_CLOSE_S = 30.0


class Producer(ProducerTransactions):
    """Sends records to topics.  Safe to share between threads.

    bootstrap: "host:port,…", or a list of addresses.
    key_serializer, value_serializer: "string", "json", `f(value)` or `f(topic, value)`; None takes
    bytes.
    options: the producer settings of docs/settings.md; Kafka's dotted names are accepted.  With
    transactional_id, records are sent in transactions (docs/transactions.md).

    Raises `InvalidOption` or `InvalidConfig` for an option that is unknown or out of bounds.

        >>> with Producer("localhost:9092", compression="lz4") as producer:
        ...     future = producer.send("events", b"value", key=b"key")
        ...     future.result(timeout=30).offset
        0
    """

    def __init__(
        self,
        bootstrap: str | Iterable[str] | None = None,
        *,
        key_serializer: Any = None,
        value_serializer: Any = None,
        **options: Unpack[ProducerOptions],
    ) -> None:
        given = cast("dict[str, Any]", options)
        bootstrap = bootstrap_of(bootstrap, given)
        self._options, _ = producer_options(given)
        self._key_serializer = serializer(key_serializer, "key_serializer")
        self._value_serializer = serializer(value_serializer, "value_serializer")
        self._accumulators: dict[str, RecordAccumulator] = {}
        #: The types that the fast path of `send` accepts.
        self._fast: dict[str, RecordAccumulator] = self._accumulators if self._takes_bytes else {}
        self._poked = False
        self._closed = False
        self._ending = threading.Lock()
        self._size_max: int = min(self._options["max_request_size"], self._options["buffer_memory"])
        with connection.opening() as self._thread:
            world, o = self._thread.world, self._options
            self._cluster = NetworkClient(world, bootstrap, **network_options(o))
            self._engine = ProduceEngine(world, self._cluster, o, compute=self._thread.compute)
            self._transactions = self._open_transactions()
        connection.close_at_exit(self, self.close, self._forked)

    @property
    def _takes_bytes(self) -> bool:
        """Whether keys and values are sent as they are given: there is no serializer."""
        return self._key_serializer is None and self._value_serializer is None

    def _open_transactions(self) -> TransactionEngine | None:
        """Return the part that decides which records are accepted; a subclass has its own."""
        if not self._options["transactional_id"]:
            return None
        world = self._thread.world
        return TransactionEngine(world, self._cluster, self._engine, self._options)

    def _forked(self) -> None:
        """Disable the fast path in a forked child: no loop would send the records, so each call
        must check the loop first.
        """
        self._accumulators.clear()

    # -- sending -----------------------------------------------------------------------------------

    def send(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        headers: Headers | Mapping[str, bytes | None] | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> SendFuture:
        """Hand one record over; returns its future.

        Blocks, for up to max_block_ms, only while buffer_memory is full or the topic does not
        exist.

        value: None is a tombstone.  key: None = no key.  headers: pairs (text, bytes or None), or a
        mapping.  partition: None = by the key's hash; without a key, the partition that is being
        filled.  timestamp_ms: create time since the epoch; None = now.  on_delivery: called once as
        `on_delivery(metadata, error)`, on the loop thread; one of both is None.

        Raises `UnknownTopicOrPartition`, `SerializationError`, `RecordTooLarge`, `BufferExhausted`,
        `ClosedError`.
        """
        if type(value) is bytes and headers is None and partition is None and timestamp_ms is None:
            # The fast path: no call besides len and append.  A record that does not fit, is not
            # plain bytes, or meets another thread takes the slow path.
            size = len(value) + 16  # RECORD_OVERHEAD
            if key is not None:
                size += len(key) if type(key) is bytes else 1 << 62
            try:
                accumulator = self._fast[topic]
                tokens = accumulator.tokens
                del tokens[0]
            except (LookupError, TypeError):  # an unhashable topic
                pass
            else:
                try:
                    room = accumulator.room - size
                    if room >= 0:
                        records: RecordSet = accumulator.open  # type: ignore[assignment]
                        values = records.values
                        index = len(values)
                        future = SendFuture(records, index)
                        if on_delivery is not None:
                            call = arguments.function(on_delivery, "on_delivery")
                            records.on_delivery[index] = call
                        keys = records.keys
                        if keys is not None:
                            keys.append(key)
                        elif key is not None:
                            records.keys = [None] * index
                            records.keys.append(key)
                        values.append(value)
                        accumulator.room = room
                        return future
                finally:
                    tokens.append(None)
        return self._send_slow(topic, value, key, headers, partition, timestamp_ms, on_delivery)

    def _send_slow(
        self, topic: str, value: Any, key: Any,
        headers: Headers | Mapping[str, bytes | None] | None, partition: int | None,
        timestamp_ms: int | None, on_delivery: OnDelivery | None,
    ) -> SendFuture:  # fmt: skip
        """The whole of `send`: serializers, checks, memory, a new record set."""
        self._check_send()
        if type(topic) is not str:  # the topic may be unhashable
            topic = arguments.topic(topic)
        if on_delivery is not None:
            arguments.function(on_delivery, "on_delivery")
        if self._key_serializer is not None:
            key = self._key_serializer(topic, key)
        if self._value_serializer is not None:
            value = self._value_serializer(topic, value)
        headers = header_list(headers)
        size = record_size(value, key, headers, topic)
        check_size(topic, size, self._size_max)
        if timestamp_ms is not None:
            timestamp_ms = arguments.timestamp(timestamp_ms, topic)
        if partition is not None:
            partition = arguments.number(partition)
        accumulator = self._accumulators.get(topic) or self._open(topic)
        if partition is not None and partition >= (count := self._topic(topic).partitions):
            said = no_partition(topic, partition, count)
            raise errors.InvalidPartitions(said.message, **said.details)
        before, deadline = accumulator.open, None
        record = (value, key, headers, partition, timestamp_ms, on_delivery)
        while (future := accumulator.append(*record, size=size)) is None:
            self._poke()
            deadline = self._wait_for_memory(size, deadline)
        if accumulator.open is not before or accumulator.sealed:
            self._poke()
        return future

    def _wait_for_memory(self, size: int, deadline: float | None) -> float:
        """Block until memory is free.  Raises `BufferExhausted` once `deadline` has passed."""
        now = monotonic_s()
        if deadline is None:
            deadline = now + self._options["max_block_ms"] / 1000
        if self._thread.thread.ident == threading.get_ident() or now >= deadline:
            raise errors.BufferExhausted(
                f"buffer_memory ({self._options['buffer_memory']} bytes) stayed full for "
                f"{self._options['max_block_ms']} ms: the broker is slower than this producer, "
                "or gone"
            )
        self._engine.pool.wait(min(size, self._engine.pool.limit), deadline - now)
        return deadline

    def _open(self, topic: str) -> RecordAccumulator:
        if self._closed:
            raise errors.ClosedError("the producer was closed")
        arguments.topic(topic)
        wait_ms = max(self._options["max_block_ms"], 1)
        accumulator = self._thread.run(self._engine.open(topic, wait_ms, wait_ms), wait_ms / 1000)
        self._accumulators[topic] = accumulator
        return accumulator

    def _topic(self, name: str) -> TopicMetadata:
        """Return the topic's metadata; waits for a deleted topic to be created again."""
        known = self._cluster.metadata.topics.get(name)
        if known is None:
            self._open(name)
            known = self._cluster.metadata.topic(name)
        return known

    def _poke(self) -> None:
        """Make the loop look at the accumulators; several pokes cause one look."""
        if not self._poked:
            self._poked = True
            try:
                self._thread.loop.call_soon_threadsafe(self._on_poke)
            except RuntimeError:  # another thread closed the producer, and all records have failed
                if not self._closed:
                    raise errors.ClosedError("the client's thread has ended") from None

    def _on_poke(self) -> None:
        self._poked = False
        self._engine.poke()

    def _would_block(self, topic: str) -> bool:
        """Return whether `send` may block: the topic is new here, or buffer_memory is nearly full.
        Safe in any thread.
        """
        pool = self._engine.pool
        return topic not in self._accumulators or pool.used * 2 > pool.limit

    def send_batch(self, topic: str, batch: pa.RecordBatch) -> BatchFuture:
        """Hand a batch of columns over; returns one future for all its parts.

        batch: column `value`, and any of `key`, `timestamp`, `headers`, `partition`.  `value` and
        `key` are bytes or text; `timestamp` is int64 ms or an Arrow timestamp; `headers` is a list
        of structs (key, value); a null in `partition` leaves the choice to the key.  The memory of
        the batch must not change until the future is done.

        The batch is split by partition and by batch_size without touching a row.  Raises what
        `send` raises.
        """
        self._check_send()
        if type(topic) is not str:  # the topic may be unhashable
            topic = arguments.topic(topic)
        batch = record_batch(batch)
        if not self._takes_bytes:
            raise errors.InvalidRequest(
                "send_batch takes bytes columns; this producer has serializers"
            )
        accumulator = self._accumulators.get(topic) or self._open(topic)
        records = accumulator.new_set()
        records.count = batch.num_rows
        if not batch.num_rows:
            records.split([])
            return BatchFuture(records)
        rows, chosen = normalise(batch, records.stamp_ms)
        known = self._topic(topic)
        accumulator.split(records, rows, chosen, known, self._cluster.metadata.available(known))
        deadline = None
        while not accumulator.append_set(records):
            self._poke()
            deadline = self._wait_for_memory(records.size, deadline)
        self._poke()
        return BatchFuture(records)

    # -- the rest ----------------------------------------------------------------------------------

    def metrics(self) -> dict[str, int]:
        """Return the metrics as numbers.  Safe in any thread.

        records_acknowledged_total, batches_acknowledged_total, records_failed_total;
        buffer_used_bytes of buffer_memory; requests_in_flight.
        """
        engine = self._engine
        return engine.counts.metrics(engine.pool.used, engine.sender.requests_in_flight)

    def partitions_for(self, topic: str, timeout_s: float | None = None) -> int:
        """How many partitions a topic has.

        A topic that does not exist is waited for only a moment.  timeout_s: how long to wait for
        brokers, in seconds; None = max_block_ms.  Raises `UnknownTopicOrPartition`,
        `RequestTimedOut`, `BrokerUnavailable`, `ClosedError`.
        """
        if self._closed:
            raise errors.ClosedError("the producer was closed")
        seconds = self._options["max_block_ms"] / 1000
        seconds = seconds if timeout_s is None else arguments.seconds(timeout_s)
        work = self._cluster.topic(arguments.topic(topic), max(1, int(seconds * 1000)))
        return self._thread.run(work, seconds).partitions

    @property
    def identity(self) -> tuple[int, int]:
        """The producer id and epoch that the broker granted last.  They are (-1, -1) without
        idempotence, and until the first batch needs them.

        A partition that closes a gap continues in a later epoch of its own (KIP-360).  With a
        transactional id, they are those of the last transaction that began.
        """
        return self._engine.sender.granted

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything sent so far has an outcome, and its callbacks have returned.

        The outcome of a record may be an error: ask its future.  timeout_s: seconds; None = no
        limit.  Raises `TimeoutError` after `timeout_s`, `InvalidRequest` in a callback.
        """
        self._thread.must_not_block()
        deadline = None if timeout_s is None else monotonic_s() + arguments.seconds(timeout_s)
        if self._closed:
            return
        try:
            begun = self._thread.run(self._begin_flush(), timeout_s)
        except errors.RequestTimedOut as cause:
            raise TimeoutError(cause.message) from None
        with self._engine.monitor.lock:
            left = [records for records in begun if not records.settled]
            rest_s = None if deadline is None else max(0.0, deadline - monotonic_s())
            if not self._engine.monitor.wait_for(lambda: _all_settled(left), rest_s):
                raise TimeoutError(f"{len(left)} sends have no outcome within {timeout_s} s")

    async def _begin_flush(self) -> list[RecordSet]:
        return self._engine.begin_flush()

    def close(self, timeout_s: float | None = _CLOSE_S) -> None:
        """Flush for up to `timeout_s` seconds, fail what is left with `ClosedError`, disconnect.

        An open transaction is aborted instead.  Idempotent.  When `close` returns, all callbacks
        have returned.  Callbacks that take too long are not awaited, and a warning is logged.
        Raises `InvalidRequest` in a callback.
        """
        self._thread.must_not_block()
        if timeout_s is not None:
            arguments.seconds(timeout_s)
        if self._closed:
            return
        try:
            if self._transactions is not None and timeout_s != 0:
                limit_s = _CLOSE_S if timeout_s is None else timeout_s
                self._thread.run(self._transactions.finish(int(limit_s * 1000)), limit_s)
            elif timeout_s is None or timeout_s > 0:
                self.flush(timeout_s)
        except (TimeoutError, errors.ClosedError, errors.RequestTimedOut):
            pass
        finally:
            self._end()

    def _end(self) -> None:
        with self._ending:  # if several threads close, one does the work
            if self._closed:
                return
            self._closed = True
        self._accumulators.clear()
        connection.end(self, self._thread, self._end_engines())

    async def _end_engines(self) -> None:
        if self._transactions is not None:
            await self._transactions.close()
        await self._engine.close()

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.close(_CLOSE_S if error is None else 1.0)


def _all_settled(left: list[RecordSet]) -> bool:
    left[:] = [records for records in left if not records.settled]
    return not left
