"""Group commit: rules P2 and L2 in replica/directory_writer.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from pk.server.replica.directory_writer import LogDirWriter, Round
from pk.sim.disk import SimStorage

T = TypeVar("T")


class SlowDisk:
    """A writer whose rounds end when the test ends them."""

    def __init__(self) -> None:
        self.storage = SimStorage()
        self.gate = asyncio.Event()
        self.rounds: list[int] = []

    async def write(self, work: Callable[[], T]) -> T:
        await self.gate.wait()
        return work()


class Appender:
    def __init__(self, name: str, trace: list[Any], *, fails: bool = False) -> None:
        self.name, self.trace, self.fails, self.decided = name, trace, fails, 0

    def decide(self, writer: LogDirWriter, size: int) -> None:
        self.decided += size
        writer.submit(self, size)

    def take_round(self) -> Round | None:
        size, self.decided = self.decided, 0
        if not size:
            return None

        def run() -> int:
            if self.fails:
                raise OSError(self.name)
            self.trace.append((self.name, size))
            return size

        self.size = size
        return Round(run)

    def end_round(self, outcome: Any, failure: BaseException | None) -> None:
        self.trace.append((self.name, outcome, type(failure).__name__))


def writer_on(disk: SlowDisk, **more: Any) -> LogDirWriter:
    def on_bug(where: str, bug: BaseException) -> None:
        raise AssertionError(where) from bug

    return LogDirWriter(disk, on_bug=on_bug, **more)  # type: ignore[arg-type]


def test_what_is_decided_while_a_round_is_written_makes_the_next_round() -> None:
    async def story() -> list[Any]:
        disk, trace = SlowDisk(), []
        writer = writer_on(disk)
        a, b = Appender("a", trace), Appender("b", trace)
        a.decide(writer, 1)
        await asyncio.sleep(0)
        a.decide(writer, 2)
        b.decide(writer, 3)
        a.decide(writer, 4)
        disk.gate.set()
        await writer.idle()
        assert writer.rounds == 2
        return trace

    assert asyncio.run(story()) == [
        ("a", 1), ("a", 1, "NoneType"),
        ("a", 6), ("b", 3), ("a", 6, "NoneType"), ("b", 3, "NoneType"),
    ]  # fmt: skip


def test_one_failing_partition_does_not_stop_the_others() -> None:
    async def story() -> list[Any]:
        disk, trace = SlowDisk(), []
        disk.gate.set()
        writer = writer_on(disk)
        bad, good = Appender("bad", trace, fails=True), Appender("good", trace)
        bad.decide(writer, 1)
        good.decide(writer, 1)
        await writer.idle()
        return trace

    assert asyncio.run(story()) == [("good", 1), ("bad", None, "OSError"), ("good", 1, "NoneType")]


def test_a_full_queue_makes_producers_wait_and_wakes_them_in_order() -> None:
    async def story() -> None:
        writer = writer_on(SlowDisk(), bytes_max=10)
        writer.submit(Appender("a", []), 10)
        order: list[int] = []

        async def produce(number: int) -> None:
            await writer.room()
            order.append(number)

        tasks = [asyncio.create_task(produce(number)) for number in range(3)]
        await asyncio.sleep(0)
        assert order == []
        writer.done(5)
        await asyncio.gather(*tasks)
        assert order == [0, 1, 2]
        writer.disk.gate.set()  # type: ignore[attr-defined]
        await writer.idle()

    asyncio.run(story())


def test_a_lane_that_is_gone_fails_its_round() -> None:
    class Closed:
        storage = SimStorage()

        async def write(self, work: Callable[[], Any]) -> Any:
            raise OSError("closed")

    async def story() -> list[Any]:
        trace: list[Any] = []
        writer = writer_on(Closed())  # type: ignore[arg-type]
        Appender("a", trace).decide(writer, 1)
        await writer.idle()
        return trace

    assert asyncio.run(story()) == [("a", None, "OSError")]


@pytest.mark.parametrize("size", [0, 9])
def test_below_the_bound_nobody_waits(size: int) -> None:
    async def story() -> None:
        writer = writer_on(SlowDisk(), bytes_max=10)
        writer.queued_bytes = size
        async with asyncio.timeout(1):
            await writer.room()

    asyncio.run(story())
