"""`pk perf`: how fast this machine produces to, and consumes from, a running server."""

from __future__ import annotations

import math
import random
import sys
from collections import deque
from collections.abc import Callable
from typing import Annotated, Any

import typer

from pk import errors
from pk.cli.common import (
    DEFAULT_BOOTSTRAP,
    AsJson,
    BootstrapOption,
    LingerMs,
    duration,
    opened,
    quiet_end,
    say,
    size_text,
)
from pk.clock import block_s, monotonic_s
from pk.settings import PRODUCER

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)

_BATCH_ROWS = 10_000
_SAMPLES_MAX = 1_000_000
_REPORT_S = 1.0


class _Meter:
    """Counts records and bytes, and keeps the latency of a sample of the sends."""

    def __init__(self, quiet: bool) -> None:
        self.records = 0
        self.bytes = 0
        self.latencies: list[float] = []
        self.failure: errors.PkError | None = None
        self._quiet = quiet
        self.started = self._told = monotonic_s()
        self._told_records = 0

    def begin(self) -> None:
        """Start the clock, now that connections are open and topics known."""
        self.started = self._told = monotonic_s()

    def add(self, records: int, size: int) -> None:
        self.records += records
        self.bytes += size
        now = monotonic_s()
        if not self._quiet and now - self._told >= _REPORT_S:
            rate = (self.records - self._told_records) / (now - self._told)
            typer.echo(f"{self.records:>14,} records  {rate:>12,.0f} records/s", err=True)
            self._told, self._told_records = now, self.records

    def latency(self, seconds: float) -> None:
        if len(self.latencies) < _SAMPLES_MAX:
            self.latencies.append(seconds)

    def result(self, what: str, **more: Any) -> dict[str, Any]:
        elapsed = max(monotonic_s() - self.started, 1e-9)
        found: dict[str, Any] = {
            "name": what,
            "records": self.records,
            "bytes": self.bytes,
            "seconds": round(elapsed, 3),
            "records_per_s": round(self.records / elapsed, 1),
            "mb_per_s": round(self.bytes / elapsed / 1e6, 3),
            **more,
        }
        if self.latencies:
            self.latencies.sort()
            for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("p999", 0.999)):
                at = min(len(self.latencies) - 1, int(share * len(self.latencies)))
                found[f"latency_{name}_ms"] = round(self.latencies[at] * 1000, 3)
            found["latency_max_ms"] = round(self.latencies[-1] * 1000, 3)
        return found


def _print_result(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        say(result)
        return
    typer.echo(
        f"{result['records']:,} records in {result['seconds']:.2f} s: "
        f"{result['records_per_s']:,.0f} records/s, "
        f"{size_text(result['bytes'] / result['seconds'])}/s"
    )
    latencies = [
        f"{name.removeprefix('latency_').removesuffix('_ms')} {value:.2f}"
        for name, value in result.items()
        if name.startswith("latency_")
    ]
    if latencies:
        typer.echo(f"latency in ms: {', '.join(latencies)}")


class _Pace:
    """Limits a loop to a number of records per second."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._start = monotonic_s()

    def wait(self, sent: int) -> None:
        if self._rate is None:
            return
        ahead = sent / self._rate - (monotonic_s() - self._start)
        if ahead > 0:
            block_s(ahead)


@app.command()
def produce(
    topic: Annotated[str, typer.Argument(help="topic name", metavar="TOPIC")],
    records: Annotated[int, typer.Option(min=1, help="how many")] = 1_000_000,
    value_size: Annotated[int, typer.Option(min=1, help="bytes of a value")] = 100,
    keys: Annotated[int, typer.Option(min=0, help="number of different keys; 0 = no keys")] = 0,
    columnar: Annotated[
        bool, typer.Option("--columnar/--records-one-by-one", help="send_batch, or send per record")
    ] = True,
    batch_rows: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="rows of one send_batch")
    ] = _BATCH_ROWS,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="at most so many records a second")
    ] = None,
    acks: Annotated[str, typer.Option(help="0, 1 or all")] = "all",
    compression: Annotated[str, typer.Option(help="none, lz4 or zstd")] = "none",
    linger_ms: LingerMs = 5.0,
    timeout_ms: Annotated[
        int,
        typer.Option(
            "--timeout-ms",
            parser=duration(1),
            metavar="DURATION",
            help="how long to wait for a broker, and for the acknowledgement of a record",
        ),
    ] = 120_000,
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    as_json: AsJson = False,
) -> None:
    """Send random values and report records/s, bytes/s and latency percentiles.

    Example: pk perf produce flights --records 1000000 --value-size 100
    """
    from pk.client.producer import Producer

    with quiet_end():
        meter = _Meter(quiet=as_json or not sys.stderr.isatty())
        options: dict[str, Any] = {"acks": acks, "compression": compression, "linger_ms": linger_ms}
        client = Producer(bootstrap, **options, **producer_times(timeout_ms, linger_ms))
        with opened(client, bootstrap) as producer:
            partitions = producer.partitions_for(topic)
            meter.begin()
            if columnar:
                _send_batches(
                    producer, topic, records, value_size, keys, batch_rows, _Pace(rate), meter
                )
            else:
                _send_records(producer, topic, records, value_size, keys, _Pace(rate), meter)
        if meter.failure is not None:
            raise meter.failure
        what = "perf produce columnar" if columnar else "perf produce records"
        _print_result(
            meter.result(what, partitions=partitions, acks=acks, compression=compression), as_json
        )


def producer_times(timeout_ms: int, linger_ms: float) -> dict[str, Any]:
    """Return producer options that wait `timeout_ms` for brokers and for acknowledgements."""
    delivery_ms = timeout_ms + math.ceil(linger_ms)  # a batch may wait for other batches first
    request_ms = min(timeout_ms, PRODUCER.by_name["request_timeout_ms"].default)
    return {
        "max_block_ms": min(timeout_ms, PRODUCER.by_name["max_block_ms"].default),
        "delivery_timeout_ms": delivery_ms,
        "request_timeout_ms": request_ms,
    }


def _send_batches(
    producer: Any, topic: str, records: int, value_size: int, keys: int, batch_rows: int,
    pace: _Pace, meter: _Meter,
) -> None:  # fmt: skip
    import numpy as np
    import pyarrow as pa

    rows = min(batch_rows, records)
    noise = random.Random(7).randbytes(rows * value_size)
    ends = np.arange(0, rows * value_size + 1, value_size, dtype=np.int32)
    columns = [
        pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(ends), pa.py_buffer(noise)])
    ]
    names = ["value"]
    if keys:
        columns.append(pa.array([b"%d" % (row % keys) for row in range(rows)], pa.binary()))
        names.append("key")
    batch = pa.RecordBatch.from_arrays(columns, names=names)
    futures: deque[Any] = deque()
    sent = 0
    while sent < records:
        part = batch if records - sent >= rows else batch.slice(0, records - sent)
        started = monotonic_s()
        future = producer.send_batch(topic, part)
        future.add_done_callback(_timed(meter, started))
        futures.append(future)
        sent += part.num_rows
        meter.add(part.num_rows, part.num_rows * value_size)
        while futures and futures[0].done():
            futures.popleft().result()
        pace.wait(sent)
    while futures:
        futures.popleft().result()


def _timed(meter: _Meter, started: float) -> Callable[[Any], None]:
    return lambda _future: meter.latency(monotonic_s() - started)


def _send_records(
    producer: Any, topic: str, records: int, value_size: int, keys: int, pace: _Pace, meter: _Meter
) -> None:
    noise = random.Random(7).randbytes(value_size + 1024)
    values = [noise[at : at + value_size] for at in range(1024)]
    names: list[bytes | None] = [b"%d" % number for number in range(keys)] or [None]
    every = 1 if records <= 100_000 else 100  #: the latency of every so many records is measured

    def delivered(started: float) -> Callable[[Any, errors.PkError | None], None]:
        def call(_metadata: Any, error: errors.PkError | None) -> None:
            meter.latency(monotonic_s() - started)
            meter.failure = meter.failure or error

        return call

    send = producer.send
    for sent in range(records):
        call = delivered(monotonic_s()) if sent % every == 0 else None
        send(topic, values[sent & 1023], names[sent % len(names)], on_delivery=call)
        if sent & 1023 == 1023:
            meter.add(1024, 1024 * value_size)
            if meter.failure is not None:
                return
        pace.wait(sent)
    producer.flush()
    meter.add(records - meter.records, (records - meter.records) * value_size)


@app.command()
def consume(
    topic: Annotated[str, typer.Argument(help="topic name", metavar="TOPIC")],
    records: Annotated[int, typer.Option(min=1, help="stop after so many")] = 1_000_000,
    columnar: Annotated[
        bool, typer.Option("--columnar/--records-one-by-one", help="poll_batches, or poll")
    ] = True,
    timeout_ms: Annotated[
        int,
        typer.Option(
            "--timeout-ms",
            parser=duration(1),
            metavar="DURATION",
            help="how long to wait for a broker; stop when nothing came for so long",
        ),
    ] = 10_000,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="at most so many records a second")
    ] = None,
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    as_json: AsJson = False,
) -> None:
    """Read a topic from its beginning and report records/s and bytes/s of keys and values.

    Example: pk perf consume flights --records 1000000
    """
    import pyarrow.compute as pc

    from pk.client.consumer import Consumer

    with quiet_end():
        meter = _Meter(quiet=as_json or not sys.stderr.isatty())
        pace = _Pace(rate)
        client = Consumer(bootstrap, auto_offset_reset="earliest")
        with opened(client, bootstrap) as consumer:
            consumer.assign(consumer.partitions_for(topic, timeout_ms / 1000))
            meter.begin()
            while meter.records < records:
                found = size = 0
                if columnar:
                    for _, batch in consumer.poll_batches(timeout_ms / 1000):
                        found += batch.num_rows
                        for name in ("key", "value"):
                            size += pc.sum(pc.binary_length(batch.column(name))).as_py() or 0
                else:
                    for record in consumer.poll(timeout_ms / 1000):
                        found += 1
                        size += len(record.value or b"") + len(record.key or b"")
                if not found:
                    break
                meter.add(found, size)
                pace.wait(meter.records)
        _print_result(
            meter.result("perf consume columnar" if columnar else "perf consume records"), as_json
        )
