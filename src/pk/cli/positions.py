"""Positions in a topic as commands take them: offsets, words, distances from the end, and times.

    start, beginning, earliest   the first record
    end, latest                  behind the last record
    1200                         this offset
    -100                         so many offsets before the end
    2026-11-27T12:00:00Z         the first record since a time, which needs a zone
    @1764244800000               likewise, in ms since 1970
    12h, 1d                      likewise, so long ago

A position counts for each partition alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import NamedTuple

from pk import errors, units
from pk.types import TopicPartition

START, END, OFFSET, TIME = "start", "end", "offset", "time"
_WORDS = {
    "start": START, "beginning": START, "earliest": START, "end": END, "latest": END,
}  # fmt: skip
_OFFSET = re.compile(r"[0-9]{1,18}")
_BACK = re.compile(r"-[0-9]{1,18}")
_AT_MS = re.compile(r"@[0-9]{1,18}")
#: What a position may look like, for messages and help.
EXAMPLES = "start, end, an offset, -100, 2026-11-27T12:00:00Z, @MILLISECONDS or 12h"


class TopicPosition(NamedTuple):
    """A position before it is resolved."""

    kind: str  #: START, END, OFFSET or TIME
    #: an offset; ms since 1970; with END, how many offsets before it
    value: int = 0


def parse(text: str, option: str, now_ms: int) -> TopicPosition:
    """Return the position that a text names.  Raises `InvalidOption`."""
    text = text.strip()
    if text.lower() in _WORDS:
        return TopicPosition(_WORDS[text.lower()])
    if _OFFSET.fullmatch(text):
        return TopicPosition(OFFSET, int(text))
    if _BACK.fullmatch(text):
        return TopicPosition(END, -int(text))
    try:
        return TopicPosition(TIME, time_ms(text, now_ms))
    except ValueError:
        raise errors.InvalidOption(f"{option} is {EXAMPLES}; not {text!r}", option=option) from None


def time_ms(text: str, now_ms: int) -> int:
    """Return a time in ms since 1970: ISO 8601 with its zone, `@` with ms, or so long ago.

    Raises `ValueError`.
    """
    if _AT_MS.fullmatch(text):
        return int(text[1:])
    try:
        ago = units.duration_ms(text)
    except ValueError:
        found = datetime.fromisoformat(text)
        if found.tzinfo is None:
            raise ValueError(f"{text!r} has no zone") from None
        return max(0, int(found.timestamp() * 1000))
    return max(0, now_ms - ago)


def resolved(
    position: TopicPosition,
    first: Mapping[TopicPartition, int],
    last: Mapping[TopicPartition, int],
    at_time: Callable[[int], Mapping[TopicPartition, int]],
) -> Mapping[TopicPartition, int]:
    """Return the offset of each partition, between its first offset and its end.

    at_time: returns the first offsets since a time, in ms; -1 where there is none
    """
    if position.kind == TIME:
        times = at_time(position.value)
        found = {place: last[place] if times[place] < 0 else times[place] for place in last}
    elif position.kind == START:
        found = dict(first)
    elif position.kind == OFFSET:
        found = dict.fromkeys(last, position.value)
    else:
        found = {place: end - position.value for place, end in last.items()}
    return {place: max(first[place], min(found[place], last[place])) for place in last}
