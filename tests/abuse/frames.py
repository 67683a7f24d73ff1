"""Hostile peers: announced frames, huge control messages, silent connections (rule L17).

One server has `inbound_bytes_max` = BUDGET_BYTES and 2,400 descriptors.  During each attack a
neighbour produces one record after another, with a batch of 1 MiB among them.  A case passes if the
broker grew by less than the budget and SLACK_BYTES, the neighbour lost no record, and every refusal
names its reason.  The times are reported and not judged.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import grpc.aio
from verdicts import Verdict

from pk import AdminClient, Producer, errors
from pk.cli.embedded import EmbeddedServer
from pk.clock import block_s, monotonic_s
from pk.limits import MIB
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import PROTOCOL, head_of

BUDGET_BYTES = 64 * MIB
#: Garbage collection runs on a tick, and the allocator keeps freed memory.
SLACK_BYTES = 160 * MIB
DESCRIPTORS = 2_400
TOPIC = "neighbour"
LENGTH = struct.Struct("<I")
HELLO = frames.encode(head_of(wire.Hello(client_id="hostile", protocol=PROTOCOL)))
OPENING = b"PKS1P" + LENGTH.pack(len(HELLO)) + HELLO


class Neighbour:
    """Produces while it is entered; `took_s` are the times until each acknowledgement."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.took_s: list[float] = []
        self.failed: list[str] = []

    def __enter__(self) -> Neighbour:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with Producer(self._address, linger_ms=0) as producer:
            while not self._stop.is_set():
                size = MIB if len(self.took_s) % 10 == 9 else 100
                begun_s = monotonic_s()
                try:
                    producer.send(TOPIC, bytes(size)).result(60)
                except errors.PkError as error:
                    self.failed.append(repr(error))
                self.took_s.append(monotonic_s() - begun_s)
                self._stop.wait(0.005)

    def figures(self) -> str:
        took = sorted(self.took_s)
        p99 = took[len(took) * 99 // 100]
        return (
            f"neighbour {len(took)} sent, {len(self.failed)} failed {self.failed[:1]}, "
            f"p99 {1000 * p99:.0f} ms, longest {1000 * took[-1]:.0f} ms"
        )


def resident(pid: int) -> int:
    """Return the bytes of memory that a process has."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"process {pid} has no VmRSS")


class Growth:
    """The largest growth of a process while it is entered."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._before = resident(pid)
        self.bytes = 0

    def __enter__(self) -> Growth:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            self.bytes = max(self.bytes, resident(self._pid) - self._before)


@contextlib.contextmanager
def served(work: Path) -> Iterator[EmbeddedServer]:
    settings = {"inbound_bytes_max": BUDGET_BYTES}
    server = EmbeddedServer(work / "node", settings=settings)
    server.spawn()
    # Before the supervisor starts its children, which inherit this.
    resource.prlimit(server.pids()["supervisor"], resource.RLIMIT_NOFILE, (DESCRIPTORS,) * 2)
    server.wait_ready()
    try:
        with AdminClient(server.address) as admin:
            admin.create_topic(TOPIC)
        # modules that are loaded once do not count for an attack
        with Producer(server.address) as producer:
            producer.send(TOPIC, bytes(MIB)).result(60)
        yield server
    finally:
        server.stop()


# -- streams that announce frames ------------------------------------------------------------------


async def _announce(address: str, size: int, sent: int) -> str:
    """Send a part of a frame of `size`, and wait for the broker's answer."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(OPENING)
        await reader.readexactly(4)
        for _ in range(2):  # the answer to the hello, then the refusal
            (length,) = LENGTH.unpack(await reader.readexactly(4))
            head = frames.decode(await reader.readexactly(length)).head
            if head.HasField("error"):
                return type(frames.raise_error(head.error)).__name__
            if size:
                writer.write(LENGTH.pack(size))
                with contextlib.suppress(ConnectionError):
                    for at in range(0, sent, MIB):
                        writer.write(bytes(min(MIB, sent - at)))
                        async with asyncio.timeout(30):
                            await writer.drain()
        return "no refusal"
    except TimeoutError:
        return "not read"
    except (ConnectionError, asyncio.IncompleteReadError):
        return "closed"
    finally:
        writer.transport.abort()


def _streams(address: str, count: int, size: int, sent: int, rest_s: float) -> dict[str, int]:
    """Open `count` streams at once; return what happened to them."""

    async def one() -> str:
        # not `wait_for`: up to Python 3.11 it may lose the cancellation, and wait for ever
        try:
            async with asyncio.timeout(rest_s):
                return await _announce(address, size, sent)
        except TimeoutError:
            return "open"

    async def main() -> list[str]:
        async with asyncio.timeout(240):
            found = await asyncio.gather(*(one() for _ in range(count)), return_exceptions=True)
        return ["open" if isinstance(each, BaseException) else each for each in found]

    found = asyncio.run(main())
    return {name: found.count(name) for name in sorted(set(found))}


# -- control messages ------------------------------------------------------------------------------


def _control(address: str, count: int, size: int) -> dict[str, int]:
    """Send `count` requests of `size` bytes at once, over connections of their own."""

    async def one(number: int) -> str:
        options = [
            ("grpc.max_send_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),
            ("pk.number", number),
        ]
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            call = channel.stream_stream("/pk.Stream/control", None, None)()
            try:
                await call.write(HELLO)
                await call.read()
                await call.write(bytes(size))
                await call.read()
                code = await call.code()
            except grpc.aio.AioRpcError as error:
                code = error.code()
            except asyncio.InvalidStateError:
                code = await call.code()
        return code.name.lower()

    async def main() -> list[str]:
        async with asyncio.timeout(240):
            return await asyncio.gather(*(one(number) for number in range(count)))

    found = asyncio.run(main())
    return {name: found.count(name) for name in sorted(set(found))}


# -- silent connections ----------------------------------------------------------------------------


def _silent(address: str, count: int, rest_s: float) -> dict[str, int]:
    """Open `count` connections that send nothing, or only their opening."""
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as stack:
        for number in range(count):
            sock = stack.enter_context(socket.create_connection((host, int(port)), 30))
            with contextlib.suppress(ConnectionError):
                sock.send((b"", b"P", b"PKS1F", b"PRI * HTTP/2.0\r\n")[number % 4] or b"")
        took: list[float] = []
        until_s = monotonic_s() + rest_s
        while not took or monotonic_s() < until_s:
            begun_s = monotonic_s()
            with Producer(address, linger_ms=0) as producer:  # a newcomer
                producer.send(TOPIC, b"new").result(60)
            took.append(monotonic_s() - begun_s)
        block_s(0)
    return {"newcomers": len(took), "slowest of them, ms": int(1000 * max(took))}


# -- the cases -------------------------------------------------------------------------------------


def run(seed: int, work: Path, short: bool) -> list[Verdict]:
    """Run all attacks; see the module.  Nothing is drawn: `seed` is not used."""
    del seed
    rest_s = 2.0 if short else 15.0
    requests, control_bytes = (3, 40 * MIB) if short else (20, 200 * MIB)
    # a short run announces and sends several times the budget; one address may have half of 256
    # connections
    streams = 40 if short else 120
    with served(work) as server:
        address = server.address

        def announced() -> dict[str, int]:
            return _streams(address, streams, 260 * MIB, 8 * MIB, 60)

        def half() -> dict[str, int]:
            return _streams(address, streams, 15 * MIB, 14 * MIB, rest_s)

        cases: list[tuple[str, Callable[[], dict[str, int]], str]] = [
            (f"{streams} streams announce 260 MiB each", announced, "RecordTooLarge"),
            (f"{streams} streams send 14 of 15 MiB each", half, ""),
            (
                f"{requests} control requests of {control_bytes // MIB} MiB",
                lambda: _control(address, requests, control_bytes),
                "resource_exhausted",
            ),
            ("320 silent connections", lambda: _silent(address, 320, rest_s), ""),
        ]
        return [_case(server, case, attack, says) for case, attack, says in cases]


def _case(
    server: EmbeddedServer, case: str, attack: Callable[[], dict[str, int]], says: str
) -> Verdict:
    broker = server.pids()["broker"]
    with Growth(broker) as growth, Neighbour(server.address) as neighbour:
        block_s(0.2)
        found = attack()
        block_s(0.2)
    named = not says or set(found) == {says}
    same = server.pids().get("broker") == broker
    kept = growth.bytes < BUDGET_BYTES + SLACK_BYTES and not neighbour.failed and named and same
    figures = (
        f"grew by {growth.bytes / MIB:.0f} MiB of {BUDGET_BYTES // MIB} and slack, {found}, "
        f"{neighbour.figures()}{'' if same else ', the broker died'}"
    )
    return Verdict(case, kept, figures)
