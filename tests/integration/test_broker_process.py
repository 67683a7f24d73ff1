"""The broker as a process under its supervisor: kill -9, a full disk, a drain.

Rules L2, L3, L7, P1.  The client here sends frames itself, so that only the broker is tested.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pk import errors
from pk.cli.embedded import EmbeddedServer, ReservedPorts
from pk.clock import SystemClock, monotonic_s
from pk.log import batch as batches
from pk.log import columns
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import PROTOCOL, Caller, head_of, open_stream
from pk.wire.socket_network import PkNetwork
from pk.world import Disconnected, StreamKind

pytestmark = pytest.mark.integration

CLOCK = SystemClock()
HELLO = wire.Hello(client_id="test", protocol=PROTOCOL)
PATIENCE_S = 30


def batch(size: int, number: int = 0, **fields: Any) -> bytes:
    """Return a batch with one record of `size` bytes that begins with its number."""
    value = number.to_bytes(8, "big") + os.urandom(size - 8)
    rows = pa.RecordBatch.from_pydict({"value": pa.array([value], pa.binary())})
    return b"".join(columns.encode(rows, default_timestamp=CLOCK.wall_ms(), **fields))


class Client:
    """One connection to a broker that may be down for a while."""

    def __init__(self, network: PkNetwork, address: str) -> None:
        self.network = network
        self.address = address
        self.caller = Caller(network, CLOCK, address, HELLO)

    async def create(self, name: str, **configs: str) -> str:
        request = wire.CreateTopicsRequest()
        request.topics.add(name=name, partitions=1, replication_factor=1, configs=configs)
        reply = (await self.caller.call(request, timeout_ms=20_000)).head.create_topics_reply
        assert not reply.results[0].HasField("error"), reply
        return reply.results[0].topic_id

    async def produce(self, topic_id: str, raw: bytes) -> int:
        """Produce the batch and return its offset.  Raises its typed error, or
        `BrokerUnavailable`.
        """
        try:
            async with asyncio.timeout(PATIENCE_S):
                stream, _ = await open_stream(self.network, self.address, StreamKind.PRODUCE, HELLO)
                request = wire.ProduceRequest(acks=-1)
                request.partitions.add(
                    topic_id=topic_id, current_leader_epoch=-1, batch_bytes=len(raw)
                )
                await stream.send(frames.encode(head_of(request, correlation_id=1), [raw]))
                reply = await stream.recv()
                stream.close()
        except (Disconnected, TimeoutError) as cause:
            raise errors.BrokerUnavailable(str(cause)) from cause
        if reply is None:
            raise errors.BrokerUnavailable("the stream ended")
        head = frames.decode(reply).head
        if head.HasField("error"):
            raise frames.raise_error(head.error)
        (result,) = head.produce_reply.results
        if result.HasField("error"):
            raise frames.raise_error(result.error)
        return result.base_offset

    async def read(self, topic_id: str) -> list[int]:
        """Return the number in every record, in offset order; verify every batch's checksum."""
        stream, _ = await open_stream(self.network, self.address, StreamKind.FETCH, HELLO)
        request = wire.FetchRequest(
            replica_id=-1, isolation=1, max_bytes=1 << 20, credit_bytes=1 << 40, max_wait_ms=500
        )
        request.positions.add(topic_id=topic_id, current_leader_epoch=-1, last_fetched_epoch=-1)
        await stream.send(frames.encode(head_of(request)))
        found: list[int] = []
        position, end = 0, 1
        while position < end:
            async with asyncio.timeout(PATIENCE_S):
                raw = await stream.recv()
            assert raw is not None
            frame = frames.decode(raw)
            (entry,) = frame.head.fetch_reply.partitions
            assert not entry.HasField("error"), entry
            for header, piece in batches.iter_batches(frame.payload):
                batches.check(piece)
                rows = columns.decode(piece, decoded_bytes_max=1 << 28, header=header)
                for value in rows.column("value").to_pylist():
                    found.append(int.from_bytes(value[:8], "big"))
            position, end = entry.next_offset, entry.high_watermark
        stream.close()
        return found


@asynccontextmanager
async def client_of(server: EmbeddedServer) -> AsyncIterator[Client]:
    network = PkNetwork(lambda where, bug: None)
    client = Client(network, server.address)
    try:
        yield client
    finally:
        await client.caller.close()
        await network.close()


async def until_stored(
    client: Client, topic_id: str, raw: bytes, told: type[errors.PkError] = errors.ClosedError
) -> int:
    """Send a batch of an idempotent producer again until it is acknowledged, or refused as `told`.

    Without idempotence, a reply that is lost on a busy machine would lead to a duplicate.
    """
    deadline = monotonic_s() + PATIENCE_S
    while True:
        try:
            return await client.produce(topic_id, raw)
        except told:
            raise
        except errors.RetriableError:
            if monotonic_s() > deadline:
                raise
            await CLOCK.sleep_ms(50)


@pytest.mark.parametrize("role", ["broker", "controller"])
def test_kill_9_under_load_loses_and_doubles_nothing(tmp_path: Path, role: str) -> None:
    with EmbeddedServer(tmp_path / "node") as server:

        async def story() -> None:
            async with client_of(server) as client:
                topic_id = await client.create("flights")
                for number in range(60):
                    if number in (20, 40):
                        server.kill(role)
                    raw = batch(
                        2_000, number, producer_id=9, producer_epoch=0, base_sequence=number
                    )
                    assert await until_stored(client, topic_id, raw) == number
                assert await client.read(topic_id) == list(range(60))

        asyncio.run(story())


def test_a_drain_leaves_clean_directories_and_says_so(tmp_path: Path) -> None:
    """Rule L3: after SIGTERM the next start scans no log."""
    server = EmbeddedServer(tmp_path / "node")

    async def fill() -> str:
        async with client_of(server) as client:
            topic_id = await client.create("flights")
            for number in range(5):
                await client.produce(topic_id, batch(100_000, number))
            return topic_id

    async def look(topic_id: str) -> list[int]:
        async with client_of(server) as client:
            return await client.read(topic_id)

    server.start()
    topic_id = asyncio.run(fill())
    assert server.stop() == 0
    server.start()
    try:
        assert asyncio.run(look(topic_id)) == list(range(5))
        text = server.log.read_text()
        assert "BUG" not in text, text
    finally:
        assert server.stop() == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a tmpfs of 96 MiB; needs the right to mount."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a size-limited tmpfs needs the right to mount (run as root)")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_pushes_back_and_service_resumes_with_space(small_disk: Path) -> None:
    """The error is typed and retriable, reads continue, no torn batch is served, and no
    acknowledged record is lost.
    """
    with EmbeddedServer(small_disk / "node", settings={"disk_reserve_bytes": 0}) as server:
        ballast = small_disk / "ballast"
        ballast.write_bytes(bytes(32 << 20))

        def raw(number: int, size: int = 1 << 20) -> bytes:
            return batch(size, number, producer_id=9, producer_epoch=0, base_sequence=number)

        async def story() -> None:
            async with client_of(server) as client:
                topic_id = await client.create("flights")
                stored: list[int] = []
                refusal: errors.PkError | None = None
                while refusal is None:
                    number = len(stored)
                    try:
                        await until_stored(client, topic_id, raw(number), errors.StorageFull)
                        stored.append(number)
                    except errors.StorageFull as full:
                        refusal = full
                assert 30 < len(stored) < 64
                assert await client.read(topic_id) == stored
                with pytest.raises(errors.StorageFull):
                    await until_stored(client, topic_id, raw(number), errors.StorageFull)
                before = server.pids()
                ballast.unlink()
                await until_stored(client, topic_id, raw(number))
                assert server.pids() == before, "it resumes by itself"
                stored.append(number)
                server.kill("broker")
                stored.append(number + 1)
                await until_stored(client, topic_id, raw(number + 1, 1_000))
                assert await client.read(topic_id) == stored

        asyncio.run(story())
        assert "BUG" not in server.log.read_text()


def test_metrics_and_health_are_served(tmp_path: Path) -> None:
    ports = ReservedPorts()
    port = ports.draw()
    with EmbeddedServer(tmp_path / "node", settings={"metrics": f"127.0.0.1:{port}"}) as server:

        async def story() -> None:
            async with client_of(server) as client:
                topic_id = await client.create("flights")
                await client.produce(topic_id, batch(100))

        asyncio.run(story())
        base = f"http://127.0.0.1:{port}"
        text = urllib.request.urlopen(f"{base}/metrics", timeout=10).read().decode()
        for name in ("pk_frames_total", "pk_loop_lag_ms", "pk_calls_total", "pk_clock_step_alert"):
            assert name in text
        assert urllib.request.urlopen(f"{base}/readyz", timeout=10).status == 200
