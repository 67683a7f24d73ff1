"""The tier process's view of a log that changes while it is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pk import errors
from pk.log import batch as batches
from pk.log import columns
from pk.log.readonly import SegmentReader, open_readonly

NOW = 1_700_000_000_000
Make = Callable[..., Any]  #: conftest.Bench


def offsets(reader: SegmentReader, start: int, bound: int, max_bytes: int = 700) -> list[int]:
    found: list[int] = []
    while start < bound:
        read = reader.read(start, bound=bound, max_bytes=max_bytes, verify=True)
        assert read.next_offset > start, (start, bound)
        for header, _ in batches.iter_batches(read.data):
            found += range(header.base_offset, header.next_offset)
        start = read.next_offset
    return found


def test_an_empty_or_absent_log_has_nothing(bench: Make) -> None:
    b = bench()
    assert open_readonly(b.storage, "topics/none-0").read(0, bound=9, max_bytes=9).empty
    reader = open_readonly(b.storage, "topics/t-0")
    assert reader.read(0, bound=0, max_bytes=9).empty
    assert reader.read(0, bound=5, max_bytes=9).empty
    b.fill(3)
    assert offsets(reader, 0, 3) == [0, 1, 2]


def test_it_follows_rolls(bench: Make) -> None:
    b = bench(segment_bytes=500)
    reader = open_readonly(b.storage, "topics/t-0")
    position = 0
    for _ in range(12):
        b.fill(2)
        assert offsets(reader, position, b.log.written_end) == list(range(position, position + 2))
        position += 2
    assert reader.base_offset == 0
    assert offsets(reader, 0, 24) == list(range(24))
    assert offsets(open_readonly(b.storage, "topics/t-0"), 7, 20) == list(range(7, 20))


@pytest.mark.parametrize("suffix", [".index", ".timeindex"])
def test_indexes_are_only_a_help(bench: Make, suffix: str) -> None:
    b = bench(segment_bytes=2000)
    b.fill(40)
    for name in b.storage.list("topics/t-0"):
        if name.endswith(suffix):
            b.storage.remove(f"topics/t-0/{name}")
    reader = open_readonly(b.storage, "topics/t-0")
    for start in (39, 0, 17, 25):
        assert offsets(reader, start, 40) == list(range(start, 40))


def test_dropped_segments(bench: Make) -> None:
    b = bench(segment_bytes=500, retention_bytes=0)
    b.fill(20)
    reader = open_readonly(b.storage, "topics/t-0")
    assert offsets(reader, 0, 5)
    plan = b.log.retention_plan(NOW)
    rename, remove = b.log.drop_segments(plan)
    rename()
    assert offsets(reader, 0, 20) == list(range(20))  # still there under the other name
    remove()
    with pytest.raises(errors.OffsetOutOfRange):
        reader.read(0, bound=20, max_bytes=100)
    assert offsets(reader, plan.log_start, 20) == list(range(plan.log_start, 20))


def test_half_written_data_beyond_the_bound_is_not_looked_at(bench: Make) -> None:
    b = bench(segment_bytes=10**6)
    b.fill(4)
    reader = open_readonly(b.storage, "topics/t-0")
    b.storage.open("topics/t-0/00000000000000000000.log").append([b"\xff" * 90])
    assert offsets(reader, 0, 4) == [0, 1, 2, 3]
    assert offsets(reader, 0, 4, max_bytes=10**6) == [0, 1, 2, 3]


def test_a_log_that_was_cut_and_rewritten(bench: Make) -> None:
    """log/readonly H1: remembered positions are hints."""
    b = bench(segment_bytes=10**6)
    b.fill(10)
    reader = open_readonly(b.storage, "topics/t-0")
    assert offsets(reader, 0, 10) == list(range(10))
    b.log.truncate_to(3)
    for _ in range(7):
        raw = b"".join(columns.encode_lists([b"longer" * 40], default_timestamp=NOW))
        b.append(raw, epoch=1)
    b.append(raw, epoch=1)
    assert offsets(reader, 10, 11) == [10]
    assert offsets(reader, 0, 11) == list(range(11))


def test_damage_is_reported(bench: Make) -> None:
    # rule L9
    b = bench(segment_bytes=10**6)
    b.fill(4)
    reader = open_readonly(b.storage, "topics/t-0")
    file = b.storage.open("topics/t-0/00000000000000000000.log")
    file.write_at(100, b"\xff")
    with pytest.raises(errors.CorruptLog):
        reader.read(0, bound=4, max_bytes=10**6, verify=True)
    file.write_at(16, b"\xff")
    with pytest.raises(errors.CorruptLog):
        reader.read(0, bound=4, max_bytes=10**6)
