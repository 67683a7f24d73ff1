"""The partitioner compared with vectors of the real Java client, and its two implementations with
each other.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pk.client.partitioner import (
    Sticky,
    murmur2,
    murmur2_column,
    partition_of,
    partitions_of,
)

VECTORS = json.loads(
    (Path(__file__).parents[2] / "data/partitioner/murmur2.json").read_text(encoding="utf-8")
)["vectors"]


def test_hash_and_partition_are_those_of_the_java_client() -> None:
    assert len(VECTORS) > 200
    for vector in VECTORS:
        key = bytes.fromhex(vector["key"])
        assert murmur2(key) == vector["murmur2"], key
        for count, partition in vector["partition_of"].items():
            assert partition_of(key, int(count)) == partition, (key, count)


@pytest.mark.parametrize("repeat", [1, 40])
def test_column_hash_is_that_of_the_java_client(repeat: int) -> None:
    """The keys are repeated, so that both the vectorised steps and the exit for few long keys are
    taken.
    """
    vectors = VECTORS * repeat
    keys = pa.array([bytes.fromhex(v["key"]) for v in vectors], pa.binary())
    assert murmur2_column(keys).astype(np.int32).tolist() == [v["murmur2"] for v in vectors]
    for count in (1, 3, 64, 10000):
        expected = [v["partition_of"][str(count)] for v in vectors]
        assert partitions_of(keys, count, 0).tolist() == expected


@given(st.lists(st.one_of(st.none(), st.binary(max_size=90)), max_size=120), st.integers(0, 5))
@settings(max_examples=150)
def test_column_equals_scalar_also_sliced_and_with_nulls(
    keys: list[bytes | None], skip: int
) -> None:
    column = pa.array(keys, pa.binary()).slice(skip)
    kept = keys[skip:]
    chosen = partitions_of(column, 7, sticky=3).tolist()
    assert chosen == [3 if key is None else partition_of(key, 7) for key in kept]


def test_sticky_stays_until_a_batch_is_full_then_moves_uniformly() -> None:
    sticky = Sticky(1000, random.Random(5))
    partitions = range(6)
    first = sticky.take(partitions, 999)
    assert sticky.take(partitions, 1) == first
    counts: Counter[int] = Counter()
    for _ in range(599):
        counts[sticky.take(partitions, 1000)] += 1
    counts[first] += 1
    assert counts == dict.fromkeys(partitions, 100)


def test_sticky_uses_new_partitions_and_leaves_lost_ones() -> None:
    sticky = Sticky(10, random.Random(1))
    assert sticky.take([4], 5) == 4
    assert sticky.take([4, 5], 5) == 4, "a new partition does not end the turn"
    assert {sticky.take([4, 5], 10) for _ in range(2)} == {4, 5}
    assert sticky.take([7], 10) == 7
