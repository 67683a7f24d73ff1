"""Damaged ranges of a log with one copy: found, read around, and repaired to gaps (rule L9)."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from pk import errors
from pk.log import batch as batches
from pk.log import columns, damage, repair
from pk.log.batch import HEADER_BYTES
from pk.log.damaged_ranges import survey_log
from pk.log.partition_log import PartitionLog
from pk.log.readonly import open_readonly
from pk.log.segment import Segment
from pk.sim.disk import Crashed
from tests.unit.log.conftest import NOW, Bench, make_batch

PATH = "topics/t-0"
#: Of a batch's header: base offset, leader epoch.
UNCHECKED = (*range(8), *range(12, 16))


def flip(bench: Bench, base: int, position: int, bit: int = 4) -> None:
    """Flip one bit of a segment on the disk."""
    path = f"{PATH}/{base:020}.log"
    bench.storage.rot(path, position, bit)


def filled(count: int = 40, records: int = 3) -> Bench:
    bench = Bench()
    for number in range(count):
        bench.append(make_batch(records, 100, producer_id=7, producer_epoch=0,
                                base_sequence=number * records))  # fmt: skip
    return bench


def places(bench: Bench) -> list[tuple[int, int, batches.Header]]:
    """Return segment, position and header of every batch."""
    found = []
    for facts in bench.log.segments:
        raw = Segment(bench.storage, PATH, facts.base_offset).read_at(0, facts.size)
        found += [(facts.base_offset, at, header) for at, header in batches.iter_headers(raw)]
    return found


def served(log: PartitionLog) -> tuple[list[int], list[tuple[int, int]]]:
    """Return every offset that can be read, and the ranges that are reported as lost."""
    offset, offsets, lost = log.local_log_start, [], []
    while offset < log.written_end:
        try:
            read = log.read(offset, bound=log.written_end, max_bytes=700, verify=True)
        except errors.DataLoss as told:
            lost.append((int(told.details["offset"]), int(told.details["next_offset"])))
            offset = lost[-1][1]
            continue
        except errors.CorruptLog as told:
            if not log.survey(int(told.details["offset"])):
                raise
            continue
        assert read.next_offset > offset
        for _, raw in batches.iter_batches(read.data):
            rows = columns.decode(raw, decoded_bytes_max=10**7)
            offsets += [o for o in rows.column("offset").to_pylist() if o >= offset]
        offset = read.next_offset
    return offsets, lost


def all_but(end: int, *gone: tuple[int, int]) -> list[int]:
    return [o for o in range(end) if not any(start <= o < stop for start, stop in gone)]


def range_of(header: batches.Header) -> tuple[int, int]:
    return header.base_offset, header.next_offset


def test_a_running_log_serves_both_sides_of_a_damaged_batch() -> None:
    """Rule L9: the range is reported, everything else is read, and the log takes appends."""
    bench = filled()
    base, at, header = places(bench)[11]
    flip(bench, base, at + HEADER_BYTES + 20)
    end = bench.log.written_end
    assert served(bench.log) == (all_but(end, range_of(header)), [range_of(header)])
    assert [(each.start, each.end) for each in bench.log.damage] == [range_of(header)]
    bench.append(make_batch(3, 100))
    assert served(bench.log)[0][-1] == end + 2


@pytest.mark.parametrize("seed", range(25))
def test_any_bit_of_several_batches_costs_those_alone(seed: int) -> None:
    rng = random.Random(seed)
    bench = filled()
    hit = rng.sample(places(bench), 3)
    for base, at, header in hit:
        place = rng.choice([p for p in range(header.length) if p not in UNCHECKED])
        flip(bench, base, at + place, rng.randrange(8))
    gone = sorted(range_of(header) for _, _, header in hit)
    offsets, lost = served(bench.log)
    assert offsets == all_but(bench.log.written_end, *gone)
    assert sorted({o for a, b in lost for o in range(a, b)}) == sorted(
        {o for a, b in gone for o in range(a, b)}
    )


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("field", ["body", "length", "magic"])
def test_a_restart_serves_both_sides(clean: bool, field: str) -> None:
    """Without `skip_damaged` the log is offline; with it only the range cannot be read."""
    bench = filled()
    if clean:
        bench.log.close()
    base, at, header = places(bench)[11]
    flip(bench, base, at + {"body": HEADER_BYTES + 9, "length": 9, "magic": 16}[field])
    if not clean:
        with pytest.raises(errors.CorruptLog):
            bench.open()
    log = bench.open(clean=clean, skip_damaged=True)
    assert served(log) == (all_but(log.written_end, range_of(header)), [range_of(header)])
    if not clean:
        assert any(note.startswith("O10") for note in log.notes)
    bench.append(make_batch(1, 100))
    log.close()
    again = bench.open(clean=True, skip_damaged=True)
    assert served(again)[0] == all_but(again.written_end, range_of(header))


@pytest.mark.parametrize("where", [0, 11, -2, -1])
@pytest.mark.parametrize("bit", range(32))
def test_a_flipped_length_is_no_torn_tail(where: int, bit: int) -> None:
    """After a kill, acknowledged batches may lie behind a batch that announces more bytes than the
    file has.  They are served, and no offset is assigned twice (recovery.py: I).
    """
    bench = filled()
    base, at, header = places(bench)[where]
    end = bench.log.written_end
    flip(bench, base, at + 8 + bit // 8, bit % 8)
    log = bench.open(skip_damaged=True)
    assert log.written_end == end
    assert served(log) == (all_but(end, range_of(header)), [range_of(header)])
    bench.append(make_batch(1, 100))
    assert served(log)[0][-1] == end


@pytest.mark.parametrize("left", [1, 63, 64, 100])
def test_a_torn_tail_is_cut_whatever_its_records_look_like(left: int) -> None:
    """The first record of the torn batch contains a copy of a batch of this very log."""
    bench = filled()
    end, (base, _, _) = bench.log.written_end, places(bench)[-1]
    copied = make_batch(3, 100)
    raw = b"".join(columns.encode_lists([copied, b"v" * 500], default_timestamp=NOW))
    torn = batches.patched(raw, end, 0, None)
    file = bench.storage.open(f"{PATH}/{base:020}.log")
    file.append([b"".join(torn)[: left if left < 100 else len(raw) - left]])
    file.close()
    log = bench.open(skip_damaged=True)
    assert (log.written_end, log.damage) == (end, [])
    assert served(log) == (list(range(end)), [])


def test_after_a_power_loss_a_tail_is_cut_and_not_called_damage() -> None:
    """Recovery row G: above the recovery point a power loss may have torn the batch that does not
    match.
    """
    bench = filled()
    base, at, header = places(bench)[-4]
    early = places(bench)[2]
    flip(bench, base, at + 80)
    flip(bench, early[0], early[1] + 9)
    log = bench.open(same_boot=False, recovery_point=early[2].next_offset + 6, skip_damaged=True)
    assert log.written_end == header.base_offset
    assert served(log)[1] == [range_of(early[2])]


def test_a_damaged_tail_whose_end_is_not_known_stays_offline_until_it_is_repaired() -> None:
    """The batch's header is damaged, too, so its offsets are not known (log/damage D3)."""
    bench = filled()
    base, at, header = places(bench)[-1]
    flip(bench, base, at + 16)
    with pytest.raises(errors.CorruptLog):
        bench.open(skip_damaged=True)
    (finding,) = repair.look(bench.storage, PATH, trusted=False, floor=0)
    assert finding.damage.start == header.base_offset
    assert finding.damage.end >= header.next_offset + 1_000_000 - 3
    repair.go_past(bench.storage, PATH, [finding])
    log = bench.open()
    assert log.written_end == finding.damage.end  # no offset is given twice
    assert served(log) == (list(range(header.base_offset)), [])


def test_a_torn_tail_is_no_damage() -> None:
    bench = filled()
    base, at, header = places(bench)[-1]
    file = bench.storage.open(f"{PATH}/{base:020}.log")
    file.truncate(at + 90)
    file.close()
    assert repair.look(bench.storage, PATH, trusted=False, floor=0) == []
    (finding,) = repair.look(bench.storage, PATH, trusted=False, floor=header.next_offset)
    assert (finding.damage.start, finding.damage.end >= header.next_offset) == (
        header.base_offset, True,
    )  # fmt: skip


def repaired(bench: Bench) -> list[repair.Finding]:
    found = repair.look(bench.storage, PATH, trusted=False, floor=0)
    repair.go_past(bench.storage, PATH, found)
    return found


@pytest.mark.parametrize("where", [0, 11, 25, -1])
def test_repair_makes_a_known_gap(where: int) -> None:
    bench = filled()
    base, at, header = places(bench)[where]
    flip(bench, base, at + HEADER_BYTES + 5)
    end = bench.log.written_end
    (finding,) = repaired(bench)
    assert (finding.damage.start, finding.damage.end) == range_of(header)
    assert repair.look(bench.storage, PATH, trusted=False, floor=end) == []
    log = bench.open()
    assert log.written_end == end
    assert served(log) == (all_but(end, range_of(header)), [])
    bench.append(make_batch(2, 100))
    assert served(log)[0][-2:] == [end, end + 1]
    log.close()
    assert served(bench.open(clean=True))[0] == all_but(end + 2, range_of(header))


def test_followers_and_readers_take_the_gap() -> None:
    """The gap is an ordinary batch of the log for every replica and reader that copies it (rules
    L12, R4).
    """
    bench = filled()
    base, at, header = places(bench)[5]
    flip(bench, base, at + 70)
    repaired(bench)
    log, follower = bench.open(), Bench()
    offset = 0
    while offset < log.written_end:
        read = log.read(offset, bound=log.written_end, max_bytes=900, verify=True)
        for found, raw in batches.iter_batches(read.data):
            columns.validate_body(raw, batches.check(raw), decoded_bytes_max=10**7)
            follower.log.append_as_follower(batches.check(raw), raw, now_ms=NOW)
            assert repair.is_gap(found) == (found.base_offset == header.base_offset)
        follower.write()
        offset = read.next_offset
    assert served(follower.log) == served(log)


def test_a_gap_spans_leader_epochs() -> None:
    bench = Bench(segment_bytes=10**6)
    for epoch in (0, 0, 3, 3, 5, 5):
        bench.append(make_batch(2, 100), epoch=epoch)
    for base, at, _ in places(bench)[1:4]:
        for place in range(150):
            flip(bench, base, at + place)
    (finding,) = repaired(bench)
    assert (finding.damage.start, finding.damage.end) == (2, 8)
    log = bench.open()
    assert [log.epochs.epoch_of(at) for at in range(12)] == [0] * 4 + [3] * 4 + [5] * 4
    assert served(log)[0] == [0, 1, *range(8, 12)]


def test_a_missing_segment_is_a_range() -> None:
    bench = filled()
    gone, following = bench.log.segments[1].base_offset, bench.log.segments[2].base_offset
    for suffix in ("log", "index", "timeindex"):
        bench.storage.remove(f"{PATH}/{gone:020}.{suffix}")
    with pytest.raises(errors.CorruptLog):
        bench.open()
    log = bench.open(skip_damaged=True)
    assert served(log) == (all_but(log.written_end, (gone, following)), [(gone, following)])
    repaired(bench)
    assert served(bench.open()) == (all_but(log.written_end, (gone, following)), [])


def test_a_repair_that_dies_on_the_way_leaves_the_old_or_the_new() -> None:
    """log/repair B1: the process dies at each operation, and the power loss takes any part of what
    was not SYNCED.
    """
    bench = filled()
    base, at, header = places(bench)[11]
    flip(bench, base, at + 70)
    bench.storage.sync_dir("")
    bench.storage.sync_dir("topics")
    bench.storage.sync_dir(PATH)
    for name in bench.storage.list(PATH):
        bench.storage.open(f"{PATH}/{name}").sync()
    end = bench.log.written_end
    outcomes = set()
    for fatal in range(40):
        storage = copy.deepcopy(bench.storage)
        found = repair.look(storage, PATH, trusted=False, floor=0)
        storage.crash_at = fatal
        died = False
        try:
            repair.go_past(storage, PATH, found)
        except Crashed:
            died = True
        storage.crash_at = None
        storage.power_loss()
        twin = Bench.__new__(Bench)
        twin.storage, twin.config = storage, bench.config
        log = twin.open(skip_damaged=True)
        offsets, lost = served(log)
        assert offsets == all_but(end, range_of(header))
        outcomes.add(bool(lost))
        if not died:
            assert lost == []
            break
    assert outcomes == {True, False}


def test_a_copy_of_a_batch_in_a_record_is_never_taken_for_the_log() -> None:
    """The value holds batches with valid checksums and plausible offsets."""
    bench = Bench(segment_bytes=10**6, index_interval_bytes=10**6)
    inner = b""
    for offset in range(2, 6):
        inner += b"".join(batches.patched(make_batch(1, 200), offset, 0))
    bench.append(make_batch(1, 100))
    bench.append(b"".join(columns.encode_lists([inner], default_timestamp=NOW)))
    bench.fill(6)
    base, at, header = places(bench)[1]
    flip(bench, base, at + 8)  # its length
    (_, ranges) = survey_log(bench.storage, PATH, trusted=False, dense=True)[0]
    assert [(each.start, each.end) for each in ranges] == [range_of(header)]


def test_survey_needs_no_index() -> None:
    bench = Bench(segment_bytes=10**6)
    bench.fill(30)
    base, at, header = places(bench)[9]
    raw = bytearray(Segment(bench.storage, PATH, base).read_at(0, 10**6))
    raw[at + 9] ^= 1
    found = damage.survey(lambda p, n: bytes(raw[p : p + n]), len(raw), 0)
    assert [(each.start, each.end) for each in found] == [range_of(header)]


@pytest.mark.parametrize("seed", range(40))
def test_neighbours_that_are_hit_cost_themselves(seed: int) -> None:
    """Any bit of two neighbouring batches is flipped, base offset and leader epoch included; there
    is no index.
    """
    rng = random.Random(seed)
    bench = Bench(segment_bytes=10**6)
    for _ in range(30):
        bench.append(make_batch(rng.randrange(1, 60), 20))
    found = places(bench)
    raw = bytearray(Segment(bench.storage, PATH, 0).read_at(0, 10**6))
    first = rng.randrange(len(found) - 3)
    hit = found[first : first + 2]
    for _, at, header in hit:
        place = rng.randrange(HEADER_BYTES if rng.random() < 0.7 else header.length)
        raw[at + place] ^= 1 << rng.randrange(8)
    epochs = bench.log.epochs.epoch_of
    ranges = damage.survey(lambda p, n: bytes(raw[p : p + n]), len(raw), 0, epoch_of=epochs)
    lost = {o for each in ranges for o in range(each.start, each.end)}
    assert lost == {o for _, _, header in hit for o in range(*range_of(header))}


@pytest.mark.parametrize("where", [3, 11, 25, -2])
@pytest.mark.parametrize("reader", ["log", "tier"])
def test_damage_that_is_met_names_its_file_and_range(where: int, reader: str) -> None:
    """Also if a header is damaged, so that no batch states the end of the range.  Operators read
    the range in `partition_offline`, `tier_failing` and `pk tier describe`.
    """
    bench = filled()
    base, at, header = places(bench)[where]
    end = bench.log.written_end
    flip(bench, base, at + 16)
    log: Any = open_readonly(bench.storage, PATH) if reader == "tier" else bench.log
    with pytest.raises(errors.CorruptLog) as told:
        log.read(header.base_offset, bound=end, max_bytes=10)
    file = f"{PATH}/{base:020}.log"
    range_ = f"offsets [{header.base_offset}, {header.next_offset}) are damaged"
    assert told.value.message.startswith(f"{file} at {at}: {range_}")
    assert told.value.details["next_offset"] == str(header.next_offset)
    assert told.value.details["file"] == file


def consumed(
    log: PartitionLog, max_bytes: int = 700
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Read as a consumer does, which compares the place of each batch with its neighbours'.  Return
    (offset, checksum) of every batch, and the ranges that are reported as lost.
    """
    offset, found, lost = log.local_log_start, [], []
    while offset < log.written_end:
        try:
            read = log.read(offset, bound=log.written_end, max_bytes=max_bytes, verify_first=True)
        except errors.DataLoss as told:
            lost.append((int(told.details["offset"]), int(told.details["next_offset"])))
            offset = lost[-1][1]
            continue
        except errors.CorruptLog as told:
            if not log.survey(int(told.details["offset"])):
                raise
            continue
        headers = [header for header, _ in batches.iter_batches(read.data)]
        ends = [header.base_offset for header in headers[1:]] + [read.next_offset]
        before = offset
        for header, after in zip(headers, ends, strict=True):
            try:
                batches.check_place(header, before, after, first=before == offset, dense=True)
            except errors.CorruptBatch:
                break
            found.append((header.base_offset, header.crc))
            before = header.next_offset
        offset = before
    return found, lost


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("bit", [0, 1, 4, 20, 50])
def test_an_offset_that_no_checksum_covers_is_compared_with_the_place(
    bit: int, clean: bool
) -> None:
    """Whichever batch it is: also the last one of a read, which has no batch behind it."""
    for number in range(38):
        bench = filled()
        truth = [(header.base_offset, header.crc) for _, _, header in places(bench)]
        base, at, header = places(bench)[number]
        if clean:
            bench.log.close()
        flip(bench, base, at + bit // 8, bit % 8)
        log = bench.open(clean=clean, skip_damaged=True)
        found, lost = consumed(log)
        assert [each for each in found if each not in truth] == []
        assert [each for each in truth if each not in found] == [(header.base_offset, header.crc)]
        assert lost == [range_of(header)]


@pytest.mark.parametrize("count", [2, 3])
def test_neighbours_that_are_all_moved_up_are_compared_with_the_place(count: int) -> None:
    """Each of them is above the one before it.  Only that the offsets follow each other without
    gaps shows the damage.
    """
    for number in range(36 - count):
        for bit in (0, 1, 2, 20):
            bench = filled()
            truth = [(header.base_offset, header.crc) for _, _, header in places(bench)]
            hit = places(bench)[number : number + count]
            moved = [each for each in hit if not each[2].base_offset >> bit & 1]
            for base, at, _ in moved:
                flip(bench, base, at + bit // 8, bit % 8)
            found, lost = consumed(bench.log, 20_000)
            gone = [(header.base_offset, header.crc) for _, _, header in moved]
            assert [each for each in found if each not in truth] == []
            missing = [each for each in truth if each not in found]
            assert [each for each in gone if each not in missing] == []
            for _, _, header in moved:
                first, end = range_of(header)
                assert any(start <= first and end <= stop for start, stop in lost)
