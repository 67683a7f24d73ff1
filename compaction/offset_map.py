"""The newest offset of each key of a dirty range (Kafka: `OffsetMap`), in columns.

Pure.  The keys are in one Arrow column, in the order of a 64-bit hash; a look-up is a binary search
for the hash and a comparison of the key's bytes.  The bytes decide, so two keys with the same hash
never replace each other.  The hash only says where to look.  It has a secret seed: without the
secret, a producer could choose many keys of one hash, and every look-up would walk over all of
them.

Blocks of rows are held as they come, and merged when they are many, when memory is short, and
before the first look-up.  A merge sorts words that have the first bits of a key's hash and the
number of its row.  Where these bits are equal, the keys are compared; those of one length by words
of eight bytes.  Python runs per block, never per row; only keys longer than LONG_KEY_BYTES are
hashed one by one, at a cost that follows their bytes.

Invariants
  M1  `latest(key)` is the largest offset that was added with exactly these bytes.
  M2  The map and its blocks hold at most `bytes_max`: the bytes of the keys and ENTRY_BYTES for
      each, for a key of the map once and for those of the blocks once a row.  While a merge sorts,
      it takes about twice as much again.  `newest` takes 8 bytes for each key, once that memory is
      free.
  M3  Rows are taken in offset order.  `add` takes a prefix of its rows, so the map always covers a
      range of offsets without omissions, and a cleaning may end where the map is full.
  M4  A row that was added is the newest of its key exactly if its offset is that of an entry.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

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
#: Blocks are merged when they have this many rows, and MERGE_FACTOR more for each key of the map.
#: So their memory follows that of the distinct keys, and few rows are sorted a second time.
MERGE_ROWS = 1 << 18
MERGE_FACTOR = 4
#: Neighbours are compared so many at a time, in the processor's cache.
_CHUNK = 1 << 15

_33 = np.uint64(33)
_MIX_1 = np.uint64(0xFF51AFD7ED558CCD)
_MIX_2 = np.uint64(0xC4CEB9FE1A85EC53)
_LENGTH = np.uint64(0x9E3779B97F4A7C15)
#: Masks the bytes of a key's last word, by its length modulo 8.
_TAILS: U64 = np.array([2**64 - 1, *((1 << 8 * n) - 1 for n in range(1, 8))], np.uint64)


class _Keys:
    """Keys without nulls.  Behind their bytes are 8 zeros, so any word of a key is read whole."""

    def __init__(self, ends: npt.NDArray[np.int32], data: npt.NDArray[np.uint8]) -> None:
        self.ends = ends  #: Arrow's offsets; the first is 0
        self.data = data
        self.size = int(ends[-1])
        lengths = ends[1:] - ends[:-1]
        self.lengths = lengths
        least, self.longest = (int(lengths.min()), int(lengths.max())) if len(lengths) else (0, 0)
        self.uniform = least == self.longest  #: all keys have this length

    @classmethod
    def of(cls, column: pa.Array) -> _Keys:
        """Copy the keys of a binary column."""
        ends = offsets_of(column)
        size = int(ends[-1] - ends[0])
        data = np.zeros(size + 8, np.uint8)
        if size:
            data[:size] = np.frombuffer(column.buffers()[2], np.uint8, size, int(ends[0]))
        return cls(ends - ends[0], data)

    @classmethod
    def joined(cls, parts: Sequence[_Keys]) -> _Keys:
        """Join the keys of several blocks.  They have at most BYTES_MAX bytes together (M2), so
        offsets and places of words fit into 32 bits.
        """
        bases = np.cumsum([0, *(part.size for part in parts)]).tolist()
        ends = [part.ends[1:] + np.int32(base) for part, base in zip(parts, bases, strict=False)]
        data = [part.data[: part.size] for part in parts]
        return cls(
            np.concatenate([np.zeros(1, np.int32), *ends]),
            np.concatenate([*data, np.zeros(8, np.uint8)]),
        )

    @property
    def column(self) -> pa.Array:
        """The keys as an Arrow column, not copied."""
        buffers = [None, pa.py_buffer(self.ends), pa.py_buffer(self.data[: self.size])]
        return pa.Array.from_buffers(pa.binary(), len(self.lengths), buffers, 0)

    def taken(self, rows: I64) -> _Keys:
        if self.uniform and self.longest:
            every = self.data[: self.size].view(f"V{self.longest}")
            data = np.zeros(len(rows) * self.longest + 8, np.uint8)
            data[:-8] = every.take(rows).view(np.uint8)
            return _Keys(np.arange(len(rows) + 1, dtype=np.int32) * np.int32(self.longest), data)
        return _Keys.of(_taken(self.column, rows))

    def words(self, word: int, rows: I64 | None = None) -> U64:
        """Return 8 bytes of keys, from byte 8 * `word` of each on; zeros stand for those behind its
        end.

        rows: keys that are longer than 8 * `word`; None = all keys
        """
        found: U64
        if self.uniform:
            shape = (len(self.lengths),)
            every: U64 = np.ndarray(shape, "<u8", self.data, 8 * word, (self.longest,))
            found = every.copy() if rows is None else every[rows]
            if 8 * (word + 1) > self.longest:
                found &= _TAILS[self.longest & 7]
            return found
        starts, lengths = (
            (self.ends[:-1], self.lengths)
            if rows is None
            else (self.ends.take(rows), self.lengths.take(rows))
        )
        every = np.ndarray((self.size + 1,), "<u8", self.data, strides=(1,))
        found = every[starts + np.int32(8 * word)]  # take would copy all
        final = np.flatnonzero(lengths < 8 * (word + 1))
        found[final] &= _TAILS[lengths[final] & 7]
        return found


def _equal(left: pa.Array, left_rows: I64, right: pa.Array, right_rows: I64) -> Bools:
    """Return which rows of two columns of keys have the same bytes."""
    found = pc.equal(_taken(left, left_rows), _taken(right, right_rows))
    same: Bools = found.to_numpy(zero_copy_only=False)
    return same


class _Entries(NamedTuple):
    """Keys with their offsets."""

    hashes: U64
    keys: _Keys
    offsets: I64

    @property
    def size(self) -> int:
        return self.keys.size + ENTRY_BYTES * len(self.hashes)

    def first(self, rows: int) -> _Entries:
        keys = _Keys.of(self.keys.column.slice(0, rows))
        return _Entries(self.hashes[:rows], keys, self.offsets[:rows])

    def distinct(self) -> _Entries:
        """Return the distinct keys in the order of their hashes, with the last of their offsets.
        Rows of one key are in offset order.
        """
        order, same = _runs(self.hashes, self.keys)
        last = order[np.append(~same, True)] if len(order) else order
        return _Entries(self.hashes.take(last), self.keys.taken(last), self.offsets.take(last))


_NO_ENTRIES = _Entries(
    np.zeros(0, np.uint64), _Keys.of(pa.array([], pa.binary())), np.zeros(0, np.int64)
)


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
        #: distinct keys in the order of their hashes
        self._merged = _NO_ENTRIES
        self._blocks: list[_Entries] = []  #: the rows that were added since
        self._rows = 0  #: of the blocks
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
        copied = _Keys.of(keys)
        block = _Entries(self._hash_keys(copied.column), copied, offsets)
        if block.size > self._bytes_max - self._held:
            self._merge()
            room = self._bytes_max - self._held
            self.full = room < self._bytes_max // SPARE
            if block.size > room and (distinct := block.distinct()).size > room:
                self.full = True
                taken = _fitting(block, room)
                if not taken:
                    self._refuse_key(block)
                    return 0
                block = block.first(taken).distinct()
            elif block.size > room:
                block = distinct
        self._blocks.append(block)
        self._rows += len(block.hashes)
        self._held += block.size
        if self._rows > MERGE_ROWS + MERGE_FACTOR * len(self._merged.hashes):
            self._merge()
        self._newest = None
        self._first = self._first if self._first != NONE else int(offsets[0])
        self._last = int(offsets[taken - 1])
        return taken

    def _refuse_key(self, block: _Entries) -> None:
        if not self._held:
            raise errors.InvalidOption(
                f"a key of {block.keys.lengths[0]} bytes does not fit into an offset map of "
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
        rows, _ = _order(hashes)  # in this order the binary search stays in the cache
        at: I64 = np.searchsorted(entries.hashes, hashes.take(rows))
        while len(rows):  # once, unless several keys of the map have one hash
            near = entries.hashes.take(at, mode="clip") == hashes.take(rows)
            near &= at < len(entries.hashes)
            rows, at = rows[near], at[near]
            same = _equal(entries.keys.column, at, keys, rows)
            found[rows[same]] = entries.offsets.take(at[same])
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
        return marks.take(offsets - base)

    def _merge(self) -> None:
        if not self._blocks:
            return
        parts = [self._merged, *self._blocks]
        joined = _Entries(
            np.concatenate([part.hashes for part in parts]),
            _Keys.joined([part.keys for part in parts]),
            np.concatenate([part.offsets for part in parts]),
        )
        del parts
        self._blocks, self._rows, self._merged = [], 0, _NO_ENTRIES  # their memory is free
        self._merged = joined.distinct()
        self._held = self._merged.size


def _order(hashes: U64) -> tuple[I64, Bools]:
    """Return the rows in the order of their first bits of the hash, as many as a word has beside
    the row's number, and for each but the first whether these bits equal those of the one before.

    Rows with equal bits stay in their order.  numpy sorts words several times faster than it sorts
    the numbers of rows by them.
    """
    numbers = np.uint64((1 << max(len(hashes) - 1, 0).bit_length()) - 1)
    words = hashes & ~numbers
    words |= np.arange(len(hashes), dtype=np.uint64)
    words.sort()
    same: Bools = (words[1:] ^ words[:-1]) <= numbers
    words &= numbers
    return words.view(np.int64), same


def _runs(hashes: U64, keys: _Keys) -> tuple[I64, Bools]:
    """Return the rows in an order in which equal keys adjoin, in the order of their rows, and for
    each but the first whether its key equals the one before.  The order sorts by the hash.
    """
    order, same = _order(hashes)
    if keys.uniform and keys.longest <= LONG_KEY_BYTES and 2 * np.count_nonzero(same) > len(same):
        equal = same.copy()
        for word in range((keys.longest + 7) // 8):
            words = keys.words(word)
            for start in range(0, len(same), _CHUNK):
                some = words.take(order[start : start + _CHUNK + 1])
                equal[start : start + _CHUNK] &= some[1:] == some[:-1]
    else:
        equal, column = np.zeros(len(same), bool), keys.column
        for start in range(0, len(same), _CHUNK):
            near = np.flatnonzero(same[start : start + _CHUNK]) + start
            equal[near] = _equal(column, order[near], column, order[near + 1])
    if not np.array_equal(equal, same):
        _separate(hashes, keys, order, same, np.flatnonzero(equal != same))
    return order, same


def _separate(hashes: U64, keys: _Keys, order: I64, same: Bools, doubtful: I64) -> None:
    """Sort the runs of equal bits that have several keys, in place.

    same: as `_order` returns it.  It is changed to what `_runs` returns
    doubtful: where neighbours with equal bits have different keys
    """
    run = np.cumsum(np.concatenate([[0], ~same]))
    mixed = np.zeros(int(run[-1]) + 1, bool)
    mixed[run[doubtful]] = True
    places = np.flatnonzero(mixed[run])
    rows, run = order[places], run[places]
    numbers = _taken(keys.column, rows).dictionary_encode().indices.to_numpy()  # compares bytes
    again: I64 = np.lexsort((numbers, hashes[rows], run))  # stable
    order[places] = rows[again]
    inner = np.flatnonzero(run[1:] == run[:-1])  # places of one run adjoin
    same[places[inner]] = numbers[again][inner + 1] == numbers[again][inner]


def _fitting(block: _Entries, room: int) -> int:
    """Return how many of the first rows have distinct keys of at most `room` bytes."""
    order, same = _runs(block.hashes, block.keys)
    first = np.sort(order[np.insert(~same, 0, True)])  # the first row of each key
    sums = np.cumsum(block.keys.lengths[first].astype(np.int64) + ENTRY_BYTES)
    fit = int(np.searchsorted(sums, room, side="right"))
    return int(first[fit]) if fit < len(first) else len(order)


def key_bytes(keys: pa.Array) -> int:
    """Return the bytes of all keys of a binary column."""
    ends = offsets_of(keys)
    return int(ends[-1]) - int(ends[0])


def _taken(keys: pa.Array, rows: I64) -> pa.Array:
    return keys.take(fixed_column(np.ascontiguousarray(rows, np.int64)))


# -- the hash --------------------------------------------------------------------------------------


def key_hasher(secret: bytes) -> HashKeys:
    """Return the hash function of a cleaning.

    secret: 32 random bytes, other ones for each process.  The offsets of a map do not depend on it
    """
    assert len(secret) == 32
    return partial(_hash_keys, secret)


def _hash_keys(secret: bytes, column: pa.Array) -> U64:
    keys = _Keys.of(column)
    seed, factor = (np.uint64(each) for each in np.frombuffer(secret, "<u8")[:2])
    factor |= np.uint64(1)
    hashes: U64 = _mix(keys.lengths.astype(np.uint64) * _LENGTH + seed)
    words = (keys.lengths + 7) >> 3
    if keys.longest > LONG_KEY_BYTES:
        long = np.flatnonzero(keys.lengths > LONG_KEY_BYTES)
        words[long] = 0
        for row in long.tolist():
            key = keys.data[keys.ends[row] : keys.ends[row + 1]].data
            digest = hashlib.blake2b(key, digest_size=8, key=secret).digest()
            hashes[row] = int.from_bytes(digest, "little")
    least, most = (int(words.min()), int(words.max())) if len(words) else (0, 0)
    for word in range(least):  # every key has this word
        hashes ^= keys.words(word)
        hashes *= factor
        hashes += seed
        _mix(hashes)
    for word in range(least, most):
        some = np.flatnonzero(words > word)
        hashes[some] = _mix((hashes[some] ^ keys.words(word, some)) * factor + seed)
    return hashes


def _mix(values: U64) -> U64:
    """Mix `values` in place (the 64-bit finaliser of MurmurHash3) and return them."""
    values ^= values >> _33
    values *= _MIX_1
    values ^= values >> _33
    values *= _MIX_2
    values ^= values >> _33
    return values
