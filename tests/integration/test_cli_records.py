"""`pk consume`, `pk produce` and `pk topics` with a real server: positions, formats, copies."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pk import AdminClient, Consumer, Producer, TopicPartition, errors
from pk.cli.app import run
from pk.cli.embedded import EmbeddedServer
from pk.cli.record_text import of_json

pytestmark = pytest.mark.integration

Pk = Callable[..., bytes]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path_factory.mktemp("cli") / "pk") as running:
        yield running


@pytest.fixture
def pk(
    server: EmbeddedServer,
    capsysbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> Pk:
    """Runs a command in this process; returns what it printed to stdout."""

    def call(*arguments: str, text: bytes = b"", code: int = 0) -> bytes:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
        ended = run(["--bootstrap", server.address, *arguments])
        said = capsysbinary.readouterr()
        assert ended == code, said
        return said.out if not code else said.err

    return call


@pytest.fixture(scope="module")
def numbers(server: EmbeddedServer) -> str:
    """A topic of two partitions: 0 to 19 in the first, a minute apart, nothing in the second."""
    with AdminClient(server.address) as admin, Producer(server.address) as producer:
        admin.create_topic("numbers", partitions=2)
        for number in range(20):
            producer.send(
                "numbers", b"%d" % number, partition=0, timestamp_ms=1_000_000 + number * 60_000
            )
        producer.flush()
    return "numbers"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--tail", "3"], range(17, 20)),
        (["--from", "start", "--to", "end"], range(20)),
        (["--from", "5", "--to", "8"], range(5, 8)),
        (["--from", "-4", "--to", "-2"], range(16, 18)),
        (["--from", "@1300000", "--to", "@1500001"], range(5, 9)),
        (["--from", "1970-01-01T00:34:00Z", "--to", "end"], range(18, 20)),
        (["--from", "1h", "--to", "end"], []),
        (["--tail", "9", "--grep", "[13579]$"], [11, 13, 15, 17, 19]),
        (["--from", "start", "--to", "end", "--grep", "1", "--max", "2"], [1, 10]),
        (["--tail", "2", "--follow", "--timeout-ms", "1s"], [18, 19]),
        (["--from", "18", "--timeout-ms", "1s"], [18, 19]),
        (["--offset", "18", "--partition", "0", "--to", "end"], [18, 19]),
    ],
)
def test_positions(pk: Pk, numbers: str, arguments: list[str], expected: Any) -> None:
    found = pk("consume", numbers, *arguments)
    assert found.split() == [b"%d" % number for number in expected]


@pytest.fixture(scope="module")
def orders(server: EmbeddedServer) -> list[str]:
    """Two topics of two records each, and one whose name is longer."""
    names = ["orders-a", "orders-b", "old-orders-a"]
    with AdminClient(server.address) as admin, Producer(server.address) as producer:
        for name in names:
            admin.create_topic(name, partitions=1)
            for number in range(2):
                producer.send(name, b"%d" % number, partition=0)
        producer.flush()
    return names


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["orders-a", "old-orders-a", "--tail", "1"], ["old-orders-a 1", "orders-a 1"]),
        (["orders-a", "orders-a", "--tail", "1"], ["orders-a 1"]),
        (["--include", "orders-[ab]", "--tail", "1"], ["orders-a 1", "orders-b 1"]),
        (
            ["--include", "orders-.", "--from", "start", "--to", "1"],
            ["orders-a 0", "orders-b 0"],
        ),
        (
            ["--include", "orders-.", "--from-beginning", "--max", "4"],
            ["orders-a 0", "orders-a 1", "orders-b 0", "orders-b 1"],
        ),
        (
            ["--include", "orders-.", "--group", "of-orders", "--from-beginning", "--max", "4"],
            ["orders-a 0", "orders-a 1", "orders-b 0", "orders-b 1"],
        ),
    ],
)
def test_several_topics(pk: Pk, orders: list[str], arguments: list[str], expected: Any) -> None:
    found = pk("consume", *arguments, "--print-topic", "--separator", " ", "--timeout-ms", "1m")
    assert sorted(found.decode().splitlines()) == expected


def test_a_topic_that_appears_later_is_read(server: EmbeddedServer, pk: Pk) -> None:
    def create() -> None:
        with AdminClient(server.address) as admin, Producer(server.address) as producer:
            admin.create_topic("later-1", partitions=1)
            producer.send("later-1", b"seen").result(60)

    with ThreadPoolExecutor(1) as pool:
        created = pool.submit(create)
        given = ("consume", "--include", "later-.*", "--from-beginning", "--max", "1")
        assert pk(*given, "--timeout-ms", "1m") == b"seen\n"
        created.result()


def test_a_format(pk: Pk, numbers: str) -> None:
    found = pk("consume", numbers, "--tail", "2", "--format", r"%t/%p/%o=%v@%T;")
    assert found == b"numbers/0/18=18@2080000;numbers/0/19=19@2140000;"


def test_the_end_of_a_transaction_is_an_end(server: EmbeddedServer, pk: Pk) -> None:
    """The last entry of the log is a marker, which is no record."""
    with AdminClient(server.address) as admin:
        admin.create_topic("marked", partitions=1)
    with Producer(server.address, transactional_id="marks") as producer:
        producer.init_transactions()
        for outcome in ("commit", "abort"):
            producer.begin_transaction()
            producer.send("marked", outcome.encode())
            producer.flush()
            getattr(producer, f"{outcome}_transaction")()
    given = ("consume", "marked", "--from", "start", "--to", "end", "--timeout-ms", "60s")
    begun = time.monotonic()
    assert pk(*given) == b"commit\n"
    assert time.monotonic() - begun < 50, "it ended at the end, not at the time-out"


def test_a_copied_topic_has_every_byte(server: EmbeddedServer, pk: Pk) -> None:
    with AdminClient(server.address) as admin, Producer(server.address) as producer:
        admin.create_topic("original", partitions=3)
        admin.create_topic("copy", partitions=3)
        for number, value in enumerate([b"text", b"\xff\x00\n", None, b"", "é".encode()]):
            producer.send(
                "original",
                value,
                key=[None, b"k", b"\xfe"][number % 3],
                headers=[("a", None), ("a", b"\xfd"), ("b", b"x")][: number % 4],
                partition=number % 3,
                timestamp_ms=1234 + number,
            )
        producer.flush()
    lines = pk("consume", "original", "--from", "start", "--to", "end", "--json")
    told = json.loads(pk("produce", "copy", "--json", text=lines))
    assert told == {"topic": "copy", "sent": 5, "acknowledged": 5}
    assert _records(server, "copy") == _records(server, "original")


def _records(server: EmbeddedServer, topic: str) -> list[Any]:
    with Consumer(server.address, auto_offset_reset="earliest") as consumer:
        consumer.assign([TopicPartition(topic, each) for each in range(3)])
        found: list[Any] = []
        while len(found) < 5:
            found += consumer.poll(10)
    return sorted((r.partition, r.offset, r.timestamp_ms, r.key, r.value, r.headers) for r in found)


def test_headers_and_a_time_for_every_line(pk: Pk) -> None:
    pk("topics", "create", "lines")
    given = ("--header", "from=here", "--header", "empty=", "--timestamp", "@77")
    pk("produce", "lines", *given, text=b"one\ntwo\n")
    found = [
        json.loads(line)
        for line in pk("consume", "lines", "--tail", "2", "--json").split(b"\n")[:2]
    ]
    assert {each["value"] for each in found} == {"one", "two"}
    for each in found:
        assert each["timestamp_ms"] == 77
        assert each["headers"] == [
            {"name": "from", "value": "here"},
            {"name": "empty", "value": ""},
        ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["consume", "numbers", "--from", "yesterday"], b"--from is start, end, an offset"),
        (["consume", "numbers", "--tail", "1", "--from", "2"], b"--from and --tail contradict"),
        (["consume", "numbers", "--follow"], b"--follow goes with --tail"),
        (["consume", "numbers", "--tail", "1", "--follow", "--to", "5"], b"--follow and --to"),
        (["consume", "numbers", "--group", "g", "--tail", "1"], b"goes on where the group was"),
        (["consume", "numbers", "--grep", "["], b"--grep '['"),
        (["consume"], b"give topics to read, or --include"),
        (["consume", "numbers", "--include", "n.*"], b"contradict each other"),
        (["consume", "--include", "["], b"--include '['"),
        (["consume", "--include", "n.*", "--partition", "0"], b"--partition is of one topic"),
        (["consume", "numbers", "lines", "--partition", "0"], b"--partition is of one topic"),
        (["consume", "--include", "__.*", "--tail", "1"], b"no topic matches '__.*'"),
        (["consume", "numbers", "nowhere", "--tail", "1"], b"nowhere"),
        (["consume", "numbers", "--format", "%z"], b"--format has no %z"),
        (["consume", "numbers", "--format", "%v", "--print-key"], b"contradict each other"),
        (["produce", "numbers", "--header", "x"], b"--header takes name=value"),
        (["produce", "numbers", "--timestamp", "noon"], b"--timestamp is a time"),
        (["topics", "offsets", "numbers", "--partition", "7"], b"no partition 7: there are 2"),
        (["topics", "create", "x", "--config", "retention_ms=1 month"], b"a duration such as 12h"),
        (["topics", "create", "x", "--replica-assignment", ""], b"--replica-assignment '': write"),
    ],
)
def test_what_has_no_meaning_is_refused(pk: Pk, numbers: str, arguments: Any, words: bytes) -> None:
    assert words in pk(*arguments, code=1)


def test_a_line_that_is_no_record_is_refused_by_its_number(pk: Pk) -> None:
    pk("topics", "create", "strict")
    said = pk("produce", "strict", "--json", text=b'{"value":"1"}\n{"key":"k"}\n', code=1)
    assert said == b""
    found = pk("consume", "strict", "--from", "start", "--to", "end")
    assert found in (b"", b"1\n"), "lines before it may be stored"


@pytest.mark.parametrize(
    "line",
    [
        b'{"value": "a", "value_base64": "YQ=="}',
        b'{"value": null, "value_base64": "YQ=="}',
        b'{"value": "a", "key": "b", "key_base64": "YQ=="}',
        b'{"value": "a", "headers": [{"name": "h", "value": "a", "value_base64": "YQ=="}]}',
    ],
)
def test_bytes_that_are_given_twice_are_refused(line: bytes) -> None:
    with pytest.raises(errors.InvalidOption, match=r"line 3 .* given twice"):
        of_json(line, 3)


def test_options_in_ms_take_durations(pk: Pk, numbers: str) -> None:
    pk("topics", "create", "lingering")
    pk("produce", "lingering", "--linger-ms", "0.5", text=b"0\n")
    pk("produce", "lingering", "--linger-ms", "20ms", text=b"1\n")
    few = ("--records", "1", "--timeout-ms", "20s", "--json")
    assert json.loads(pk("perf", "produce", "lingering", *few, "--linger-ms", "1ms"))
    assert json.loads(pk("perf", "consume", "lingering", *few))
    pk("transactions", "list", "--open-longer-ms", "1h")
    pk("transactions", "find-hanging", "--max-timeout-ms", "15m")
    for bad in ("-1", "nan", "inf", "soon", "1GB"):
        assert b"--linger-ms" in pk("produce", "lingering", "--linger-ms", bad, code=2)


def test_durations_and_sizes_of_settings(pk: Pk) -> None:
    given = ("--config", "retention.ms=1d", "--config", "segment_bytes=64MiB")
    pk("topics", "create", "sized", "--replication-factor", "1", *given)
    pk("topics", "alter", "sized", "--config", "retention_ms=1h30m")
    shown = json.loads(pk("topics", "describe", "sized", "--all-configs", "--json"))["topics"][0]
    assert shown["configs"] == {"retention_ms": "5400000", "segment_bytes": "67108864"}
    listed = {each["name"]: each for each in shown["all_configs"]}
    assert listed["retention_ms"]["source"] == "topic"
    assert listed["cleanup_policy"]["source"] == "default"
    assert b"cleanup_policy" in pk("topics", "describe", "sized", "--all-configs")


def test_records_are_deleted_up_to_a_position(pk: Pk) -> None:
    pk("topics", "create", "short")
    pk("produce", "short", text=b"".join(b"%d\n" % number for number in range(10)))
    shown = pk("topics", "delete-records", "short", "--before", "-4", "--json")
    assert json.loads(shown)["executed"] is False
    assert json.loads(pk("topics", "offsets", "short", "--at", "start", "--json"))["offsets"] == [
        {"partition": 0, "offset": 0}
    ]
    pk("topics", "delete-records", "short", "--before", "-4", "--execute")
    assert pk("consume", "short", "--from", "start", "--to", "end").split()[0] == b"6"
    assert json.loads(pk("topics", "offsets", "short", "--json"))["offsets"] == [
        {"partition": 0, "offset": 10}
    ]


def test_a_topic_that_is_not_there_is_named_without_advice_to_try_again(pk: Pk) -> None:
    said = pk("topics", "delete", "nope", code=1)
    assert b"nope" in said
    assert b"try again" not in said
    pk("topics", "create", "passing")
    said = pk("topics", "delete", "passing", "nope", "--if-exists")
    assert said == b"deleted passing\ntopic nope does not exist (unchanged)\n"
    said = pk("consume", "nope", "--json", code=1)
    assert said.startswith(b"error: ")
    assert b"nope" in said
