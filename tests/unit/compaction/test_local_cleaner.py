"""The runner of a local log: what it reads, writes and leaves alone (compaction/local_cleaner)."""

from __future__ import annotations

import json

import pytest

from pk import errors
from pk.compaction import cleaning_job, local_cleaner
from pk.compaction.offset_map import ENTRY_BYTES
from pk.log import batch as batches
from pk.log.batch_cache import BatchCache
from pk.log.segment import SNAPSHOT
from tests.kit.cleaned_log import PATH, CleanedLog, Record


def written(count: int = 30) -> CleanedLog:
    log = CleanedLog()
    for n in range(count):
        log.write(1, [(b"a", b"%d" % n), (b"k%d" % (n % 3), b"v" * 50)])
    log.roll()
    return log


def test_superseded_records_go_and_small_segments_are_merged() -> None:
    log = written()
    before, size = log.log.segment_count, log.log.size_bytes
    result = log.clean()
    assert result.end == log.log.log_end == log.log.cleaned.end
    assert log.log.segment_count < before
    assert log.log.size_bytes < size / 2
    assert [each.key for each in log.records()] == [b"k0", b"k1", b"a", b"k2"]
    assert result.superseded == 60 - 4
    log.check()


def test_a_cleaned_log_is_not_written_again() -> None:
    """compaction/local_cleaner N5: once small segments are merged, a repetition writes nothing."""
    log = written()
    for _ in range(4):
        log.clean()
    files = log.storage.files()
    result = log.written(log.job())
    assert (result.segments, result.bytes_written) == ([], 0)
    assert log.storage.files() == files


def test_batches_keep_their_range_producer_and_codec() -> None:
    """compaction/local_cleaner N1: the header of a batch changes only in its rows."""
    log = CleanedLog()
    log.write(1, [(b"a", b"1"), (b"b", b"2"), (b"c", b"3")])
    log.write(2, [(b"b", b"4"), (b"d", b"5")])
    log.roll()
    (before, _) = (batches.read_header(raw) for raw in log.raw())
    log.clean()
    (after, _) = (batches.read_header(raw) for raw in log.raw())
    same = ("base_offset", "last_offset", "leader_epoch", "codec", "producer_id", "producer_epoch")
    for name in (*same, "base_sequence", "max_timestamp"):
        assert getattr(after, name) == getattr(before, name), name
    assert (after.record_count, after.sparse) == (2, True)
    assert log.records()[:2] == [Record(0, b"a", b"1"), Record(2, b"c", b"3")]


def test_the_last_batch_of_a_segment_stays_as_an_empty_header() -> None:
    """compaction/local_cleaner N2: segments join, although nothing else needs the batch."""
    log = CleanedLog(segment_bytes=200)
    for _ in range(8):
        log.write(0, [(b"a", b"v" * 100)])
    log.roll()
    log.clean()
    log.check()
    headers = [batches.read_header(raw) for raw in log.raw()]
    assert [header.record_count for header in headers if not header.record_count]
    assert log.log.segments[-1].base_offset == 8


def test_rows_of_log_append_time_keep_their_time() -> None:
    log = CleanedLog(message_timestamp_type="LogAppendTime")
    for n in range(3):
        log.now_ms += 1000
        log.write(1, [(b"a", None), (b"k%d" % n, b"1")])
    log.roll()
    before = log.log.offset_for_time(log.now_ms, 100)
    log.clean()
    assert log.log.offset_for_time(log.now_ms, 100) == before
    assert log.log.offset_of_max_timestamp(100) == before
    tombstone = [batches.read_header(raw) for raw in log.raw()][-1]
    assert tombstone.has_delete_horizon
    assert tombstone.max_timestamp == log.now_ms


def test_the_largest_timestamp_may_be_that_of_a_removed_record() -> None:
    log = CleanedLog()
    log.write(0, [(b"b", b"1")])
    log.now_ms += 1000
    log.write(1, [(b"a", b"1")])
    log.now_ms -= 500
    log.write(2, [(b"a", b"2")])
    log.roll()
    log.clean()
    found = log.log.offset_of_max_timestamp(100)
    assert found is not None
    assert found.offset == 2


def test_a_tombstone_goes_after_its_horizon() -> None:
    log = CleanedLog()
    log.write(0, [(b"a", b"1"), (b"b", b"1")])
    log.write(0, [(b"a", None)])
    log.write(0, [(b"c", b"1")])
    log.roll()
    job = log.job()
    assert job.cleaning.deadline_ms is not None
    log.put_in_place(job, log.written(job))
    assert [each.offset for each in log.records()] == [1, 2, 3]
    log.now_ms = job.cleaning.new_horizon
    log.clean()
    assert [each.offset for each in log.records()] == [1, 2, 3]
    log.now_ms += 1
    assert log.clean(settled_end=2).tombstones == 0
    assert log.clean(clock=False).tombstones == 0
    assert log.clean().tombstones == 1
    assert [each.offset for each in log.records()] == [1, 3]


def test_aborted_records_go_and_their_entry_stays_with_the_marker() -> None:
    """compaction/local_cleaner N3: a reader may ask for the entry after the swap."""
    log = CleanedLog()
    log.write(3, [(b"a", b"aborted")])
    log.finish(3, commit=False)
    log.write(0, [(b"b", b"1")])
    log.roll()
    entries = log.log.aborted_in(0, 100).transactions
    assert log.clean().aborted == 1
    assert [each.key for each in log.records()] == [b"b"]
    assert log.log.aborted_in(0, 100).transactions == entries != []
    log.reopen()
    assert log.log.aborted_in(0, 100).transactions == entries


def test_a_full_map_ends_the_cleaning_early() -> None:
    log = written()
    result = log.clean(memory=3 * (ENTRY_BYTES + 2))
    assert 0 < result.end < log.log.log_end
    log.check()
    ends = [result.end]
    while ends[-1] < log.log.log_end:
        ends.append(log.clean(memory=3 * (ENTRY_BYTES + 2)).end)
        log.check()
    assert len(ends) > 2


def test_damage_ends_the_cleaning() -> None:
    """compaction/local_cleaner N6, L9: nothing is replaced."""
    log = written()
    name = f"{PATH}/{0:020d}.log"
    log.storage.rot(name, 100, 3)
    with pytest.raises(errors.CorruptLog, match="checksum"):
        log.written(log.job())
    assert log.log.cleaned.end == 0


def test_large_batches_and_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, small = written(), written()
    whole.clean()
    monkeypatch.setattr(local_cleaner, "BLOCK_BYTES", 100)
    monkeypatch.setattr(local_cleaner, "DECODED_BLOCK_BYTES", 1)
    small.clean()
    assert small.raw() == whole.raw()


def test_a_job_and_its_result_survive_the_pipe() -> None:
    log = written()
    log.write(3, [(b"a", b"1")])
    log.finish(3, commit=False)
    log.roll()
    job = log.job()
    again = cleaning_job.job_from_json(cleaning_job.job_to_json(job))
    for name in job._fields:
        if name != "producer_ids":
            assert getattr(again, name) == getattr(job, name), name
    assert job.producer_ids.size
    assert again.producer_ids.tolist() == job.producer_ids.tolist()
    result = log.written(job)
    line = cleaning_job.result_to_json(result)
    assert cleaning_job.result_from_json(json.loads(line)) == result


def test_an_aborted_record_stays_aborted_whatever_else_its_marker_ends() -> None:
    """compaction/local_cleaner N3: a control batch of two markers has the entries of both."""
    log = CleanedLog()
    log.write(0, [(b"p", b"committed")])
    log.write(0, [(b"a", b"old")])
    log.write(0, [(b"a", b"new")])
    log.write(1, [(b"b", b"1")])
    log.write(3, [(b"p", b"aborted")])
    log.write(4, [(b"q", b"aborted")])
    log.finish(3, 4, commit=False)
    log.roll()
    log.write(0, [(b"tail", b"1")])
    before = log.log.aborted_in(0, log.log.written_end).transactions
    log.clean(settled_end=0)
    assert log.log.aborted_in(0, log.log.written_end).transactions == before
    assert len(before) == 2
    log.check()


def test_the_first_batch_of_a_leader_epoch_stays_as_an_empty_header() -> None:
    """compaction/local_cleaner N7: a copy of the log knows where each epoch began."""
    log = CleanedLog()
    for epoch in (1, 2, 3):
        log.leader_epoch = epoch
        for n in range(5):
            log.write(0, [(b"a", b"%d" % n), (b"b%d" % epoch, b"v")])
    log.roll()
    log.write(0, [(b"tail", b"1")])
    log.clean()
    assert log.copied_epochs() == [(1, 0), (2, 10), (3, 20)]
    log.check()


def test_the_recent_batches_in_memory_end_with_a_swap() -> None:
    """log/batch_cache K2: what the cache has may lack the tombstone that was removed."""
    log = CleanedLog()
    log.log.recent = BatchCache(1 << 20)
    for n in range(5):
        log.write(0, [(b"a", b"%d" % n)])
    log.roll()
    end = log.log.written_end
    assert log.log.read_recent(0, bound=end, max_bytes=1 << 20) is not None
    log.clean()
    assert log.log.read_recent(0, bound=end, max_bytes=1 << 20) is None


@pytest.mark.parametrize("snapshots", [True, False])
def test_the_windows_of_producers_are_those_at_the_end_of_the_cleaning(snapshots: bool) -> None:
    """compaction/local_cleaner N8: a cut takes the batches above, and the producer sends again."""
    log = CleanedLog()
    log.write(1, [(b"a", b"last below the end")])
    log.write(0, [(b"a", b"new")])
    log.write(0, [(b"b", b"the last batch of the segment stays")])
    log.roll()
    for n in range(6):
        log.write(1, [(b"c", b"%d" % n)])
    if not snapshots:
        for name in log.storage.names(PATH):
            if name.endswith(SNAPSHOT):
                log.storage.remove(f"{PATH}/{name}")
    log.clean()
    headers = [batches.read_header(raw) for raw in log.raw(0)]
    assert [(h.base_offset, h.record_count) for h in headers[:2]] == [(0, 0), (1, 1)]
    assert headers[0].producer_id == 1


def test_a_producer_that_the_log_forgot_has_no_window() -> None:
    """compaction/local_cleaner N8: an empty header would stay for each producer for ever."""
    log = CleanedLog()
    log.write(0, [(b"b", b"the first batch of the epoch stays")])
    log.write(1, [(b"a", b"old")])
    log.write(0, [(b"a", b"new")])
    log.roll()
    log.write(0, [(b"tail", b"1")])
    log.log.producers.expire(log.now_ms + 1, 0)
    log.clean()
    assert [batches.read_header(raw).base_offset for raw in log.raw(0)] == [0, 2, 3]


def test_a_job_lists_the_producers_without_their_state() -> None:
    """A log may know 100,000 producers, and the event loop makes the job."""
    log = written()
    log.roll()
    log.log.producers.items = None  # type: ignore[method-assign, assignment]
    assert sorted(log.job().producer_ids.tolist()) == sorted(log.log.producers.ids())


def test_horizons_are_set_by_the_latest_clock_and_compared_with_the_earliest() -> None:
    """Rule C4: the median of an even number of clocks lies between two of them."""
    log = written()
    narrow, wide = log.job().cleaning, log.job(spread_ms=55_000).cleaning
    assert wide.now_ms == narrow.now_ms == log.now_ms
    assert wide.new_horizon == narrow.new_horizon + 55_000
