"""Reads the output of the Java performance tools, so that only steady windows count.

ProducerPerformance prints a window every 5 s and a total after the flush.  The steady window is the
total minus the windows up to the first boundary at which `warm_up` records were acknowledged: it
opens at a boundary of the tool's own and closes at its own end, so both numbers are the tool's.

ConsumerPerformance (`--show-detailed-stats --hide-header --reporting-interval 100`) prints a line
with the time of day and the running total every 100 ms.  The steady window runs from the first line
at which `warm_up` records were read to the last line that is printed (at most 100 ms before its
end), so group join and class loading do not count.

EndToEndLatency has no warm-up and prints percentiles over all its messages, in whole milliseconds.
It is run with so many messages that its warm-up is within the last percent.
"""

from __future__ import annotations

import datetime
import re

from bench.runs import Mark, RunFailed

_SENT = re.compile(r"(\d+) records sent, ([\d.]+) records/sec")
_PERCENTILES = re.compile(r"([\d.]+) ms 50th, ([\d.]+) ms 95th, ([\d.]+) ms 99th")


class ProducerReader:
    """A `Reader` of ProducerPerformance's output; `warm_up` 0 takes the whole run."""

    def __init__(self, records: int, warm_up: int) -> None:
        self._records = records
        self._warm_up = warm_up
        self._seen = 0
        self._seen_s = 0.0
        self._steady_from: tuple[int, float] | None = None

    def __call__(self, line: str) -> Mark | None:
        found = _SENT.search(line)
        if found is None:
            return None
        count, rate = int(found[1]), float(found[2])
        percentiles = _PERCENTILES.search(line)
        if percentiles is not None:
            return self._close(count, rate, float(percentiles[3]))
        self._seen += count
        self._seen_s += count / rate if rate else 0.0
        if self._steady_from is None and self._seen >= self._warm_up:
            self._steady_from = (self._seen, self._seen_s)
            return Mark("open")
        return None

    def _close(self, count: int, rate: float, p99_ms: float) -> Mark:
        if count != self._records:
            raise RunFailed(f"ProducerPerformance sent {count} records of {self._records}")
        if not self._warm_up:
            self._steady_from = (0, 0.0)
        start, start_s = self._steady_from or (0, 0.0)
        records, seconds = count - start, count / rate - start_s
        if self._steady_from is None or records < self._warm_up:
            raise RunFailed(
                f"{count} records are too few for a steady window after {self._warm_up} of warm-up"
            )
        figures = {
            "value": records / seconds,
            "records": records,
            "whole_run": rate,
            "p99_ms": p99_ms,
        }
        return Mark("close", figures)


def window_rate(line: str) -> float | None:
    """Return the records per second, if the line is a window of a producer."""
    found = _SENT.search(line)
    return float(found[2]) if found else None


def latency_reader(line: str) -> Mark | None:
    """Read EndToEndLatency's last line (a `Reader`)."""
    found = re.match(r"Percentiles: 50th = (\d+), 99th = (\d+), 99\.9th = (\d+)", line)
    if found is None:
        return None
    names = ("p50_ms", "value", "p999_ms")
    return Mark("close", dict(zip(names, map(float, found.groups()), strict=True)))


class ConsumerReader:
    """A `Reader` of ConsumerPerformance: every line closes the window, and the last one counts."""

    def __init__(self, warm_up: int) -> None:
        self._warm_up = warm_up
        self._steady_from: tuple[int, float] | None = None

    def __call__(self, line: str) -> Mark | None:
        fields = [field.strip() for field in line.split(",")]
        if len(fields) < 6:
            return None
        try:
            at = datetime.datetime.strptime(fields[0] + "000", "%Y-%m-%d %H:%M:%S:%f").timestamp()
            count = int(fields[4])
        except ValueError:
            return None
        if self._steady_from is None:
            if count >= self._warm_up:
                self._steady_from = (count, at)
                return Mark("open")
            return None
        start, start_at = self._steady_from
        if at <= start_at:
            return None
        figures = {"value": (count - start) / (at - start_at), "records": float(count - start)}
        return Mark("close", {**figures, "seen": float(count)})
