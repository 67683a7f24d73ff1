"""The metadata log of a quorum of one, over the simulated disk."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from pk import errors
from pk.effects import Level
from pk.log import batch as batches
from pk.server.metadata.record_serde import MetadataRecordSerde
from pk.server.metadata.records import MetadataRecord, record_of
from pk.server.metadata.snapshot_generator import SnapshotGenerator
from pk.server.raft.log import RaftLog
from pk.server.raft.messages import (
    BeginEpoch,
    SaveVote,
    TruncateTo,
    Vote,
    Voter,
)
from pk.server.raft.quorum_state_store import QUORUM_STATE, read_state
from pk.server.raft.recovery import LOG_DIR, SnapshotRules
from pk.server.raft.snapshot_id import SnapshotId, file_name
from pk.sim.disk import SimDisk, SimStorage
from pk.sim.world import SimWorld
from pk.wire import pk_pb2 as wire

WORLDS: list[SimWorld] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Close the log at the end of a test, while a write may be running."""
    yield
    while WORLDS:
        WORLDS.pop().close()


class Disk:
    """A metadata log that can be opened again after a crash."""

    def __init__(self, seed: int = 1) -> None:
        self.world = SimWorld(seed)
        WORLDS.append(self.world)
        self.storage = SimStorage("m", self.world.random("disk"))
        self.fatal: list[BaseException] = []
        self.said: list[tuple[str, dict[str, Any]]] = []

    def open(self, voters: dict[Voter, str] | None = None) -> RaftLog[MetadataRecord]:
        world = self.world.world_of("n")
        disk = SimDisk(self.storage, world.clock, world.rng)
        log = RaftLog(
            world,
            disk,
            MetadataRecordSerde(),
            SnapshotGenerator,
            me=Voter(1, "d"),
            address="",
            on_fatal=self.fatal.append,
            voters=voters,
            say=lambda event, **facts: self.said.append((event, facts)),
        )
        self.world.run(_opened(log))
        return log


def saved(disk: Disk) -> tuple[Vote, int]:
    """Return the content of `quorum-state`."""
    found = read_state(disk.storage)
    assert found is not None
    return found


def silent(_event: str, **_facts: object) -> None:
    """A log listener that ignores all events."""


async def _opened(log: RaftLog[MetadataRecord]) -> None:
    await log.open()
    await log.lead()


def topic(name: str) -> Any:
    return record_of(wire.TopicRecord(name=name, topic_id=name))


def names(disk: Disk, log: RaftLog[MetadataRecord]) -> list[str]:
    found: list[str] = []

    def take(_offset: int, record: Any) -> None:
        if record.WhichOneof("record") == "topic":
            found.append(record.topic.name)

    disk.world.run(log.replay(take))
    return found


@pytest.mark.parametrize("power", [False, True])
def test_what_was_committed_survives(power: bool) -> None:
    """L1: this includes a power loss; each start begins a later epoch."""
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
    """raft/machine U1: otherwise an epoch might be used twice, and committed metadata might be cut
    away.
    """
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


def lost_vote(*, power: bool = False) -> tuple[Disk, int]:
    """Return the epoch of a log with one topic, whose node is down and whose `quorum-state` is
    missing.
    """
    disk = Disk()
    log = disk.open()
    log.append([topic("kept")], 5)
    disk.world.run(log.commit())
    epoch = log.epoch
    disk.storage.power_loss() if power else disk.storage.crash()
    disk.storage.remove(QUORUM_STATE)
    return disk, epoch


@pytest.mark.parametrize("power", [False, True])
def test_a_node_alone_goes_on_without_its_vote_and_says_so_once(power: bool) -> None:
    """raft/log W7: it starts in a later epoch than that of any record, with every record; then a
    vote exists again.
    """
    disk, epoch = lost_vote(power=power)
    log = disk.open()
    assert log.epoch == epoch + 1
    assert names(disk, log) == ["kept"]
    ((event, facts),) = disk.said
    assert event == "quorum_state_missing"
    assert facts["epoch"] == epoch
    assert "missing behind log_end would not be noticed" in facts["why"]
    assert saved(disk)[0] == Vote(epoch + 1, 1, "d")
    disk.storage.crash()
    disk.said.clear()
    assert disk.open().epoch == epoch + 2
    assert not disk.said


def test_a_node_with_voters_in_its_settings_does_not_go_on_without_its_vote() -> None:
    """raft/log W7: even if its log names no other voter yet."""
    disk, _ = lost_vote()
    before = disk.storage.read_file(f"{LOG_DIR}/{0:020d}.log")
    with pytest.raises(errors.CorruptLog, match=r"quorum-state is gone.*vote twice"):
        disk.open({Voter(1, "d"): "a:1"})
    with pytest.raises(errors.CorruptLog, match=r"quorum-state is gone.*vote twice"):
        disk.open({Voter(1, "d"): "a:1", Voter(2, "e"): "b:1"})
    assert not disk.storage.exists(QUORUM_STATE)
    assert disk.storage.read_file(f"{LOG_DIR}/{0:020d}.log") == before


def test_a_log_that_names_other_voters_is_not_opened_without_its_vote() -> None:
    """raft/log W7: whatever the settings say."""
    disk = Disk()
    log = disk.open()
    voters = [wire.Voter(node_id=1, directory_id="d"), wire.Voter(node_id=2, directory_id="e")]
    log.append([record_of(wire.VotersRecord(voters=voters))], 5)
    disk.world.run(log._writer.write_out())
    disk.storage.crash()
    disk.storage.remove(QUORUM_STATE)
    with pytest.raises(errors.CorruptLog, match=r"quorum-state is gone.*vote twice"):
        disk.open()


def committed(*records: str) -> tuple[Disk, RaftLog, str]:
    """Return a log with one topic per batch, long after its election, and its only file."""
    disk = Disk()
    log = disk.open()
    for name in records:
        log.append([topic(name)], 5)
        disk.world.run(log.commit())
    disk.world.run(_wait(2_000))
    (name,) = (each for each in disk.storage.list(LOG_DIR) if each.endswith(".log"))
    return disk, log, f"{LOG_DIR}/{name}"


async def _wait(ms: int) -> None:
    await asyncio.sleep(ms / 1000)


def test_rot_in_what_was_committed_since_the_last_vote_is_no_torn_tail() -> None:
    """raft/log_writer W6: otherwise the damaged record and all committed records behind it would be
    cut away.
    """
    disk, log, path = committed("a", "b", "c")
    position, header = list(batches.iter_headers(disk.storage.peek(path)))[-2]
    assert header.base_offset == log.end - 2
    disk.storage.rot(path, position + header.length - 1, 0)
    disk.storage.power_loss()
    before = disk.storage.peek(path)
    with pytest.raises(errors.CorruptLog):
        disk.open()
    assert disk.storage.peek(path) == before


def test_a_log_that_rests_is_not_noted_again() -> None:
    disk, log, _ = committed("a")
    assert saved(disk) == (Vote(log.epoch, 1, "d"), log.end)
    mutations = disk.storage.mutations
    disk.world.run(_wait(60_000))
    assert disk.storage.mutations == mutations


def test_no_space_to_note_what_is_synced_is_no_failure() -> None:
    # metadata/snapshot_generator K3
    disk = Disk()
    log = disk.open()
    log.append([topic("a")], 5)
    disk.world.run(log.commit())
    disk.storage.capacity = disk.storage.used_bytes()
    disk.world.run(_wait(5_000))
    assert saved(disk)[1] < log.end
    disk.storage.capacity = None
    disk.world.run(_wait(20_000))
    assert saved(disk)[1] == log.end
    assert not disk.fatal


def test_a_log_that_was_cut_is_not_damaged() -> None:
    """raft/log_writer W5: the vote was saved beside records that the next leader did not have, and
    the process dies in the first write after the truncation.
    """
    disk = Disk()
    log = disk.open()
    log.append([topic("kept")], 5)
    disk.world.run(log.commit())
    kept = log.end
    log.append([topic("only here")], 5)
    disk.world.run(log.commit())
    vote = Vote(log.epoch, 1, "d")
    disk.world.run(log.write([SaveVote(vote)], Level.SYNCED))
    disk.world.run(log.write([TruncateTo(0, kept)], Level.SYNCED))
    assert log.end == kept
    disk.storage.crash()
    newest = max(n for n in disk.storage.list("__cluster_metadata-0") if n.endswith(".log"))
    file = disk.storage.open(f"__cluster_metadata-0/{newest}")
    file.append([bytes(146)])
    file.close()
    again = disk.open()
    assert names(disk, again) == ["kept"]
    assert again.epoch > vote.epoch, "the vote is not forgotten with the records"


@pytest.mark.parametrize("after", ["vote", "note", "close"])
def test_a_cut_that_a_full_disk_stopped_is_not_damage(
    after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """raft/log_writer W5: the file is cut, the log in memory is not yet, and its end is noted."""
    disk, log, _ = committed("kept", "only here")
    kept, vote = log.end - 1, Vote(log.epoch, 1, "d")
    replace = disk.storage.replace_file

    def full(path: str, data: bytes) -> None:
        if path.endswith("leader-epoch-checkpoint"):
            raise errors.StorageFull(f"no space for {path}")
        replace(path, data)

    monkeypatch.setattr(disk.storage, "replace_file", full)
    with pytest.raises(errors.StorageFull):
        disk.world.run(log.write([TruncateTo(0, kept)], Level.SYNCED))
    if after == "vote":
        disk.world.run(log.write([SaveVote(vote)], Level.SYNCED))
    elif after == "note":
        disk.world.run(_wait(20_000))
    else:
        disk.world.run(log.close())
    assert saved(disk)[1] == kept
    monkeypatch.undo()
    disk.storage.crash()
    assert names(disk, disk.open()) == ["kept"]


def test_what_a_deposed_leader_had_decided_and_not_written_is_undone() -> None:
    """raft/log W2: otherwise its next fetch would begin behind records that no other log has."""
    disk = Disk()
    log = disk.open()
    before = log.end
    log.append([topic("decided")], 5)
    assert log.end == before + 1
    disk.world.run(log.resign())
    assert log.end == before
    disk.world.run(log.lead())
    log.append([topic("after")], 5)
    disk.world.run(log.commit())
    assert names(disk, log) == ["after"]


async def _abandon(log: RaftLog[MetadataRecord]) -> None:
    """Cancel the caller of a commit while the disk writes."""
    commit = asyncio.get_running_loop().create_task(log.commit())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    commit.cancel()
    await asyncio.gather(commit, return_exceptions=True)


def test_a_write_whose_caller_goes_is_finished() -> None:
    """A term that ends cancels its waiting calls; the log must not wait for them without an end."""
    disk = Disk()
    log = disk.open()
    log.append([topic("abandoned")], 5)
    disk.world.run(_abandon(log))
    log.append([topic("after")], 5)
    disk.world.run(log.commit())
    assert names(disk, log) == ["abandoned", "after"]
    log.append([topic("last")], 5)
    disk.world.run(_abandon(log))
    disk.world.run(log.close())
    disk.storage.crash()
    assert names(disk, disk.open()) == ["abandoned", "after", "last"]


def test_voters_that_are_undone_with_what_found_no_room_are_refused() -> None:
    """KIP-853: otherwise the client waits without an end, and no later change of the voters is
    possible.
    """
    disk = Disk()
    log = disk.open()
    two = (Voter(1, "d"), Voter(2, "e"))

    async def story() -> None:
        disk.storage.capacity = disk.storage.used_bytes()
        log.append([topic("no room")], 5)
        commit = asyncio.get_running_loop().create_task(log.commit())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        change = asyncio.get_running_loop().create_task(log.change_voters(two, {2: "e:1"}))
        with pytest.raises(errors.StorageFull):
            await commit
        disk.storage.capacity = None
        with pytest.raises(errors.ControllerUnavailable):
            async with asyncio.timeout(1):
                await change
        await log.lead()
        assert log.voters.now == two[:1]

    disk.world.run(story())
    assert not disk.fatal


def test_voters_that_find_no_room_are_refused() -> None:
    """The write of their record fails: the disk keeps its content, and the node continues."""
    disk = Disk()
    log = disk.open()
    one = log.voters.now

    async def story() -> None:
        disk.storage.capacity = disk.storage.used_bytes()
        with pytest.raises(errors.ControllerUnavailable):
            async with asyncio.timeout(1):
                await log.change_voters((*one, Voter(2, "e")), {2: "e:1"})
        disk.storage.capacity = None
        await log.lead()
        assert log.voters.now == one

    disk.world.run(story())
    assert not disk.fatal


def test_an_epoch_that_is_over_begins_no_more() -> None:
    """Writes wait in a queue: when this one runs, another node may lead."""
    disk = Disk()
    log = disk.open()
    end, me = log.end, log.quorum.me
    disk.world.run(log.write([BeginEpoch(me, log.epoch - 1, (me,))], Level.SYNCED))
    assert log.end == end


class Turns:
    """A clock that notes how many records were applied at each turn of the loop."""

    def __init__(self, clock: Any) -> None:
        self.applied = 0
        self.at: list[int] = []
        self._clock = clock

    async def sleep_ms(self, ms: float) -> None:
        self.at.append(self.applied)
        await self._clock.sleep_ms(ms)

    def apply(self, _offset: int, _record: Any) -> None:
        self.applied += 1

    @property
    def longest(self) -> int:
        at = [0, *self.at, self.applied]
        return max(after - before for before, after in pairwise(at))


def test_a_replay_gives_way_to_votes() -> None:
    """P1: replaying the log, and replaying or writing a snapshot, lets votes run in between."""
    disk = Disk()
    log = disk.open()
    for turn in range(3):
        log.append([topic(f"t{turn}-{n}") for n in range(1_500)], 5)
        disk.world.run(log.commit())
    history, clock = log._open_reader, log._open_reader._clock
    turns = history._clock = Turns(clock)  # type: ignore[assignment]
    disk.world.run(history.replay(turns.apply))
    assert turns.applied > 4_500
    assert turns.longest <= 128
    files = log._files
    assert files.newest is None
    writing = files._clock = Turns(clock)  # type: ignore[assignment]
    generator = SnapshotGenerator(log, history, files, clock, SnapshotRules(), silent)
    disk.world.run(generator.make())
    assert len(writing.at) > 4_500 // 128
    turns = history._clock = Turns(clock)  # type: ignore[assignment]
    disk.world.run(history.replay(turns.apply))
    assert turns.applied > 4_500
    assert turns.longest <= 128
    assert log.newest_snapshot is not None
    assert names(disk, log) == [f"t{turn}-{n}" for turn in range(3) for n in range(1_500)]


def test_a_directory_whose_log_is_short_is_still_that_of_another() -> None:
    """Q1: the snapshot names the voters if no record of the log does any more."""
    disk = Disk()
    log = disk.open()
    generator = SnapshotGenerator(
        log, log._open_reader, log._files, log._clock, SnapshotRules(), silent
    )
    for name in ("a", "b", "c"):
        log.append([topic(name)], 5)
        disk.world.run(log.commit())
        disk.world.run(generator.make())
    assert log.log_start > 3
    disk.world.run(log.close())
    disk.storage.crash()
    world = disk.world.world_of("other")
    other = RaftLog(
        world, SimDisk(disk.storage, world.clock, world.rng), MetadataRecordSerde(),
        SnapshotGenerator, me=Voter(1, "other"), address="", on_fatal=disk.fatal.append,
    )  # fmt: skip
    with pytest.raises(errors.DirectoryOfAnotherCluster, match="directory d,"):
        disk.world.run(other.open())


def test_one_that_was_made_while_a_later_one_was_loaded_is_not_kept() -> None:
    """raft/log_writer W4: otherwise it would be kept, and the later one, behind which the log
    begins, removed.
    """
    disk = Disk()
    log = disk.open()
    files = log._files
    generator = SnapshotGenerator(log, log._open_reader, files, log._clock, SnapshotRules(), silent)
    later = SnapshotId(log.end + 10, log.epoch)

    async def story() -> None:
        async with log._writer.lock:  # as `_install` has it
            making = asyncio.get_running_loop().create_task(generator.make())
            await log._clock.sleep_ms(1_000)
            disk.storage.replace_file(file_name(later), b"loaded")
            files.kept = (later,)
        with pytest.raises(errors.SnapshotNotFound):
            await making

    disk.world.run(story())
    assert files.kept == (later,)
    assert disk.storage.read_file(file_name(later)) == b"loaded"


def test_none_is_made_below_one_that_was_loaded() -> None:
    """metadata/snapshot_generator K3: the later snapshot was loaded while the generator checked
    whether one is due; the machine does not know it yet.
    """
    disk = Disk()
    log = disk.open()
    log.append([topic("a")], 5)
    disk.world.run(log.commit())
    behind: Any = SimpleNamespace(committed=log.end - 1, epoch_at=log.epoch_at)
    makers = [
        SnapshotGenerator(
            source,
            log._open_reader,
            log._files,
            log._clock,
            SnapshotRules(),
            silent,
        )
        for source in (log, behind)
    ]
    made = disk.world.run(makers[0].make())
    with pytest.raises(errors.SnapshotNotFound):
        disk.world.run(makers[1].make())
    assert log._files.kept == (made,)


def test_the_log_is_not_made_shorter_under_who_replays_it() -> None:
    disk = Disk()
    log = disk.open()
    log.append([topic(f"t{n}") for n in range(500)], 5)
    disk.world.run(log.commit())
    generator = SnapshotGenerator(
        log, log._open_reader, log._files, log._clock, SnapshotRules(1), silent
    )
    found: list[bool] = []

    class Asking(Turns):
        async def sleep_ms(self, ms: float) -> None:
            found.append(await generator._due())

    history = log._open_reader
    turns = history._clock = Asking(log._clock)  # type: ignore[assignment]
    disk.world.run(history.replay(turns.apply))
    assert found
    assert not any(found)
    assert disk.world.run(generator._due())
