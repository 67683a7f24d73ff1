"""Peers that vanished while something was on its way to them.

The kernel's keepalive looks at idle connections only.  With data under way it sends that again for
a quarter of an hour, and as long a reader whose host, or whose path to it, went waits for an answer
to what it asked: nothing else would break its stream.  TCP_USER_TIMEOUT is no help: it cuts off
whoever reads slowly, too.  What tells them apart is in TCP_INFO: the kernel of a peer that does not
read acknowledges all the same, a window of nothing; one that is not there acknowledges nothing.

Rules
  N8  a stream breaks when nothing of what was sent was acknowledged for `UNACKNOWLEDGED_MS`, though
      it was sent again and again; never because the peer does not read.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Protocol

from pk.wire.grpc_network import KEEPALIVE_MS

#: As long as an idle connection takes (`socket_network._tune`).
UNACKNOWLEDGED_MS = 2 * KEEPALIVE_MS
#: How often the same bytes were sent again: the clock alone says nothing of a host that was asleep.
RETRANSMITS_MIN = 3
#: Streams that one turn of the loop looks at, some 2 µs each (rule P2).
LOOKS_PER_TURN = 256

_TCP_INFO = getattr(socket, "TCP_INFO", None)
_INFO = struct.Struct("=2xB21xI28xI")  # retransmits, unacknowledged, ms since an acknowledgement


def is_unacknowledged(sock: socket.socket) -> bool:
    """Whether the peer of a connected socket is gone (N8); False where that cannot be told."""
    if _TCP_INFO is None or sock.family == socket.AF_UNIX:
        return False
    try:
        raw = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _INFO.size)
    except OSError:
        return False
    if len(raw) < _INFO.size:
        return False
    retransmits, unacknowledged, silent_ms = _INFO.unpack(raw)
    return bool(
        unacknowledged and retransmits >= RETRANSMITS_MIN and silent_ms >= UNACKNOWLEDGED_MS
    )


class MonitoredStream(Protocol):
    """A stream over a socket."""

    def check_acknowledged(self) -> None:
        """Break if the peer is gone (N8)."""
        ...

    def abort(self, why: str) -> None: ...


class DeadPeerDetector:
    """Looks at the streams it was given, one after the other; no timer runs while it has none."""

    def __init__(self) -> None:
        self.streams: dict[MonitoredStream, None] = {}
        self._timer: asyncio.Handle | None = None

    def add(self, stream: MonitoredStream) -> None:
        self.streams[stream] = None
        if self._timer is None:
            self._rest()

    def remove(self, stream: MonitoredStream) -> None:
        self.streams.pop(stream, None)
        if not self.streams and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _rest(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(KEEPALIVE_MS / 1000, self._look, [])

    def _look(self, left: list[MonitoredStream]) -> None:
        """`left`: of the last turn; [] = begin with all."""
        left = left or list(self.streams)
        for stream in left[:LOOKS_PER_TURN]:
            if stream in self.streams:
                stream.check_acknowledged()
        left = left[LOOKS_PER_TURN:]
        if left and self.streams:
            self._timer = asyncio.get_running_loop().call_soon(self._look, left)
        elif self.streams:
            self._rest()
