"""What a soak measured, as verdicts.  Pure: samples in, figures out.

Goals, once retention is steady, in each process
  F1  the slope of RssAnon is at most 1 MiB a minute (least squares over all samples)
  F2  open descriptors and threads stay within 10 % of their median
  F3  disk in use stays under the bound that the topic's settings imply
Reported without a goal: loop lag p50 and p99, rates, latest and largest values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MIB = 1024 * 1024
SLOPE_MIB_PER_MIN_MAX = 1.0
WITHIN = 0.10


@dataclass(slots=True, frozen=True)
class Sample:
    """One process at one moment."""

    at_s: float
    rss_anon_bytes: int
    descriptors: int
    threads: int


@dataclass(slots=True, frozen=True)
class Verdict:
    what: str
    figure: str
    goal: str
    kept: bool | None  #: None = no goal, reported only


def slope_per_s(points: Sequence[tuple[float, float]]) -> float:
    """Least squares; 0 for fewer than two moments."""
    if not points:
        return 0.0
    mean_x = math.fsum(x for x, _ in points) / len(points)
    mean_y = math.fsum(y for _, y in points) / len(points)
    spread = math.fsum((x - mean_x) ** 2 for x, _ in points)
    if spread == 0:
        return 0.0
    return math.fsum((x - mean_x) * (y - mean_y) for x, y in points) / spread


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def deviation(values: Sequence[float]) -> float:
    """The largest distance from the median, as a share of it."""
    centre = median(values)
    return max(abs(value - centre) for value in values) / centre if centre else 0.0


def quantile(buckets: Mapping[float, float], q: float) -> float:
    """A quantile of a Prometheus histogram (cumulative counts by upper bound), interpolated.

    A value above the last finite bound is reported as that bound.
    """
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0
    if not total:
        return 0.0
    rank = q * total
    below, floor = 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= rank:
            if math.isinf(bound):
                return floor
            inside = buckets[bound] - below
            return floor + (bound - floor) * ((rank - below) / inside if inside else 1.0)
        below, floor = buckets[bound], bound
    return floor


def process_verdicts(name: str, samples: Sequence[Sample]) -> list[Verdict]:
    """F1 and F2 of one process."""
    slope = slope_per_s([(s.at_s, s.rss_anon_bytes) for s in samples]) * 60 / MIB
    latest = samples[-1].rss_anon_bytes / MIB
    verdicts = [
        Verdict(
            f"{name}: RssAnon slope",
            f"{slope:+.2f} MiB/min (now {latest:.0f} MiB)",
            f"≤ {SLOPE_MIB_PER_MIN_MAX:g} MiB/min",
            slope <= SLOPE_MIB_PER_MIN_MAX,
        )
    ]
    for what, values in (
        ("descriptors", [s.descriptors for s in samples]),
        ("threads", [s.threads for s in samples]),
    ):
        verdicts.append(
            Verdict(
                f"{name}: {what}",
                f"{min(values)}–{max(values)}, median {median(values):g}",
                f"within {WITHIN:.0%} of the median",
                deviation(values) <= WITHIN,
            )
        )
    return verdicts


def disk_verdict(what: str, used: Sequence[int], bound: int) -> Verdict:
    """F3."""
    return Verdict(
        f"{what} on disk",
        f"at most {max(used) / MIB:,.0f} MiB",
        f"≤ {bound / MIB:,.0f} MiB",
        max(used) <= bound,
    )


def table(verdicts: Sequence[Verdict]) -> str:
    """For people."""
    words = {True: "kept", False: "BROKEN", None: ""}
    rows = [("what", "figure", "goal", "verdict")]
    rows += [(v.what, v.figure, v.goal, words[v.kept]) for v in verdicts]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
