"""Which transactions a coordinator takes for timed out (transactions/coordinator N6, rule L10)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from pk.server.transactions import commands
from pk.server.transactions.commands import TransactionBegan
from pk.server.transactions.coordinator import FORGET_MS, TransactionCoordinators, _Hosted
from pk.server.transactions.participants.awaited_batches import AwaitedBatches
from pk.server.transactions.participants.leases import Leases
from pk.sim.world import SimWorld

HOUR_MS = 3_600_000


def rules_of(number: int) -> commands.TransactionRules:
    return commands.TransactionRules(number, 900_000, 86_400_000)


def hosted_by(host: object, number: int) -> _Hosted:
    nothing = cast("Any", None)
    leases, awaited = Leases(1_000, 9_000), AwaitedBatches(9_000)
    return _Hosted(rules_of(number), 1, cast("Any", host), nothing, leases, awaited)


def hosted(*opened: TransactionBegan) -> _Hosted:
    found = hosted_by(None, 0)
    found.deadlines.update({each.transactional_id: each for each in opened})
    return found


def began(name: str, started_ms: int) -> TransactionBegan:
    return TransactionBegan(name, 7, 0, started_ms, 1_000)


def test_a_timeout_passes_by_the_wall_clock() -> None:
    first, second = began("a", 5_000), began("b", 5_500)
    assert hosted(first, second).late(6_000, 0) == []
    assert hosted(first, second).late(6_001, 0) == [first]


def test_a_transaction_that_began_in_the_future_times_out_by_the_monotonic_clock() -> None:
    """The clock was an hour ahead at its begin, and is right again."""
    ahead = began("a", HOUR_MS)
    found = hosted(ahead)
    assert found.late(5_000, 100) == []
    assert found.late(6_000, 1_100) == []
    assert found.late(6_001, 1_101) == [ahead]


def test_the_next_transaction_of_an_id_has_its_whole_timeout() -> None:
    found = hosted(began("a", HOUR_MS))
    assert found.late(5_000, 0) == []
    found.deadlines["a"] = began("a", HOUR_MS)._replace(producer_epoch=1)
    assert found.late(6_500, 1_500) == []
    assert len(found.late(7_501, 2_501)) == 1


class Host:
    """A host that answers at once, or never."""

    def __init__(self, *, stuck: bool = False) -> None:
        self.replaying = False
        self.machine = object()
        self.asked: list[object] = []
        self._stuck = stuck

    async def ask(self, command: object) -> int:
        self.asked.append(command)
        if self._stuck:
            await asyncio.Event().wait()
        return 0

    def count(self, kind: type) -> int:
        return sum(isinstance(each, kind) for each in self.asked)


def ticked(*hosts: Host, for_ms: int) -> None:
    """Let a broker coordinate a partition with each host; each has a transaction that is late."""
    world = SimWorld(1)
    mine = world.world_of("broker")
    bugs: list[BaseException] = []
    env = SimpleNamespace(
        world=mine, clock=mine.clock, bug=lambda where, bug: bugs.append(bug),
        warn=lambda event, **facts: None,
        metrics=SimpleNamespace(awaited_batches=SimpleNamespace(set=lambda value: None)),
    )  # fmt: skip

    async def main() -> None:
        env.now_ms = 0
        contact: Any = SimpleNamespace(in_contact=lambda: True)
        clocks: Any = SimpleNamespace(trusted_ms=lambda: 10_000)
        found = TransactionCoordinators(
            cast("Any", env), cast("Any", None), {}, contact, clocks, cast("Any", None)
        )
        for number, host in enumerate(hosts):
            each = found._hosted[number] = hosted_by(host, number)
            each.leases.began(commands.BatchBegan("job", 1, 10_000), 0)
            each.loading, each.resumed = False, host.machine
            each.deadlines["a"] = began("a", 0)
        found.start()
        for _ in range(for_ms // 1_000):
            env.now_ms += 1_000
            await mine.clock.sleep_ms(1_000)
        await found._tasks.close()

    task = world.spawn("broker", main())
    world.run_until(task.done)
    task.result()
    world.close()
    assert not bugs


def test_a_partition_without_progress_does_not_delay_the_timeouts_of_others() -> None:
    stuck, well = Host(stuck=True), Host()
    ticked(stuck, well, for_ms=2_000)
    assert stuck.count(commands.ExpireTransactions) == 1, "one question at a time"
    assert well.count(commands.ExpireTransactions) == 1


def test_a_batch_that_no_task_holds_is_aborted_once() -> None:
    host = Host()
    ticked(host, for_ms=5_000)
    assert [each for each in host.asked if isinstance(each, commands.ExpireBatches)] == [
        commands.ExpireBatches((("job", 1),))
    ]


def test_every_partition_forgets_its_old_ids() -> None:
    hosts = Host(), Host(), Host()
    ticked(*hosts, for_ms=FORGET_MS + 5_000)
    assert [each.count(commands.ForgetExpired) for each in hosts] == [2, 2, 2]
