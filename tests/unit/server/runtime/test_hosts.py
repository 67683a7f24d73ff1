"""The hosts of machines on virtual time, with handlers and logs that can fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pk import errors
from pk.effects import Decision, Effect, Level, Publish, Respond, Send, SetTimer, Write
from pk.server.runtime.machine_host import MachineHost
from pk.server.runtime.replayed_host import ReplayedHost
from pk.server.runtime.timers import Timers
from pk.sim.world import SimWorld
from pk.world import World


def run(story: Callable[[World], Any], seed: int = 1) -> Any:
    with SimWorld(seed) as world:
        result = world.run(story(world.world_of("n")))
        assert not world.loop.failures
        return result


# -- timers ----------------------------------------------------------------------------------------


def test_timers_share_one_heap() -> None:
    """runtime/timers H5: they fire in order, the same key replaces, None cancels, and an owner's
    timers can be dropped.
    """

    async def story(world: World) -> list[Any]:
        fired: list[Any] = []
        clock = world.clock
        timers = Timers(clock, lambda owner, key: fired.append((owner, key, clock.monotonic_ms())))
        task = asyncio.get_running_loop().create_task(timers.run())
        await clock.sleep_ms(1)
        timers.set("m1", "late", 300)
        timers.set("m2", "a", 100)
        timers.set("m1", "a", 100)
        timers.set("m1", "moved", 50)
        timers.set("m1", "moved", 200)
        timers.set("m1", "cancelled", 10)
        timers.set("m1", "cancelled", None)
        timers.set("m3", "x", 150)
        timers.drop("m3")
        await clock.sleep_ms(150)
        timers.set("m2", "past", 5)
        await clock.sleep_ms(500)
        task.cancel()
        return fired

    assert run(story) == [
        ("m2", "a", 100),
        ("m1", "a", 100),
        ("m2", "past", 151),
        ("m1", "moved", 200),
        ("m1", "late", 300),
    ]


# -- a Machine -------------------------------------------------------------------------------------


class Echo:
    """Answers each event with the event's text."""

    def step(self, event: Any, now_ms: int) -> Sequence[Effect]:
        effects: Sequence[Effect] = event(now_ms) if callable(event) else event
        return effects


class EffectHandlers:
    def __init__(self, world: World) -> None:
        self.clock = world.clock
        self.said: list[Any] = []
        self.fail: Exception | None = None

    async def write(self, ops: Sequence[Any], level: Level) -> None:
        self.said.append(("begin", *ops))
        await self.clock.sleep_ms(10 if level is Level.SYNCED else 1)
        if self.fail is not None:
            raise self.fail
        self.said.append(("done", *ops))

    def send(self, peer: Any, message: Any) -> None:
        self.said.append(("send", peer, message))

    def respond(self, request: Any, reply: Any) -> None:
        self.said.append(("respond", request, reply))

    def publish(self, name: str, value: Any) -> None:
        self.said.append(("publish", name, value))


def test_what_follows_a_write_waits_for_it() -> None:
    """runtime/machine_host H1, L1: writes are performed in order, `then` after the level, other
    effects at once.
    """

    async def story(world: World) -> list[Any]:
        handlers = EffectHandlers(world)
        host: MachineHost[Any] = MachineHost(Echo(), handlers, world.clock, on_fatal=pytest.fail)
        host.start()
        host.post([Write(["a"], Level.SYNCED, [Respond(1, "a")]), Send("p", "hello")])
        host.post([Write(["b"], Level.WRITTEN, [Respond(2, "b")]), Publish("n", 3)])
        await world.clock.sleep_ms(50)
        await host.close()
        return handlers.said

    assert run(story) == [
        ("send", "p", "hello"),
        ("publish", "n", 3),
        ("begin", "a"),
        ("done", "a"),
        ("respond", 1, "a"),
        ("begin", "b"),
        ("done", "b"),
        ("respond", 2, "b"),
    ]


def test_a_machine_sets_timers() -> None:
    async def story(world: World) -> list[Any]:
        handlers = EffectHandlers(world)
        hosts: list[MachineHost[Any]] = []
        timers = Timers(world.clock, lambda owner, key: owner.post([Respond(key, "due")]))
        hosts.append(
            MachineHost(Echo(), handlers, world.clock, timers=timers, on_fatal=pytest.fail)
        )
        task = asyncio.get_running_loop().create_task(timers.run())
        hosts[0].start()
        hosts[0].post(lambda now_ms: [SetTimer("t", now_ms + 100), SetTimer("u", now_ms + 50)])
        await world.clock.sleep_ms(10)
        hosts[0].post([SetTimer("u", None)])
        await world.clock.sleep_ms(200)
        task.cancel()
        await hosts[0].close()
        return handlers.said

    assert run(story) == [("respond", "t", "due")]


def test_a_failed_write_and_a_bug_are_fatal_and_queues_are_bounded() -> None:
    """runtime/replayed_host H2; L2: a failed write is never tried again."""

    async def story(world: World) -> None:
        handlers = EffectHandlers(world)
        fatal: list[BaseException] = []
        host: MachineHost[Any] = MachineHost(
            Echo(), handlers, world.clock, on_fatal=fatal.append, queue_max=2
        )
        handlers.fail = errors.StorageFailed("no")
        host.post([Write(["a"], Level.SYNCED, [Respond(1, "never")])])
        host.post([])
        with pytest.raises(errors.ThrottledError):
            host.post([])
        host.start()
        await world.clock.sleep_ms(50)
        assert fatal == [handlers.fail]
        assert ("respond", 1, "never") not in handlers.said
        host.post(lambda _now_ms: 1 // 0)
        await world.clock.sleep_ms(1)
        assert isinstance(fatal[1], ZeroDivisionError)
        await host.close()

    run(story)


# -- a Replayed machine ----------------------------------------------------------------------------


class Sum:
    """A state machine of sums: `+n` appends, "?" reads, any other command is refused."""

    def __init__(self) -> None:
        self.total = 0
        self.applied: list[tuple[int, int]] = []

    def decide(self, command: Any, now_ms: int) -> Decision[int]:
        if command == "?":
            return Decision([], self.total)
        if not isinstance(command, int):
            raise errors.InvalidRequest(f"{command} at {self.total}")
        return Decision([command] if command else [], self.total + command)

    def apply(self, offset: int, record: int) -> None:
        assert offset == len(self.applied)
        self.applied.append((offset, record))
        self.total += record


class ListLog:
    """A ReplayLog in memory with a slow disk that can fail."""

    def __init__(self, world: World, records: Sequence[int] = ()) -> None:
        self.clock = world.clock
        self.records = list(records)
        self.committed = len(self.records)
        self.fail: Exception | None = None
        self.failed: Exception | None = None
        self.leads = True
        self.commits = 0
        self.foreign: list[tuple[int, int]] = []

    @property
    def end(self) -> int:
        return len(self.records)

    def append(self, records: Sequence[int], now_ms: int) -> int:
        if 666 in records:
            raise errors.RecordTooLarge("666")
        self.records += records
        return len(self.records) - len(records)

    async def commit(self) -> None:
        end = len(self.records)
        await self.clock.sleep_ms(10)
        self.commits += 1
        if self.fail is not None:
            failure, self.fail = self.fail, None
            del self.records[self.committed :]
            if isinstance(failure, errors.OperatorError):
                self.failed = failure
            raise failure
        self.committed = end

    def take_foreign(self) -> list[tuple[int, int]]:
        found, self.foreign = self.foreign, []
        return found

    async def replay(self, apply: Callable[[int, int], None]) -> None:
        for offset, record in enumerate(self.records):
            apply(offset, record)


Host = ReplayedHost[Any, int]


def host_of(world: World, log: ListLog, fatal: list[BaseException], **more: Any) -> Host:
    return ReplayedHost(Sum, log, world.clock, on_fatal=fatal.append, **more)


def test_replies_leave_when_what_they_saw_is_committed() -> None:
    """runtime/replayed_host H3: this includes reads and refusals; commands that wait together share
    one commit.
    """

    async def story(world: World) -> None:
        log = ListLog(world, [5])
        host = host_of(world, log, [])
        await host.start()
        ask = [asyncio.get_running_loop().create_task(host.ask(x)) for x in (1, "?", 10, "bad", 0)]
        await world.clock.sleep_ms(9)
        assert not any(task.done() for task in ask)
        done = await asyncio.gather(*ask, return_exceptions=True)
        assert done[:3] == [6, 6, 16]
        assert str(done[3]) == "bad at 16"
        assert done[4] == 16
        assert log.commits == 1
        assert await host.ask("?") == 16
        assert log.commits == 1, "a read of what is committed writes nothing"
        with pytest.raises(errors.RecordTooLarge):
            await host.ask(666)
        await host.close()

    run(story)


def test_who_asks_a_host_that_was_closed_is_refused() -> None:
    """A command in several steps outlives its term.  It must not wait without an end, because its
    stream has room for a bounded number of requests.
    """

    async def story(world: World) -> None:
        host = host_of(world, ListLog(world, [5]), [])
        await host.start()
        assert await host.ask(1) == 6
        await host.close()
        with pytest.raises(errors.ControllerUnavailable, match="shutting down"):
            async with asyncio.timeout(60):
                await host.ask(1)

    run(story)


def test_a_host_refuses_with_the_error_it_was_given() -> None:
    """A coordinator's host does not speak of controllers."""

    async def story(world: World) -> None:
        log = ListLog(world, [5])
        host = host_of(world, log, [], unavailable=errors.CoordinatorUnavailable)
        await host.start()
        log.fail, log.leads = RuntimeError("bug"), False
        for _ in range(2):
            with pytest.raises(errors.CoordinatorUnavailable):
                await host.ask(1)
        await host.close()
        with pytest.raises(errors.CoordinatorUnavailable):
            await host.ask(1)

    run(story)


def test_what_others_append_is_applied_before_the_next_decision() -> None:
    """The machine has applied every record below its decision (controller/machine M3)."""

    async def story(world: World) -> Any:
        log = ListLog(world)
        host = host_of(world, log, [])
        await host.start()
        await host.ask(1)
        log.records.append(40)
        log.foreign.append((1, 40))
        await host.ask(2)
        machine = host.machine
        await host.close()
        return machine.total, log.records  # type: ignore[attr-defined]

    with SimWorld(1) as sim:
        assert sim.run(story(sim.world_of("n"))) == (43, [1, 40, 2])


def test_a_failed_append_starts_over() -> None:
    """runtime/replayed_host H4: the machine loses what is not in the log; every reply of the round
    fails.
    """

    async def story(world: World) -> None:
        log, fatal = ListLog(world, [5]), []  # type: ignore[var-annotated]
        host = host_of(world, log, fatal)
        await host.start()
        log.fail = errors.StorageFull("full")
        done = await asyncio.gather(*(host.ask(x) for x in (1, "?")), return_exceptions=True)
        assert [type(each) for each in done] == [errors.StorageFull] * 2
        assert await host.ask("?") == 5
        assert await host.ask(2) == 7
        assert not fatal
        await host.close()

    run(story)


def test_nobody_sees_a_machine_that_has_read_a_part_of_the_log() -> None:
    """runtime/replayed_host H4: heartbeats and samples read the machine beside the queue."""

    class SlowLog(ListLog):
        async def replay(self, apply: Callable[[int, int], None]) -> None:
            for offset, record in enumerate(self.records):
                await self.clock.sleep_ms(10)
                apply(offset, record)

    async def story(world: World) -> None:
        log = SlowLog(world, [5, 6])
        host = host_of(world, log, [])
        await host.start()
        assert not host.replaying
        log.fail = errors.StorageFull("full")
        with pytest.raises(errors.StorageFull):
            await host.ask(1)
        read = asyncio.get_running_loop().create_task(host.ask("?"))
        await world.clock.sleep_ms(15)
        assert host.replaying
        assert host.machine.total == 12  # type: ignore[attr-defined]
        assert await read == 11
        assert not host.replaying
        assert host.machine.total == 11  # type: ignore[attr-defined]
        await host.close()

    run(story)


def test_a_host_whose_log_another_node_leads_ends_without_a_replay() -> None:
    """runtime/replayed_host H4: that log may be truncated at any moment; the next term replays it
    again.  This is no failure.
    """

    async def story(world: World) -> None:
        log, fatal = ListLog(world, [5]), []  # type: ignore[var-annotated]
        host = host_of(world, log, fatal)
        await host.start()
        machine = host.machine
        log.fail, log.leads = errors.ControllerUnavailable("another node leads"), False
        for _ in range(2):
            with pytest.raises(errors.ControllerUnavailable):
                await host.ask(1)
        assert host.machine is machine, "replayed"
        assert not fatal
        await host.close()

    run(story)


def test_a_lost_disk_is_fatal() -> None:
    async def story(world: World) -> None:
        log, fatal = ListLog(world), []  # type: ignore[var-annotated]
        host = host_of(world, log, fatal)
        await host.start()
        log.fail = errors.StorageFailed("gone")
        with pytest.raises(errors.StorageFailed):
            await host.ask(1)
        assert [type(each) for each in fatal] == [errors.StorageFailed]
        with pytest.raises(errors.ControllerUnavailable):
            await host.ask("?")
        await host.close()

    run(story)


def test_callers_that_gave_up_and_queues_that_are_full() -> None:
    """runtime/replayed_host H2; a command whose caller has given up before its decision is not
    decided.
    """

    async def story(world: World) -> None:
        log = ListLog(world)
        host = host_of(world, log, [], queue_max=2)
        loop = asyncio.get_running_loop()
        first, second = (loop.create_task(host.ask(x)) for x in (1, 2))
        await world.clock.sleep_ms(1)
        with pytest.raises(errors.ThrottledError):
            await host.ask(3)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await host.start()
        assert await second == 2
        assert log.records == [2]
        waiting = loop.create_task(host.ask(4))
        await world.clock.sleep_ms(1)
        last = loop.create_task(host.ask(5))
        await world.clock.sleep_ms(1)
        await host.close()
        with pytest.raises(errors.ControllerUnavailable):
            await last
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    run(story)
