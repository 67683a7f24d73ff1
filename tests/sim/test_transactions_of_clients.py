"""Transactions of clients in a cluster of several production brokers: coordinators and leaders die
or fall silent, producers die, and an application need only follow docs/transactions.md.

Times are simulated, so the bounds are exact.
"""

from __future__ import annotations

from typing import Any

import pytest

from pk import errors
from pk.client.options import producer_options
from pk.client.produce_engine import ProduceEngine
from pk.client.record_arguments import record_size
from pk.client.transaction_engine import TransactionEngine
from pk.client.transaction_manager import TransactionCall
from pk.transactional_ids import TOPIC, partition_of_id
from tests.kit.cluster import SESSION_MS, Kit, Reader

#: Clients as people configure them, for the fixture `make`.
KIT = {"client_defaults": True}
INIT, BEGIN, _, COMMIT, ABORT = TransactionCall
ID = "id"
PLACES = 3
S = 1_000

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Transactor:
    """A producer with a transactional id on a host of its own."""

    def __init__(self, kit: Kit, host: str = "producer", **given: Any) -> None:
        self.kit = kit
        self.host = host
        options, _ = producer_options({"transactional_id": ID, "linger_ms": 0, **given})
        world = kit.sim.world_of(host)

        async def build() -> None:
            cluster = kit.cluster(host)
            self.engine = ProduceEngine(world, cluster, options)
            self.transactions = TransactionEngine(world, cluster, self.engine, options)

        kit.done(host, build())

    def call(self, call: TransactionCall, timeout_ms: int = 60 * S) -> float:
        """Make a call; return how many ms it took."""
        begun = self.kit.now_ms
        self.kit.done(self.host, self.transactions.call(call, timeout_ms))
        return self.kit.now_ms - begun

    def send(self, number: int, *, wait: bool = True) -> None:
        """Send a number to every partition, and wait until they are acknowledged."""

        async def work() -> None:
            accumulator = await self.engine.open("t", 60 * S)
            value = b"%d" % number
            for place in range(PLACES):
                size = record_size(value, None, None, "t")
                assert accumulator.append(value, None, None, place, size=size) is not None
            for records in self.engine.begin_flush() if wait else ():
                while not records.done:
                    await self.engine.world.clock.sleep_ms(1)
                for each in records.slices or ():
                    if each.error is not None:
                        raise each.error

        self.kit.done(self.host, work())

    def transaction(self, number: int, end: TransactionCall = COMMIT) -> float:
        """Begin, send, end; return how many ms this took."""
        begun = self.kit.now_ms
        self.call(BEGIN)
        self.send(number)
        self.call(end)
        return self.kit.now_ms - begun


class CommittedReader(Reader):
    """Reads every partition from the beginning; offsets have gaps."""

    def numbers(self, place: int = 0) -> list[int]:
        return [number for _, number in self.rows[place]]

    def sees(self, *numbers: int, within_ms: int = 20 * S) -> None:
        """Run until every partition has exactly these numbers, in this order."""
        wanted = list(numbers)
        self.kit.soon(
            lambda: all(len(self.rows[p]) >= len(wanted) for p in range(PLACES)), within_ms
        )
        assert [self.numbers(p) for p in range(PLACES)] == [wanted] * PLACES


def begun(kit: Kit, **given: Any) -> tuple[Transactor, CommittedReader]:
    kit.create("t", PLACES, min_insync_replicas=2)
    producer, reader = Transactor(kit, **given), CommittedReader(kit, "t", PLACES)
    producer.call(INIT)
    return producer, reader


def coordinator(kit: Kit) -> int:
    """Return the broker that coordinates the id."""
    return kit.state(TOPIC, partition_of_id(ID)).leader


def in_sync(kit: Kit) -> bool:
    states = [kit.state("t", p) for p in range(PLACES)] + [kit.state(TOPIC, partition_of_id(ID))]
    return all(len(state.isr) == 3 for state in states)


@pytest.mark.parametrize("seed", range(3))
def test_commits_are_seen_and_aborts_are_not(make: Any, seed: int) -> None:
    kit: Kit = make(seed)
    producer, reader = begun(kit)
    for number in range(10):
        producer.transaction(number, ABORT if number % 3 == 1 else COMMIT)
    reader.sees(*[number for number in range(10) if number % 3 != 1])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("call", [COMMIT, ABORT])
def test_a_killed_coordinator_is_replaced_at_once(
    make: Any, seed: int, call: TransactionCall
) -> None:
    kit: Kit = make(seed)
    producer, reader = begun(kit)
    kit.soon(lambda: in_sync(kit))
    producer.transaction(0)
    producer.call(BEGIN)
    producer.send(1)
    died = coordinator(kit)
    kit.kill(died)
    assert producer.call(call) < 2 * S
    kit.boot(died)
    producer.transaction(2)
    reader.sees(*([0, 1, 2] if call is COMMIT else [0, 2]))


@pytest.mark.parametrize("seed", range(2))
def test_a_silent_coordinator_is_left_when_another_is_elected(make: Any, seed: int) -> None:
    kit: Kit = make(seed)
    producer, reader = begun(kit)
    kit.soon(lambda: in_sync(kit))
    producer.transaction(0)
    producer.call(BEGIN)
    producer.send(1)
    silent = coordinator(kit)
    kit.silence(silent)
    assert producer.call(COMMIT) < SESSION_MS + 3 * S
    kit.silence(silent, heal=True)
    producer.transaction(2)
    reader.sees(0, 1, 2)


@pytest.mark.parametrize("seed", range(2))
def test_a_killed_leader_does_not_end_the_transaction(make: Any, seed: int) -> None:
    kit: Kit = make(seed)
    producer, reader = begun(kit)
    kit.soon(lambda: in_sync(kit))
    producer.call(BEGIN)
    producer.send(0)
    leaders = [kit.state("t", place).leader for place in range(PLACES)]
    died = next((n for n in leaders if n != coordinator(kit)), leaders[0])
    kit.kill(died)
    producer.send(1)
    producer.call(COMMIT)
    kit.boot(died)
    reader.sees(0, 1)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("timeout_ms", [1_000, 5_000])
def test_the_stable_offset_moves_on_after_the_death_of_a_producer(
    make: Any, seed: int, timeout_ms: int
) -> None:
    """Within transaction_timeout_ms and two seconds of the begin, without any other client."""
    kit: Kit = make(seed)
    producer, reader = begun(kit, transaction_timeout_ms=timeout_ms)
    producer.call(BEGIN)
    producer.send(0)
    opened = kit.now_ms
    kit.sim.kill("producer")

    def stable() -> bool:
        leaders = [kit.state("t", p).leader for p in range(PLACES)]
        replicas = [kit.replica(leader, "t", p) for p, leader in enumerate(leaders)]
        return all(each.last_stable_offset == each.high_watermark > 1 for each in replicas)

    assert not stable()
    kit.soon(stable, timeout_ms + 2 * S)
    assert kit.now_ms - opened > timeout_ms - 500, "not before its timeout"
    reader.sees()


@pytest.mark.parametrize("seed", range(2))
def test_the_next_instance_takes_over_at_once(make: Any, seed: int) -> None:
    """It does not wait for the timeout of what the first one left open."""
    kit: Kit = make(seed)
    producer, reader = begun(kit)
    producer.call(BEGIN)
    producer.send(0)
    second = Transactor(kit, "admin")
    assert second.call(INIT) < 2 * S
    second.transaction(1)
    with pytest.raises(errors.ProducerFenced):
        producer.call(COMMIT)
    reader.sees(1)


@pytest.mark.parametrize("seed", range(2))
def test_a_producer_that_was_cut_off_learns_that_its_transaction_timed_out(
    make: Any, seed: int
) -> None:
    kit: Kit = make(seed)
    producer, reader = begun(kit, transaction_timeout_ms=2 * S)
    producer.call(BEGIN)
    producer.send(0)
    for n in kit.boots:
        kit.sim.network.cut(f"b{n}", "producer")
    kit.wait(4 * S)
    for n in kit.boots:
        kit.sim.network.heal(f"b{n}", "producer")
    with pytest.raises(errors.TransactionTimedOut):
        producer.call(COMMIT)
    producer.call(ABORT)
    producer.transaction(1)
    reader.sees(1)
