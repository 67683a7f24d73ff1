"""Many partitions in one chunk of the metadata log: they are created together, and each is led
independently (broker/metadata_publisher M3, M4; rule L8).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pk import errors
from pk.log import identity
from pk.log.creation import VISIT_MAX, LogOrError, NewPartition
from pk.log.identity import Identity
from pk.log.manager import LogManager
from pk.server.broker.metadata_publisher import MetadataPublisher
from pk.server.metadata.image import MetadataImage, PartitionState
from pk.server.replica.creation import may_take_part
from pk.server.replica.state import ReplicaEvent
from pk.types import NONE, PartitionKey, TopicPartition
from pk.wire import pk_pb2 as wire

Cluster = Any  # conftest.py's
COUNT = 2 * VISIT_MAX + 10


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return the partitions of each call that creates logs."""
    found: list[list[int]] = []
    create_all = LogManager.create_all

    async def noted(self: LogManager, wanted: Sequence[NewPartition]) -> list[LogOrError]:
        found.append([new.tp.partition for new in wanted])
        return await create_all(self, wanted)

    monkeypatch.setattr(LogManager, "create_all", noted)
    return found


def full(*partitions: int) -> Any:
    """Leave no space for these partitions."""
    names = tuple(f"topics/flights-{n}/" for n in partitions)

    def fault(operation: str, path: str) -> Exception | None:
        hit = operation == "append" and path.startswith(names)
        return errors.StorageFull("no space") if hit else None

    return fault


def test_a_big_topic_takes_few_visits(cluster: Cluster, kit: Any, visits: list[list[int]]) -> None:
    cluster.start()
    topic_id = cluster.do(cluster.create("flights", COUNT))
    assert [len(each) for each in visits] == [VISIT_MAX, VISIT_MAX, 10]
    assert [number for each in visits for number in each] == list(range(COUNT))
    partitions = cluster.broker.core.partitions
    assert all(partitions[PartitionKey(topic_id, n)].leader is not None for n in range(COUNT))
    assert cluster.do(cluster.produce(kit, topic_id, 1)) == [0]
    cluster.kill("broker", "d1")
    cluster.start_broker()
    assert len(visits) == 3  # everything was there
    assert cluster.do(cluster.produce(kit, topic_id, 1)) == [3]


def test_what_is_full_waits_and_the_others_go_on(
    cluster: Cluster, kit: Any, visits: list[list[int]]
) -> None:
    """broker/metadata_publisher M4: the waiting partitions are tried again together."""
    cluster.start()
    cluster.storages["d1"].fault = full(0, 70, 71)
    topic_id = cluster.do(cluster.create("flights", COUNT))
    core = cluster.broker.core
    mine = [PartitionKey(topic_id, n) for n in range(COUNT)]
    assert [key.partition for key in mine if key not in core.partitions] == [0, 70, 71]
    assert all(core.partitions[key].leader is not None for key in mine if key in core.partitions)
    with pytest.raises(errors.StorageFull):
        cluster.do(cluster.produce(kit, topic_id, 1))
    cluster.storages["d1"].fault = full(70)
    del visits[:]
    cluster.world.loop.run_for_ms(6_000)
    assert visits == [[0, 70, 71]]
    assert [key.partition for key in mine if key not in core.partitions] == [70]
    assert cluster.do(cluster.produce(kit, topic_id, 1)) == [0]
    cluster.storages["d1"].fault = None
    cluster.world.loop.run_for_ms(6_000)
    assert visits == [[0, 70, 71], [70]]
    assert core.partitions[mine[70]].leader is not None
    assert core.replicas.unopened() == {}


def test_a_topic_that_goes_while_it_is_tried_again_leaves_nothing(cluster: Cluster) -> None:
    """broker/metadata_publisher M3: a log that was created for a deleted topic does not remain as a
    stray.
    """
    cluster.start()
    storage = cluster.storages["d1"]
    storage.fault = full(0, 1)
    cluster.do(cluster.create("flights", 3))
    core = cluster.broker.core
    create_all = core.manager.create_all
    tried: list[list[LogOrError]] = []

    async def late(wanted: Sequence[NewPartition]) -> list[LogOrError]:
        made = await create_all(wanted)
        tried.append(made)
        await core.env.clock.sleep_ms(3_000)  # meanwhile the metadata log continues
        return made

    core.manager.create_all = late
    storage.fault = full(1)
    cluster.world.run_until(lambda: tried)

    async def remove() -> None:
        caller = cluster.caller()
        await caller.call(wire.DeleteTopicsRequest(names=["flights"]), timeout_ms=2_000)
        await caller.close()

    cluster.do(remove())
    assert len(core.manager.logs()) == 1  # not adopted by a partition yet
    cluster.world.loop.run_for_ms(4_000)
    assert [type(outcome).__name__ for outcome in tried[0]] == ["PartitionLog", "StorageFull"]
    assert core.manager.logs() == core.partitions == core.replicas.unopened() == {}
    left = [name for name in storage.list("topics") if not name.endswith("-delete")]
    assert left == ["flights-1"]  # unfinished: the next start removes it
    cluster.kill("broker", "d1")
    cluster.start_broker()
    assert storage.list("topics") == []
    assert not cluster.world.loop.failures


def test_settings_that_change_while_it_is_created_are_those_it_has(cluster: Cluster) -> None:
    cluster.start()
    storage = cluster.storages["d1"]
    storage.fault = full(0)
    topic_id = cluster.do(cluster.create("flights"))
    core = cluster.broker.core
    create_all = core.manager.create_all
    tried: list[int] = []

    async def late(wanted: Sequence[NewPartition]) -> list[LogOrError]:
        made = await create_all(wanted)
        tried.append(len(made))
        await core.env.clock.sleep_ms(3_000)
        return made

    core.manager.create_all = late
    storage.fault = None
    cluster.world.run_until(lambda: tried)

    async def alter() -> None:
        caller = cluster.caller()
        change = wire.AlterConfigsRequest()
        resource = wire.ConfigResource(type="topic", name="flights")
        change.changes.add(resource=resource).set["max_message_bytes"] = "1024"
        await caller.call(change, timeout_ms=2_000)
        await caller.close()

    cluster.do(alter())
    cluster.world.loop.run_for_ms(4_000)
    partition = core.partitions[PartitionKey(topic_id, 0)]
    assert partition.leader is not None
    assert partition.settings["max_message_bytes"] == 1024
    assert partition.log.config.max_message_bytes == 1024


def test_a_topic_created_again_in_one_chunk_is_the_new_one(cluster: Cluster, kit: Any) -> None:
    """Rule L8: the old topic's directories are removed first, whichever records arrive together."""
    cluster.start()
    old = cluster.do(cluster.create("flights", 3))
    cluster.do(cluster.produce(kit, old, 2))
    core = cluster.broker.core
    follower = core.publisher
    poll = follower._poll

    async def hold(wait_ms: int) -> Any:  # the next chunk has all records up to then
        await cluster.broker.core.env.clock.sleep_ms(2_000)
        return await poll(wait_ms)

    follower._poll = hold
    other = cluster.do(cluster.create("other"))  # the poll under way is over

    async def again() -> None:
        caller = cluster.caller()
        for request in (wire.DeleteTopicsRequest(names=["flights"]), wire.CreateTopicsRequest()):
            if isinstance(request, wire.CreateTopicsRequest):
                request.topics.add(name="flights", partitions=5, replication_factor=1)
            with pytest.raises(errors.PkError):
                await caller.call(request, timeout_ms=200)
        await caller.close()

    cluster.do(again())
    cluster.world.loop.run_for_ms(6_000)
    core = cluster.broker.core
    assert {key.topic_id for key in core.partitions} == set(core.metadata.image.topics)
    assert old not in core.metadata.image.topics
    assert other in core.metadata.image.topics
    assert len(core.partitions) == 5 + 1
    assert all(each.log.log_end == 0 and each.leader for each in core.partitions.values())


def test_two_who_miss_one_partition_create_it_once(
    cluster: Cluster, visits: list[list[int]]
) -> None:
    """The partition was moved away and back during the retry: there is one log for one
    directory.
    """
    cluster.start()
    cluster.storages["d1"].fault = full(0)
    topic_id = cluster.do(cluster.create("flights"))
    cluster.storages["d1"].fault = None
    core, key = cluster.broker.core, PartitionKey(topic_id, 0)
    del visits[:]

    async def both() -> None:
        again = core.creator.create_missing([key], again=True)
        core.replicas.forget(key)
        await asyncio.gather(again, core.creator.create_missing([key]))

    task = cluster.world.spawn("broker", both())
    cluster.world.run_until(task.done)
    task.result()
    assert visits == [[0]]
    assert key in core.partitions


def test_what_is_offline_is_not_created_by_the_next_record(
    cluster: Cluster, visits: list[list[int]]
) -> None:
    """broker/metadata_publisher M4, M6: a cause that does not pass by itself stays the reported
    cause.
    """
    cluster.start()
    topic_id = cluster.do(cluster.create("flights", 2))
    core, key = cluster.broker.core, PartitionKey(topic_id, 1)
    problem = errors.CorruptLog("flights-1 is damaged")
    del visits[:]

    async def touched() -> None:
        core.partitions.pop(key).fail(errors.UnknownTopicId("removed"), ReplicaEvent.REMOVED)
        core.replicas.on(key, ReplicaEvent.OPEN_FAILED, problem)
        await core.creator.create_missing([key])
        await core.replica_manager.settle(key)

    task = cluster.world.spawn("broker", touched())
    cluster.world.run_until(task.done)
    task.result()
    assert (visits, core.replicas.unopened()) == ([], {key: problem})


async def _knows_nothing(_: MetadataPublisher) -> None:
    """Return the extreme case of an image of a deposed controller: an empty one."""


def test_what_an_old_image_does_not_know_is_kept(
    cluster: Cluster, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule Q2: otherwise the broker would come back clean, and in the ISR, without its records."""
    cluster.start()
    cluster.do(cluster.create("trains", 2))
    kept = cluster.do(cluster.create("flights", 2))
    assert cluster.do(cluster.produce(kit, kept, 1)) == [0]
    cluster.kill("broker", "d1")
    monkeypatch.setattr(MetadataPublisher, "catch_up", _knows_nothing)
    cluster.start_broker()
    assert cluster.do(cluster.produce(kit, kept, 1)) == [3]
    cluster.world.loop.run_for_ms(61_000)
    names = [f"{topic}-{n}" for topic in ("flights", "trains") for n in (0, 1)]
    assert cluster.storages["d1"].list("topics") == names


@pytest.mark.parametrize(
    ("cluster_id", "genesis", "ahead", "goes"),
    [
        (None, None, 0, True),
        ("another", None, 0, False),
        (None, "another", 0, False),
        (None, None, 1_000, False),
        ("", "", NONE, False),
    ],
    ids=["deleted", "another cluster", "other metadata", "newer metadata", "adopted by hand"],
)
def test_a_directory_that_nobody_knows_goes_if_the_metadata_can_know_it(
    cluster: Cluster, cluster_id: str | None, genesis: str | None, ahead: int, goes: bool
) -> None:
    """broker/metadata_publisher M3, rules Q2, L15: either the topic was deleted, or other metadata
    may know it.
    """
    cluster.start()
    cluster.do(cluster.create("flights"))
    image = cluster.broker.core.metadata.image
    found = Identity(
        "nobody's",
        TopicPartition("ghosts", 0),
        image.cluster_id if cluster_id is None else cluster_id,
        image.genesis if genesis is None else genesis,
        NONE if ahead == NONE else image.offset + ahead,
    )
    assert image.genesis
    cluster.kill("broker", "d1")
    storage = cluster.storages["d1"]
    storage.make_dir("topics/ghosts-0")
    identity.begin(storage, "topics/ghosts-0", found).close()
    identity.name(storage, "topics/ghosts-0")
    cluster.start_broker()
    cluster.world.loop.run_for_ms(1_000)
    assert ("ghosts-0" in storage.list("topics")) != goes
    cluster.world.loop.run_for_ms(61_000)
    assert storage.list("topics") == ["flights-0", *["ghosts-0"] * (not goes)]


def test_an_old_image_makes_nothing_anew_that_lies_in_a_failed_directory(
    make_cluster: Callable[..., Cluster], kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """broker/metadata_publisher M6: a partition that becomes known late and is in no working
    directory is in the failed one; the others continue.
    """
    cluster = make_cluster(5, disks=2)
    cluster.start()
    one, two = (cluster.do(cluster.create(name)) for name in ("one", "two"))
    roots = {
        key.topic_id: partition.writer.disk.storage.root
        for key, partition in cluster.broker.core.partitions.items()
    }
    assert roots[one] != roots[two]
    assert [cluster.do(cluster.produce(kit, topic, 1)) for topic in (one, two)] == [[0], [0]]
    cluster.kill("broker", roots[one])
    cluster.storages[roots[two]].crash()
    dead = OSError("I/O error")
    cluster.storages[roots[one]].fault = lambda operation, path: dead
    monkeypatch.setattr(MetadataPublisher, "catch_up", _knows_nothing)
    cluster.start_broker()
    assert cluster.do(cluster.produce(kit, two, 1)) == [3]
    with pytest.raises(errors.StorageFailed, match=roots[one]):
        cluster.do(cluster.produce(kit, one, 1))


def test_an_earlier_life_in_an_old_image_does_not_push_the_present_one_away(
    cluster: Cluster, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules Q2, L8: the topic was created again, and the image does not have that yet."""
    cluster.start()
    cluster.do(cluster.create("flights"))
    reached = cluster.broker.core.publisher.next_offset

    async def remove() -> None:
        caller = cluster.caller()
        await caller.call(wire.DeleteTopicsRequest(names=["flights"]), timeout_ms=2_000)
        await caller.close()

    cluster.do(remove())
    topic_id = cluster.do(cluster.create("flights"))
    assert cluster.do(cluster.produce(kit, topic_id, 1)) == [0]
    cluster.kill("broker", "d1")
    apply = MetadataImage.apply

    def first_life(self: MetadataImage, offset: int, record: wire.MetadataRecord) -> None:
        if offset < reached:
            apply(self, offset, record)

    async def upto(self: MetadataPublisher) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(MetadataImage, "apply", first_life)
            await self._poll(0)
        self.next_offset = reached

    monkeypatch.setattr(MetadataPublisher, "catch_up", upto)
    cluster.start_broker()
    assert cluster.do(cluster.produce(kit, topic_id, 1)) == [3]


def test_a_directory_fails_while_the_other_still_creates(
    make_cluster: Callable[..., Cluster],
) -> None:
    """broker/failures B3, L2: logs created in a directory are adopted when both directories are
    done.  If that directory failed meanwhile, the replicas are reported offline to the controller
    and none of them leads.
    """
    cluster = make_cluster(5, disks=2)
    cluster.start()
    cluster.do(cluster.create("a", partitions=2))
    core = cluster.broker.core
    create_all = core.manager.create_all

    async def slow(wanted: Any) -> Any:
        made = await create_all(wanted)
        cluster.storages["d1"].failed = errors.StorageFailed("gone")
        await core.env.clock.sleep_ms(1_000)
        return made

    core.manager.create_all = slow
    with contextlib.suppress(errors.RequestTimedOut):
        cluster.do(cluster.create("b", partitions=2))
    cluster.world.loop.run_for_ms(5_000)
    on_failed = [p for p in core.partitions.values() if p.writer.disk.storage.root == "d1"]
    assert sorted(each.topic for each in on_failed) == ["a", "b"]
    assert all(isinstance(each.hosted.cause, errors.StorageFailed) for each in on_failed)
    assert len(core.report.offline_replicas()) == 2


def test_a_chunk_that_cannot_be_carried_out_is_not_passed_over(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """broker/metadata_publisher M1: the image has the records, so no later fetch returns them
    again.  The error is retriable or not; the controller cannot help.
    """
    cluster.start()
    core = cluster.broker.core
    fatal: list[errors.PkError] = []

    async def settle(key: PartitionKey) -> None:
        raise errors.StorageFull("of something in between")

    monkeypatch.setattr(core.replica_manager, "settle", settle)
    monkeypatch.setattr(core.lifecycle, "fatal", fatal.append)
    monkeypatch.setattr(core.env, "bug", lambda where, bug: None)
    with contextlib.suppress(errors.RequestTimedOut):
        cluster.do(cluster.create("flights"))
    assert [type(each) for each in fatal] == [errors.StorageFull]


def test_an_office_is_not_taken_that_ended_while_its_log_settled(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tasks react to one partition when a failed creation is tried again; the image changes
    while the slower one waits.
    """
    cluster.start()
    topic_id = cluster.do(cluster.create("flights"))
    core, key = cluster.broker.core, PartitionKey(topic_id, 0)
    partition = core.partitions[key]
    led = core.metadata.image.partition(key)
    over = led._replace(leader=-1, leader_epoch=led.leader_epoch + 1)
    partition.step_down(-1)

    async def meanwhile(_partition: Any) -> None:
        core.metadata.image.topics[topic_id].partitions[0] = over
        await core.roles.lead_or_follow(partition, over)

    monkeypatch.setattr(core.fetchers, "wait_until_idle", meanwhile)
    task = cluster.world.spawn("broker", core.roles.lead_or_follow(partition, led))
    cluster.world.run_until(task.done)
    task.result()
    assert partition.leader is None


def test_an_office_is_taken_though_a_snapshot_replaced_the_image_meanwhile(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other code reacts to a partition that the snapshot does not change."""
    cluster.start()
    topic_id = cluster.do(cluster.create("flights"))
    core, key = cluster.broker.core, PartitionKey(topic_id, 0)
    partition = core.partitions[key]
    led = core.metadata.image.partition(key)
    partition.step_down(-1)

    async def meanwhile(_partition: Any) -> None:
        core.metadata.image.topics[topic_id].partitions[0] = led._replace()

    monkeypatch.setattr(core.fetchers, "wait_until_idle", meanwhile)
    task = cluster.world.spawn("broker", core.roles.lead_or_follow(partition, led))
    cluster.world.run_until(task.done)
    task.result()
    assert partition.leader is not None


def test_what_is_not_open_for_want_of_space_is_not_elected_until_it_is(
    cluster: Cluster, kit: Any
) -> None:
    """R3: its broker is registered and could never report the replica's position; other replicas
    may lead.
    """
    cluster.start()
    topic_id = cluster.do(cluster.create("flights"))
    cluster.do(cluster.produce(kit, topic_id, 1))
    key = PartitionKey(topic_id, 0)
    cluster.kill("broker", "d1")
    cluster.storages["d1"].fault = lambda operation, path: (
        errors.StorageFull("no space") if operation != "read" and "flights-0/" in path else None
    )
    cluster.start_broker()
    cluster.world.loop.run_for_ms(1_000)
    core = cluster.broker.core
    assert isinstance(core.replicas.unopened()[key], errors.StorageFull)
    assert core.report.offline_replicas() == [wire.FetchPartition(topic_id=topic_id, partition=0)]
    state = core.metadata.image.partition(key)
    assert (state.leader, state.isr, state.last_known) == (NONE, (), (1,))
    cluster.storages["d1"].fault = None
    cluster.world.loop.run_for_ms(10_000)
    assert core.report.offline_replicas() == []
    assert core.metadata.image.partition(key).leader == 1
    assert cluster.do(cluster.produce(kit, topic_id, 1)) == [3]


def test_what_waits_for_space_is_offline_once_its_directory_has_failed(
    make_cluster: Callable[..., Cluster],
) -> None:
    """replica/creation N3: its log may have been in that directory, and in the ISR; in another one
    it would be empty.
    """
    cluster = make_cluster(5, disks=2)
    cluster.start()
    cluster.storages["d1"].fault = full(0)
    topic_id = cluster.do(cluster.create("flights"))
    core, key = cluster.broker.core, PartitionKey(topic_id, 0)
    assert isinstance(core.replicas.unopened()[key], errors.StorageFull)
    cluster.storages["d1"].failed = errors.StorageFailed("gone")
    cluster.world.loop.run_for_ms(6_000)
    assert key not in core.partitions
    assert isinstance(core.replicas.unopened()[key], errors.StorageFailed)
    assert len(core.report.offline_replicas()) == 1


@pytest.mark.parametrize(
    ("isr", "elr", "leader", "replicas", "adopted", "discarded"),
    [
        ((1, 2), (), 2, (1, 2, 3), False, False),
        ((2,), (1,), 2, (1, 2, 3), False, False),
        ((2,), (), 2, (1, 2, 3), True, True),
        ((), (2,), NONE, (1, 2, 3), True, False),
        ((), (), NONE, (1, 2, 3), True, False),
        ((), (), NONE, (1,), True, True),
    ],
    ids=["in sync", "eligible", "another leads", "one is away", "the last known", "alone"],
)
def test_when_a_replica_changed_by_hand_takes_part_again(
    isr: tuple[int, ...], elr: tuple[int, ...], leader: int, replicas: tuple[int, ...],
    adopted: bool, discarded: bool,
) -> None:  # fmt: skip
    """Rule L15: no empty log is elected if other replicas have records."""
    state = PartitionState(replicas, isr, leader, 5, 5, elr)
    assert may_take_part(state, 1, has_log=True) == adopted
    assert may_take_part(state, 1, has_log=False) == discarded
