"""A partition log on a simulated disk: append, fail, read, look up, truncate, retain, recover."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pk import errors
from pk.log import aborted, appending, columns, control_rows
from pk.log import batch as batches
from pk.log.control_rows import Marker
from pk.log.index_cache import IndexCache
from pk.log.plan import Appended, Duplicate
from pk.transactional_ids import TRANSACTIONAL
from pk.types import AbortedTransaction, EpochStart

NOW = 1_700_000_000_000
Make = Callable[..., Any]  #: conftest.Bench


def raw_batch(count: int = 1, size: int = 100, **options: Any) -> bytes:
    options.setdefault("default_timestamp", NOW)
    return b"".join(columns.encode_lists([b"v" * size] * count, **options))


def produced(sequence: int, count: int = 1, **options: Any) -> bytes:
    return raw_batch(count, producer_id=9, producer_epoch=0, base_sequence=sequence, **options)


# -- append ----------------------------------------------------------------------------------------


def test_offsets_are_decided_before_and_visible_after_the_write(bench: Make) -> None:
    b = bench()
    first = b.decide(raw_batch(3))
    second = b.decide(raw_batch(2))
    assert (first.base_offset, first.last_offset) == (0, 2)
    assert (second.base_offset, second.last_offset) == (3, 4)
    assert (b.log.log_end, b.log.written_end, b.log.synced_end) == (5, 0, 0)
    assert b.log.pending_bytes > 0
    assert b.log.read(0, bound=10, max_bytes=1000).empty
    plan = b.log.take_writes()
    assert plan is not None
    assert (plan.start, plan.end, plan.records, len(plan.appended)) == (0, 5, 5, 2)
    assert b.log.take_writes() is None
    b.log.perform(plan)
    assert b.log.written_end == 0
    done = b.log.complete(plan)
    assert (done.written_end, done.synced_end, done.failed, b.log.pending_bytes) == (5, 0, (), 0)
    assert b.values() == [0, 1, 2, 3, 4]


def test_no_batch_passes_the_end_of_a_block(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next block belongs to a restored cluster, which may have begun."""
    monkeypatch.setattr(appending, "BLOCK", 8)
    b = bench()
    b.append(raw_batch(5))
    with pytest.raises(errors.UnsupportedFeature, match="no offset is left"):
        b.decide(raw_batch(4))
    assert b.decide(raw_batch(3)).last_offset == 7


def test_bytes_travel_unchanged(bench: Make) -> None:
    b = bench()
    raw = raw_batch(3, codec="zstd")
    b.append(raw_batch(5), raw, epoch=4)
    read = b.log.read(5, bound=8, max_bytes=10**6)
    assert (read.base_offset, read.next_offset, read.last_epoch) == (5, 8, 4)
    assert read.data[batches.HEADER_BYTES :] == raw[batches.HEADER_BYTES :]
    header = batches.check(read.data)
    assert (header.base_offset, header.leader_epoch) == (5, 4)


def test_a_duplicate_gets_the_first_answer(bench: Make) -> None:
    """Also while the original is still being written (rule L4)."""
    b = bench()
    first = b.decide(produced(0, 2))
    assert b.decide(produced(0, 2)) == Duplicate(first.base_offset, first.last_offset)
    b.write()
    assert b.decide(produced(0, 2)) == Duplicate(0, 1)
    assert b.log.take_writes() is None
    with pytest.raises(errors.OutOfOrderSequence):
        b.decide(produced(3))


def test_log_append_time_stamps_records(bench: Make) -> None:
    b = bench(message_timestamp_type="LogAppendTime")
    done = b.decide(produced(0, default_timestamp=5), now_ms=NOW + 7)
    assert isinstance(done, Appended)
    assert (done.max_timestamp, done.log_append_time_ms) == (NOW + 7, NOW + 7)
    b.write()
    assert b.decide(produced(0, default_timestamp=5), now_ms=NOW + 9) == Duplicate(0, 0, NOW + 7)
    header = batches.check(b.log.read(0, bound=1, max_bytes=1).data)
    assert (header.log_append_time, header.max_timestamp) == (True, NOW + 7)
    b.log.close()
    b.open(clean=True)
    assert b.decide(produced(0, default_timestamp=5), now_ms=NOW + 9) == Duplicate(0, 0, NOW + 7)


def test_an_older_leader_epoch_is_fenced(bench: Make) -> None:
    b = bench()
    b.append(raw_batch(), epoch=3)
    with pytest.raises(errors.FencedLeaderEpoch):
        b.decide(raw_batch(), epoch=2)
    done = b.decide(raw_batch(), epoch=5)
    assert isinstance(done, Appended)
    assert done.first_of_epoch
    assert b.log.epochs.entries == (EpochStart(3, 0), EpochStart(5, 1))


def test_follower_keeps_offsets(bench: Make) -> None:
    leader, follower = bench(), bench()
    leader.append(produced(0, 3), raw_batch(2), epoch=2)
    data = leader.log.read(0, bound=5, max_bytes=10**6).data
    for header, raw in batches.iter_batches(data):
        follower.log.append_as_follower(header, bytes(raw), now_ms=NOW)
    follower.write()
    assert follower.log.read(0, bound=5, max_bytes=10**6).data == data
    assert follower.log.epochs.entries == leader.log.epochs.entries
    assert isinstance(follower.decide(produced(0, 3), epoch=2), Duplicate)
    header, raw = next(batches.iter_batches(data))
    with pytest.raises(errors.CorruptBatch):
        follower.log.append_as_follower(header, bytes(raw), now_ms=NOW)


@pytest.mark.parametrize(
    ("config", "batches_count", "segments"),
    [
        ({"segment_bytes": 500}, 5, 3),
        ({"segment_bytes": 100}, 3, 3),
        ({"segment_bytes": 10**6}, 30, 1),
    ],
)
def test_rolls_by_bytes(
    bench: Make, config: dict[str, int], batches_count: int, segments: int
) -> None:
    b = bench(**config)
    b.fill(batches_count)
    assert b.log.segment_count == segments
    assert b.values() == list(range(batches_count))


def test_rolls_by_age_of_the_first_append(bench: Make) -> None:
    b = bench(segment_ms=1000)
    for now in (NOW, NOW + 999, NOW + 1000, NOW + 1500, NOW + 2000):
        b.append(raw_batch(), now_ms=now)
    assert [s.base_offset for s in b.log.segments] == [0, 2, 4]


def test_rolls_when_asked(bench: Make) -> None:
    b = bench()
    assert not b.log.roll()
    b.append(raw_batch())
    assert b.log.roll()
    assert b.write().rolled
    assert not b.log.roll()
    assert b.log.segment_count == 2


def test_retired_log_refuses(bench: Make) -> None:
    b = bench()
    b.log.retire()
    with pytest.raises(errors.NotLeaderOrFollower):
        b.decide(raw_batch())


# -- failure (rule L2) -----------------------------------------------------------------------------


def test_a_failed_write_undoes_everything_decided_since(bench: Make) -> None:
    b = bench(segment_bytes=400)
    b.append(produced(0, 2), epoch=1)
    before = (b.log.producers.items(), b.log.epochs.entries, b.log.segments)
    b.storage.capacity = b.storage.used_bytes() + 30
    b.decide(produced(2), epoch=2)
    first = b.log.take_writes()
    b.decide(produced(3), epoch=2)
    second = b.log.take_writes()
    b.decide(produced(4), epoch=3)
    assert first is not None
    assert second is not None
    with pytest.raises(errors.StorageFull):
        b.log.perform(first)
    with pytest.raises(errors.StorageFull):
        b.log.perform(second)  # not tried: it would leave a hole
    done = b.log.complete(first, errors.StorageFull("full"))
    assert [a.base_offset for a in done.failed] == [2, 3, 4]
    assert isinstance(done.error, errors.StorageFull)
    assert b.log.complete(second, errors.StorageFull("full")).failed == ()
    assert (b.log.log_end, b.log.written_end, b.log.pending_bytes) == (2, 2, 0)
    assert (b.log.producers.items(), b.log.epochs.entries, b.log.segments) == before
    assert b.log.take_writes() is None
    b.storage.capacity = None
    assert isinstance(b.decide(produced(2, 3), epoch=2), Appended)
    assert b.write().written_end == 5
    assert b.values() == [0, 1, 2, 3, 4]


def test_a_write_that_fails_in_the_middle_leaves_nothing(bench: Make) -> None:
    """The first segment of a plan was written, and the roll to the next one failed."""
    b = bench(segment_bytes=400)
    b.append(raw_batch())
    b.storage.fault = lambda op, path: (
        errors.StorageFull("full") if op == "create" and path.endswith("2.log") else None
    )
    for _ in range(4):
        b.decide(raw_batch())
    assert len(b.write().failed) == 4
    b.storage.fault = None
    assert b.values() == [0]
    b.append(raw_batch(2))
    assert b.values() == [0, 1, 2]
    b.log.close()
    b.open(clean=True)
    assert b.values() == [0, 1, 2]


def test_a_failed_sync_takes_the_directory_offline(bench: Make) -> None:
    b = bench(flush_on_ack=True)
    b.append(raw_batch())
    b.storage.fault = lambda op, path: OSError("I/O error") if op == "sync" else None
    b.decide(raw_batch())
    done = b.write()
    assert isinstance(done.error, errors.StorageFailed)
    assert (done.written_end, done.synced_end) == (1, 1)
    b.storage.fault = None
    with pytest.raises(errors.StorageFailed):
        b.decide(raw_batch())
    assert b.values() == [0]  # reads go on


def test_closing_after_a_failure_cuts_first(bench: Make) -> None:
    b = bench()
    b.append(raw_batch())
    b.storage.fault = lambda op, path: (
        errors.StorageFull("full") if op == "replace" or "epoch" in path else None
    )
    b.decide(raw_batch(), epoch=1)
    assert b.write().failed
    b.storage.fault = None
    b.log.close()
    b.open(clean=True)
    assert (b.log.notes, b.values()) == ((), [0])


# -- flush -----------------------------------------------------------------------------------------


def test_flush_on_ack_syncs_every_plan(bench: Make) -> None:
    b = bench(flush_on_ack=True, segment_bytes=300)
    for end in range(1, 6):
        done = b.append(raw_batch())
        assert (done.written_end, done.synced_end) == (end, end)


def test_flush_messages(bench: Make) -> None:
    b = bench(flush_messages=3)
    assert [b.append(raw_batch()).synced_end for _ in range(7)] == [0, 0, 3, 3, 3, 6, 6]


def test_flush_ms(bench: Make) -> None:
    b = bench(flush_ms=100)
    assert b.log.flush_due_ms() is None
    b.append(raw_batch(default_timestamp=0), now_ms=1000)
    assert b.log.flush_due_ms() == 1100
    assert b.append(raw_batch(default_timestamp=0), now_ms=1099).synced_end == 0
    assert b.append(raw_batch(default_timestamp=0), now_ms=1100).synced_end == 3
    assert b.log.flush_due_ms() is None
    b.append(raw_batch(default_timestamp=0), now_ms=1200)
    assert b.log.flush() == 4
    assert b.log.flush_due_ms() is None
    assert bench().log.flush_due_ms() is None


def test_sealed_segments_are_flushed_beside_the_writer(bench: Make) -> None:
    b = bench(segment_bytes=300)
    b.fill(4)
    assert b.log.synced_end == 0
    b.log.flush_sealed()
    assert b.log.checkpoint() == b.log.segments[-1].base_offset == b.log.synced_end
    b.storage.power_loss()
    b.open(same_boot=False, recovery_point=2)
    assert b.log.written_end >= 2


@pytest.mark.parametrize("retired", [False, True])
def test_a_deleted_log_may_still_be_flushed(bench: Make, retired: bool) -> None:
    """log/manager M3: the directory is renamed while a checkpoint flushes it; the files of a live
    log must exist.
    """
    b = bench(segment_bytes=300)
    b.fill(4)
    if retired:
        b.log.retire()
    b.storage.rename(b.log.path, b.log.path + "-delete")
    if retired:
        b.log.flush_sealed()
        assert b.log.synced_end == 0
    else:
        with pytest.raises(FileNotFoundError):
            b.log.flush_sealed()


# -- read ------------------------------------------------------------------------------------------


def test_batches_are_whole_and_one_is_always_given(bench: Make) -> None:
    b = bench(segment_bytes=10**6)
    b.fill(10, records=2)
    size = len(raw_batch(2))
    for max_bytes, count in (
        (0, 1),
        (1, 1),
        (size, 1),
        (2 * size - 1, 1),
        (2 * size, 2),
        (10**6, 7),
    ):
        read = b.log.read(7, bound=20, max_bytes=max_bytes)
        assert (read.base_offset, read.next_offset) == (6, 6 + 2 * count)
        assert len(read.data) == count * size
    assert b.log.read(7, bound=20, max_bytes=size - 1, min_one_batch=False).empty


def test_nothing_at_or_above_the_bound(bench: Make) -> None:
    b = bench()
    b.fill(10, records=2)
    assert b.log.read(4, bound=8, max_bytes=10**6).next_offset == 8
    for bound in (4, 5):
        read = b.log.read(4, bound=bound, max_bytes=10**6)
        assert (read.data, read.next_offset) == (b"", 4)


def test_out_of_range(bench: Make) -> None:
    b = bench()
    b.fill(5)
    b.log.advance_log_start(2)
    for offset in (-1, 1, 6):
        with pytest.raises(errors.OffsetOutOfRange):
            b.log.read(offset, bound=5, max_bytes=100)
    assert b.log.read(5, bound=9, max_bytes=100).empty


def test_gaps_are_stepped_over(bench: Make) -> None:
    """Compacted data is sparse; `next_offset` covers the gap, so no reader stalls (rule L12)."""
    b = bench(cleanup_policy="compact", segment_bytes=200)
    for base in (0, 5, 20):
        (raw,) = [raw_batch(1)]
        moved = b"".join(batches.patched(raw, base, 0))
        b.log.append_as_follower(batches.check(moved), moved, now_ms=NOW)
        b.write()
    assert [each.base_offset for each in b.log.segments] == [0, 1, 6]  # they join: log/swap W3
    assert b.log.read(1, bound=21, max_bytes=1).base_offset == 5
    assert b.log.read(6, bound=21, max_bytes=1).base_offset == 20
    assert b.log.read(6, bound=15, max_bytes=1) == (b"", 15, 15, -1)
    b.open()
    assert b.values() == [0, 5, 20]
    b.log.flush()
    b.storage.power_loss()  # a gap between segments would count as a lost end
    b.open(same_boot=False)
    assert b.values() == [0, 5, 20]


def test_damaged_sealed_data_is_reported_with_its_place(bench: Make) -> None:
    # rule L9
    b = bench(segment_bytes=300)
    b.fill(4)
    name = "topics/t-0/00000000000000000000.log"
    file = b.storage.open(name)
    good = file.read(0, 10**6)
    file.write_at(150, b"\xff")
    with pytest.raises(errors.CorruptLog, match=r"offsets \[0, 1\)"):
        b.log.read(0, bound=4, max_bytes=10**6, verify=True)
    assert b.log.read(0, bound=4, max_bytes=10**6).data  # a consumer checks by itself
    file.write_at(150, good[150:151])
    file.write_at(16, b"\xff")
    with pytest.raises(errors.CorruptLog):
        b.log.read(0, bound=4, max_bytes=1)
    file.write_at(16, good[16:17])
    file.write_at(0, b"\x02")  # the batch at offset 0 claims offset 2, which no checksum covers
    for offset, bound in ((0, 4), (0, 2)):
        with pytest.raises(errors.CorruptLog, match=r"offsets \[0, 1\) .* offset 2 instead of 0"):
            b.log.read(offset, bound=bound, max_bytes=1)
    file.write_at(0, good[:1])
    b.storage.remove(name)
    with pytest.raises(errors.CorruptLog, match="missing"):
        b.log.read(0, bound=4, max_bytes=10**6)
    # the topic was deleted: its readers are refused, and nothing is reported damaged
    b.log.retire()
    with pytest.raises(errors.NotLeaderOrFollower):
        b.log.read(0, bound=4, max_bytes=10**6)


def test_a_batch_that_says_it_reaches_beyond_the_bound_is_looked_at(bench: Make) -> None:
    """Rule L9: otherwise a reader in front of the batch would wait without an end."""
    b = bench(segment_bytes=10**6)
    b.fill(4)
    at = len(b.log.read(0, bound=4, max_bytes=1).data) + 30  # its last offset delta
    file = b.storage.open("topics/t-0/00000000000000000000.log")
    assert b.log.read(1, bound=4, max_bytes=1).data
    file.write_at(at, b"\x01")
    says = r"0\.log at \d+: offsets \[1, 2\) are damaged: no batch begins here"
    with pytest.raises(errors.CorruptLog, match=says):
        b.log.read(1, bound=4, max_bytes=1)


def test_a_batch_that_rotted_into_a_marker_is_damage(bench: Make) -> None:
    """Rule L9: rebuilding the producer state meets the damage; another replica must take over."""
    b = bench()
    for sequence in range(3):
        b.append(produced(sequence))
    b.log.close(clean=True)
    name = "topics/t-0/00000000000000000000.log"
    file = b.storage.open(name)
    raw = file.read(0, 10**6)
    begin = len(raw) // 3
    marker = next(
        (position, bit)
        for position in range(begin + batches.CRC_START, begin + batches.HEADER_BYTES)
        for bit in range(8)
        if batches.read_header(_flipped(raw, position, bit)[begin:]).control
    )
    file.write_at(0, _flipped(raw, *marker))
    for each in b.storage.list("topics/t-0"):
        if each.endswith(".snapshot"):
            b.storage.remove(f"topics/t-0/{each}")
    with pytest.raises(errors.CorruptLog, match=r"offsets \[1, 2\) are damaged"):
        b.open(clean=True)


def _flipped(raw: bytes, position: int, bit: int) -> bytes:
    found = bytearray(raw)
    found[position] ^= 1 << bit
    return bytes(found)


@pytest.mark.parametrize("suffix", [".index", ".timeindex", ".txnindex", ".snapshot"])
@pytest.mark.parametrize("damage", ["missing", "torn", "flipped", "foreign"])
def test_derived_files_are_only_a_help(bench: Make, suffix: str, damage: str) -> None:
    b = bench(segment_bytes=1000)
    for number in range(40):
        b.append(produced(number, default_timestamp=NOW + number))
    b.log.close()
    (_, expected), *_ = b.log.producers.items()
    for name in b.storage.list("topics/t-0"):
        if not name.endswith(suffix):
            continue
        path = f"topics/t-0/{name}"
        raw = b.storage.read_file(path)
        b.storage.remove(path)
        if damage != "missing":
            changed = {
                "torn": raw[: len(raw) // 2],
                "flipped": raw[:-1] + bytes([raw[-1] ^ 1]) if raw else b"",
                "foreign": raw.replace(b"pk", b"kp"),
            }[damage]
            b.storage.open(path, create=True).append([changed])
    b.open(clean=True, recovery_point=40)
    assert b.log.producers.get(9) == expected
    assert b.values() == list(range(40))
    assert b.log.offset_for_time(NOW + 17, 40) == (17, NOW + 17, 0)
    assert b.log.bytes_at([40]) == [b.log.size_bytes]
    for name in b.storage.list("topics/t-0"):
        if name.endswith(".txnindex"):  # a damaged one is not kept
            assert aborted.decode(b.storage.read_file(f"topics/t-0/{name}")) == []


def test_index_cache_is_bounded(bench: Make) -> None:
    cache = IndexCache(bytes_max=100)
    b = bench(segment_bytes=1500, index_interval_bytes=1)
    b.log.close()
    b.open(clean=True, cache=cache)
    b.fill(60)
    for start in (0, 30, 10, 50, 0):
        assert b.values(start) == list(range(start, 60))
    assert sum(each.nbytes() for each in cache._entries.values()) <= 200


# -- look-ups --------------------------------------------------------------------------------------


def test_offset_for_time(bench: Make) -> None:
    b = bench()
    for number in range(30):
        b.append(
            b"".join(
                columns.encode_lists(
                    [b"x" * 50] * 2, timestamps=[NOW + 10 * number, NOW + 10 * number + 5]
                )
            )
        )
    assert b.log.offset_for_time(0, 60) == (0, NOW, 0)
    assert b.log.offset_for_time(NOW + 101, 60) == (21, NOW + 105, 0)
    assert b.log.offset_for_time(NOW + 105, 60) == (21, NOW + 105, 0)
    assert b.log.offset_for_time(NOW + 296, 60) is None
    assert b.log.offset_for_time(NOW + 105, 21) is None
    b.log.advance_log_start(31)
    assert b.log.offset_for_time(0, 60) == (31, NOW + 155, 0)
    assert b.log.offset_of_max_timestamp(60) == (59, NOW + 295, 0)
    assert bench().log.offset_of_max_timestamp(0) is None


def test_time_search_with_late_records(bench: Make) -> None:
    """Timestamps need not grow: the result is the first offset, in offset order, with a timestamp
    at least as large.
    """
    b = bench(segment_bytes=500)
    stamps = [50, 10, 90, 20, 30, 100, 40, 5]
    for stamp in stamps:
        b.append(raw_batch(default_timestamp=NOW + stamp))
    for asked in range(0, 101, 5):
        found = b.log.offset_for_time(NOW + asked, 8)
        assert found is not None
        assert found.offset == next(o for o, stamp in enumerate(stamps) if stamp >= asked)


def test_bytes_at_offsets(bench: Make) -> None:
    b = bench(segment_bytes=1000)
    b.fill(40)
    size = len(raw_batch())
    found = b.log.bytes_at(range(41))
    assert found == sorted(found)
    assert found[0] == 0
    assert found[40] == b.log.size_bytes == 40 * size
    assert all(offset * size - 500 < at <= offset * size for offset, at in enumerate(found))
    samples = b.log.sample_offsets(5, 35, 6)
    assert len(samples) == 6
    assert samples[0] == (5, 0)
    assert samples[-1][0] == 35
    assert samples == sorted(samples)
    assert b.log.sample_offsets(7, 7, 5) == [(7, 0)]
    assert len(b.log.sample_offsets(0, 40, 1000)) > 10


# -- transactions ----------------------------------------------------------------------------------


def test_open_transactions_hold_the_lso_and_aborts_are_indexed(bench: Make) -> None:
    b = bench(segment_bytes=300)

    def transactional(producer_id: int, sequence: int) -> bytes:
        return raw_batch(
            producer_id=producer_id, producer_epoch=0, base_sequence=sequence, transactional=True
        )

    one, two = TRANSACTIONAL + 1, TRANSACTIONAL + 2
    for producer_id, sequence in ((one, 0), (two, 0), (one, 1)):
        b.decide(transactional(producer_id, sequence))
        b.write()
    assert b.log.last_stable_offset(3) == 0
    marker = b"".join(
        control_rows.encode_markers([Marker(one, 1, False), Marker(two, 1, True)], NOW)
    )
    b.decide(marker, from_client=False)
    b.write()
    assert b.log.last_stable_offset(4) == 0  # the control batch holds offsets 3 and 4
    assert b.log.last_stable_offset(5) == 5
    expected = [AbortedTransaction(one, 0, 4)]
    for life in range(3):
        assert b.log.aborted_in(0, 4).transactions == expected
        assert b.log.aborted_in(2, 3).transactions == expected
        assert b.log.aborted_in(5, 9).transactions == []
        assert [p.epoch for _, p in b.log.producers.items()] == [1, 1]
        b.log.close(clean=life == 0)
        b.open(clean=life == 0, recovery_point=b.log.synced_end)
