"""The report of an abuse run: one verdict per case.  See run.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one case.

    case: what was done, for example "500 bit flips in pages".
    kept: False if pk broke a promise; the run then exits 1.
    figures: what was counted, in words, for example "0 wrong values, 500 typed errors".
    """

    case: str
    kept: bool
    figures: str


#: A module of this folder defines `run(seed, work, short)`.  It starts real processes on loopback,
#: writes below `work` only, ends what it started, and returns its verdicts.
Run = Callable[[int, Path, bool], list[Verdict]]
