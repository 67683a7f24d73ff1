"""The newest offset of each key (compaction/offset_map): exact whatever the hash, and bounded."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pk import errors
from pk.compaction import offset_map as offset_map_module
from pk.compaction.offset_map import (
    ENTRY_BYTES,
    LONG_KEY_BYTES,
    SPARSE,
    U64,
    HashKeys,
    OffsetMap,
    key_hasher,
)

SECRET = bytes(range(32))
ROOMY = 1 << 20


def one_hash(keys: pa.Array) -> U64:
    return np.zeros(len(keys), np.uint64)


def two_hashes(keys: pa.Array) -> U64:
    """The largest value, too: no key of the map is behind it."""
    lengths = np.array([len(key) for key in keys.to_pylist()], np.uint64)
    return np.where(lengths % np.uint64(2) == 0, np.uint64(2**64 - 1), np.uint64(5))


def near_hashes(keys: pa.Array) -> U64:
    """They differ in their last bits alone, which a sort of many rows does not see."""
    return np.array([len(key) + sum(key) for key in keys.to_pylist()], np.uint64)


HASHES = st.sampled_from([key_hasher(SECRET), one_hash, two_hashes, near_hashes])
KEY = st.one_of(
    st.sampled_from([b"", b"\0", b"\0\0", b"a", b"a\0", b"12345678", b"12345678\0", b"1234567"]),
    st.binary(max_size=20),
    st.integers(0, 3).map(lambda n: b"x" * (LONG_KEY_BYTES + n)),
)
BLOCKS = st.lists(st.lists(KEY, max_size=8), max_size=8)


def binary(keys: list[bytes]) -> pa.Array:
    return pa.array(keys, pa.binary())


def filled(blocks: list[list[bytes]], offset_map: OffsetMap) -> dict[bytes, int]:
    """Add blocks until the map is full; return what it must hold."""
    found: dict[bytes, int] = {}
    base = 0
    for keys in blocks:
        offsets = np.arange(base, base + 3 * len(keys), 3)
        taken = offset_map.add(binary(keys), offsets)
        found.update(zip(keys[:taken], offsets[:taken].tolist(), strict=True))
        if taken < len(keys):
            assert offset_map.full
            break
        base += 3 * len(keys)
    return found


@given(BLOCKS, st.lists(KEY, max_size=8), HASHES)
def test_the_map_is_a_dictionary(
    blocks: list[list[bytes]], others: list[bytes], hash_keys: HashKeys
) -> None:
    offset_map = OffsetMap(ROOMY, hash_keys)
    expected = filled(blocks, offset_map)
    asked = [*expected, *others]
    assert offset_map.latest(binary(asked)).tolist() == [expected.get(key, -1) for key in asked]
    assert len(offset_map) == len(expected)


@pytest.mark.parametrize("hash_keys", [key_hasher(SECRET), near_hashes])
@pytest.mark.parametrize("length", [3, 8, 12, 16, None])
def test_merges_keep_the_newest_offsets(
    hash_keys: HashKeys, length: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many keys, of one length and of several."""
    monkeypatch.setattr(offset_map_module, "MERGE_ROWS", 100)
    rng = np.random.default_rng(3)
    names = [b"%d" % n for n in range(700)]
    if length is None:
        names = [name + b"-" * (n % 19) for n, name in enumerate(names)]
    else:
        names = [name.rjust(length, b"-") for name in names]
    blocks = [[names[n] for n in rng.integers(0, 700, size)] for size in (90, 1, 700, 400, 3000)]
    offset_map = OffsetMap(ROOMY, hash_keys)
    expected = filled(blocks, offset_map)
    asked = [*names, b"none", b"", b"-" * 300]
    assert offset_map.latest(binary(asked)).tolist() == [expected.get(key, -1) for key in asked]
    assert len(offset_map) == len(expected)


@given(BLOCKS, HASHES, st.integers(1, 2 * SPARSE), st.integers(ENTRY_BYTES + 300, 1000))
def test_an_offset_says_whether_its_row_is_the_newest(
    blocks: list[list[bytes]], hash_keys: HashKeys, step: int, bytes_max: int
) -> None:
    offset_map = OffsetMap(bytes_max, hash_keys)
    assert offset_map.covered(np.arange(3)) == (0, 0)
    assert offset_map.newest(np.zeros(0, np.int64)).tolist() == []
    base = 10
    for keys in blocks:
        taken = offset_map.add(binary(keys), np.arange(base, base + step * len(keys), step))
        base += step * taken
        if taken < len(keys):
            break
    added = np.arange(10, base, step)
    if len(added):
        around = np.array([0, 9, *added, base, base + 1])
        assert offset_map.covered(around) == (2, 2 + len(added))
    rows = [key for keys in blocks for key in keys][: len(added)]
    for start in range(0, len(rows), 5):
        some = added[start : start + 5]
        latest = offset_map.latest(binary(rows[start : start + 5]))
        assert offset_map.newest(some).tolist() == (latest == some).tolist()


@given(BLOCKS, HASHES, st.integers(ENTRY_BYTES + LONG_KEY_BYTES + 3, 600))
def test_a_full_map_has_a_prefix(
    blocks: list[list[bytes]], hash_keys: HashKeys, bytes_max: int
) -> None:
    """It takes all rows before the first key that does not fit, and none behind it."""
    offset_map = OffsetMap(bytes_max, hash_keys)
    expected = filled(blocks, offset_map)
    asked = sorted({key for keys in blocks for key in keys})
    assert offset_map.latest(binary(asked)).tolist() == [expected.get(key, -1) for key in asked]
    held = sum(len(key) + ENTRY_BYTES for key in expected)
    assert held <= bytes_max
    if offset_map.full:
        assert offset_map.add(binary([b"a"]), np.array([10**6])) == 0


def test_repeated_keys_fill_no_memory() -> None:
    offset_map = OffsetMap(20 * (ENTRY_BYTES + 1), key_hasher(SECRET))
    for base in range(0, 10_000, 100):
        keys = binary([bytes([n % 10]) for n in range(100)])
        assert offset_map.add(keys, np.arange(base, base + 100)) == 100
    assert not offset_map.full
    assert offset_map.latest(binary([b"\3"])).tolist() == [9_993]


def test_the_map_is_full_before_every_block_is_a_merge() -> None:
    offset_map = OffsetMap(16 * (ENTRY_BYTES + 1), key_hasher(SECRET))
    assert offset_map.add(binary([bytes([n]) for n in range(15)]), np.arange(15)) == 15
    assert offset_map.add(binary([b"\0", b"\1"]), np.array([20, 21])) == 1
    assert offset_map.full
    assert offset_map.latest(binary([b"\0", b"\1"])).tolist() == [20, 1]


def test_a_full_map_takes_repetitions_of_its_keys() -> None:
    offset_map = OffsetMap(ENTRY_BYTES + 1, key_hasher(SECRET))
    assert offset_map.add(binary([b"a", b"a", b"a", b"b", b"a"]), np.arange(5)) == 3
    assert offset_map.latest(binary([b"a", b"b"])).tolist() == [2, -1]


def test_a_key_that_never_fits_is_refused() -> None:
    offset_map = OffsetMap(100, key_hasher(SECRET))
    with pytest.raises(errors.InvalidOption, match="a key of 101 bytes does not fit"):
        offset_map.add(binary([b"x" * 101, b"y"]), np.array([1, 2]))
    offset_map = OffsetMap(100, key_hasher(SECRET))
    assert offset_map.add(binary([b"x", b"y" * 101]), np.array([1, 2])) == 1
    assert offset_map.add(binary([b"y" * 101]), np.array([2])) == 0  # the next cleaning refuses it


def test_slices_of_columns_are_read_and_copied() -> None:
    whole = binary([b"first", b"second", b"third-key", b"fourth", b"second"])
    offset_map = OffsetMap(ROOMY, key_hasher(SECRET))
    assert offset_map.add(whole.slice(1, 2), np.array([4, 9])) == 2
    assert offset_map.latest(whole.slice(1)).tolist() == [4, 9, -1, 4]


@given(st.lists(st.one_of(st.binary(max_size=40), KEY), min_size=1, max_size=20))
def test_the_hash_is_that_of_the_bytes(keys: list[bytes]) -> None:
    """The neighbours in the column have no influence, and other bytes have another hash."""
    hash_keys = key_hasher(SECRET)
    together = hash_keys(binary([b"before", *keys, b"behind"]).slice(1, len(keys))).tolist()
    assert together == [int(hash_keys(binary([key]))[0]) for key in keys]
    assert len(set(together)) == len(set(keys))


def test_the_hash_has_a_secret() -> None:
    keys = binary([b"a", b"key-of-16-bytes!", b"x" * (LONG_KEY_BYTES + 1)])
    other = key_hasher(bytes(32))(keys)
    assert not (key_hasher(SECRET)(keys) == other).any()
