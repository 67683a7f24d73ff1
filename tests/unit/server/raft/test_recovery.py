"""How snapshots and the log fit together when the metadata directory is opened."""

from __future__ import annotations

import json

import pytest

from pk import errors
from pk.log import batch as batches
from pk.log import sealed
from pk.log.partition_log import PartitionLog
from pk.server.metadata import snapshot
from pk.server.metadata.image import MetadataImage
from pk.server.metadata.records import encode_batch, record_of
from pk.server.raft import recovery
from pk.server.raft.messages import Vote
from pk.server.raft.quorum_state_store import QUORUM_STATE, first_state, read_state, state_bytes
from pk.server.raft.recovery import LOG_DIR, SnapshotRules, base_of, recover
from pk.server.raft.snapshot_id import NOTHING, SnapshotId, file_name
from pk.sim.disk import SimStorage
from pk.wire import pk_pb2 as wire

RULES = SnapshotRules(max_bytes=1_000)
NOW = 5


def log_of(storage: SimStorage, *epochs: int, start: int | None = None) -> PartitionLog:
    """Return a log with one record in each of `epochs`, beside a vote from before all of them."""
    storage.replace_file(QUORUM_STATE, first_state())
    log = recovery._open(storage, RULES, NOW, synced_end=0, log_start=start)
    for epoch in epochs:
        raw = encode_batch([record_of(wire.NoOpRecord())], NOW)
        log.decide(batches.check(raw), raw, leader_epoch=epoch, now_ms=NOW, from_client=False)
    plan = log.take_writes()
    if plan is not None:
        log.perform(plan)
        log.complete(plan)
    log.close()
    return log


def put(storage: SimStorage, made: SnapshotId, suffix: str = "", *, damaged: bool = False) -> None:
    raw = b"".join(snapshot.encode(made, snapshot.rows_of(MetadataImage(offset=made.end - 1))))
    storage.replace_file(file_name(made) + suffix, raw[:-1] if damaged else raw)


def test_a_log_that_was_being_replaced_begins_anew_with_nothing_of_what_it_was() -> None:
    """raft/snapshot_files F2: an epoch that only the old log had would refuse the leader's
    records.
    """
    storage = SimStorage("m")
    log_of(storage, 1, 2, 9, 9)
    put(storage, SnapshotId(3, 2))
    put(storage, SnapshotId(10, 5), ".load")
    for _ in range(2):  # raft/recovery O1
        opened = recover(storage, RULES, NOW)
        log = opened.log
        assert opened.kept == (SnapshotId(10, 5),)
        assert (log.log_start, log.log_end, log.synced_end) == (10, 10, 10)
        assert not log.epochs.entries
        log.close()
    assert [name for name in storage.list("") if "checkpoint" in name] == [
        file_name(SnapshotId(10, 5))
    ]


def test_also_when_what_is_left_of_it_is_no_log() -> None:
    storage = SimStorage("m")
    log_of(storage, 1, 1)
    storage.replace_file(f"{LOG_DIR}/{0:020d}.log", b"half removed")
    storage.replace_file(f"{LOG_DIR}/{7:020d}.log", b"and half not")
    put(storage, SnapshotId(10, 5), ".load")
    assert recover(storage, RULES, NOW).log.log_end == 10


def test_a_damaged_one_that_the_log_waits_for_is_refused() -> None:
    storage = SimStorage("m")
    log_of(storage, 1, 1)
    put(storage, SnapshotId(10, 5), ".load", damaged=True)
    with pytest.raises(errors.CorruptLog, match="torn"):
        recover(storage, RULES, NOW)


@pytest.mark.parametrize(
    ("damaged", "kept", "start"),
    [
        ((), (3, 5), 3),
        ((5,), (3,), 0),  # every record is still there
        ((3,), (5,), 0),
        ((3, 5), (), 0),
    ],
)
def test_a_log_from_the_beginning_needs_no_snapshot(
    damaged: tuple[int, ...], kept: tuple[int, ...], start: int
) -> None:
    storage = SimStorage("m")
    log_of(storage, *[1] * 8)
    for end in (3, 5):
        put(storage, SnapshotId(end, 1), damaged=end in damaged)
    opened = recover(storage, RULES, NOW)
    assert tuple(each.end for each in opened.kept) == kept
    assert opened.log.log_start == start
    assert len(opened.damaged) == len(damaged)


@pytest.mark.parametrize(("damaged", "start"), [((), 3), ((5,), 3), ((3,), 5), ((3, 5), None)])
def test_a_log_that_begins_later_needs_one_that_reaches_up_to_it(
    damaged: tuple[int, ...], start: int | None
) -> None:
    storage = SimStorage("m")
    log_of(storage, *[1] * 8, start=3)
    for end in (3, 5):
        put(storage, SnapshotId(end, 1), damaged=end in damaged)
    if start is None:
        with pytest.raises(errors.CorruptLog, match=r"begins at 3.*torn"):
            recover(storage, RULES, NOW)
    else:
        assert recover(storage, RULES, NOW).log.log_start == start


def batches_in(storage: SimStorage) -> list[tuple[int, batches.Header]]:
    return list(batches.iter_headers(storage.peek(f"{LOG_DIR}/{0:020d}.log")))


@pytest.mark.parametrize("newest", ["whole", "damaged"])
def test_damage_below_a_snapshot_is_no_torn_tail(newest: str) -> None:
    """raft/recovery O2: the synced end in the vote's file is as old as the vote, 0 here."""
    storage = SimStorage("m")
    log_of(storage, *[1] * 8)
    put(storage, SnapshotId(5, 1), damaged=newest == "damaged")
    position, header = batches_in(storage)[3]
    assert header.base_offset == 3
    storage.rot(f"{LOG_DIR}/{0:020d}.log", position + 16, 0)  # its magic
    before = storage.files()
    for _ in range(2):  # raft/recovery O1
        with pytest.raises(errors.CorruptLog, match="offset 3"):
            recover(storage, RULES, NOW)
        storage.crash()
        assert storage.files() == before, "of what is left somebody may yet make something"


def test_a_damaged_record_below_a_snapshot_keeps_those_behind_it() -> None:
    """raft/recovery O2: a reader of the damaged record gets an error; a replay that begins with the
    snapshot does not need it.
    """
    storage = SimStorage("m")
    log_of(storage, *[1] * 8)
    put(storage, SnapshotId(5, 1))
    position, header = batches_in(storage)[3]
    storage.rot(f"{LOG_DIR}/{0:020d}.log", position + header.length - 1, 0)
    log = recover(storage, RULES, NOW).log
    assert log.log_end == log.synced_end == 8
    assert log.read(5, bound=8, max_bytes=10_000).next_offset == 8
    with pytest.raises(errors.CorruptLog, match=r"\[3, 4\)"):
        log.read(3, bound=8, max_bytes=10_000, verify=True)


def test_a_log_that_ends_below_a_snapshot_is_refused() -> None:
    """raft/recovery O2: and so is a log that is missing."""
    storage = SimStorage("m")
    log_of(storage, *[1] * 4)
    put(storage, SnapshotId(5, 1))
    with pytest.raises(errors.CorruptLog, match="ends at offset 4"):
        recover(storage, RULES, NOW)
    storage.remove(f"{LOG_DIR}/{0:020d}.log")
    with pytest.raises(errors.CorruptLog, match="ends at offset 0"):
        recover(storage, RULES, NOW)


def test_a_torn_tail_behind_a_snapshot_is_cut() -> None:
    storage = SimStorage("m")
    log_of(storage, *[1] * 8)
    put(storage, SnapshotId(5, 1))
    position, header = batches_in(storage)[6]
    storage.rot(f"{LOG_DIR}/{0:020d}.log", position + header.length - 1, 0)
    assert recover(storage, RULES, NOW).log.log_end == 6


def test_the_log_begins_at_the_older_of_two() -> None:
    one, two = SnapshotId(3, 1), SnapshotId(9, 2)
    assert base_of((), 0) == base_of((one,), 0) == NOTHING
    assert base_of((one, two), 0) == one
    assert base_of((one,), 2) == one
    assert base_of((one, two), 4) == two
    with pytest.raises(errors.CorruptLog):
        base_of((one,), 4)


def test_no_flipped_bit_of_the_vote_is_believed() -> None:
    """Q5: this includes epoch, voted_for and synced_end."""
    storage = SimStorage("m")
    whole = state_bytes(Vote(17, 1, "d"), 40)
    for at in range(len(whole)):
        for bit in range(8):
            raw = bytearray(whole)
            raw[at] ^= 1 << bit
            storage.replace_file(QUORUM_STATE, bytes(raw))
            with pytest.raises(errors.CorruptLog, match="m/quorum-state is damaged: "):
                read_state(storage)
    storage.replace_file(QUORUM_STATE, whole)
    assert read_state(storage) == (Vote(17, 1, "d"), 40)


@pytest.mark.parametrize("field", ["epoch", "voted_for", "voted_directory_id", "synced_end"])
def test_a_vote_without_one_of_its_fields_names_it(field: str) -> None:
    storage = SimStorage("m")
    known = sealed.decode(first_state())
    del known[field]
    storage.replace_file(QUORUM_STATE, sealed.encode(known))
    with pytest.raises(errors.CorruptLog, match=f"'{field}' is missing.*remove nothing.*REPAIR"):
        read_state(storage)


def test_a_vote_without_a_checksum_is_not_believed() -> None:
    storage = SimStorage("m")
    raw = json.dumps(sealed.decode(first_state())).encode()
    storage.replace_file(QUORUM_STATE, raw)
    with pytest.raises(errors.CorruptLog, match="does not end with its checksum"):
        recover(storage, RULES, NOW)


@pytest.mark.parametrize("snapshot_end", [0, 5])
def test_records_without_a_vote_lose_none(snapshot_end: int) -> None:
    """raft/recovery O4: an undamaged log is opened and reports that its vote is lost; nothing is
    torn, so nothing is cut.
    """
    storage = SimStorage("m")
    log_of(storage, *[1] * 8)
    if snapshot_end:
        put(storage, SnapshotId(snapshot_end, 1))
    assert not recover(storage, RULES, NOW).vote_lost
    storage.remove(QUORUM_STATE)
    opened = recover(storage, RULES, NOW)
    assert opened.vote_lost
    assert opened.log.log_end == opened.log.synced_end == 8
    position, header = batches_in(storage)[6]
    storage.rot(f"{LOG_DIR}/{0:020d}.log", position + header.length - 1, 0)
    before = storage.files()
    with pytest.raises(errors.CorruptLog, match=r"quorum-state is gone.*offset 6.*backup"):
        recover(storage, RULES, NOW)
    assert storage.files() == before


def test_a_beginning_has_no_vote_to_lose() -> None:
    """A node that died between its first segment and its first vote begins as before."""
    storage = SimStorage("m")
    assert not recover(storage, RULES, NOW).vote_lost
    assert storage.list(LOG_DIR)
    assert not recover(storage, RULES, NOW).vote_lost


def test_a_fetched_snapshot_without_a_vote_is_refused() -> None:
    """Q5: the snapshot came from another voter, so there was a vote."""
    storage = SimStorage("m")
    log_of(storage, 1, 1)
    put(storage, SnapshotId(10, 5), ".load")
    storage.remove(QUORUM_STATE)
    with pytest.raises(errors.CorruptLog, match="vote twice"):
        recover(storage, RULES, NOW)
