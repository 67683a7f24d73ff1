"""One transaction of many producers on real processes: rules X4 to X9.

Tasks are `TaskProducer`s, and the driver is a `BatchCommitter`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_cluster import run, until, values

from pk import AdminClient, Producer, errors
from pk.cli.embedded import EmbeddedCluster, EmbeddedServer
from pk.client.batch_committer import BatchCommitter
from pk.client.participant import BatchOfRun
from pk.client.task_producer import TaskProducer
from pk.types import RowSums
from pk.wire import pk_pb2 as wire

pytestmark = pytest.mark.integration

WAIT_S = 60.0
SETTINGS = {"participant_lease_ms": 3_000, "participant_transaction_max_ms": 60_000}


class Task:
    """The attempts of one task, each with a producer of its own, and the driver's calls."""

    def __init__(self, address: str, job: str, topic: str) -> None:
        self.address, self.job, self.topic = address, job, topic
        self.producers: list[TaskProducer] = []
        with AdminClient(address) as admin:
            (state, *_) = admin.describe_topics([topic])
            self.topic_id = state.topic_id

    def __enter__(self) -> Task:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.producers:
            each.close(0)

    @property
    def producer(self) -> TaskProducer:
        return self.producers[-1]

    def batch(self, number: int, run: str = "r1") -> BatchOfRun:
        return BatchOfRun(self.job, "q", run, number)

    def join(self, number: int, run: str = "r1") -> wire.JoinTransactionReply:
        producer = TaskProducer(
            self.address,
            self.batch(number, run),
            linger_ms=0,
            delivery_timeout_ms=10_000,
            request_timeout_ms=5_000,
        )
        self.producers.append(producer)
        return producer.join([self.topic])

    def write(self, value: bytes, partitions: int = 3) -> None:
        for each in range(partitions):
            self.producer.send(self.topic, value, partition=each)
        self.producer.flush(WAIT_S)

    def driver(self, number: int, run: str = "r1") -> BatchCommitter:
        return BatchCommitter(self.address, self.batch(number, run), request_timeout_ms=5_000)

    def commit(
        self, number: int, *named: wire.JoinTransactionReply, rows: int = 3, run: str = "r1"
    ) -> bool:
        with self.driver(number, run) as driver:
            return driver.commit(
                [(each.producer_id, each.producer_epoch) for each in named],
                {self.topic_id: RowSums(rows, 1, 1)},
            )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    folder = tmp_path_factory.mktemp("participants") / "pk"
    with EmbeddedServer(folder, settings=SETTINGS) as running:
        yield running


def topic_of(address: str, name: str) -> str:
    with AdminClient(address) as admin:
        admin.create_topic(name, partitions=3)
    return name


def test_only_the_named_attempts_of_a_batch_become_visible(server: EmbeddedServer) -> None:
    address = server.address
    topic = topic_of(address, "named")
    with Task(address, "job-named", topic) as one, Task(address, "job-named", topic) as two:
        for number in range(3):
            winner, loser = one.join(number), two.join(number)
            assert winner.lease_ms == SETTINGS["participant_lease_ms"]
            one.write(b"w%d" % number)
            two.write(b"l%d" % number)
            assert sorted(values(address, topic)) == sorted([b"w%d" % n for n in range(number)] * 3)
            one.commit(number, winner)
            expected = sorted([b"w%d" % n for n in range(number + 1)] * 3)
            until(
                lambda wanted=expected: sorted(values(address, topic)) == wanted, f"not {expected}"
            )
            assert loser.producer_id != winner.producer_id
        # the batch again: nothing is written, and its sums are compared
        again = two.join(2, "r2")
        assert again.committed
        assert [each.rows for each in again.sums] == [3]
        assert two.commit(2, run="r2")
        with pytest.raises(errors.ReplayDiffers, match="3 rows"):
            two.commit(2, rows=4, run="r2")
    assert len(values(address, topic, committed=False)) == 18


def test_tasks_may_have_each_others_producer_ids(server: EmbeddedServer) -> None:
    address = server.address
    topic = topic_of(address, "swapped")
    with Task(address, "job-swapped", topic) as one, Task(address, "job-swapped", topic) as two:
        pairs = []
        for number in range(4):
            tasks = (one, two) if number % 2 else (two, one)
            joined = [task.join(number) for task in tasks]
            for task in tasks:
                task.write(b"%d" % number)
            one.commit(number, *joined, rows=6)
            pairs.append([each.producer_id for each in joined])
        assert len({tuple(each) for each in pairs}) == 1, "so the tasks swap them"
        expected = sorted([b"%d" % n for n in range(4)] * 6)
        until(lambda: sorted(values(address, topic)) == expected, f"not {expected}")


def test_a_new_run_takes_over_from_a_zombie(server: EmbeddedServer) -> None:
    address = server.address
    topic = topic_of(address, "zombie")
    with Task(address, "job-zombie", topic) as old, Task(address, "job-zombie", topic) as new:
        before = old.join(0)
        old.write(b"old")
        joined = new.join(0, "r2")  # aborts the batch of the old run first
        new.write(b"new")
        late = old.producer.send(topic, b"late", partition=0)
        with pytest.raises(errors.ProducerFenced):
            old.commit(0, before)
        new.commit(0, joined, run="r2")
        until(lambda: sorted(values(address, topic)) == [b"new"] * 3, "the new run's records")
        assert late.exception(timeout=WAIT_S) is not None
        assert b"late" not in values(address, topic, committed=False)


def test_a_batch_whose_tasks_died_lets_the_stable_offset_go(server: EmbeddedServer) -> None:
    address = server.address
    topic = topic_of(address, "lease")
    with Task(address, "job-lease", topic) as task, Producer(address) as plain:
        joined = task.join(0)
        task.write(b"lost")
        plain.send(topic, b"behind", partition=0).result(timeout=WAIT_S)
        assert values(address, topic) == []
        task.producer.close(0)  # as a process that ends: no heartbeat follows
        until(lambda: sorted(values(address, topic)) == [b"behind"], "the lease did not end")
        with pytest.raises(errors.TransactionTimedOut, match="participant_lease_ms"):
            task.commit(0, joined)
        with AdminClient(address) as admin:
            (found,) = admin.describe_transactions(["job-lease"])
        assert found.state == "CompleteAbort"


def pk(address: str, *arguments: str) -> Any:
    """Return the transactions that a `pk transactions` command prints."""
    text = run(["transactions", *arguments, "--bootstrap", address, "--json"])
    return json.loads(text)["transactions"]


def described(address: str, job: str, topic: str, *joined: wire.JoinTransactionReply) -> None:
    """Check what an operator sees of a job whose batch 1 is open; the first task holds the LSO."""
    (found,) = pk(address, "describe", job)
    shown = found["job"]
    assert (found["kind"], shown["query"], shown["run"]) == ("participants", "q", "r1")
    assert (shown["batch"], shown["last_committed"]) == (1, 0)
    pairs = [(each["producer_id"], each["producer_epoch"]) for each in shown["participants"]]
    assert pairs == sorted((each.producer_id, each.producer_epoch) for each in joined)
    assert {each["finished"] for each in shown["participants"]} == {False}
    assert all(each["heard_ago_ms"] >= 0 for each in shown["participants"])
    held = [(e["topic"], e["partition"], e["producer_id"]) for e in found["held"]]
    assert held == [(topic, place, joined[0].producer_id) for place in range(3)]
    assert {each["transactional_id"]: each["kind"] for each in pk(address, "list")} == {
        job: "participants"
    }
    with AdminClient(address) as admin:
        assert admin.find_hanging_transactions([topic]) == []


def test_a_batch_outlives_its_coordinator(tmp_path: Path) -> None:
    """Joined, killed, committed by the next coordinator: all of it or nothing."""
    settings = {**SETTINGS, "participant_lease_ms": 60_000}
    with EmbeddedCluster(tmp_path, nodes=3, settings=settings) as cluster:
        topic = topic_of(cluster.address, "coordinator")
        with (
            Task(cluster.address, "job-coordinator", topic) as one,
            Task(cluster.address, "job-coordinator", topic) as two,
        ):
            for number in range(2):
                winner, loser = one.join(number), two.join(number)
                one.write(b"w%d" % number)
                two.write(b"l%d" % number)
                if number == 1:
                    described(cluster.address, "job-coordinator", topic, winner, loser)
                with AdminClient(cluster.address) as admin:
                    (found,) = admin.describe_transactions([one.job])
                cluster.kill(found.coordinator_id)
                one.commit(number, winner)
                cluster.start_nodes([found.coordinator_id])
        expected = sorted([b"w0", b"w1"] * 3)
        until(lambda: sorted(values(cluster.address, topic)) == expected, f"not {expected}")


def test_a_task_sends_only_between_its_join_and_its_finish(server: EmbeddedServer) -> None:
    address = server.address
    topic = topic_of(address, "calls")
    with Task(address, "job-calls", topic) as task:
        idle = TaskProducer(address, task.batch(0))
        task.producers.append(idle)
        for refused in (lambda: idle.send(topic, b"early"), lambda: idle.finish()):
            with pytest.raises(errors.InvalidTxnState, match="not joined"):
                refused()
        joined = task.join(0)
        for call in (task.producer.begin_transaction, task.producer.commit_transaction):
            with pytest.raises(errors.InvalidTxnState, match="driver of a batch"):
                call()
        with pytest.raises(errors.InvalidTxnState, match="joined already"):
            task.producer.join([topic])
        task.producer.send(topic, b"one", partition=0)
        assert task.producer.finish() == (joined.producer_id, joined.producer_epoch)
        with pytest.raises(errors.InvalidTxnState, match="has finished"):
            task.producer.send(topic, b"late")
        task.commit(0, joined, rows=1)
        until(lambda: values(address, topic) == [b"one"], "the batch is not visible")
        task.join(0, "r2")
        with pytest.raises(errors.InvalidTxnState, match="write nothing"):
            task.producer.send(topic, b"again")


def test_a_record_that_fails_is_never_part_of_a_commit(server: EmbeddedServer) -> None:
    address = server.address
    topic = topic_of(address, "fails")
    with Task(address, "job-fails", topic) as task, Task(address, "job-fails", topic) as other:
        task.join(0)
        task.producer.send(topic, b"first", partition=0).result(timeout=WAIT_S)
        with other.driver(0) as driver:
            assert not driver.abort()
        until(lambda: len(values(address, topic, committed=False)) == 1, "not stored")
        # A heartbeat may have told the task that its batch ended before the record leaves.
        with pytest.raises(errors.PkError):
            task.producer.send(topic, b"second", partition=0).result(timeout=WAIT_S)
        with pytest.raises(errors.TransactionAborted):
            task.producer.finish()
        with pytest.raises(errors.TransactionAborted):
            task.producer.send(topic, b"third")
        assert values(address, topic) == []


def test_an_aborted_batch_may_be_written_by_the_next_run(server: EmbeddedServer) -> None:
    address = server.address
    topic = topic_of(address, "again")
    with Task(address, "job-again", topic) as task:
        task.join(0)
        task.write(b"lost")
        with task.driver(0) as driver:
            assert not driver.abort()
        joined = task.join(0, "r2")
        task.write(b"kept")
        task.producer.finish()
        task.commit(0, joined, run="r2")
        with task.driver(0, "r2") as driver:
            assert driver.abort(), "a committed batch stays committed"
        until(lambda: values(address, topic) == [b"kept"] * 3, "the batch is not visible")
