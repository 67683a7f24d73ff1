"""Decides which control streams a listener keeps on the connections that carry many of them.

A pure core of pk.wire.socket_network, as pk.wire.connection_quotas is for connections.  A stream is
*silent* until its first frame, the hello, has arrived.  A peer begins a stream with a few bytes and
needs no connection for it, so silent streams are bounded together.  Beyond the bound one of them is
closed: the oldest of its connection if that has more than its share of them, otherwise the oldest
of all.  A peer that says its hello gets in, whatever others begin.

Invariants
  N15  A listener keeps at most `streams_max` of these streams.
  N16  At most `silent_max` of them are silent.  A connection with no more than its share of the
       silent streams loses one only to a connection that has no more than its share, either.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from pk import limits

S = TypeVar("S")
C = TypeVar("C")

STREAMS_MAX = limits.STREAMS_MAX + limits.STREAMS_RESERVED
#: Half of what a broker reserves for other brokers.
SILENT_MAX = limits.STREAMS_RESERVED // 2


class StreamQuotas(Generic[S, C]):
    """The streams of one listener; `S` identifies a stream, `C` its connection."""

    def __init__(self, streams_max: int = STREAMS_MAX, silent_max: int = SILENT_MAX) -> None:
        self.streams_max = streams_max
        self.silent_max = silent_max
        self._streams: set[S] = set()
        self._silent: dict[S, C] = {}  #: the oldest first
        self._of: dict[C, dict[S, None]] = {}  #: silent streams by connection, the oldest first

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def silent(self) -> int:
        """How many streams are silent."""
        return len(self._silent)

    def begin(self, stream: S, connection: C) -> S | None:
        """Add a stream; return a stream that the caller must close, which may be this one."""
        if len(self._streams) >= self.streams_max:
            return stream
        self._streams.add(stream)
        self._silent[stream] = connection
        own = self._of.setdefault(connection, {})
        own[stream] = None
        if len(self._silent) <= self.silent_max:
            return None
        share = self.silent_max // len(self._of)
        oldest = next(iter(own if len(own) > share else self._silent))
        self.hear(oldest)  # it is silent no more, and counts until it ends
        return oldest

    def hear(self, stream: S) -> None:
        """Note that something arrived on a stream; idempotent."""
        if stream not in self._silent:
            return
        connection = self._silent.pop(stream)
        own = self._of[connection]
        del own[stream]
        if not own:
            del self._of[connection]

    def end(self, stream: S) -> None:
        """Remove a stream that ended; idempotent."""
        self.hear(stream)
        self._streams.discard(stream)
