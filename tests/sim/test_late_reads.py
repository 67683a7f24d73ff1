"""Disk reads that end after the leader was replaced: the log may have other records by then."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from pk.log import batch as batches
from pk.log import columns
from pk.server.broker.metadata_publisher import POLL_WAIT_MS
from pk.server.replica.delayed_produce import DelayedProduce
from pk.server.replica.partition import Partition
from pk.types import NodeId
from tests.kit.cluster import Kit

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def append(kit: Kit, n: NodeId, topic: str, content: bytes) -> None:
    """Append one batch of one record, too large to be kept in memory (log/batch_cache.py)."""
    partition = kit.replica(n, topic)
    rows = pa.RecordBatch.from_pydict({"value": pa.array([content * 40_000], pa.binary())})
    raw = b"".join(columns.encode(rows, default_timestamp=1_735_689_600_000))
    delayed = DelayedProduce(None, 0, 0, 0, 0)

    async def story() -> None:
        core = kit.brokers[n].core
        core.partitions[partition.key].append(
            batches.check(raw), raw, partition.leader_epoch, core.clocks.now(), delayed
        )

    kit.until(kit.sim.spawn(f"b{n}", story()).done)


def hold_reads(partition: Partition, clock: Any) -> list[Any]:
    """Let the disk of `partition` read nothing until the returned list of waiting reads is
    cleared.
    """
    disk: Any = partition.writer.disk
    read, held = disk.read, []

    async def reading(work: Any) -> Any:
        held.append(work)
        while held:
            await clock.sleep_ms(1)
        return await read(work)

    disk.read = reading
    return held


def test_what_a_leader_reads_after_its_office_is_no_answer_of_it(make: Any) -> None:
    """Rules R4, L5: the log was truncated and filled by the next leader meanwhile.  A replica that
    does not know this leader yet would append records of the new epoch to records of the old.
    """
    kit = make(1, auto_leader_rebalance_enable=False)
    kit.create("t")
    old, new, n = kit.state("t").replicas
    for content in (b"1", b"2", b"3"):
        append(kit, old, "t", content)
    kit.until(lambda: kit.replica(old, "t").high_watermark == 3 and kit.in_sync("t"))
    leading, follower = kit.replica(old, "t"), kit.replica(n, "t")
    kit.sim.network.cut(f"b{old}", f"b{new}")
    append(kit, old, "t", b"a")
    kit.until(lambda: follower.log.written_end == 4)
    release = kit.hold_metadata(n)
    kit.wait(POLL_WAIT_MS)  # the replica has already fetched from there
    held = hold_reads(leading, kit.brokers[old].core.env.clock)
    append(kit, old, "t", b"b")
    kit.until(lambda: bool(held))
    kit.sim.network.cut(f"b{old}", "controller")
    kit.until(lambda: kit.replica(new, "t").leader is not None)
    kit.sim.network.heal(f"b{old}", "controller")
    kit.sim.network.heal(f"b{old}", f"b{new}")
    kit.until(lambda: leading.log.written_end == 3)
    for content in (b"4", b"5", b"6"):
        append(kit, new, "t", content)
    kit.until(lambda: leading.log.written_end == 6)
    assert follower.replica is not None, "it has heard nothing"
    held.clear()
    kit.wait(100)
    release()
    kit.until(lambda: kit.in_sync("t"))
    assert kit.content(n, "t") == kit.content(new, "t") == kit.content(old, "t")
