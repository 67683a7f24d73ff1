"""Producer state: window, undo, transactions and the last stable offset, snapshots."""

from __future__ import annotations

import random

import pytest

from pk.log import batch, producers
from pk.log.batch import Header
from pk.log.control_rows import Marker
from pk.log.producers import Producers, Undo


def head(
    producer_id: int = 1, sequence: int = 0, epoch: int = 0, count: int = 1, txn: bool = False
) -> Header:
    flags = batch.VALUE | (batch.TRANSACTIONAL if txn else 0)
    return Header(
        0, 100, 0, batch.MAGIC, 0, flags, epoch, count - 1, 0, 0, producer_id, sequence, count
    )


CONTROL = Header(
    0, 100, 0, batch.MAGIC, 0, batch.CONTROL | batch.TRANSACTIONAL, -1, 0, 0, 0, -1, -1, 1
)


def test_the_window_holds_five() -> None:
    state = Producers()
    for number in range(7):
        state.apply(head(sequence=number), 10 + number, 0)
    known = state.get(1)
    assert known is not None
    assert [span.base_sequence for span in known.batches] == [2, 3, 4, 5, 6]
    assert known.last_sequence == 6


def test_the_newest_append_is_known_while_another_thread_forgets_producers() -> None:
    state = Producers()
    for number in range(3):
        state.apply(head(producer_id=number), 10 + number, 5)

    class Expiring:
        """A dictionary: while one producer is looked up, the loop has just removed another one."""

        @property
        def last_ms(self) -> int:
            state._by_id.pop(2, None)
            return 4

    state._by_id[0] = Expiring()  # type: ignore[assignment]
    assert state.newest_ms == 5


def test_a_new_epoch_starts_a_new_window() -> None:
    state = Producers()
    state.apply(head(sequence=5), 0, 0)
    state.apply(head(epoch=1), 1, 0)
    known = state.get(1)
    assert known is not None
    assert (known.epoch, [span.base_offset for span in known.batches]) == (1, [1])


def test_without_a_producer_id_nothing_is_kept() -> None:
    state = Producers()
    assert state.apply(head(producer_id=-1, sequence=-1), 0, 0) == Undo(0, (), None)
    assert len(state) == 0


def test_lso_follows_open_and_unstable_transactions() -> None:
    # rule L11
    state = Producers()
    assert state.last_stable_offset(50) == 50
    state.apply(head(1, txn=True), 10, 0)
    state.apply(head(2, txn=True), 20, 0)
    assert state.last_stable_offset(30) == 10
    assert state.last_stable_offset(5) == 5
    state.apply(CONTROL, 30, 0, [Marker(1, 1, True)])
    assert state.last_stable_offset(30) == 10  # the marker is not below the high watermark yet
    assert state.last_stable_offset(31) == 20
    undo = state.apply(CONTROL, 40, 0, [Marker(2, 1, False)])
    assert [(a.producer_id, a.first_offset, a.last_offset) for a in undo.aborted] == [(2, 20, 40)]
    assert state.last_stable_offset(40) == 20
    assert state.last_stable_offset(41) == 41
    assert state.open_transactions == {}


def test_one_control_batch_ends_many() -> None:
    # rule X5
    state = Producers()
    for number in (1, 2, 3):
        state.apply(head(number, txn=True), number, 0)
    undo = state.apply(
        CONTROL, 9, 0, [Marker(1, 1, False), Marker(2, 1, True), Marker(3, 1, False)]
    )
    assert [a.producer_id for a in undo.aborted] == [1, 3]
    assert undo.aborted[0].last_stable_offset == 2
    two = state.get(2)
    assert two is not None
    assert (two.epoch, two.batches) == (
        1,
        (),
    )  # the bumped epoch refuses late writes of the old one


def test_a_marker_for_a_stranger_fences_it() -> None:
    """Rule X6: the end marker is also written to partitions without records of the transaction."""
    state = Producers()
    state.apply(CONTROL, 9, 0, [Marker(5, 3, False)])
    five = state.get(5)
    assert five is not None
    assert five.epoch == 3
    assert state.last_stable_offset(4) == 4


@pytest.mark.parametrize("epoch", [2, 3])
def test_a_repeated_marker_does_not_end_the_next_transaction(epoch: int) -> None:
    """Rule X1, KIP-1228: the next transaction has the epoch of the marker."""
    state = Producers()
    state.apply(head(1, epoch=2, txn=True), 0, 0)
    state.apply(CONTROL, 1, 0, [Marker(1, 3, True, coordinator_epoch=7)])
    state.apply(head(1, epoch=3, txn=True), 2, 0)
    before = state.snapshot(4)
    undo = state.apply(CONTROL, 3, 0, [Marker(1, epoch, False, coordinator_epoch=8)])
    assert undo.aborted == ()
    assert state.open_transactions == {1: 2}
    assert state.snapshot(4) == before
    state.undo(undo)
    assert state.snapshot(4) == before


def test_the_oldest_transaction() -> None:
    # rule L11
    state = Producers()
    assert (state.oldest_transaction(), state.open_count) == (None, 0)
    for offset, producer_id in ((0, 9), (1, 2), (2, 5)):
        state.apply(head(producer_id, txn=True), offset, 10 + offset)
    for producer_id, left in ((9, 3), (2, 2), (5, 1)):
        oldest = state.oldest_transaction()
        assert oldest == (producer_id, state.get(producer_id))
        assert state.open_count == left
        state.apply(CONTROL, 10, 20, [Marker(producer_id, 1, False)])
    assert state.oldest_transaction() is None


def test_two_markers_of_one_producer_in_one_batch() -> None:
    state = Producers()
    state.apply(head(1, epoch=2, txn=True), 0, 0)
    undo = state.apply(CONTROL, 1, 0, [Marker(1, 3, False), Marker(1, 3, True), Marker(1, 4, True)])
    assert [a.first_offset for a in undo.aborted] == [0]
    known = state.get(1)
    assert known is not None
    assert known.epoch == 4
    state.undo(undo)
    assert state.open_transactions == {1: 0}


def test_an_open_transaction_knows_when_it_began() -> None:
    state = Producers()
    state.apply(head(1, txn=True), 0, 500)
    state.apply(head(1, 1, txn=True), 1, 700)
    known = state.get(1)
    assert known is not None
    assert (known.transaction_start, known.transaction_began_ms, known.last_ms) == (0, 500, 700)
    _, found = Producers.from_snapshot(state.snapshot(2))
    assert found.get(1) == known
    state.apply(CONTROL, 2, 900, [Marker(1, 1, True, coordinator_epoch=12)])
    known = state.get(1)
    assert known is not None
    assert (known.transaction_start, known.transaction_began_ms) == (-1, -1)
    assert known.coordinator_epoch == 12
    state.apply(head(1, epoch=1, txn=True), 3, 1000)
    known = state.get(1)
    assert known is not None
    assert (known.transaction_began_ms, known.coordinator_epoch) == (1000, 12)


def check_order(state: Producers) -> None:
    """log/producers I5: the oldest transaction is the first."""
    starts = list(state.open_transactions.values())
    assert starts == sorted(starts)


@pytest.mark.parametrize("seed", range(20))
def test_undo_gives_back_the_state_before(seed: int) -> None:
    """A failed write takes back any number of decided batches, newest first (rule L2)."""
    rng = random.Random(seed)
    state = Producers()
    history: list[tuple[bytes, dict[int, int], Undo]] = []
    sequences: dict[int, int] = {}
    for offset in range(30):
        before = (state.snapshot(0), state.open_transactions)
        if rng.random() < 0.25:
            chosen = rng.sample(range(4), rng.randint(1, 3))
            markers = [Marker(i, rng.randrange(4), rng.random() < 0.5) for i in chosen]
            undo = state.apply(CONTROL, offset, 0, markers)
        else:
            who = rng.randrange(4)
            undo = state.apply(head(who, sequences.get(who, 0), txn=rng.random() < 0.6), offset, 0)
            sequences[who] = sequences.get(who, 0) + 1
        history.append((*before, undo))
        check_order(state)
    for snapshot, open_transactions, undo in reversed(history):
        state.undo(undo)
        check_order(state)
        assert state.snapshot(0) == snapshot
        assert state.open_transactions == open_transactions
        _, found = Producers.from_snapshot(snapshot)
        check_order(found)
        assert found.open_transactions == open_transactions


def test_expiry_spares_open_transactions() -> None:
    state = Producers()
    state.apply(head(1), 0, now_ms=100)
    state.apply(head(2, txn=True), 1, now_ms=100)
    state.apply(head(3), 2, now_ms=500)
    assert state.expire(1099, 1000) == 0
    assert state.expire(1100, 1000) == 1
    assert [producer_id for producer_id, _ in state.items()] == [2, 3]


def test_snapshot_comes_back_whole() -> None:
    state = Producers()
    for number in range(6):
        state.apply(head(1, number), number, 77, append_time_ms=number)
    state.apply(head(2, txn=True), 6, 78)
    state.apply(head(3, txn=True), 7, 79)
    state.apply(CONTROL, 8, 80, [Marker(3, 1, True, coordinator_epoch=12)])
    raw = state.snapshot(9)
    offset, found = Producers.from_snapshot(raw)
    assert offset == 9
    assert found.items() == state.items()
    assert found.snapshot(9) == raw
    assert found.open_transactions == {2: 6}
    assert [found.last_stable_offset(hw) for hw in (9, 8)] == [6, 6]


def test_damaged_snapshots_are_noticed() -> None:
    state = Producers()
    state.apply(head(1), 0, 0)
    raw = state.snapshot(1)
    for at in range(len(raw)):
        broken = bytearray(raw)
        broken[at] ^= 1
        with pytest.raises(producers.CorruptSnapshot):
            Producers.from_snapshot(bytes(broken))
    for bad in (b"", raw[:-1], raw[:20]):
        with pytest.raises(producers.CorruptSnapshot):
            Producers.from_snapshot(bad)
