"""The histories of docs/design/0016-compaction.md, one by one (compaction/retain)."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from pk.compaction import retain
from pk.compaction.offset_map import OffsetMap
from pk.compaction.retain import (
    NO_HORIZON,
    BatchColumns,
    Cleaning,
    LiveProducers,
    MarkerColumns,
    OpenTransactions,
)
from pk.log import batch as batches
from pk.log import columns, control_rows
from pk.log.aborted import AbortedRanges
from pk.log.control_rows import Marker
from pk.log.producers import Producers
from pk.types import NONE
from tests.kit.compacted_log import HASH, RETENTION_MS, ROOMY, History

PLAIN, IDEMPOTENT, TRANSACTIONAL, OTHER = 0, 1, 3, 4
K, L = b"k", b"l"


def clean(
    history: History,
    end: int | None = None,
    settled_end: int | None = None,
    *,
    after_ms: int = 0,
    delay_ms: int = 0,
    clock: bool = True,
    memory: int = ROOMY,
) -> None:
    history.now_ms += after_ms
    last = history.end
    history.clean(
        last if end is None else end,
        last if settled_end is None else settled_end,
        memory=memory,
        block=2,
        delay_ms=delay_ms,
        clock=clock,
    )
    history.check()


def offsets(history: History) -> list[int]:
    return [record.offset for batch in history.log for record in batch.records]


def horizons(history: History) -> list[int | None]:
    return [batch.header.delete_horizon_ms for batch in history.log]


def deleted() -> History:
    """A key at offset 0, and its tombstone at 1."""
    history = History()
    history.write(PLAIN, [(K, b"v")])
    history.write(PLAIN, [(K, None)])
    return history


def test_the_newest_record_of_a_key_stays() -> None:
    history = History()
    history.write(PLAIN, [(K, b"1"), (L, b"2"), (K, b"3")])
    history.write(PLAIN, [(L, b"4"), (K, b"5")])
    clean(history, end=4)
    assert offsets(history) == [2, 3, 4]  # K at 4 is not in the map yet
    clean(history)
    assert offsets(history) == [3, 4]


def test_a_tombstone_stays_for_the_retention() -> None:
    history = deleted()
    clean(history)
    assert offsets(history) == [1]
    assert horizons(history) == [history.now_ms + RETENTION_MS]
    clean(history, after_ms=RETENTION_MS)
    assert offsets(history) == [1]
    clean(history, after_ms=1)
    assert offsets(history) == []


def test_a_horizon_counts_from_the_end_of_the_cleaning() -> None:
    history = deleted()
    clean(history, delay_ms=30)
    assert horizons(history) == [history.now_ms + 30 + RETENTION_MS]


def test_a_tombstone_does_not_age_while_another_copy_is_not_cleaned() -> None:
    """Neither is its horizon set, nor does it go."""
    history = deleted()
    clean(history, settled_end=1)
    assert horizons(history) == [None]
    clean(history, after_ms=10 * RETENTION_MS)
    assert horizons(history) == [history.now_ms + RETENTION_MS]
    clean(history, settled_end=1, after_ms=RETENTION_MS + 1)  # another replica lost its disk
    assert offsets(history) == [1]
    clean(history)
    assert offsets(history) == []


def test_a_horizon_is_never_moved() -> None:
    history = deleted()
    clean(history)
    before = horizons(history)
    clean(history, after_ms=-500)  # the clock was ahead
    clean(history, after_ms=500)
    assert horizons(history) == before


def test_without_a_trusted_time_nothing_ages() -> None:
    history = deleted()
    clean(history, clock=False)
    assert (offsets(history), horizons(history)) == ([1], [None])
    clean(history)
    clean(history, after_ms=10 * RETENTION_MS, clock=False)
    assert offsets(history) == [1]


def test_a_batch_across_the_end_gets_no_horizon() -> None:
    """An older record of the tombstone behind the end is left."""
    history = History()
    history.write(PLAIN, [(K, b"v")])
    history.write(PLAIN, [(L, None), (K, None)])
    clean(history, end=2)
    assert (offsets(history), horizons(history)) == ([0, 1, 2], [None, None])
    clean(history)
    assert horizons(history) == [history.now_ms + RETENTION_MS]


def test_a_full_map_ends_the_cleaning() -> None:
    history = History()
    history.write(PLAIN, [(bytes([n]), b"v") for n in range(8)])
    history.write(PLAIN, [(bytes([n]), b"w") for n in range(8)])
    clean(history, memory=4 * 25)
    assert history.cleaned_end == 4
    for _ in range(5):
        clean(history, memory=4 * 25)
    assert offsets(history) == list(range(8, 16))


def test_an_aborted_record_replaces_nothing() -> None:
    """Its marker is above the end of the cleaning."""
    history = History()
    history.write(PLAIN, [(K, b"committed")])
    history.write(TRANSACTIONAL, [(K, b"aborted")])
    history.finish([TRANSACTIONAL], commit=False)
    clean(history, end=2)
    assert offsets(history) == [0]


def test_records_of_an_open_transaction_stay() -> None:
    history = History()
    history.write(TRANSACTIONAL, [(K, b"1"), (K, b"2")])
    history.write(PLAIN, [(K, b"3")])
    clean(history)
    assert (history.cleaned_end, offsets(history)) == (0, [0, 1, 2])


def markers_left(history: History) -> list[int]:
    return [batch.header.base_offset for batch in history.log if batch.header.control]


def test_a_marker_stays_with_the_batches_of_its_transaction() -> None:
    history = History()
    history.write(TRANSACTIONAL, [(K, b"1")])
    history.write(TRANSACTIONAL, [(L, b"2")])
    history.finish([TRANSACTIONAL], commit=True)
    history.forget(TRANSACTIONAL)
    history.write(PLAIN, [(K, b"3")])
    clean(history)
    clean(history, after_ms=10 * RETENTION_MS)
    assert (offsets(history), markers_left(history)) == ([1, 3], [2])
    assert horizons(history) == [None, None, None]


def test_a_marker_goes_after_its_transaction_and_the_retention() -> None:
    history = History()
    history.write(TRANSACTIONAL, [(K, b"1")])
    history.finish([TRANSACTIONAL], commit=False)
    history.forget(TRANSACTIONAL)
    clean(history, settled_end=1)
    assert (offsets(history), markers_left(history), horizons(history)) == ([], [1], [None])
    clean(history)
    assert horizons(history) == [history.now_ms + RETENTION_MS]
    clean(history, settled_end=1, after_ms=RETENTION_MS + 1)
    assert markers_left(history) == [1]
    clean(history)
    assert markers_left(history) == []


def test_a_control_batch_stays_for_each_of_its_transactions() -> None:
    history = History()
    history.write(TRANSACTIONAL, [(K, b"1")])
    history.write(OTHER, [(L, b"1")])
    history.finish([TRANSACTIONAL, OTHER], commit=True)
    history.forget(TRANSACTIONAL)
    history.forget(OTHER)
    history.write(PLAIN, [(K, b"2")])
    for _ in range(2):
        clean(history, after_ms=2 * RETENTION_MS)
        assert markers_left(history) == [2]
    history.write(PLAIN, [(L, b"2")])
    for _ in range(2):
        clean(history, after_ms=2 * RETENTION_MS)
    assert markers_left(history) == []


def test_a_repeated_marker_ends_no_transaction() -> None:
    history = History()
    history.finish([TRANSACTIONAL], commit=True)
    history.write(TRANSACTIONAL, [(K, b"1")])
    history.repeat_marker(TRANSACTIONAL)
    history.finish([TRANSACTIONAL], commit=True)
    history.forget(TRANSACTIONAL)
    for _ in range(2):
        clean(history, after_ms=2 * RETENTION_MS)
    assert (offsets(history), markers_left(history)) == ([1], [3])


def test_the_epoch_of_a_live_producer_stays() -> None:
    history = History()
    history.write(TRANSACTIONAL, [(K, b"1")])
    history.finish([TRANSACTIONAL], commit=False)
    history.finish([TRANSACTIONAL], commit=True)
    for _ in range(3):
        clean(history, after_ms=2 * RETENTION_MS)
    assert markers_left(history) == [2]
    history.forget(TRANSACTIONAL)
    clean(history)
    assert history.log == []


def test_the_window_of_a_live_producer_stays_as_headers() -> None:
    history = History()
    for _ in range(7):
        history.write(IDEMPOTENT, [(K, b"1"), (L, b"1")])
    history.write(PLAIN, [(K, b"2"), (L, b"2")])
    clean(history)
    left = [(b.header.base_offset, len(b.records)) for b in history.log]
    assert left == [(4, 0), (6, 0), (8, 0), (10, 0), (12, 0), (14, 2)]
    history.forget(IDEMPOTENT)
    clean(history)
    assert offsets(history) == [14, 15]
    assert len(history.log) == 1


def test_headers_above_the_end_stay() -> None:
    """A log that was copied from a leader has the headers of cleanings that the leader did."""
    history = History()
    history.write(IDEMPOTENT, [(K, b"1")])
    history.write(IDEMPOTENT, [(K, b"1")])
    history.write(PLAIN, [(K, b"2")])
    clean(history)
    history.forget(IDEMPOTENT)
    history.cleaned_end = 0
    history.clean(1, 1, memory=ROOMY, block=2, delay_ms=0, clock=True)
    assert [batch.header.base_offset for batch in history.log] == [1, 2]


def test_records_without_a_key_are_dropped_and_counted() -> None:
    history = History()
    history.write(PLAIN, [(None, b"1"), (K, b"2")])
    history.write(PLAIN, [(None, b"3")])
    clean(history, end=2)
    assert offsets(history) == [1, 2]


def test_what_is_dropped_is_counted() -> None:
    table = pa.record_batch(
        {
            "offset": pa.array([3, 5, 8, 13, 21, 34], pa.int64()),
            "key": pa.array([K, None, L, b"m", K, L], pa.binary()),
            "tombstone": pa.array([False, False, True, True, True, False]),
            "delete_horizon_ms": pa.array([None, None, 10, 10, None, None], pa.int64()),
        }
    )
    cleaning = Cleaning(34, 22, RETENTION_MS, 1000, 1005)
    rows, offset_map = retain.rows_of_table(table, cleaning), OffsetMap(ROOMY, HASH)
    assert retain.add_dirty_rows(offset_map, rows, 10, 34) is None
    kept = retain.retain_rows(rows, offset_map, cleaning)
    assert kept.keep.tolist() == [False, False, False, False, True, True]
    assert kept.horizons.tolist()[-2:] == [1105, NO_HORIZON]
    assert (kept.aborted, kept.without_key, kept.superseded, kept.tombstones) == (0, 1, 1, 2)
    assert kept.forgotten_end == 14
    assert rows.horizons.tolist()[4] == NO_HORIZON  # the input is not changed


def test_a_cleaning_without_removed_tombstones_forgets_nothing() -> None:
    history = deleted()
    cleaning = Cleaning(2, 2, RETENTION_MS, 0, 0)
    found = BatchColumns.of([batch.header for batch in history.log], AbortedRanges([]))
    keys, offsets = pa.array([K, K], pa.binary()), np.array([0, 1])
    rows = found.rows_of(offsets, keys, offsets > 0, cleaning)
    offset_map = OffsetMap(ROOMY, HASH)
    retain.add_dirty_rows(offset_map, rows, 0, 2)
    assert retain.retain_rows(rows, offset_map, cleaning).forgotten_end == 0


@pytest.mark.parametrize("commit", [True, False])
def test_columns_of_stored_batches(commit: bool) -> None:
    """The inputs are what a log has: encoded batches, markers, empty headers, and its producers."""
    data = columns.encode_lists(
        [b"v", None], [K, L], producer_id=7, producer_epoch=2, base_sequence=0, transactional=True
    )
    marker = control_rows.encode_markers([Marker(7, 3, commit)], 1)
    raw = [
        b"".join(batches.patched(b"".join(data), 10, 5)),
        b"".join(batches.patched(b"".join(marker), 12, 5)),
    ]
    headers = [batches.read_header(each) for each in raw]
    state, aborted = Producers(), []
    for header, each in zip(headers, raw, strict=True):
        found = control_rows.decode_markers(each) if header.control else ()
        aborted += state.apply(header, header.base_offset, 0, found).aborted
    headers.append(batches.read_header(batches.empty(headers[0]))._replace(base_offset=13))
    table = BatchColumns.of(headers, AbortedRanges([entry[:3] for entry in aborted]))
    assert table.base_offsets.tolist() == [10, 12, 13]
    assert table.last_offsets.tolist() == [11, 12, 14]
    assert table.rows.tolist() == [2, 0, 0]
    assert table.producer_ids.tolist() == [7, NONE, 7]
    assert table.producer_epochs.tolist()[0] == 2
    assert table.transactional.tolist() == [True, False, True]
    assert table.control.tolist() == [False, True, False]
    assert table.aborted.tolist() == [not commit, False, False]
    assert table.horizons.tolist() == [NO_HORIZON] * 3
    live = LiveProducers.of(state.items())
    assert (live.ids.tolist(), live.epochs.tolist(), live.windows.tolist()) == ([7], [3], [])
    markers = MarkerColumns.of([(1, Marker(7, 3, commit))])
    assert live.need(markers).tolist() == [True]
    everything = np.ones(3, bool)
    assert OpenTransactions().ended(table, everything, markers).tolist() == [True]
