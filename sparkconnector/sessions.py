"""Creates Spark sessions ready for pk: the right Python, Delta's jars, UTC; and reads whole topics.

Spark looks up a Python data source with the interpreter of PYSPARK_DRIVER_PYTHON, of
PYSPARK_PYTHON, or with plain `python3`; it does not use the running interpreter.  `session` sets
both variables before the JVM starts, so `format("pk")` needs no registration.  In a session that
was built otherwise, call `register(spark)`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pk import errors
from pk.sparkconnector import columnar_jar, jars
from pk.sparkconnector.java import find_java
from pk.sparkconnector.planner import warn

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from pk.sparkconnector.as_of import TopicVersion
    from pk.sparkconnector.offsets import Range
    from pk.sparkconnector.planner import Planner

_DELTA = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}
#: Spark's Parquet reader verifies the checksums of pages only with this setting.  Delta ignores it
#: as an option of a read, but not in the session's configuration.  No setting verifies the footer.
VERIFY_PAGES = "parquet.page.verify-checksum.enabled"
#: Arrow's Java vectors check at each access that the buffer is not released, that the index is in
#: bounds, and that the value is not null.  Spark reads only existing rows and checks for null
#: itself.
#: Without Arrow's checks, the JVM's part of a read costs a tenth less (docs/design/0004).  These
#: are environment variables because Java options would replace the user's.
_ARROW = {
    "ARROW_ENABLE_UNSAFE_MEMORY_ACCESS": "true",
    "ARROW_ENABLE_NULL_CHECK_FOR_GET": "false",
}
#: Numbers of tasks whose defaults are for clusters; on one machine a task for each core is enough.
#: Delta lists a table for VACUUM in 10,000 tasks by default, and reads its log in 50.
_FOR_CLUSTERS = (
    "spark.sql.shuffle.partitions",
    "spark.sql.sources.parallelPartitionDiscovery.parallelism",
    "spark.databricks.delta.snapshotPartitions",
)


def session(
    app_name: str = "pk",
    master: str | None = None,
    delta: bool = True,
    ui: bool = False,
    **conf: Any,
) -> SparkSession:
    """A Spark session in which `format("pk")` and `format("delta")` work.

    master: as Spark's; None = Spark's default.  delta: have Delta's jars.  The jar of the columnar
    reader is added if it was built; reads use it unless `columnar` is false.  ui: start Spark's
    web page.  conf: Spark settings, dots written as underscores (`spark_sql_shuffle_partitions=4`)
    or as they are (`**{"spark.sql.shuffle.partitions": 4}`); they win over the defaults here.

    Returns the active session if there is one, with pk registered in it.  Raises `JavaMissing`,
    `JarsMissing`.

        spark = session("report", master="local[2]")
        spark.read.format("pk").option("pk.bootstrap.servers", "localhost:9092").option(
            "subscribe", "events"
        ).load().show()
    """
    find_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    for name, value in _ARROW.items():
        os.environ.setdefault(name, value)
    if _is_local(master) and os.environ["PYSPARK_PYTHON"] == sys.executable:
        home = quick_home()
        if home is not None:
            os.environ.setdefault("SPARK_HOME", str(home))
    from pyspark.sql import SparkSession

    there = SparkSession.getActiveSession()
    wanted = settings(master, delta, ui, conf)
    builder = SparkSession.builder.appName(app_name)
    if master is not None:
        builder = builder.master(master)
    for name, value in wanted.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    if there is not None:
        register(spark)
    return spark


def settings(master: str | None, delta: bool, ui: bool, conf: Mapping[str, Any]) -> dict[str, str]:
    """Return the Spark settings of a new session."""
    found = {
        "spark.ui.enabled": str(ui).lower(),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.python.filterPushdown.enabled": "true",
        f"spark.hadoop.{VERIFY_PAGES}": "true",
        **{f"spark.executorEnv.{name}": os.environ.get(name, _ARROW[name]) for name in _ARROW},
    }
    if _is_local(master):
        cores = str(max(1, os.cpu_count() or 1))
        found |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
        found |= dict.fromkeys(_FOR_CLUSTERS, cores)
    given = {_dotted(name): _text(value) for name, value in conf.items()}
    paths = _own_jars()
    if delta:
        found |= _DELTA
        paths += [str(path) for path in jars.resolve(jars.DELTA)]
        extension = given.get("spark.sql.extensions")
        if extension and _DELTA["spark.sql.extensions"] not in extension:
            given["spark.sql.extensions"] = f"{_DELTA['spark.sql.extensions']},{extension}"
    paths += [path for path in given.pop("spark.jars", "").split(",") if path.strip()]
    if paths:
        found["spark.jars"] = ",".join(dict.fromkeys(paths))
    return found | given


def _own_jars() -> list[str]:
    """Return the jar of the columnar reader; without it every read goes through Python."""
    problem = columnar_jar.problem()
    if problem and columnar_jar.path().exists():
        warn(f"pk reads through Python: {problem}")
    return [] if problem else [str(columnar_jar.path())]


def _is_local(master: str | None) -> bool:
    return master is None or master.startswith("local")


def quick_home(folder: Path | None = None) -> Path | None:
    """Return a SPARK_HOME whose Python workers start four times as fast; None if it cannot be made.

    Spark puts `SPARK_HOME/python/lib/pyspark.zip` first on the path of its Python workers.  Python
    does not cache compiled modules of a zip, so the first look-up and every streaming query spend
    1.3 s of their 10 s start on compiling.  In this SPARK_HOME, that name is a link to the folder
    of the installed package, which holds the same code.  Everything else is a link to pyspark's
    files.
    """
    from importlib.util import find_spec

    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    home = folder or Path(sys.prefix) / "share" / "pk" / "spark-home"
    links = {name: package / name for name in ("bin", "jars", "sbin", "data", "licenses")}
    links |= {f"python/lib/{z.name}": z for z in (package / "python" / "lib").glob("py4j-*.zip")}
    links["python/lib/pyspark.zip"] = package.parent
    try:
        (home / "python" / "lib").mkdir(parents=True, exist_ok=True)
        for name, target in links.items():
            link = home / name
            if not target.exists() or (link.is_symlink() and link.readlink() == target):
                continue
            fresh = link.with_name(f"{link.name}.{os.getpid()}")
            fresh.symlink_to(target)
            fresh.replace(link)  # another process may be creating it at the same time
    except OSError:
        return None  # a read-only environment: use Spark's own home, which is slower
    return home


def _dotted(name: str) -> str:
    dotted = name if "." in name else name.replace("_", ".")
    return dotted if dotted.startswith("spark.") else f"spark.{dotted}"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def register(spark: SparkSession) -> None:
    """Register `format("pk")` in a session that did not find it by itself.

    The session then also verifies the checksums of the Parquet pages that it reads.  If
    PYSPARK_PYTHON was not set when the session was built, it uses this interpreter from now on.
    """
    from pyspark_pk import DefaultSource

    if not os.environ.get("PYSPARK_PYTHON"):
        spark.sparkContext.pythonExec = sys.executable
    spark.dataSource.register(DefaultSource)
    _verify_pages(spark)


def _verify_pages(spark: SparkSession) -> None:
    """Turn the verification of page checksums on, unless the user set the option."""
    if spark.conf.get(VERIFY_PAGES, None) is None:
        spark.conf.set(VERIFY_PAGES, "true")


def read_topic(
    spark: SparkSession,
    topic: str,
    bootstrap: str,
    *,
    include_headers: bool = False,
    version_as_of: int | None = None,
    timestamp_as_of: str | int | None = None,
    **options: Any,
) -> DataFrame:
    """A whole topic as a batch: Spark reads its Delta table natively, and the tail from the log.

    topic: its name.  bootstrap: "host:port,…".  include_headers: add the column `headers`.
    version_as_of, timestamp_as_of: one version of the table instead of the topic as it is now, by
    its number or by time (ISO 8601 with a zone, or ms since 1970), as the options versionAsOf and
    timestampAsOf of `format("pk")`.  The log is then not read.
    options: options of `format("pk")`, for the source of the tail.

    Returns the columns of `format("pk")`, each offset once.  The boundary is the table's end at one
    version, per partition, so the two halves fit whatever is tiered meanwhile.  Raises
    `UnknownTopicOrPartition`, `BrokerUnavailable`, `TableVersionNotFound`, and `DataLoss` if rows
    of the table are missing, as after a restore; `failOnDataLoss=false` reads what is there.

        read_topic(spark, "events", "localhost:9092").groupBy("partition").count().show()
    """
    _verify_pages(spark)
    if version_as_of is None and timestamp_as_of is None:
        return _as_it_is(spark, topic, bootstrap, include_headers, options)
    named = {"versionAsOf": version_as_of, "timestampAsOf": timestamp_as_of}
    return _as_of(
        spark, topic, bootstrap, include_headers,
        {**options, **{name: value for name, value in named.items() if value is not None}},
    )  # fmt: skip


def _as_it_is(
    spark: SparkSession,
    topic: str,
    bootstrap: str,
    include_headers: bool,
    options: Mapping[str, Any],
) -> DataFrame:
    """Return a topic up to its present end: the table, and the log from the table's end."""
    from pk.sparkconnector.offsets import Range
    from pk.sparkconnector.options import column_names, source
    from pk.sparkconnector.planner import Planner

    given = {name: _text(value) for name, value in options.items()}
    given |= {"pk.bootstrap.servers": bootstrap, "subscribe": topic}
    given["includeHeaders"] = _text(include_headers)
    planner = Planner(source(given, streaming=False))
    bounds = planner.cluster.bounds(planner.cluster.topics([topic]), read_committed=True)
    table = _table_now(spark, planner, topic, [one.partition for one in bounds])
    wanted, starts, ends = [], {}, {}
    for one in bounds:
        middle = min(max(one.earliest, _end(table, one.partition)), one.latest)
        starts[str(one.partition)], ends[str(one.partition)] = middle, one.latest
        wanted.append(Range(topic, one.topic_id, one.partition, one.earliest, middle))
    positions = {"startingOffsets": starts, "endingOffsets": ends}
    given |= {name: json.dumps({topic: each}) for name, each in positions.items()}
    cold = _stored(planner, table, [one for one in wanted if one.size]) if table else []
    if table is None or not cold:
        return spark.read.format("pk").options(**given).load()
    rows = _table(spark, topic, table, cold).select(*column_names(planner.source))
    if starts == ends:  # a source without rows would cost the start of Python workers
        return rows
    return rows.unionByName(spark.read.format("pk").options(**given).load())


def _end(table: TopicVersion | None, partition: int) -> int:
    return 0 if table is None else table.found.ends.get(partition, 0)


def _table_now(
    spark: SparkSession, planner: Planner, topic: str, partitions: Sequence[int]
) -> TopicVersion | None:
    """Return the newest known version of the table; None if Spark cannot read it natively."""
    from pk.sparkconnector.as_of import TopicVersion
    from pk.sparkconnector.table_files import list_files

    tier = planner.cluster.tier(topic)
    if not tier.uri:
        return None
    if not _readable(spark, tier.uri):
        warn(f"Spark has no file system for {tier.uri} (hadoop-aws is missing): pk reads it itself")
        return None
    (one,) = planner.cluster.topics([topic])
    try:
        found = list_files(tier.uri, tier.storage_options, one.topic_id, partitions, tier.version)
    except errors.TierUnavailable as cause:
        warn(f"the tier of {topic} is read through the broker: {cause.message}")
        return None
    return TopicVersion(tier.uri, tier.storage_options, tier.version, found)


def _stored(planner: Planner, table: TopicVersion, wanted: Sequence[Range]) -> Sequence[Range]:
    """Return what the table has of the ranges, and report rows that are missing there (T17).

    Spark reads the files natively, and does not see that they have fewer rows than were written.
    """
    from pk.sparkconnector.planner import PartitionTable
    from pk.sparkconnector.tier_scan import ColdRange

    place = ColdRange(table.uri, table.storage_options, version=table.version)
    tables = {
        (one.topic, one.partition): PartitionTable.of(place, table.found, one.partition)
        for one in wanted
    }
    return planner.left(wanted, tables)


def _as_of(
    spark: SparkSession,
    topic: str,
    bootstrap: str,
    include_headers: bool,
    options: Mapping[str, Any],
) -> DataFrame:
    """Return one version of a topic's table, which Spark reads natively if it can."""
    from pk.sparkconnector import as_of
    from pk.sparkconnector.offsets import Range
    from pk.sparkconnector.options import source
    from pk.sparkconnector.planner import Planner

    given = {name: _text(value) for name, value in options.items()}
    given |= {"pk.bootstrap.servers": bootstrap, "subscribe": topic}
    given["includeHeaders"] = _text(include_headers)
    read = source(given, streaming=False)
    assert read.as_of is not None
    planner = Planner(read)
    (one,) = planner.topics()
    table = as_of.opened(planner, one, read.as_of, {})
    given.pop("timestampAsOf", None)
    given["versionAsOf"] = str(table.version)
    frame = spark.read.format("pk").options(**given).load()
    if not _readable(spark, table.uri):
        return frame
    ends = table.found.ends
    wanted = [
        Range(topic, one.topic_id, partition, start, ends[partition])
        for partition, start in table.found.starts.items()
    ]
    cold = _stored(planner, table, [each for each in wanted if each.size])
    if not cold:
        return frame
    return _table(spark, topic, table, cold).select(*frame.columns)


def _table(
    spark: SparkSession, topic: str, table: TopicVersion, cold: Sequence[Range]
) -> DataFrame:
    from pyspark.sql import functions as fn

    reader = spark.read.format("delta").option("versionAsOf", table.version)
    rows, inside = reader.load(_spark_path(table.uri)), _inside(table, cold)
    return (
        (rows.where(inside) if inside else rows)
        .withColumn("topic", fn.lit(topic))
        .withColumnRenamed("timestamp_type", "timestampType")
        .withColumn("headers", fn.expr("CASE WHEN size(headers) > 0 THEN headers END"))
    )


def _inside(table: TopicVersion, cold: Sequence[Range]) -> str:
    """Return the SQL condition of the rows of `cold`, "" = all rows of the version.

    An offset is compared only where a file has rows outside the range, so that Spark need not read
    the column for the others.
    """
    parts, bounded = [], False
    for one in cold:
        files = table.found.files[one.partition]
        words = [f"partition = {one.partition}"]
        if any(file.min_offset < one.start for file in files):
            words.append(f"offset >= {one.start}")
        if any(file.max_offset >= one.end for file in files):
            words.append(f"offset < {one.end}")
        bounded |= len(words) > 1
        parts.append(f"({' AND '.join(words)})")
    filled = {partition for partition, files in table.found.files.items() if files}
    everything = not bounded and filled <= {one.partition for one in cold}
    return "" if everything else " OR ".join(parts)


def _spark_path(uri: str) -> str:
    from urllib.parse import unquote

    return "s3a" + uri[2:] if uri.startswith("s3:") else unquote(uri)


def _readable(spark: SparkSession, uri: str) -> bool:
    """Return whether Spark's JVM can read files at that place."""
    if uri.startswith(("file:", "/")):
        return True
    jvm: Any = getattr(spark, "_jvm", None)
    try:
        jvm.java.lang.Class.forName("org.apache.hadoop.fs.s3a.S3AFileSystem")
    except Exception:  # Py4JJavaError, or no JVM at all (Spark Connect)
        return False
    return True
