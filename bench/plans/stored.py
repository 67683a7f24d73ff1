"""Bytes on disk of the same records: the flights, in segments and in a tier's table.

Both producers get the same keys (hence the same partitions), values and timestamps, and make
batches of 1 MiB of records before compression, zstd 3.  Java's producer would count compressed
bytes, so Kafka's side is written by confluent-kafka, which counts as pk does.  Then `segment.ms` is
lowered and one further record is sent to each partition.  This closes all segments but the last and
cuts their indexes to the used part.  The closed segments are counted: log, index, timeindex,
txnindex.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.pk_side import table_files
from bench.plans import Base
from bench.runs import RunFailed, Sample, bare
from bench.sides import PARTITIONS, Side
from pk.cli.flights import Flight, archive, read_flights
from pk.limits import MIB

LEVEL = 3
COMPACTED_LEVEL = 9
_COUNTED = {".log", ".index", ".timeindex", ".txnindex"}
_LINGER_MS = 10_000
_FLUSH_S = 60.0
_SEGMENT_MS = 100
#: One file a partition and round: the whole log is there before the tier finds it late.
_TIER_LAG_MS = "15000"
_ROLL_TIMEOUT_S = 30.0


def stamped(flights: Sequence[Flight]) -> Iterator[tuple[Flight, int]]:
    """Return the flights with timestamps: ten per millisecond, ending about now."""
    first = int(time.time() * 1000) - len(flights) // 10
    return ((flight, first + number // 10) for number, flight in enumerate(flights))


def write_pk(side: Side, topic: str, flights: Sequence[Flight]) -> None:
    from pk import Producer

    options: dict[str, Any] = {"compression": "zstd", "compression_level": LEVEL}
    options |= {"batch_size": MIB, "linger_ms": _LINGER_MS, "acks": "all"}
    with Producer(side.address, **options) as producer:
        for flight, stamp in stamped(flights):
            producer.send(topic, flight.value, key=flight.key, timestamp_ms=stamp)
        producer.flush(_FLUSH_S)


def write_kafka(side: Side, topic: str, flights: Sequence[Flight]) -> None:
    from confluent_kafka import Producer

    settings: dict[str, Any] = {
        "bootstrap.servers": side.address,
        "acks": "all",
        "compression.type": "zstd",
        "compression.level": LEVEL,
        "batch.size": MIB,
        "batch.num.messages": 1_000_000,
        "message.max.bytes": 4 * MIB,
        "queue.buffering.max.messages": 1_000_000,
        "queue.buffering.max.kbytes": 1 << 20,
        "linger.ms": _LINGER_MS,
        "partitioner": "murmur2_random",
        "log_level": 0,
    }
    producer = Producer(settings)
    for flight, stamp in stamped(flights):
        producer.produce(topic, flight.value, key=flight.key, timestamp=stamp)
    if producer.flush(_FLUSH_S):
        raise RunFailed("Kafka did not take all flights")


def close_segments(side: Side, topic: str) -> None:
    """Roll every partition: send one further record after `segment.ms`."""
    side.alter_topic(topic, {"segment.ms": str(_SEGMENT_MS)})
    time.sleep(2 * _SEGMENT_MS / 1000)
    for partition in range(PARTITIONS):
        _send_one(side, topic, partition)
    deadline = time.monotonic() + _ROLL_TIMEOUT_S
    while min(len(logs) for logs in _logs(side, topic).values()) < 2:
        if time.monotonic() > deadline:
            raise RunFailed(f"{side.name} did not close the segments of {topic}")
        time.sleep(0.5)
        for partition in range(PARTITIONS):
            _send_one(side, topic, partition)


def _send_one(side: Side, topic: str, partition: int) -> None:
    if side.name == "kafka":
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": side.address, "log_level": 0})
        producer.produce(topic, b"x", partition=partition)
        producer.flush(_FLUSH_S)
        return
    import pk

    with pk.Producer(side.address) as ours:
        ours.send(topic, b"x", partition=partition).result(_FLUSH_S)


def _logs(side: Side, topic: str) -> dict[Path, list[Path]]:
    """Return the segments by partition, in order."""
    found: dict[Path, list[Path]] = {}
    for path in side.segment_files(topic):
        if path.suffix == ".log":
            found.setdefault(path.parent, []).append(path)
    return found


def closed_bytes(side: Side, topic: str, expected: int) -> dict[str, float]:
    """Return the bytes of the closed segments by kind of file; their batches hold `expected`
    rows.
    """
    sizes = dict.fromkeys(("log", "indexes"), 0)
    batches = rows = 0
    for folder, logs in _logs(side, topic).items():
        active = min(len(logs) - 1, _first_small(logs))
        closed = {path.stem for path in logs[:active]}
        for path in folder.iterdir():
            if path.stem in closed and path.suffix in _COUNTED:
                sizes["log" if path.suffix == ".log" else "indexes"] += path.stat().st_size
        rows += int(logs[active].stem)  # a segment is named by its first offset
        batches += sum(_batches(path, side.name) for path in logs[:active])
    if rows != expected:
        raise RunFailed(f"{side.name}: closed segments hold {rows} records, not {expected}")
    return {**sizes, "batches": batches}


def _first_small(logs: Sequence[Path]) -> int:
    """Return the first segment behind the flights: it holds one record (`close_segments`)."""
    ends = [int(path.stem) for path in logs[1:]]
    ones = [at for at in range(1, len(ends)) if ends[at] - int(logs[at].stem) == 1]
    return ones[0] if ones else len(logs) - 1


def _batches(path: Path, name: str) -> int:
    """Return how many batches a segment holds."""
    data = path.read_bytes()
    if name != "kafka":
        from pk.log import batch

        return sum(1 for _ in batch.iter_batches(memoryview(data)))
    at = count = 0
    while at < len(data):
        at += 12 + int.from_bytes(data[at + 8 : at + 12], "big")  # base offset, length, the rest
        count += 1
    return count


class Segments(Base):
    """pk's closed segments compared with Kafka's."""

    def prepare(self) -> None:
        limit = None if self.counts["pk"] >= self.case.records else self.counts["pk"]
        self.flights = list(read_flights(archive(), limit))

    def round(self, role: str, mode: str) -> Sample:
        side = self.side(role)
        topic = self.bench.fresh("stored")
        side.create_topic(topic)
        try:
            (write_pk if role == "pk" else write_kafka)(side, topic, self.flights)
            close_segments(side, topic)
            figures = closed_bytes(side, topic, len(self.flights))
        finally:
            side.delete_topic(topic)
        return bare(figures["log"] + figures["indexes"], figures)


class Table(Segments):
    """The tier's table compared with Kafka's segments."""

    def side(self, role: str) -> Side:
        return self.bench.tiered if role == "pk" else self.bench.peer

    def round(self, role: str, mode: str) -> Sample:
        names = [variant.name for variant in self.case.variants]
        if role == "peer":
            sample = super().round(role, mode)
            return replace(sample, parts=dict.fromkeys(names, sample))
        side, topic = self.bench.tiered, self.bench.fresh("stored")
        side.create_topic(topic, configs={"tier_max_lag_ms": _TIER_LAG_MS})
        try:
            write_pk(side, topic, self.flights)
            folder = side.tier(topic)
            written = weights(folder)
            rewritten = recompressed(folder, COMPACTED_LEVEL)
        finally:
            side.delete_topic(topic)
        log = written["delta log"]
        first = bare(written["parquet"] + log, written)
        second = bare(rewritten + log, {**written, "parquet": rewritten})
        return replace(first, parts=dict(zip(names, (first, second), strict=True)))


def weights(folder: Path) -> dict[str, float]:
    """Return the bytes of the files that the newest version lists, and of the Delta log."""
    files = [path for path in (folder / "_delta_log").iterdir() if path.is_file()]
    data = table_files(folder)
    return {
        "parquet": sum(path.stat().st_size for path in data),
        "delta log": sum(path.stat().st_size for path in files),
        "files": len(data),
    }


def recompressed(folder: Path, level: int) -> int:
    """Return the size of the same files when tiering's own writer writes them at this level."""
    from pyarrow import parquet

    from pk.tiering.convert import FileBuilder
    from pk.tiering.row_groups import canonical

    size = 0
    for path in table_files(folder):
        builder = FileBuilder(level)
        builder.add(canonical(parquet.ParquetFile(path).read()))
        built = builder.finish()
        size += len(built.data) if built else 0
    return size
