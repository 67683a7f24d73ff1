"""The soak's judge: figures compared with known answers, and one breach per goal."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import figures
from figures import MIB, Sample


def samples(mib_per_min: float = 0.0, *, odd: int = 0) -> list[Sample]:
    found = [
        Sample(at, int((100 + mib_per_min * at / 60) * MIB), descriptors=40, threads=20)
        for at in range(0, 600, 5)
    ]
    if odd:
        found[7] = Sample(35, found[7].rss_anon_bytes, 40 + odd, 20)
    return found


def broken(process: list[Sample]) -> list[str]:
    return [v.what for v in figures.process_verdicts("broker", process) if v.kept is False]


def test_a_steady_process_is_kept() -> None:
    assert broken(samples()) == []
    assert broken(samples(0.9)) == []
    assert broken(samples(odd=4)) == []


def test_each_breach_is_told() -> None:
    assert broken(samples(1.2)) == ["broker: RssAnon slope"]
    assert broken(samples(odd=5)) == ["broker: descriptors"]  # once is too often
    leaking = [
        Sample(s.at_s, s.rss_anon_bytes, 40 + int(s.at_s // 40), s.threads) for s in samples()
    ]
    assert broken(leaking) == ["broker: descriptors"]
    assert broken(samples()[: figures.SAMPLES_MIN - 1]) == ["broker"]
    assert figures.rate_verdict(94, 100).kept is False
    assert figures.rate_verdict(96, 100).kept is True
    assert figures.lag_verdict("tier", {}, {}).kept is False
    assert figures.disk_verdict("log", [1, 5], bound=4).kept is False
    assert figures.disk_verdict("log", [1, 4], bound=4).kept is True


@pytest.mark.parametrize(
    ("points", "slope"),
    [
        ([], 0),
        ([(1, 5)], 0),
        ([(0, 1), (2, 5)], 2),
        ([(0, 0), (1, 4), (2, 2)], 1),
        ([(at, 2 * at) for at in range(9)] + [(4.5, 900)], 2),  # one odd sample moves nothing
    ],
)
def test_slope(points: list[tuple[float, float]], slope: float) -> None:
    assert figures.slope_per_s(points) == pytest.approx(slope)


def test_loop_lag_is_what_came_between_two_readings() -> None:
    before, after = {1.0: 100.0, 10.0: 100.0}, {1.0: 150.0, 10.0: 200.0}
    assert (
        figures.lag_verdict("tier", before, after).figure
        == "p50 1.00 ms, p99 9.8 ms, longest ≤ 10 ms"
    )


def test_the_longest_is_the_bound_of_the_last_bucket_in_use() -> None:
    assert figures.longest({1.0: 5.0, 10.0: 5.0, math.inf: 5.0}) == 1.0
    assert figures.longest({1.0: 5.0, 10.0: 6.0, math.inf: 6.0}) == 10.0
    assert figures.longest({1.0: 5.0, math.inf: 6.0}) == math.inf
    assert figures.longest({1.0: 0.0, math.inf: 0.0}) == 0.0


def test_quantiles_of_a_cumulative_histogram() -> None:
    buckets = {1.0: 50.0, 5.0: 90.0, 10.0: 100.0, math.inf: 100.0}
    assert figures.quantile(buckets, 0.5) == pytest.approx(1.0)
    assert figures.quantile(buckets, 0.7) == pytest.approx(3.0)
    assert figures.quantile(buckets, 0.99) == pytest.approx(9.5)
    assert figures.quantile({1.0: 0.0, math.inf: 4.0}, 0.99) == 1.0
    assert figures.quantile({}, 0.5) == 0.0


def test_the_table_is_for_people() -> None:
    text = figures.table(figures.process_verdicts("tier", samples(3.0)))
    assert "BROKEN" in text
    assert text.count("kept") == 2
