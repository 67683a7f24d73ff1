"""A restore from the tier, on a store and tables in memory (rule T13)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pk import errors, generations, transactional_ids
from pk.server.metadata import snapshot
from pk.server.metadata.image import BROKER_RESOURCE, TOPIC_RESOURCE, MetadataImage
from pk.server.metadata.records import record_of
from pk.server.node.settings import resolve
from pk.server.raft.snapshot_framing import check
from pk.server.raft.snapshot_id import SnapshotId
from pk.server.tier import restore as module
from pk.server.tier.restore import Restore, RestoreReport, Wishes
from pk.server.tier.restored_metadata import replicas_of
from pk.sim.world import SimWorld
from pk.tiering import cluster_directory, metadata_copies, restore_fence, restore_records
from pk.tiering.data_files import DataFile, NewFile
from pk.tiering.layout import PartitionCounters
from pk.tiering.metadata_copies import MetadataName
from pk.tiering.objects import MemoryStore
from pk.tiering.plan import Claim, LogStart, Submission, plan
from pk.tiering.table import Commit, MemoryTables, Snapshot
from pk.types import NONE
from pk.wire import pk_pb2 as wire

TOPIC_ID, LOCAL_ID = "id-of-t", "id-of-local"
FIRST = generations.OFFSETS


def lost_image() -> MetadataImage:
    """The metadata of the lost cluster: a topic with a table, one without, an internal one."""
    image = MetadataImage()

    def say(body: Any) -> None:
        image.apply(image.offset + 1, record_of(body))

    say(wire.LeaderChangeRecord(leader_id=1, epoch=1, voters=[1]))
    say(wire.VotersRecord(voters=[wire.Voter(node_id=1, directory_id="d", address="a:1")]))
    say(wire.ClusterRecord(cluster_id="c", genesis="first"))
    say(wire.ProducerIdsRecord(broker_id=NONE, broker_epoch=NONE, next_producer_id=7_000))
    for name, topic_id in (("t", TOPIC_ID), ("local", LOCAL_ID), ("__consumer_offsets", "o")):
        say(wire.TopicRecord(name=name, topic_id=topic_id))
        for number in range(2):
            state: dict[str, Any] = {"leader": 1, "leader_epoch": 4, "isr": [1, 2]}
            say(
                wire.PartitionRecord(
                    topic_id=topic_id, partition=number, replicas=[1, 2, 3], **state
                )
            )
        say(
            wire.ConfigRecord(
                resource_type=TOPIC_RESOURCE, resource_name=name, name="retention_ms", value="5"
            )
        )
    say(wire.ConfigRecord(resource_type=BROKER_RESOURCE, name="segment_bytes", value="1000000"))
    return image


class Rig:
    """A tier of the lost cluster `c`, and machines without data."""

    def __init__(self, directory: Path) -> None:
        self.sim = SimWorld(1)
        self.world = self.sim.world_of("machine")
        self.store, self.tables = MemoryStore(), MemoryTables()
        self.directory = directory
        self.made = 0
        self.image = lost_image()
        self.copy("c", self.image)
        self.table = self.tables.table("t", TOPIC_ID)
        self.old_owner = self.tables.table("t", TOPIC_ID)
        self.do(self.begin_table())

    def do(self, work: Any) -> Any:
        return self.sim.run(work)

    def copy(self, cluster_id: str, image: MetadataImage, raw: bytes | None = None) -> str:
        made = SnapshotId(image.offset + 1, image.leader_epoch)
        path = metadata_copies.metadata_path(cluster_id, MetadataName(made.epoch, made.end))
        whole = b"".join(snapshot.encode(made, snapshot.rows_of(image)))
        self.store.objects[path] = whole if raw is None else raw
        return path

    async def begin_table(self) -> None:
        """The lost cluster's table: partition 0 has 10 rows, partition 1 none."""
        first = await self.table.create()
        file = DataFile("f", 0, 0, 9, 0, 0, 10, 100)
        await self.table.commit(
            Commit(
                first,
                (NewFile(file, 0, 0, 0, data_change=True),),
                (),
                {0: PartitionCounters(end=10, epoch=4, rows=10)},
            )
        )

    def restore(self, settings: dict[str, Any] | None = None, **wishes: Any) -> RestoreReport:
        self.made += 1
        resolved = resolve({"tier_url": "file:///unused", **(settings or {})}, {}, {})
        return self.do(
            Restore(
                self.store,
                self.tables,
                self.world,
                [str(self.directory / f"n{self.made}")],
                resolved,
                Wishes(**wishes),
                lambda _text: None,
            ).run()
        )

    def seed(self, generation: int = 1) -> MetadataImage:
        raw = self.store.objects[restore_records.seed_path(generation)]
        check(raw)
        image = MetadataImage()
        for rows in snapshot.batches_of(raw):
            for offset, record in rows:
                image.apply(offset, record)
        return image

    def newest(self) -> Snapshot:
        found = self.do(self.tables.table("t", TOPIC_ID).load(range(2)))
        assert found is not None
        return found


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.sim.close()


# -- what a restore makes --------------------------------------------------------------------------


def test_the_restored_cluster_has_topics_and_settings_and_fresh_numbers(rig: Rig) -> None:
    report = rig.restore()
    image = rig.seed()
    assert (image.cluster_id, report.cluster_id) == (report.cluster_id,) * 2
    assert image.cluster_id != "c"
    assert (image.brokers, image.next_producer_id) == ({}, generations.PRODUCER_IDS)
    assert list(image.topic_ids) == ["t", "local", "__transaction_state"]
    assert image.topic_ids["t"] == TOPIC_ID
    assert image.topic_ids["local"] != LOCAL_ID, "it has lost everything: its offsets begin at 0"
    assert image.topic_config("t")["retention_ms"] == 5
    assert image.topic_config("local")["segment_bytes"] == 1_000_000
    for _, _, state in image.partitions():
        assert (state.leader, state.isr, state.elr) == (NONE, (), ())
        assert state.replicas == state.last_known == (1,), "this node is alone"
    epochs = {
        topic.name: {each.leader_epoch for each in topic.partitions.values()}
        for topic in image.topics.values()
    }
    first = {generations.EPOCHS}
    assert epochs == {"t": first, "local": {0}, "__transaction_state": first}
    assert len(image.leaderless) == 4 + transactional_ids.PARTITIONS
    assert image.topic_config("__transaction_state")["cleanup_policy"] == "compact"


def test_the_tables_are_claimed_and_what_may_be_lost_is_marked(rig: Rig) -> None:
    rig.restore()
    found = rig.newest()
    assert [found.partition(each).end for each in (0, 1)] == [FIRST, FIRST]
    assert [found.partition(each).claim for each in (0, 1)] == [generations.EPOCHS] * 2
    missing = [found.rows_missing(each) for each in (0, 1)]
    assert [each.ranges for each in missing if each] == [((10, FIRST),), ((0, FIRST),)]


def test_the_lost_cluster_commits_nothing_any_more_and_says_why(rig: Rig) -> None:
    rig.restore()
    request = wire.CommitToTableRequest()
    request.counters.add(partition=0, start=FIRST, end=FIRST, claim=900)
    claim = Claim("asked", 0, generations.EPOCHS - 1, commit=True, deadline_ms=0)
    (refusal,) = plan(rig.newest(), [claim], {}).refused
    assert "was restored from its tier as another one (generation 1)" in refusal[1].message


def test_the_lost_cluster_adds_no_rows_to_a_partition_that_is_younger_than_the_restore(
    rig: Rig,
) -> None:
    """The partition has no claim of its own; both clusters may have created it."""
    rig.restore()
    newest = rig.newest()
    change = wire.CommitToTableRequest(data_change=True)
    change.counters.add(partition=7, start=0, end=10, claim=3)
    items = [
        Submission("appended", change, 0),
        Claim("asked", 7, generations.EPOCHS - 1, commit=True, deadline_ms=0),
    ]
    refused = plan(newest, items, {7: LogStart(5, leader_epoch=3)}).refused
    assert [item.request for item, _ in refused] == ["appended", "asked"]
    assert all("restored from its tier as another one" in why.message for _, why in refused)


def test_a_partition_that_the_restored_cluster_creates_begins_with_its_block(rig: Rig) -> None:
    rig.restore()
    newest = rig.newest()
    commit = plan(newest, [Claim("", 7, generations.EPOCHS, commit=True, deadline_ms=0)], {}).commit
    assert commit is not None
    made = commit.counters[7]
    assert (made.start, made.end, made.claim) == (FIRST, FIRST, generations.EPOCHS)
    later = newest.after(commit, newest.version + 1)
    again = plan(later, [Claim("", 7, generations.EPOCHS + 1, commit=True, deadline_ms=0)], {})
    assert again.commit is not None
    assert again.commit.counters[7].end == FIRST, "only the first claim moves the end"
    assert not plan(rig.newest(), [], {0: LogStart(20, leader_epoch=4)}).commit


def test_partitions_that_are_younger_than_the_metadata_are_restored(rig: Rig) -> None:
    newest = rig.newest()
    young = DataFile("g", 4, 0, 9, 0, 0, 10, 100)
    counters = {4: PartitionCounters(end=10, epoch=0, rows=10)}
    files = (NewFile(young, 0, 0, 0, data_change=True),)
    rig.do(rig.table.load(range(5)))
    rig.do(rig.table.commit(Commit(newest, files, (), counters)))
    rig.restore()
    assert list(rig.seed().topics[TOPIC_ID].partitions) == [0, 1, 2, 3, 4]
    assert rig.do(rig.table.load(range(5))).partition(4).end == FIRST


def test_replicas_stay_where_their_brokers_exist() -> None:
    assert replicas_of((3, 1), (1, 2, 3), 0) == (3, 1)
    assert replicas_of((7, 8, 9), (1, 2), 1) == (2, 1)
    assert replicas_of((), (1, 2), 3) == (2,)


def test_a_dry_run_changes_nothing(rig: Rig) -> None:
    before, version = dict(rig.store.objects), rig.newest().version
    report = rig.restore(dry_run=True)
    assert [(each.topic, each.rows, each.table_ends) for each in report.topics] == [
        ("t", 10, (10, 0)),
        ("local", 0, ()),
    ]
    assert (rig.store.objects, rig.newest().version) == (before, version)
    assert not list(rig.directory.iterdir())


# -- restores that meet others ---------------------------------------------------------------------


def test_of_two_restores_at_once_one_goes_on(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """tiering/restore_records A1: the other one began between this one's look and its begin."""
    put = restore_records.put_record

    async def second(store: Any, record: Any) -> bool:
        assert await put(store, record)
        return await put(store, record)

    monkeypatch.setattr(restore_records, "put_record", second)
    with pytest.raises(errors.RestoreUnderWay, match="at the same time"):
        rig.restore()
    assert rig.newest().partition(0).claim == NONE
    assert not list(rig.directory.iterdir())


def test_a_restore_that_broke_goes_on_with_join(rig: Rig) -> None:
    """server/tier/restore J2: the reply of the claim is lost, and the store fails at the seed."""

    def fails(operation: str, path: str) -> None:
        if operation == "put_if_absent" and path.endswith("metadata"):
            raise errors.TierUnavailable("no answer")

    def loses(uri: str, commit: Commit) -> None:
        rig.tables.after_commit = lambda uri, commit: None
        raise errors.TierUnavailable("no reply")

    rig.store.fault, rig.tables.after_commit = fails, loses
    with pytest.raises(errors.TierUnavailable):
        rig.restore()
    rig.store.fault = lambda operation, path: None
    claimed = rig.newest()
    with pytest.raises(errors.RestoreUnderWay, match="--join"):
        rig.restore()
    report = rig.restore(join=True)
    assert rig.newest().version == claimed.version
    assert claimed.partition(0).rows == 11, "the gap counts once"
    assert rig.seed().cluster_id == report.cluster_id
    again = rig.restore(join=True)
    assert (again.cluster_id, again.generation) == (report.cluster_id, 1)


def test_no_node_begins_with_the_seed_once_the_restored_cluster_has_started(rig: Rig) -> None:
    report = rig.restore()
    path = cluster_directory.owner_path(report.cluster_id)
    rig.store.objects[path] = cluster_directory.encode_owner(report.cluster_id, "genesis")
    with pytest.raises(errors.RestoreUnderWay, match="has started"):
        rig.restore(join=True, cluster_id="c")


def test_a_later_restore_begins_above_an_earlier_one_and_takes_its_tables(rig: Rig) -> None:
    first = rig.restore()
    second = rig.restore(fence=True)
    assert (first.generation, second.generation) == (1, 2)
    assert rig.newest().partition(0).end == 2 * FIRST
    assert rig.seed(2).next_producer_id == 2 * generations.PRODUCER_IDS
    with pytest.raises(errors.ClusterRestored):
        rig.do(restore_fence.claim(rig.table, 2, 1))


def test_a_generation_in_a_table_counts_without_its_record(rig: Rig) -> None:
    """The objects of `_cluster` may be lost; the tables are what a restore must not double."""
    rig.restore()
    kept = {path: raw for path, raw in rig.store.objects.items() if "_restores" not in path}
    rig.store.objects.clear()
    rig.store.objects.update(kept)
    assert rig.restore().generation == 2


def test_the_living_owner_may_commit_until_its_table_is_claimed(rig: Rig) -> None:
    """Its commit makes the claim's version conflict; the restore looks again."""
    state: dict[str, bool] = {}

    def commits(uri: str, commit: Commit) -> None:
        if not state:
            state["done"] = True
            rows = {0: PartitionCounters(end=12, epoch=4, rows=12)}
            file = NewFile(DataFile("late", 0, 10, 11, 0, 0, 2, 9), 0, 0, 0, data_change=True)
            known = rig.tables.states[uri]
            known.versions.append(
                known.versions[-1].after(Commit(known.versions[-1], (file,), (), rows), 2)
            )

    rig.tables.before_commit = commits
    rig.restore()
    found = rig.newest()
    assert set(found.files) == {"f", "late"}
    missing = found.rows_missing(0)
    assert missing is not None
    assert missing.ranges == ((12, FIRST),)


# -- bad input -------------------------------------------------------------------------------------


def test_a_store_without_copies_is_refused(rig: Rig) -> None:
    with pytest.raises(errors.NothingToRestore, match="cluster 'x'"):
        rig.restore(cluster_id="x")
    rig.store.objects.clear()
    with pytest.raises(errors.NothingToRestore, match="no copy"):
        rig.restore()
    rig.copy("c", rig.image)
    with pytest.raises(errors.NothingToRestore, match="--join"):
        rig.restore(join=True)


def test_of_several_clusters_the_operator_names_one(rig: Rig) -> None:
    rig.copy("d", rig.image)
    with pytest.raises(errors.NothingToRestore, match="c, d"):
        rig.restore()
    assert rig.restore(cluster_id="c").source == "c"


def test_a_damaged_copy_and_one_of_another_format_are_refused_by_name(rig: Rig) -> None:
    made = SnapshotId(rig.image.offset + 1, rig.image.leader_epoch)
    whole = b"".join(snapshot.encode(made, snapshot.rows_of(rig.image)))
    path = rig.copy("c", rig.image, whole[:-9] + b"torn here")
    with pytest.raises(errors.DamagedTierFile, match=path):
        rig.restore()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pk.server.raft.snapshot_framing.FORMAT", 7)
        newer = b"".join(snapshot.encode(made, snapshot.rows_of(rig.image)))
    rig.copy("c", rig.image, newer)
    with pytest.raises(errors.NewerFormat, match=path):
        rig.restore()
    assert rig.newest().partition(0).claim == NONE, "nothing was claimed"


def test_directories_and_ids_that_are_in_use_are_refused(rig: Rig) -> None:
    held = rig.directory / "n1"
    held.mkdir()
    (held / "something").write_text("")
    with pytest.raises(errors.DirectoryFormatted):
        rig.restore()
    for wrong in ({"cluster_id": "c"}, {"cluster_id": "other"}):
        with pytest.raises(errors.InvalidConfig):
            rig.restore(wrong, new_cluster_id="c" if wrong["cluster_id"] == "c" else "d")
    assert list(rig.tables.states[rig.table.uri].versions)[-1].version == 1


def test_a_living_cluster_is_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def alive(*_: Any) -> list[str]:
        return ["127.0.0.1:9292"]

    monkeypatch.setattr(module.Restore, "_alive", alive)
    with pytest.raises(errors.ClusterAlive, match="answers at"):
        rig.restore()
    assert rig.newest().partition(0).claim == NONE
    assert rig.restore(fence=True).alive == ["127.0.0.1:9292"]


# -- blocks of numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "count", "leaves"),
    [(0, 10, False), (9, 1, False), (9, 2, True), (10, 10, False), (19, 2, True), (9, 0, False)],
)
def test_numbers_stay_in_their_block(first: int, count: int, *, leaves: bool) -> None:
    assert generations.leaves_block(first, count, 10) is leaves
