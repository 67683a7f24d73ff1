"""One transaction of many producers on real processes: the coordinator's side of rules X4 to X9.

The tests send the requests of tasks and drivers themselves; a task's records go through a
`Producer` that writes under the pair of its join.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_cluster import until, values

from pk import AdminClient, Producer, errors
from pk.cli.embedded import EmbeddedCluster, EmbeddedServer
from pk.client.transaction_manager import ManagerState
from pk.wire import pk_pb2 as wire

pytestmark = pytest.mark.integration

WAIT_S = 60.0
SETTINGS = {"participant_lease_ms": 3_000, "participant_transaction_max_ms": 60_000}


class Task:
    """An attempt of a task, and the driver's requests."""

    def __init__(self, address: str, job: str, topic: str) -> None:
        self.job, self.topic = job, topic
        self.producer = Producer(
            address,
            transactional_id=f"{job}-unused",
            linger_ms=0,
            delivery_timeout_ms=10_000,
            request_timeout_ms=5_000,
        )
        with AdminClient(address) as admin:
            (state, *_) = admin.describe_topics([topic])
            self.topic_id = state.topic_id

    def __enter__(self) -> Task:
        return self

    def __exit__(self, *_: object) -> None:
        self.producer._transactions = None  # its own id was never used
        self.producer.close()

    def call(self, request: Any) -> Any:
        """Ask the coordinator; asks again while it is not there or markers are written."""
        found: list[Any] = []

        async def ask() -> Any:
            cluster = self.producer._cluster
            cluster.start()
            where: Any = await cluster.call_any(
                wire.FindCoordinatorRequest(key=self.job, key_type=1), timeout_ms=10_000
            )
            return await cluster.call_at(where.address, request, timeout_ms=10_000)

        def answered() -> bool:
            try:
                found.append(self.producer._thread.run(ask(), 30.0))
            except (errors.ConcurrentTransactions, errors.RetriableError):
                return False
            return True

        until(answered, f"no answer to {type(request).__name__}")
        return found[0]

    def batch(self, number: int, run: str = "r1") -> wire.JobBatch:
        return wire.JobBatch(job=self.job, query="q", run=run, batch=number)

    def join(self, number: int, run: str = "r1") -> wire.JoinTransactionReply:
        request = wire.JoinTransactionRequest(
            batch=self.batch(number, run), topic_ids=[self.topic_id]
        )
        reply: wire.JoinTransactionReply = self.call(request)
        if reply.producer_id >= 0:
            self._begin(reply.producer_id, reply.producer_epoch)
        return reply

    def _begin(self, producer_id: int, epoch: int) -> None:
        async def begin() -> None:
            engine, transactions = self.producer._engine, self.producer._transactions
            assert transactions is not None
            transactions.manager.state = ManagerState.IN_TRANSACTION
            engine.begin_transaction(producer_id, epoch)

        self.producer._thread.run(begin(), 10.0)

    def write(self, value: bytes, partitions: int = 3) -> None:
        futures = [
            self.producer.send(self.topic, value, partition=each) for each in range(partitions)
        ]
        for each in futures:
            each.result(timeout=WAIT_S)

    def commit(
        self, number: int, *named: wire.JoinTransactionReply, rows: int = 3, run: str = "r1"
    ) -> wire.CommitParticipantsReply:
        request = wire.CommitParticipantsRequest(
            batch=self.batch(number, run),
            participants=[
                wire.Participant(producer_id=each.producer_id, producer_epoch=each.producer_epoch)
                for each in named
            ],
            sums=[wire.TopicSums(topic_id=self.topic_id, rows=rows, bytes=1, row_sum=1)],
        )
        reply: wire.CommitParticipantsReply = self.call(request)
        return reply


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
        assert two.commit(2, run="r2").already_committed
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
        until(lambda: sorted(values(address, topic)) == [b"behind"], "the lease did not end")
        with pytest.raises(errors.TransactionTimedOut, match="participant_lease_ms"):
            task.commit(0, joined)
        with AdminClient(address) as admin:
            (found,) = admin.describe_transactions(["job-lease"])
        assert found.state == "CompleteAbort"


def pk(address: str, *arguments: str) -> Any:
    """Return the transactions that a `pk transactions` command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "pk.cli", "transactions", *arguments, "--bootstrap", address,
         "--json"],
        capture_output=True, text=True, timeout=WAIT_S, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)["transactions"]


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
            for number in range(3):
                winner, loser = one.join(number), two.join(number)
                one.write(b"w%d" % number)
                two.write(b"l%d" % number)
                if number == 1:
                    described(cluster.address, "job-coordinator", topic, winner, loser)
                where = one.call(wire.FindCoordinatorRequest(key=one.job, key_type=1))
                cluster.kill(where.node_id)
                one.commit(number, winner)
                cluster.start_nodes([where.node_id])
        expected = sorted([b"w0", b"w1", b"w2"] * 3)
        until(lambda: sorted(values(cluster.address, topic)) == expected, f"not {expected}")
