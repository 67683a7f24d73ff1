"""A maintained table in the simulated store, as a job and its executors read and write it.

The two passes of a compaction are the production functions (maintenance/compaction_rows).  Each
runs in one step of virtual time, on the objects as they are; the driver waits before and after.
"""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pk import errors
from pk.sim.compaction import CompactionClient
from pk.sim.objects import SimObjects
from pk.sim.table_history import LeaseHistory
from pk.sparkconnector.maintenance import compaction_rows, tables
from pk.sparkconnector.maintenance.compaction_plan import FileChange, PartitionCleaning, Portion
from pk.sparkconnector.maintenance.compaction_rows import (
    FirstPass,
    RewrittenRun,
    ScannedFile,
    SecondPass,
)
from pk.sparkconnector.maintenance.tables import TablePlace
from pk.tiering import layout
from pk.tiering.data_files import DataFile
from pk.tiering.table import Snapshot
from pk.world import World


class TableClient:
    """What the jobs of a run share."""

    def __init__(
        self,
        shared: CompactionClient,
        store: SimObjects,
        leases: LeaseHistory,
        leader_epoch: Callable[[str], int],
        count: Callable[[str], None],
    ) -> None:
        self.shared, self.store, self.leases = shared, store, leases
        self.leader_epoch, self.count = leader_epoch, count

    def topic_id(self, topic: str) -> str:
        """Return the id of a topic; '' = it is not created yet."""
        return self.shared.history.known.topics[topic].topic_id


class _Writing(io.BytesIO):
    def __init__(self, objects: dict[str, bytes], path: str) -> None:
        super().__init__()
        self._objects, self._path = objects, path

    def __exit__(self, *raised: Any) -> None:
        self._objects[self._path] = self.getvalue()


class _Files:
    """The objects of the store, as far as a job uses an Arrow file system."""

    def __init__(self, store: SimObjects) -> None:
        self._objects = store.memory.objects

    def open_input_file(self, path: str) -> Any:
        raw = self._objects.get(path)
        if raw is None:
            raise FileNotFoundError(path)
        return pa.BufferReader(raw)

    def open_output_stream(self, path: str) -> Any:
        return _Writing(self._objects, path)


@dataclass(slots=True, frozen=True)
class SimPlace(TablePlace):
    """A table of the simulated store; names and times are drawn, so a seed repeats itself."""

    store: Any = None
    rng: Any = None
    world: Any = None

    def file_system(self) -> tuple[Any, str]:
        return _Files(self.store), layout.table_path(self.topic, self.topic_id)

    def new_attempt(self) -> str:
        return f"{self.rng.getrandbits(64):016x}"

    def wall_ms(self) -> int:
        found: int = self.world.clock.wall_ms()
        return found


def place_of(
    store: SimObjects, world: World, rng: random.Random, topic: str, topic_id: str
) -> SimPlace:
    """Return the place of a topic's table."""
    uri = f"{store.url}/{layout.table_path(topic, topic_id)}"
    return SimPlace(topic, topic_id, uri, {}, "", store, rng, world)


class Passes:
    """The two passes over one version."""

    def __init__(
        self, place: SimPlace, snapshot: Snapshot, cleanings: Sequence[PartitionCleaning]
    ) -> None:
        self._place = place
        self._cleanings = cleanings
        self.snapshot = snapshot
        self.files: list[DataFile] = [file for each in cleanings for file in each.files]
        self.changes: dict[str, FileChange] = {}
        self._decisions: list[dict[str, Any]] = []

    def first(self) -> None:
        """Decide about the rows of all files.  Raises the errors of the executors."""
        starts = {c.partition: self.snapshot.partition(c.partition).start for c in self._cleanings}
        given = FirstPass(
            self._place,
            tuple(ScannedFile(file, nulls=True) for file in self.files),
            {c.partition: (c.plan.first_dirty, c.cleaning) for c in self._cleanings},
            self._place.rng.choice((1, 2, 3)),
            self._place.rng.randbytes(32),
            starts,
        )
        numbers = pa.RecordBatch.from_pydict({"id": list(range(len(self.files)))})
        moved = list(compaction_rows.scan(given, [numbers]))
        for bucket in range(given.buckets):
            mine = [rows.filter(pa.compute.equal(rows.column("bucket"), bucket)) for rows in moved]
            for batch in compaction_rows.decide(given, mine):
                self._decisions += batch.to_pylist()
        counts: dict[int, list[int]] = {}
        for row in self._decisions:
            if row["error"] is not None:
                raise pickle.loads(row["error"])
            names = ("superseded", "without_key", "tombstones", "horizons")
            before = counts.get(row["file"], [0, 0, 0, 0])
            counts[row["file"]] = [a + row[name] for a, name in zip(before, names, strict=True)]
        for number, numbers_of in counts.items():
            self.changes[self.files[number].path] = FileChange(*numbers_of)

    def second(self, portion: Portion) -> list[RewrittenRun]:
        """Write the files of a portion."""
        numbers = {file.path: number for number, file in enumerate(self.files)}
        horizons: Mapping[int, int] = {}
        if portion.times:
            timed = [c for c in self._cleanings if c.cleaning.now_ms is not None]
            horizons = {each.partition: each.cleaning.new_horizon for each in timed}
        runs = {run.number: run for run in portion.runs}
        given = SecondPass(self._place, runs, horizons, portion.times)
        done = []
        for run in portion.runs:
            wanted = {numbers[file.path] for file in run.files}
            rows = [
                {"run": run.number, "offsets": row["offsets"], "codes": row["codes"]}
                for row in self._decisions
                if row["file"] in wanted
            ]
            for batch in compaction_rows.rewrite(given, [pa.RecordBatch.from_pylist(rows)]):
                result = pickle.loads(batch.column("result")[0].as_py())
                if isinstance(result, errors.PkError):
                    raise result
                done.append(result)
        return done

    def finished(self, done: PartitionCleaning) -> bool:
        """Whether the partition needs no hand-over."""
        cleaned = self.snapshot.partition(done.partition).cleaned
        return done.cleaning.end <= cleaned and not any(
            file.path in self.changes for file in done.files
        )


def rows_of(place: SimPlace, file: DataFile) -> list[pa.RecordBatch]:
    """Return every row of a file.  Raises `DamagedTierFile`."""
    return list(tables.rows_of(place, file))
