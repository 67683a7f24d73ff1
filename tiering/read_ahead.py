"""When a cold read is followed by a read ahead, and how far it goes.

Sans-IO.  The reader (tiering/reader) reports each answered read, and asks before it loads a row
group that no client has requested yet.

A client that reads straight on would wait one round trip to the object store for each row group.
Loading the next row groups meanwhile hides the distance, but costs memory, and money for bytes that
are never read.  So read-ahead begins with the second read that begins where the one before it
ended.  The window of a client doubles while its reads still wait for the store: a near store gets a
small window, a far one a large window.  A read at another offset is a seek: the client's unread row
groups give up their memory first, and it begins again without a window.

The tier process does not see a client leave.  A client without a read for IDLE_MS loses its window
as after a seek.

Invariants
  U1  The row groups that are loading, or unread, have at most `bytes_max` bytes altogether.
  U2  A client's unread row groups have at most as many bytes as the client has read straight on
      since its last seek, or are one row group.  So a client that seeks around wastes at most as
      much as it reads, and one row group for each seek.
  U3  Clients that read straight on share `bytes_max` evenly.  A client with more than its share,
      because others came later, gets nothing more until it has read down to its share.
  U4  An abandoned row group that is still loading keeps its bytes until it has landed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from pk.types import Offset

#: Window of a client at its second read; its later reads double it.
WINDOW_FIRST_BYTES = 2 * 1024 * 1024
#: Largest window of a client: 160 MB/s over a round trip of 100 ms.
WINDOW_MAX_BYTES = 16 * 1024 * 1024
#: Most row groups that are loading or unread for one client: small ones are requests, not bytes.
GROUPS_MAX = 16
#: A client without a read for this time has left.
IDLE_MS = 10_000
#: Most clients that are remembered; the client with the oldest read is forgotten first.
READERS_MAX = 1_024


class Unread(NamedTuple):
    """A row group that may be loaded before a client requests it."""

    key: Hashable
    max_offset: Offset
    memory_bytes: int  #: its rows in memory
    file_bytes: int  #: its bytes in the store; 0 = its rows are in memory already


class Served(NamedTuple):
    """The decision after a read."""

    straight_on: bool  #: whether to read ahead for this client
    abandoned: tuple[Hashable, ...]  #: row groups that no client is expected to read soon


@dataclass(slots=True)
class _Reader:
    """One client in one partition."""

    next_offset: Offset  #: where it reads next if it goes straight on
    straight_bytes: int  #: what it has read since its last seek
    served_ms: int
    window_bytes: int = 0  #: 0 = it has not gone straight on yet
    ahead_end: Offset = 0  #: offsets below it are read, or read ahead
    unread: dict[Hashable, Unread] = field(default_factory=dict)
    unread_bytes: int = 0


@dataclass(slots=True)
class _Held:
    """A row group for which memory is kept."""

    group: Unread
    readers: int  #: clients that are expected to read it
    loading: bool
    read: bool = False  #: whether a client has read it


class ReadAhead:
    """The windows of all clients of one tier process."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0  #: of row groups that are loading or unread (U1)
        self.loading_bytes = 0  #: of these, what is not in memory yet
        self.read_bytes = 0  #: read ahead from the store since the start
        self.wasted_bytes = 0  #: of these, abandoned before a client read them
        self._readers: OrderedDict[Hashable, _Reader] = OrderedDict()  #: oldest read first
        self._straight = 0  #: clients with a window
        self._held: dict[Hashable, _Held] = {}

    def __contains__(self, key: Hashable) -> bool:
        """Returns whether a client is expected to read the row group."""
        held = self._held.get(key)
        return held is not None and held.readers > 0

    def is_loading(self, key: Hashable) -> bool:
        held = self._held.get(key)
        return held is not None and held.loading

    def served(
        self, reader: Hashable, start: Offset, end: Offset, size: int, now_ms: int, *, waited: bool
    ) -> Served:
        """Notes that `reader` got `[start, end)`, which are `size` bytes.

        waited: whether one of its row groups was not in memory when the read began
        """
        abandoned = list(self._forget_idle(now_ms))
        known = self._readers.get(reader)
        if known is None or start != known.next_offset:
            abandoned += self._forget(reader)
            self._readers[reader] = _Reader(end, size, now_ms)
            while len(self._readers) > READERS_MAX:
                abandoned += self._forget(next(iter(self._readers)))
            return Served(False, tuple(abandoned))
        self._readers.move_to_end(reader)
        known.next_offset, known.served_ms = end, now_ms
        known.straight_bytes += size
        known.ahead_end = max(known.ahead_end, end)
        self._grow(known, waited)
        for group in [each for each in known.unread.values() if each.max_offset < end]:
            self._release(known, group).read = True
        return Served(self.bytes_max > 0, tuple(abandoned))

    def _grow(self, known: _Reader, waited: bool) -> None:
        wanted = known.window_bytes
        if not wanted:
            self._straight += 1
            wanted = WINDOW_FIRST_BYTES
        elif waited:
            wanted *= 2
        known.window_bytes = max(1, min(wanted, known.straight_bytes, WINDOW_MAX_BYTES))  # U2

    def position(self, reader: Hashable) -> Offset | None:
        """Returns the first offset that is not read ahead yet; None = do not read ahead."""
        known = self._readers.get(reader)
        return known.ahead_end if known is not None and known.window_bytes else None

    def take(self, reader: Hashable, group: Unread) -> bool:
        """Returns whether to load `group` for `reader` now, and if so keeps memory for it.

        The caller reports `landed` for each row group that it loads, also after a failure.
        """
        known = self._readers.get(reader)
        if known is None or not known.window_bytes:
            return False
        if group.key in known.unread:
            return True
        held = self._held.get(group.key)
        if held is None and self.bytes + group.memory_bytes > self.bytes_max:  # U1
            return False
        share = min(known.window_bytes, self.bytes_max // max(1, self._straight))  # U2, U3
        if known.unread and (
            known.unread_bytes + group.memory_bytes > share or len(known.unread) >= GROUPS_MAX
        ):
            return False
        if held is None:
            held = self._held[group.key] = _Held(group, 0, loading=group.file_bytes > 0)
            self.bytes += group.memory_bytes
            self.read_bytes += group.file_bytes
            self.loading_bytes += group.memory_bytes * held.loading
        held.readers += 1
        known.unread[group.key] = group
        known.unread_bytes += group.memory_bytes
        return True

    def passed(self, reader: Hashable, end: Offset) -> None:
        """Notes that everything of `reader` below `end` is read ahead, or holds no rows."""
        known = self._readers.get(reader)
        if known is not None:
            known.ahead_end = max(known.ahead_end, end)

    def landed(self, key: Hashable) -> None:
        """Notes that the load of a row group has ended: its rows are in memory, or it failed."""
        held = self._held.get(key)
        if held is None or not held.loading:
            return
        held.loading = False
        self.loading_bytes -= held.group.memory_bytes
        self._free(held)

    def _release(self, known: _Reader, group: Unread) -> _Held:
        """Takes a row group from a client that has read it, or will not."""
        del known.unread[group.key]
        known.unread_bytes -= group.memory_bytes
        held = self._held[group.key]
        held.readers -= 1
        self._free(held)
        return held

    def _free(self, held: _Held) -> None:
        if not held.readers and not held.loading:  # U4
            del self._held[held.group.key]
            self.bytes -= held.group.memory_bytes

    def _forget(self, reader: Hashable) -> Iterator[Hashable]:
        """Forgets a client; yields the row groups that no other client is expected to read."""
        known = self._readers.pop(reader, None)
        if known is None:
            return
        self._straight -= known.window_bytes > 0
        for group in list(known.unread.values()):
            held = self._release(known, group)
            if not held.readers:
                self.wasted_bytes += 0 if held.read else held.group.file_bytes
                yield group.key

    def _forget_idle(self, now_ms: int) -> Iterator[Hashable]:
        while self._readers:
            reader, oldest = next(iter(self._readers.items()))
            if now_ms - oldest.served_ms < IDLE_MS:
                return
            yield from self._forget(reader)
