"""What happens to the Delta tables of a run from outside: their log rots, and rows are deleted.

delta_rot    a load of the newest version finds something else than its commits say: a file is not
             named, facts of a file or a counter differ (rules T2, T8).  It lasts until an operator
             restores `_delta_log`
delete_rows  another engine's DELETE takes a whole file out of a table, until that engine restores
             the version before (rule T17).  Only of topics that keep records for ever
             (`retention_ms` -1): elsewhere retention asks the table for its first row by time,
             does not see that rows before it are missing, and moves log_start past them

Both draw from a random stream of their own.  No other engine commits to a table whose log is
rotten: it would write the damage down for good.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container
from dataclasses import replace

from pk.sim.cluster import SimCluster
from pk.sim.oracle import Oracle
from pk.sim.samples import Observer
from pk.tiering import layout
from pk.tiering.accounting import held_by
from pk.tiering.table import Snapshot
from pk.types import TopicId

#: How long each lasts, in ms.
LASTS_MS = (300.0, 5_000.0)
KINDS = ("file", "facts", "counter")
After = Callable[[float, Callable[[], None]], None]


class TableFaults:
    """See the module.  `after` carries something out once so many ms have passed; `meet` counts."""

    def __init__(
        self,
        cluster: SimCluster,
        observer: Observer,
        oracle: Oracle,
        after: After,
        meet: Callable[[str], None],
    ) -> None:
        self._cluster = cluster
        self._observer = observer
        self._oracle = oracle
        self._after = after
        self._meet = meet
        self._rng: random.Random = cluster.world.random("faults/tables")

    def _table(self, topics: Container[str]) -> tuple[str, TopicId, Snapshot] | None:
        """The table of one of `topics` that has files and a whole log."""
        store, found = self._cluster.store, []
        for topic in self._observer.image.topics.values():
            if topic.name not in topics:
                continue
            newest = store.snapshot(topic.name, topic.topic_id)
            rotten = store.log_is_rotten(topic.name, topic.topic_id)
            if newest is not None and newest.files and not rotten:
                found.append((topic.name, topic.topic_id, newest))
        return self._rng.choice(found) if found else None

    def rot_log(self) -> None:
        """What is loaded of a table is not what its commits say."""
        chosen = self._table([plan.name for plan in self._cluster.options.topics])
        if chosen is None:
            return
        (topic, topic_id, newest), rng = chosen, self._rng
        kind, path = rng.choice(KINDS), rng.choice(sorted(newest.files))
        home, store = layout.table_path(topic, topic_id), self._cluster.store
        self._cluster.world.record(f"rot of the log of {home}: {kind} of {path}")
        self._meet("rot of Delta logs")
        self._oracle.rotten_tables[home] = None
        partition = newest.files[path].partition
        store.rot_log(topic, topic_id, lambda said: _altered(said, kind, path, partition))
        self._after(rng.uniform(*LASTS_MS), lambda: store.restore_log(topic, topic_id))

    def delete_rows(self) -> None:
        """A DELETE of another engine takes all rows of a file."""
        plans = self._cluster.options.topics
        chosen = self._table([plan.name for plan in plans if plan.keeps])
        if chosen is None:
            return
        (topic, topic_id, newest), rng = chosen, self._rng
        file = newest.files[rng.choice(sorted(newest.files))]
        start, end = held_by(file)
        store = self._cluster.store
        self._cluster.world.record(f"DELETE of [{start}, {end}) of {topic}-{file.partition}")
        self._meet("files of rows deleted")
        self._oracle.rows_deleted(topic_id, file.partition, start, end)
        store.delete_rows(topic, topic_id, file)
        self._after(rng.uniform(*LASTS_MS), lambda: store.restore_rows(topic, topic_id, file))


def _altered(said: Snapshot, kind: str, path: str, partition: int) -> Snapshot:
    """What flipped bits make of a version.  A file that is not live any more cannot be altered:
    then it is a counter.
    """
    files, counters = dict(said.files), dict(said.counters)
    if kind == "file" and path in files:
        del files[path]
    elif kind == "facts" and path in files:
        files[path] = replace(files[path], rows=files[path].rows + 1)
    else:
        now = said.partition(partition)
        counters[partition] = now._replace(end=now.end + 1)
    return Snapshot(said.version, said.table_id, files, counters, said.protocol)
