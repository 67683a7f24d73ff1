"""The Spark connector's calls and scans in a cluster of several production brokers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pk.log import batch as batches
from pk.settings import CONSUMER
from pk.sparkconnector.connection import ClusterClient
from pk.sparkconnector.offsets import Range
from pk.sparkconnector.scan import Scan
from pk.wire import pk_pb2 as wire
from tests.kit.cluster import SESSION_MS, Kit, Lines

#: Clients as people configure them, for the fixture `make`.
KIT = {"client_defaults": True}

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def connect(kit: Kit) -> ClusterClient:
    """Return the cluster connection that a Python worker of Spark has."""
    world = kit.sim.world_of("reader")
    process: Any = SimpleNamespace(
        world=world, clock=world.clock, network=world.network, rng=world.rng,
        run=lambda work: kit.done("reader", work),
    )  # fmt: skip
    bootstrap = ",".join(f"b{n}:9292" for n in kit.boots)
    return ClusterClient(process, bootstrap, CONSUMER.resolve({}))


def offsets(scan: Scan) -> list[int]:
    """Return the offsets that were fetched so far."""
    found: list[int] = []
    while not scan._items.empty():
        item = scan._items.get_nowait()
        if isinstance(item, BaseException):
            raise item
        if item is not None:
            for header, _ in batches.iter_batches(item.payload):
                found += range(header.base_offset, header.next_offset)
    return found


@pytest.mark.parametrize("how", ["silent", "killed", "drained"])
@pytest.mark.parametrize("seed", range(2))
def test_a_scan_goes_on_at_the_next_leader(make: Any, seed: int, how: str) -> None:
    kit = make(seed)
    kit.create("t", min_insync_replicas=2)
    lines = Lines(kit, "t")
    lines.after()
    cluster = connect(kit)
    (topic,) = cluster.topics(["t"])
    (bounds,) = cluster.bounds([topic], read_committed=True)
    end = bounds.latest + 300
    scan = Scan(cluster, Range("t", topic.topic_id, 0, 0, end), 1)
    task = kit.sim.spawn("reader", scan.run())
    kit.wait(50)
    assert not task.done()
    leader, begun = kit.state("t").leader, kit.now_ms
    if how == "silent":
        kit.silence(leader)
    elif how == "killed":
        kit.kill(leader)
    else:
        kit.drain(leader)
    kit.until(task.done)
    assert kit.now_ms - begun < 3_000 + (SESSION_MS if how == "silent" else 0)
    found = offsets(scan)
    assert found[:end] == list(range(end))
    assert found == list(range(len(found)))


def test_offsets_and_sizes_come_from_the_leaders(make: Any) -> None:
    kit = make(3)
    kit.spread("t", min_insync_replicas=1)
    lines = Lines(kit, "t", 3)
    for partition in range(3):
        lines.after(partition)
    lines.stop()
    cluster = connect(kit)

    def latest() -> list[int]:
        return [one.latest for one in cluster.bounds(cluster.topics(["t"]), read_committed=True)]

    assert latest() == [lines.sent] * 3
    ranges = [Range("t", cluster.topics(["t"])[0].topic_id, p, 0, lines.sent) for p in range(3)]
    assert all(curve[0][0] == 0 for curve in cluster.curves(ranges, 10))
    for how in (kit.kill, kit.silence):
        leader, begun = kit.state("t").leader, kit.now_ms
        how(leader)
        assert latest() == [lines.sent] * 3
        assert kit.now_ms - begun < SESSION_MS + 1_500
        kit.silence(leader, heal=True)
        if leader not in kit.brokers:
            kit.boot(leader)
        kit.until(lambda: all(len(kit.state("t", p).isr) == 3 for p in range(3)))


def test_every_leader_is_asked_for_the_table(make: Any) -> None:
    """A broker that leads no partition of a topic has never seen its table."""
    kit = make(4)
    kit.spread("t")
    cluster = connect(kit)
    asked: list[str] = []
    call = cluster._call

    async def noted(address: str, request: Any) -> Any:
        if isinstance(request, wire.DescribeTierRequest):
            asked.append(address)
        return await call(address, request)

    cluster._call = noted  # type: ignore[method-assign]
    assert cluster.tier("t").uri == ""
    assert asked == [f"b{n}:9292" for n in (1, 2, 3)]
