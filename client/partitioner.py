"""The choice of a record's partition: given by the caller, by the key's hash, or sticky.

`murmur2` is Kafka's, bit for bit (the vectors in tests/data/partitioner come from the Java client),
so a key gets the same partition as with Kafka's producer.  There are two implementations: one for a
key, one for an Arrow column of keys, which walks all keys four bytes at a time.  Records without a
key go to one partition until it has received a batch's worth of bytes, then to the next.  The order
is random, and each partition has one turn per round.

Invariants
  M1  murmur2_column(keys)[i] == murmur2(keys[i]) for every key, of any length.
  M2  Sticky: of any n consecutive turns over n partitions that begin with a round, each partition
      has one.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pk import errors
from pk.log.columns import binary_column
from pk.log.encoding import FEW, fixed_column, offsets_of
from pk.types import NONE

U32 = npt.NDArray[np.uint32]
I32 = npt.NDArray[np.int32]

_SEED = 0x9747B28C
_M = 0x5BD1E995
_MASK = 0xFFFFFFFF
_M32 = np.uint32(_M)
#: With fewer keys than this left, finishing each one alone is faster than numpy's fixed cost per
#: step.
_FEW = 24
_RANK_MAX = 0xFFFF
#: With fewer keys than this, hashing each one alone is faster than hashing the column.
_FEW_KEYS = 24


def _finish(h: int, data: bytes | memoryview, position: int, end: int) -> int:
    """Mix the rest of a key from `position` on into the hash."""
    while end - position >= 4:
        k = int.from_bytes(data[position : position + 4], "little") * _M & _MASK
        k = (k ^ k >> 24) * _M & _MASK
        h = h * _M & _MASK ^ k
        position += 4
    if position < end:
        h = (h ^ int.from_bytes(data[position:end], "little")) * _M & _MASK
    h = (h ^ h >> 13) * _M & _MASK
    return h ^ h >> 15


def murmur2(key: bytes) -> int:
    """Kafka's `Utils.murmur2` as a signed 32-bit number."""
    h = _finish(_SEED ^ len(key) & _MASK, key, 0, len(key))
    return h - (1 << 32) if h >> 31 else h


def partition_of(key: bytes, partitions: int) -> int:
    """Return the partition of Kafka's default partitioner: toPositive(murmur2(key)) %
    partitions.
    """
    return (murmur2(key) & 0x7FFFFFFF) % partitions


def murmur2_column(keys: pa.Array) -> U32:
    """Return the hash of every key of a `binary` column; a null counts as the empty key."""
    count = len(keys)
    if not count:
        return np.empty(0, np.uint32)
    data_buffer = keys.buffers()[2]
    offsets = offsets_of(keys).astype(np.int64)
    starts, lengths = offsets[:-1], offsets[1:] - offsets[:-1]
    data = memoryview(data_buffer) if data_buffer is not None else memoryview(b"")
    # Keys of one length, such as ids and uuids, need no sorting.
    if int(lengths.min()) == int(lengths.max()):
        h = _mixed(starts, lengths, lengths >> 2, data)
        return h
    # Longest first: the keys with a further word are then always a prefix.
    rank = (_RANK_MAX - np.minimum(lengths >> 2, _RANK_MAX)).astype(
        np.uint16
    )  # 16 bits: radix sort
    order = np.argsort(rank, kind="stable")
    if int(lengths.max()) >> 2 >= _RANK_MAX:
        order = np.argsort(-lengths, kind="stable")
    lengths = lengths[order]
    hashes = np.empty(count, np.uint32)
    hashes[order] = _mixed(starts[order], lengths, lengths >> 2, data)
    return hashes


def _mixed(
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    words: npt.NDArray[np.int64],
    data: memoryview,
) -> U32:
    """Return the hashes of keys, which are sorted by their number of whole `words`, most first."""
    h = np.uint32(_SEED) ^ lengths.astype(np.uint32)
    left = _words(h, starts, words, data)
    _tails(h, starts + 4 * words, lengths & 3, data)
    h ^= h >> np.uint32(13)
    h *= _M32
    h ^= h >> np.uint32(15)
    for row in range(left):  # the few long keys that `_words` left out
        start = int(starts[row])
        h[row] = murmur2(bytes(data[start : start + int(lengths[row])])) & _MASK
    return h


def _words(
    h: U32, at: npt.NDArray[np.int64], words: npt.NDArray[np.int64], data: memoryview
) -> int:
    """Mix the whole words of the keys into `h`; returns how many of the longest keys were left
    out.
    """
    most = int(words[0])
    if not most:
        return 0
    every = np.ndarray((len(data) - 3,), "<u4", data, 0, (1,))  # a view with a word at every byte
    same = most == int(words[-1])
    for step in range(most):
        active = len(words) if same else int(np.searchsorted(-words, -step, side="left"))
        if step >= 8 and active <= _FEW:
            return active
        k = every[at[:active] + 4 * step]
        k *= _M32
        k ^= k >> np.uint32(24)
        k *= _M32
        part = h[:active]
        part *= _M32
        part ^= k
    return 0


def _tails(
    h: U32, at: npt.NDArray[np.int64], rest: npt.NDArray[np.int64], data: memoryview
) -> None:
    """Mix in the last one to three bytes of each key."""
    raw = np.frombuffer(data, np.uint8)
    for position in (2, 1, 0):
        rows = np.flatnonzero(rest > position)
        if len(rows):
            h[rows] ^= raw[at[rows] + position].astype(np.uint32) << np.uint32(8 * position)
    rows = np.flatnonzero(rest)
    h[rows] *= _M32


def partitions_of(keys: pa.Array, partitions: int, sticky: int) -> I32:
    """Return the partition of every row; rows without a key go to `sticky`."""
    chosen = ((murmur2_column(keys) & np.uint32(0x7FFFFFFF)) % np.uint32(partitions)).astype(
        np.int32
    )
    if keys.null_count:
        chosen[keys.is_null().to_numpy(zero_copy_only=False)] = sticky
    return chosen


class Sticky:
    """The current partition of a topic's records without a key (KIP-480, KIP-794)."""

    def __init__(self, batch_size: int, rng: random.Random) -> None:
        self._batch_size = batch_size
        self._rng = rng
        self._filled = 0
        self._round: list[int] = []
        self._partitions: list[int] = []
        self._current: int | None = None

    def take(self, partitions: Sequence[int], size: int) -> int:
        """Return the partition for `size` bytes.  `partitions` are those with a leader, or all if
        none has one.  A partition's turn ends when it has received a batch's worth of bytes.
        """
        if list(partitions) != self._partitions:
            self._partitions = list(partitions)
            self._round = []
            if self._current not in self._partitions:
                self._current = None
        if self._current is None:
            self._current = self._next()
        current = self._current
        self._filled += size
        if self._filled >= self._batch_size:
            self._filled = 0
            self._current = None
        return current

    def _next(self) -> int:
        if not self._round:
            self._round = list(self._partitions)
            self._rng.shuffle(self._round)
        return self._round.pop()


def place(
    rows: pa.RecordBatch,
    explicit: npt.NDArray[np.int32] | None,
    partitions: int,
    sticky: Sticky,
    available: Sequence[int],
    size: int,
) -> int | npt.NDArray[np.int32]:
    """Return the partition of every row, or a single number if all rows go to the same one.

    explicit: the partitions that the caller chose, -1 = no choice.
    Raises `InvalidPartitions` if a chosen partition does not exist.
    """
    if explicit is not None and len(explicit):
        few = explicit.tolist() if len(explicit) <= FEW else None  # see encoding.few_offsets
        low, high = (min(few), max(few)) if few else (int(explicit.min()), int(explicit.max()))
        if low < NONE or high >= partitions:
            raise errors.InvalidPartitions(
                f"partition {low if low < NONE else high} does not exist: there are {partitions}"
            )
        if low == high and low != NONE:
            return low
    if partitions == 1:
        return 0
    keys = rows.column("key")
    keyless = keys.null_count == len(keys)
    if keyless and explicit is None:
        return sticky.take(available, size)
    stuck = NONE
    if keys.null_count and (explicit is None or NONE in explicit):
        stuck = sticky.take(available, size * keys.null_count // len(keys))
    if keyless:
        spread = np.full(len(keys), stuck, np.int32)
    else:
        spread = partitions_of(keys, partitions, stuck)
    if explicit is not None:
        spread = np.where(explicit == NONE, spread, explicit).astype(np.int32)
    return int(spread[0]) if len(spread) == 1 else spread


def all_exist(explicit: Mapping[int, int], partitions: int) -> bool:
    """Return whether all partitions that callers chose exist."""
    return all(0 <= number < partitions for number in explicit.values())


def place_few(
    keys: Sequence[bytes | None] | None,
    explicit: Mapping[int, int],
    count: int,
    partitions: int,
    sticky: Sticky,
    available: Callable[[], Sequence[int]],
    size: int,
) -> int | list[int]:
    """Return what `place` does, for a few records in lists.

    explicit: the partitions that callers chose, by record; all exist.
    """
    if explicit and len(explicit) == count and len(set(explicit.values())) == 1:
        return next(iter(explicit.values()))
    if partitions == 1:
        return 0
    unkeyed = count if keys is None else keys.count(None)
    if unkeyed == count and not explicit:
        return sticky.take(available(), size)
    stuck = NONE
    if unkeyed and len(explicit) < count:
        stuck = sticky.take(available(), size * unkeyed // count)
    spread: list[int]
    if keys is None or unkeyed == count:
        spread = [stuck] * count
    elif unkeyed or count < _FEW_KEYS:
        spread = [stuck if key is None else partition_of(key, partitions) for key in keys]
    else:
        spread = partitions_of(binary_column(keys, count), partitions, stuck).tolist()
    if explicit:
        spread = [explicit.get(index, number) for index, number in enumerate(spread)]
    return spread[0] if spread.count(spread[0]) == count else spread


def grouped_by_partition(chosen: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Return what `ordered_by_partition` does, for a few records: each partition, and the original
    indices of its records.
    """
    groups: dict[int, list[int]] = {}
    for index, partition in enumerate(chosen):
        found = groups.get(partition)
        if found is None:
            groups[partition] = [index]
        else:
            found.append(index)
    return sorted(groups.items())


def ordered_by_partition(
    rows: pa.RecordBatch, chosen: int | npt.NDArray[np.int32]
) -> tuple[pa.RecordBatch, npt.NDArray[np.int64] | None, list[tuple[int, int, int]]]:
    """Sort the rows by partition, stable within a partition.  Returns the rows; the original index
    of each row (None: the order is unchanged); and the runs `(partition, start, end)`.
    """
    if isinstance(chosen, int) or chosen.min() == chosen.max():
        partition = chosen if isinstance(chosen, int) else int(chosen[0])
        return rows, None, [(partition, 0, rows.num_rows)]
    order = np.argsort(chosen.astype(np.uint16), kind="stable")  # 16 bits: radix sort
    ordered = chosen[order]
    cuts = [0, *(np.flatnonzero(np.diff(ordered)) + 1).tolist(), len(order)]
    runs = [(int(ordered[start]), start, end) for start, end in itertools.pairwise(cuts)]
    return _take(rows, fixed_column(order)), order, runs


def _take(rows: pa.RecordBatch, order: pa.Array) -> pa.RecordBatch:
    """Return `rows` in another order; columns of nulls only stay as they are."""
    columns = [
        column if column.null_count == len(column) else column.take(order)
        for column in rows.columns
    ]
    return pa.RecordBatch.from_arrays(columns, schema=rows.schema)
