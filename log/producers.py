"""What a partition knows of the producers that write to it: idempotence window, epochs, open
transactions.

Per producer id: its epoch, the last five batches (sequences and offsets, KIP-98), and the first
offset of its open transaction.  From these, log/validate.py decides whether a batch is a duplicate
or in order, and rule L11 computes the last stable offset.  Entries are immutable and replaced as a
whole, so a decided append is undone by putting the old entry back.

Invariants
  I1  `apply` is called in offset order, for every batch of the log.  Replaying the log gives the
      same state.
  I2  At most PRODUCER_BATCHES_REMEMBERED batches of a producer are remembered, oldest first.
  I3  A producer with an open transaction never expires here; a silent producer without one does.
  I4  A marker ends a transaction and sets the epoch of its producer only if its epoch is above the
      known one.  Otherwise it changes nothing: a marker that was written twice must not end the
      producer's next transaction (KIP-1228, rule X1).
  I5  Open transactions are kept in the order of their first offsets, so that the last stable offset
      does not cost a walk over them.

Snapshot file, little endian, written whole:

    head      magic 4s | version u16 | 0 u16 | next offset i64 | producers u32 | ended u32 | crc u32
    producer  id i64 | epoch i16 | coordinator epoch i32 | last ms i64 | transaction start i64
              | transaction began ms i64 | n u8 | batch × n
    batch     base sequence i32 | last sequence i32 | base offset i64 | last offset i64
              | append time i64
    ended     first offset i64 | marker offset i64   (a transaction with a marker, not yet stable)

The file is the head, then every producer, then every ended transaction.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import NamedTuple

from crc32c import crc32c

from pk import formats, limits
from pk.log.aborted import AbortedEntry
from pk.log.batch import Header
from pk.log.control_rows import Marker
from pk.types import NONE

_HEAD = struct.Struct("<4sHHqIII")
_PRODUCER = struct.Struct("<qhiqqqB")
_BATCH = struct.Struct("<iiqqq")
_ENDED = struct.Struct("<qq")
MAGIC = b"pkps"
VERSION = 0


class Span(NamedTuple):
    """One batch of a producer, as the window remembers it."""

    base_sequence: int
    last_sequence: int
    base_offset: int
    last_offset: int
    #: the LogAppendTime that it was given, -1 = none: a duplicate gets the same answer
    append_time_ms: int


class ProducerStateEntry(NamedTuple):
    """The state of one producer id."""

    epoch: int
    batches: tuple[Span, ...] = ()
    last_ms: int = 0  #: broker's clock at the last append: the expiration time counts from here
    transaction_start: int = NONE  #: first offset of the open transaction
    coordinator_epoch: int = NONE  #: of the last marker
    #: broker's clock when the first batch of the open transaction was appended; -1 = none is open
    transaction_began_ms: int = NONE

    @property
    def last_sequence(self) -> int:
        return self.batches[-1].last_sequence if self.batches else NONE


def continues(header: Header, known: ProducerStateEntry | None) -> bool:
    """Whether a producer's batch follows the last known one (log/validate.py: h)."""
    if known is None or header.producer_epoch != known.epoch:
        return False
    return header.base_sequence == (known.last_sequence + 1) & 0x7FFFFFFF


class Ended(NamedTuple):
    """A transaction that has a marker.  It counts as unstable until the marker is below the high
    watermark (rule L11).
    """

    first_offset: int
    marker_offset: int


class Undo(NamedTuple):
    """What is needed to take one `apply` back."""

    offset: int
    before: tuple[tuple[int, ProducerStateEntry | None], ...]
    ended: tuple[Ended, ...] | None  #: None = unchanged
    aborted: tuple[AbortedEntry, ...] = ()  #: new aborted transactions, for the index


class CorruptSnapshot(ValueError):
    """A snapshot is torn; the caller replays from an older one."""


class Producers:
    """All producers of a partition."""

    def __init__(self) -> None:
        self._by_id: dict[int, ProducerStateEntry] = {}
        self._open: dict[int, int] = {}  # producer id → first offset, ascending (I5)
        self._ended: list[Ended] = []

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, producer_id: int) -> ProducerStateEntry | None:
        return self._by_id.get(producer_id)

    def ids(self) -> Iterable[int]:
        """Return the ids in any order, without a copy."""
        return self._by_id.keys()

    def items(self) -> list[tuple[int, ProducerStateEntry]]:
        return sorted(self._by_id.items())

    @property
    def open_transactions(self) -> dict[int, int]:
        """The first offset of each open transaction, by producer id."""
        return dict(self._open)

    @property
    def open_count(self) -> int:
        """How many transactions are open."""
        return len(self._open)

    def oldest_transaction(self) -> tuple[int, ProducerStateEntry] | None:
        """Return the producer whose open transaction begins first, and its state; None = none is
        open.  Such a transaction holds back the last stable offset (rule L11).
        """
        producer_id = next(iter(self._open), None)
        return None if producer_id is None else (producer_id, self._by_id[producer_id])

    def apply(
        self,
        header: Header,
        base_offset: int,
        now_ms: int,
        markers: Sequence[Marker] = (),
        append_time_ms: int = NONE,
    ) -> Undo:
        """Account for a batch at `base_offset`; `markers` are the rows of a control batch."""
        last_offset = base_offset + header.last_offset_delta
        if header.control:
            return self._apply_markers(markers, last_offset, now_ms)
        if header.producer_id == NONE:
            return Undo(base_offset, (), None)
        producer_id = header.producer_id
        before = self._by_id.get(producer_id)
        span = Span(
            header.base_sequence, header.last_sequence, base_offset, last_offset, append_time_ms
        )
        same = before is not None and before.epoch == header.producer_epoch
        window = (before.batches if before is not None and same else ())[
            -(limits.PRODUCER_BATCHES_REMEMBERED - 1) :
        ]
        known = before if before is not None else ProducerStateEntry(header.producer_epoch)
        start, began_ms = known.transaction_start, known.transaction_began_ms
        if header.transactional and start == NONE:
            start, began_ms = base_offset, now_ms
            self._open[producer_id] = start
        self._by_id[producer_id] = ProducerStateEntry(
            header.producer_epoch,
            (*window, span),
            now_ms,
            start,
            known.coordinator_epoch,
            began_ms,
        )
        return Undo(base_offset, ((producer_id, before),), None)

    def _apply_markers(self, markers: Sequence[Marker], offset: int, now_ms: int) -> Undo:
        before: list[tuple[int, ProducerStateEntry | None]] = []
        ended = tuple(self._ended)
        aborted: list[AbortedEntry] = []
        for marker in markers:
            old = self._by_id.get(marker.producer_id)
            if old is not None and marker.producer_epoch <= old.epoch:
                continue  # I4
            before.append((marker.producer_id, old))
            if old is not None and old.transaction_start != NONE:
                del self._open[marker.producer_id]
                self._ended.append(Ended(old.transaction_start, offset))
                if not marker.commit:
                    stable = next(iter(self._open.values()), offset)
                    aborted.append(
                        AbortedEntry(marker.producer_id, old.transaction_start, offset, stable)
                    )
            self._by_id[marker.producer_id] = ProducerStateEntry(
                marker.producer_epoch, (), now_ms, coordinator_epoch=marker.coordinator_epoch
            )
        return Undo(offset, tuple(before), ended, tuple(aborted))

    def undo(self, undo: Undo) -> None:
        """Take back the latest `apply` that is not undone yet."""
        for producer_id, before in reversed(undo.before):
            if before is None:
                self._by_id.pop(producer_id, None)
                self._open.pop(producer_id, None)
                continue
            self._by_id[producer_id] = before
            if before.transaction_start == NONE:
                self._open.pop(producer_id, None)
            else:
                self._open[producer_id] = before.transaction_start
        if undo.ended is not None:  # markers are taken back
            self._ended = list(undo.ended)
            self._sort_open()

    def _sort_open(self) -> None:
        """Put the open transactions in the order of their first offsets again (I5)."""
        self._open = dict(sorted(self._open.items(), key=itemgetter(1)))

    def last_stable_offset(self, high_watermark: int) -> int:
        """Return the first offset of the oldest open transaction, or the high watermark
        (rule L11).  Also forgets ended transactions whose marker is stable now.
        """
        if not self._open and not self._ended:
            return high_watermark
        self._ended = [e for e in self._ended if e.marker_offset >= high_watermark]
        oldest = next(iter(self._open.values()), high_watermark)
        return min([high_watermark, oldest, *(e.first_offset for e in self._ended)])

    @property
    def newest_ms(self) -> int:
        """Return when the newest known append was made; 0 if there is none.  May be called on any
        thread: it iterates over a copy that is made in one step.
        """
        return max((producer.last_ms for producer in list(self._by_id.values())), default=0)

    def expire(self, now_ms: int, after_ms: int) -> int:
        """Forget producers silent for `after_ms`; returns how many (I3)."""
        old = [
            i
            for i, p in self._by_id.items()
            if p.transaction_start == NONE and now_ms - p.last_ms >= after_ms
        ]
        for producer_id in old:
            del self._by_id[producer_id]
        return len(old)

    def snapshot(self, next_offset: int) -> bytes:
        """Encode the state after every record below `next_offset`."""
        parts: list[bytes] = []
        for producer_id, p in sorted(self._by_id.items()):
            parts.append(
                _PRODUCER.pack(
                    producer_id,
                    p.epoch,
                    p.coordinator_epoch,
                    p.last_ms,
                    p.transaction_start,
                    p.transaction_began_ms,
                    len(p.batches),
                )
            )
            parts += [_BATCH.pack(*span) for span in p.batches]
        parts += [_ENDED.pack(*ended) for ended in self._ended]
        body = b"".join(parts)
        fields = (MAGIC, VERSION, 0, next_offset, len(self._by_id), len(self._ended))
        return _HEAD.pack(*fields, crc32c(body, crc32c(_HEAD.pack(*fields, 0)))) + body

    @classmethod
    def from_snapshot(cls, raw: bytes) -> tuple[int, Producers]:
        """Decode a snapshot: `(next offset, state)`.  Raises `CorruptSnapshot`, `NewerFormat`."""
        if len(raw) < _HEAD.size:
            raise CorruptSnapshot(f"{len(raw)} bytes are no snapshot")
        *fields, crc = _HEAD.unpack_from(raw)
        magic, version, _, next_offset, count, ended = fields
        body = raw[_HEAD.size :]
        if magic != MAGIC:
            raise CorruptSnapshot(f"begins with {magic!r}")
        if crc != crc32c(body, crc32c(_HEAD.pack(*fields, 0))):
            raise CorruptSnapshot("the checksum does not match")
        formats.require_version("a producer snapshot (.snapshot)", version, VERSION)
        found = cls()
        at = 0
        try:
            for _ in range(count):
                stored = _PRODUCER.unpack_from(body, at)
                producer_id, epoch, coordinator, last_ms, start, began_ms, batches = stored
                at += _PRODUCER.size
                spans = tuple(
                    Span._make(_BATCH.unpack_from(body, at + i * _BATCH.size))
                    for i in range(batches)
                )
                at += batches * _BATCH.size
                found._by_id[producer_id] = ProducerStateEntry(
                    epoch, spans, last_ms, start, coordinator, began_ms
                )
                if start != NONE:
                    found._open[producer_id] = start
            found._ended = [
                Ended._make(_ENDED.unpack_from(body, at + i * _ENDED.size)) for i in range(ended)
            ]
        except struct.error as cause:
            raise CorruptSnapshot(str(cause)) from cause
        found._sort_open()
        return next_offset, found
