"""Detects peers that vanished while data was on its way to them.

The kernel's keepalive checks idle connections only.  While sent data is unacknowledged, the kernel
retransmits it for a quarter of an hour.  Until then nothing breaks the stream, and a task that
waits for an answer keeps waiting.  TCP_USER_TIMEOUT does not help, because it also cuts off a peer
that reads slowly.  TCP_INFO tells the two apart: the kernel of a peer that does not read still
acknowledges, with a zero window; a vanished peer acknowledges nothing.

Rules
  N8  A stream breaks when its peer has acknowledged no sent data for `UNACKNOWLEDGED_MS`, despite
      several retransmissions.  It never breaks because the peer does not read.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Protocol

from pk.wire.grpc_network import KEEPALIVE_MS

#: The same time after which an idle connection breaks (`addresses.tune`).
UNACKNOWLEDGED_MS = 2 * KEEPALIVE_MS
#: Least number of retransmissions before a stream breaks.  The elapsed time alone proves nothing
#: after this host was suspended.
RETRANSMITS_MIN = 3
#: Streams that a single turn of the loop checks, about 2 µs each (rule P2).
LOOKS_PER_TURN = 256

_TCP_INFO = getattr(socket, "TCP_INFO", None)
_INFO = struct.Struct("=2xB21xI28xI")  # retransmits, unacknowledged, ms since an acknowledgement


def is_unacknowledged(sock: socket.socket) -> bool:
    """Return whether the peer of a connected socket vanished (N8); False if it is unknown."""
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
        """Break the stream if the peer vanished (N8)."""
        ...

    def abort(self, why: str) -> None: ...


class DeadPeerDetector:
    """Checks the added streams in turn; no timer runs while it has none."""

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
        """Check the next streams of `left`, which holds those that the last turn did not check.

        [] = begin again with all streams.
        """
        left = left or list(self.streams)
        for stream in left[:LOOKS_PER_TURN]:
            if stream in self.streams:
                stream.check_acknowledged()
        left = left[LOOKS_PER_TURN:]
        if left and self.streams:
            self._timer = asyncio.get_running_loop().call_soon(self._look, left)
        elif self.streams:
            self._rest()
