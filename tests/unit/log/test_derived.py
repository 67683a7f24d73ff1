"""The files derived from a log never state more, or less, than its records do, whatever failed."""

from __future__ import annotations

import copy
import random

import pytest

from pk import errors
from pk.log import batch as batches
from pk.log import closed_logs, loading
from pk.log.control_rows import Marker, encode_markers
from pk.log.producers import ProducerStateEntry
from pk.transactional_ids import TRANSACTIONAL
from pk.types import AbortedTransaction
from tests.unit.log.conftest import NOW, Bench, make_batch

PATH = "topics/t-0"


def _by(producer: int, sequence: int) -> bytes:
    return make_batch(1, 100, producer_id=producer, producer_epoch=0, base_sequence=sequence)


def _bench() -> Bench:
    """Return a bench whose directory keeps its name."""
    bench = Bench()
    bench.storage.sync_dir("")
    bench.storage.sync_dir("topics")
    return bench


def _known(bench: Bench) -> dict[int, ProducerStateEntry]:
    return dict(bench.log.producers.items())


def _told_by_records(bench: Bench) -> dict[int, ProducerStateEntry]:
    """Return the producers, read from the records alone."""
    twin = Bench(copy.deepcopy(bench.storage))
    for at in loading.snapshots(twin.storage, PATH):
        twin.storage.remove(f"{PATH}/{at:020}.snapshot")
    twin.open()
    return _known(twin)


@pytest.mark.parametrize("full", [".index", ".timeindex", "003.snapshot", "003.log"])
def test_a_roll_that_fails_leaves_no_snapshot(full: str) -> None:
    """log/loading O8: the snapshot knows batches that were refused, and their retries would be
    taken for duplicates.
    """
    bench = Bench()
    bench.append(_by(1, 0))
    bench.storage.fault = lambda operation, path: (
        errors.StorageFull("full") if operation != "read" and path.endswith(full) else None
    )
    bench.decide(_by(1, 1))
    bench.decide(_by(1, 2))
    bench.log.roll()
    bench.decide(_by(1, 3))
    assert isinstance(bench.write().error, errors.StorageFull)
    bench.storage.fault = None
    for sequence in range(4):
        bench.append(_by(2, sequence))
    before = _known(bench)
    bench.storage.crash()
    bench.open()
    assert bench.log.written_end == 5
    assert _known(bench) == before == _told_by_records(bench)


def test_a_snapshot_of_what_a_power_loss_took_never_comes_back() -> None:
    """log/loading O8: other records are appended below it, and the power is lost again."""
    lost = 0
    for seed in range(150):
        rng = random.Random(seed)
        bench = _bench()
        for sequence in range(6):
            bench.append(_by(1, sequence))
            if sequence == 1:
                bench.log.flush()
            if sequence == 3:
                bench.log.roll()
        bench.storage.power_loss(rng)
        bench.open(same_boot=False)
        lost += bench.log.written_end < 4
        for sequence in range(6):
            bench.append(_by(2, sequence))
        bench.log.flush()
        bench.storage.power_loss(rng)
        bench.open(same_boot=False)
        assert _known(bench) == _told_by_records(bench), seed
    assert lost > 20


def _aborted(bench: Bench) -> list[AbortedTransaction]:
    """Append one aborted transaction, which ends in the active segment."""
    producer = {"producer_id": TRANSACTIONAL, "producer_epoch": 0, "base_sequence": 0}
    raw = make_batch(3, **producer, transactional=True)
    bench.log.decide(batches.check(raw), raw, leader_epoch=0, now_ms=NOW)
    marker = b"".join(encode_markers([Marker(TRANSACTIONAL, 1, False)], NOW))
    bench.decide(marker, from_client=False)
    bench.write()
    return [AbortedTransaction(TRANSACTIONAL, 0, 3)]


def test_aborted_transactions_are_known_after_a_scan() -> None:
    """log/loading O7: this includes those of sealed segments, and an index exists again."""
    bench = Bench()
    expected = _aborted(bench)
    bench.log.roll()
    bench.fill(2)
    for life in range(4):
        bench.storage.crash()
        if life == 2:
            bench.storage.remove(f"{PATH}/{0:020}.txnindex")
        bench.open()
        assert bench.log.segment_count == 2
        assert bench.log.aborted_in(0, 3).transactions == expected
        assert bench.storage.exists(f"{PATH}/{0:020}.txnindex")


def test_aborted_transactions_are_known_after_a_death_in_a_roll(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An older index looks as whole as the newest."""
    monkeypatch.setattr(closed_logs, "WALKED_MAX", -1)  # a checkpoint writes indexes
    for step in range(24):
        bench = Bench()
        bench.log.checkpoint()  # an index without any
        expected = _aborted(bench)
        bench.log.roll()
        bench.decide(make_batch(1))
        steps = 0

        def dies(operation: str, path: str, step: int = step) -> Exception | None:
            nonlocal steps
            steps += 1
            return errors.StorageFull("it died") if steps > step else None

        bench.storage.fault = dies
        bench.write()
        bench.storage.fault = None
        bench.storage.crash()
        bench.open(recovery_point=4)
        assert bench.log.aborted_in(0, 3).transactions == expected, step


def test_aborted_transactions_are_known_after_a_power_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older index had reached the disk without a sync; it must not replace the newest."""
    monkeypatch.setattr(closed_logs, "WALKED_MAX", -1)  # a checkpoint writes indexes
    older = 0
    for seed in range(100):
        rng = random.Random(seed)
        bench = _bench()
        bench.log.checkpoint()  # an index without any
        bench.storage.power_loss(rng)
        bench.open(same_boot=False)
        older += bench.storage.exists(f"{PATH}/{0:020}.txnindex")
        expected = _aborted(bench)
        bench.log.roll()
        bench.append(make_batch(1))
        bench.log.flush()
        bench.storage.power_loss(rng)
        bench.open(same_boot=False, recovery_point=4)
        assert bench.log.aborted_in(0, 3).transactions == expected, seed
    assert older > 20


def test_a_roll_that_fails_leaves_no_index() -> None:
    """The index covers batches that were refused.  If the next index is lost with the power, the
    old one would come back, cover more than the log (recovery.py: D), and its aborted transactions
    would hide committed records.
    """
    bench = Bench()
    bench.append(make_batch(1, 100))
    bench.storage.fault = lambda operation, path: (
        errors.StorageFull("full") if operation != "read" and path.endswith("03.log") else None
    )
    for _ in range(2):
        bench.decide(make_batch(1, 300))
    bench.log.roll()
    bench.decide(make_batch(1, 100))
    assert isinstance(bench.write().error, errors.StorageFull)
    bench.storage.fault = None
    bench.append(make_batch(1, 50))
    left = {
        name: bench.storage.peek(f"{PATH}/{name}")
        for name in bench.storage.names(PATH)
        if "index" in name
    }
    bench.log.roll()
    bench.append(make_batch(1, 50))
    bench.log.flush()
    point = bench.log.checkpoint()
    for name, raw in left.items():
        bench.storage.replace_file(f"{PATH}/{name}", raw)
    bench.storage.crash()
    assert bench.open(recovery_point=point).written_end == 3
