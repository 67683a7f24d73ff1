"""The output of the Java tools, copied from real runs of Apache Kafka 4.1.1."""

from __future__ import annotations

import pytest

from bench.kafka.readers import ConsumerReader, ProducerReader, latency_reader
from bench.plans.compaction import cleaned
from bench.runs import RunFailed

LATENCIES = "2.8 ms avg latency, 350.0 ms max latency."
WINDOWS = [
    f"900000 records sent, 180000.0 records/sec (17.17 MB/sec), {LATENCIES}",
    f"2100000 records sent, 420000.0 records/sec (40.05 MB/sec), {LATENCIES}",
    f"2500000 records sent, 500000.0 records/sec (47.68 MB/sec), {LATENCIES}",
]
TOTAL = (
    "6000000 records sent, 375000.0 records/sec (35.76 MB/sec), 5.79 ms avg latency, 325.00 ms max "
    "latency, 1 ms 50th, 29 ms 95th, 45 ms 99th, 60 ms 99.9th."
)


def test_only_what_follows_the_first_window_boundary_after_warm_up_counts() -> None:
    reader = ProducerReader(records=6_000_000, warm_up=1_000_000)
    assert reader("SLF4J: some complaint") is None
    assert reader(WINDOWS[0]) is None  # 900,000 so far: still warming up
    opened = reader(WINDOWS[1])
    assert opened is not None
    assert opened.kind == "open"
    assert reader(WINDOWS[2]) is None
    closed = reader(TOTAL)
    assert closed is not None
    # 16 s in all, 10 s and 3,000,000 records of them before the window opened
    assert closed.figures["records"] == 3_000_000
    assert closed.figures["value"] == pytest.approx(500_000)
    assert closed.figures["p99_ms"] == 45


def test_a_run_too_short_for_a_steady_window_is_an_error() -> None:
    reader = ProducerReader(records=6_000_000, warm_up=1_000_000)
    with pytest.raises(RunFailed, match="too few"):
        reader(TOTAL)


def test_a_run_without_warm_up_counts_whole() -> None:
    closed = ProducerReader(records=6_000_000, warm_up=0)(TOTAL)
    assert closed is not None
    assert closed.figures["value"] == pytest.approx(375_000)


def test_a_run_that_lost_records_is_an_error() -> None:
    reader = ProducerReader(records=7_000_000, warm_up=1_000_000)
    reader(WINDOWS[2])
    with pytest.raises(RunFailed, match="sent 6000000 records of 7000000"):
        reader(TOTAL)


def _line(at: str, count: int) -> str:
    return f"2026-11-21 01:59:{at}, 0, 96.3, 240.8, {count}, 2525000.0, 0, 100, 240.8, 2525000.0"


def test_the_consumer_window_runs_between_printed_lines() -> None:
    reader = ConsumerReader(warm_up=1_000_000)
    assert reader(_line("14:610", 757_518)) is None
    opened = reader(_line("14:710", 1_010_018))
    assert opened is not None
    assert opened.kind == "open"
    first = reader(_line("14:811", 1_285_002))
    last = reader(_line("16:710", 6_010_018))
    assert first is not None
    assert last is not None
    assert last.kind == "close"
    assert last.figures["value"] == pytest.approx(2_500_000)
    assert last.figures["records"] == 5_000_000
    assert last.figures["seen"] == 6_010_018


def test_headers_and_complaints_are_no_windows() -> None:
    reader = ConsumerReader(warm_up=1)
    assert (
        reader("time, threadId, data.consumed.in.MB, MB.sec, data.consumed.in.nMsg, nMsg.sec")
        is None
    )
    assert reader("WARNING: Exiting before consuming the expected number of messages") is None


def test_latencies_are_the_percentiles_it_prints() -> None:
    assert latency_reader("1000\t1.25") is None
    closed = latency_reader("Percentiles: 50th = 1, 99th = 4, 99.9th = 12")
    assert closed is not None
    assert closed.kind == "close"
    assert closed.figures == {"p50_ms": 1.0, "value": 4.0, "p999_ms": 12.0}


CLEANED = """\
[2026-11-29 11:59:44,745] INFO [kafka-log-cleaner-thread-0]:
\tLog cleaner thread 0 cleaned log cleaning-2-0 (dirty section = [0, 10000000])
\t1,162.5 MB of log processed in 1,018.5 seconds (62.8 MB/sec).
\tIndexed 1,162.5 MB in 9.0 seconds (128.8 Mb/sec, 48.8% of total time)
"""


def test_the_log_cleaner_says_how_long_it_worked() -> None:
    assert cleaned(CLEANED, "cleaning-2") == (10_000_000, 1_018.5)
    assert cleaned(CLEANED, "cleaning") is None
