"""A seeded world in which processes die under load: every acknowledged record is there, once, in
order.

One idempotent producer keeps up to three batches in flight and sends them again, with their
sequence numbers, after every break and every retriable error (rules L4, L6, L7).  Broker,
controller and tier are killed at drawn moments.  The size of every batch is its number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from pk import errors
from pk.log import batch as batches
from pk.wire import frames
from pk.world import Disconnected, StreamKind

Cluster = Any  # conftest.py's
BATCHES = 40
IN_FLIGHT = 3
QUICK = {
    "segment_bytes": "14336",
    "local_retention_bytes": "15000",
    "tier_max_lag_ms": "200",
    "local_drop_delay_ms": "300",
    "file_delete_delay_ms": "500",
}


def size_of(number: int) -> int:
    return 1_000 + number


async def produce_all(cluster: Cluster, kit: Any, topic_id: str) -> dict[int, int]:
    """Produce all batches until each is acknowledged; return their base offsets."""
    acknowledged: dict[int, int] = {}
    waiting = deque(range(BATCHES))
    while waiting:
        try:
            stream = await cluster.stream(StreamKind.PRODUCE)
        except errors.PkError:
            await cluster.client.clock.sleep_ms(50)
            continue
        try:
            await _one_stream(cluster, kit, topic_id, stream, waiting, acknowledged)
        except (Disconnected, errors.PkError):
            await cluster.client.clock.sleep_ms(50)
        finally:
            stream.close()
    return acknowledged


async def _one_stream(
    cluster: Cluster,
    kit: Any,
    topic_id: str,
    stream: Any,
    waiting: deque[int],
    acknowledged: dict[int, int],
) -> None:
    flying: deque[int] = deque()
    fresh = deque(waiting)
    while waiting:
        while fresh and len(flying) < IN_FLIGHT:
            number = fresh.popleft()
            flying.append(number)
            raw = kit.batch(
                1,
                size=size_of(number),
                timestamp=cluster.client.clock.wall_ms(),
                producer_id=5,
                producer_epoch=0,
                base_sequence=number,
            )
            frame = kit.produce((0, raw), topic_id=topic_id, correlation_id=number + 1)
            await stream.send(frame)
        raw_reply = await stream.recv()
        if raw_reply is None:
            return
        head = frames.decode(raw_reply).head
        if head.HasField("error"):
            raise frames.raise_error(head.error)
        (result,) = head.produce_reply.results
        number = head.correlation_id - 1
        if result.HasField("error"):
            error = frames.raise_error(result.error)
            if not error.retriable and not isinstance(error, errors.OutOfOrderSequence):
                raise AssertionError(error)  # the producer's own fault: there is none
            raise error  # everything in flight is sent again, in order
        assert number == waiting[0], "answers of one partition come in order"
        flying.popleft()
        waiting.popleft()
        acknowledged[number] = result.base_offset
        await cluster.client.clock.sleep_ms(cluster.world.random(f"pace{number}").uniform(0, 60))


async def read_all(cluster: Cluster, kit: Any, topic_id: str) -> list[int]:
    """Return the number of every batch, in offset order; reads over breaks and from the tier."""
    found: list[int] = []
    position = 0
    while position < BATCHES:
        stream = await cluster.stream(StreamKind.FETCH)
        at = kit.position(offset=position)
        at.topic_id = topic_id
        await stream.send(kit.fetch(at))
        while position < BATCHES:
            reply, payload = await kit.fetched(stream)
            (first, *_rest) = reply.partitions
            if any(entry.HasField("error") for entry in reply.partitions):
                assert first.error.code == errors.TierUnavailable.code, first
                await cluster.client.clock.sleep_ms(200)
                break
            for entry in reply.partitions:
                raw, payload = payload[: entry.payload_bytes], payload[entry.payload_bytes :]
                for start, header in batches.iter_headers(raw):
                    whole = raw[start : start + header.length]
                    batches.check(whole)
                    for offset in range(header.base_offset, header.next_offset):
                        assert offset == position
                        position += 1
                    found += _numbers(whole, header)
                position = max(position, entry.next_offset)
        stream.close()
    return found


def _numbers(raw: memoryview, header: Any) -> list[int]:
    from pk.log import columns

    rows = columns.decode(raw, decoded_bytes_max=1 << 20, header=header)
    return [len(value) - 1_000 for value in rows.column("value").to_pylist()]


def restart(cluster: Cluster, role: str, power: str) -> None:
    if role == "broker":
        cluster.kill("broker", "d1", power=bool(power))
        cluster.boot += power
        cluster.start_broker()
    elif role == "controller":
        cluster.kill("controller", "meta")
        cluster.start_controller()
    else:
        cluster.world.kill("tier")
        cluster.start_tier()


@pytest.mark.parametrize("power", ["", "+"])
@pytest.mark.parametrize("seed", range(5))
def test_acknowledged_exactly_once_whatever_dies(
    make_cluster: Callable[..., Cluster], kit: Any, seed: int, power: str
) -> None:
    """`power`: the broker's machine loses its power, and acknowledgements wait for fsync (rule
    L2).
    """
    cluster = make_cluster(seed, tier_url="memory://tier", log_retention_check_interval_ms=500)
    cluster.start()
    cluster.start_tier()
    flush = {"flush_on_ack": "true"} if power else {}
    topic_id = cluster.do(cluster.create("flights", **QUICK, **flush))
    work = cluster.world.spawn("client", produce_all(cluster, kit, topic_id))
    drawn = cluster.world.random("faults")
    for _ in range(4):
        cluster.world.loop.run_for_ms(drawn.uniform(20, 400))
        restart(cluster, drawn.choice(["broker", "broker", "controller", "tier"]), power)
    cluster.world.run_until(work.done)
    acknowledged = work.result()
    assert sorted(acknowledged) == list(range(BATCHES))
    cluster.world.loop.run_for_ms(3_000)
    found = cluster.do(read_all(cluster, kit, topic_id))
    assert found == list(range(BATCHES))
    assert [acknowledged[number] for number in range(BATCHES)] == list(range(BATCHES))
