"""The quorum machine over any number of voters, and the metadata log over the simulated disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pk import errors
from pk.effects import Effect, Level, Publish, Send, Write
from pk.server.controller.records import record_of
from pk.server.quorum.log import QUORUM_STATE, MetadataLog
from pk.server.quorum.machine import (
    HIGH_WATERMARK,
    LEADERSHIP,
    AskVote,
    BeginEpoch,
    Leadership,
    Quorum,
    Role,
    SaveVote,
    Started,
    Synced,
    Vote,
    VoteGranted,
    Voter,
)
from pk.sim.disk import SimDisk, SimStorage
from pk.sim.world import SimWorld
from pk.types import NONE
from pk.wire import pk_pb2 as wire

ME, B, C = Voter(1, "d1"), Voter(2, "d2"), Voter(3, "d3")


def published(effects: Sequence[Effect], name: str) -> list[Any]:
    return [e.value for e in effects if isinstance(e, Publish) and e.name == name]


def elected(voters: tuple[Voter, ...], log_end: int = 0) -> Quorum:
    quorum = Quorum(ME, voters)
    quorum.step(Started(Vote(4), log_end, 3), 0)
    for voter in voters:
        quorum.step(VoteGranted(voter, quorum.epoch), 0)
    assert quorum.role is Role.LEADER
    return quorum


def test_a_vote_is_synced_before_it_counts() -> None:
    """U1."""
    quorum = Quorum(ME, (ME,))
    (write,) = quorum.step(Started(Vote(7, 1, "d1"), 10, 7), 0)
    assert isinstance(write, Write)
    assert write.level is Level.SYNCED
    assert write.ops == [SaveVote(Vote(8, 1, "d1"))]
    assert quorum.role is Role.CANDIDATE
    (then,) = write.then
    assert isinstance(then, Publish)
    effects = quorum.step(then.value, 0)
    assert published(effects, LEADERSHIP) == [Leadership(8, 10)]
    begin = effects[1]
    assert isinstance(begin, Write)
    assert begin.ops == [BeginEpoch(ME, 8, (ME,))]


@pytest.mark.parametrize(("saved", "last", "epoch"), [(0, NONE, 1), (3, 9, 10), (9, 3, 10)])
def test_an_epoch_is_never_used_twice(saved: int, last: int, epoch: int) -> None:
    quorum = Quorum(ME, (ME,))
    quorum.step(Started(Vote(saved), 0, last), 0)
    assert quorum.epoch == epoch


def test_one_voter_is_the_general_case() -> None:
    """Q4: three voters need two votes and two synced ends; the same code with one needs one."""
    quorum = Quorum(ME, (ME, B, C))
    (write,) = quorum.step(Started(Vote(), 0, NONE), 0)
    assert isinstance(write, Write)
    asked = [e.peer for e in write.then if isinstance(e, Send) and isinstance(e.message, AskVote)]
    assert asked == [B, C]
    assert quorum.step(VoteGranted(ME, 1), 0) == ()
    assert quorum.step(VoteGranted(Voter(2, "another directory"), 1), 0) == ()  # U4
    assert quorum.step(VoteGranted(B, 0), 0) == ()  # of another epoch
    assert published(quorum.step(VoteGranted(B, 1), 0), LEADERSHIP)
    assert quorum.step(VoteGranted(C, 1), 0) == ()
    assert quorum.step(Synced(ME, 1, 5), 0) == ()
    assert published(quorum.step(Synced(C, 1, 3), 0), HIGH_WATERMARK) == [3]
    assert published(quorum.step(Synced(B, 1, 9), 0), HIGH_WATERMARK) == [5]


def test_nothing_of_older_epochs_is_committed_alone() -> None:
    """U3."""
    quorum = elected((ME,), log_end=10)
    assert quorum.step(Synced(ME, quorum.epoch, 10), 0) == ()
    assert published(quorum.step(Synced(ME, quorum.epoch, 12), 0), HIGH_WATERMARK) == [12]


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30)), max_size=40))
def test_the_high_watermark_is_what_a_majority_holds(n: int, syncs: list[tuple[int, int]]) -> None:
    """U2, against the naive definition."""
    voters = tuple(Voter(i + 1, f"d{i + 1}") for i in range(n))
    quorum = elected(voters)
    ends = dict.fromkeys(voters, 0)
    before = 0
    for who, end in syncs:
        voter = voters[who % n]
        quorum.step(Synced(voter, quorum.epoch, end), 0)
        ends[voter] = max(ends[voter], end)
        naive = max(
            offset for offset in range(31) if sum(held >= offset for held in ends.values()) * 2 > n
        )
        assert quorum.high_watermark == naive
        assert quorum.high_watermark >= before
        before = quorum.high_watermark


# -- over a disk -----------------------------------------------------------------------------------


class Disk:
    """A metadata log that can be opened again after a crash."""

    def __init__(self, seed: int = 1) -> None:
        self.world = SimWorld(seed)
        self.storage = SimStorage("m", self.world.random("disk"))
        self.fatal: list[BaseException] = []

    def open(self) -> MetadataLog:
        world = self.world.world_of("n")
        disk = SimDisk(self.storage, world.clock, world.rng)
        log = MetadataLog(
            world.clock, disk, node_id=1, directory_id="d", address="", on_fatal=self.fatal.append
        )
        self.world.run(log.open())
        return log


def topic(name: str) -> Any:
    return record_of(wire.TopicRecord(name=name, topic_id=name))


def names(disk: Disk, log: MetadataLog) -> list[str]:
    found: list[str] = []

    def take(_offset: int, record: Any) -> None:
        if record.WhichOneof("record") == "topic":
            found.append(record.topic.name)

    disk.world.run(log.replay(take))
    return found


@pytest.mark.parametrize("power", [False, True])
def test_what_was_committed_survives(power: bool) -> None:
    """L1: also a power loss; each start is a later epoch."""
    disk = Disk()
    for round_number in range(4):
        log = disk.open()
        assert log.epoch == round_number + 1
        assert names(disk, log) == [f"t{n}" for n in range(round_number)]
        assert log.append([topic(f"t{round_number}")], 5) == log.end - 1
        disk.world.run(log.commit())
        assert log.committed == log.end
        if power:
            disk.storage.power_loss()
        else:
            disk.storage.crash()
    assert not disk.fatal


def test_what_was_not_committed_may_go_but_nothing_else() -> None:
    disk = Disk(3)
    log = disk.open()
    log.append([topic("kept")], 5)
    disk.world.run(log.commit())
    log.append([topic("never written")], 5)
    disk.storage.power_loss()
    assert names(disk, disk.open()) == ["kept"]


def test_damaged_state_is_not_guessed() -> None:
    """U1: an epoch might be used twice; committed metadata might be cut away."""
    disk = Disk()
    log = disk.open()
    log.append([topic("a")], 5)
    disk.world.run(log.commit())
    disk.world.run(log.close())
    disk.storage.crash()
    disk.world.run(disk.open().close())
    disk.storage.crash()
    good = disk.storage.read_file(QUORUM_STATE)
    disk.storage.replace_file(QUORUM_STATE, b"{")
    with pytest.raises(errors.CorruptLog):
        disk.open()
    disk.storage.replace_file(QUORUM_STATE, good)
    for name in disk.storage.list("__cluster_metadata-0"):
        if name.endswith(".log"):
            file = disk.storage.open(f"__cluster_metadata-0/{name}")
            file.truncate(100)
            file.close()
    with pytest.raises(errors.CorruptLog):
        disk.open()
