"""Clients in a simulated cluster: a producer and a reader that keep account of every record."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pk import errors
from pk.client.accumulator import record_size
from pk.client.fetch_engine import FetchEngine
from pk.client.network_client import NetworkClient
from pk.client.options import consumer_options, producer_options
from pk.client.produce_engine import ProduceEngine
from pk.types import TopicPartition
from tests.sim.replication_kit import SERVER, Kit

SESSION_MS = int(SERVER["broker_session_timeout_ms"])


class Town(Kit):
    """The kit with clients as people configure them: every setting at its default."""

    def __init__(self, seed: int, brokers: int = 3, **server: Any) -> None:
        super().__init__(seed, brokers, **server)
        self.sim.network.silence_ms = 10**9  # what is silent stays so: SIGSTOP, not a dead host

    def cluster(self, name: str, bootstrap: list[str] | None = None) -> NetworkClient:
        world = self.sim.world_of(name)
        return NetworkClient(world, bootstrap or [f"b{n}:9292" for n in self.boots], client_id=name)

    def soon(self, holds: Any, within_ms: int = 20_000) -> None:
        deadline = self.now_ms + within_ms
        self.until(lambda: holds() or self.now_ms > deadline)
        assert holds()

    def done(self, name: str, work: Any) -> Any:
        task = self.sim.spawn(name, work)
        self.until(task.done)
        return task.result()

    @property
    def now_ms(self) -> float:
        return self.sim.loop.now_us / 1000

    def silence(self, n: int, *also: str, heal: bool = False) -> None:
        """Let broker `n` answer no request, while its streams stay open."""
        others = [f"b{each}" for each in self.boots if each != n]
        change = self.sim.network.heal if heal else self.sim.network.cut
        for name in ("controller", "admin", "producer", "reader", *others):
            change(f"b{n}", name)

    def spread(self, topic: str, **configs: Any) -> None:
        """A topic with a partition led by each broker."""
        self.create(topic, partitions=len(self.boots), **configs)
        leaders = {self.state(topic, n).leader for n in range(len(self.boots))}
        assert leaders == set(self.boots)


class Lines:
    """One producer; a numbered record to every partition of a topic every few milliseconds."""

    def __init__(
        self, kit: Town, topic: str, partitions: int = 1, bootstrap: Any = None, **given: Any
    ) -> None:
        self.kit = kit
        self.topic = topic
        self.partitions = partitions
        self.sent = 0
        self.acked: dict[tuple[int, int], int] = {}  #: (partition, number) -> offset
        self.newest = dict.fromkeys(range(partitions), -1)  #: the last number acknowledged
        self.failed: dict[tuple[int, int], errors.PkError] = {}
        options, _ = producer_options(given)
        self.world = kit.sim.world_of("producer")
        cluster = kit.cluster("producer", bootstrap)
        self.engine = ProduceEngine(self.world, cluster, options)
        self._going = True
        self._task = kit.sim.spawn("producer", self._run())

    async def _run(self) -> None:
        self.engine.cluster.start()
        accumulator = await self.engine.open(self.topic, 60_000)
        while self._going:
            number, self.sent = self.sent, self.sent + 1
            for partition in range(self.partitions):
                value = b"%d" % number

                def told(at: Any, error: Any, key: Any = (partition, number)) -> None:
                    if error is None:
                        self.acked[key] = at.offset
                        self.newest[key[0]] = max(self.newest[key[0]], key[1])
                    else:
                        self.failed[key] = error

                size = record_size(value, None, None, self.topic)
                accumulator.append(value, None, None, partition, None, told, size=size)
            self.engine.poke()
            await self.world.clock.sleep_ms(self.world.rng.randint(1, 9))

    def after(self, partition: int = 0) -> float:
        """Run until a record that is sent from now on is acknowledged: how many ms that takes."""
        begun, mark = self.kit.now_ms, self.sent
        self.kit.until(lambda: self.newest[partition] >= mark or self.engine.fatal is not None)
        assert self.engine.fatal is None, self.engine.fatal
        return self.kit.now_ms - begun

    def stop(self) -> None:
        """No more; every record gets an outcome."""
        self._going = False
        self.kit.until(self._task.done)

        async def flush() -> None:
            self.engine.begin_flush()

        self.kit.until(self.kit.sim.spawn("producer", flush()).done)
        total = self.sent * self.partitions
        self.kit.until(lambda: len(self.acked) + len(self.failed) == total)


class Reader:
    """One consumer of every partition, from the beginning."""

    def __init__(self, kit: Town, topic: str, partitions: int = 1) -> None:
        self.kit = kit
        self.rows: dict[int, list[tuple[int, int]]] = {p: [] for p in range(partitions)}
        self.told: list[errors.PkError] = []
        self.world = kit.sim.world_of("reader")
        options = consumer_options({"auto_offset_reset": "earliest"})
        self.engine = FetchEngine(self.world, kit.cluster("reader"), options)
        self._task = kit.sim.spawn("reader", self._run(topic))

    async def _run(self, topic: str) -> None:
        self.engine.assign([TopicPartition(topic, p) for p in self.rows])
        while True:
            await self.world.clock.sleep_ms(2)
            try:
                found = self.engine.drain()
            except errors.PkError as error:
                self.told.append(error)
                continue
            for place, batch in found:
                offsets = batch.column("offset").to_pylist()
                values = map(int, batch.column("value").to_pylist())
                self.rows[place.partition] += zip(offsets, values, strict=True)

    def after(self, partition: int = 0) -> float:
        """Run until something new is read: how many ms that takes."""
        begun, seen = self.kit.now_ms, len(self.rows[partition])
        self.kit.until(lambda: len(self.rows[partition]) > seen)
        return self.kit.now_ms - begun

    def check(self, lines: Lines) -> None:
        """Everything acknowledged was read, where it was said, each once, in order, no gap."""
        for partition, rows in self.rows.items():
            offsets = [offset for offset, _ in rows]
            assert offsets == list(range(len(rows))), "a gap or a repetition"
            numbers = [number for _, number in rows]
            assert numbers == sorted(set(numbers)), "order, exactly once"
            for (p, number), offset in lines.acked.items():
                assert p != partition or rows[offset] == (offset, number)

    def catch_up(self, lines: Lines) -> None:
        want = {p: max(o for (q, _), o in lines.acked.items() if q == p) + 1 for p in self.rows}
        self.kit.until(lambda: all(len(self.rows[p]) >= end for p, end in want.items()))


@pytest.fixture
def make() -> Iterator[Any]:
    made: list[Town] = []

    def one(seed: int, **given: Any) -> Town:
        made.append(Town(seed, **given))
        return made[-1]

    yield one
    for kit in made:
        kit.sim.close()
