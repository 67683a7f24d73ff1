"""Which fetch stream serves a replica, and when it moves to another one (rule R12)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pk.server.metadata.image import PartitionState
from pk.server.replica.fetch_limits import FetcherId, FetchKind
from pk.server.replica.fetcher_manager import ReplicaFetcherManager
from pk.types import PartitionKey

ME = 1
HOT, LATE = FetchKind.HOT, FetchKind.CATCH_UP


class FakeFetcher:
    """Notes what the manager does to a stream."""

    def __init__(self, of: FetcherId) -> None:
        self.of = of
        self.leader = of.leader
        self.is_connected = False
        self.expected = 0
        self.replicas: list[Any] = []
        self.caught_up: list[Any] = []

    def expect(self) -> None:
        self.expected += 1

    def add(self, replica: Any) -> None:
        self.replicas.append(replica)

    def remove(self, replica: Any) -> None:
        self.replicas.remove(replica)

    def copied(self, replica: Any) -> None:
        self.caught_up.append(replica)


class FakePartition:
    """A partition whose log lies in the directory `directory_id`."""

    def __init__(self, number: int = 0, directory_id: str = "d1") -> None:
        self.key = PartitionKey("t", number)
        self.directory_id = directory_id
        self.replica: Any = None

    def follow(self, replica: Any) -> None:
        assert self.replica is None
        self.replica = replica

    def detach(self) -> Any:
        replica, self.replica = self.replica, None
        return replica


class Rig:
    """A manager with fake streams, and the partitions that it was given."""

    def __init__(self) -> None:
        self.partitions: dict[PartitionKey, FakePartition] = {}
        logs: Any = SimpleNamespace(directory_of=self.partitions.__getitem__)
        env: Any = SimpleNamespace(node_id=ME, bug=print)
        given: Any = None
        self.manager = ReplicaFetcherManager(env, given, logs, given, given, given, given)
        opened: Any = FakeFetcher
        self.manager._open = opened

    def partition(self, number: int = 0, directory_id: str = "d1") -> Any:
        made = FakePartition(number, directory_id)
        self.partitions[made.key] = made
        return made

    def stream(self, kind: FetchKind, leader: int = 2, directory_id: str = "d1") -> Any:
        return self.manager._fetchers[FetcherId(leader, directory_id, kind)]

    def served_by(self, partition: Any) -> FetcherId:
        """Return the one stream that serves `partition`."""
        on = [
            each.of
            for each in self.manager._fetchers.values()
            if any(replica.partition is partition for replica in each.replicas)
        ]
        assert on == [partition.replica.fetcher.of]
        return on[0]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def state(
    *isr: int,
    leader: int = 2,
    epoch: int = 5,
    adding: tuple[int, ...] = (),
    unclean_epoch: int = -1,
) -> PartitionState:
    return PartitionState(
        replicas=(ME, 2, 3),
        isr=isr,
        leader=leader,
        leader_epoch=epoch,
        partition_epoch=1,
        elr=(),
        last_known=(),
        adding=adding,
        removing=(),
        directories=(),
        unclean=False,
        unclean_epoch=unclean_epoch,
    )


def test_each_leader_directory_and_kind_has_a_stream(rig: Rig) -> None:
    many = [rig.partition(number) for number in range(4)]
    many.append(rig.partition(4, "d2"))
    states = [state(1, 2), state(2, 3), state(1, 2), state(1, 3, leader=3), state(1, 2)]
    for partition, its in zip(many, states, strict=True):
        rig.manager.follow(partition, its)
    assert [rig.served_by(each) for each in many] == [
        (2, "d1", HOT),
        (2, "d1", LATE),
        (2, "d1", HOT),
        (3, "d1", HOT),
        (2, "d2", HOT),
    ]


@pytest.mark.parametrize(("before", "after"), [((2,), (1, 2)), ((1, 2), (2,))])
def test_a_replica_moves_when_the_metadata_change_its_kind(
    rig: Rig, before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    """It gets a new fetch state: answers and tasks of the old one have no effect."""
    partition = rig.partition()
    kinds = [HOT if ME in isr else LATE for isr in (before, after)]
    rig.manager.follow(partition, state(*before))
    old = partition.replica
    rig.manager.follow(partition, state(*before, unclean_epoch=4))
    assert partition.replica is old
    assert old.unclean_epoch == 4
    rig.manager.follow(rig.partition(1), state(*after))
    rig.stream(kinds[1]).is_connected = True
    rig.manager.follow(partition, state(*after))
    assert rig.served_by(partition).kind is kinds[1]
    assert not old.current
    assert not rig.stream(kinds[0]).replicas


def test_a_replica_moves_once_the_other_stream_is_connected(rig: Rig) -> None:
    """replica/fetcher_manager B2: acks=all waits for it already."""
    partition, other = rig.partition(), rig.partition(1)
    for each in (partition, other):
        rig.manager.follow(each, state(2))
    rig.manager.follow(partition, state(1, 2))
    hot = rig.stream(HOT)
    assert rig.served_by(partition).kind is LATE
    assert hot.expected == 1
    hot.is_connected = True
    rig.manager.connected(rig.stream(LATE))
    assert rig.served_by(partition).kind is LATE
    rig.manager.connected(hot)
    assert rig.served_by(partition).kind is HOT
    assert rig.served_by(other).kind is LATE


@pytest.mark.parametrize("event", ["back", "left", "elected", "removed"])
def test_a_replica_that_waits_to_move_may_have_another_reason_by_then(rig: Rig, event: str) -> None:
    """The connection comes after the metadata have changed again."""
    partition = rig.partition()
    rig.manager.follow(partition, state(2))
    rig.manager.follow(partition, state(1, 2))
    hot = rig.stream(HOT)
    if event == "back":
        rig.manager.follow(partition, state(2))
    elif event == "elected":
        rig.manager.follow(partition, state(1, 2, epoch=6))
        assert rig.served_by(partition).kind is HOT, "the old stream serves no newer epoch"
    else:
        rig.manager.leave(partition)
        if event == "removed":
            del rig.partitions[partition.key]
    hot.is_connected = True
    rig.manager.connected(hot)
    if event in ("left", "removed"):
        assert partition.replica is None
        assert not hot.replicas
    else:
        assert rig.served_by(partition).kind is (LATE if event == "back" else HOT)


def test_a_new_leader_epoch_is_followed_at_once(rig: Rig) -> None:
    partition = rig.partition()
    rig.manager.follow(partition, state(1, 2))
    old = partition.replica
    rig.manager.follow(partition, state(1, 2, epoch=6))
    assert partition.replica is not old
    assert rig.stream(HOT).replicas == [partition.replica]
    rig.manager.follow(partition, state(1, 3, leader=3, epoch=7))
    assert rig.served_by(partition) == (3, "d1", HOT)


def test_position_ids_are_numbers_of_the_broker(rig: Rig) -> None:
    """replica/fetcher_manager B3: Leader.is_newest compares those of different streams."""
    assert [rig.manager.next_position_id() for _ in range(3)] == [1, 2, 3]


def test_only_replicas_that_are_added_take_turns(rig: Rig) -> None:
    returned, added, joined = (rig.partition(number) for number in range(3))
    rig.manager.follow(returned, state(2))
    rig.manager.follow(added, state(2, adding=(ME,)))
    rig.manager.follow(joined, state(1, 2, adding=(ME,)))
    assert [each.replica.copying for each in (returned, added, joined)] == [False, True, False]


def test_a_replica_that_is_not_added_any_more_needs_no_turn(rig: Rig) -> None:
    """Otherwise it could wait for a turn that the stream gives to added replicas only."""
    partition = rig.partition()
    rig.manager.follow(partition, state(2, adding=(ME,)))
    late = rig.stream(LATE)
    rig.manager.follow(partition, state(2, adding=(ME, 3)))
    assert late.caught_up == []
    rig.manager.follow(partition, state(2))
    assert late.caught_up == [partition.replica]
