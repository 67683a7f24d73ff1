"""Damage to the Delta tables of a run from outside: their logs rot, and rows are deleted.

delta_rot    A load of the newest version returns something else than its commits say: a file is
             missing, or facts of a file or a counter differ (rules T2, T8).  This lasts until an
             operator restores `_delta_log`.
delete_rows  Another engine's DELETE removes a whole file from a table, until that engine restores
             the version before (rule T17).  It strikes only topics that keep records without limit
             (`retention_ms` -1), and maintained tables.  In other topics retention asks the table
             for its first row by time, does not see that rows before it are missing, and moves
             log_start past them.

Both draw from a random stream of their own.  No other engine commits to a table whose log is
rotten, because such a commit would make the damage permanent.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container
from dataclasses import replace

from pk.sim.cluster import SimCluster
from pk.sim.oracle import Oracle
from pk.sim.samples import Observer
from pk.tiering import layout
from pk.tiering.data_files import held_by
from pk.tiering.table import Snapshot
from pk.types import TopicId

#: How long each fault lasts, in ms.
LASTS_MS = (300.0, 5_000.0)
KINDS = ("file", "facts", "counter")
After = Callable[[float, Callable[[], None]], None]


class TableFaults:
    """Damages tables.  `after(ms, work)` runs `work` later; `meet` counts a fault by name."""

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
        """Draw a table of `topics` that has files and an undamaged log."""
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
        """Let loads of a table differ from its commits, until an operator restores the log."""
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
        """Delete all rows of a file, as another engine does, and restore them later."""
        plans = self._cluster.options.topics
        maintained = [plan.name for plan in self._cluster.options.maintained_topics]
        chosen = self._table([*(plan.name for plan in plans if plan.keeps), *maintained])
        if chosen is None:
            return
        (topic, topic_id, newest), rng = chosen, self._rng
        file = newest.files[rng.choice(sorted(newest.files))]
        start, end = held_by(file)
        store = self._cluster.store
        self._cluster.world.record(f"DELETE of [{start}, {end}) of {topic}-{file.partition}")
        self._meet("files of rows deleted")
        if topic in maintained:
            self._oracle.thinned_tables[topic] = None
        else:
            self._oracle.rows_deleted(topic_id, file.partition, start, end)
        store.delete_rows(topic, topic_id, file)
        self._after(rng.uniform(*LASTS_MS), lambda: store.restore_rows(topic, topic_id, file))


def _altered(said: Snapshot, kind: str, path: str, partition: int) -> Snapshot:
    """Return a version as flipped bits would change it.

    If the file is no longer live, a counter is changed instead.
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
