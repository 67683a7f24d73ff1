"""The network between the nodes of a cluster under test: one TCP proxy per link, which can be cut.

    python tests/chaos/proxy.py LINK …        LINK = FROM:TO:PORT:TARGET_PORT, all on loopback

FROM connects to PORT and reaches TARGET_PORT of TO.  Commands come on standard input, one per line,
and each is answered by `ok`:

    cut A B     bytes from A to B do not pass, whichever end opened the connection
    heal        all bytes pass again, in order, including those that were held

A cut loses no bytes that are under way.  A real network also sends undelivered bytes again until
the link is back or an end gives up.  While a direction is cut, no new connection is established,
because a handshake needs both directions; a connection that was requested meanwhile is made when
the link heals.

The proxy is a process of its own, so the driver's work does not delay the traffic.  It accepts
connections for a target that is down as well: FROM then sees a reset instead of a refusal.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

CHUNK = 256 * 1024
HOST = "127.0.0.1"


@dataclass(slots=True, frozen=True)
class Link:
    """The connections that node `source` opens to node `target`."""

    source: int
    target: int
    port: int
    target_port: int

    @staticmethod
    def parse(text: str) -> Link:
        return Link(*map(int, text.split(":")))

    def __str__(self) -> str:
        return f"{self.source}:{self.target}:{self.port}:{self.target_port}"


# -- the driver's end ------------------------------------------------------------------------------


class Network:
    """The driver's handle of the process of the proxies."""

    def __init__(self, links: Iterable[Link]) -> None:
        command = [sys.executable, str(Path(__file__)), *map(str, links)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer("")

    def cut(self, source: int, target: int) -> None:
        """Cut one direction."""
        self._ask(f"cut {source} {target}")

    def isolate(self, node: int, others: Iterable[int]) -> None:
        """Cut a node off from all others, in both directions."""
        for other in others:
            self.cut(node, other)
            self.cut(other, node)

    def heal(self) -> None:
        self._ask("heal")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _ask(self, line: str) -> None:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)
        self._answer(line)

    def _answer(self, line: str) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ok\n":
            raise RuntimeError(f"the proxies did not answer {line!r}")


# -- the proxies' process --------------------------------------------------------------------------


class Gates:
    """An event for each direction between two nodes: set = bytes pass."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], asyncio.Event] = {}

    def of(self, source: int, target: int) -> asyncio.Event:
        gate = self._open.get((source, target))
        if gate is None:
            gate = self._open[source, target] = asyncio.Event()
            gate.set()
        return gate

    def heal(self) -> None:
        for gate in self._open.values():
            gate.set()


class Proxy:
    """The proxy of one link."""

    def __init__(self, link: Link, gates: Gates) -> None:
        self._link = link
        self._there = gates.of(link.source, link.target)
        self._back = gates.of(link.target, link.source)

    async def listen(self) -> None:
        await asyncio.start_server(self._serve, HOST, self._link.port)

    async def _serve(self, near: asyncio.StreamReader, reply: asyncio.StreamWriter) -> None:
        while not (self._there.is_set() and self._back.is_set()):
            await self._there.wait()
            await self._back.wait()
        try:
            far, ahead = await asyncio.open_connection(HOST, self._link.target_port)
        except OSError:
            reply.transport.abort()  # as a refused connection, as near as one can
            return
        await asyncio.gather(
            _pass(near, ahead, self._there), _pass(far, reply, self._back), return_exceptions=True
        )
        for writer in (reply, ahead):
            writer.close()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event):
    """Forward bytes until an end closes; a reset on one side becomes a reset on the other, once the
    gate is open.
    """
    try:
        while chunk := await reader.read(CHUNK):
            await gate.wait()
            writer.write(chunk)
            await writer.drain()
        await gate.wait()
        writer.write_eof()
    except OSError:
        await gate.wait()
        writer.transport.abort()


async def _main(links: list[Link]) -> None:
    gates = Gates()
    for link in links:
        await Proxy(link, gates).listen()
    print("ok", flush=True)
    commands = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while line := (await commands.readline()).decode().split():
        if line[0] == "cut":
            gates.of(int(line[1]), int(line[2])).clear()
        else:
            gates.heal()
        print("ok", flush=True)


if __name__ == "__main__":
    asyncio.run(_main([Link.parse(text) for text in sys.argv[1:]]))
