"""The simulated network: the streams of `pk.world` with delays, breaks, cuts and slow links.

A stream is two one-way pipes.  A frame arrives after a drawn delay, but never before the frame sent
before it.  A pipe holds a bounded window, and `send` waits while the window is full.  As with TCP,
a frame is lost only together with its stream.

A node is named PROCESS or HOST/PROCESS.  All processes of one host share its links to other hosts;
two processes of one host have a link of their own (a unix socket).

Rules
  N5  A cut, in one direction or both, holds frames back.  A stream that was cut for `silence_ms`
      breaks on both ends, like the keepalive of the real network.  A connection attempt across a
      cut fails after `connect_ms`.
  N6  The streams of a killed node break at its peers after one delay (a reset, rule R7).  The
      node's own ends no longer exist.
  N7  After a break the receiver may still receive frames that had arrived.  Frames on their way are
      lost.  If only the sender takes the stream for broken (`give_up`), they arrive late: the
      sender may have connected again and repeated its request by then.  On one stream no frame is
      doubled and no frame overtakes another.
  N8  One direction of one stream may stand still for a while (`stall`: a lost segment that is sent
      again, or a peer that does not read its socket) while other streams of these nodes pass.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pk import limits
from pk.sim.loop import SimLoop, SimNode
from pk.world import Buffer, Disconnected, Listener, Stream, StreamHandler, StreamKind

#: A context without a node for frames in transit: they travel on after their sender was killed.
NOBODY = contextvars.Context()

#: How long handlers may take to notice that their listener closed, before they are cancelled.
HANDLER_GRACE_S = 1.0


@dataclass(slots=True)
class Link:
    """Delay, bandwidth and faults of the frames from one node to another."""

    delay_us: tuple[int, int] = (50, 500)
    bytes_per_ms: int = 1_000_000  #: a slow link has a lower value
    break_chance: float = 0.0  #: chance that a frame breaks its stream
    cut: bool = False
    cut_since_us: int = 0


class SimNetwork:
    """All links, listeners and streams of one world."""

    def __init__(self, loop: SimLoop, rng: random.Random, record: Callable[[str], None]) -> None:
        self.loop = loop
        self.rng = rng
        self.record = record
        self.default = Link()
        self.window_bytes = limits.MIB
        self.window_frames = 256
        self.connect_ms = 3_000
        self.silence_ms = 10_000
        self._links: dict[tuple[str, str], Link] = {}
        self._between: dict[tuple[str, str], Link] = {}  # the same links by node names, as a cache
        self._listeners: dict[str, _SimListener] = {}
        #: If set, it is called with each frame that is sent and the end that sends it.
        self.trap: Callable[[End, bytes], None] | None = None
        self.late_frames = 0  #: frames received after their sender gave the stream up
        self.stalled_frames = 0  #: frames that were due during a stall (N8)
        self._refused: dict[str, None] = {}
        self._streams: dict[int, tuple[End, End]] = {}
        self._next_stream = 1
        self._next_port = 40_001

    def network_of(self, node: SimNode) -> _NodeNetwork:
        """Return the network as `node` uses it."""
        return _NodeNetwork(self, node)

    # -- faults --------------------------------------------------------------------------------

    def link(self, source: str, target: str) -> Link:
        """Return the link from `source` to `target` (hosts or nodes), to be changed in place.

        A new link is a copy of `default`.
        """
        found = self._between.get((source, target))
        if found is None:
            pair = _ends_of(source, target)
            known = self._links.get(pair)
            if known is None:
                d = self.default
                known = self._links[pair] = Link(d.delay_us, d.bytes_per_ms, d.break_chance)
            found = self._between[source, target] = known
        return found

    def cut(self, source: str, target: str, *, both: bool = True) -> None:
        """Stop frames from `source` to `target`, and also in the other direction if `both` (N5)."""
        for pair in ((source, target), (target, source))[: 2 if both else 1]:
            link = self.link(*pair)
            if not link.cut:
                link.cut, link.cut_since_us = True, self.loop.now_us
                self.record(f"cut {pair[0]}>{pair[1]}")
                due = self.loop.now_us + self.silence_ms * 1000
                self._at(due, self._silence, pair, self.loop.now_us)

    def heal(self, source: str, target: str, *, both: bool = True) -> None:
        """Undo `cut` and deliver the frames that were held back."""
        for pair in ((source, target), (target, source))[: 2 if both else 1]:
            link = self.link(*pair)
            if link.cut:
                link.cut = False
                self.record(f"heal {pair[0]}>{pair[1]}")
                for ends in list(self._streams.values()):
                    for end in ends:
                        if end.link is link:
                            end.release()

    def ends(self) -> list[End]:
        """Return both ends of every open stream."""
        return [end for number in sorted(self._streams) for end in self._streams[number]]

    def stall(self, end: End, held_ms: float) -> None:
        """Hold the frames that `end` sent and sends for `held_ms`; they stay in order (N8)."""
        self.record(f"stall {end.number} {end.node.name}>{end.other.node.name} {held_ms:.0f} ms")
        end.stalls += 1
        self._at(self.loop.now_us + int(held_ms * 1000), end.moves_again)

    def refuse(self, address: str, refused: bool = True) -> None:
        """Refuse new connections to `address`, or accept them again."""
        if refused:
            self._refused[address] = None
        else:
            self._refused.pop(address, None)

    def break_streams(self, one: str, two: str) -> int:
        """Break every stream between two nodes, or two hosts; return how many."""
        broken = 0
        links = (self.link(one, two), self.link(two, one))
        for ends in list(self._streams.values()):
            if any(self.link(ends[0].node.name, ends[1].node.name) is link for link in links):
                ends[0].broken("the connection was reset")
                ends[1].broken("the connection was reset")
                broken += 1
        return broken

    def give_up(self, end: End, late_ms: float, linger_ms: float = 0.0) -> None:
        """Break the stream at `end` at once, and at the other end `late_ms` later (N7).

        The other end receives the frames that were on their way just before its stream breaks, or
        `linger_ms` before: a server ends the requests of a stream that broke.
        """
        on_the_way = [frame for frame in end._transit if frame is not None]
        self.record(f"give up {end.number}, {len(on_the_way)} frames come late")
        end.broken("the connection was reset")
        due = self.loop.now_us + int(late_ms * 1000)
        self._at(due, self._arrive_late, end.other, on_the_way, linger_ms)

    def _arrive_late(self, end: End, frames: list[bytes], linger_ms: float) -> None:
        link = self.link(end.other.node.name, end.node.name)
        if not (end.gone or end.closed or link.cut) and end._ended is None:
            self.late_frames += len(frames)
            end._inbox.extend(frames)
        if linger_ms:
            end._wake_readers()
            due = self.loop.now_us + int(linger_ms * 1000)
            self._at(due, end.broken, "the connection was reset")
        else:
            end.broken("the connection was reset")

    def lose(self, node: SimNode) -> None:
        """Break the streams and close the listeners of the killed `node` (N6)."""
        for address, listener in list(self._listeners.items()):
            if listener.node is node:
                del self._listeners[address]
        for ends in list(self._streams.values()):
            for end, other in (ends, ends[::-1]):
                if end.node is node:
                    end.gone = True
                    delay = self._delay_us(self.link(node.name, other.node.name))
                    why = "the connection was reset"
                    self._at(self.loop.now_us + delay, other.broken, why)

    def _silence(self, pair: tuple[str, str], since_us: int) -> None:
        link = self.link(*pair)
        if link.cut and link.cut_since_us == since_us:
            self.break_streams(*pair)

    # -- inside --------------------------------------------------------------------------------

    def _delay_us(self, link: Link) -> int:
        return self.rng.randint(*link.delay_us)

    def _at(self, due_us: int, callback: Callable[..., object], *args: object) -> None:
        self.loop.call_at_us(due_us, callback, *args, context=NOBODY)

    async def connect(self, node: SimNode, address: str, kind: StreamKind) -> Stream:
        listener = self._listeners.get(address)
        peer = listener.node.name if listener is not None else address
        there, back = self.link(node.name, peer), self.link(peer, node.name)
        await self._sleep_us(self._delay_us(there) + self._delay_us(back))
        if there.cut or back.cut:
            await self._sleep_us(self.connect_ms * 1000)
            raise Disconnected(f"{address}: no answer within {self.connect_ms} ms")
        listener = self._listeners.get(address)
        if listener is None or listener.closed or address in self._refused:
            raise Disconnected(f"{address}: connection refused")
        number = self._next_stream
        self._next_stream += 1
        here = End(self, number, node, address)
        far = End(self, number, listener.node, f"{node.name}#{number}")
        here.other, far.other = far, here
        self._streams[number] = (here, far)
        self.record(f"open {number} {node.name}>{listener.node.name} {kind.value}")
        listener.accept(kind, far)
        return here

    async def _sleep_us(self, duration_us: int) -> None:
        future = self.loop.create_future()
        timer = self.loop.call_at_us(self.loop.now_us + duration_us, _wake, future)
        try:
            await future
        finally:
            timer.cancel()

    def listen(self, node: SimNode, address: str, handler: StreamHandler) -> Listener:
        if address.endswith(":0") and not address.startswith("unix:"):
            address = f"{address[:-1]}{self._next_port}"
            self._next_port += 1
        if address in self._listeners:
            raise OSError(errno.EADDRINUSE, f"cannot listen on {address}: address in use")
        listener = _SimListener(self, node, address, handler)
        self._listeners[address] = listener
        self.record(f"listen {node.name} {address}")
        return listener

    def unlisten(self, listener: _SimListener) -> None:
        if self._listeners.get(listener.address) is listener:
            del self._listeners[listener.address]

    def forget(self, number: int) -> None:
        self._streams.pop(number, None)


def _ends_of(source: str, target: str) -> tuple[str, str]:
    """Return the ends of the link between two nodes: their hosts, or the nodes if on one host."""
    here, there = source.partition("/")[0], target.partition("/")[0]
    return (source, target) if here == there else (here, there)


class _NodeNetwork:
    """The `pk.world.Network` of one node."""

    def __init__(self, network: SimNetwork, node: SimNode) -> None:
        self._network = network
        self._node = node

    async def connect(self, address: str, kind: StreamKind) -> Stream:
        return await self._network.connect(self._node, address, kind)

    async def listen(self, address: str, handler: StreamHandler) -> Listener:
        return self._network.listen(self._node, address, handler)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class End:
    """One end of a stream; its pipe holds the sent frames that the other end must still receive."""

    other: End

    def __init__(self, network: SimNetwork, number: int, node: SimNode, peer: str) -> None:
        self._network = network
        self._loop = network.loop
        self.number = number
        self.node = node
        self._peer = peer
        self.gone = False  #: its node was killed
        self.closed = False
        # how the other side ended: "" = cleanly, else the reason of the break
        self._ended: str | None = None
        self._inbox: deque[bytes] = deque()
        self._transit: deque[bytes | None] = deque()  # frames on their way; None = end of stream
        self._piped_bytes = 0  # bytes of frames that the other end has not received
        self._piped = 0
        self._last_due_us = 0
        self._held = 0  # frames that came due during a cut or a stall
        self.stalls = 0  #: number of current stalls of this direction (N8)
        self._link: Link | None = None  # to the other end's node, once looked up
        self._readers: deque[asyncio.Future[None]] = deque()
        self._writers: deque[asyncio.Future[None]] = deque()

    @property
    def peer(self) -> str:
        return self._peer

    @property
    def link(self) -> Link:
        """The link to the other end; it is changed in place and never replaced."""
        found = self._link
        if found is None:
            found = self._link = self._network.link(self.node.name, self.other.node.name)
        return found

    # -- the Stream protocol ---------------------------------------------------------------------

    async def send(self, *pieces: Buffer) -> None:
        frame = b"".join(pieces)
        self._check_open()
        network = self._network
        while self._piped_bytes >= network.window_bytes or self._piped >= network.window_frames:
            await self._wait(self._writers)
            self._check_open()
        link = self.link
        if link.break_chance and network.rng.random() < link.break_chance:
            network.record(f"break {self.number}")
            self.other.broken("the connection was reset")
            self.broken("the connection was reset")
            raise Disconnected("the connection was reset")
        self._piped_bytes += len(frame)
        self._piped += 1
        self._dispatch(frame)
        if network.trap is not None:
            network.trap(self, frame)

    async def recv(self) -> bytes | None:
        while not self._inbox:
            if self.closed:
                return None
            if self._ended is not None:
                if self._ended:
                    raise Disconnected(self._ended)
                return None
            await self._wait(self._readers)
        frame = self._inbox.popleft()
        self.other.taken(len(frame))
        return frame

    def admit(self, known: bool) -> None:
        """Do nothing: the simulated network does not limit connections."""

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for frame in self._inbox:
            self.other.taken(len(frame))
        self._inbox.clear()
        self._wake_all()
        if self._ended != "" and self._ended is not None:
            return
        self._dispatch(None)

    # -- the pipe ----------------------------------------------------------------------------------

    def _dispatch(self, frame: bytes | None) -> None:
        network = self._network
        link = self.link
        size = len(frame) if frame is not None else 0
        travel = network._delay_us(link) + size * 1000 // link.bytes_per_ms
        self._last_due_us = max(self._last_due_us, self._loop.now_us + travel)
        self._transit.append(frame)
        network._at(self._last_due_us, self._arrive)

    def _arrive(self) -> None:
        if not self._transit:  # lost when the stream broke
            return
        if self._held or self.stalls or self.link.cut:
            self._held += 1
            self._network.stalled_frames += self.stalls > 0
            return
        self._deliver()

    def moves_again(self) -> None:
        """End one stall of this direction."""
        self.stalls -= 1
        self.release()

    def release(self) -> None:
        """Deliver the held frames, unless a stall or a cut still holds them."""
        if self.stalls or self.link.cut:
            return
        while self._held:
            self._held -= 1
            if self._transit:
                self._deliver()

    def _deliver(self) -> None:
        frame = self._transit.popleft()
        other = self.other
        what = "end" if frame is None else f"{len(frame)}B"
        self._network.record(f"{self.number} {self.node.name}>{other.node.name} {what}")
        if other.gone:
            return
        if frame is None:
            other.finished()
        elif other.closed:
            self.taken(len(frame))
        elif other._ended is None:
            other._inbox.append(frame)
            other._wake_readers()

    def taken(self, size: int) -> None:
        """Free the window of a frame that the other end received."""
        self._piped_bytes -= size
        self._piped -= 1
        while self._writers:
            _wake(self._writers.popleft())

    def finished(self) -> None:
        """Note that the other end closed cleanly and reads no more frames."""
        if self._ended is None:
            self._ended = ""
            self._wake_all()
        if self.closed:
            self._network.forget(self.number)

    def broken(self, why: str) -> None:
        """Break the stream at this end: frames on their way are lost (N7)."""
        self._transit.clear()
        self._held = 0
        if self._ended is None:
            self._ended = why
            self._wake_all()
        self._network.forget(self.number)

    # -- waiting -----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.closed:
            raise Disconnected("the stream was closed")
        if self._ended is not None:
            raise Disconnected(self._ended or "the peer finished")

    async def _wait(self, waiters: deque[asyncio.Future[None]]) -> None:
        future = self._loop.create_future()
        waiters.append(future)
        try:
            await future
        finally:
            if future in waiters:
                waiters.remove(future)

    def _wake_readers(self) -> None:
        while self._readers:
            _wake(self._readers.popleft())

    def _wake_all(self) -> None:
        self._wake_readers()
        while self._writers:
            _wake(self._writers.popleft())


class _SimListener:
    """A listener on a bound address of a node."""

    def __init__(
        self, network: SimNetwork, node: SimNode, address: str, handler: StreamHandler
    ) -> None:
        self._network = network
        self._loop = network.loop
        self.node = node
        self._address = address
        self._handler = handler
        self._context = contextvars.copy_context()  # the context of the node (sim/loop W3)
        self._serving: dict[asyncio.Task[None], End] = {}
        self.closed = False

    @property
    def address(self) -> str:
        return self._address

    def accept(self, kind: StreamKind, end: End) -> None:
        context = self._context.copy()
        task = self._loop.create_task(self._serve(kind, end), context=context)
        self._serving[task] = end
        task.add_done_callback(self._served, context=context)

    def _served(self, task: asyncio.Task[None]) -> None:
        self._serving.pop(task, None)

    async def _serve(self, kind: StreamKind, end: End) -> None:
        try:
            await self._handler(kind, end)
        except Disconnected:
            pass
        except Exception as bug:
            self._network.record(f"bug {self.node.name} {bug!r}")
            self._loop.call_exception_handler({"message": "handler failed", "exception": bug})
        finally:
            end.close()

    async def close(self, grace_ms: int) -> None:
        """Accept no new stream, wait `grace_ms` for open streams, then break them."""
        self.closed = True
        self._network.unlisten(self)
        tasks = list(self._serving)
        if tasks and grace_ms > 0:
            await asyncio.wait(tasks, timeout=grace_ms / 1000)
        for task in list(self._serving):
            end = self._serving[task]
            end.broken("the server shut down")
            end.other.broken("the server shut down")
        if self._serving:  # handlers notice the break in recv or send
            await asyncio.wait(list(self._serving), timeout=HANDLER_GRACE_S)
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
