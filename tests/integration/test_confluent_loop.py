"""A loop that was written for confluent-kafka runs on a real server (docs/confluent.md).

`LOOP` is the loop; its first line is the only one that is changed.  The configuration is passed as
keyword arguments, and as the dict that confluent-kafka takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pk import AdminClient, Producer
from pk import TopicPartition as Place
from pk.cli.embedded import EmbeddedServer
from pk.client.confluent import Consumer, KafkaException, Message, TopicPartition

pytestmark = pytest.mark.integration

RECORDS = 30
IMPORT = "from confluent_kafka import"
#: What a program has that reads a topic, commits, reads some of it again, and ends.
LOOP = """
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition


def main(config, process, wanted):
    consumer = make(config)
    again = True
    try:
        consumer.subscribe(["t"], on_assign=assigned, on_revoke=revoked)
        while wanted > 0:
            msg = consumer.poll(timeout=1.0)
            if msg is None:
                continue
            if msg.error():
                if msg.error().code() == KafkaError._PARTITION_EOF:
                    continue
                raise KafkaException(msg.error())
            process(msg.topic(), msg.partition(), msg.offset(), msg.key(), msg.value())
            wanted -= 1
            consumer.commit(message=msg, asynchronous=False)
            if again and msg.offset() == 9:
                again = False
                consumer.seek(TopicPartition(msg.topic(), msg.partition(), 5))
    finally:
        consumer.close()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    folder: Path = tmp_path_factory.mktemp("confluent")
    made = {"group_initial_rebalance_delay_ms": 0}
    with EmbeddedServer(folder, settings=made) as running:
        with AdminClient(running.address) as admin:
            admin.create_topic("t", partitions=1)
        with Producer(running.address) as producer:
            for number in range(RECORDS):
                producer.send("t", b"%d" % number, key=b"k", headers=[("h", b"%d" % number)])
        yield running


@pytest.mark.parametrize("form", ["keywords", "dict"])
def test_an_unmodified_loop_runs(server: EmbeddedServer, form: str) -> None:
    """subscribe, poll, commit, seek, close; and the next member continues."""
    called: list[tuple[str, list[TopicPartition]]] = []

    def make(config: dict[str, Any]) -> Consumer:
        if form == "dict":
            return Consumer(config)
        return Consumer(**{name.replace(".", "_"): value for name, value in config.items()})

    program: dict[str, Any] = {
        "make": make,
        "assigned": lambda _, places: called.append(("assigned", places)),
        "revoked": lambda _, places: called.append(("revoked", places)),
    }
    exec(LOOP.replace(IMPORT, "from pk.client.confluent import"), program)
    config = {
        "bootstrap.servers": server.address,
        "group.id": f"group-{form}",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    }
    seen: list[int] = []

    def process(topic: str, partition: int, offset: int, key: bytes, value: bytes) -> None:
        assert (topic, partition, key, value) == ("t", 0, b"k", b"%d" % offset)
        seen.append(offset)

    program["main"](config, process, 20)
    assert seen == [*range(10), *range(5, 15)]
    assert [(name, places) for name, places in called] == [
        ("assigned", [TopicPartition("t", 0)]),
        ("revoked", [TopicPartition("t", 0)]),
    ]
    with AdminClient(server.address) as admin:
        assert admin.group_offsets(f"group-{form}") == {Place("t", 0): 15}
    seen.clear()
    program["main"](config, process, RECORDS - 15)
    assert seen == [*range(15, RECORDS)], "the next member begins where this one has committed"


def messages(consumer: Consumer, count: int) -> list[Message]:
    found: list[Message] = []
    while len(found) < count:
        found += consumer.consume(count - len(found), timeout=1.0)
    return found


def test_the_other_forms_of_calls(server: EmbeddedServer) -> None:
    options = {"group_id": "forms", "auto_offset_reset": "smallest", "enable_auto_commit": "false"}
    with Consumer(bootstrap_servers=server.address, **options) as consumer:

        def assign(which: Consumer, places: list[TopicPartition]) -> None:
            for place in places:
                place.offset = 20
            which.assign(places)

        consumer.subscribe(["^t$"], on_assign=assign, on_revoke=lambda which, _: which.unassign())
        found = messages(consumer, 3)
        assert [each.offset() for each in found] == [20, 21, 22]
        assert found[0].headers() == [("h", b"20")]
        assert (found[0].timestamp()[0], len(found[0])) == (1, 2)
        place = TopicPartition("t", 0)
        assert consumer.position([place])[0].offset == 23
        assert consumer.committed([place])[0].offset == -1001
        (committed,) = consumer.commit(asynchronous=False) or []
        assert (committed, committed.offset) == (place, 23)
        consumer.commit(offsets=[TopicPartition("t", 0, 22)], asynchronous=False)
        assert consumer.committed([place])[0].offset == 22
        assert consumer.get_watermark_offsets(place) == (0, RECORDS)
        assert consumer.assignment() == [place]
    with pytest.raises(RuntimeError, match="closed"):
        consumer.poll(0)
    with Consumer(bootstrap_servers=server.address, **options) as consumer:
        consumer.assign([place])
        assert messages(consumer, 1)[0].offset() == 22, "assign begins at the committed offset"
        consumer.seek(TopicPartition("t", 0, -2))
        assert messages(consumer, 1)[0].offset() == 0


def test_what_would_mean_something_else_is_refused(server: EmbeddedServer) -> None:
    where = {"bootstrap.servers": server.address, "group.id": "g"}
    for option in (
        {"enable.auto.offset.store": False},
        {"enable.partition.eof": True},
        {"statistics.interval.ms": 100},
        {"max_poll_records": 5},
    ):
        with pytest.raises(KafkaException) as raised:
            Consumer({**where, **option})
        assert raised.value.args[0].name() == "InvalidConfig"
    with Consumer(where) as consumer, pytest.raises(KafkaException) as raised:
        consumer.commit(offsets=[TopicPartition("none", 0, 1)], asynchronous=False)
    error = raised.value.args[0]
    assert error.code() == error.UNKNOWN_TOPIC_OR_PART
    assert "none" in error.str()
