"""The benchmarks by name: what is measured, against whom, how much of it, and what it must reach.

A case has variants (codecs, or figures of one and the same round); each is one row of the table.
How a round goes is the case's `plan` (plans.py and its neighbours).
"""

from __future__ import annotations

from dataclasses import dataclass

RECORDS_S = "records/s"


@dataclass(slots=True, frozen=True)
class Variant:
    """One row.  `least` 0 = reported without a floor."""

    name: str
    codec: str = "none"
    unit: str = RECORDS_S
    least: float = 0.0  #: ratio that must be reached
    aim: float = 0.0
    less_is_better: bool = False  #: then the ratio is peer ÷ pk


@dataclass(slots=True, frozen=True)
class Case:
    """One benchmark.  pk's figure is its first mode, the peer's the best of its modes."""

    name: str
    what: str
    against: str
    plan: str
    pk_modes: tuple[str, ...]
    peer_modes: tuple[str, ...]
    variants: tuple[Variant, ...]
    records: int  #: a run, warm-up included, on pk; `peer_records` on the peer
    peer_records: int
    joint: bool = False  #: one round gives all variants: `Sample.parts` by name
    records_least: int = 0  #: the Java tools need some seconds, whatever `--scale` says
    exact: bool = False  #: every round would give the same bytes: one is enough


def _codecs(least: float, aim: float) -> tuple[Variant, ...]:
    return tuple(Variant(codec, codec, least=least, aim=aim) for codec in ("none", "lz4"))


def _bytes(name: str, least: float, aim: float) -> Variant:
    return Variant(name, "zstd", "bytes", least, aim, less_is_better=True)


_CLIENTS = (
    Case(
        name="produce_columnar",
        what="batches built from Python lists of bytes inside the timing, acks=all",
        against="Java ProducerPerformance",
        plan="produce",
        pk_modes=("lists", "prebuilt"),
        peer_modes=("java",),
        variants=_codecs(5.0, 8.0),
        records=12_000_000,
        peer_records=7_000_000,
        records_least=7_000_000,
    ),
    Case(
        name="consume_columnar",
        what="poll_batches, value bytes counted",
        against="Java ConsumerPerformance",
        plan="consume",
        pk_modes=("batches",),
        peer_modes=("java",),
        variants=_codecs(2.5, 5.0),
        records=12_000_000,
        peer_records=12_000_000,
        records_least=6_000_000,
    ),
    Case(
        name="produce_record",
        what="send per record, acks=all",
        against="the better of the Java and the confluent-kafka producer",
        plan="produce",
        pk_modes=("record",),
        peer_modes=("java", "confluent"),
        variants=_codecs(1.5, 2.5),
        records=8_000_000,
        peer_records=7_000_000,
        records_least=7_000_000,
    ),
    Case(
        name="consume_record",
        what="record by record, value bytes counted",
        against="confluent-kafka",
        plan="consume",
        pk_modes=("records",),
        peer_modes=("confluent",),
        variants=_codecs(3.0, 5.0),
        records=12_000_000,
        peer_records=6_000_000,
        records_least=2_000_000,
    ),
    Case(
        name="latency",
        what="p99 of produce to consume, one 100-byte record in flight, acks=all: 5,000 after "
        "1,000 of warm-up; alone, and while another client produces 20 MB/s",
        against="Java EndToEndLatency (30,000 messages, cut to whole milliseconds)",
        plan="latency",
        pk_modes=("latency",),
        peer_modes=("java",),
        variants=(
            Variant("idle", "none", "ms", 1.0, 1.5, less_is_better=True),
            Variant("20 MB/s", "none", "ms", 1.0, 1.5, less_is_better=True),
        ),
        records=6_000,
        peer_records=30_000,
        records_least=3_000,
    ),
    Case(
        name="small_requests",
        what="64 clients on one partition, one record in flight each, linger 0, acks=all",
        against="confluent-kafka, 64 producers",
        plan="small",
        pk_modes=("small",),
        peer_modes=("small",),
        variants=(Variant("none", unit="requests/s"),),
        records=0,
        peer_records=0,
    ),
    Case(
        name="partitions_1000",
        what="1,000 partitions on one broker: created with all leaders known, columnar produce and "
        "consume across them (batches of 64 KiB), memory of the server after it, CPU at rest",
        against="Kafka's Java clients and broker",
        plan="partitions",
        pk_modes=("pk",),
        peer_modes=("java",),
        variants=(
            Variant("create", unit="s", less_is_better=True),
            Variant("produce"),
            Variant("consume"),
            Variant("memory", unit="MB", less_is_better=True),
            Variant("idle CPU", unit="% of a core", less_is_better=True),
        ),
        records=8_000_000,
        peer_records=8_000_000,
        records_least=7_000_000,
        joint=True,
    ),
    Case(
        name="deep_log",
        what="produce, and fetch of the tail, on a topic that holds the deep log ({size_gb:g} GB)",
        against="pk itself, on an empty topic",
        plan="deep",
        pk_modes=("deep",),
        peer_modes=("empty",),
        variants=(
            Variant("produce", least=0.95, aim=1.0),
            Variant("tail fetch", least=0.95, aim=1.0),
        ),
        records=12_000_000,
        peer_records=12_000_000,
        records_least=3_000_000,
        joint=True,
    ),
)

_CLUSTERS = (
    Case(
        name="failover",
        what="three nodes, one partition, a record every 5 ms, acks=all: from the end of the "
        "leader's node (all its processes; SIGSTOP: with clients that wait 3 s for an answer) to "
        "the next acknowledgement of a record sent after it; four failovers a round",
        against="three KRaft nodes, confluent-kafka",
        plan="failover",
        pk_modes=("pk",),
        peer_modes=("confluent",),
        variants=(
            Variant("kill -9", unit="s", less_is_better=True),
            Variant("SIGSTOP", unit="s", less_is_better=True),
        ),
        records=0,
        peer_records=0,
    ),
    Case(
        name="produce_replicated",
        what="three nodes, replication factor 3, min_insync_replicas 2: batches built from Python "
        "lists of bytes inside the timing, acks=all",
        against="three KRaft nodes, Java ProducerPerformance",
        plan="replicated",
        pk_modes=("lists",),
        peer_modes=("java",),
        variants=_codecs(3.0, 3.0),
        records=6_000_000,
        peer_records=4_000_000,
        records_least=3_000_000,
    ),
    Case(
        name="produce_replicated_record",
        what="three nodes, replication factor 3, min_insync_replicas 2: send per record, acks=all",
        against="three KRaft nodes, the better of the Java and the confluent-kafka producer",
        plan="replicated",
        pk_modes=("record",),
        peer_modes=("java", "confluent"),
        variants=_codecs(3.0, 3.0),
        records=4_000_000,
        peer_records=4_000_000,
        records_least=3_000_000,
    ),
    Case(
        name="cluster_partitions",
        what="1,000 partitions of three replicas on three nodes: created with all leaders known; "
        "CPU at rest and memory of all nodes; all stopped cleanly and started together until all "
        "replicas are in sync",
        against="three KRaft nodes",
        plan="cluster_partitions",
        pk_modes=("pk",),
        peer_modes=("kafka",),
        variants=(
            Variant("create", unit="s", less_is_better=True),
            Variant("restart", unit="s", less_is_better=True),
            Variant("memory", unit="MB", less_is_better=True),
            Variant("idle CPU", unit="% of a core", less_is_better=True),
        ),
        records=0,
        peer_records=0,
        joint=True,
    ),
)

_CONNECTOR = "Spark's Kafka connector"
_SPARK = (
    Case(
        name="spark_read",
        what='count and sum of value lengths, local[2], hot log; also with option columns="value"',
        against=_CONNECTOR,
        plan="spark_read",
        pk_modes=("plain", "columns"),
        peer_modes=("kafka",),
        variants=_codecs(1.7, 2.5),
        records=10_000_000,
        peer_records=10_000_000,
        records_least=2_000_000,
    ),
    Case(
        name="spark_stream",
        what='AvailableNow to the noop sink, hot log; also with option columns="value"',
        against=_CONNECTOR,
        plan="spark_stream",
        pk_modes=("plain", "columns"),
        peer_modes=("kafka",),
        variants=_codecs(1.7, 3.0),
        records=24_000_000,
        peer_records=24_000_000,
        records_least=2_000_000,
    ),
    Case(
        name="spark_sink",
        what="rows of a Parquet file of 100-byte values written to a topic, acks=all",
        against="Spark's Kafka sink",
        plan="spark_sink",
        pk_modes=("plain",),
        peer_modes=("kafka",),
        variants=_codecs(2.0, 3.0),
        records=12_000_000,
        peer_records=12_000_000,
    ),
    Case(
        name="spark_read_cold",
        what='the same count and sum over the tier through format("pk"); also with option '
        'columns="value"',
        against=f"{_CONNECTOR}, the same records in Kafka's log",
        plan="spark_cold",
        pk_modes=("plain", "columns"),
        peer_modes=("kafka",),
        variants=(Variant("none", least=2.0, aim=2.5),),
        records=10_000_000,
        peer_records=10_000_000,
        records_least=2_000_000,
    ),
    Case(
        name="cold_read",
        what='count and sum of value lengths, format("pk") over the tier only; also with option '
        'columns="value"',
        against="spark.read.parquet on the same files",
        plan="spark_parquet",
        pk_modes=("plain", "columns"),
        peer_modes=("parquet",),
        variants=(Variant("zstd", least=0.5, aim=0.9),),
        records=20_000_000,
        peer_records=20_000_000,
        records_least=2_000_000,
    ),
)

_STORED = (
    Case(
        name="stored_bytes",
        what="the flights as JSON, same keys, values and timestamps, zstd 3, batches of 1 MiB of "
        "records before compression; closed segments with their indexes",
        against="Kafka's segments",
        plan="stored",
        pk_modes=("segments",),
        peer_modes=("segments",),
        variants=(_bytes("zstd 3", 0.85, 1.1),),
        records=336_776,
        peer_records=336_776,
        exact=True,
    ),
    Case(
        name="stored_bytes_tier",
        what="the same records in the tier, Delta log included: as tiering wrote them (zstd 3), "
        "and rewritten with tiering's own writer at zstd 9 (what a compaction would give)",
        against="Kafka's segments",
        plan="stored_tier",
        pk_modes=("table",),
        peer_modes=("segments",),
        variants=(
            _bytes("zstd 3, as written", 1.0, 1.25),
            _bytes("zstd 9, rewritten", 1.2, 1.5),
        ),
        records=336_776,
        peer_records=336_776,
        exact=True,
        joint=True,
    ),
)

CASES = (*_CLIENTS, *_CLUSTERS, *_SPARK, *_STORED)
BY_NAME = {case.name: case for case in CASES}
