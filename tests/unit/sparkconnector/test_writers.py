"""What a sink's tasks send and report: sparkconnector/task_writer B1 to B3."""

from __future__ import annotations

import datetime
import pickle

import pyarrow as pa
import pytest

pytest.importorskip("pyspark")

from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructField, StructType

from pk import errors
from pk.log import columns
from pk.sparkconnector import sink_options
from pk.sparkconnector.batch_commit import check_messages
from pk.sparkconnector.batch_writer import PkWriter
from pk.sparkconnector.planner import PkWarning
from pk.sparkconnector.stream_writer import PkStreamWriter
from pk.sparkconnector.task_writer import Columns, PkCommit, sums_of

UTC = datetime.UTC


def sink(broker=None, **given) -> sink_options.SinkOptions:
    """At least once: the scripted broker has no coordinator of jobs."""
    address = "h:1" if broker is None else broker.address
    base = {"pk.bootstrap.servers": address, "pk.delivery": "at_least_once"}
    return sink_options.sink({**base, **given})


def schema_of(**kinds) -> StructType:
    return StructType([StructField(name, kind) for name, kind in kinds.items()])


VALUE = schema_of(value=BinaryType())


def records(broker, topic: str) -> list[dict]:
    found = []
    for number, log in enumerate(broker.cluster.logs_of(topic)):
        for raw in log.stored:
            for row in columns.decode(raw, decoded_bytes_max=1 << 26).to_pylist():
                found.append({"partition": number, **row})
    return found


@pytest.mark.parametrize(
    ("schema", "given", "words"),
    [
        (schema_of(key=BinaryType()), {"topic": "t"}, "needs a column value"),
        (VALUE, {}, "option topic, or a column topic"),
        (schema_of(value=LongType()), {"topic": "t"}, "value is bigint; the sink takes string or"),
        (
            schema_of(value=BinaryType(), partition=LongType()),
            {"topic": "t"},
            "partition is bigint",
        ),
        (schema_of(value=BinaryType(), VALUE=BinaryType()), {"topic": "t"}, "two columns value"),
    ],
)
def test_columns_are_judged_on_the_driver(schema, given, words):
    with pytest.raises(errors.InvalidOption, match=words):
        Columns(schema, sink(**given))


def test_other_columns_are_ignored_with_a_warning():
    schema = schema_of(value=StringType(), carrier=StringType())
    with pytest.warns(PkWarning, match="carrier"):
        chosen = Columns(schema, sink(topic="t"))
    assert list(chosen.names) == ["value"]


def test_rows_go_to_the_topic_of_their_column():
    chosen = Columns(schema_of(topic=StringType(), Value=StringType()), sink())
    batch = pa.record_batch({"topic": ["b", "a", "b"], "Value": ["1", "2", "3"]})
    found = {topic: rows.column("value").to_pylist() for topic, rows in chosen.split(batch)}
    assert found == {"b": ["1", "3"], "a": ["2"]}
    with pytest.raises(errors.InvalidRecord, match="topic is null"):
        list(chosen.split(pa.record_batch({"topic": [None], "Value": ["1"]}, schema=pa.schema(
            [("topic", pa.string()), ("Value", pa.string())]))))  # fmt: skip


def test_the_option_topic_wins_over_the_column():
    chosen = Columns(schema_of(topic=StringType(), value=StringType()), sink(topic="x"))
    batch = pa.record_batch({"topic": ["b", None], "value": ["1", "2"]})
    assert [(topic, rows.num_rows) for topic, rows in chosen.split(batch)] == [("x", 2)]


def test_a_task_writes_every_column_and_reports_offsets(broker):
    broker.create("out", 3)
    kinds = {"key": StringType(), "value": BinaryType(), "partition": IntegerType()}
    writer = PkWriter(sink(broker, topic="out"), schema_of(**kinds), overwrite=False)
    batch = pa.record_batch(
        {
            "key": pa.array(["k", None, "k"]),
            "value": pa.array([b"1", None, b"3"], pa.binary()),
            "partition": pa.array([2, 0, 2], pa.int32()),
        }
    )
    message = pickle.loads(pickle.dumps(writer)).write(iter([batch]))
    assert isinstance(message, PkCommit)
    assert message.rows == 3
    assert message.spans == {"out": {0: (0, 0), 2: (0, 1)}}
    assert message.producer_id > 100
    assert message.epoch == 0
    writer.commit([message, PkCommit(-1, -1)])
    found = {(r["partition"], r["offset"]): (r["key"], r["value"]) for r in records(broker, "out")}
    assert found == {(2, 0): (b"k", b"1"), (2, 1): (b"k", b"3"), (0, 0): (None, None)}


def test_headers_and_timestamps_are_kept(broker):
    broker.create("out")
    stamp = datetime.datetime(2013, 1, 1, 5, tzinfo=UTC)
    from pk.sparkconnector.rows import HEADERS

    batch = pa.record_batch(
        {
            "value": pa.array([b"1", b"2"], pa.binary()),
            "headers": pa.array(
                [[{"key": "h", "value": b"x"}, {"key": "h", "value": None}], None], HEADERS
            ),
            "timestamp": pa.array([stamp, None], pa.timestamp("us", "Etc/UTC")),
        }
    )
    from pk.sparkconnector.task_writer import write_all

    chosen = Columns(VALUE, sink(topic="out"))
    chosen.names |= {"headers": "headers", "timestamp": "timestamp"}
    write_all(sink(broker, topic="out"), chosen, iter([batch]))
    first, second = records(broker, "out")
    assert first["timestamp"] == stamp
    assert first["headers"] == [{"key": "h", "value": b"x"}, {"key": "h", "value": None}]
    assert second["timestamp"] > stamp
    assert second["headers"] == []


def test_an_empty_task_opens_no_producer(broker):
    broker.create("out")
    before = broker.cluster.next_producer_id
    writer = PkStreamWriter(sink(broker, topic="out"), VALUE, overwrite=True)
    message = writer.write(iter([]))
    assert message == PkCommit(-1, -1)
    writer.commit([message], 3)
    assert broker.cluster.next_producer_id == before


def test_a_task_without_the_properties_of_its_batch_writes_nothing():
    writer = PkStreamWriter(sink(topic="out", **{"pk.delivery": "exactly_once"}), VALUE, False)
    rows = pa.record_batch({"value": pa.array([b"1"], pa.binary())})
    with pytest.raises(errors.UnsupportedFeature, match="at_least_once"):
        writer.write(iter([rows]))


def test_an_unknown_topic_fails_the_task(broker, monkeypatch):
    # The first answer is believed.
    monkeypatch.setattr("pk.client.network_client.UNKNOWN_TOPIC_MS", 0)
    writer = PkWriter(sink(broker, topic="nowhere"), VALUE, overwrite=False)
    with pytest.raises(errors.UnknownTopicOrPartition):
        writer.write(iter([pa.record_batch({"value": pa.array([b"1"], pa.binary())})]))


def test_sums_do_not_depend_on_the_batches_of_spark():
    stamp = datetime.datetime(2013, 1, 1, 5, tzinfo=UTC)
    from pk.sparkconnector.rows import HEADERS

    rows = pa.record_batch(
        {
            "key": pa.array(["a", None, "b", "a"]),
            "value": pa.array([b"1", b"22", None, b"22"], pa.binary()),
            "partition": pa.array([0, None, 1, 1], pa.int32()),
            "timestamp": pa.array([stamp, None, stamp, None], pa.timestamp("us", "UTC")),
            "headers": pa.array([[{"key": "h", "value": b"x"}], None, [], None], HEADERS),
        }
    )
    whole = sums_of(rows)
    assert (whole.rows, whole.bytes) == (4, 8)
    for cut in range(5):
        assert sums_of(rows.slice(0, cut)).plus(sums_of(rows.slice(cut))) == whole
    for name in rows.schema.names:  # each column counts, and so does its absence
        assert sums_of(rows.drop_columns([name])).row_sum != whole.row_sum
        column = rows.column(name).take(pa.array([1, 0, 2, 3]))
        moved = rows.set_column(rows.schema.get_field_index(name), name, column)
        assert sums_of(moved).row_sum != whole.row_sum


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([None], "instead of what it stored"),
        ([PkCommit(7, 0, {"t": {0: (0, 4)}}, 6)], "6 rows in 5 offsets"),
        (
            [PkCommit(7, 0, {"t": {0: (0, 4)}}, 5), PkCommit(7, 0, {"t": {1: (0, 0)}}, 1)],
            "two tasks",
        ),
        ([PkCommit(-1, -1, {"t": {0: (0, 4)}}, 5)], "producer id -1"),
    ],
)
def test_the_driver_checks_what_tasks_report(messages, words):
    with pytest.raises(errors.InternalError, match=words):
        check_messages(messages)


def test_the_driver_adds_up_what_tasks_report():
    messages = [
        PkCommit(7, 0, {"t": {0: (0, 4)}}, 5),
        PkCommit(-1, -1),
        PkCommit(8, 0, {"t": {0: (2, 9)}}, 3),
    ]
    assert check_messages(messages) == 8


def test_abort_undoes_nothing_and_says_so(broker):
    writer = PkStreamWriter(sink(topic="out"), VALUE, overwrite=False)
    with pytest.warns(PkWarning, match="the write failed; 5 rows"):
        writer.abort([PkCommit(7, 0, {"t": {0: (0, 4)}}, 5), None], 4)


def test_overwrite_deletes_what_was_there_once_all_is_stored(broker):
    (log,) = broker.create("out")
    log.append(columns.encode_lists([b"old"] * 4))
    with pytest.raises(errors.InvalidOption, match=r'use mode\("append"\).*"truncateTopic"'):
        PkWriter(sink(broker, topic="out"), VALUE, overwrite=True)
    assert log.end == 4, "nothing was touched"
    writer = PkWriter(sink(broker, topic="out", truncateTopic="true"), VALUE, overwrite=True)
    message = writer.write(iter([pa.record_batch({"value": pa.array([b"new"], pa.binary())})]))
    assert broker.deleted == {}
    writer.commit([message])
    assert broker.deleted == {("id-of-out", 0): 4}
    with pytest.raises(errors.InvalidOption, match="needs the option topic"):
        PkWriter(
            sink(broker, truncateTopic="TRUE"),
            schema_of(topic=StringType(), value=BinaryType()),
            overwrite=True,
        )
