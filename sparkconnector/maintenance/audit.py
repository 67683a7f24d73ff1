"""The job `audit`: every stable offset is in the table once, as the log had it.

The driver chooses one version.  The executors read every file of it and the local log where both
hold the same offsets (audit_rules.py).  The driver appends one row for each partition to the Delta
table `<tier>/_audit`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pk import errors
from pk.clock import SystemClock
from pk.schedules import DAMAGED, DONE
from pk.sparkconnector import table_store
from pk.sparkconnector.maintenance import audit_rules, tables
from pk.sparkconnector.maintenance.audit_rules import ClusterFacts, FileFacts, Judgement, LogFacts
from pk.sparkconnector.maintenance.tables import TablePlace, TableVersion
from pk.tiering import rowhash
from pk.tiering.data_files import DataFile
from pk.tiering.layout import SUM_MODULUS
from pk.types import Offset, TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Bytes of files that a task reads, about; files that overlap are read by one task.
TASK_BYTES = 256 << 20
#: Polls of one second without progress before the local log counts as unreadable.
IDLE_POLLS_MAX = 30
AUDIT_TABLE = "_audit"

_Offsets = npt.NDArray[np.int64]


@dataclass(slots=True, frozen=True)
class AuditReport:
    """The result of one run."""

    run: str
    topic: str
    topic_id: str
    version: int  #: of the table that was read
    partitions: tuple[Judgement, ...]

    @property
    def verdict(self) -> str:
        damaged = any(each.problems for each in self.partitions)
        return "damaged" if damaged else "ok"

    @property
    def outcome(self) -> str:
        return DAMAGED if self.verdict == "damaged" else DONE

    def summary(self) -> str:
        """Return the result as one line."""
        rows = sum(each.rows for each in self.partitions)
        problems = [problem for each in self.partitions for problem in each.problems]
        found = f"; {len(problems)} problems, the first: {problems[0]}" if problems else ""
        return f"version {self.version}: {self.verdict}, {rows} rows{found}"


class _ReadFiles(NamedTuple):
    """A task: files of one partition, in clusters; `common`: the offsets that the log has, too."""

    place: TablePlace
    clusters: tuple[tuple[DataFile, ...], ...]
    common: tuple[Offset, Offset]


class _ReadLog(NamedTuple):
    place: TablePlace
    partition: int
    start: Offset
    end: Offset


def audit(spark: SparkSession, bootstrap: str, topic: str, *, record: bool = True) -> AuditReport:
    """Read the newest version of a topic's table whole, and compare it with its counters and with
    the local log.

    record: append the result to the Delta table `<tier>/_audit`

    Raises `InvalidRequest` if the topic has no table, `TierTableChanged` if the table's log is
    damaged or was altered.
    """
    place, partitions = tables.place_of(bootstrap, topic)
    version = tables.newest(place, partitions)
    local, compacted = _of_the_log(place)
    tasks: list[_ReadFiles | _ReadLog] = []
    of_partition: list[int] = []
    for partition in partitions:
        counters, files = (
            version.snapshot.partition(partition),
            version.snapshot.files_of(partition),
        )
        common = audit_rules.common(counters, files, local.get(partition), compacted=compacted)
        made: list[_ReadFiles | _ReadLog] = list(_file_tasks(version, partition, common))
        if common[0] < common[1]:
            made.append(_ReadLog(place, partition, *common))
        tasks += made
        of_partition += [partition] * len(made)
    found = tables.run_tasks(spark, tasks, _read, f"pk audit {topic}")
    judged = tuple(
        _judged(
            version,
            partition,
            [r for r, p in zip(found, of_partition, strict=True) if p == partition],
        )
        for partition in partitions
    )
    run = os.urandom(16).hex()
    report = AuditReport(run, topic, place.topic_id, version.snapshot.version, judged)
    if record:
        _record(place, version, report)
    return report


def _of_the_log(place: TablePlace) -> tuple[dict[int, Offset], bool]:
    """Return where each local log starts, and whether the topic is compacted."""
    from pk.client.admin import AdminClient

    with AdminClient(place.bootstrap) as admin:
        found = admin.offsets(place.topic, "earliest_local")
        settings = {each.name: each.value for each in admin.describe_configs(place.topic)}
    starts = {each.partition: offset for each, offset in found.items()}
    return starts, "compact" in settings["cleanup_policy"]


def _file_tasks(
    version: TableVersion, partition: int, common: tuple[Offset, Offset]
) -> Iterator[_ReadFiles]:
    snapshot = version.snapshot
    live = audit_rules.live_files(snapshot.files_of(partition), snapshot.partition(partition))
    some: list[tuple[DataFile, ...]] = []
    size = 0
    for cluster in audit_rules.clusters(live):
        more = sum(file.size for file in cluster)
        if some and size + more > TASK_BYTES:
            yield _ReadFiles(version.place, tuple(some), common)
            some, size = [], 0
        some.append(tuple(cluster))
        size += more
    if some:
        yield _ReadFiles(version.place, tuple(some), common)


def _judged(version: TableVersion, partition: int, found: Sequence[Any]) -> Judgement:
    counters = version.snapshot.partition(partition)
    live = audit_rules.live_files(version.snapshot.files_of(partition), counters)
    read = [each for result in found if isinstance(result, list) for each in result]
    logs = [result for result in found if isinstance(result, LogFacts)]
    return audit_rules.judge(partition, counters, live, read, logs[0] if logs else None)


def _record(place: TablePlace, version: TableVersion, report: AuditReport) -> None:
    """Append one row for each partition to `<tier>/_audit`."""
    import pyarrow as pa
    from deltalake import write_deltalake

    now_ms = SystemClock().wall_ms()
    rows = []
    for each in report.partitions:
        counters = version.snapshot.partition(each.partition)
        rows.append(
            {
                "run": report.run,
                "time": now_ms,
                "topic": report.topic,
                "topic_id": report.topic_id,
                "version": report.version,
                "partition": each.partition,
                "start": counters.start,
                "end": counters.end,
                "files": each.files,
                "rows": each.rows,
                "verdict": each.verdict,
                "problems": "\n".join(each.problems),
                "notes": "\n".join(each.notes),
            }
        )
    root = place.uri.rsplit("/", 2)[0]
    options = table_store.with_credentials(place.storage_options) or None
    write_deltalake(
        f"{root}/{AUDIT_TABLE}",
        pa.Table.from_pylist(rows, _schema()),
        mode="append",
        storage_options=options,
    )


def _schema() -> Any:
    import pyarrow as pa

    texts = ("run", "topic", "topic_id", "verdict", "problems", "notes")
    numbers = ("version", "partition", "start", "end", "files", "rows")
    fields = [pa.field(name, pa.string()) for name in texts]
    fields += [pa.field(name, pa.int64()) for name in numbers]
    return pa.schema([*fields, pa.field("time", pa.timestamp("us", tz="UTC"))])


# -- on the executors ------------------------------------------------------------------------------


def _read(task: _ReadFiles | _ReadLog) -> list[ClusterFacts] | LogFacts:
    if isinstance(task, _ReadLog):
        return _read_log(task)
    return [_read_cluster(task.place, files, task.common) for files in task.clusters]


def _read_cluster(
    place: TablePlace, files: Sequence[DataFile], common: tuple[Offset, Offset]
) -> ClusterFacts:
    """Read files whose offsets overlap.  Offsets are kept in memory only if they are not in order:
    8 bytes for each row that another engine scattered."""
    facts: list[FileFacts] = []
    scattered: list[_Offsets] = []
    common_rows = common_sum = 0
    for file in files:
        try:
            one, offsets, (rows, total) = _read_file(place, file, common, keep=len(files) > 1)
        except errors.DamagedTierFile as error:
            facts.append(FileFacts(file.path, error=error.message))
            continue
        facts.append(one)
        scattered += offsets
        common_rows += rows
        common_sum += total
    repeated = 0
    if scattered:
        every = np.concatenate(scattered)
        repeated = len(every) - len(np.unique(every))
    return ClusterFacts(tuple(facts), repeated, common_rows, common_sum % SUM_MODULUS)


def _read_file(
    place: TablePlace, file: DataFile, common: tuple[Offset, Offset], *, keep: bool
) -> tuple[FileFacts, list[_Offsets], tuple[int, int]]:
    rows = total = common_rows = common_sum = 0
    least, most = 2**63 - 1, -1
    kept: list[_Offsets] = []
    in_order = True
    for batch in tables.rows_of(place, file):
        offsets: _Offsets = batch.column("offset").to_numpy()
        hashes = rowhash.hash_rows(batch)
        in_order = in_order and int(offsets[0]) > most and bool((offsets[1:] > offsets[:-1]).all())
        kept.append(offsets.copy())
        rows += len(offsets)
        total += int(hashes.sum(dtype=np.uint64)) % SUM_MODULUS
        least, most = min(least, int(offsets.min())), max(most, int(offsets.max()))
        inside = (offsets >= common[0]) & (offsets < common[1])
        common_rows += int(inside.sum())
        common_sum += int(hashes[inside].sum(dtype=np.uint64)) % SUM_MODULUS
    facts = FileFacts(file.path, rows, total % SUM_MODULUS, least, most)
    offsets_needed = kept if keep or not in_order else []
    return facts, offsets_needed, (common_rows, common_sum)


def _read_log(task: _ReadLog) -> LogFacts:
    """Read the committed rows of the local log in a range."""
    from pk import Consumer

    place = TopicPartition(task.place.topic, task.partition)
    rows = total = idle = 0
    try:
        with Consumer(
            task.place.bootstrap, auto_offset_reset="none", isolation_level="read_committed"
        ) as consumer:
            consumer.assign([place])
            consumer.seek(place, task.start)
            at = task.start
            while at < task.end and idle < IDLE_POLLS_MAX:
                for _, batch in consumer.poll_batches(1.0):
                    offsets = batch.column("offset").to_numpy()
                    inside = batch.slice(0, int(np.searchsorted(offsets, task.end)))
                    rows += inside.num_rows
                    total += rowhash.row_sum(inside)
                now = consumer.position(place)
                idle = 0 if now > at else idle + 1
                at = now
    except errors.PkError as error:
        return LogFacts(task.start, task.end, error=error.message)
    if at < task.end:
        return LogFacts(task.start, task.end, error=f"nothing came at offset {at}")
    return LogFacts(task.start, task.end, rows, total % SUM_MODULUS)


def as_object(report: AuditReport) -> dict[str, Any]:
    """Return the report as a JSON object."""
    found = asdict(report)
    found["verdict"] = report.verdict
    found["partitions"] = [
        {**each._asdict(), "verdict": each.verdict} for each in report.partitions
    ]
    return found
