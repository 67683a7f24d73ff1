"""Transactions on real processes: all or nothing, for every reader, whichever process dies."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from left_open import BROKERS, NODE, TRANSACTION_TIMEOUT_MS, LeftOpen
from real_cluster import close, until, values

from pk import AdminClient, Consumer, Producer, TopicPartition, errors
from pk.cli.embedded import EmbeddedCluster, EmbeddedServer
from pk.client.admin import NewTopic
from pk.transactional_ids import partition_of_id

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent / "pk"
#: Generous bounds of wall-clock time, for a machine under load.
WAIT_S = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path_factory.mktemp("transactions") / "pk") as running:
        yield running


@pytest.fixture
def admin(server: EmbeddedServer) -> Iterator[AdminClient]:
    with AdminClient(server.address) as client:
        yield client


@pytest.fixture
def topic(admin: AdminClient, request: pytest.FixtureRequest) -> str:
    name = re.sub("[^a-z0-9_]+", "-", request.node.name)[:100].strip("-")
    admin.create_topic(name, partitions=3)
    return name


def visible(address: str, topic: str, expected: list[bytes]) -> None:
    """Wait until read_committed has exactly these values: markers follow the commit."""
    until(lambda: sorted(values(address, topic)) == sorted(expected), f"{topic} is not {expected}")


def stable_ends(address: str, topic: str) -> dict[TopicPartition, tuple[int, int]]:
    """Return the last stable offset and the high watermark of each partition."""
    found = {}
    for level in ("read_committed", "read_uncommitted"):
        with Consumer(address, isolation_level=level) as consumer:
            found[level] = consumer.end_offsets(consumer.partitions_for(topic))
    return {
        place: (end, found["read_uncommitted"][place])
        for place, end in found["read_committed"].items()
    }


def test_a_commit_and_an_abort(server: EmbeddedServer, topic: str) -> None:
    with Producer(server.address, transactional_id=topic) as producer:
        producer.init_transactions()
        for number in range(6):
            producer.begin_transaction()
            for place in (0, 1, 2):
                producer.send(topic, b"%d" % number, partition=place)
            producer.flush()
            if number % 2:
                producer.abort_transaction()
            else:
                producer.commit_transaction()
    visible(server.address, topic, [b"%d" % n for n in (0, 2, 4)] * 3)
    assert sorted(values(server.address, topic, committed=False)) == [
        b"%d" % n for n in range(6) for _ in range(3)
    ]


def test_columns_and_plain_records_share_a_topic(server: EmbeddedServer, topic: str) -> None:
    """Records behind an open transaction wait for its end; `send_batch` works the same."""
    rows = pa.record_batch(
        {"value": [b"a", b"b", b"c"], "partition": pa.array([0, 0, 1], pa.int32())}
    )
    with (
        Producer(server.address, transactional_id=topic) as producer,
        Producer(server.address) as plain,
    ):
        producer.init_transactions()
        producer.begin_transaction()
        producer.send_batch(topic, rows).result(WAIT_S)
        plain.send(topic, b"plain", partition=0).result(WAIT_S)
        assert values(server.address, topic) == []
        lso, high = stable_ends(server.address, topic)[TopicPartition(topic, 0)]
        assert (lso, high) == (0, 3)
        producer.commit_transaction()
        visible(server.address, topic, [b"a", b"b", b"c", b"plain"])


def test_sends_outside_a_transaction_are_refused(server: EmbeddedServer, topic: str) -> None:
    with Producer(server.address, transactional_id=topic) as producer:
        with pytest.raises(errors.InvalidTxnState, match="init_transactions"):
            producer.send(topic, b"x")
        producer.init_transactions()
        with pytest.raises(errors.InvalidTxnState, match="begin_transaction"):
            producer.send(topic, b"x")
        producer.begin_transaction()
        producer.send(topic, b"in")
        producer.commit_transaction()
        with pytest.raises(errors.InvalidTxnState, match="begin_transaction"):
            producer.send(topic, b"x")
    with (
        Producer(server.address) as plain,
        pytest.raises(errors.InvalidTxnState, match="transactional_id"),
    ):
        plain.begin_transaction()
    visible(server.address, topic, [b"in"])


def test_a_second_instance_fences_the_first(server: EmbeddedServer, topic: str) -> None:
    with (
        Producer(server.address, transactional_id=topic) as first,
        Producer(server.address, transactional_id=topic) as second,
    ):
        first.init_transactions()
        first.begin_transaction()
        first.send(topic, b"of the first").result(WAIT_S)
        second.init_transactions()
        assert values(server.address, topic) == [], "aborted before init returned"
        with second.transaction():
            second.send(topic, b"of the second")
        with pytest.raises(errors.ProducerFenced):
            first.commit_transaction()
        with pytest.raises(errors.ProducerFenced):
            first.send(topic, b"later")
    visible(server.address, topic, [b"of the second"])


def test_an_exception_in_the_block_aborts(server: EmbeddedServer, topic: str) -> None:
    with Producer(server.address, transactional_id=topic) as producer:
        producer.init_transactions()
        with pytest.raises(ZeroDivisionError), producer.transaction():  # noqa: PT012
            producer.send(topic, b"half").result(WAIT_S)
            raise ZeroDivisionError
        with producer.transaction():
            producer.send(topic, b"whole")
    visible(server.address, topic, [b"whole"])


def test_closing_in_a_transaction_aborts_it(server: EmbeddedServer, topic: str) -> None:
    with Producer(server.address, transactional_id=topic) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, b"left").result(WAIT_S)
    until(
        lambda: all(lso == high for lso, high in stable_ends(server.address, topic).values()),
        "the transaction is open",
    )
    assert values(server.address, topic) == []


CHILD = """
import sys, time
from pk import Producer
address, topic, timeout_ms = sys.argv[1:]
producer = Producer(address, transactional_id=topic, transaction_timeout_ms=int(timeout_ms))
producer.init_transactions()
producer.begin_transaction()
for partition in range(3):
    producer.send(topic, b"left behind", partition=partition).result(60)
print("open", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def child(address: str, topic: str, timeout_ms: int) -> Iterator[subprocess.Popen[str]]:
    """A process with an open transaction."""
    command = [sys.executable, "-c", CHILD, address, topic, str(timeout_ms)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_killed_producers_transaction_ends_by_its_timeout(
    server: EmbeddedServer, topic: str
) -> None:
    """The last stable offset moves on without any client."""
    with child(server.address, topic, 3_000) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        with Producer(server.address) as plain:
            plain.send(topic, b"behind", partition=0).result(WAIT_S)
        visible(server.address, topic, [b"behind"])
    shown = pk("transactions", "describe", topic, "--json", server=server)["transactions"][0]
    assert shown["state"] == "CompleteAbort"
    assert shown["reason"]


def test_a_stopped_producer_learns_that_its_transaction_timed_out(
    server: EmbeddedServer, topic: str
) -> None:
    with Producer(server.address, transactional_id=topic, transaction_timeout_ms=1_000) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, b"late", partition=0).result(WAIT_S)
        until(lambda: all(a == b for a, b in stable_ends(server.address, topic).values()), "open")
        with pytest.raises(errors.TransactionTimedOut):
            producer.commit_transaction()
        producer.abort_transaction()
        with producer.transaction():
            producer.send(topic, b"again", partition=0)
    visible(server.address, topic, [b"again"])


# -- commands --------------------------------------------------------------------------------------


def pk(*arguments: str, server: EmbeddedServer, code: int = 0) -> Any:
    done = subprocess.run(
        [str(BIN), *arguments, "--bootstrap", server.address],
        capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == code, done
    return json.loads(done.stdout) if "--json" in arguments else done.stdout


def test_an_operator_finds_and_aborts_a_transaction(server: EmbeddedServer, topic: str) -> None:
    with child(server.address, topic, 600_000):
        listed = pk("transactions", "list", "--state", "Ongoing", "--json", server=server)
        (found,) = [e for e in listed["transactions"] if e["transactional_id"] == topic]
        assert listed["complete"]
        (shown,) = pk("transactions", "describe", topic, "--json", server=server)["transactions"]
        assert shown["producer_id"] == found["producer_id"]
        assert [p["partition"] for p in shown["partitions"]] == [0, 1, 2]
        assert topic in pk("transactions", "list", "--open-longer-ms", "0", server=server)
        by_id = ("--producer-id", str(found["producer_id"]))
        (same,) = pk("transactions", "list", *by_id, "--json", server=server)["transactions"]
        assert same == found
        pk("transactions", "forget", topic, server=server, code=1)
        assert "is aborted" in pk("transactions", "abort", topic, server=server)
        until(lambda: all(a == b for a, b in stable_ends(server.address, topic).values()), "open")
    assert values(server.address, topic) == []
    until(lambda: pk_state(server, topic) == "CompleteAbort", "not complete")
    assert "forgotten" in pk("transactions", "forget", topic, server=server)
    pk("transactions", "describe", topic, server=server, code=1)


def test_an_operator_lets_decisions_wait_for_the_disk(server: EmbeddedServer, topic: str) -> None:
    """docs/transactions.md: of the settings of pk's own topics only this one can be changed."""

    def alter(*settings: str) -> subprocess.CompletedProcess[str]:
        command = [str(BIN), "topics", "alter", "__transaction_state", *settings]
        at = ["--bootstrap", server.address]
        return subprocess.run([*command, *at], capture_output=True, text=True, timeout=WAIT_S)

    with Producer(server.address, transactional_id=topic) as producer:
        producer.init_transactions()
        done = alter("--config", "flush_on_ack=true")
        assert done.returncode == 0, done.stderr
        with producer.transaction():
            producer.send(topic, b"1")
        refused = alter("--config", "retention_ms=1000")
        assert refused.returncode == 1
        assert "only flush_on_ack can be changed" in " ".join(refused.stderr.split())
        assert alter("--unset", "flush_on_ack").returncode == 0
    visible(server.address, topic, [b"1"])


def test_a_hanging_transaction_is_found(server: EmbeddedServer, topic: str) -> None:
    """One that its coordinator knows hangs only if it is older than the maximum."""
    with child(server.address, topic, 600_000):
        looked = ("transactions", "find-hanging", "--topic", topic)
        assert "no transaction hangs" in pk(*looked, server=server)
        hanging = pk(*looked, "--max-timeout-ms", "1", "--json", server=server, code=1)["hanging"]
        assert [(e["partition"], e["transactional_id"]) for e in hanging] == [
            (n, topic) for n in range(3)
        ]
        with AdminClient(server.address) as admin:
            (known,) = admin.describe_producers([TopicPartition(topic, 0)])[
                TopicPartition(topic, 0)
            ]
            assert (known.transaction_start, known.producer_id) == (0, hanging[0]["producer_id"])
            admin.abort_transaction(topic)
        until(lambda: all(a == b for a, b in stable_ends(server.address, topic).values()), "open")
        assert "no transaction hangs" in pk(*looked, "--max-timeout-ms", "1", server=server)


def pk_state(server: EmbeddedServer, name: str) -> str:
    with AdminClient(server.address) as admin:
        (found,) = admin.describe_transactions([name])
        return found.state


# -- the recipe ------------------------------------------------------------------------------------


def recipe() -> Callable[..., None]:
    """The function `process` of docs/transactions.md."""
    page = (ROOT / "docs" / "transactions.md").read_text(encoding="utf-8")
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def proc" in b]
    names: dict[str, Any] = {}
    exec(compile(block, "docs/transactions.md", "exec"), names)
    process: Callable[..., None] = names["process"]
    return process


def test_the_recipe_writes_each_result_once(
    server: EmbeddedServer, admin: AdminClient, topic: str
) -> None:
    """Instances take over from each other in the middle, by the id and by the group; the
    coordinators and the leaders are killed meanwhile.
    """
    target = f"{topic}-out"
    admin.create_topic(target, partitions=2)
    with Producer(server.address) as plain:
        for number in range(300):
            plain.send(topic, b"v%03d" % number, key=b"%d" % (number % 7))
    process, ended = recipe(), threading.Event()

    def instance(name: str) -> threading.Thread:
        def run() -> None:
            with contextlib.suppress(errors.ProducerFenced):
                process(server.address, name, topic, topic, target, ended.is_set)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def enough(count: int) -> Callable[[], bool]:
        return lambda: len(values(server.address, target)) >= count or ended.is_set()

    threads = [instance("first")]
    try:
        until(enough(1), "the first instance writes nothing")
        threads.append(instance("first"))  # fences the first one, and waits for its partitions
        with Producer(server.address) as plain:
            for number in range(300, 600):
                plain.send(topic, b"v%03d" % number, key=b"%d" % (number % 7))
        until(enough(400), "the second instance does not go on")
        threads.append(instance("second"))  # takes over partitions
        old = server.pids()["broker"]
        server.kill("broker")
        server.wait_restarted("broker", old)
        with Producer(server.address) as plain:
            for number in range(600, 900):
                plain.send(topic, b"v%03d" % number, key=b"%d" % (number % 7))
        until(enough(900), "the instances do not end")
    finally:
        ended.set()
        for thread in threads:
            thread.join(WAIT_S)
    assert sorted(values(server.address, target)) == [b"V%03d" % n for n in range(900)]


# -- three nodes -----------------------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    made = EmbeddedCluster(tmp_path, nodes=0)
    yield made
    close(made)


@pytest.mark.long
def test_a_killed_leader_and_coordinator_lose_no_decision(cluster: EmbeddedCluster) -> None:
    """Commits that returned are visible, aborts are not, and each transaction is whole."""
    cluster.add(1, 2, 3)
    cluster.start()
    nodes = cluster.nodes
    addresses = ",".join(node.listen for node in nodes.values())
    with AdminClient(addresses) as admin:
        new = NewTopic("t", 3, {"min_insync_replicas": 2}, 3)
        (created,) = admin.create_topics([new], timeout_s=WAIT_S)
        assert created.error is None
        committed, aborted = set[int](), set[int]()
        with Producer(addresses, transactional_id="id", max_block_ms=120_000) as producer:
            producer.init_transactions()
            number = 0

            def some(count: int) -> None:
                nonlocal number
                for _ in range(count):
                    number += 1
                    try:
                        with producer.transaction():
                            for place in (0, 1, 2):
                                producer.send("t", b"%d" % number, partition=place)
                            if number % 5 == 0:
                                producer.flush()
                                raise ZeroDivisionError
                        committed.add(number)
                    except ZeroDivisionError:
                        aborted.add(number)
                    except errors.TransactionAborted:
                        aborted.add(number)

            some(20)
            for victim in ("coordinator", "leader"):
                place = TopicPartition(
                    "__transaction_state", partition_of_id("id")
                ) if victim == "coordinator" else TopicPartition("t", 0)  # fmt: skip
                (described,) = [
                    each
                    for each in admin.describe_topics([place.topic], timeout_s=WAIT_S)
                    if each.partition == place.partition
                ]
                leader = described.leader
                nodes[leader].kill("broker")
                some(20)
                until(
                    lambda: all(
                        len(each.isr) == 3
                        for topic in ("t", "__transaction_state")
                        for each in admin.describe_topics([topic], timeout_s=WAIT_S)
                    ),
                    "a replica is not in sync",
                )
            some(20)
        until(lambda: all(a == b for a, b in stable_ends(addresses, "t").values()), "still open")
    assert len(committed) > 40
    expected = [b"%d" % each for each in committed for _ in range(3)]
    assert sorted(values(addresses, "t")) == sorted(expected)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dies", [NODE, BROKERS])
def test_a_transaction_ends_although_its_producer_coordinator_and_leader_die(
    tmp_path: Path, dies: str
) -> None:
    """The next coordinator aborts it, and readers go on.  `make eos` judges the time."""
    settings = {"broker_session_timeout_ms": 3_000, "broker_heartbeat_interval_ms": 300}
    with EmbeddedCluster(tmp_path, settings=settings) as three:
        rounds = LeftOpen(three)
        took_ms = rounds.round(dies)
        print(f"{dies}: readers went on after {took_ms} ms, timeout {TRANSACTION_TIMEOUT_MS} ms")
        assert took_ms is not None
        with AdminClient(three.address) as admin:
            (ended,) = admin.describe_transactions([rounds.left_open])
        assert (ended.state, ended.reason) == ("CompleteAbort", "timed out")
