"""The JVM's decoder beside Python's: the same rows, and no batch that Python refuses.

A damaged LZ4 frame may be read by one of them only: the JVM does not compare the frame's own
checksums, and liblz4 accepts a match that begins in front of the frame.  What the JVM refuses,
Python reads, and no damaged frame has the batch's checksum.

`python tests/spark/test_columnar_decoder.py 1000000` is a long run.
"""

from __future__ import annotations

import random
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from crc32c import crc32c
from java_compiler import needs_javac

from pk import errors
from pk.log import batch as batches
from pk.log import columns
from pk.sparkconnector.java import find_java

pytestmark = needs_javac
DECODED_MOST = 1 << 16
ROW = struct.Struct(">qq")
REFUSED = (errors.InvalidRecord, errors.CorruptBatch, errors.RecordTooLarge, errors.NewerFormat)


class Peer:
    """A JVM that decodes batches."""

    def __init__(self, classpath: str) -> None:
        self.java = subprocess.Popen(
            [find_java().command, "-Xmx256m", "-cp", classpath, "pk.reader.DecoderPeer"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def decode(self, raw: bytes) -> bytes | None:
        """Return the rows of a batch; None = refused."""
        assert self.java.stdin is not None
        assert self.java.stdout is not None
        self.java.stdin.write(struct.pack(">ii", DECODED_MOST, len(raw)) + raw)
        self.java.stdin.flush()
        answer = self.java.stdout.read(4)
        assert len(answer) == 4, "the JVM died"
        (size,) = struct.unpack(">i", answer)
        return None if size < 0 else self.java.stdout.read(size)

    def close(self) -> None:
        assert self.java.stdin is not None
        assert self.java.stdout is not None
        self.java.stdin.close()
        self.java.stdout.close()
        self.java.wait(30)


@pytest.fixture(scope="module")
def peer(java_peers) -> Iterator[Peer]:
    found = Peer(java_peers)
    yield found
    found.close()


def python_rows(raw: bytes) -> bytes | None:
    """Return what the peer returns, from Python's decoder."""
    try:
        header = batches.check(raw)
        found = columns.decode(
            raw, decoded_bytes_max=DECODED_MOST, timestamp_unit="us", header=header
        )
    except REFUSED:
        return None
    out = []
    times = found.column("timestamp").view("int64").to_pylist()
    names = ("offset", "key", "value", "headers")
    rows = zip(*(found.column(name).to_pylist() for name in names), strict=True)
    for at, (offset, key, value, headers) in enumerate(rows):
        out += [ROW.pack(offset, times[at]), text(key), text(value)]
        out.append(struct.pack(">i", len(headers) or -1))
        for pair in headers:
            out += [text(pair["key"].encode()), text(pair["value"])]
    return b"".join(out)


def text(value: bytes | None) -> bytes:
    return struct.pack(">i", -1) if value is None else struct.pack(">i", len(value)) + value


def random_batch(rng: random.Random) -> bytes:
    """Return a batch of any kind: nulls, headers, all timestamps, gaps, codecs, a horizon."""
    count = rng.choice((1, 2, 8, 9, 40, 200))

    def some(odds: float) -> list[bytes | None]:
        sizes = rng.choice(((0, 3), (5, 40), (0, 200)))
        return [
            None if rng.random() < odds else rng.randbytes(1) * rng.randint(*sizes)
            for _ in range(count)
        ]

    first = rng.choice((0, 1_700_000_000_000, -60_000_000_000_000))
    spread = rng.choice((0, 1000, 2**40))
    gaps = rng.choice((1, 1, 50))
    offsets = [rng.randint(0, 2**40)]
    for _ in range(count - 1):
        offsets.append(offsets[-1] + rng.randint(1, gaps))
    names = ("", "n", "größe", "x" * 40)
    headers = [
        [
            {"key": rng.choice(names), "value": rng.choice((None, b"", b"v" * 9))}
            for _ in range(rng.randint(0, 3))
        ]
        for _ in range(count)
    ]
    odds = rng.choice((0, 0.3, 1))
    fields = {
        "offset": pa.array(offsets, pa.int64()),
        "timestamp": pa.array([first + rng.randint(0, spread) for _ in range(count)], pa.int64()),
        "value": pa.array(some(odds), pa.binary()),
    }
    if rng.random() < 0.7:
        fields["key"] = pa.array(some(rng.choice((0, 0.3))), pa.binary())
    if rng.random() < 0.5:
        fields["headers"] = pa.array(headers, columns.HEADER_TYPE)
    parts = columns.encode(
        pa.record_batch(fields), codec=rng.choice(batches.CODECS), keep_offsets=True
    )
    raw = bytearray(b"".join(parts))
    if rng.random() < 0.2:
        raw[24] |= batches.LOG_APPEND_TIME
    return sealed(raw)


def sealed(raw: bytearray) -> bytes:
    """Return the batch with the checksum that its bytes have."""
    struct.pack_into("<I", raw, 20, crc32c(bytes(raw[batches.CRC_START :])))
    return bytes(raw)


def mutated(raw: bytes, rng: random.Random) -> bytes:
    """Return the batch with a few bytes changed, or cut, and a right checksum all the same."""
    found = bytearray(raw)
    kind = rng.random()
    if kind < 0.15 and len(found) > batches.HEADER_BYTES + 1:
        del found[rng.randint(batches.HEADER_BYTES, len(found) - 1) :]
        struct.pack_into("<i", found, 8, len(found))
    elif kind < 0.25:
        found += rng.randbytes(rng.randint(1, 9))
        struct.pack_into("<i", found, 8, len(found))
    else:
        begin = 0 if kind < 0.5 else min(batches.HEADER_BYTES, len(found) - 1)
        for _ in range(rng.randint(1, 3)):
            at = rng.randint(begin, min(len(found), begin + rng.choice((8, 64, 1 << 20))) - 1)
            found[at] = rng.choice((0, 255, 127, 128, found[at] ^ 1 << rng.randint(0, 7)))
    return sealed(found)


def compare(peer: Peer, raw: bytes, *, changed: bool) -> bool:
    """Check that the JVM agrees with Python about a batch; return whether Python accepts it."""
    expected, found = python_rows(raw), peer.decode(raw)
    if changed and raw[24] & 3 == 1 and (expected is None or found is None):
        return expected is not None
    assert found == expected, raw.hex()
    return expected is not None


def campaign(peer: Peer, seed: int, count: int) -> tuple[int, int]:
    """Compare `count` mutations of random batches; return how many were accepted and refused."""
    rng = random.Random(seed)
    found = [0, 0]
    for number in range(count):
        if number % 20 == 0:
            raw = random_batch(rng)
            assert compare(peer, raw, changed=False), raw.hex()
        found[not compare(peer, mutated(raw, rng), changed=True)] += 1
    return found[0], found[1]


def test_both_decoders_return_the_same_rows_and_refuse_the_same_batches(peer: Peer) -> None:
    """Rules S7 and L13, on batches of every kind and on damaged ones with a right checksum."""
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


if __name__ == "__main__":
    import tempfile

    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.spark.conftest import compile_peers

    with tempfile.TemporaryDirectory() as scratch:
        one = Peer(compile_peers(Path(scratch)))
        wanted, start = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
        for number in range(start, start + -(-wanted // 100_000)):
            print(number, campaign(one, number, min(wanted, 100_000)), flush=True)
        one.close()
