"""The snapshots of maintained tables: the job's plan on a state that outlives its drivers (V31)."""

from __future__ import annotations

import random

import pyarrow.compute as pc

from pk import errors
from pk.sim.compaction_history import keyed_rows_of
from pk.sim.objects import SimTable
from pk.sim.options import TopicPlan
from pk.sim.table_history import SnapshotState, check_snapshot
from pk.sim.table_place import SimPlace, TableClient, place_of, rows_of
from pk.sparkconnector.maintenance import snapshot_plan
from pk.sparkconnector.maintenance.snapshot_plan import SnapshotPlan
from pk.tiering import accounting
from pk.tiering.snapshot_table import SnapshotVersion
from pk.tiering.table import Snapshot
from pk.world import World

WHOLE = 0.1


class SnapshotRuns:
    """The newest snapshot of each topic."""

    def __init__(self) -> None:
        self.states: dict[str, SnapshotState] = {}

    async def run(
        self, world: World, client: TableClient, plan: TopicPlan, rng: random.Random
    ) -> None:
        """Bring the snapshot of a topic to the newest version of its table, and check it.

        Raises the errors of the job.
        """
        history, began_ms = client.shared.history, client.shared.now_ms()
        topic_id = client.topic_id(plan.name)
        place = place_of(client.store, world, rng, plan.name, topic_id)
        table = await SimTable(client.store, plan.name, topic_id).load(range(plan.partitions))
        if table is None:
            return
        if accounting.missing_of(table, range(plan.partitions)):
            raise errors.DamagedTierFile("rows are missing")  # DataLoss, as the job says it
        before = self.states.get(plan.name)
        planned = snapshot_plan.plan(table, _version(place, before), whole=rng.random() < WHOLE)
        state = SnapshotState(dict(planned.ends))
        if before is not None and not planned.why_whole:
            state.rows.update(before.rows)
        _read(place, table, planned, state, client.shared.now_ms())
        if (
            client.store.snapshot(plan.name, topic_id) is None
            or self.states.get(plan.name) is not before
        ):
            return  # the commit is exact: another run was faster
        self.states[plan.name] = state
        client.count(f"snapshots {'whole' if planned.why_whole else 'increment'}")
        starts = {number: table.partition(number).start for number in planned.ends}
        check_snapshot(history, plan.name, state, starts, began_ms)


def _version(place: SimPlace, before: SnapshotState | None) -> SnapshotVersion | None:
    if before is None:
        return None
    return SnapshotVersion(place.topic, place.uri, 0, before.positions, {})


def _read(
    place: SimPlace, table: Snapshot, planned: SnapshotPlan, state: SnapshotState, now_ms: float
) -> None:
    """Bring the rows of the state to X, from the rows of the table that the plan reads."""
    for partition in planned.slices:
        since, end = planned.since[partition], planned.ends[partition]
        for file in table.files_of(partition):
            if file.max_offset < since:
                continue
            for batch in rows_of(place, file):
                offsets = batch.column("offset")
                inside = pc.and_(pc.greater_equal(offsets, since), pc.less(offsets, end))
                for row in keyed_rows_of(batch.filter(inside), now_ms):
                    known = state.rows.get((partition, row.key))
                    if known is None or known.offset < row.offset:
                        state.rows[partition, row.key] = row
    for (partition, key), row in list(state.rows.items()):
        if row.tombstone or row.offset < table.partition(partition).start:
            del state.rows[partition, key]
