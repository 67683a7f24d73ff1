"""The unit that Spark sends to an executor, and its plan: what the JVM may read in columns.

The driver's Python decides everything and writes it as JSON into the pickled partition; the classes
of sparkconnector/java read it.  They move columns and nothing else: they never retry, look up
metadata or word an error.  When they cannot go on, they call `from_plan` with the position reached,
and Python reads the rest (rules S5 to S8).

A plan is a list of sections, one for each task of the partition, in their order:

  cold     the files of the table that hold the range: on a local disk, written by pk, disjoint
  hot      a fetch from the leader, with its frames (sparkconnector/prepared_fetch)
  python   everything else; `why` says what kept it from the JVM

The plan of a scan that Python reads as a whole says in `why` what the reason is, for `explain`.

Invariants
  D1  `tasks_of(plan_of(tasks))` gives the same tasks, so a partition loses nothing by its plan.
  D2  Either all partitions of a scan have a plan or none, because Spark mixes no rows with columns.
      A scan of which the JVM would read less than half of the offsets has a `why` in each plan,
      and Java follows none of them.  So has a scan of many small ranges: the JVM fetches each on a
      connection of its own, Python many with one request (sparkconnector/joint_scan).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import InputPartition

from pk import errors
from pk.sparkconnector.offsets import Range
from pk.sparkconnector.planner import Planner, Task
from pk.sparkconnector.ranges import TierFile
from pk.types import NONE

if TYPE_CHECKING:
    from pk.sparkconnector.tier_scan import ColdRange

#: The version of the plan's JSON; the JVM knows one version and refuses any other (S8).
VERSION = 1
#: Python reads a scan whose tasks have this many ranges or more, of at most so many bytes, on
#: average.  The JVM takes 0.7 ms more for each range, and less for each row.
NARROW_RANGES_LEAST = 64
NARROW_BYTES_MOST = 16 << 10
_NO_LEADER = "no address of a leader that the JVM can reach"


class PkPartition(InputPartition):
    """An input partition of Spark that carries one or several `Task`s, read one after the other.

    With a `plan`, it is pickled as a call that makes it from the plan , which the JVM can read,
    too.
    """

    def __init__(self, tasks: Sequence[Task], plan: str = "") -> None:
        self.tasks = tuple(tasks)
        self.plan = plan

    def __reduce__(self) -> tuple[Callable[..., PkPartition], tuple[Any, ...]]:
        if not self.plan:
            return PkPartition, (self.tasks,)
        return from_plan, (self.plan,)

    def __repr__(self) -> str:
        return "; ".join(map(_words, self.tasks))


def _words(task: Task) -> str:
    one = task.range
    where = "tier" if task.cold is not None else "log"
    return f"{one.topic}-{one.partition} [{one.start}, {one.end}) of the {where}"


def partitions_of(packed: Sequence[Sequence[Task]], planner: Planner) -> list[PkPartition]:
    """Return the partitions of a scan, with plans if the JVM should read it in columns (D2)."""
    if not planner.source.columnar or not packed:
        return [PkPartition(tasks) for tasks in packed]
    narrow = _narrow(packed)
    fetches = {} if narrow else _fetches([task for tasks in packed for task in tasks], planner)
    sections = [
        [_section(task, fetches.get(task.range), narrow or _NO_LEADER) for task in tasks]
        for tasks in packed
    ]
    why = narrow or _too_little([each for one in sections for each in one])
    return [
        PkPartition(tasks, _text(one, why)) for tasks, one in zip(packed, sections, strict=True)
    ]


def _narrow(packed: Sequence[Sequence[Task]]) -> str:
    """Return why Python should read the whole scan: it has many small ranges; empty = not so."""
    sizes = [task.bytes for tasks in packed for task in tasks]
    if min(sizes) < 0 or any(task.cold is not None for tasks in packed for task in tasks):
        return ""
    few = len(sizes) < NARROW_RANGES_LEAST * len(packed)
    if few or sum(sizes) > NARROW_BYTES_MOST * len(sizes):
        return ""
    return f"{len(sizes)} small ranges: many share a fetch request"


def _too_little(sections: Sequence[dict[str, Any]]) -> str:
    """Return why Python should read the whole scan; empty = the JVM reads at least half (D2)."""
    sizes = [(each["kind"] != "python", each["end"] - each["start"]) for each in sections]
    planned, whole = sum(size for ours, size in sizes if ours), sum(size for _, size in sizes)
    if 2 * planned >= whole:
        return ""
    reasons = sorted({each["why"] for each in sections if "why" in each})
    return f"the JVM could read {planned} of {whole} offsets ({'; '.join(reasons)})"


def _fetches(tasks: Sequence[Task], planner: Planner) -> dict[Range, dict[str, Any]]:
    """Return how the JVM fetches the hot ranges; without a leader's address Python fetches them."""
    ranges = [task.range for task in tasks if task.cold is None]
    if not ranges:
        return {}
    try:
        found = planner.cluster.prepared(ranges, read_committed=planner.source.read_committed)
    except errors.PkError:
        return {}  # the task that reads the range reports it
    return {one: each for one, each in zip(ranges, found, strict=True) if each is not None}


def plan_of(tasks: Sequence[Task], fetches: Mapping[Range, dict[str, Any]] | None = None) -> str:
    """Return the plan of one partition.  fetches: how the JVM fetches a hot range."""
    return _text([_section(task, (fetches or {}).get(task.range)) for task in tasks])


def _text(sections: Sequence[dict[str, Any]], why: str = "") -> str:
    from pk.sparkconnector import columnar_jar  # not on executors: each unpickles a partition

    found: dict[str, Any] = {"v": VERSION, "build": columnar_jar.build_of_sources()}
    if why:
        found["why"] = why
    return json.dumps({**found, "sections": sections}, separators=(",", ":"))


def _section(task: Task, fetch: dict[str, Any] | None, why: str = _NO_LEADER) -> dict[str, Any]:
    """Return the section of a task.  why: a hot range without a fetch is left to Python."""
    one = task.range
    found: dict[str, Any] = {"kind": "python", **one._asdict(), "committed": task.read_committed}
    if task.cold is not None:
        return found | _cold(task.cold)
    if fetch is not None:
        return found | {"kind": "hot", **fetch}
    return found | {"why": why, "bytes": task.bytes}


def _cold(cold: ColdRange) -> dict[str, Any]:
    """Return what a section says about the table; `kind` only if the JVM can read its files."""
    from pk.sparkconnector.table_store import local_root

    found: dict[str, Any] = {
        "uri": cold.uri,
        "storage_options": dict(cold.storage_options),
        "version": cold.version,
        "files": [_file(each) for each in cold.files],
    }
    root = local_root(cold.uri)
    if root is None:
        return found | {"why": f"the table is on {cold.uri.partition(':')[0]}://"}
    if not _in_offset_order(cold.files):
        return found | {"why": "another engine wrote files of the table, or they overlap"}
    return found | {"kind": "cold", "root": root}


def _file(file: TierFile) -> dict[str, Any]:
    from pk.tiering.layout import parse_written_path

    name = parse_written_path(file.path)
    return {
        "path": file.path,
        "min": file.min_offset,
        "max": file.max_offset,
        "size": file.size,
        "rows": file.rows,
        "crc": -1 if name is None else name.footer_crc,
    }


def _in_offset_order(files: Sequence[TierFile]) -> bool:
    """Return whether pk wrote all files, and each begins behind the one before it."""
    from pk.tiering.layout import parse_written_path

    return all(each.rows > 0 and parse_written_path(each.path) for each in files) and all(
        before.max_offset < after.min_offset for before, after in pairwise(files)
    )


# -- back from the JVM -----------------------------------------------------------------------------


def from_plan(text: str, first: int = 0, last: int = -1, position: int = -1) -> PkPartition:
    """Return the partition of a plan: its sections `[first, last)`, the first one from `position`.

    Pickles of partitions call this; the JVM writes such a pickle to hand a rest back (S6).
    last: -1 = all.  position: -1 = from the start.
    Raises `NewerFormat` for a plan that this build did not write.
    """
    tasks = tasks_of(text)[first : None if last < 0 else last]
    if position >= 0:
        start = max(position, tasks[0].range.start)
        tasks[0] = replace(tasks[0], range=tasks[0].range._replace(start=start))
    return PkPartition(tasks, text if (first, last, position) == (0, -1, -1) else "")


def tasks_of(text: str) -> list[Task]:
    """Return the tasks of a plan (D1)."""
    found = json.loads(text)
    if found["v"] != VERSION:
        raise errors.NewerFormat(
            f"a plan of version {found['v']}; this pk knows {VERSION}: driver and executors need "
            "the same pk"
        )
    return [_task(each) for each in found["sections"]]


def _task(section: dict[str, Any]) -> Task:
    one = Range(**{name: section[name] for name in Range._fields})
    if "uri" not in section:
        return Task(one, section["committed"], bytes=section.get("bytes", NONE))
    from pk.sparkconnector.tier_scan import ColdRange

    files = tuple(
        TierFile(each["path"], each["min"], each["max"], each["size"], each["rows"])
        for each in section["files"]
    )
    cold = ColdRange(section["uri"], section["storage_options"], files, section["version"])
    return Task(one, section["committed"], cold)
