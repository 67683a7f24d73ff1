"""Durations and sizes as people write them: `1d`, `1h30m`, `250ms`; `64MiB`, `1GB`.

A number without a unit is milliseconds, or bytes.  Units of sizes are powers of 1024 with an `i`
(KiB, MiB, GiB, TiB) and of 1000 without one (kB, MB, GB, TB).  A month or a year has no fixed
length, so there is no unit for them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

_DURATIONS: Mapping[str, int] = {
    "ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000,
}  # fmt: skip
_SIZES: Mapping[str, int] = {
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}
_NUMBER = re.compile(r"[-+]?[0-9]{1,19}")
_PART = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([A-Za-z]{1,3})\s*")

#: What a value of a unit may look like, for messages.
EXAMPLES: Mapping[str, str] = {"ms": "a duration such as 12h", "bytes": "a size such as 64MiB"}


def duration_ms(text: str) -> int:
    """Return a duration in milliseconds.  Raises `ValueError`; a fraction of 1 ms is none."""
    return _sum(text, _DURATIONS)


def size_bytes(text: str) -> int:
    """Return a size in bytes.  Raises `ValueError`."""
    return _sum(text, _SIZES)


def plain(text: str, unit: str) -> int:
    """Return the number of `unit` ("ms" or "bytes") that a text stands for.

    Raises `ValueError`.
    """
    return duration_ms(text) if unit == "ms" else size_bytes(text)


def _sum(text: str, units: Mapping[str, int]) -> int:
    text = text.strip()
    if _NUMBER.fullmatch(text):
        return int(text)
    total, position = Fraction(0), 0
    while position < len(text):
        part = _PART.match(text, position)
        if part is None:
            raise ValueError(f"{text!r} is no number with a unit")
        factor = units.get(part[2].lower())
        if factor is None:
            raise ValueError(f"{text!r} is no number with a unit")
        total += Fraction(part[1]) * factor
        position = part.end()
    if not text or total.denominator != 1:
        raise ValueError(f"{text!r} is no number with a unit")
    return int(total)
