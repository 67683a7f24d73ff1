"""Requests and replies over a CONTROL stream, for both ends.

`Caller` opens one stream when it is first needed and sends many calls over it, told apart by their
correlation ids.  After a break it opens a new stream.  A call that is in flight when the stream
breaks fails with `BrokerUnavailable`.  The peer may or may not have carried it out, so the caller
of `call` decides whether to repeat it.  `serve_control` is the serving end.

Invariants
  A1  A correlation id is answered at most once; late or unknown replies are dropped.
  A2  The serving side bounds the requests in flight per stream (`calls_max`) and reads no more
      until one is answered.
  A3  A stream whose peer sends no hello is closed.  The number of streams is bounded, and a silent
      peer would use a stream that other peers need.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

from google.protobuf.message import Message

from pk import errors
from pk.clock import Clock
from pk.tasks import TaskRegistry
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.world import Disconnected, Network, Stream, StreamKind

PROTOCOL = 1  #: the highest number of the protocol that this build speaks
PROTOCOL_MIN = 1  #: the lowest one
CALLS_MAX = 256
#: The peer that opened a stream must send its hello within this time; a client gives up earlier.
HELLO_TIMEOUT_MS = 5_000

#: A handler gets the request message and its frame, and returns the reply, with or without payload.
Reply = Message | tuple[Message, Iterable[frames.Buffer]]
Handler = Callable[[Any, frames.Frame], Awaitable[Reply]]


class Handlers(Protocol):
    """The handlers of a stream, by the names of their requests; a `Mapping` is one."""

    def get(self, name: str, /) -> Handler | None: ...


_FIELD_BY_TYPE: dict[str, str] = {
    field.message_type.name: field.name
    for field in wire.Head.DESCRIPTOR.oneofs_by_name["body"].fields
    if field.message_type is not None
}


def head_of(body: Message, **fields: Any) -> wire.Head:
    """Return a head with `body` in its oneof."""
    head = wire.Head(**fields)
    getattr(head, _FIELD_BY_TYPE[body.DESCRIPTOR.name]).CopyFrom(body)
    return head


def error_head(correlation_id: int, error: errors.PkError) -> wire.Head:
    """Return the head of a reply that carries only an error."""
    return wire.Head(correlation_id=correlation_id, error=frames.error_of(error))


async def open_stream(
    network: Network, address: str, kind: StreamKind, hello: wire.Hello
) -> tuple[Stream, wire.HelloReply]:
    """Connect to a peer, exchange hellos, and return the stream and the peer's hello.

    Raises the error that the peer answered, or `BrokerUnavailable`, also for a peer that speaks
    another protocol.
    """
    try:
        stream = await network.connect(address, kind)
    except (Disconnected, OSError) as cause:
        raise errors.BrokerUnavailable(f"{address}: {cause}") from cause
    try:
        offer = wire.Hello()
        offer.CopyFrom(hello)
        offer.protocol_min = hello.protocol_min or PROTOCOL_MIN
        await stream.send(frames.encode(head_of(offer)))
        raw = await stream.recv()
        if raw is None:
            raise Disconnected("closed before the hello")
        head = frames.decode(raw).head
        if not head.HasField("error") and not head.HasField("hello_reply"):
            raise errors.CorruptBatch(f"{head.WhichOneof('body')} instead of a hello")
    except Disconnected as cause:
        stream.close()
        raise errors.BrokerUnavailable(f"{address}: {cause}") from cause
    except errors.CorruptBatch as cause:
        stream.close()
        raise errors.BrokerUnavailable(
            f"{address} does not speak this protocol: {cause.message}"
        ) from cause
    except BaseException:  # the hello failed or is late: a silent peer must not keep the stream
        stream.close()
        raise
    if head.HasField("error"):
        stream.close()
        raise frames.raise_error(head.error)
    if not PROTOCOL_MIN <= head.hello_reply.protocol <= PROTOCOL:
        stream.close()
        raise errors.UnsupportedFeature(
            f"{address} answered with protocol {head.hello_reply.protocol}; this pk speaks "
            f"{_range(PROTOCOL_MIN, PROTOCOL)}"
        )
    return stream, head.hello_reply


def common_protocol(hello: wire.Hello, lowest: int, highest: int) -> int:
    """Return the highest protocol number that a peer and this node speak (rule P8).

    A peer that does not say its lowest number speaks only one.  Raises `UnsupportedFeature`.
    """
    peer_lowest = hello.protocol_min or hello.protocol
    common = min(hello.protocol, highest)
    if common < max(peer_lowest, lowest):
        raise errors.UnsupportedFeature(
            f"the peer speaks the protocol {_range(peer_lowest, hello.protocol)}, this server "
            f"{_range(lowest, highest)}: use builds of pk that have one in common"
        )
    return common


def _range(lowest: int, highest: int) -> str:
    return str(highest) if lowest == highest else f"{lowest} to {highest}"


def _unknown(_hello: wire.Hello) -> bool:
    return False


async def accept_stream(
    stream: Stream, reply: wire.HelloReply, known: Callable[[wire.Hello], bool] = _unknown
) -> wire.Hello | None:
    """Read the peer's hello, check its protocol and cluster, admit the peer, and answer.

    `known`: whether the hello proves that the peer is a broker or controller (rule L17).  Returns
    the peer's hello; None if the peer disconnected or was refused.
    """
    try:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_MS / 1000):
                raw = await stream.recv()
        except TimeoutError:  # A3
            stream.close()
            return None
        if raw is None:
            return None
        head = frames.decode(raw).head
        refusal: errors.PkError | None = None
        if head.WhichOneof("body") != "hello":
            refusal = errors.InvalidRequest("the first frame of a stream must be a hello")
        elif (
            head.hello.cluster_id and reply.cluster_id and head.hello.cluster_id != reply.cluster_id
        ):
            refusal = errors.ClusterIdMismatch(
                f"you ask for cluster {head.hello.cluster_id}, this is {reply.cluster_id}"
            )
        if refusal is not None:
            raise refusal
        spoken = wire.HelloReply()
        spoken.CopyFrom(reply)
        spoken.protocol = common_protocol(head.hello, PROTOCOL_MIN, PROTOCOL)
        stream.admit(known(head.hello))
        await stream.send(frames.encode(head_of(spoken)))
    except errors.PkError as cause:
        await stream.send(frames.encode(error_head(0, cause)))
        stream.close()
        return None
    return head.hello


class Caller:
    """Calls one peer.

    Calls `on_push` with each pushed frame (correlation id 0), and `on_break` when the stream is
    lost.
    """

    def __init__(
        self,
        network: Network,
        clock: Clock,
        address: str | Callable[[], str],
        hello: wire.Hello,
        *,
        on_push: Callable[[frames.Frame], None] | None = None,
        on_break: Callable[[], None] | None = None,
    ) -> None:
        self._network = network
        self._clock = clock
        self._address = address if callable(address) else (lambda: address)
        self._hello = hello
        self._on_push = on_push
        self._on_break = on_break
        self._stream: Stream | None = None
        self._tasks = TaskRegistry()  #: tasks that read the streams
        self._opening: asyncio.Lock | None = None
        self._pending: dict[int, asyncio.Future[frames.Frame]] = {}
        self._next_id = 1
        self._closed = False
        self.peer: wire.HelloReply | None = None

    @property
    def connected(self) -> bool:
        return self._stream is not None

    async def connect(self) -> wire.HelloReply:
        """Open the stream if it is not open; return the peer's hello."""
        self._check_open()
        if self._opening is None:
            self._opening = asyncio.Lock()
        async with self._opening:
            if self._stream is None:
                stream, self.peer = await open_stream(
                    self._network, self._address(), StreamKind.CONTROL, self._hello
                )
                if self._closed:  # the caller was closed meanwhile and would not close this stream
                    stream.close()
                    raise errors.BrokerUnavailable(f"{self._address()}: closed")
                self._stream = stream
                self._tasks.spawn(self._read(stream))
        assert self.peer is not None
        return self.peer

    def _check_open(self) -> None:
        if self._closed:
            raise errors.ClosedError("the connection was closed")

    async def call(
        self, request: Message, *, timeout_ms: int, payload: Iterable[frames.Buffer] = ()
    ) -> frames.Frame:
        """Send `request` and return the reply's frame.

        Raises the reply's typed error, `RequestTimedOut` or `BrokerUnavailable`.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[frames.Frame] = loop.create_future()
        correlation_id = 0
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                stream = self._stream
                if stream is None:
                    await self.connect()
                    stream = self._stream
                if stream is None:
                    raise errors.BrokerUnavailable(f"{self._address()}: the connection broke")
                correlation_id = self._next_id
                self._next_id += 1
                self._pending[correlation_id] = future
                head = head_of(request, correlation_id=correlation_id, timeout_ms=timeout_ms)
                await stream.send(frames.encode(head, payload))
                frame = await future
        except TimeoutError:
            raise errors.RequestTimedOut(
                f"{self._address()}: no reply to {request.DESCRIPTOR.name} within {timeout_ms} ms"
            ) from None
        except Disconnected as cause:
            raise errors.BrokerUnavailable(f"{self._address()}: {cause}") from cause
        finally:
            self._pending.pop(correlation_id, None)
        if frame.head.HasField("error"):
            raise frames.raise_error(frame.head.error)
        return frame

    async def _read(self, stream: Stream) -> None:
        reason = "the peer closed the connection"
        try:
            while (raw := await stream.recv()) is not None:
                frame = frames.decode(raw)
                if frame.head.correlation_id == 0:
                    if frame.head.HasField("error"):  # the peer refuses the stream
                        raise Disconnected(frame.head.error.message)
                    if self._on_push is not None:
                        self._on_push(frame)
                    continue
                future = self._pending.pop(frame.head.correlation_id, None)
                if future is not None and not future.done():
                    future.set_result(frame)
        except (Disconnected, errors.CorruptBatch) as cause:
            reason = str(cause)
        finally:
            self._broke(stream, reason)

    def _broke(self, stream: Stream, reason: str) -> None:
        stream.close()
        if self._stream is not stream:
            return
        self._stream = None
        pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(errors.BrokerUnavailable(f"{self._address()}: {reason}"))
        if self._on_break is not None and not self._closed:
            self._on_break()

    async def close(self) -> None:
        """Close the stream; calls in flight fail."""
        self._closed = True
        if self._stream is not None:
            self._broke(self._stream, "closed")
        await self._tasks.close()


async def serve_control(
    stream: Stream,
    handlers: Handlers,
    *,
    on_error: Callable[[str, BaseException], None] | None = None,
    calls_max: int = CALLS_MAX,
) -> None:
    """Answer the requests of an accepted stream until it ends; at most `calls_max` run at once."""
    gate = asyncio.Semaphore(calls_max)
    running = TaskRegistry()
    try:
        while (raw := await stream.recv()) is not None:
            frame = frames.decode(raw)
            await gate.acquire()
            running.spawn(_answer(stream, handlers, frame, gate, on_error))
    except (Disconnected, errors.CorruptBatch):
        pass
    finally:
        await running.close()
        stream.close()


async def _answer(
    stream: Stream,
    handlers: Handlers,
    frame: frames.Frame,
    gate: asyncio.Semaphore,
    on_error: Callable[[str, BaseException], None] | None,
) -> None:
    head = frame.head
    name = head.WhichOneof("body")
    try:
        try:
            handler = handlers.get(name or "")
            if handler is None:
                raise errors.UnsupportedFeature(f"this server does not answer {name!r}")
            reply = await handler(getattr(head, name or ""), frame)
            message, payload = reply if isinstance(reply, tuple) else (reply, ())
            raw = frames.encode(head_of(message, correlation_id=head.correlation_id), payload)
        except errors.PkError as error:
            raw = frames.encode(error_head(head.correlation_id, error))
        except Exception as bug:
            if on_error is not None:
                on_error(f"handling {name}", bug)
            raw = frames.encode(
                error_head(head.correlation_id, errors.InternalError(f"{name}: {bug!r}"))
            )
        await stream.send(raw)
    except Disconnected:
        pass
    finally:
        # only after the reply is sent: replies to a peer that does not read must not pile up
        gate.release()
