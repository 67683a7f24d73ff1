"""The measurements of a soak run, as verdicts.  Pure: samples in, figures out.

Goals, once retention is steady, in each process
  F1  The slope of RssAnon is at most 1 MiB a minute: the median of the slopes between all pairs of
      samples (Theil–Sen).  A few samples that were taken in the middle of an operation do not move
      it.
  F2  Open descriptors (those that are held for longer than a moment; the most at one look is
      reported) and threads: every sample is within 10 % of the median.  Their number is reported.
  F3  Disk in use stays under the bound that the topic's settings imply.
  F4  The load reached at least 95 % of the rate that was asked for.
Reported without a goal: loop lag p50 and p99, CPU, the machine's load, the lag of the tier.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MIB = 1024 * 1024
SLOPE_MIB_PER_MIN_MAX = 1.0
WITHIN = 0.10
RATE_SHARE_MIN = 0.95
SAMPLES_MIN = 15


@dataclass(slots=True, frozen=True)
class Sample:
    """One process at one moment."""

    at_s: float
    rss_anon_bytes: int
    descriptors: int
    threads: int
    cpu_s: float = 0.0  #: since its start
    descriptors_most: int = 0  #: `descriptors` are those held, these were seen at one look
    waited_s: float = 0.0  #: since its start its main thread could run and had no core


@dataclass(slots=True, frozen=True)
class Verdict:
    what: str
    figure: str
    goal: str
    kept: bool | None  #: None = no goal, reported only


def slope_per_s(points: Sequence[tuple[float, float]]) -> float:
    """Return the Theil–Sen slope; 0 for fewer than two moments."""
    slopes = [
        (later[1] - each[1]) / (later[0] - each[0])
        for each, later in itertools.combinations(sorted(points), 2)
        if later[0] > each[0]
    ]
    return median(slopes) if slopes else 0.0


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def share_within(values: Sequence[float]) -> float:
    """Return which share of the values is within 10 % of the median."""
    centre = median(values)
    return sum(abs(value - centre) <= WITHIN * centre for value in values) / len(values)


def quantile(buckets: Mapping[float, float], q: float) -> float:
    """Return a quantile of a Prometheus histogram (cumulative counts by upper bound), interpolated.

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


def longest(buckets: Mapping[float, float]) -> float:
    """Return the upper bound of the last bucket with a value; 0 if there is none."""
    reached, below = 0.0, 0.0
    for bound in sorted(buckets):
        if buckets[bound] > below:
            reached, below = bound, buckets[bound]
    return reached


def slope_verdict(name: str, samples: Sequence[Sample], *, judged: bool = True) -> Verdict:
    """Return the verdict of F1; it is only reported unless `judged`."""
    slope = slope_per_s([(s.at_s, s.rss_anon_bytes) for s in samples]) * 60 / MIB
    return Verdict(
        f"{name}: RssAnon slope",
        f"{slope:+.2f} MiB/min (now {samples[-1].rss_anon_bytes / MIB:.0f} MiB)",
        f"≤ {SLOPE_MIB_PER_MIN_MAX:g} MiB/min" if judged else "",
        slope <= SLOPE_MIB_PER_MIN_MAX if judged else None,
    )


def process_verdicts(name: str, samples: Sequence[Sample]) -> list[Verdict]:
    """Return F1 and F2 of one process; too few samples are a breach, too."""
    if len(samples) < SAMPLES_MIN:
        return [Verdict(name, f"{len(samples)} samples", f"at least {SAMPLES_MIN}", False)]
    verdicts = [slope_verdict(name, samples)]
    most = max(s.descriptors_most for s in samples)
    for what, values, more in (
        ("descriptors", [s.descriptors for s in samples], f", for a moment {most}"),
        ("threads", [s.threads for s in samples], ""),
    ):
        verdicts.append(
            Verdict(
                f"{name}: {what}",
                f"{min(values)}–{max(values)}, median {median(values):g}, "
                f"{share_within(values):.0%} near it{more}",
                f"all within {WITHIN:.0%} of the median",
                share_within(values) == 1.0,
            )
        )
    took = samples[-1].at_s - samples[0].at_s
    cores = (samples[-1].cpu_s - samples[0].cpu_s) / took
    verdicts.append(Verdict(f"{name}: CPU", f"{cores:.2f} cores", "", None))
    return verdicts


def disk_verdict(what: str, used: Sequence[int], bound: int) -> Verdict:
    # F3
    return Verdict(
        f"{what} on disk",
        f"at most {max(used) / MIB:,.0f} MiB",
        f"≤ {bound / MIB:,.0f} MiB",
        max(used) <= bound,
    )


def window(before: Mapping[float, float], after: Mapping[float, float]) -> dict[float, float]:
    """Return what a histogram counted between two readings."""
    return {bound: count - before.get(bound, 0) for bound, count in after.items()}


def bound_of(buckets: Mapping[float, float]) -> str:
    """Return the longest value in words."""
    bound = longest(buckets)
    return f"≤ {bound:,g} ms" if bound < math.inf else "beyond all bounds"


def lag_verdict(role: str, before: Mapping[float, float], after: Mapping[float, float]) -> Verdict:
    """Return how late a process's event loop was between two readings; a missing metric is a
    breach.
    """
    counted = window(before, after)
    p50, p99 = (quantile(counted, q) for q in (0.5, 0.99))
    figure = f"p50 {p50:.2f} ms, p99 {p99:.1f} ms, longest {bound_of(counted)}"
    if not counted:
        figure = "not told"
    return Verdict(f"{role}: loop lag", figure, "is told", bool(counted))


def rate_verdict(sent: float, asked: float) -> Verdict:
    # F4
    kept = sent >= RATE_SHARE_MIN * asked
    return Verdict("load", f"{sent:,.0f} records/s", f"{asked:,.0f} asked for", kept)


def table(verdicts: Sequence[Verdict]) -> str:
    """Return the verdicts as a table for people."""
    words = {True: "kept", False: "BROKEN", None: ""}
    rows = [("what", "figure", "goal", "verdict")]
    rows += [(v.what, v.figure, v.goal, words[v.kept]) for v in verdicts]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
