"""The client and its commands with a real server, as far as the simulator cannot show it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pk import AdminClient, Consumer, Producer, TopicPartition, errors
from pk.cli.embedded import EmbeddedServer
from pk.client.partitioner import partition_of

pytestmark = pytest.mark.integration

BIN = Path(sys.executable).parent / "pk"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path_factory.mktemp("client") / "pk") as running:
        yield running


@pytest.fixture
def admin(server: EmbeddedServer) -> Iterator[AdminClient]:
    with AdminClient(server.address) as client:
        yield client


@pytest.fixture
def topic(admin: AdminClient, request: pytest.FixtureRequest) -> Iterator[str]:
    name = re.sub("[^a-z0-9_]+", "-", request.node.name)[:100].strip("-")
    admin.create_topic(name, partitions=3)
    yield name
    with contextlib.suppress(errors.UnknownTopicOrPartition):
        admin.delete_topic(name)


def read(address: str, topic: str, count: int, **options: Any) -> list[Any]:
    found: list[Any] = []
    with Consumer(address, auto_offset_reset="earliest", **options) as consumer:
        consumer.subscribe([topic])
        while len(found) < count:
            more = consumer.poll(10)
            assert more, f"{len(found)} of {count} came"
            found += more
    return found


# -- the producer ----------------------------------------------------------------------------------


def test_a_topic_that_is_created_again_takes_what_is_sent_right_after(
    server: EmbeddedServer, admin: AdminClient
) -> None:
    """A long-lived producer sends at any time; it learns of the deletion and of the new topic one
    after the other.
    """
    admin.create_topic("again", 3)
    with Producer(server.address, linger_ms=0) as producer:
        producer.send("again", b"first").result(30)
        for number in range(25):
            admin.delete_topic("again")
            admin.create_topic("again", 3)
            assert producer.send("again", b"%d" % number).result(30).offset == 0
    admin.delete_topic("again")


def test_a_topic_may_be_created_while_send_waits_for_it(
    server: EmbeddedServer, admin: AdminClient
) -> None:
    """`send` waits for max_block_ms, not only for the time that metadata take to arrive."""
    create = threading.Timer(2.5, admin.create_topic, ["late"])
    with Producer(server.address, max_block_ms=60_000) as producer:
        create.start()
        assert producer.send("late", b"v").result(30).offset == 0
    create.join()
    with Producer(server.address, max_block_ms=300) as producer:
        with pytest.raises(errors.UnknownTopicOrPartition, match="create it first"):
            producer.send("never", b"v")
        with pytest.raises(errors.UnknownTopicOrPartition):
            producer.partitions_for("never")
    admin.delete_topic("late")


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_every_shape_of_record_survives(
    server: EmbeddedServer, topic: str, compression: str
) -> None:
    told: list[Any] = []
    with Producer(server.address, compression=compression) as producer:
        futures = [
            producer.send(topic, b"v", key=b"k", headers=[("h", b"1"), ("h", None)]),
            producer.send(topic, None, key=b"k"),
            producer.send(topic, b"", key=b""),
            producer.send(topic, b"stamped", partition=2, timestamp_ms=12_345),
            producer.send(topic, b"told", on_delivery=lambda *each: told.append(each)),
        ]
        metas = [future.result(10) for future in futures]
    by_place = {(r.partition, r.offset): r for r in read(server.address, topic, 5)}
    records = [by_place[m.partition, m.offset] for m in metas]
    assert [(r.key, r.value) for r in records] == [
        (b"k", b"v"), (b"k", None), (b"", b""), (None, b"stamped"), (None, b"told"),
    ]  # fmt: skip
    assert records[0].headers == (("h", b"1"), ("h", None))
    assert records[3].partition == 2
    assert records[3].timestamp_ms == metas[3].timestamp_ms == 12_345
    assert records[0].timestamp_ms == metas[0].timestamp_ms
    assert told == [(metas[4], None)]


@pytest.mark.parametrize("acks", ["0", "1"])
def test_less_acknowledgement_stores_as_much_when_nothing_fails(
    server: EmbeddedServer, topic: str, acks: str
) -> None:
    with Producer(server.address, acks=acks) as producer:
        futures = [producer.send(topic, bytes(1000), key=b"%d" % i) for i in range(5000)]
    offsets = {future.result(0).offset for future in futures}
    assert (offsets == {-1}) == (acks == "0")
    assert len(read(server.address, topic, 5000)) == 5000


def test_many_threads_share_a_producer_and_keep_their_own_order(
    server: EmbeddedServer, topic: str
) -> None:
    with Producer(server.address, batch_size=4096) as producer:

        def work(number: int) -> None:
            for i in range(2000):
                producer.send(topic, b"%d" % i, key=b"thread-%d" % number)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        producer.flush(30)
    records = read(server.address, topic, 8000)
    for number in range(4):
        key = b"thread-%d" % number
        mine = [r for r in records if r.key == key]
        assert {r.partition for r in mine} == {partition_of(key, 3)}
        assert [int(r.value) for r in mine] == list(range(2000))


def test_send_batch_by_key_by_column_and_sticky(server: EmbeddedServer, topic: str) -> None:
    values = pa.array([b"%d" % i for i in range(9000)], pa.binary())
    keys = pa.array([b"k%d" % (i % 50) for i in range(9000)], pa.binary())
    chosen = pa.array([i % 3 for i in range(9000)], pa.int32())
    with Producer(server.address) as producer:
        keyed = producer.send_batch(topic, pa.record_batch([values, keys], names=["value", "key"]))
        told = producer.send_batch(
            topic, pa.record_batch([values, chosen], names=["value", "partition"])
        )
        sticky = producer.send_batch(topic, pa.record_batch([values], names=["value"]))
        assert sum(part.record_count for part in keyed.result(10)) == 9000
        assert sorted((p.partition, p.record_count) for p in told.result(10)) == [
            (0, 3000), (1, 3000), (2, 3000),
        ]  # fmt: skip
        assert len({part.partition for part in sticky.result(10)}) == 1
        empty = producer.send_batch(topic, pa.record_batch([values.slice(0, 0)], names=["value"]))
        assert empty.result(1) == []
    for record in read(server.address, topic, 27000):
        if record.key is not None:
            assert record.partition == partition_of(record.key, 3)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"value": pa.array([1])}, "column value holds int64"),
        ({"valeu": pa.array([b"x"])}, "send_batch takes the columns"),
        ({"value": pa.array([b"x"]), "timestamp": pa.array(["now"])}, "column timestamp"),
        ({"value": pa.array([b"x"]), "timestamp": pa.array([-5])}, "out of range"),
    ],
)
def test_send_batch_refuses_what_it_cannot_store(
    server: EmbeddedServer, topic: str, columns: Any, message: str
) -> None:
    with (
        Producer(server.address) as producer,
        pytest.raises(errors.SerializationError, match=message),
    ):
        producer.send_batch(topic, pa.RecordBatch.from_pydict(columns))


def test_bad_records_are_refused_before_they_are_taken(server: EmbeddedServer, topic: str) -> None:
    with Producer(server.address, max_block_ms=1_000) as producer:
        with pytest.raises(errors.SerializationError, match="value is str"):
            producer.send(topic, "text")
        with pytest.raises(errors.SerializationError, match="header"):
            producer.send(topic, b"x", headers=[(b"k", b"v")])  # type: ignore[list-item]
        with pytest.raises(errors.RecordTooLarge):
            producer.send(topic, bytes(9 << 20))
        with pytest.raises(errors.InvalidPartitions, match="no partition 7"):
            producer.send(topic, b"x", partition=7)
        with pytest.raises(errors.UnknownTopicOrPartition, match="create it first") as told:
            producer.send("nowhere", b"x")
        assert told.value.acts == "user"
    with pytest.raises(errors.ClosedError):
        producer.send(topic, b"x")
    producer.close()


def test_a_full_buffer_blocks_then_says_so_and_loses_nothing(
    server: EmbeddedServer, topic: str
) -> None:
    """The broker is stopped: every accepted record is stored once it continues."""
    with Producer(
        server.address, buffer_memory=64 * 1024, batch_size=16 * 1024, max_block_ms=2_000
    ) as producer:
        producer.send(topic, b"first").result(10)
        broker = server.pids()["broker"]
        os.kill(broker, signal.SIGSTOP)
        futures = []
        try:
            for _ in range(10_000):
                futures.append(producer.send(topic, bytes(1000)))
            pytest.fail("the buffer took everything")
        except errors.BufferExhausted:
            pass
        finally:
            os.kill(broker, signal.SIGCONT)
        assert 30 <= len(futures) <= 66
        producer.flush(30)
        assert all(future.exception(0) is None for future in futures)


def test_a_killed_broker_costs_no_acknowledged_record_and_doubles_none(
    server: EmbeddedServer, topic: str
) -> None:
    with Producer(server.address, linger_ms=1) as producer:
        futures = []
        for i in range(3000):
            futures.append(producer.send(topic, b"%d" % i, key=b"%d" % (i % 10)))
            if i == 1500:
                futures[0].result(10)
                os.kill(server.pids()["broker"], signal.SIGKILL)
        producer.flush(60)
        metas = [future.result(0) for future in futures]
    records = read(server.address, topic, 3000)
    assert sorted(int(r.value) for r in records) == list(range(3000))
    by_place = {(r.partition, r.offset): int(r.value) for r in records}
    assert [by_place[m.partition, m.offset] for m in metas] == list(range(3000))


def test_a_forked_child_is_told_to_open_its_own(server: EmbeddedServer, topic: str) -> None:
    """Whatever the child calls: the server takes no record that the parent did not send, and no
    record is read twice.
    """
    code = (
        "import os, sys, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "import pyarrow as pa\n"
        "from pk import Consumer, Producer, errors\n"
        "topic, rows = sys.argv[2], pa.record_batch([pa.array([b'child'])], names=['value'])\n"
        "producer = Producer(sys.argv[1])\n"
        "for _ in range(3):\n"
        "    producer.send(topic, b'parent').result(10)\n"
        "consumer = Consumer(sys.argv[1], auto_offset_reset='earliest')\n"
        "consumer.subscribe([topic])\n"
        "assert next(consumer).value == b'parent'\n"
        "producer.send(topic, b'open chunk')\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    calls = (\n"
        "        lambda: producer.flush(5),\n"
        "        lambda: producer.send(topic, b'child').result(5),\n"
        "        lambda: producer.send_batch(topic, rows).result(5),\n"
        "        lambda: consumer.poll(5),\n"
        "        lambda: next(consumer),\n"
        "    )\n"
        "    for number, call in enumerate(calls):\n"
        "        try:\n"
        "            call()\n"
        "            os._exit(10 + number)\n"
        "        except errors.UnsupportedFeature:\n"
        "            pass\n"
        "        except BaseException:\n"
        "            os._exit(20 + number)\n"
        "    os._exit(7)\n"
        "assert os.waitpid(child, 0)[1] >> 8 == 7\n"
        "producer.send(topic, b'still').result(10)\n"
        "producer.close()\n"
        "assert next(consumer).value == b'parent'\n"
        "consumer.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, server.address, topic],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()


# -- the consumer ----------------------------------------------------------------------------------


def test_positions_seek_pause_and_times(server: EmbeddedServer, topic: str) -> None:
    place = TopicPartition(topic, 0)
    with Producer(server.address) as producer:
        for i in range(100):
            producer.send(topic, b"%d" % i, partition=0, timestamp_ms=1000 + i)
    with Consumer(server.address, auto_offset_reset="earliest", max_poll_records=7) as consumer:
        consumer.assign([place])
        assert consumer.position(place) == 0
        assert [r.offset for r in consumer.poll(10)] == list(range(7))
        assert consumer.position(place) == 7
        consumer.seek(place, 50)
        assert consumer.poll(10)[0].offset == 50
        consumer.pause(place)
        assert consumer.paused() == [place]
        assert consumer.poll(0.2) == []
        consumer.resume(place)
        assert consumer.poll(10)[0].offset == 57
        assert consumer.beginning_offsets([place]) == {place: 0}
        assert consumer.end_offsets([place]) == {place: 100}
        found = consumer.offsets_for_times({place: 1042, TopicPartition(topic, 1): 0})
        assert found[place] == (42, 1042)
        assert found[TopicPartition(topic, 1)] is None
        consumer.seek_to_beginning(place)
        assert next(consumer).offset == 0
        assert next(consumer).offset == 1
        assert consumer.position(place) == 2
        consumer.seek_to_end()
        assert consumer.position(place) == 100
        with pytest.raises(errors.InvalidRequest, match="not assigned"):
            consumer.seek(TopicPartition(topic, 1), 0)


def test_an_offset_out_of_range_without_a_policy_is_told(
    server: EmbeddedServer, topic: str, admin: AdminClient
) -> None:
    place = TopicPartition(topic, 0)
    with Producer(server.address) as producer:
        for _ in range(10):
            producer.send(topic, b"x", partition=0)
    assert admin.delete_records({place: 5}) == {place: 5}
    with Consumer(server.address, auto_offset_reset="none") as consumer:
        consumer.assign([place])
        consumer.seek(place, 2)
        with pytest.raises(errors.NoOffsetForPartition, match="position 2 is out of range"):
            consumer.poll(10)
        consumer.seek(place, 5)
        assert [r.offset for r in consumer.poll(10)] == [5, 6, 7, 8, 9]


def test_a_record_that_cannot_be_deserialised_is_told_until_a_seek_passes_it(
    server: EmbeddedServer, topic: str
) -> None:
    place = TopicPartition(topic, 0)
    with Producer(server.address) as producer:
        for value in (b"1", b"2", b"{", b"4"):
            producer.send(topic, value, partition=0)
    with Consumer(
        server.address, auto_offset_reset="earliest", value_deserializer="json"
    ) as consumer:
        consumer.assign([place])
        assert [r.value for r in consumer.poll(10)] == [1, 2]
        for _ in range(2):
            with pytest.raises(errors.SerializationError):
                consumer.poll(10)
        assert consumer.position(place) == 2
        consumer.seek(place, 3)
        assert [r.value for r in consumer.poll(10)] == [4]


def test_batches_carry_offsets_and_types(server: EmbeddedServer, topic: str) -> None:
    with Producer(server.address) as producer:
        producer.send_batch(topic, pa.record_batch([pa.array([b"a", None])], names=["value"]))
    with Consumer(server.address, auto_offset_reset="earliest") as consumer:
        consumer.subscribe(pattern=topic)
        ((place, rows),) = consumer.poll_batches(10)
    assert place.topic == topic
    assert rows.schema.names == ["offset", "timestamp", "key", "value", "headers"]
    assert rows.column("offset").to_pylist() == [0, 1]
    assert rows.column("value").to_pylist() == [b"a", None]


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"lingerms": 5}, errors.InvalidConfig, "did you mean linger_ms"),
        ({"acks": "2"}, errors.InvalidConfig, "acks is one of"),
        ({"linger.ms": -1}, errors.InvalidConfig, "at least 0"),
        ({"acks": 1, "enable_idempotence": True}, errors.InvalidConfig, "needs acks=all"),
        ({"transactional_id": "t", "acks": 1}, errors.InvalidConfig, "needs acks=all"),
        ({"batch_size": 1 << 20, "buffer_memory": 1 << 16}, errors.InvalidConfig, "batch_size"),
        ({"linger_ms": 1, "linger.ms": 1}, errors.InvalidConfig, "given twice"),
    ],
)
def test_producer_options_are_judged_before_anything_opens(
    options: Any, kind: type[errors.PkError], message: str
) -> None:
    before = threading.active_count()
    with pytest.raises(kind, match=message):
        Producer("127.0.0.1:1", **options)
    assert threading.active_count() == before


def test_what_is_not_built_says_so() -> None:
    with (
        Consumer("127.0.0.1:1") as consumer,
        pytest.raises(errors.InvalidRequest, match="group_id"),
    ):
        consumer.commit()
    with pytest.raises(errors.InvalidOption, match="HOST:PORT"):
        Producer("nohost:port")


def test_an_unreachable_broker_is_named() -> None:
    with (
        Producer("127.0.0.1:1", max_block_ms=500) as producer,
        pytest.raises(errors.BrokerUnavailable, match=r"127\.0\.0\.1:1") as told,
    ):
        producer.send("t", b"x")
    assert told.value.acts == "operator"


# -- the commands ----------------------------------------------------------------------------------


def pk(server: EmbeddedServer, *arguments: str, text: bytes = b"", code: int = 0) -> str:
    done = subprocess.run(
        [BIN, *arguments, "--bootstrap", server.address],
        input=text,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, (done.stdout, done.stderr)
    return (done.stdout if code == 0 else done.stderr).decode()


def test_topics_from_creation_to_deletion(server: EmbeddedServer) -> None:
    pk(server, "topics", "create", "cli", "--partitions", "2", "--config", "retention.ms=-1")
    assert "exists" in pk(server, "topics", "create", "cli", code=1)
    there = pk(server, "topics", "create", "cli", "--if-not-exists")
    assert there == "topic cli already exists (unchanged)\n"
    assert "retention_ms" in pk(
        server, "topics", "create", "c2", "--config", "retention.mss=1", code=1
    )
    assert [t["name"] for t in json.loads(pk(server, "topics", "list", "--json"))["topics"]].count(
        "cli"
    ) == 1
    out = pk(server, "topics", "alter", "cli", "--add-partitions", "1")
    assert "3 partitions" in out
    assert "other partitions" in out, "the reply says what it does to keys"
    (described,) = json.loads(pk(server, "topics", "describe", "cli", "--json"))["topics"]
    assert described["configs"] == {"retention_ms": "-1"}
    assert [p["log_end"] for p in described["partitions"]] == [0, 0, 0]
    shown = pk(server, "topics", "describe", "cli")
    for column in ("log_start", "local_log_start", "tiered_end", "LSO", "HW", "log_end", "bytes"):
        assert column in shown
    pk(server, "topics", "delete", "cli")
    assert "does not exist" in pk(server, "topics", "describe", "cli", code=1)


@pytest.mark.parametrize(
    "command",
    [["delete", "nope"], ["alter", "nope", "--config", "segment.ms=9"], ["alter", "nope",
     "--partitions", "3"]],
    ids=" ".join,
)  # fmt: skip
def test_a_topic_that_does_not_exist_is_not_asked_for_again(
    server: EmbeddedServer, command: list[str]
) -> None:
    said = pk(server, "topics", *command, code=1)
    hint = "check the name and number: pk topics describe"
    assert said == f"error: topic nope does not exist ({hint})\n"


def test_perf_waits_no_longer_than_it_is_told(server: EmbeddedServer, topic: str) -> None:
    said = pk(server, "perf", "produce", topic, "--records", "1000", "--timeout-ms", "20000")
    assert said.startswith("1,000 records in ")
    said = pk(server, "perf", "consume", topic, "--records", "1000", "--timeout-ms", "20000")
    assert said.startswith("1,000 records in ")


def test_produce_and_consume_lines(server: EmbeddedServer, topic: str, tmp_path: Path) -> None:
    pk(server, "produce", topic, "--key-separator", ":", text=b"a:1\nno key\nb:\n")
    out = pk(server, "consume", topic, "--from-beginning", "--max", "3", "--json")
    records = [json.loads(line) for line in out.splitlines()]
    assert {(r["key"], r["value"]) for r in records} == {("a", "1"), (None, "no key"), ("b", "")}
    lines = tmp_path / "lines"
    lines.write_bytes(b"".join(b"%d\n" % i for i in range(5000)))
    pk(server, "produce", topic, "--partition", "1", "--file", str(lines), "--compression", "lz4")
    out = pk(
        server, "consume", topic, "--from-beginning", "--partition", "1", "--timeout-ms", "500"
    )
    assert [v for v in out.split() if v.isdigit()][-1] == "4999"
    out = pk(
        server, "consume", topic, "--partition", "1", "--offset", "4990", "--max", "1",
        "--print-offset", "--print-key",
    )  # fmt: skip
    assert out.startswith("1:4990\tnull\t49")
    assert "no partition 9" in pk(server, "consume", topic, "--partition", "9", code=1)
    assert "--offset needs" in pk(server, "consume", topic, "--offset", "9", code=1)


def test_members_of_a_group_print_each_line_once(server: EmbeddedServer, topic: str) -> None:
    """`pk consume --group` commits what it has printed, not what it has fetched."""
    pk(server, "produce", topic, text=b"".join(b"%d\n" % i for i in range(50)))
    printed: list[str] = []
    for count in (7, 20, 23):
        out = pk(
            server, "consume", topic, "--group", topic, "--from-beginning", "--max", str(count)
        )
        assert len(out.split()) == count
        printed += out.split()
    assert sorted(map(int, printed)) == list(range(50))
    shown = json.loads(pk(server, "groups", "describe", topic, "--json"))
    assert (shown["state"], {each["lag"] for each in shown["offsets"]}) == ("Empty", {0})
    out = pk(server, "consume", topic, "--group", topic, "--timeout-ms", "4000")
    assert out == ""
    assert "takes no --partition" in pk(
        server, "consume", topic, "--group", "g", "--partition", "0", code=1
    )


def test_ctrl_c_and_a_closed_pipe_are_quiet(server: EmbeddedServer, topic: str) -> None:
    pk(server, "produce", topic, text=b"x\n" * 20_000)
    process = subprocess.Popen(
        [BIN, "consume", topic, "--from-beginning", "--bootstrap", server.address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == b"x\n"
    process.stdout.close()
    assert process.wait(20) == 141
    assert process.stderr.read() == b""
    process.stderr.close()
    process = subprocess.Popen(
        [BIN, "consume", topic, "--from-beginning", "--bootstrap", server.address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    for _ in range(20_000):
        assert process.stdout.readline() == b"x\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert (out, err) == (b"", b"")


def test_perf_reports_what_it_did(server: EmbeddedServer, topic: str) -> None:
    for mode in ("--columnar", "--records-one-by-one"):
        out = pk(
            server, "perf", "produce", topic, "--records", "20000", "--keys", "7", mode, "--json"
        )
        result = json.loads(out)
        assert result["records"] == 20_000
        assert result["latency_p99_ms"] > 0
    for mode in ("--columnar", "--records-one-by-one"):
        result = json.loads(
            pk(server, "perf", "consume", topic, "--records", "40000", mode, "--json")
        )
        assert result["records"] == 40_000
