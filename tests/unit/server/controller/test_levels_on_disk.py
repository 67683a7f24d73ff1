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
        raw = meta.peek("__cluster_metadata-0/00000000000000000000.log")
        if any(record == LEVEL_2 for _, record in decode_batches(raw)):
            when_written.append(number(meta, QUORUM_STATE))

    monkeypatch.setattr(PartitionLog, "perform", observed)
    cluster.start()
    assert (number(meta, QUORUM_STATE), number(data, FORMAT_FILE)) == (0, 0)
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
    with pytest.raises(errors.NewerFormat, match="has format 2, this pk knows 0"):
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


@pytest.mark.parametrize("knows", [1, 2])
def test_a_voter_writes_no_record_of_a_level_that_it_does_not_know(knows: int) -> None:
    """The level is compared before the batch is written, and noted before it is written."""

    async def main() -> None:
        storage, clock = SimStorage("meta"), FakeClock()
        opened = recover(storage, SnapshotRules(), 5)
        serde, me = MetadataRecordSerde(knows), Voter(1, "v1")
        any_disk: Any = SimDisk(storage, clock, Random(1))
        voters = Voters(serde, me, "c1:1", {me: "c1:1"})
        writer = LogWriter(
            ReserveDisk(any_disk, 0), clock, serde, opened.log, voters, Vote(), lambda job: None
        )
        raw = serde.encode_batch([LEVEL_2], 5)
        reply = FetchReply(Voter(2, "v2"), 1, None, FetchStatus.DATA, 1, 0, 1, payload=raw)
        before = storage.files()
        if knows == 1:
            with pytest.raises(errors.NewerFormat, match="this pk knows 1"):
                await writer.append_fetched(reply, 1)
            await writer.close(clean=False)
            assert storage.files() == before
        else:
            await writer.append_fetched(reply, 1)
            assert (opened.log.synced_end, number(storage, QUORUM_STATE)) == (1, 2)
            await writer.save_vote(Vote(5, 2, "v2"))
            assert number(storage, QUORUM_STATE) == 2

    run(main)


def test_an_unknown_feature_is_refused() -> None:
    serde = MetadataRecordSerde(9)
    assert serde.level_in(LEVEL_2) == 2
    with pytest.raises(errors.NewerFormat, match="level 1 of other"):
        serde.level_in(record_of(wire.FeatureLevelRecord(name="other", level=1)))
