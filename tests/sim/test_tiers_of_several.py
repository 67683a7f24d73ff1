"""Several brokers, each with a tier process of its own, and one store: what a tier knows of a table
that other nodes have written since.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pk import errors
from pk.server.node.run_config import RunConfig
from pk.server.tier.client import TierClient
from pk.server.tier.node import TierNode
from pk.tiering.objects import MemoryStore
from pk.tiering.table import MemoryTables, moved
from pk.tiering.worker import Executors
from pk.wire import pk_pb2 as wire
from pk.world import World
from tests.kit.cluster import Kit, Ledger

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

RETENTION_MS = 60_000
TIERED = {
    "min_insync_replicas": 1,
    "segment_bytes": 14_336,
    "local_retention_bytes": 20_000,
    "tier_max_lag_ms": 200,
    "local_drop_delay_ms": 300,
    "file_delete_delay_ms": 500,
    "retention_ms": -1,
}


class Tiers:
    """A tier process beside each broker; the store and the tables outlive them."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self.store = MemoryStore()
        self.tables = MemoryTables()
        self.nodes: dict[int, TierNode] = {}
        for n in kit.boots:
            kit.sim.start(f"t{n}", lambda world, n=n: self._main(world, n))

    async def _main(self, world: World, n: int) -> None:
        async def execute(work: Callable[[], Any]) -> Any:
            return work()

        kit = self.kit
        self.nodes[n] = TierNode(
            world,
            self.store,
            self.tables,
            lambda path: (kit.storages[n], path.partition("/")[2]),
            Executors(execute, execute),
            self.met(n),
            broker_address=f"b{n}:{kit.port}",
        )
        await self.nodes[n].start()

    def met(self, n: int) -> RunConfig:
        """Let the broker of node `n` find its tier: the kit's nodes share one directory for
        sockets.
        """
        broker = self.kit.brokers[n]
        run = replace(broker.run, run_dir=f"/sim/run{n}")
        world, hello = broker.world, broker.core.hello
        tier = TierClient(world, run.tier_address, hello, enabled=True, fetch_wait_ms=500)
        vars(broker.core.tier).update(vars(tier))
        broker.core.metadata.tier_enabled = True
        return run

    def away(self) -> None:
        """Let the store answer no request."""

        def refuse(*_: Any) -> None:
            raise errors.TierUnavailable("the store is away")

        self.store.fault = self.tables.before_load = self.tables.before_commit = refuse

    def back(self) -> None:
        self.store.fault = self.tables.before_load = self.tables.before_commit = lambda *_: None


def lead(kit: Kit, n: int) -> None:
    """Let broker `n` lead t-0, cleanly elected."""
    others = [each for each in kit.state("t").replicas if each != n]
    request = wire.AlterReassignmentsRequest()
    request.reassignments.add(
        topic="t", topic_id=kit.topic_id("t"), partition=0, replicas=[n, *others]
    )
    kit.ask(request)
    elect = wire.ElectLeadersRequest()
    elect.partitions.add(topic_id=kit.replica(n, "t").key.topic_id, partition=0)
    kit.ask(elect)
    assert kit.state("t").leader == n
    kit.until(lambda: kit.replica(n, "t").leader is not None and kit.in_sync("t", 2))


def tiered(kit: Kit, count: int) -> None:
    """Append `count` more records and tier all of them; the first ones are nowhere else."""
    ledger = Ledger(kit, "t")
    ledger.more(count)
    ledger.stop()
    replicas = [kit.replica(n, "t") for n in kit.state("t").isr]
    end = replicas[0].log.written_end
    kit.until(lambda: kit.replica(kit.state("t").leader, "t").tiered_end == end)
    kit.until(lambda: all(each.log.local_log_start > end - count for each in replicas))


def by_time(kit: Kit, timestamp_ms: int) -> wire.OffsetAnswer:
    leader = kit.state("t").leader
    request = wire.ListOffsetsRequest()
    topic_id = kit.replica(leader, "t").key.topic_id
    request.queries.add(
        topic_id=topic_id, partition=0, current_leader_epoch=-1, timestamp_ms=timestamp_ms
    )
    asked = kit.spawn_ask(request, leader)
    kit.until(asked.done)
    answer: wire.OffsetAnswer = asked.result().answers[0]
    return answer


def configure(kit: Kit, option: str, value: int) -> None:
    request = wire.AlterConfigsRequest()
    resource = wire.ConfigResource(type="topic", name="t")
    request.changes.add(resource=resource).set[option] = str(value)
    assert not kit.ask(request).results[0].HasField("error")


@pytest.fixture
def two(make: Any) -> tuple[Kit, Tiers]:
    """Return two replicas of t-0, each with a tier."""
    kit = make(
        3,
        brokers=2,
        auto_leader_rebalance_enable=False,
        tier_url="memory://tier",
        log_retention_check_interval_ms=1_000,
    )
    tiers = Tiers(kit)
    kit.create("t", factor=2, **TIERED)
    return kit, tiers


def test_a_follower_drops_what_its_leader_has_tiered_since_it_looked(
    two: tuple[Kit, Tiers],
) -> None:
    """T6: the follower's own tier does not write to the table and does not learn of new commits by
    itself; the disk would fill up with tiered records.
    """
    kit, tiers = two
    for _ in range(3):
        tiered(kit, 3_000)
    assert kit.state("t").leader_epoch == 0
    follower = kit.state("t").replicas[1]
    (topic,) = tiers.nodes[follower].worker.topics.values()
    assert not topic.led


def test_a_follower_looks_for_the_files_that_the_table_names_now(two: tuple[Kit, Tiers]) -> None:
    """T6: files were rewritten and removed since it looked; none of them is lost."""
    kit, tiers = two
    tiered(kit, 3_000)
    leader, follower = kit.state("t").replicas
    (topic,) = tiers.nodes[follower].worker.topics.values()
    state = tiers.tables.states[topic.table.uri]
    log = kit.replica(follower, "t").log
    assert topic.owner.snapshot is not None
    assert topic.owner.snapshot.partition(0).end == log.written_end
    for file in list(state.versions[-1].files.values()):  # OPTIMIZE, then VACUUM
        path = file.path.replace("partition=0/", "partition=0/part-")
        tiers.store.objects[f"{topic.home}/{path}"] = tiers.store.objects.pop(
            f"{topic.home}/{file.path}"
        )
        tiers.tables.rewrite(topic.table.uri, [file.path], [moved(file, path)])
    start = log.local_log_start
    configure(kit, "local_retention_bytes", 10_000)
    kit.until(lambda: log.local_log_start > start)
    assert kit.replica(leader, "t").tier.problem is None


@pytest.mark.parametrize("begun_anew", [False, True])
def test_who_leads_again_knows_no_more_of_the_table_than_when_it_led(
    two: tuple[Kit, Tiers], begun_anew: bool
) -> None:
    """Rules T9, T11: until it has read the table again, records that its old version lacks must not
    be taken for expired, or for local.
    """
    kit, tiers = two
    configure(kit, "retention_ms", RETENTION_MS)
    tiered(kit, 3_000)
    first, second = kit.state("t").replicas
    assert kit.state("t").leader == first
    lead(kit, second)
    if begun_anew:  # it learns where its leader's local log begins, and reads no file
        kit.kill(first)
    kit.wait(RETENTION_MS)
    begun_ms = kit.sim.world_of("producer").clock.wall_ms()
    tiered(kit, 3_000)
    kit.until(lambda: kit.replica(second, "t").log.log_start >= 3_000)
    if begun_anew:
        kit.boot(first)
        kit.until(lambda: kit.serves(first))
        tiers.met(first)
        kit.until(lambda: kit.in_sync("t", 2))
        assert kit.events("log_begun_anew") == 1
    tiers.away()
    lead(kit, first)
    log = kit.replica(first, "t").log
    start = log.log_start
    assert start < log.local_log_start
    kit.wait(RETENTION_MS // 4)
    assert log.log_start == start
    answer = by_time(kit, begun_ms)
    assert answer.error.code == errors.TierUnavailable.code
    tiers.back()
    for _ in range(8):  # the tier process asks the store again after a pause of up to 30 s
        kit.wait(5_000)
        if by_time(kit, begun_ms).offset != -1:
            break
    assert by_time(kit, begun_ms).offset == start
    assert log.log_start == start
    kit.until(lambda: log.log_start > start)


def test_who_is_cut_off_expires_nothing_in_the_table(two: tuple[Kit, Tiers]) -> None:
    """Rules T9, R6: a clean election makes no claim.  The shared table would otherwise lose records
    that the next leader's settings keep.
    """
    kit, tiers = two
    configure(kit, "retention_ms", RETENTION_MS)
    tiered(kit, 3_000)
    first, second = kit.state("t").replicas
    kit.sim.network.cut("controller", f"b{first}")
    kit.sim.network.cut(f"b{second}", f"b{first}")
    kit.until(lambda: kit.state("t").leader == second)
    kit.until(lambda: kit.replica(second, "t").leader is not None)
    configure(kit, "retention_ms", -1)
    kit.wait(2 * RETENTION_MS)
    assert kit.replica(first, "t").leader is not None
    (topic,) = tiers.nodes[second].worker.topics.values()
    newest = tiers.tables.states[topic.table.uri].versions[-1]
    assert newest.partition(0).start == 0
    assert kit.replica(second, "t").log.log_start == 0


def test_a_replaced_leader_deletes_nothing_in_the_table(two: tuple[Kit, Tiers]) -> None:
    """Rule T9: the successor does not know of the deletion, and all replicas share the table.  The
    leader was replaced cleanly, so no claim would refuse it (T4).
    """
    kit, tiers = two
    tiered(kit, 3_000)
    first, second = kit.state("t").replicas
    (topic,) = tiers.nodes[first].worker.topics.values()
    kit.sim.network.cut("controller", f"b{first}")
    kit.sim.network.cut(f"b{second}", f"b{first}")
    request = wire.DeleteRecordsRequest()
    key = kit.replica(first, "t").key
    request.items.add(topic_id=key.topic_id, partition=0, before_offset=2_000)
    asked = kit.spawn_ask(request, first)
    kit.until(lambda: kit.state("t").leader == second)
    kit.until(lambda: kit.replica(second, "t").leader is not None)
    kit.wait(20_000)
    old = kit.replica(first, "t")
    assert old.leader is not None, "it has not heard of its successor"
    assert old.log.log_start == 2_000, "it carried the deletion out in its own log"
    newest = tiers.tables.states[topic.table.uri].versions[-1]
    assert newest.partition(0).start == 0
    assert sum(file.rows for file in newest.files_of(0)) >= 3_000
    assert asked.result().results[0].error.code == errors.RequestTimedOut.code


def test_a_deletion_reaches_the_table_once_the_followers_know(two: tuple[Kit, Tiers]) -> None:
    """Rule T9, the normal case."""
    kit, tiers = two
    tiered(kit, 3_000)
    leader, follower = kit.state("t").replicas
    (topic,) = tiers.nodes[leader].worker.topics.values()
    request = wire.DeleteRecordsRequest()
    key = kit.replica(leader, "t").key
    request.items.add(topic_id=key.topic_id, partition=0, before_offset=2_000)
    assert not kit.ask(request).results[0].HasField("error")
    state = tiers.tables.states[topic.table.uri]
    kit.until(lambda: state.versions[-1].partition(0).start == 2_000)
    assert kit.replica(follower, "t").log.log_start == 2_000
