"""Files that a power loss, a full disk or a process death left beside a log never replace its
content.
"""

from __future__ import annotations

import random

import pytest

from pk import errors
from pk.log.control_rows import Marker, encode_markers
from pk.log.producers import Producers
from pk.sim.disk import Crashed, SimStorage
from pk.transactional_ids import TRANSACTIONAL
from tests.unit.log.conftest import Bench, make_batch

PATH = "topics/t-0"


def _durable(bench: Bench) -> None:
    """Make everything SYNCED, as the write-back of a machine may do at any time."""
    for name in bench.storage.names(PATH):
        bench.storage.open(f"{PATH}/{name}").sync()
    for path in ("", "topics", PATH):
        bench.storage.sync_dir(path)


def _file(base: int, suffix: str = "log") -> str:
    return f"{PATH}/{base:020}.{suffix}"


def _full(bench: Bench, suffix: str) -> None:
    bench.storage.fault = lambda operation, path: (
        errors.StorageFull("full") if operation != "read" and path.endswith(suffix) else None
    )


def _refused(bench: Bench) -> None:
    """Append a batch that reaches the file, in a plan that fails behind it."""
    _full(bench, f"{bench.log.log_end + 1:020}.log")
    bench.decide(make_batch(1, 100))
    bench.log.roll()
    bench.decide(make_batch(1, 100))
    assert isinstance(bench.write().error, errors.StorageFull)
    bench.storage.fault = None


def test_what_a_repair_cuts_no_power_loss_brings_back() -> None:
    """log/loading O9: other replicas have another batch of the same epoch there, and no comparison
    would ever show the difference.
    """
    for seed in range(30):
        bench = Bench()
        bench.append(make_batch(1, 10))
        kept = bench.storage.peek(_file(0))
        _refused(bench)
        refused = bench.storage.peek(_file(0))
        assert len(refused) > len(kept)
        _durable(bench)
        bench.append(make_batch(1, 10))  # the repair is performed first
        assert "cut" not in bench.storage.names(PATH)
        bench.storage.power_loss(random.Random(seed))
        assert not bench.storage.peek(_file(0)).startswith(refused)
        assert bench.storage.peek(_file(0)).startswith(kept)


@pytest.mark.parametrize("how", ["cut", "repair"])
def test_who_finds_a_cut_half_way_makes_it_last(how: str) -> None:
    """log/loading O9: the process dies at any write of a truncation, another process continues it,
    and the power is lost.
    """
    brought_back = points = 0
    for point in range(180):  # each several times: the last write may have been made, or not
        bench = Bench(SimStorage(rng=random.Random(point)))
        bench.append(make_batch(1, 10))
        if how == "cut":
            bench.append(make_batch(1, 100))
        else:
            _refused(bench)
        _durable(bench)
        bench.storage.crash_at = point // 12
        try:
            if how == "cut":
                bench.log.truncate_to(1)
            else:
                bench.append(make_batch(1, 10))
        except Crashed:
            points += 1
        else:
            bench.storage.crash_at = None
            continue
        bench.storage.crash()
        bench.open()
        if bench.log.written_end != 1:
            continue
        size = len(bench.storage.peek(_file(0)))
        bench.storage.power_loss(random.Random(point))
        brought_back += len(bench.storage.peek(_file(0))) > size
    assert points > 3
    assert not brought_back
    bench.storage.crash()
    bench.open()
    assert "cut" not in bench.storage.names(PATH)


def test_an_index_that_did_not_fit_does_not_come_back() -> None:
    """Beside data that is trusted by then, the index would make data look missing."""
    bench = Bench()
    bench.append(make_batch(1, 10))
    for _ in range(2):
        bench.append(make_batch(1, 300))
    bench.log.roll()
    bench.append(make_batch(1, 10))
    _durable(bench)
    bench.storage.open(_file(0)).truncate(74 + 4)  # the power loss left the first batch
    for name in bench.storage.names(PATH):
        if name.startswith("0" * 19 + "3"):
            bench.storage.remove(f"{PATH}/{name}")
    _durable(bench)
    bench.storage.crash()
    bench.open(same_boot=False)
    assert bench.log.written_end == 1
    assert not any(name.endswith((".index", ".timeindex")) for name in bench.storage.names(PATH))


def test_aborted_transactions_that_a_power_loss_took_leave_their_index() -> None:
    """log/loading O8: the index is SYNCED and its batches were not; records committed there later
    are not aborted.
    """

    def by(sequence: int) -> bytes:
        producer = {"producer_id": TRANSACTIONAL, "producer_epoch": 0}
        return make_batch(1, 10, **producer, base_sequence=sequence, transactional=True)

    bench = Bench()
    bench.append(make_batch(1, 10))
    bench.log.flush()
    size = bench.storage.open(_file(0)).size()
    bench.decide(by(0))
    marker = b"".join(encode_markers([Marker(TRANSACTIONAL, 1, False)], 5))
    bench.decide(marker, from_client=False)
    bench.log.roll()
    bench.append(make_batch(1, 10))
    bench.storage.open(_file(0)).truncate(size)
    bench.storage.remove(_file(3))
    bench.storage.remove(_file(3, "snapshot"))
    snapshot = bench.storage.open(_file(1, "snapshot"), create=True)
    snapshot.append([Producers().snapshot(1)])
    bench.storage.crash()
    bench.open(same_boot=False)
    assert bench.log.written_end == 1
    assert bench.log.aborted_in(0, 99).transactions == []
    bench.storage.crash()
    assert bench.open().aborted_in(0, 99).transactions == []


def test_a_snapshot_from_below_the_first_segment_is_not_gone_by() -> None:
    """It does not know the batches that retention has deleted since: a late retry would be stored
    again.
    """

    def by(sequence: int) -> bytes:
        return make_batch(1, 10, producer_id=1, producer_epoch=0, base_sequence=sequence)

    bench = Bench()
    bench.append(by(0))
    bench.log.close()
    bench.open(clean=True)  # and a snapshot within a segment stays
    bench.append(by(1))
    bench.log.roll()
    bench.append(make_batch(1, 10))
    bench.log.advance_log_start(2)
    for job in bench.log.drop_segments(bench.log.retention_plan(0)):
        job()
    bench.storage.open(_file(2, "snapshot")).truncate(0)  # a power loss
    bench.storage.crash()
    bench.open(same_boot=False, log_start=2)
    assert (bench.log.local_log_start, bench.log.written_end) == (2, 3)
    assert bench.log.producers.get(1) is None


def test_who_dies_while_a_shortened_log_begins_anew_is_not_damaged() -> None:
    """Retention deleted the records below; the log start shows that no flushed record is
    missing.
    """
    died = 0
    for point in range(60):
        bench = Bench()
        bench.fill(30)
        bench.log.flush()
        bench.log.advance_log_start(25)
        for job in bench.log.drop_segments(bench.log.retention_plan(0)):
            job()
        local = bench.log.segments[0].base_offset
        assert 0 < local < 26
        snapshot = Producers().snapshot(40)
        bench.log.keep_snapshot(40, snapshot)
        bench.storage.crash_at = point
        try:
            bench.log.reset_to(40, snapshot)
        except Crashed:
            died += 1
        else:
            break
        bench.storage.crash()
        bench.open(recovery_point=local, log_start=40)
        assert (bench.log.written_end, bench.log.blank) == (40, False)
    assert died > 5


def test_a_snapshot_for_a_beginning_that_failed_is_not_gone_by() -> None:
    """log/loading O8: the log continues past the snapshot, which does not know the records appended
    below it.
    """

    def by(sequence: int) -> bytes:
        return make_batch(1, 10, producer_id=1, producer_epoch=0, base_sequence=sequence)

    bench = Bench()
    bench.append(by(0))
    snapshot = Producers().snapshot(3)
    bench.log.keep_snapshot(3, snapshot)
    _full(bench, f"{3:020}.snapshot.tmp")
    with pytest.raises(errors.StorageFull):
        bench.log.reset_to(3, snapshot)
    bench.storage.fault = None
    assert not bench.log.torn
    for sequence in range(1, 5):
        bench.append(by(sequence))
    before = bench.log.producers.items()
    bench.storage.crash()
    bench.open()
    assert [p.batches for _, p in bench.log.producers.items()] == [p.batches for _, p in before]
