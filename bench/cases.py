"""The benchmarks by name: what is measured, with which peer, how many records, and the goal.

A case has variants (codecs, or figures of one round); each is one row of the table.  The case's
`plan` (plans.py and its neighbours) says how a round is run.
"""

from __future__ import annotations

from dataclasses import dataclass

RECORDS_S = "records/s"


@dataclass(slots=True, frozen=True)
class Variant:
    """One row.  `least` 0 = reported without a goal."""

    name: str
    codec: str = "none"
    unit: str = RECORDS_S
    least: float = 0.0  #: ratio that must be reached
    aim: float = 0.0
    less_is_better: bool = False  #: then the ratio is peer ÷ pk
    most: float = 0.0  #: pk's figure must not be larger, whatever the peer's is; 0 = no such goal


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
        what="The client builds batches from Python lists of bytes inside the timing, and "
        "produces them with acks=all",
        against="Java's ProducerPerformance",
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
        what="The client calls poll_batches and counts the bytes of the values",
        against="Java's ConsumerPerformance",
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
        what="The client calls send for each record, with acks=all",
        against="the faster of the Java and the confluent-kafka producer",
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
        what="The client reads one record at a time and counts the bytes of the values",
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
        what="The p99 of the time from produce to consume, with one record of 100 bytes in "
        "flight and acks=all. 5,000 records are measured after a warm-up of 1,000. The "
        "first row is without other load, the second while another client produces 20 MB/s",
        against="Java's EndToEndLatency (30,000 messages, truncated to whole milliseconds)",
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
        name="transactional_produce",
        what="The client produces prebuilt batches with acks=all, in transactions of 10,000 "
        "records",
        against="Java's ProducerPerformance with transactions of 20 ms, about 10,000 records",
        plan="produce",
        pk_modes=("transactional",),
        peer_modes=("transactional",),
        variants=(Variant("none", least=3.0),),
        records=7_000_000,
        peer_records=8_000_000,
        records_least=7_000_000,
    ),
    Case(
        name="transaction_cost",
        what="The client produces prebuilt batches with acks=all, in transactions of 10,000 "
        "records",
        against="pk without transactions",
        plan="produce_own",
        pk_modes=("transactional",),
        peer_modes=("prebuilt",),
        variants=(Variant("none", least=0.8),),
        records=7_000_000,
        peer_records=7_000_000,
        records_least=3_000_000,
    ),
    Case(
        name="transaction_latency",
        what="The p99 of the time from begin_transaction to the receipt of its one record with "
        "read_committed, one transaction at a time",
        against="confluent-kafka",
        plan="transaction_latency",
        pk_modes=("transaction_latency",),
        peer_modes=("transaction_latency",),
        variants=(Variant("none", "none", "ms", 0.7, less_is_better=True),),
        records=1_200,
        peer_records=1_200,
        records_least=600,
    ),
    Case(
        name="small_requests",
        what="64 clients produce to one partition, each with one record in flight, linger 0 and "
        "acks=all",
        against="confluent-kafka with 64 producers",
        plan="small",
        pk_modes=("small",),
        peer_modes=("small",),
        variants=(Variant("none", unit="requests/s"),),
        records=0,
        peer_records=0,
    ),
    Case(
        name="partitions_1000",
        what="One broker has 1,000 partitions. The rows are the time until all are created and "
        "have known leaders, columnar produce and consume across them (batches of 64 KiB), "
        "the memory of the server after that, and its CPU at rest",
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
        what="The client produces to a topic that holds the deep log ({size_gb:g} GB), and "
        "fetches the tail of the topic",
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

_GROUPS = (
    Case(
        name="offset_commit",
        what="Consumers commit offsets. First row: 64 members of one group, each with one "
        "partition, in 8 processes, each with one synchronous commit in flight. Second row: one "
        "member commits without waiting, in bursts of 500 that end when the last offset is stored; "
        "pk's client joins commits that wait for an answer, Kafka's sends each",
        against="confluent-kafka, with the better of the protocols classic and consumer",
        plan="commits",
        pk_modes=("pk",),
        peer_modes=("classic", "consumer"),
        variants=(
            Variant("sync", unit="commits/s", least=0.5),
            Variant("async", unit="commits/s"),
        ),
        records=0,
        peer_records=0,
    ),
    Case(
        name="rebalance",
        what="Ten consumers of one group, each a process, sessions of 10 s. The rows are the time "
        "until each partition has one owner and this owner has polled it: after the topic grew "
        "from 100 to 1,000 partitions, after kill -9 of a member, after one joined, after one "
        "left; and the longest pause between two records of members that lost no partition, "
        "while one is due every 25 ms. owned_s: until the last assignment. written_s: until each "
        "new partition has the record that is polled",
        against="confluent-kafka, with the better of the protocols classic (cooperative-sticky, "
        "metadata asked for every second) and consumer (KIP-848, uniform, heartbeats every 3 s)",
        plan="rebalance",
        pk_modes=("pk",),
        peer_modes=("classic", "consumer"),
        variants=(
            Variant("grow", unit="s", least=1.0, aim=3.0, less_is_better=True, most=5.0),
            Variant("kill -9", unit="s", less_is_better=True),
            Variant("join", unit="s", less_is_better=True),
            Variant("leave", unit="s", less_is_better=True),
            Variant("pause", unit="ms", less_is_better=True, most=500.0),
        ),
        records=0,
        peer_records=0,
        joint=True,
    ),
)

_CLUSTERS = (
    Case(
        name="failover",
        what="Three nodes have one partition, and a record is sent every 5 ms with acks=all. The "
        "time begins when all processes of the leader's node end, or stop by SIGSTOP, and "
        "ends with the next acknowledgement of a record that was sent after that. With "
        "SIGSTOP the clients wait 3 s for an answer. A round has four failovers",
        against="three KRaft nodes with confluent-kafka",
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
        what="Three nodes, replication factor 3, min_insync_replicas 2. The client builds "
        "batches from Python lists of bytes inside the timing, and produces them with "
        "acks=all",
        against="three KRaft nodes with Java's ProducerPerformance",
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
        what="Three nodes, replication factor 3, min_insync_replicas 2. The client calls send "
        "for each record, with acks=all",
        against="three KRaft nodes with the faster of the Java and the confluent-kafka producer",
        plan="replicated",
        pk_modes=("record",),
        peer_modes=("java", "confluent"),
        variants=_codecs(3.0, 3.0),
        records=4_000_000,
        peer_records=6_000_000,
        records_least=4_000_000,
    ),
    Case(
        name="cluster_partitions",
        what="Three nodes have 1,000 partitions of three replicas. The rows are the time until "
        "all are created and have known leaders, the CPU at rest and the memory of all "
        "nodes, and the time of a restart: all nodes are stopped cleanly and started "
        "together, until all replicas are in sync",
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
        what="Spark computes the count and the sum of the value lengths with local[2] from the "
        'hot log; one mode uses the option columns="value", one columnar="false" (Python tasks)',
        against=_CONNECTOR,
        plan="spark_read",
        pk_modes=("plain", "columns", "python"),
        peer_modes=("kafka",),
        variants=_codecs(4.0, 6.0),
        records=10_000_000,
        peer_records=10_000_000,
        records_least=2_000_000,
    ),
    Case(
        name="spark_stream",
        what="Spark streams the hot log with AvailableNow to the noop sink; one mode uses the "
        'option columns="value", one columnar="false" (Python tasks)',
        against=_CONNECTOR,
        plan="spark_stream",
        pk_modes=("plain", "columns", "python"),
        peer_modes=("kafka",),
        variants=_codecs(2.2, 3.0),
        records=24_000_000,
        peer_records=24_000_000,
        records_least=2_000_000,
    ),
    Case(
        name="spark_narrow",
        what="A topic of 4 and one of 100 partitions with 20 records each, with local[2]: the time "
        "of the first micro-batch of a new query, which streams it to the noop sink "
        "(triggerExecution), and of a batch query that counts it",
        against=_CONNECTOR,
        plan="spark_narrow",
        pk_modes=("plain",),
        peer_modes=("kafka",),
        variants=(
            Variant("trigger, 4", unit="s", less_is_better=True),
            Variant("count, 4", unit="s", less_is_better=True),
            Variant("trigger, 100", unit="s", less_is_better=True, most=0.45),
            Variant("count, 100", unit="s", less_is_better=True, most=0.45),
        ),
        records=0,
        peer_records=0,
        joint=True,
    ),
    Case(
        name="spark_stream_group",
        what="Spark streams the hot log with AvailableNow to the noop sink in 96 "
        "micro-batches, with groupId: what it costs to publish the progress as the offsets of a "
        "group",
        against="the same query without groupId",
        plan="spark_stream_own",
        pk_modes=("group",),
        peer_modes=("plain",),
        variants=(Variant("none", least=0.98),),
        records=24_000_000,
        peer_records=24_000_000,
        records_least=2_000_000,
    ),
    Case(
        name="spark_sink",
        what="Spark writes the rows of a Parquet file with values of 100 bytes to a topic, with "
        "acks=all and pk.delivery=at_least_once",
        against="Spark's Kafka sink",
        plan="spark_sink",
        pk_modes=("at_least_once",),
        peer_modes=("kafka",),
        variants=_codecs(2.0, 3.0),
        records=12_000_000,
        peer_records=12_000_000,
    ),
    Case(
        name="spark_sink_exactly_once",
        what="The same write, exactly once (the default)",
        against="Spark's Kafka sink, which is at least once",
        plan="spark_sink",
        pk_modes=("exactly_once",),
        peer_modes=("kafka",),
        variants=_codecs(1.2, 1.6),
        records=12_000_000,
        peer_records=12_000_000,
    ),
    Case(
        name="spark_sink_transaction",
        what="The same write, exactly once: what the transaction and the row sums cost",
        against="pk's sink with pk.delivery=at_least_once",
        plan="spark_sink_own",
        pk_modes=("exactly_once",),
        peer_modes=("at_least_once",),
        variants=(Variant("none", least=0.85),),
        records=12_000_000,
        peer_records=12_000_000,
    ),
    Case(
        name="spark_read_cold",
        what='Spark computes the same count and sum through format("pk") when all records are in '
        'the tier; one mode uses the option columns="value", one columnar="false" (Python tasks)',
        against=f"{_CONNECTOR} with the same records in Kafka's log",
        plan="spark_cold",
        pk_modes=("plain", "columns", "python"),
        peer_modes=("kafka",),
        variants=(Variant("none", least=3.0),),
        records=10_000_000,
        peer_records=10_000_000,
        records_least=2_000_000,
    ),
    Case(
        name="cold_read",
        what='Spark computes the count and the sum of the value lengths through format("pk") '
        'from the tier only; one mode uses columns="value", one columnar="false" (Python tasks)',
        against="spark.read.parquet on the same files",
        plan="spark_parquet",
        pk_modes=("plain", "columns", "python"),
        peer_modes=("parquet",),
        variants=(Variant("zstd", least=0.9),),
        records=20_000_000,
        peer_records=20_000_000,
        records_least=2_000_000,
    ),
    Case(
        name="read_topic",
        what="Spark computes the count and the sum of the value lengths of a topic that is in the "
        "tier, through read_topic: the table as Spark reads it, and the tail of the log",
        against='spark.read.format("delta") on the same table',
        plan="topic_table",
        pk_modes=("read_topic",),
        peer_modes=("delta",),
        variants=(Variant("zstd", least=0.9),),
        records=20_000_000,
        peer_records=20_000_000,
        records_least=2_000_000,
    ),
    Case(
        name="read_topic_log",
        what="The same read",
        against=f"{_CONNECTOR} with the same records in Kafka's log",
        plan="topic_log",
        pk_modes=("read_topic",),
        peer_modes=("kafka",),
        variants=(
            Variant("none", least=5.0),
            Variant("lz4", least=5.0),
            Variant("zstd", least=5.0),
        ),
        records=40_000_000,
        peer_records=40_000_000,
        records_least=2_000_000,
    ),
)

_STORED = (
    Case(
        name="stored_bytes",
        what="The size of the flights data as JSON with the same keys, values and timestamps, "
        "zstd 3, and batches of 1 MiB of records before compression. Closed segments and "
        "their indexes count",
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
        what="The size of the same records in the tier, Delta log included: first as tiering "
        "wrote them (zstd 3), then rewritten with tiering's own writer at zstd 9 (as a "
        "compaction would)",
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

_COMPACTION = (
    Case(
        name="compaction",
        what="The cleaner rewrites a log of one partition whose records are all dirty: keys of 12 "
        "bytes, ten records for each, drawn at random, values of 100 bytes, segments of 64 MiB. "
        "Bytes of keys and values a second, without the time until it begins",
        against="Kafka's log cleaner",
        plan="cleaning",
        pk_modes=("cleaner",),
        peer_modes=("cleaner",),
        variants=(Variant("none", unit="MB/s", least=3.0),),
        records=10_000_000,
        peer_records=10_000_000,
        records_least=2_000_000,
    ),
    Case(
        name="compaction_isolation",
        what="The p99 of the time from send to the acknowledgement, with one record of 100 bytes "
        "in flight, while the broker's cleaner cleans such a log",
        against="the same without a cleaning",
        plan="cleaning_isolation",
        pk_modes=("cleaning",),
        peer_modes=("idle",),
        variants=(Variant("none", unit="ms", least=0.83, less_is_better=True),),
        records=30_000_000,
        peer_records=30_000_000,
        records_least=2_000_000,
    ),
)

_TIER = (
    Case(
        name="cold_isolation",
        what="The p99 of the time from send to the acknowledgement, with one record of 100 bytes "
        "in flight, while 128 consumers loop over records that are in the tier only",
        against="the same with 16 consumers",
        plan="cold_isolation",
        pk_modes=("128",),
        peer_modes=("16",),
        variants=(Variant("none", unit="ms", least=0.91, less_is_better=True),),
        records=4_000_000,
        peer_records=4_000_000,
        records_least=2_000_000,
    ),
    Case(
        name="cold_distance",
        what="The client reads records that are in the tier only, on an S3 server behind a round "
        "trip of 30 ms; or the tier copies a backlog of four partitions to it",
        against="the same without the round trip",
        plan="cold_distance",
        pk_modes=("30",),
        peer_modes=("0",),
        variants=(
            Variant("1 partition", least=0.8),
            Variant("4 partitions", least=0.8),
            Variant("upload", least=0.8),
        ),
        records=4_000_000,
        peer_records=4_000_000,
        records_least=2_500_000,
    ),
)

CASES = (*_CLIENTS, *_GROUPS, *_CLUSTERS, *_SPARK, *_STORED, *_COMPACTION, *_TIER)
BY_NAME = {case.name: case for case in CASES}
