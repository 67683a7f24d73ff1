"""Positions in a topic as commands take them (cli/positions)."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pk import errors
from pk.cli import positions
from pk.cli.positions import END, OFFSET, START, TIME, TopicPosition
from pk.types import TopicPartition

NOW_MS = 1_795_780_800_000
NOON = TopicPosition(TIME, NOW_MS)
A, B = TopicPartition("t", 0), TopicPartition("t", 1)


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("start", TopicPosition(START)),
        ("Beginning", TopicPosition(START)),
        ("earliest", TopicPosition(START)),
        (" end ", TopicPosition(END)),
        ("latest", TopicPosition(END)),
        ("0", TopicPosition(OFFSET, 0)),
        ("1200", TopicPosition(OFFSET, 1200)),
        ("-100", TopicPosition(END, 100)),
        ("2026-11-27T12:00:00Z", NOON),
        ("2026-11-27 13:00+01:00", NOON),
        (f"@{NOW_MS}", NOON),
        ("12h", TopicPosition(TIME, NOW_MS - 12 * 3_600_000)),
        ("1000w", TopicPosition(TIME, NOW_MS - 1000 * 604_800_000)),
        ("9999w", TopicPosition(TIME, 0)),
    ],
)
def test_texts(text: str, position: TopicPosition) -> None:
    assert positions.parse(text, "--from", NOW_MS) == position


@pytest.mark.parametrize("text", ["", "now", "-", "1.5", "2026-11-27T12:00:00", "--5", "@x", "1y"])
def test_other_texts_are_refused_with_examples(text: str) -> None:
    with pytest.raises(errors.InvalidOption, match="--from is start, end, an offset, -100"):
        positions.parse(text, "--from", NOW_MS)


@pytest.mark.parametrize(
    ("position", "expected"),
    [
        (TopicPosition(START), {A: 10, B: 0}),
        (TopicPosition(END), {A: 50, B: 0}),
        (TopicPosition(END, 15), {A: 35, B: 0}),
        (TopicPosition(END, 999), {A: 10, B: 0}),
        (TopicPosition(OFFSET, 20), {A: 20, B: 0}),
        (TopicPosition(OFFSET, 5), {A: 10, B: 0}),
        (TopicPosition(OFFSET, 99), {A: 50, B: 0}),
        (TopicPosition(TIME, 7), {A: 30, B: 0}),
    ],
)
def test_offsets_stay_between_the_first_and_the_end(
    position: TopicPosition, expected: Mapping[TopicPartition, int]
) -> None:
    def at_time(time_ms: int) -> dict[TopicPartition, int]:
        assert time_ms == 7
        return {A: 30, B: -1}

    assert positions.resolved(position, {A: 10, B: 0}, {A: 50, B: 0}, at_time) == expected
