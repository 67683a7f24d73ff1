"""The numbers in pk.json and quorum-state rise before anything of a level is written (rule Q6)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from pk import errors, formats
from pk.log import sealed
from pk.log.directory import FORMAT_FILE
from pk.log.partition_log import PartitionLog
from pk.log.plan import WritePlan
from pk.server.metadata.record_serde import MetadataRecordSerde
from pk.server.metadata.records import decode_batches, record_of
from pk.server.raft.log_writer import LogWriter
from pk.server.raft.messages import FetchReply, FetchStatus, Vote, Voter
from pk.server.raft.recovery import QUORUM_STATE, SnapshotRules, recover
from pk.server.raft.reserve import ReserveDisk
from pk.server.raft.voters import Voters
from pk.sim.disk import SimDisk, SimStorage
from pk.wire import pk_pb2 as wire
from tests.unit.log.house import FakeClock, run

Cluster = Any  # conftest.py's
LOG = "__cluster_metadata-0/00000000000000000000.log"
LEVEL_2 = record_of(wire.FeatureLevelRecord(name=formats.FEATURE, level=2))


def number(storage: SimStorage, name: str) -> int:
    found: int = sealed.decode(storage.read_file(name))["format"]
    return found


async def ask(cluster: Cluster, request: Any) -> Any:
    caller = cluster.caller()
    try:
        return (await caller.call(request, timeout_ms=10_000)).head
    finally:
        await caller.close()


def test_the_numbers_rise_and_an_older_build_does_not_start(
    make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The level is raised to 2; then nodes of a build that knows 1 start on the directories."""
    cluster = make_cluster(3)
    cluster.run = replace(cluster.run, format_level=2)
    meta, data = cluster.storages["meta"], cluster.storages["d1"]
    when_written: list[int] = []
    perform = PartitionLog.perform

    def observed(self: PartitionLog, plan: WritePlan) -> None:
        perform(self, plan)
        raw = meta.peek(LOG)
        if any(record == LEVEL_2 for _, record in decode_batches(raw)):
            when_written.append(number(meta, QUORUM_STATE))

    monkeypatch.setattr(PartitionLog, "perform", observed)
    cluster.start()
    assert (number(meta, QUORUM_STATE), number(data, FORMAT_FILE)) == (1, 1)
    before = data.files()
    described = cluster.do(ask(cluster, wire.DescribeClusterRequest())).describe_cluster_reply
    assert (described.level, described.known) == (1, 2)
    reply = cluster.do(ask(cluster, wire.UpgradeClusterRequest())).upgrade_cluster_reply
    assert (reply.before, reply.level) == (1, 2)
    assert set(when_written) == {2}
    assert number(data, FORMAT_FILE) == 2  # the reply waits for the broker's reaction
    assert {name for name, raw in data.files().items() if raw != before.get(name)} == {FORMAT_FILE}
    for node, storage in (("broker", "d1"), ("controller", "meta")):
        cluster.kill(node, storage, power=True)
    cluster.start()  # of the same build
    assert (number(meta, QUORUM_STATE), number(data, FORMAT_FILE)) == (2, 2)
    cluster.kill("broker", "d1")
    files = data.files()
    cluster.run = replace(cluster.run, format_level=1)
    with pytest.raises(errors.NewerFormat, match="has format 2, this pk knows 1"):
        cluster.start_broker()
    assert data.files() == files


def test_a_broker_that_learns_of_an_unknown_level_stops(
    make_cluster: Callable[..., Cluster],
) -> None:
    """The cluster is at level 2; a broker of an older build starts on an empty directory."""
    cluster = make_cluster(4)
    cluster.run = replace(cluster.run, format_level=2)
    cluster.start()
    cluster.do(ask(cluster, wire.UpgradeClusterRequest()))
    cluster.kill("broker", "d1")
    cluster.replace_storage("d1")
    cluster.run = replace(cluster.run, format_level=1)
    with pytest.raises(errors.NewerFormat, match=r"level 2 of pk\.format, this pk knows 1"):
        cluster.start_broker()
    assert not any(name.startswith("topics/") for name in cluster.storages["d1"].files())


def writer_of(storage: SimStorage, knows: int) -> LogWriter[Any]:
    """Return the writer of a new metadata directory, of a build that knows a level."""
    clock, opened = FakeClock(), recover(storage, SnapshotRules(), 5)
    serde, me = MetadataRecordSerde(knows), Voter(1, "v1")
    any_disk: Any = SimDisk(storage, clock, Random(1))
    voters = Voters(serde, me, "c1:1", {me: "c1:1"})
    return LogWriter(
        ReserveDisk(any_disk, 0), clock, serde, opened.log, voters, Vote(), lambda job: None
    )


@pytest.mark.parametrize("knows", [1, 2])
def test_a_voter_writes_no_record_of_a_level_that_it_does_not_know(knows: int) -> None:
    """The level is compared before the batch is written, and noted before it is written."""

    async def main() -> None:
        storage = SimStorage("meta")
        writer = writer_of(storage, knows)
        raw = MetadataRecordSerde(2).encode_batch([LEVEL_2], 5)
        reply = FetchReply(Voter(2, "v2"), 1, None, FetchStatus.DATA, 1, 0, 1, payload=raw)
        before = storage.files()
        if knows == 1:
            with pytest.raises(errors.NewerFormat, match="this pk knows 1"):
                await writer.append_fetched(reply, 1)
            await writer.close(clean=False)
            assert storage.files() == before
        else:
            await writer.append_fetched(reply, 1)
            assert (writer.log.synced_end, number(storage, QUORUM_STATE)) == (1, 2)
            await writer.save_vote(Vote(5, 2, "v2"))
            assert number(storage, QUORUM_STATE) == 2

    run(main)


def no_space_for(name: str) -> Callable[[str, str], Exception | None]:
    """Return a fault of a disk that has no space for a file."""

    def fault(operation: str, path: str) -> Exception | None:
        full = operation == "append" and path.startswith(name)
        return errors.StorageFull(f"no space for {path}") if full else None

    return fault


def test_a_full_metadata_disk_leaves_the_cluster_at_the_old_level(
    make_cluster: Callable[..., Cluster],
) -> None:
    """The number in quorum-state finds no space: no byte of the level is written, then or later."""
    cluster = make_cluster(5)
    cluster.run = replace(cluster.run, format_level=2)
    cluster.start()
    meta, data = cluster.storages["meta"], cluster.storages["d1"]
    before = data.files()
    meta.fault = no_space_for(QUORUM_STATE)
    with pytest.raises(errors.StorageFull):
        cluster.do(ask(cluster, wire.UpgradeClusterRequest()))
    meta.fault = None
    described = cluster.do(ask(cluster, wire.DescribeClusterRequest())).describe_cluster_reply
    assert (described.level, described.known) == (1, 2)
    raw = meta.peek(LOG)
    assert not any(record == LEVEL_2 for _, record in decode_batches(raw))
    cluster.do(cluster.create("t"))  # another record, and what is noted with it
    cluster.do(cluster.controller.metadata.note_synced())
    assert (number(meta, QUORUM_STATE), number(data, FORMAT_FILE)) == (1, 1)
    assert data.files()[FORMAT_FILE] == before[FORMAT_FILE]
    reply = cluster.do(ask(cluster, wire.UpgradeClusterRequest())).upgrade_cluster_reply
    assert (reply.before, reply.level) == (1, 2)
    assert (number(meta, QUORUM_STATE), number(data, FORMAT_FILE)) == (2, 2)


def test_a_broker_with_a_full_disk_does_not_act_on_a_level(
    make_cluster: Callable[..., Cluster],
) -> None:
    """pk.json finds no space: the operator gets RequestTimedOut, and the broker writes nothing
    until there is space."""
    cluster = make_cluster(6)
    cluster.run = replace(cluster.run, format_level=2)
    cluster.start()
    data = cluster.storages["d1"]
    before = data.files()
    data.fault = no_space_for(FORMAT_FILE)
    with pytest.raises(errors.RequestTimedOut):
        cluster.do(ask(cluster, wire.UpgradeClusterRequest()))
    with pytest.raises(errors.RequestTimedOut):
        cluster.do(cluster.create("t"))
    assert data.files()[FORMAT_FILE] == before[FORMAT_FILE]
    assert not any(name.startswith("topics/") for name in data.files())
    data.fault = None
    reply = cluster.do(ask(cluster, wire.UpgradeClusterRequest())).upgrade_cluster_reply
    assert (reply.before, reply.level) == (2, 2)
    assert number(data, FORMAT_FILE) == 2
    assert any(name.startswith("topics/t-0/") for name in data.files())


def test_a_level_that_finds_no_space_is_not_noted_later() -> None:
    """raft/log_writer W8: a snapshot of level 2 is refused, and the vote is saved at level 1."""

    async def main() -> None:
        storage = SimStorage("meta")
        writer = writer_of(storage, knows=2)
        storage.fault = no_space_for(QUORUM_STATE)
        with pytest.raises(errors.StorageFull):
            await writer.raise_level(2)
        storage.fault = None
        await writer.save_vote(Vote(5, 2, "v2"))
        assert number(storage, QUORUM_STATE) == 1
        await writer.raise_level(2)
        await writer.save_vote(Vote(6, 2, "v2"))
        assert number(storage, QUORUM_STATE) == 2  # a noted level stays

    run(main)


def test_an_unknown_feature_is_refused() -> None:
    serde = MetadataRecordSerde(9)
    assert serde.level_in(LEVEL_2) == 2
    with pytest.raises(errors.NewerFormat, match="level 1 of other"):
        serde.level_in(record_of(wire.FeatureLevelRecord(name="other", level=1)))
