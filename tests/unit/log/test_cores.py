"""Index, epochs, aborted index and checkpoints: the small pure parts of a log."""

from __future__ import annotations

import pytest

from pk.log import aborted, checkpoints, index
from pk.log.aborted import AbortedEntry
from pk.log.epochs import LeaderEpochs
from pk.log.index import Extent, SparseIndex
from pk.types import AbortedTransaction, EpochStart

# -- index -----------------------------------------------------------------------------------------


def sparse() -> SparseIndex:
    found = SparseIndex(1000)
    for offset, position, before in ((1010, 400, 50), (1025, 900, 70), (1040, 1500, 70)):
        found.add(offset, position, before)
    return found


@pytest.mark.parametrize(
    ("offset", "position"),
    [(0, 0), (1000, 0), (1009, 0), (1010, 400), (1024, 400), (1040, 1500), (10**12, 1500)],
)
def test_floor_by_offset(offset: int, position: int) -> None:
    assert sparse().floor(offset) == position


@pytest.mark.parametrize(
    ("position", "entry"),
    [(0, (0, 1000)), (399, (0, 1000)), (400, (400, 1010)), (10**9, (1500, 1040))],
)
def test_floor_by_position(position: int, entry: tuple[int, int]) -> None:
    assert sparse().floor_position(position) == entry


@pytest.mark.parametrize(
    ("time", "position"), [(0, 0), (50, 0), (51, 400), (70, 400), (71, 1500), (999, 1500)]
)
def test_floor_by_time(time: int, position: int) -> None:
    """Every record before the position is older than the requested time."""
    assert sparse().floor_time(time) == position


def test_truncation_forgets_what_lies_above() -> None:
    found = sparse()
    found.truncate(900)
    assert len(found) == 1
    assert found.last_position == 400
    found.truncate(0)
    assert (len(found), found.last_position, found.floor(2000)) == (0, 0, 0)


EXTENT = Extent(2000, 1050, 90, 1041, 5, 7, 1600, 0xFFFFFFFF)


def test_index_files_come_back() -> None:
    offsets, times = index.encode(sparse(), EXTENT)
    found, extent = index.decode(1000, offsets, times)
    assert extent == EXTENT
    assert list(found.offsets) == [10, 25, 40]
    assert list(found.positions) == [400, 900, 1500]
    assert list(found.times) == [50, 70, 70]


def test_entries_beyond_the_extent_stay_out() -> None:
    raw = index.encode(sparse(), EXTENT._replace(size=900))
    assert len(index.decode(1000, *raw)[0]) == 1


def test_damaged_index_files_are_noticed() -> None:
    offsets, times = index.encode(sparse(), EXTENT)
    for at in range(len(offsets)):
        broken = bytearray(offsets)
        broken[at] ^= 4
        with pytest.raises(index.CorruptIndex):
            index.decode(1000, bytes(broken), times)
    for bad in (b"", offsets[:-1], offsets[:30], times):
        with pytest.raises(index.CorruptIndex):
            index.decode(1000, bad, times)
    with pytest.raises(index.CorruptIndex):
        index.decode(2000, offsets, times)
    with pytest.raises(index.CorruptIndex):
        index.decode(1000, offsets, index.encode(sparse(), EXTENT._replace(size=1700))[1])


# -- epochs ----------------------------------------------------------------------------------------


def epochs() -> LeaderEpochs:
    found = LeaderEpochs()
    assert found.assign(1, 0)
    assert not found.assign(1, 7)
    assert found.assign(3, 10)
    assert found.assign(5, 25)
    return found


def test_epoch_of_an_offset() -> None:
    assert [epochs().epoch_of(o) for o in (0, 9, 10, 24, 25, 99)] == [1, 1, 3, 3, 5, 5]
    assert LeaderEpochs().epoch_of(5) == -1


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (5, (5, 40)),
        (4, (3, 25)),
        (3, (3, 25)),
        (2, (1, 10)),
        (1, (1, 10)),
        (0, (0, 0)),
        (6, (-1, -1)),
        (-1, (-1, -1)),
    ],
)
def test_where_an_epoch_ended(asked: int, answer: tuple[int, int]) -> None:
    """KIP-320: returns the largest epoch at or below the requested one, and its end."""
    assert epochs().end_offset_for(asked, 40) == answer


def test_an_epoch_without_records_is_replaced() -> None:
    found = epochs()
    assert found.assign(8, 25)
    assert found.entries == ((1, 0), (3, 10), (8, 25))


def test_truncation_at_both_ends() -> None:
    found = epochs()
    assert found.truncate_end(25)
    assert not found.truncate_end(25)
    assert found.latest == 3
    assert found.truncate_start(12)
    assert not found.truncate_start(12)
    assert found.entries == (EpochStart(3, 12),)


def test_epoch_file() -> None:
    raw = epochs().encode()
    assert LeaderEpochs.decode(raw).entries == epochs().entries
    for bad in (b"", raw[:-1], raw.replace(b"3 10", b"3 11"), raw.replace(b"epoch", b"epocH")):
        with pytest.raises(checkpoints.CorruptCheckpoint):
            LeaderEpochs.decode(bad)
    for lines in (["1 0", "1 5"], ["2 0", "1 5"], ["1 5", "2 5"], ["x"], ["1"]):
        with pytest.raises(checkpoints.CorruptCheckpoint):
            LeaderEpochs.decode(checkpoints.encode("leader-epoch-checkpoint", lines))


# -- aborted transactions --------------------------------------------------------------------------


def test_aborted_index() -> None:
    entries = [AbortedEntry(7, 10, 20, 5), AbortedEntry(8, 15, 30, 15)]
    raw = aborted.encode(entries)
    assert aborted.decode(raw) == entries
    assert aborted.decode(aborted.encode([])) == []
    for at in range(len(raw)):
        broken = bytearray(raw)
        broken[at] ^= 1
        with pytest.raises(aborted.CorruptTransactionIndex):
            aborted.decode(bytes(broken))
    for bad in (b"", raw[:-1], raw + b"x"):
        with pytest.raises(aborted.CorruptTransactionIndex):
            aborted.decode(bad)


@pytest.mark.parametrize(
    ("start", "end", "ids"),
    [(0, 10, []), (0, 11, [7]), (20, 21, [7, 8]), (21, 40, [8]), (31, 40, [])],
)
def test_overlap(start: int, end: int, ids: list[int]) -> None:
    entries = [AbortedEntry(7, 10, 20, 5), AbortedEntry(8, 15, 30, 15)]
    found = aborted.find([entries], start, end)
    assert [one.producer_id for one in found.transactions] == ids
    assert all(isinstance(one, AbortedTransaction) for one in found.transactions)
    assert found.end == end
