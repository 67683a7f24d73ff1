"""Bad input to real processes: each case is a typed error that names the cause and who must act.

All tests share one server: after every test it must still serve every acknowledged record.  The
tier's bad input is in `test_tier_bad_input.py`, that of directories, ports and settings in
`test_supervisor.py`.
"""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pk import AdminClient, Consumer, Producer, TopicPartition, errors
from pk.cli.embedded import EmbeddedServer, ReservedPorts
from pk.clock import SystemClock
from pk.log import batch as batches
from pk.log import columns
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import PROTOCOL, head_of, open_stream
from pk.wire.socket_network import PkNetwork
from pk.world import StreamKind

pytestmark = pytest.mark.integration

PATIENCE_S = 30
HELLO = wire.Hello(client_id="test", protocol=PROTOCOL)
NOBODY = "00000000-0000-4000-8000-000000000000"


@dataclass
class Node:
    server: EmbeddedServer
    admin: AdminClient
    metrics: str

    @property
    def address(self) -> str:
        return self.server.address

    def topic(self, name: str, partitions: int = 1, **configs: Any) -> str:
        self.admin.create_topic(name, partitions=partitions, configs=configs)
        described = self.admin.describe_topics([name])
        return str(described[0].topic_id)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    home = tmp_path_factory.mktemp("bad")
    ports = ReservedPorts()
    metrics = ports.address()
    settings = {"metrics": metrics, "log_retention_check_interval_ms": 200}
    server = EmbeddedServer(home / "pk", tier_url=(home / "tier").as_uri(), settings=settings)
    with server, AdminClient(server.address) as admin:
        yield Node(server, admin, metrics)
    assert "BUG" not in server.log.read_text(), server.tail()


def until(holds: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if answer := holds():
            return answer
        time.sleep(0.05)
    raise AssertionError("it never came true")


def values(node: Node, topic: str, partition: int, count: int) -> list[bytes | None]:
    """Return the first `count` values of a partition."""
    found: list[bytes | None] = []
    with Consumer(node.address, auto_offset_reset="earliest") as consumer:
        consumer.assign([TopicPartition(topic, partition)])
        while len(found) < count:
            more = consumer.poll(10)
            assert more, f"{len(found)} of {count} came"
            found += [record.value for record in more]
    return found


# -- batches ---------------------------------------------------------------------------------------


def good(value: bytes = b"good", **fields: Any) -> bytes:
    rows = pa.RecordBatch.from_pydict({"value": pa.array([value, value], pa.binary())})
    return b"".join(columns.encode(rows, default_timestamp=SystemClock().wall_ms(), **fields))


def corrupt() -> bytes:
    raw = bytearray(good())
    raw[-1] ^= 1
    return bytes(raw)


def wrong_magic() -> bytes:
    raw = bytearray(good())
    raw[16] ^= 0xFF
    return bytes(raw)


def hostile() -> bytes:
    """Return a batch with a valid checksum over a body whose lengths and offsets point anywhere."""
    raw = good(codec="none")
    body = b"\xff" * (len(raw) - batches.HEADER_BYTES)
    return b"".join(batches.seal(batches.read_header(raw), [body]))


def produce(
    node: Node, entries: list[tuple[str, int, bytes]]
) -> dict[int, tuple[int, str, errors.PkError | None]]:
    """Send the batches; return index of an entry → its base offset, the message and the error as a
    client gets it.
    """

    async def main() -> dict[int, tuple[int, str, errors.PkError | None]]:
        network = PkNetwork()
        try:
            stream, _ = await open_stream(network, node.address, StreamKind.PRODUCE, HELLO)
            request = wire.ProduceRequest(acks=-1)
            for topic_id, partition, raw in entries:
                request.partitions.add(
                    topic_id=topic_id,
                    partition=partition,
                    current_leader_epoch=-1,
                    batch_bytes=len(raw),
                )
            pieces = [raw for _, _, raw in entries]
            await stream.send(frames.encode(head_of(request, correlation_id=1), pieces))
            found: dict[int, tuple[int, str, errors.PkError | None]] = {}
            while len(found) < len(entries):
                async with asyncio.timeout(PATIENCE_S):
                    raw_reply = await stream.recv()
                assert raw_reply is not None
                for each in frames.decode(raw_reply).head.produce_reply.results:
                    error = frames.raise_error(each.error) if each.HasField("error") else None
                    found[each.index] = (each.base_offset, each.error.message, error)
            stream.close()
            return found
        finally:
            await network.close()

    return asyncio.run(main())


def test_bad_batches_are_refused_each_by_name_and_the_rest_is_stored(node: Node) -> None:
    topic_id = node.topic("batches", max_message_bytes=10_000)
    cases: list[tuple[str, int, bytes, type[errors.PkError] | None, str]] = [
        (topic_id, 0, good(b"first"), None, ""),
        (topic_id, 0, corrupt(), errors.CorruptBatch, "checksum"),
        (topic_id, 0, good()[:-7], errors.CorruptBatch, "bytes"),
        (topic_id, 0, b"\x00" * 9, errors.CorruptBatch, "no batch header"),
        (topic_id, 0, wrong_magic(), errors.CorruptBatch, "magic"),
        (topic_id, 0, good(bytes(20_000), codec="none"), errors.RecordTooLarge, "10000"),
        (topic_id, 0, hostile(), errors.InvalidRecord, "batch body"),
        (topic_id, 7, good(), errors.UnknownTopicOrPartition, "no partition 7"),
        (NOBODY, 0, good(), errors.UnknownTopicId, NOBODY),
        (topic_id, 0, good(b"last"), None, ""),
    ]
    answers = produce(node, [case[:3] for case in cases])
    for index, (_, _, _, kind, says) in enumerate(cases):
        base, message, error = answers[index]
        assert type(error) is (type(None) if kind is None else kind), (index, error)
        assert says in message, (index, message)
        if kind is None:
            assert base >= 0
        else:
            assert error is not None
            assert error.acts in ("user", "client")
    assert values(node, "batches", 0, 4) == [b"first", b"first", b"last", b"last"]


def test_offsets_out_of_range_name_the_range(node: Node) -> None:
    node.topic("ranges")
    with Producer(node.address) as producer:
        for number in range(3):
            producer.send("ranges", b"%d" % number).result(10)
    place = TopicPartition("ranges", 0)
    with Consumer(node.address, auto_offset_reset="none") as consumer:
        consumer.assign([place])
        consumer.seek(place, 99)
        with pytest.raises(errors.NoOffsetForPartition, match="99"):
            consumer.poll(10)
        consumer.seek(place, 1)
        assert [record.offset for record in consumer.poll(10)] == [1, 2]
    for before in (-7, 4):
        with pytest.raises((errors.OffsetOutOfRange, errors.InvalidRequest), match=str(before)):
            node.admin.delete_records({place: before})
    assert values(node, "ranges", 0, 3) == [b"0", b"1", b"2"]


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("configs", "says"),
    [
        ({"retention_mss": 1}, "did you mean"),
        ({"segment_bytes": -5}, "segment_bytes"),
        ({"retention_ms": "soon"}, "retention_ms"),
        ({"retention_ms": 1_000, "local_retention_ms": 2_000}, "local_retention_ms"),
        ({"retention.ms": 1_000, "retention_ms": 2_000}, "retention"),
    ],
)
def test_topic_options(node: Node, configs: dict[str, Any], says: str) -> None:
    with pytest.raises(errors.InvalidConfig, match=says) as refused:
        node.admin.create_topic("never", configs=configs)
    assert refused.value.acts == "user"
    assert "never" not in [info.name for info in node.admin.list_topics()]


@pytest.mark.parametrize(
    ("name", "partitions", "kind"),
    [
        ("a/b", 1, errors.InvalidTopic),
        ("__mine", 1, errors.InvalidTopic),
        ("", 1, errors.InvalidTopic),
        ("never", -3, errors.InvalidPartitions),
    ],
)
def test_topics_that_cannot_be(
    node: Node, name: str, partitions: int, kind: type[errors.PkError]
) -> None:
    with pytest.raises(kind):
        node.admin.create_topic(name, partitions=partitions)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"fetch_min_bytess": 1}, "did you mean"),
        ({"fetch_max_wait_ms": -1}, "fetch_max_wait_ms"),
        ({"auto_offset_reset": "newest"}, "auto_offset_reset"),
        ({"isolation_level": "dirty"}, "isolation_level"),
    ],
)
def test_consumer_options(node: Node, options: dict[str, Any], says: str) -> None:
    with pytest.raises(errors.PkError, match=says) as refused:
        Consumer(node.address, **options)
    assert isinstance(refused.value, errors.InvalidOption | errors.InvalidConfig)
    assert refused.value.acts == "user"


# -- damage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "says"),
    [(30_000, 'error="checksum'), (2 * 20_071, 'error="offset')],
    ids=["a record", "an offset in a header, which no checksum covers"],
)
def test_a_damaged_batch_of_the_only_copy_costs_its_own_range_and_nothing_else(
    node: Node, place: int, says: str
) -> None:
    """Rule L9: the copier finds it; the range is logged and reported to readers, never skipped."""
    topic = f"damaged-{place}"
    node.topic(topic, 2, segment_bytes=100_000, tier_max_lag_ms=600_000)
    with Producer(node.address, linger_ms=0) as producer:
        for number in range(20):
            for partition in (0, 1):
                value = b"%03d" % number + bytes(20_000)
                producer.send(topic, value, partition=partition).result(20)
    home = Path(node.server.directory) / "data" / "topics" / f"{topic}-0"
    sealed = sorted(home.glob("*.log"))
    assert len(sealed) > 1
    raw = bytearray(sealed[0].read_bytes())
    with sealed[0].open("r+b") as out:
        out.seek(place)
        out.write(bytes([raw[place] ^ 0xFF]))
    node.admin.alter_configs(topic, {"tier_max_lag_ms": 100})

    def logged() -> list[str]:
        lines = node.server.log.read_text().splitlines()
        return [line for line in lines if "damaged_range" in line and topic in line]

    (line,) = until(logged)
    assert f"{topic}-0" in line
    assert says in line
    assert "pk log repair" in line
    with pytest.raises(errors.DataLoss) as told:
        values(node, topic, 0, 20)
    assert int(told.value.details["next_offset"]) - int(told.value.details["offset"]) == 1
    with Producer(node.address) as producer:
        assert producer.send(topic, b"x", partition=0).result(20).offset == 20
        assert producer.send(topic, b"more", partition=1).result(20).offset == 20
    numbers = [value[:3] for value in values(node, topic, 1, 21) if value]
    assert numbers == [b"%03d" % number for number in range(20)] + [b"mor"]
    text = urllib.request.urlopen(f"http://{node.metrics}/metrics", timeout=10).read().decode()
    assert "pk_corrupt_logs_total" in text
    described = node.admin.describe_tier(topic)
    assert isinstance(described.problem, errors.CorruptLog)
    until(lambda: node.admin.describe_tier(topic).partitions[-1].end == 21)
