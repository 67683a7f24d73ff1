"""Which version a number, a time or offsets name (sparkconnector/table_versions K1, K2)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pk import errors
from pk.sparkconnector import table_versions
from pk.sparkconnector.table_versions import LogVersions, of_listing

URI = "file:///lake/t"


def commit(version: int, at_ms: int) -> tuple[str, int]:
    return f"{version:020}.json", at_ms


def checkpoint(version: int, part: str = "") -> tuple[str, int]:
    return f"{version:020}.checkpoint{part}.parquet", 0


def listing(times: Iterable[int], first: int = 0) -> list[tuple[str, int]]:
    return [commit(first + number, at_ms) for number, at_ms in enumerate(times)]


def test_other_files_of_the_log_are_no_versions() -> None:
    found = of_listing(
        URI,
        [
            *listing([10, 20]),
            ("_last_checkpoint", 99),
            (f"{7:020}.crc", 99),
            (f".{8:020}.json.tmp", 99),
            (f"{9:020}.json.bak", 99),
        ],
    )
    assert found == LogVersions(0, (10, 20), 0)
    assert found.newest == 1


def test_times_grow_as_deltas_do() -> None:
    """A commit that is not later than the one before it counts as one millisecond later."""
    assert of_listing(URI, listing([50, 40, 40, 60])).times == (50, 51, 52, 60)


def test_a_log_that_was_cleaned_begins_at_its_oldest_checkpoint() -> None:
    names = listing(range(100, 110), first=20)
    cleaned = of_listing(URI, [*names, checkpoint(24), checkpoint(22, ".0000000001.0000000002")])
    assert (cleaned.first, cleaned.oldest, cleaned.newest) == (20, 22, 29)
    bare = of_listing(URI, names)
    assert bare.oldest == 29
    beside = of_listing(URI, [*names, checkpoint(19)])
    assert beside.oldest == 20


def test_commits_below_a_gap_are_not_counted() -> None:
    found = of_listing(URI, [commit(3, 1), *listing([7, 8], first=5), checkpoint(4)])
    assert (found.first, found.oldest, found.times) == (5, 5, (7, 8))


def test_an_empty_log_is_a_table_that_is_gone() -> None:
    with pytest.raises(errors.TierTableChanged, match="its log is empty"):
        of_listing(URI, [("_last_checkpoint", 1)])


def test_a_number_is_checked_against_the_log() -> None:
    found = LogVersions(20, (1, 2, 3), 21)
    assert table_versions.numbered(URI, found, 22) == 22
    with pytest.raises(
        errors.TableVersionNotFound, match="no version 23 yet; the newest one is 22"
    ):
        table_versions.numbered(URI, found, 23)
    with pytest.raises(errors.TableVersionNotFound, match="the oldest one left is 21"):
        table_versions.numbered(URI, found, 20)


@given(st.lists(st.integers(0, 1000), min_size=1), st.integers(-5, 1100), st.integers(0, 9))
def test_a_time_names_the_newest_version_that_is_not_later(
    raw: list[int], time_ms: int, first: int
) -> None:
    found = of_listing(URI, [*listing(raw, first), checkpoint(first)])
    if not found.times[0] <= time_ms <= found.times[-1]:
        with pytest.raises(errors.TableVersionNotFound):
            table_versions.at_time(URI, found, time_ms)
        return
    named = table_versions.at_time(URI, found, time_ms)
    assert found.times[named - first] <= time_ms
    assert named == found.newest or found.times[named - first + 1] > time_ms


@given(st.lists(st.integers(0, 1000), min_size=1), st.lists(st.integers(0, 2000), max_size=5))
def test_no_later_commit_changes_an_answer(raw: list[int], later: list[int]) -> None:
    """sparkconnector/table_versions K2: answers depend on versions that exist."""
    found = of_listing(URI, listing(raw))
    grown = of_listing(URI, listing([*raw, *later]))
    for time_ms in range(found.times[0], found.times[-1] + 1):
        named = table_versions.at_time(URI, found, time_ms)
        assert table_versions.at_time(URI, grown, time_ms) == named


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(1, 60))
def test_pinned_offsets_name_the_first_version_that_covers_them(
    steps: list[int], wanted: int
) -> None:
    ends = [sum(steps[: number + 1]) for number in range(len(steps))]
    found = LogVersions(0, tuple(range(len(ends))), 0)

    def covering() -> int:
        return table_versions.covering(URI, found, {0: wanted}, lambda each: {0: ends[each]})

    if ends[-1] < wanted:
        with pytest.raises(errors.TableVersionNotFound, match="not yet tiered up to endingOffsets"):
            covering()
        return
    assert covering() == next(number for number, end in enumerate(ends) if end >= wanted)


def test_pinned_offsets_below_a_cleaned_log_are_refused() -> None:
    found = LogVersions(10, (1, 2, 3), 10)
    ends = {10: 5, 11: 7, 12: 9}

    def at(version: int) -> dict[int, int]:
        return {0: ends[version]}

    assert table_versions.covering(URI, found, {0: 6}, at) == 11
    with pytest.raises(errors.TableVersionNotFound, match="no longer shows which version"):
        table_versions.covering(URI, found, {0: 5}, at)


@given(st.integers(0, 50), st.integers(1, 50), st.data())
def test_the_oldest_whole_version_is_found(low: int, width: int, data: st.DataObject) -> None:
    high = low + width
    whole_from = data.draw(st.integers(low + 1, high))
    assert table_versions.oldest_whole(low, high, lambda each: each >= whole_from) == whole_from


@pytest.mark.parametrize(
    ("time_ms", "text"),
    [
        (0, "1970-01-01T00:00:00.000Z"),
        (1_774_000_000_123, "2026-03-20T09:46:40.123Z"),
        (10**18, "1000000000000000000 ms"),
    ],
)
def test_times_are_told_in_utc(time_ms: int, text: str) -> None:
    assert table_versions.time_text(time_ms) == text


def test_a_directorys_log_is_listed_with_its_times(tmp_path: Path) -> None:
    log = tmp_path / table_versions.LOG
    log.mkdir()
    for version, at_ms in enumerate([1000, 5000]):
        path = log / f"{version:020}.json"
        path.write_bytes(b"{}")
        os.utime(path, ns=(at_ms * 10**6, at_ms * 10**6))
    assert table_versions.log_versions(tmp_path.as_uri(), {}) == LogVersions(0, (1000, 5000), 0)
    with pytest.raises(errors.TierTableChanged, match="there is no table"):
        table_versions.log_versions((tmp_path / "gone").as_uri(), {})
