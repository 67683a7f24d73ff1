"""The JVM's decoder beside Python's: the same rows, and no batch that Python refuses.

`make columnar-fuzz` is the long run (columnar_fuzz.py says what is compared).
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from java_compiler import needs_javac

from tests.spark.columnar_fuzz import Peer, campaign, random_batch

pytestmark = needs_javac


@pytest.fixture(scope="module")
def peer(java_peers) -> Iterator[Peer]:
    found = Peer(java_peers)
    yield found
    found.close()


def test_both_decoders_return_the_same_rows_and_refuse_the_same_batches(peer: Peer) -> None:
    """Rules S7 and L13, on batches and heads of every kind and on damaged ones."""
    accepted, refused = campaign(peer, 5, 2_000)
    assert accepted > 200
    assert refused > 1_000


def test_the_checksum_comes_first(peer: Peer) -> None:
    """Rule S7: one flipped bit anywhere behind the offsets is damage."""
    raw = random_batch(random.Random(7))
    assert peer.decode(raw)
    for at in range(16, len(raw)):
        flipped = bytearray(raw)
        flipped[at] ^= 1 << at % 8
        assert peer.decode(bytes(flipped)) is None, at
