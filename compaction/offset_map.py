"""The newest offset of each key of a dirty range (Kafka: `OffsetMap`), in columns.

Pure.  The keys are in one Arrow column, in the order of a 64-bit hash; a look-up is a binary search
for the hash and a comparison of the key's bytes.  The bytes decide, so two keys with the same hash
never replace each other.  The hash only says where to look.  It has a secret seed: without the
secret, a producer could choose many keys of one hash, and every look-up would walk over all of
them.

Building costs one sort for each block of rows.  Blocks are merged when memory is short, and before
the first look-up.  Python runs per block, never per row; only keys longer than LONG_KEY_BYTES are
hashed one by one, at a cost that follows their bytes.

Invariants
  M1  `latest(key)` is the largest offset that was added with exactly these bytes.
  M2  The map and its blocks hold at most `bytes_max`: the bytes of the keys and ENTRY_BYTES for
      each.  While a merge sorts, it takes about twice as much again.  `newest` takes 8 bytes for
      each key, once that memory is free.
  M3  Rows are taken in offset order.  `add` takes a prefix of its rows, so the map always covers a
      range of offsets without omissions, and a cleaning may end where the map is full.
  M4  A row that was added is the newest of its key exactly if its offset is that of an entry.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pk import errors
from pk.log.encoding import fixed_column, offsets_of
from pk.types import NONE

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]
HashKeys = Callable[[pa.Array], U64]

#: Memory of a key beside its bytes: hash, offset, Arrow's offset, and their slack.
ENTRY_BYTES = 24
#: Arrow's binary column has 32-bit offsets, and a merge joins the map and as many new keys.
BYTES_MAX = 2**30 - 1
LONG_KEY_BYTES = 256
#: The map is full when less than 1/SPARE of it is free after a merge.  Otherwise almost every block
#: would cause a merge of the whole map.
SPARE = 8
#: `newest` marks up to so many offsets a row; rows that lie farther apart are searched.
SPARSE = 8

_33 = np.uint64(33)
_MIX_1 = np.uint64(0xFF51AFD7ED558CCD)
_MIX_2 = np.uint64(0xC4CEB9FE1A85EC53)
_LENGTH = np.uint64(0x9E3779B97F4A7C15)
#: Masks the bytes of a key's last word, by its length modulo 8.
_TAILS: U64 = np.array([2**64 - 1, *((1 << 8 * n) - 1 for n in range(1, 8))], np.uint64)


class _Entries(NamedTuple):
    """Distinct keys in the order of their hashes, each with its newest offset."""

    hashes: U64
    keys: pa.Array
    offsets: I64

    @property
    def size(self) -> int:
        return key_bytes(self.keys) + ENTRY_BYTES * len(self.hashes)


class OffsetMap:
    """Maps each key to its newest offset.

    bytes_max: bound of the memory (M2)
    hash_keys: from `key_hasher`
    """

    def __init__(self, bytes_max: int, hash_keys: HashKeys) -> None:
        assert 0 < bytes_max <= BYTES_MAX
        self.full = False  #: `add` takes no more rows
        self._bytes_max = bytes_max
        self._hash_keys = hash_keys
        self._merged = _Entries(np.zeros(0, np.uint64), _NO_KEYS, np.zeros(0, np.int64))
        self._blocks: list[_Entries] = []
        self._held = 0
        self._first: int = NONE
        self._last: int = NONE
        self._newest: I64 | None = None  #: the offsets of the map, ascending; None = not sorted yet

    def __len__(self) -> int:
        self._merge()
        return len(self._merged.hashes)

    def add(self, keys: pa.Array, offsets: I64) -> int:
        """Add rows, whose offsets grow and are above all earlier ones.  Returns how many of the
        first rows were taken; if they are not all, the map is full (M3).

        keys: a binary column without nulls.  It is copied

        Raises `InvalidOption` if an empty map has no room for the first key.
        """
        if self.full or not len(offsets):
            return 0
        assert keys.null_count == 0
        assert offsets[0] > self._last, (offsets[0], self._last)
        taken = len(offsets)
        hashes = self._hash_keys(keys)
        block = _newest(hashes, keys, offsets)
        if block.size > self._bytes_max - self._held:
            self._merge()
            room = self._bytes_max - self._held
            self.full = room < self._bytes_max // SPARE
            if block.size > room:
                self.full = True
                taken = _fitting(hashes, keys, room)
                if not taken:
                    self._refuse_key(keys)
                    return 0
                block = _newest(hashes[:taken], keys.slice(0, taken), offsets[:taken])
        self._blocks.append(block)
        self._held += block.size
        self._newest = None
        self._first = self._first if self._first != NONE else int(offsets[0])
        self._last = int(offsets[taken - 1])
        return taken

    def _refuse_key(self, keys: pa.Array) -> None:
        if not self._held:
            raise errors.InvalidOption(
                f"a key of {key_bytes(keys.slice(0, 1))} bytes does not fit into an offset map of "
                f"{self._bytes_max} bytes: give the cleaner more memory"
            )

    def latest(self, keys: pa.Array) -> I64:
        """Return the newest offset of each key; -1 = the map does not have the key.

        keys: a binary column without nulls
        """
        self._merge()
        entries = self._merged
        found: I64 = np.full(len(keys), NONE, np.int64)
        if not len(keys) or not len(entries.hashes):
            return found
        hashes = self._hash_keys(keys)
        rows: I64 = np.argsort(hashes)  # in this order the binary search stays in the cache
        at: I64 = np.searchsorted(entries.hashes, hashes[rows])
        while len(rows):  # once, unless several keys of the map have one hash
            inside = at < len(entries.hashes)
            rows, at = rows[inside], at[inside]
            candidates = entries.hashes[at] == hashes[rows]
            rows, at = rows[candidates], at[candidates]
            same = _equal(_taken(entries.keys, at), _taken(keys, rows))
            found[rows[same]] = entries.offsets[at[same]]
            rows, at = rows[~same], at[~same] + 1
        return found

    def covered(self, offsets: I64) -> tuple[int, int]:
        """Return which of the ascending `offsets` lie between the first and the last row of the
        map, as the bounds of a slice.
        """
        if self._last == NONE:
            return 0, 0
        start, end = np.searchsorted(offsets, [self._first, self._last + 1]).tolist()
        return start, end

    def newest(self, offsets: I64) -> Bools:
        """Return which rows are the newest of their keys, by their ascending offsets alone.  Of an
        added row it says the same as `latest`, and costs a fraction of it (M4).
        """
        if self._newest is None:
            self._merge()
            self._newest = np.sort(self._merged.offsets)
        if not len(offsets):
            return np.zeros(0, bool)
        base, span = int(offsets[0]), int(offsets[-1]) - int(offsets[0]) + 1
        start, end = np.searchsorted(self._newest, [base, base + span]).tolist()
        some = self._newest[start:end]
        if span > SPARSE * len(offsets):
            return np.isin(offsets, some, kind="sort")
        marks = np.zeros(span, bool)
        marks[some - base] = True
        found: Bools = marks[offsets - base]
        return found

    def _merge(self) -> None:
        if not self._blocks:
            return
        parts = [self._merged, *self._blocks]
        self._blocks = []
        self._merged = _newest(
            np.concatenate([part.hashes for part in parts]),
            pa.concat_arrays([part.keys for part in parts]),
            np.concatenate([part.offsets for part in parts]),
        )
        self._held = self._merged.size


def _newest(hashes: U64, keys: pa.Array, offsets: I64) -> _Entries:
    """Return the distinct keys with the last of their offsets.  Rows of one key are in offset
    order; the keys are copied.
    """
    order: I64 = np.argsort(hashes, kind="stable")
    keys, same = _runs(hashes, keys, order)
    last = np.append(~same, True)
    if not last.all():
        order, keys = order[last], keys.filter(pa.array(last))
    return _Entries(hashes[order], keys, offsets[order])


def _runs(hashes: U64, keys: pa.Array, order: I64) -> tuple[pa.Array, Bools]:
    """Return the keys in `order`, and for each but the first whether it equals the one before.

    `order` sorts by the hash.  If it leaves different keys of one hash mixed, it is changed so that
    equal keys adjoin, in the order of their rows.
    """
    ordered = _taken(keys, order)
    equal_hash: Bools = hashes[order[1:]] == hashes[order[:-1]]
    same: Bools = equal_hash.copy()
    doubtful = np.flatnonzero(equal_hash)
    same[doubtful] = _equal(_taken(ordered, doubtful + 1), _taken(ordered, doubtful))
    if not np.array_equal(same, equal_hash):
        numbers = ordered.dictionary_encode().indices.to_numpy()  # compares bytes
        again: I64 = np.lexsort((numbers, hashes[order]))  # stable
        order[:] = order[again]
        ordered = _taken(keys, order)
        same = numbers[again][1:] == numbers[again][:-1]
    return ordered, same


def _fitting(hashes: U64, keys: pa.Array, room: int) -> int:
    """Return how many of the first rows have distinct keys of at most `room` bytes."""
    order: I64 = np.argsort(hashes, kind="stable")
    _, same = _runs(hashes, keys, order)
    first = np.sort(order[np.insert(~same, 0, True)])  # the first row of each key
    ends = offsets_of(keys).astype(np.int64)
    sums = np.cumsum((ends[1:] - ends[:-1])[first] + ENTRY_BYTES)
    fit = int(np.searchsorted(sums, room, side="right"))
    return int(first[fit]) if fit < len(first) else len(keys)


def key_bytes(keys: pa.Array) -> int:
    """Return the bytes of all keys of a binary column."""
    ends = offsets_of(keys)
    return int(ends[-1]) - int(ends[0])


def _taken(keys: pa.Array, rows: I64) -> pa.Array:
    return keys.take(fixed_column(np.ascontiguousarray(rows, np.int64)))


def _equal(left: pa.Array, right: pa.Array) -> Bools:
    found: Bools = pc.equal(left, right).to_numpy(zero_copy_only=False)
    return found


_NO_KEYS = pa.array([], pa.binary())


# -- the hash --------------------------------------------------------------------------------------


def key_hasher(secret: bytes) -> HashKeys:
    """Return the hash function of a cleaning.

    secret: 32 random bytes, other ones for each process.  The offsets of a map do not depend on it
    """
    assert len(secret) == 32
    return partial(_hash_keys, secret)


def _hash_keys(secret: bytes, keys: pa.Array) -> U64:
    rows = len(keys)
    ends = offsets_of(keys).astype(np.int64)
    starts, lengths = ends[:-1] - ends[0], ends[1:] - ends[:-1]
    seed, factor = (np.uint64(each) for each in np.frombuffer(secret, "<u8")[:2])
    factor |= np.uint64(1)
    hashes: U64 = _mix(lengths.astype(np.uint64) * _LENGTH + seed)
    size = int(ends[-1] - ends[0])
    if not rows or not size:
        return hashes
    data = np.zeros(size + 7, np.uint8)  # the last word of a key is read whole
    data[:size] = np.frombuffer(keys.buffers()[2], np.uint8, size, int(ends[0]))
    words_at: Any = np.ndarray((size,), "<u8", data, strides=(1,))
    long = np.flatnonzero(lengths > LONG_KEY_BYTES)
    for row in long.tolist():
        key = data[starts[row] : starts[row] + lengths[row]].data
        digest = hashlib.blake2b(key, digest_size=8, key=secret).digest()
        hashes[row] = int.from_bytes(digest, "little")
    words = (np.where(lengths > LONG_KEY_BYTES, 0, lengths) + 7) >> 3
    order: I64 = np.argsort(-words, kind="stable")
    counts = np.searchsorted(-words[order], -np.arange(1, int(words.max()) + 1), side="right")
    for word, count in enumerate(counts.tolist()):
        some = order[:count]  # the keys that have this word
        terms = words_at[starts[some] + 8 * word]
        final = words[some] == word + 1
        terms[final] &= _TAILS[lengths[some[final]] & 7]
        hashes[some] = _mix((hashes[some] ^ terms) * factor + seed)
    return hashes


def _mix(values: U64) -> U64:
    """Mix `values` in place (the 64-bit finaliser of MurmurHash3) and return them."""
    values ^= values >> _33
    values *= _MIX_1
    values ^= values >> _33
    values *= _MIX_2
    values ^= values >> _33
    return values
