"""Properties of the socket transport only: its opening, its lengths, its single port
(wire/socket_stream N1–N5, wire/socket_network N6, N7, N12, wire/dead_peers N8).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import socket
import struct
import subprocess
import sys
from typing import Any

import pytest

from pk import limits
from pk.wire import dead_peers, socket_network
from pk.wire.socket_network import PkNetwork
from pk.wire.socket_stream import SocketStream
from pk.world import Disconnected, Stream, StreamKind
from tests.contract.socket_kit import (
    END,
    answer_to,
    dialled,
    echo,
    framed,
    greet,
    run,
    say,
    serving,
)


def pair() -> tuple[SocketStream, socket.socket, list[str]]:
    """Return a stream, the raw other end of its socket, and a list that shows when it is closed."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    freed: list[str] = []
    return SocketStream(ours, "peer", lambda: freed.append("freed")), theirs, freed


async def turn(times: int = 20) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(6))
def test_frames_are_cut_out_of_any_pieces(seed: int) -> None:
    """wire/socket_stream N1: sizes around that of the scratch buffer, delivered in pieces of any
    size.
    """
    rng = random.Random(seed)
    scratch = 64 * limits.KIB
    sizes = [0, 1, 3, 4, 5, scratch - 5, scratch - 4, scratch - 3, scratch, 3 * scratch + 1]
    frames = [rng.randbytes(rng.choice(sizes)) for _ in range(60)]

    async def test() -> None:
        stream, theirs, freed = pair()
        whole = b"".join(map(framed, frames)) + END
        loop = asyncio.get_running_loop()

        async def feed() -> None:
            at = 0
            while at < len(whole):
                step = rng.choice([1, 4, 100, scratch - 1, scratch, 3 * scratch])
                await loop.sock_sendall(theirs, whole[at : at + step])
                at += step

        feeding = loop.create_task(feed())
        assert [await stream.recv() for _ in frames] == frames
        assert await stream.recv() is None
        await feeding
        stream.close()
        assert await loop.sock_recv(theirs, 100) == END
        assert freed == ["freed"]
        theirs.close()

    run(test)


def test_an_announced_length_beyond_the_limit_breaks_the_stream() -> None:
    """wire/socket_stream N1: before any memory is allocated for it."""

    async def test() -> None:
        stream, theirs, freed = pair()
        theirs.send(struct.pack("<I", limits.WIRE_FRAME_BYTES_MAX + 1))
        with pytest.raises(Disconnected, match="announced a frame of"):
            await stream.recv()
        assert freed == ["freed"]
        theirs.close()

    run(test)


@pytest.mark.parametrize(
    "said", [b"", b"\x05\x00", framed(b"whole")[:-1], framed(bytes(200_000))[:-9]]
)
def test_a_connection_that_ends_without_the_end_mark_is_a_break(said: bytes) -> None:
    # wire/socket_stream N2

    async def test() -> None:
        stream, theirs, freed = pair()
        await asyncio.get_running_loop().sock_sendall(theirs, said)
        theirs.close()
        with pytest.raises(Disconnected):
            await stream.recv()
        with pytest.raises(Disconnected):
            await stream.send(b"late")
        assert freed == ["freed"]

    run(test)


def test_a_closed_stream_whose_peer_says_nothing_is_given_up(monkeypatch: Any) -> None:
    monkeypatch.setattr("pk.wire.socket_stream.CLOSE_TIMEOUT_MS", 30)

    async def test() -> None:
        stream, theirs, freed = pair()
        stream.close()
        while not freed:
            await asyncio.sleep(0.005)
        theirs.close()

    run(test)


class Greedy(socket.socket):
    """A socket whose peer accepts every byte at once."""

    def sendmsg(self, buffers: Any, *_more: Any) -> int:
        return sum(map(len, buffers))


@pytest.mark.parametrize(("size", "count"), [(1, 5000), (limits.MIB, 30)])
def test_a_sender_lets_others_run(size: int, count: int) -> None:
    """wire/socket_stream N5: although the sender never has to wait."""

    async def test() -> None:
        ours, theirs = socket.socketpair()
        greedy = Greedy(ours.family, ours.type, fileno=ours.detach())
        stream = SocketStream(greedy, "peer", lambda: None)
        turns, stop = 0, False

        async def other() -> None:
            nonlocal turns
            while not stop:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.get_running_loop().create_task(other())
        frame = bytes(size)
        for _ in range(count):
            await stream.send(frame)
        stop = True
        await task
        assert turns >= 10
        stream.abort("the test is over")
        theirs.close()

    run(test)


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b"PKS1Z", b"\x16\x03\x01\x02\x00\x01", b"PKS1"]
)
def test_what_does_not_open_as_pk_is_closed_and_the_rest_is_served(
    said: bytes, monkeypatch: Any
) -> None:
    # wire/socket_network N6

    async def test() -> None:
        async with serving(echo) as (network, listener):
            with monkeypatch.context() as soon:  # for the stranger alone: a loaded machine may take
                soon.setattr("pk.wire.socket_network.CONNECT_TIMEOUT_MS", 100)  # longer to connect
                assert await answer_to(listener, said) in (b"", None)
            for kind in StreamKind:
                stream = await network.connect(listener.address, kind)
                await stream.send(b"hello")
                assert await stream.recv() == b"hello"
                stream.close()

    run(test)


def test_a_connection_that_opens_http2_and_begins_no_stream_is_closed(monkeypatch: Any) -> None:
    # wire/socket_network N6
    monkeypatch.setattr("pk.wire.socket_network.STREAM_TIMEOUT_MS", 100)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])

    async def test() -> None:
        async with serving(echo) as (_, listener):
            loop = asyncio.get_running_loop()
            with dialled(listener) as silent:
                await loop.sock_sendall(silent, preface)
                try:
                    while await loop.sock_recv(silent, 1_000):
                        pass
                except ConnectionResetError:
                    pass

    run(test)


def test_a_peer_that_accepts_and_says_nothing_cannot_be_connected_to() -> None:
    """wire/socket_network N6: a stopped process still has a backlog that accepts connections."""

    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            network = PkNetwork(connect_timeout_ms=100)
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            for kind in StreamKind:
                with pytest.raises(Disconnected):
                    await network.connect(address, kind)
            await network.close()

    run(test)


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:notaport", "unix:/nonexistent/x.sock"])
def test_an_address_that_is_none(address: str) -> None:
    async def test() -> None:
        network = PkNetwork()
        with pytest.raises(OSError, match="cannot listen on"):
            await network.listen(address, echo)
        with pytest.raises(Disconnected):
            await network.connect(address, StreamKind.FETCH)
        await network.close()

    run(test)


@pytest.mark.parametrize("bound", ["ours", "the process's"])
def test_silent_connections_displace_each_other_and_keep_nobody_out(
    monkeypatch: Any, bound: str
) -> None:
    """wire/socket_network N7, wire/connection_quotas N11: there are twice as many silent
    connections as the bound; a peer that sends its hello is admitted.
    """
    if bound == "ours":
        monkeypatch.setattr(limits, "CONNECTIONS_MAX", 16)
    else:  # the rest is for the logs
        monkeypatch.setattr("resource.getrlimit", lambda _: (140, 140))

    async def test() -> None:
        async with serving(greet) as (network, listener):
            inside = [await say(network, listener, kind, b"hello") for kind in StreamKind]
            assert [await each.recv() for each in inside] == [b"welcome"] * 3
            silent = [dialled(listener) for _ in range(40)]
            silent += [dialled(listener) for _ in range(8)]
            for sock in silent[:20]:
                sock.send(b"PKS1F"[: len(silent) % 6])
            for kind in StreamKind:
                stream = await say(network, listener, kind, b"hello")
                assert await stream.recv() == b"welcome"
                stream.close()
            for stream in inside:
                await stream.send(b"still here")
                assert await stream.recv() == b"still here"
                stream.close()
            for sock in silent:
                sock.close()

    run(test)


def test_clients_leave_room_for_brokers_and_one_address_for_others(monkeypatch: Any) -> None:
    """wire/connection_quotas N10, L17: a client over the quota is refused with an error that says
    so, and is accepted once another client has left.
    """
    monkeypatch.setattr(limits, "CONNECTIONS_MAX", 8)

    async def test() -> None:
        async with serving(greet) as (network, listener):
            first = [await say(network, listener, StreamKind.FETCH, b"hello") for _ in range(4)]
            assert [await each.recv() for each in first] == [b"welcome"] * 4
            for kind in (StreamKind.PRODUCE, StreamKind.CONTROL):
                refused = await say(network, listener, kind, b"hello")
                answer = await refused.recv()
                assert answer is not None
                assert b"4 connections of 127.0.0.1" in bytes(answer)
                refused.close()
                broker = await say(network, listener, kind, b"known")
                assert await broker.recv() == b"welcome"
                broker.close()
            first.pop().close()
            while True:
                again = await say(network, listener, StreamKind.FETCH, b"hello")
                if await again.recv() == b"welcome":
                    break
                again.close()
                await asyncio.sleep(0.01)
            for stream in (*first, again):
                stream.close()

    run(test)


def test_control_streams_beyond_a_number_share_a_connection() -> None:
    """wire/socket_network, module docstring: a stream that ends gives its place to another one."""
    peers: list[str] = []

    async def serve(kind: StreamKind, stream: Stream) -> None:
        assert kind is StreamKind.CONTROL
        peers.append(stream.peer)
        await echo(kind, stream)

    async def opened(network: PkNetwork, address: str) -> Stream:
        stream = await network.connect(address, StreamKind.CONTROL)
        await stream.send(b"hello")
        assert await stream.recv() == b"hello"
        return stream

    async def test() -> None:
        client = PkNetwork(control_sockets=2)
        async with serving(serve) as (_, listener):
            streams = [await opened(client, listener.address) for _ in range(5)]
            assert len(set(peers)) == 3
            streams[0].close()
            while client._control_streams[listener.address] == 2:
                await asyncio.sleep(0.01)
            streams.append(await opened(client, listener.address))
            assert len(set(peers)) == 4
            for stream in streams:
                stream.close()
            await client.close()

    run(test)


def test_a_peer_without_control_sockets_is_asked_over_grpc(monkeypatch: Any) -> None:
    """wire/socket_network N12: a node of an older build closes the connection."""
    monkeypatch.delitem(socket_network._KINDS, b"C")

    async def test() -> None:
        async with serving(greet) as (network, listener):
            for _ in range(2):
                stream = await say(network, listener, StreamKind.CONTROL, b"hello")
                assert await stream.recv() == b"welcome"
                stream.close()
            assert not network._control_streams

    run(test)


def test_a_control_request_has_a_bound_of_its_own() -> None:
    """0011: the same on sockets and over grpc."""

    async def test() -> None:
        async with serving(echo) as (network, listener):
            stream = await network.connect(listener.address, StreamKind.CONTROL)
            await stream.send(bytes(limits.CONTROL_BYTES_MAX))
            assert len(await stream.recv() or b"") == limits.CONTROL_BYTES_MAX
            await stream.send(bytes(limits.CONTROL_BYTES_MAX + 1))
            answer = await stream.recv()
            assert answer is not None
            assert b"in a stream of this kind" in bytes(answer)
            stream.close()

    run(test)


def _vanish(sock: socket.socket) -> ctypes.Array[ctypes.c_char]:
    """Drop everything that arrives for this socket, so that its peer is alone."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))  # BPF: return 0
    attach = 26  # SO_ATTACH_FILTER
    sock.setsockopt(socket.SOL_SOCKET, attach, struct.pack("HL", 1, ctypes.addressof(program)))
    return program


def test_a_peer_that_vanished_with_something_on_its_way_is_given_up(monkeypatch: Any) -> None:
    """wire/dead_peers N8, R7, on both ends; a peer that does not read is waited for."""
    monkeypatch.setattr(dead_peers, "KEEPALIVE_MS", 50)
    monkeypatch.setattr(dead_peers, "UNACKNOWLEDGED_MS", 300)
    monkeypatch.setattr(dead_peers, "RETRANSMITS_MIN", 1)
    accepted: list[Any] = []
    hold = asyncio.Event()

    async def serve(_kind: StreamKind, stream: Stream) -> None:
        accepted.append(stream)
        await hold.wait()

    async def test() -> None:
        network = PkNetwork()
        listener = await network.listen("127.0.0.1:0", serve)
        ours: list[Any] = [
            await network.connect(listener.address, StreamKind.FETCH) for _ in range(3)
        ]
        while len(accepted) < 3:
            await asyncio.sleep(0.01)
        slow = asyncio.create_task(_flood(ours[2]))
        by_port = {stream.peer: stream for stream in accepted}
        host, port = ours[0]._sock.getsockname()[:2]
        kept = [_vanish(by_port[f"{host}:{port}"]._sock), _vanish(ours[1]._sock)]
        host, port = ours[1]._sock.getsockname()[:2]
        for left in (ours[0], by_port[f"{host}:{port}"]):
            await left.send(b"are you there?")
            with pytest.raises(Disconnected, match="acknowledges nothing"):
                await left.recv()
        assert kept
        assert not slow.done()
        slow.cancel()
        hold.set()
        await listener.close(0)
        await network.close()

    run(test)


async def _flood(stream: Stream) -> None:
    while True:
        await stream.send(bytes(limits.MIB))


def test_a_watch_looks_at_all_its_streams_and_then_rests(monkeypatch: Any) -> None:
    """wire/dead_peers N8: it checks some streams per turn.  Without streams no timer runs, because
    it would delay the end of a client.
    """
    monkeypatch.setattr(dead_peers, "KEEPALIVE_MS", 0)
    monkeypatch.setattr(dead_peers, "LOOKS_PER_TURN", 2)
    seen: list[str] = []

    class Fake:
        def __init__(self, name: str) -> None:
            self.name = name

        def abort(self, why: str) -> None:
            raise AssertionError(why)

        def check_acknowledged(self) -> None:
            seen.append(self.name)
            if self.name == "b":  # broken streams are not checked any more
                looker.remove(self)

    looker = dead_peers.DeadPeerDetector()

    async def test() -> None:
        streams = [Fake(name) for name in "abcde"]
        for stream in streams:
            looker.add(stream)
        while len(seen) < 9:
            await asyncio.sleep(0)
        assert seen[:9] == list("abcdeacde")
        for stream in streams:
            looker.remove(stream)
        seen.clear()
        await turn()
        assert seen == []
        assert looker._timer is None

    run(test)


def test_a_listener_closes_while_a_peer_has_not_said_its_end() -> None:
    """The stream's handler has returned, so the listener waits for no handler."""

    async def refuse(_kind: StreamKind, stream: Stream) -> None:
        stream.close()

    async def test() -> None:
        network = PkNetwork()
        listener: Any = await network.listen("127.0.0.1:0", refuse)
        host, _, port = listener.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"PKS1F")
        assert await reader.readexactly(8) == b"PKS1" + END
        while listener._tasks:
            await asyncio.sleep(0)
        await listener.close(1_000)
        assert await reader.read() == b""
        writer.close()
        await network.close()

    run(test)


def test_descriptors_do_not_grow() -> None:
    async def test() -> None:
        network = PkNetwork()
        listener = await network.listen("127.0.0.1:0", echo)

        async def some(kind: StreamKind) -> None:
            for _ in range(20):
                stream = await network.connect(listener.address, kind)
                await stream.send(b"x")
                assert await stream.recv() == b"x"
                stream.close()
                while await stream.recv() is not None:
                    pass

        async def settled(bound: int) -> int:
            while (count := len(os.listdir("/proc/self/fd"))) > bound:
                await asyncio.sleep(0.01)
            return count

        await some(StreamKind.FETCH)
        before = len(os.listdir("/proc/self/fd"))
        await some(StreamKind.FETCH)
        await some(StreamKind.PRODUCE)
        await settled(before)
        await listener.close(100)
        await network.close()

    run(test)


def test_a_killed_process_is_noticed_at_once() -> None:
    """R7: also on a data stream."""
    code = (
        "import asyncio\n"
        "from pk import event_loops\n"
        "from pk.wire.socket_network import PkNetwork\n"
        "async def main():\n"
        "    async def serve(kind, stream):\n"
        "        await stream.send(b'here')\n"
        "        await stream.recv()\n"
        "    listener = await PkNetwork().listen('127.0.0.1:0', serve)\n"
        "    print(listener.address, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "event_loops.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        address = child.stdout.readline().strip()

        async def test() -> None:
            network = PkNetwork()
            streams = [await network.connect(address, kind) for kind in StreamKind]
            for stream in streams:
                assert await stream.recv() == b"here"
            child.kill()
            for stream in streams:
                with pytest.raises(Disconnected):
                    pytest.fail(f"received {await stream.recv()!r}")
            for kind in StreamKind:
                with pytest.raises(Disconnected):
                    pytest.fail(f"connected: {await network.connect(address, kind)}")
            await network.close()

        run(test)
