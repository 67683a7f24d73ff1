"""The JVM's decoder beside Python's, on batches and heads of frames that were changed at random.

    python tests/spark/columnar_fuzz.py --mutations 10000000 [--seed N] [--minutes M] [--workers W]

Both must return the same rows, and the JVM must refuse every batch that Python refuses.  Nineteen
of twenty inputs are mutations of a random batch, with a checksum that fits; the others are of heads
of replies.  A JVM that dies, or rows that differ, end the campaign with the input and the seed.

A campaign is a list of portions.  Each has a seed of its own, and a line in
build/columnar-fuzz.jsonl when it is done; a campaign of the same seed, on the same build of the
jar, goes on behind them.

A damaged LZ4 frame may be read by one of them only: the JVM does not compare the frame's own
checksums, and liblz4 accepts a match that begins in front of the frame.  What the JVM refuses,
Python reads, and no damaged frame has the batch's checksum.  A head may be refused by one of them
only, too: the JVM does not look at fields that it does not need, and refuses what it does not know.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from crc32c import crc32c

from pk import errors
from pk.log import batch as batches
from pk.log import columns
from pk.sparkconnector.java import find_java
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import head_of

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "build" / "columnar-fuzz.jsonl"
DECODED_MOST = 1 << 16
PORTION = 20_000
GROUP = 100
ROW = struct.Struct(">qq")
REFUSED = (errors.InvalidRecord, errors.CorruptBatch, errors.RecordTooLarge, errors.NewerFormat)


class Peer:
    """A JVM that decodes batches and heads."""

    def __init__(self, classpath: str) -> None:
        self.java = subprocess.Popen(
            [find_java().command, "-Xmx256m", "-cp", classpath, "pk.reader.DecoderPeer"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def decode(self, raw: bytes) -> bytes | None:
        """Return the rows of a batch; None = refused."""
        (found,) = self.decode_all([(DECODED_MOST, raw)])
        return found

    def decode_all(
        self, inputs: Sequence[tuple[int, bytes]], meanwhile: Callable[[], object] = lambda: None
    ) -> list[bytes | None]:
        """Return what the JVM makes of each input: how much a batch may decode to (0 = a head), and
        its bytes.  Calls `meanwhile` while the JVM works.
        """
        assert self.java.stdin is not None
        assert self.java.stdout is not None
        sent = b"".join(struct.pack(">ii", most, len(raw)) + raw for most, raw in inputs)
        # the answers may be more than a pipe holds, and so may be the inputs
        writer = threading.Thread(target=self._send, args=(sent,))
        writer.start()
        meanwhile()
        found = [self._answer() for _ in inputs]
        writer.join()
        return found

    def _send(self, sent: bytes) -> None:
        assert self.java.stdin is not None
        try:
            self.java.stdin.write(sent)
            self.java.stdin.flush()
        except BrokenPipeError:
            pass  # the missing answer reports it

    def _answer(self) -> bytes | None:
        assert self.java.stdout is not None
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


# -- batches ---------------------------------------------------------------------------------------


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


# -- heads of replies ------------------------------------------------------------------------------


def python_parts(raw: bytes) -> bytes | None:
    """Return what the peer returns for a head, from Python's parser; None = no reply to follow."""
    try:
        head = frames.decode(struct.pack("<I", len(raw)) + raw).head
    except errors.CorruptBatch:
        return None
    if head.HasField("error") or head.WhichOneof("body") != "fetch_reply":
        return None
    numbers: list[int] = []
    for each in head.fetch_reply.partitions:
        if each.HasField("error") or each.HasField("diverging"):
            return None
        numbers += [each.position_id, each.next_offset, each.payload_bytes, each.dense]
        numbers.append(len(each.aborted))
        for one in each.aborted:
            numbers += [one.producer_id, one.first_offset, one.last_offset]
    return struct.pack(f">{len(numbers)}q", *numbers)


def random_head(rng: random.Random) -> bytes:
    """Return the head of a reply, as brokers send it."""
    reply = wire.FetchReply()
    for _ in range(rng.choice((0, 1, 1, 3))):
        each = reply.partitions.add(
            topic_id="0" * 32, partition=rng.randint(0, 9), position_id=rng.randint(1, 3),
            high_watermark=rng.randint(0, 2**62), next_offset=rng.randint(0, 2**62),
            payload_bytes=rng.randint(0, 2**31 - 1), dense=rng.random() < 0.5,
            cold=rng.random() < 0.1,
        )  # fmt: skip
        for _ in range(rng.choice((0, 0, 2))):
            each.aborted.add(
                producer_id=rng.randint(-1, 2**40), first_offset=rng.randint(0, 2**40),
                last_offset=rng.randint(0, 2**62),
            )  # fmt: skip
        if rng.random() < 0.05:
            each.error.code = rng.randint(1, 50)
    return head_of(reply).SerializeToString()


def mutated_head(raw: bytes, rng: random.Random) -> bytes:
    found = bytearray(raw or b"\0")
    kind = rng.random()
    if kind < 0.2:
        del found[rng.randint(0, len(found) - 1) :]
    elif kind < 0.3:
        at = rng.randint(0, len(found))
        found[at:at] = rng.randbytes(rng.randint(1, 9))
    else:
        for _ in range(rng.randint(1, 3)):
            at = rng.randint(0, len(found) - 1)
            found[at] = rng.choice((0, 255, 127, 128, found[at] ^ 1 << rng.randint(0, 7)))
    return bytes(found)


def _same_parts(expected: bytes, found: bytes) -> bool:
    """Compare numbers as Python's parser keeps them: some of them have 32 bits."""
    if len(expected) != len(found):
        return False
    pairs = zip(struct.iter_unpack(">q", expected), struct.iter_unpack(">q", found), strict=True)
    return all(ours == theirs or ours == theirs & 0xFFFFFFFF for (ours,), (theirs,) in pairs)


# -- the campaign ----------------------------------------------------------------------------------


class Input(NamedTuple):
    """What both decoders get."""

    raw: bytes
    is_head: bool
    changed: bool


def inputs(rng: random.Random, count: int) -> list[Input]:
    """Return `count` mutations, and before each twentieth what they were made of."""
    found: list[Input] = []
    whole, is_head = b"", False
    for number in range(count):
        if number % 20 == 0:
            is_head = rng.random() < 0.05
            whole = random_head(rng) if is_head else random_batch(rng)
            found.append(Input(whole, is_head, False))
        changed = mutated_head(whole, rng) if is_head else mutated(whole, rng)
        found.append(Input(changed, is_head, True))
    return found


def agree(one: Input, expected: bytes | None, found: bytes | None) -> bool:
    """Return whether the JVM may make this of the input, where Python makes `expected` of it."""
    if one.is_head:
        if expected is None or found is None:
            return one.changed or expected == found
        return _same_parts(expected, found)
    if not one.changed and expected is None:
        return False
    if one.changed and one.raw[24] & 3 == 1 and None in (expected, found):
        return True
    return found == expected


def campaign(peer: Peer, seed: int, count: int) -> tuple[int, int]:
    """Compare `count` mutations; return how many the JVM accepted and refused."""
    rng = random.Random(seed)
    accepted = refused = 0
    for first in range(0, count, GROUP):
        group = inputs(rng, min(GROUP, count - first))
        expected: list[bytes | None] = []

        def ours(group: list[Input] = group, into: list[bytes | None] = expected) -> None:
            into += [python_parts(e.raw) if e.is_head else python_rows(e.raw) for e in group]

        sent = [(0 if each.is_head else DECODED_MOST, each.raw) for each in group]
        for one, found, want in zip(group, peer.decode_all(sent, ours), expected, strict=True):
            assert agree(one, want, found), f"seed {seed}, head {one.is_head}: {one.raw.hex()}"
            accepted += one.changed and found is not None
            refused += one.changed and found is None
    return accepted, refused


_peer: Peer | None = None


def _begin(classpath: str) -> None:
    global _peer
    _peer = Peer(classpath)


def _portion(seed: int, count: int) -> tuple[int, int]:
    assert _peer is not None
    return campaign(_peer, seed, count)


def _done(build: str, seed: int) -> dict[int, dict[str, Any]]:
    """Return the lines of this campaign's portions, by their seeds."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    found = [json.loads(line) for line in lines]
    mine = [each for each in found if (each["build"], each["campaign"]) == (build, seed)]
    return {each["seed"]: each for each in mine}


def _run(given: argparse.Namespace, classpath: str, build: str) -> int:
    """Run the missing portions; returns how many mutations the campaign has in all."""
    done = _done(build, given.seed)
    portions = range(-(-given.mutations // PORTION))
    # a portion's seed depends on the campaign's and on its number alone
    left = [seed for seed in (given.seed * 1_000_003 + n for n in portions) if seed not in done]
    until = time.monotonic() + 60 * given.minutes
    total = sum(each["mutations"] for each in done.values())
    running: dict[Future[tuple[int, int]], int] = {}
    with (
        ProcessPoolExecutor(given.workers, initializer=_begin, initargs=(classpath,)) as pool,
        RESULTS.open("a") as out,
    ):
        while running or (left and time.monotonic() < until):
            while left and len(running) < given.workers and time.monotonic() < until:
                seed = left.pop(0)
                running[pool.submit(_portion, seed, PORTION)] = seed
            for one in wait(running, return_when=FIRST_COMPLETED).done:
                seed = running.pop(one)
                accepted, refused = one.result()
                total += PORTION
                line = {"build": build, "campaign": given.seed, "seed": seed}
                line |= {"mutations": PORTION, "accepted": accepted, "refused": refused}
                out.write(json.dumps(line) + "\n")
                out.flush()
                print(f"{total:12,} of {given.mutations:,}", flush=True)
    return total


def main() -> int:
    """Run a campaign; returns 1 if the decoders disagree."""
    sys.path.insert(0, str(ROOT))
    from pk.sparkconnector import columnar_jar
    from tests.spark.conftest import compile_peers

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--mutations", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no portion after that")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    if given.seed is None:
        given.seed = random.randrange(1 << 20)
    print(f"SEED {given.seed}", flush=True)
    RESULTS.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pk-columnar-fuzz-") as folder:
        path = compile_peers(Path(folder))
        build = columnar_jar.build_of_sources()
        try:
            total = _run(given, path, build)
        except AssertionError as trouble:
            print(f"the decoders disagree: {trouble}")
            return 1
    print(f"{total:,} mutations, and the decoders agree (jar of build {build})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
