"""The copies of the cluster's metadata that a tier process makes (rule T13)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from pk import errors, tracing
from pk.log import batch as batches
from pk.server.metadata import snapshot
from pk.server.metadata.image import MetadataImage
from pk.server.metadata.records import encode_batch
from pk.server.raft.snapshot_framing import check
from pk.server.raft.snapshot_id import SnapshotId, file_name
from pk.server.tier.metadata_copier import MetadataCopier
from pk.sim.world import SimWorld
from pk.tiering import cluster_directory, metadata_copies, restore_records
from pk.tiering.objects import MemoryStore
from pk.tiering.restore_records import RestoreRecord
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from tests.unit.server.metadata.metadata_records import Historian

MINUTE_MS = 60_000


class Records(Historian):
    """Records of this build only: a tier process refuses levels that it does not know."""

    def _feature(self) -> None:
        self._no_op()


class Rig:
    """A controller with a metadata log, a store, and a tier process."""

    def __init__(self) -> None:
        self.sim = SimWorld(1)
        self.store = MemoryStore()
        self.log = Records(random.Random(1).randrange).begin().go_on(20)
        self.end: int | None = None  #: what is committed; None = everything
        self.snapshot: tuple[SnapshotId, bytes] | None = None  #: the log begins at its end
        self.away: errors.PkError | None = None
        self.lines: list[str] = []
        self.copier = self.made()

    def made(self, metrics: tracing.Metrics | None = None, machine: str = "tier") -> MetadataCopier:
        """A tier process that has just started."""
        log: Any = self
        world = self.sim.world_of(machine)
        return MetadataCopier(world, self, self.store, "cluster", MINUTE_MS, 1, log, metrics)

    def error(self, event: str, **facts: Any) -> None:
        self.lines.append(event)

    info = warning = error

    async def call(self, request: Any, timeout_ms: int) -> frames.Frame:
        if self.away is not None:
            raise self.away
        if isinstance(request, wire.FetchSnapshotRequest):
            return self._piece(request)
        end = len(self.log.records) if self.end is None else self.end
        reply = wire.FetchMetadataLogReply(
            high_watermark=end, leader_epoch=self.log.image.leader_epoch
        )
        raw, at = b"", request.from_offset
        if self.snapshot is not None and at < self.snapshot[0].end:
            reply.snapshot = file_name(self.snapshot[0])
        elif at < end:
            batch = encode_batch(self.log.records[at : min(end, at + 3)], 1)
            raw = b"".join(batches.patched(batch, at, 0))
        head = wire.Head(fetch_metadata_log_reply=reply)
        return frames.Frame(head, memoryview(raw))

    def _piece(self, request: Any) -> frames.Frame:
        assert self.snapshot is not None
        made, raw = self.snapshot
        part = raw[request.position : request.position + 100]
        reply = wire.FetchSnapshotReply(
            end=made.end, epoch=made.epoch, size=len(raw), position=request.position
        )
        return frames.Frame(wire.Head(fetch_snapshot_reply=reply), memoryview(part))

    def after(self, ms: int = 0, copier: MetadataCopier | None = None) -> bool:
        """One pass, `ms` later."""
        chosen = self.copier if copier is None else copier

        async def copy() -> bool:
            await self.sim.world_of("tier").clock.sleep_ms(ms)
            return await chosen.copy()

        return self.sim.run(copy())

    def copies(self) -> list[metadata_copies.MetadataName]:
        found = map(metadata_copies.parse_metadata_path, self.store.objects)
        return sorted(each for each in found if each is not None)

    def image(self) -> MetadataImage:
        """What a restore reads from the newest copy."""
        name = self.copies()[-1]
        raw = self.store.objects[metadata_copies.metadata_path("cluster", name)]
        check(raw, SnapshotId(name.end, name.epoch))
        image = MetadataImage()
        for rows in snapshot.batches_of(raw):
            for offset, record in rows:
                image.apply(offset, record)
        return image


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.sim.close()


def test_the_copy_is_the_image_of_the_log_and_is_written_again_once_it_changed(rig: Rig) -> None:
    assert rig.after()
    assert rig.image() == rig.log.image
    assert rig.after(MINUTE_MS)
    assert len(rig.copies()) == 1, "nothing has changed"
    rig.log.go_on(30)
    assert rig.after(MINUTE_MS)
    assert rig.image() == rig.log.image
    for _ in range(3):
        rig.log.go_on(1)
        rig.after(MINUTE_MS)
    assert len(rig.copies()) == metadata_copies.KEEP, "old copies are removed"


def test_only_committed_records_are_copied(rig: Rig) -> None:
    rig.end = 12
    rig.after()
    assert rig.image().offset == 11


def test_a_log_that_begins_with_a_snapshot_is_read_whole(rig: Rig) -> None:
    made = SnapshotId(len(rig.log.records), rig.log.image.leader_epoch)
    raw = b"".join(snapshot.encode(made, snapshot.rows_of(rig.log.image)))
    rig.snapshot = (made, raw)
    rig.log.go_on(10)
    assert rig.after()
    assert rig.image() == rig.log.image


def test_of_many_processes_one_writes_in_an_interval(rig: Rig) -> None:
    """tiering/metadata_copies M1: the others leave the interval to the writer."""
    others = [rig.made() for _ in range(3)]
    rig.after()
    for each in others:
        rig.log.go_on(1)
        rig.after(copier=each)
    assert len(rig.copies()) == 1
    rig.log.go_on(1)
    rig.after(MINUTE_MS)
    for each in others:
        rig.after(copier=each)
    assert len(rig.copies()) == 2


def test_another_cluster_of_the_same_id_replaces_no_copy(rig: Rig) -> None:
    """server/tier/metadata_copier K4: it says so once, and its metric shows it."""
    rig.after()
    before = dict(rig.store.objects)
    rig.log = Records(random.Random(2).randrange)
    rig.log.say(wire.LeaderChangeRecord(leader_id=1, epoch=1, voters=[1]))
    rig.log.say(wire.ClusterRecord(cluster_id="cluster", genesis="another"))
    metrics = tracing.Metrics()
    rig.copier = rig.made(metrics)
    passes = [rig.after(MINUTE_MS)]  # its log is shorter than the copy that is there
    rig.log.go_on(90)
    passes += [rig.after(MINUTE_MS) for _ in range(2)]
    assert passes == [False] * 3
    assert rig.store.objects == before
    assert rig.lines == ["metadata_copies_failing"]
    assert b"pk_tier_metadata_copies_failing 1.0" in metrics.text()


def test_metadata_that_are_older_than_the_tier_are_reported_once(rig: Rig) -> None:
    """tiering/metadata_copies M2: the log was restored from an older backup."""
    name = metadata_copies.MetadataName(90, 3)
    rig.store.objects[metadata_copies.metadata_path("cluster", name)] = b"of a later epoch"
    assert [rig.after(MINUTE_MS), rig.after(MINUTE_MS)] == [True, True]
    assert rig.lines == ["metadata_copy_superseded"]
    assert rig.copies() == [name]


def test_a_damaged_owner_is_no_owner_of_this_cluster(rig: Rig) -> None:
    path = cluster_directory.owner_path("cluster")
    rig.copier = rig.made()
    rig.store.objects[path] = b"torn"
    assert not rig.after()
    assert (rig.lines, list(rig.store.objects)) == (["metadata_copies_failing"], [path])


def test_a_failing_store_is_logged_once_and_a_controller_that_is_away_is_not(rig: Rig) -> None:
    """server/tier/metadata_copier K1, K2: the age of the newest copy shows both."""
    metrics = tracing.Metrics()
    rig.copier = rig.made(metrics)
    rig.after()
    rig.away = errors.ControllerUnavailable("no controller")
    assert not rig.after(MINUTE_MS)
    assert rig.lines == []
    rig.away = None

    def fails(operation: str, path: str) -> None:
        raise errors.TierUnavailable("no answer")

    works, rig.store.fault = rig.store.fault, fails
    assert [rig.after(), rig.after(1_000)] == [False] * 2
    assert rig.lines == ["metadata_copies_failing"]
    rig.sim.spawn("tier", rig.copier.run())
    rig.sim.run(rig.sim.world_of("tier").clock.sleep_ms(MINUTE_MS))
    age_ms = next(
        float(line.split()[1])
        for line in metrics.text().decode().splitlines()
        if line.startswith("pk_tier_metadata_copy_age_ms ")
    )
    assert age_ms >= 2 * MINUTE_MS
    rig.store.fault = works
    rig.log.go_on(1)
    assert rig.after(1_000)
    assert rig.lines == ["metadata_copies_failing", "metadata_copies_recovered"]


def test_a_cluster_that_was_restored_elsewhere_says_so_and_copies_nothing(rig: Rig) -> None:
    """A restore of another cluster of the same tier changes nothing."""

    def restored(generation: int, source: str) -> None:
        record = RestoreRecord(generation, source, "copy", f"new {source}", "genesis", 0)
        assert rig.sim.run(restore_records.put_record(rig.store, record))

    restored(1, "another")
    assert rig.after()
    assert len(rig.copies()) == 1
    restored(2, "cluster")
    rig.log.go_on(3)
    assert [rig.after(MINUTE_MS), rig.after(MINUTE_MS)] == [False, False]
    assert (rig.lines, len(rig.copies())) == (["metadata_copies_failing"], 1)
