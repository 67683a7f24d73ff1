"""The calls Spark makes to a streaming source, without Spark:
sparkconnector/stream_reader B1–B4."""

from __future__ import annotations

import json
import pickle

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
)

from pk import clock, errors
from pk.log import batch as batches
from pk.log import columns
from pk.sparkconnector import options
from pk.sparkconnector.planner import PkWarning
from pk.sparkconnector.stream_reader import PkStreamReader

COLUMNS = options.columns_of(["offset", "value"])


def fill(log, *counts) -> None:
    for count in counts:
        values = [str(log.end + n).encode() for n in range(count)]
        log.append(columns.encode_lists(values, default_timestamp=log.end))


def reader(broker, **given) -> PkStreamReader:
    base = {"pk.bootstrap.servers": broker.address, "startingOffsets": "earliest"}
    if "assign" not in given and "subscribePattern" not in given:
        base["subscribe"] = "t"
    quick = {"pk.retry.backoff.ms": "1", "pk.default.api.timeout.ms": "30000"}
    return PkStreamReader(options.source({**base, **quick, **given}, streaming=True), COLUMNS)


def step(one: PkStreamReader, start: dict) -> dict:
    return one.latestOffset(start, one.getDefaultReadLimit())


def at(end: dict, topic: str = "t") -> dict[str, int]:
    return end["topics"][topic]["offsets"]


def offsets_of(one: PkStreamReader, start: dict, end: dict) -> list[int]:
    found = []
    for partition in one.partitions(start, end):
        again = pickle.loads(pickle.dumps(one)), pickle.loads(pickle.dumps(partition))
        for batch in again[0].read(again[1]):
            found += batch.column("offset").to_pylist()
    return found


def test_from_the_earliest_offset_to_the_end(broker):
    log, other = broker.create("t", 2)
    fill(log, 5, 5)
    fill(other, 3)
    one = reader(broker)
    start = one.initialOffset()
    assert at(start) == {"0": 0, "1": 0}
    end = step(one, start)
    assert at(end) == {"0": 10, "1": 3}
    assert sorted(offsets_of(one, start, end)) == sorted([*range(10), *range(3)])
    assert one.reportLatestOffset() == end


def test_nothing_new_is_the_same_text(broker):
    # sparkconnector/stream_reader B1
    broker.create("t", 12)
    one = reader(broker)
    start = json.loads(json.dumps(one.initialOffset()))
    assert json.dumps(step(one, start)) == json.dumps(start)
    assert one.partitions(start, start) == []


def test_reads_end_at_the_last_stable_offset(broker):
    (log,) = broker.create("t")
    fill(log, 5, 5)
    log.lso = 5
    one = reader(broker)
    start = one.initialOffset()
    end = step(one, start)
    assert at(end) == {"0": 5}
    assert offsets_of(one, start, end) == list(range(5))


def test_default_limits(broker):
    broker.create("t")
    assert reader(broker).getDefaultReadLimit() == ReadAllAvailable()
    assert reader(broker, maxOffsetsPerTrigger="7").getDefaultReadLimit() == ReadMaxRows(7)
    assert reader(broker, maxBytesPerTrigger="7").getDefaultReadLimit() == ReadMaxBytes(7)
    assert reader(broker, minOffsetsPerTrigger="7").getDefaultReadLimit() == ReadMinRows(7)


def test_the_tighter_of_two_limits_wins(broker):
    """sparkconnector/stream_reader B2: 20 records of 100 bytes a batch; first the bytes bind, then
    the records."""
    (log,) = broker.create("t")
    for _ in range(10):
        log.append(columns.encode_lists([b"x" * 100] * 20))
    size = len(log.stored[0])
    one = reader(broker, maxOffsetsPerTrigger="150", maxBytesPerTrigger=str(2 * size))
    start = one.initialOffset()
    assert at(step(one, start)) == {"0": 40}
    one = reader(broker, maxOffsetsPerTrigger="30", maxBytesPerTrigger=str(2 * size))
    assert at(step(one, start)) == {"0": 30}


def test_trigger_once_reads_everything(broker):
    (log,) = broker.create("t")
    fill(log, 50)
    one = reader(broker, maxOffsetsPerTrigger="7")
    assert at(one.latestOffset(one.initialOffset(), ReadAllAvailable())) == {"0": 50}


def test_available_now_stops_at_its_target(broker):
    """sparkconnector/stream_reader B3: what is produced meanwhile is left for the next run."""
    (log,) = broker.create("t")
    fill(log, 50)
    one = reader(broker, maxOffsetsPerTrigger="20", minOffsetsPerTrigger="15")
    one.prepareForTriggerAvailableNow()
    position, seen = one.initialOffset(), []
    while True:
        end = step(one, position)
        if end == position:
            break
        seen.append(at(end)["0"])
        position = end
        fill(log, 30)
    assert seen == [20, 40, 50]


def test_few_offsets_wait_for_more_or_for_the_delay(broker, monkeypatch):
    # sparkconnector/stream_reader B4
    now = [1000.0]
    monkeypatch.setattr(clock, "monotonic_s", lambda: now[0])
    (log,) = broker.create("t")
    fill(log, 3)
    one = reader(broker, minOffsetsPerTrigger="10", maxTriggerDelay="30s")
    start = one.initialOffset()
    first = step(one, start)
    assert at(first) == {"0": 3}, "the first batch does not wait"
    fill(log, 4)
    now[0] += 29
    assert step(one, first) == first
    assert at(one.reportLatestOffset()) == {"0": 7}
    fill(log, 6)
    assert at(step(one, first)) == {"0": 13}, "enough"
    fill(log, 1)
    now[0] += 31
    assert at(step(one, {**first, "topics": one.reportLatestOffset()["topics"]})) == {"0": 14}


def test_a_restart_replays_the_same_range(broker):
    (log,) = broker.create("t")
    fill(log, 10)
    one = reader(broker)
    start = json.loads(json.dumps(one.initialOffset()))
    end = json.loads(json.dumps(step(one, start)))
    fill(log, 10)
    again = reader(broker)
    assert offsets_of(again, start, end) == list(range(10))
    assert at(step(again, end)) == {"0": 20}


def test_new_partitions_and_topics_are_read_from_the_beginning(broker):
    (log,) = broker.create("t1")
    fill(log, 5)
    one = reader(broker, subscribePattern="t[0-9]", startingOffsets="latest")
    start = one.initialOffset()
    broker.create("ignored")
    (new,) = broker.create("t2")
    fill(new, 4)
    fill(broker.create("t1", 2)[1], 3)
    end = step(one, start)
    assert at(end, "t1") == {"0": 5, "1": 3}
    assert at(end, "t2") == {"0": 4}
    assert sorted(offsets_of(one, start, end)) == sorted([*range(3), *range(4)])


@pytest.mark.parametrize("fails", [True, False])
def test_aged_out_offsets(broker, fails):
    (log,) = broker.create("t")
    fill(log, 10, 10)
    one = reader(broker, failOnDataLoss=str(fails).lower())
    start = one.initialOffset()
    log.log_start = 10
    if fails:
        with pytest.raises(errors.DataLoss, match=r"\[0, 10\) of t-0 were deleted"):
            step(one, start)
        return
    with pytest.warns(PkWarning, match="going on"):
        end = step(one, start)
    with pytest.warns(PkWarning, match="going on"):
        assert offsets_of(one, start, end) == list(range(10, 20))


@pytest.mark.parametrize("fails", [True, False])
def test_a_recreated_topic(broker, fails):
    # rule L8
    (log,) = broker.create("t", topic_id="first")
    fill(log, 10)
    one = reader(broker, failOnDataLoss=str(fails).lower())
    start = step(one, one.initialOffset())
    (log,) = broker.create("t", topic_id="second")
    fill(log, 4)
    if fails:
        with pytest.raises(errors.TopicRecreated, match="topic re-created"):
            step(one, start)
        return
    with pytest.warns(PkWarning, match="re-created"):
        end = step(one, start)
    with pytest.warns(PkWarning, match="re-created"):
        assert offsets_of(one, start, end) == list(range(4))


@pytest.mark.parametrize("fails", [True, False])
def test_records_deleted_while_a_task_reads(broker, fails):
    (log,) = broker.create("t")
    fill(log, 10)
    one = reader(broker, failOnDataLoss=str(fails).lower())
    start = one.initialOffset()
    (task,) = one.partitions(start, step(one, start))
    log.log_start = 5
    if fails:
        with pytest.raises(errors.DataLoss, match="failOnDataLoss"):
            list(one.read(task))
        return
    with pytest.warns(PkWarning, match="gone"):
        (left,) = one.read(task)
    assert left.column("offset").to_pylist() == [5, 6, 7, 8, 9]


def test_a_vanished_topic_fails(broker):
    (log,) = broker.create("t1")
    broker.create("t2")
    fill(log, 3)
    one = reader(broker, subscribePattern="t.")
    start = one.initialOffset()
    broker.cluster.delete("t1")
    with pytest.raises(errors.DataLoss, match="t1-0 is no more"):
        step(one, start)


def test_assign_reads_only_its_partitions(broker):
    for log in broker.create("t", 3):
        fill(log, 3)
    one = reader(broker, assign='{"t":[2,0]}')
    start = one.initialOffset()
    assert at(step(one, start)) == {"0": 3, "2": 3}
    with pytest.raises(errors.UnknownTopicOrPartition, match="t-9"):
        reader(broker, assign='{"t":[9]}').initialOffset()


def test_starting_by_time(broker):
    (log,) = broker.create("t")
    fill(log, 10, 10)
    assert at(reader(broker, startingTimestamp="5").initialOffset()) == {"0": 10}
    with pytest.raises(errors.InvalidOption, match="no record at or after"):
        reader(broker, startingTimestamp="999").initialOffset()
    late = reader(broker, startingTimestamp="999", startingOffsetsByTimestampStrategy="latest")
    assert at(late.initialOffset()) == {"0": 20}


def test_tasks_are_split(broker):
    log, other = broker.create("t", 2)
    fill(log, *[10] * 9)
    fill(other, 10)
    one = reader(broker, minPartitions="5")
    start = one.initialOffset()
    assert len(one.partitions(start, step(one, start))) == 5
    one = reader(broker, maxRecordsPerPartition="30")
    tasks = one.partitions(start, step(one, start))
    assert [repr(task) for task in tasks] == [
        "t-0 [0, 30) of the log", "t-0 [30, 60) of the log", "t-0 [60, 90) of the log",
        "t-1 [0, 10) of the log",
    ]  # fmt: skip
    most = str(4 * len(log.stored[0]))
    one = reader(broker, maxBytesPerPartition=most, packPartitions="false")
    tasks = one.partitions(start, step(one, start))
    assert sum(len(list(batches.iter_headers(raw))) for raw in log.stored) == 9
    assert len(tasks) == 4
    assert sorted(offsets_of(one, start, step(one, start))) == sorted([*range(90), *range(10)])


def test_an_unreachable_broker_is_a_typed_error():
    source = options.source(
        {
            "pk.bootstrap.servers": "127.0.0.1:1",
            "subscribe": "t",
            "pk.default.api.timeout.ms": "50",
        },
        streaming=True,
    )
    with pytest.raises(errors.BrokerUnavailable):
        PkStreamReader(source, COLUMNS).initialOffset()


def test_a_scan_goes_on_inside_a_batch_of_the_next_leader(broker):
    """What the tier gave need not end where a batch of the log does."""
    (log,) = broker.create("t")
    fill(log, 10, 10)
    one = reader(broker)
    start = one.initialOffset()
    end = step(one, start)
    broker.cold_ends, broker.break_after = [5], [1]
    assert offsets_of(one, start, end) == list(range(20))
    assert broker.streams == 2


def test_a_broker_that_is_behind_takes_no_partition_away(broker):
    logs = broker.create("t", 2)
    for log in logs:
        fill(log, 3)
    one = reader(broker, subscribePattern="t|u", failOnDataLoss="false")
    start = one.initialOffset()
    end = step(one, start)
    broker.behind = [{"t": 1}, {}]
    assert step(one, end) == end
    assert broker.behind == []
    fill(logs[1], 2)
    assert at(step(one, end)) == {"0": 3, "1": 5}


def test_a_topic_that_a_broker_does_not_know_yet_is_no_loss(broker):
    (log,) = broker.create("t")
    fill(log, 5)
    one = reader(broker, failOnDataLoss="false")
    start = one.initialOffset()
    end = step(one, start)
    broker.unknown_topics = 2
    assert offsets_of(one, start, end) == list(range(5))
    broker.behind = [{}]  # the executor's process asks for the leader
    assert offsets_of(one, start, end) == list(range(5))


def test_what_is_left_of_a_range_is_read_though_its_beginning_is_gone(broker):
    """It aged out between the plan and the read."""
    (log,) = broker.create("t")
    fill(log, *[10] * 3)
    broker.frame_bytes = 1
    one = reader(broker, failOnDataLoss="false")
    start = one.initialOffset()
    (task,) = one.partitions(start, step(one, start))
    log.log_start = 12
    with pytest.warns(PkWarning, match=r"\[0, 12\) is gone"):
        found = [o for batch in one.read(task) for o in batch.column("offset").to_pylist()]
    assert found == list(range(12, 30))
    log.log_start = 30
    with pytest.warns(PkWarning, match=r"\[0, 30\) is gone"):
        assert list(one.read(task)) == []
    with pytest.raises(errors.DataLoss, match=r"\[0, 30\) is gone"):
        list(reader(broker).read(task))
