"""Committed offsets in the tier on real processes, and their way back (rule T13)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from real_cluster import close, until

from pk import AdminClient, Consumer, Producer, TopicPartition, errors, settings
from pk.cli.embedded import CLUSTER_ID, EmbeddedCluster, EmbeddedServer
from pk.client.admin import NewTopic
from pk.clock import SystemClock
from pk.group_ids import partition_of_group
from pk.tiering import offset_files, stored_offsets
from pk.tiering.fsspec_store import open_store
from pk.tiering.offset_files import OffsetsCopy, StoredGroup
from pk.tiering.store_settings import StoreSettings
from pk.types import PartitionKey

pytestmark = pytest.mark.integration

INTERVAL_MS = 500
GROUP = "g"
PLACES = [TopicPartition("t", number) for number in range(3)]


def read(tier: Path, cluster_id: str) -> dict[int, OffsetsCopy]:
    """What a restore reads from the store."""

    async def read_all() -> dict[int, OffsetsCopy]:
        chosen = StoreSettings.of(settings.SERVER.resolve({"tier_url": tier.as_uri()}))
        store = open_store(chosen, SystemClock())
        try:
            return await stored_offsets.read_offsets(store, cluster_id)
        finally:
            await store.close()

    return asyncio.run(read_all())


def group_in(found: dict[int, OffsetsCopy]) -> StoredGroup:
    copy = found.get(partition_of_group(GROUP))
    return StoredGroup(GROUP) if copy is None else copy.groups.get(GROUP, StoredGroup(GROUP))


def offsets_of(group: StoredGroup) -> dict[TopicPartition, int]:
    return {
        TopicPartition(group.topics[key.topic_id], key.partition): stored.offset
        for key, stored in group.offsets.items()
    }


def commits(address: str, offset: int) -> dict[TopicPartition, int]:
    """Commit as a consumer with assigned partitions; return the offsets."""
    wanted = dict.fromkeys(PLACES, offset)
    with Consumer(address, group_id=GROUP, enable_auto_commit=False) as consumer:
        consumer.assign(PLACES)
        consumer.commit(wanted)
    return wanted


def copied(tier: Path, cluster_id: str, wanted: dict[TopicPartition, int]) -> Callable[[], bool]:
    """Whether the copies have these offsets; a node may replace a copy while it is read."""

    def holds() -> bool:
        try:
            found = read(tier, cluster_id)
        except errors.DamagedTierFile as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return False
            raise
        return offsets_of(group_in(found)) == wanted

    return holds


def test_offsets_reach_the_tier_and_are_read_back_after_a_kill(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    tier.mkdir()
    made = {"tier_offsets_interval_ms": INTERVAL_MS, "cluster_id": "c"}
    with EmbeddedServer(tmp_path / "pk", tier_url=tier.as_uri(), settings=made) as server:
        with AdminClient(server.address) as admin:
            admin.create_topic("t", partitions=3)
            topic_id = admin.describe_topics(["t"])[0].topic_id
        began_ms = time.time() * 1000
        wanted = commits(server.address, 5)
        until(copied(tier, "c", wanted), "the offsets are in the tier")
        copy = read(tier, "c")[partition_of_group(GROUP)]
        group = copy.groups[GROUP]
        assert (group.kind, group.topics) == ("consumer", {topic_id: "t"})
        stored = group.offsets[PartitionKey(topic_id, 0)]
        assert began_ms - 1_000 <= stored.committed_ms <= copy.written_ms + 1_000

        with Producer(server.address, transactional_id="id") as producer:
            producer.init_transactions()
            producer.begin_transaction()
            with Consumer(server.address, group_id=GROUP, enable_auto_commit=False) as consumer:
                consumer.assign(PLACES)
                producer.send_offsets_to_transaction({PLACES[0]: 9}, consumer.group_metadata())
            time.sleep(3 * INTERVAL_MS / 1000)
            assert offsets_of(group_in(read(tier, "c"))) == wanted, "the transaction is open"
            producer.commit_transaction()
        wanted[PLACES[0]] = 9
        until(copied(tier, "c", wanted), "the transaction is committed")

        before_epoch = read(tier, "c")[copy.partition].name.leader_epoch
        server.kill()
        server.start()
        assert copied(tier, "c", wanted)(), "a kill loses no copy"
        until(copied(tier, "c", commits(server.address, 12)), "the next coordinator goes on")
        newest = read(tier, "c")[copy.partition]
        assert newest.name.leader_epoch > before_epoch
        folder = tier / offset_files.directory("c") / f"{copy.partition:05d}"
        until(lambda: len(list(folder.glob("*.offsets"))) <= 2, "old copies are removed")
        assert "offset_copies_failing" not in (server.directory / "server.log").read_text()

    newest = read(tier, "c")[copy.partition]  # the node may have written another copy since
    path = tier / newest.path
    raw = path.read_bytes()
    path.write_bytes(raw[:-20] + b"x" + raw[-19:])
    with pytest.raises(errors.DamagedTierFile, match=newest.path):
        read(tier, "c")


@pytest.mark.long
def test_another_coordinator_continues_the_copies(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    tier.mkdir()
    made = {"tier_offsets_interval_ms": INTERVAL_MS, "tier_url": tier.as_uri()}
    with EmbeddedCluster(tmp_path / "pk", nodes=3, settings=made) as cluster:
        with AdminClient(cluster.address) as admin:
            (topic,) = admin.create_topics([NewTopic("t", 3, {}, 3)])
            assert topic.error is None
            until(copied(tier, CLUSTER_ID, commits(cluster.address, 5)))
            first = admin.describe_group(GROUP).coordinator_id
            before = read(tier, CLUSTER_ID)[partition_of_group(GROUP)].name
            cluster.kill(first)
            wanted = commits(cluster.address, 6)
            assert admin.describe_group(GROUP).coordinator_id != first
        until(copied(tier, CLUSTER_ID, wanted), "its successor copies")
        name = read(tier, CLUSTER_ID)[partition_of_group(GROUP)].name
        assert name.leader_epoch > before.leader_epoch
        cluster.start_nodes([first])
        assert copied(tier, CLUSTER_ID, wanted)(), "the returned broker takes nothing back"
        close(cluster)
