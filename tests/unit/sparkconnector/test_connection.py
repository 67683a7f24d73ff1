"""Calls and bounded scans against a broker that breaks: sparkconnector/connection K1–K3."""

from __future__ import annotations

import pytest

from pk import errors
from pk.log import batch as batches
from pk.log import columns
from pk.sparkconnector import connection, scan
from pk.sparkconnector.offsets import Range
from pk.types import NONE

FAST = {"retry_backoff_ms": 1, "retry_backoff_max_ms": 5, "default_api_timeout_ms": 10_000}


def fill(log, counts) -> None:
    for count in counts:
        values = [str(log.end + n).encode() for n in range(count)]
        log.append(columns.encode_lists(values, default_timestamp=log.end))


def offsets_of(fetched, one: Range) -> list[int]:
    found = []
    for part in fetched:
        for header, _ in batches.iter_batches(part.payload):
            found += range(max(header.base_offset, one.start), min(header.next_offset, one.end))
    return found


def a_range(end: int, start: int = 0, topic: str = "t") -> Range:
    return Range(topic, f"id-of-{topic}", 0, start, end)


def test_topics_and_their_bounds(broker):
    broker.create("a", 2)
    log, _ = broker.create("b", 2)
    fill(log, [3, 4])
    log.log_start = 2
    line = connection.cluster(broker.address, FAST)
    assert [topic.name for topic in line.topics()] == ["a", "b"]
    found = line.bounds(line.topics(["b"]), read_committed=True)
    assert [(one.partition, one.earliest, one.latest) for one in found] == [(0, 2, 7), (1, 0, 0)]
    assert line.first_at({("id-of-b", 0): 3, ("id-of-b", 1): 3}) == {
        ("id-of-b", 0): 3, ("id-of-b", 1): None,
    }  # fmt: skip


def test_an_unknown_topic_is_waited_for_and_then_named(broker):
    line = connection.cluster(broker.address, FAST)
    with pytest.raises(errors.UnknownTopicOrPartition, match="nowhere"):
        line.topics(["nowhere"])


def test_calls_retry_what_is_retriable(broker):
    broker.create("a")
    broker.fail_calls = [errors.ThrottledError("busy"), errors.NotLeaderOrFollower("moved")]
    line = connection.cluster(broker.address, FAST)
    assert [topic.name for topic in line.topics()] == ["a"]


def test_other_errors_come_at_once(broker):
    broker.create("a")
    broker.fail_calls = [errors.InvalidRequest("no")]
    with pytest.raises(errors.InvalidRequest):
        connection.cluster(broker.address, FAST).topics()


def test_nobody_there_is_a_typed_error():
    line = connection.cluster("127.0.0.1:1", {**FAST, "default_api_timeout_ms": 50})
    with pytest.raises(errors.BrokerUnavailable):
        line.topics()


def test_a_scan_reads_its_range_and_keeps_the_stream(broker):
    (log,) = broker.create("t")
    fill(log, [10] * 20)
    broker.frame_bytes = 500
    line = connection.cluster(broker.address, FAST)
    for start, end in ((0, 200), (13, 157), (199, 200)):
        one = a_range(end, start)
        assert offsets_of(line.scan(one, read_committed=True), one) == list(range(start, end))
    assert broker.streams == 1, "K3: the stream is used again"


def test_a_broken_stream_is_taken_up_where_it_broke(broker):
    (log,) = broker.create("t")
    fill(log, [7] * 30)
    broker.frame_bytes = 300
    broker.break_after = [3, 1, 0, 4]
    one = a_range(210)
    line = connection.cluster(broker.address, FAST)
    assert offsets_of(line.scan(one, read_committed=True), one) == list(range(210))
    assert broker.streams == 5


def test_a_broken_stream_behind_a_range_without_rows_names_no_epoch(broker):
    """Rules R4, L12: the record before the position may be of a later epoch than the last batch."""
    (log,) = broker.create("t")
    fill(log, [5])
    log.end, broker.gaps = 9, {5: 9}
    fill(log, [3, 3])
    broker.frame_bytes, broker.break_after = 1, [2, 1]
    one = a_range(15)
    line = connection.cluster(broker.address, FAST)
    found = offsets_of(line.scan(one, read_committed=True), one)
    assert found == [*range(5), *range(9, 15)]
    assert broker.last_epochs == [NONE, NONE, log.epoch]


def test_credit_is_handed_back(broker):
    """More than the first credit flows: the reader grants what it has consumed."""
    (log,) = broker.create("t")
    for _ in range(24):
        log.append(columns.encode_lists([b"x" * (1 << 20)]))
    one = a_range(24)
    line = connection.cluster(broker.address, FAST)
    assert offsets_of(line.scan(one, read_committed=True), one) == list(range(24))
    assert sum(broker.grants) > scan.CREDIT_BYTES


def test_offsets_that_are_gone_are_told(broker):
    (log,) = broker.create("t")
    fill(log, [10])
    log.log_start = 5
    line = connection.cluster(broker.address, FAST)
    with pytest.raises(errors.OffsetOutOfRange):
        list(line.scan(a_range(10), read_committed=True))
    broker.cluster.delete("t")
    with pytest.raises(errors.UnknownTopicId):
        list(line.scan(a_range(10, 5), read_committed=True))


def test_a_scan_that_is_given_up_frees_its_stream(broker):
    (log,) = broker.create("t")
    fill(log, [10] * 10)
    broker.frame_bytes = 200
    line = connection.cluster(broker.address, FAST)
    scan = line.scan(a_range(100), read_committed=True)
    next(scan)
    scan.close()
    assert offsets_of(line.scan(a_range(100), read_committed=True), a_range(100)) == list(
        range(100)
    )


def test_bytes_by_offset(broker):
    (log,) = broker.create("t")
    fill(log, [10, 10])
    line = connection.cluster(broker.address, FAST)
    ((xs, ys),) = line.curves([a_range(20)], 16)
    assert xs == [0, 10, 20]
    assert ys[0] == 0
    assert ys[2] == sum(len(raw) for raw in log.stored)


def test_delete_before(broker):
    broker.create("t")
    connection.cluster(broker.address, FAST).delete_before({("id-of-t", 0): 4})
    assert broker.deleted == {("id-of-t", 0): 4}
