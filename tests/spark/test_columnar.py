"""The columnar reader against the Python path: the same rows, whichever path reads them."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from java_compiler import needs_javac

from pk import Producer

pytestmark = needs_javac


def leaf_of(frame):
    """The scan in Spark's plan of a query without a shuffle."""
    return frame._jdf.queryExecution().executedPlan().collectLeaves().head()


def scan_of(frame) -> str:
    """The class of the scan that Spark planned."""
    return leaf_of(frame).scan().getClass().getName()


def rows_of(frame) -> tuple[list, tuple[int, int, int]]:
    """The rows of a query, and how many came in columns, through Python, and after a hand-over."""
    leaf = leaf_of(frame)  # of the frame's one plan, which `collect` runs
    found = [tuple(row) for row in frame.collect()]
    return found, tuple(
        leaf.metrics().apply(name).value()
        for name in ("pkRowsInColumns", "pkRowsThroughPython", "pkRangesHandedToPython")
    )


@pytest.fixture
def both(load):
    """`both(topic, query, **options)`: the rows of a query through Python and with the jar."""

    def read(topic, query, **options):
        found = []
        for columnar in ("false", "true"):
            frame = query(load(topic, includeHeaders="true", columnar=columnar, **options))
            found.append(sorted(map(tuple, frame.collect()), key=repr))
        return found

    return read


def test_the_hook_prunes_and_pushes_without_a_plan(cluster, load, both) -> None:
    """A partition without a plan is read through Python, and gets only the columns it needs."""
    topic = cluster.topic(2)
    cluster.fill(topic, 300)
    queries = {
        "two, and a part of headers": lambda frame: frame.select("value", "headers.key"),
        "pushed": lambda frame: frame.where("partition = 1 AND offset < 40").select("key"),
    }
    for name, query in queries.items():
        python, columnar = both(topic, query)
        assert python, name
        assert columnar == python, name
    assert scan_of(load(topic, columnar="true")) == "pk.reader.ColumnarScan"
    assert scan_of(load(topic, columnar="false")).endswith(".PythonScan")


@pytest.fixture(scope="module")
def tiered(cluster):
    """A topic whose records are all in several files of the table; its root there."""
    topic = cluster.topic(2, tier_file_bytes=8192, tier_max_lag_ms=200)
    for codec in ("none", "lz4", "zstd"):
        cluster.fill(topic, 700, compression=codec)
    cluster.fill_values(topic, [b"", b"x" * 100_000])
    cluster.wait(
        "all is tiered",
        lambda: all(each.lag == 0 for each in cluster.admin.describe_tier(topic).partitions),
    )
    cluster.admin.alter_configs(topic, {"tier_max_lag_ms": 3_600_000})
    uri = cluster.admin.describe_tier(topic).uri
    return topic, Path(unquote(urlsplit(uri).path))


def test_cold_rows_are_the_same_and_come_in_columns(tiered, load, both) -> None:
    """Clipped ranges, all columns and few, in offset order within each partition (rule S6)."""
    topic, _ = tiered
    for options in (
        {},
        {"columns": "value"},
        {"startingOffsets": f'{{"{topic}":{{"0":101,"1":399}}}}',
         "endingOffsets": f'{{"{topic}":{{"0":102,"1":703}}}}'},
    ):  # fmt: skip
        python, columnar = both(topic, lambda frame: frame, **options)
        assert python
        assert columnar == python, options
    rows, counts = rows_of(load(topic, columnar="true", columns="partition,offset,headers"))
    assert counts == (2102, 0, 0)
    for partition in (0, 1):
        offsets = [row[1] for row in rows if row[0] == partition]
        assert offsets == sorted(offsets)
        assert len(offsets) > 800


def test_python_goes_on_where_the_jvm_stopped(tiered, load) -> None:
    """Rules S5 to S7: a footer and a page that were changed, a file that is gone."""
    topic, root = tiered
    expected = in_order(load(topic, columnar="false").collect())
    # a file each: the servers may replace one that a reader reported as damaged; large ones: the
    # pages of `value` fill them
    files = sorted(root.glob("partition=0/*.parquet"), key=lambda each: each.stat().st_size)
    for at, victim in enumerate(files[-3:]):
        whole = victim.read_bytes()
        if at == 0:
            victim.unlink()
        else:  # in the footer; in the pages of `value`, which fill most of the file
            victim.write_bytes(flipped(whole, len(whole) - 60 if at == 1 else len(whole) // 3))
        try:
            rows, counts = rows_of(load(topic, columnar="true"))
        finally:
            victim.write_bytes(whole)
        assert in_order(rows) == expected
        assert counts[0] > 0, at
        assert counts[1] > 0, at
        assert counts[2] == 1, at


def test_hot_rows_are_the_same_and_come_in_columns(cluster, load, both) -> None:
    """All codecs, headers, nulls, transactions that were aborted, and ranges inside of batches."""
    topic = cluster.topic(2, tier_enable=False)
    for codec in ("none", "lz4", "zstd"):
        cluster.fill(topic, 300, compression=codec)
    for abort in (True, False):
        with Producer(cluster.address, transactional_id=topic) as producer:
            producer.init_transactions()
            producer.begin_transaction()
            for number in range(40):
                producer.send(topic, value=b"%d" % number, partition=number % 2)
            if abort:
                producer.abort_transaction()
            else:
                producer.commit_transaction()
    ends = f'{{"{topic}":{{"0":-1,"1":203}}}}'
    for options in (
        {"startingOffsets": f'{{"{topic}":{{"0":101,"1":150}}}}', "endingOffsets": ends},
        {"isolation.level": "read_uncommitted"},
        {"columns": "timestampType,headers"},
    ):
        python, columnar = both(topic, lambda frame: frame, **options)
        assert python
        assert columnar == python, options
    rows, counts = rows_of(load(topic, columnar="true"))
    assert counts == (940, 0, 0)
    assert in_order(rows) == in_order(load(topic, columnar="false").collect())


def test_a_stream_reads_in_columns_what_python_plans(
    spark, cluster, run_available, seen, tmp_path
) -> None:
    """Offsets, limits and batches are Python's, and so is the checkpoint, before and after."""
    topic = cluster.topic(2, tier_enable=False)
    for columnar in ("true", "false", "true"):
        cluster.fill(topic, 100)
        frame = (
            spark.readStream.format("pk")
            .options(subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger="60")
            .options(**{"pk.bootstrap.servers": cluster.address, "columnar": columnar})
            .load()
        )
        query = run_available(frame, tmp_path / "checkpoint", tmp_path / "rows")
        plan = query._jsq.explainInternal(False)
        assert ("ColumnarToRow" in plan) is (columnar == "true"), plan
        if columnar == "true":
            check_tab(cluster, spark, topic, check_progress(query, topic))
    rows = seen(tmp_path / "rows")
    assert len(rows) == len(set(rows)) == 300


def check_progress(query, topic: str) -> list[dict[str, str]]:
    """Each trigger's own counts, and the lag that is left after it, by partition."""
    found = [each.sources[0].metrics for each in query.recentProgress if each.numInputRows]
    assert len(found) == 2
    assert [int(each["rowsInColumns"]) for each in found] == [60, 40]
    assert [int(each["rowsFromLog"]) for each in found] == [60, 40]
    assert all(int(each["bytesFromLog"]) > 500 for each in found)
    assert {each["reader"] for each in found} == {"JVM, ranges of the log: 2"}
    assert {each["rowsThroughPython"] for each in found} == {"0"}
    assert [int(each["lagSum"]) for each in found] == [40, 0]
    assert [int(each["lagMax"]) for each in found] == [
        max(int(each[f"lag.{topic}-0"]), int(each[f"lag.{topic}-1"])) for each in found
    ]
    return found


def tab_of(spark, topic: str) -> list[tuple[dict[str, str], str]]:
    """What the SQL tab shows of each batch of a stream: the numbers by their words, and the lag."""
    store = spark._jsparkSession.sharedState().statusStore()
    found = []
    executions = store.executionsList()
    for one in map(executions.apply, range(executions.size())):
        lags = re.findall(rf"^Lag: ({topic}-.*)$", one.physicalPlanDescription(), re.M)
        if not lags:
            continue
        values, pairs = {}, store.executionMetrics(one.executionId()).iterator()
        while pairs.hasNext():
            pair = pairs.next()
            values[pair._1()] = pair._2()
        metrics = map(one.metrics().apply, range(one.metrics().size()))
        shown = {each.name(): values.get(each.accumulatorId(), "") for each in metrics}
        found.append((shown, lags[0]))
    return found


def check_tab(cluster, spark, topic: str, progress: list[dict[str, str]]) -> None:
    """The SQL tab has the same lag: all partitions, the largest, and each partition's."""
    behind = "offsets behind after this batch, "
    words = {"all partitions": "lagSum", "of the partition that is behind most": "lagMax"}

    def numbers() -> list[list[str | None]]:
        shown = [each for each, _ in tab_of(spark, topic)][-2:]
        return [[each.get(behind + word) for word in words] for each in shown]

    wanted = [[each[name] for name in words.values()] for each in progress]
    cluster.wait("the tab has both batches", lambda: numbers() == wanted, 30)
    shown, lag = tab_of(spark, topic)[-2]
    assert shown["rows read in columns"] == "60"
    assert dict(each.split(": ") for each in lag.split(", ")) == {
        f"{topic}-{number}": progress[0][f"lag.{topic}-{number}"] for number in (0, 1)
    }


def explained(frame) -> str:
    """What `explain("formatted")` says about the reader."""
    mode = frame.sparkSession._jvm.org.apache.spark.sql.execution.ExplainMode.fromString
    frame._jdf.queryExecution().executedPlan()
    plan = frame._jdf.queryExecution().explainString(mode("formatted"))
    (found,) = [line.strip() for line in plan.splitlines() if line.startswith("Reader:")]
    return found.removeprefix("Reader: ")


def test_explain_and_metrics_say_which_way_the_rows_took(cluster, load, tiered) -> None:
    topic, _ = tiered
    frame = load(topic).select("value")  # the default, with the jar on the class path
    files = re.fullmatch(r"JVM, ranges of the table: \d+", explained(frame))
    assert files, explained(frame)
    frame.collect()
    counts = {name: leaf_of(frame).metrics().apply(name).value() for name in COUNTS}
    assert counts["pkBytesFromTable"] > 1000
    assert counts == {
        **dict.fromkeys(COUNTS, 0), "pkBytesFromTable": counts["pkBytesFromTable"],
        "pkRowsInColumns": 2102, "pkRowsFromTable": 2102,
    }  # fmt: skip
    hot = cluster.topic(1, tier_enable=False)
    cluster.fill(hot, 50)
    assert explained(load(hot)) == "JVM, ranges of the log: 1"


COUNTS = (
    "pkRowsInColumns", "pkRowsThroughPython", "pkRangesHandedToPython",
    "pkRowsFromLog", "pkBytesFromLog", "pkRowsFromTable", "pkBytesFromTable",
)  # fmt: skip


def test_a_scan_that_python_reads_as_a_whole_says_why(spark, cluster, load) -> None:
    """Another engine rewrote the files of the table."""
    topic = cluster.topic(1, tier_max_lag_ms=200)
    for _ in range(2):
        cluster.fill(topic, 50)
        cluster.wait(
            "all is tiered", lambda: cluster.admin.describe_tier(topic).partitions[0].lag == 0
        )
    spark.sql(f"OPTIMIZE delta.`{unquote(urlsplit(cluster.admin.describe_tier(topic).uri).path)}`")
    frame = load(topic)
    assert explained(frame) == (
        "Python: the JVM could read 0 of 100 offsets "
        "(another engine wrote files of the table, or they overlap)"
    )
    rows, counts = rows_of(frame)
    assert len(rows) == 100
    assert counts == (0, 100, 0)


def flipped(whole: bytes, at: int) -> bytes:
    return whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :]


def in_order(rows) -> list:
    """Rows with all columns, by partition and offset."""
    return sorted(map(tuple, rows), key=lambda row: (row[3], row[4]))
