"""The JVM and a broker that is cut off, silent, damaged or hostile: it stops at the right position.

Python continues there (rule S6), so a wrong position would lose rows or return them twice.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from java_compiler import needs_javac

from pk.log import batch as batches
from pk.log import columns
from pk.settings import CONSUMER
from pk.sparkconnector import columnar_jar, plan, prepared_fetch
from pk.sparkconnector.java import find_java
from pk.sparkconnector.offsets import Range
from pk.sparkconnector.planner import Task
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import head_of

pytestmark = needs_javac
RANGE = Range("events", "id", 0, 3, 12)

Script = Callable[[socket.socket], None]


@pytest.fixture(scope="module")
def jvm(java_peers) -> Iterator[subprocess.Popen[str]]:
    # too little memory for what a hostile frame announces
    running = subprocess.Popen(
        [find_java().command, "-Xmx64m", "-cp", java_peers, "pk.reader.HotPeer"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    yield running
    assert running.stdin is not None
    assert running.stdout is not None
    running.stdin.close()
    running.stdout.close()
    running.wait(30)


@pytest.fixture
def read(jvm) -> Callable[[Script], tuple[str, int, list[int]]]:
    """`read(script)`: how the JVM's read of RANGE ended, its position, the offsets it returned."""

    def run(script: Script) -> tuple[str, int, list[int]]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            thread = threading.Thread(target=serve, args=(server, script))
            thread.start()
            address = f"127.0.0.1:{server.getsockname()[1]}"
            settings = CONSUMER.resolve({})
            details = prepared_fetch.details(address, RANGE, 1, wire.Hello(protocol=1), settings)
            assert details is not None
            jvm.stdin.write(plan.plan_of([Task(RANGE, True)], {RANGE: details}) + "\n")
            jvm.stdin.flush()
            how, position, *offsets = jvm.stdout.readline().split()
            thread.join(30)
        return how, int(position), list(map(int, offsets))

    return run


def serve(server: socket.socket, script: Script) -> None:
    """Answer the opening and the hello, take the fetch, and run the script."""
    stream, _ = server.accept()
    with stream:
        try:
            assert stream.recv(5, socket.MSG_WAITALL) == b"PKS1F"
            stream.sendall(b"PKS1")
            take(stream)
            stream.sendall(framed(frames.encode(head_of(wire.HelloReply(protocol=1)))))
            assert take(stream).fetch.positions[0].fetch_offset == RANGE.start
            script(stream)
        except ConnectionError:
            pass  # the JVM had enough


def take(stream: socket.socket) -> Any:
    (size,) = struct.unpack("<I", stream.recv(4, socket.MSG_WAITALL))
    return frames.decode(stream.recv(size, socket.MSG_WAITALL)).head


def framed(frame: bytes) -> bytes:
    return struct.pack("<I", len(frame)) + frame


def batch(start: int, count: int, **options: Any) -> bytes:
    raw = b"".join(columns.encode_lists([b"v"] * count, **options))
    return struct.pack("<q", start) + raw[8:]


def reply(next_offset: int, *parts: bytes, size: int | None = None, **fields: Any) -> bytes:
    """Return a frame with batches, which says that the read goes on at `next_offset`."""
    payload = b"".join(parts)
    found = wire.FetchReply()
    each = found.partitions.add(position_id=1, next_offset=next_offset, dense=True)
    each.payload_bytes = len(payload) if size is None else size
    for aborted in fields.get("aborted", ()):
        each.aborted.add(producer_id=aborted[0], first_offset=aborted[1], last_offset=aborted[2])
    return framed(frames.encode(head_of(found), [payload]))


def test_a_range_is_clipped_and_aborted_batches_are_dropped(read) -> None:
    """The first batch begins below the range, the last one ends behind it; one is aborted."""
    producer = {"producer_id": 7, "producer_epoch": 0, "base_sequence": 0, "transactional": True}
    first = reply(8, batch(0, 5), batch(5, 3, **producer), aborted=[(7, 5, 7)])

    def script(stream: socket.socket) -> None:
        stream.sendall(first)
        stream.sendall(reply(14, batch(8, 2, codec="zstd"), batch(10, 4, codec="lz4")))

    assert read(script) == ("end", 14, [3, 4, 8, 9, 10, 11])


def damaged(part: bytes, at: int = -1) -> bytes:
    found = bytearray(part)
    found[at] ^= 1
    return bytes(found)


@pytest.mark.parametrize(
    ("what", "sent", "position", "offsets"),
    [
        ("a flipped bit in a body", reply(12, batch(3, 3), damaged(batch(6, 6))), 6, [3, 4, 5]),
        ("a batch that is cut off", reply(12, batch(3, 3), batch(6, 6)[:-1]), 6, [3, 4, 5]),
        ("a header that is none", reply(12, batch(3, 3), damaged(batch(6, 6), 16)), 6, [3, 4, 5]),
        ("a gap in a dense reply", reply(12, batch(3, 3), batch(7, 5)), 6, [3, 4, 5]),
        ("an overlap", reply(12, batch(3, 3), batch(5, 7)), 6, [3, 4, 5]),
        ("a payload behind the frame", reply(12, batch(3, 9), size=10**6), 3, []),
        ("a position that goes back", reply(2, batch(0, 3)), 3, []),
        ("a frame of 2 GB", struct.pack("<I", 2**31 - 1), 3, []),
        ("a frame of 200 MB that never comes", struct.pack("<I", 200 << 20) + b"x" * 99, 3, []),
        ("a head behind the frame", framed(struct.pack("<I", 99) + b"xx"), 3, []),
        ("a head that is no message", framed(struct.pack("<I", 2) + b"\xff\xff"), 3, []),
        ("an error", framed(frames.encode(wire.Head(error=wire.Error(code=1)))), 3, []),
        ("nothing", b"", 3, []),
    ],
)
def test_the_jvm_stops_where_python_has_to_go_on(read, what, sent, position, offsets) -> None:
    """Rules S5 to S7: whatever the broker sends, rows below the position were returned once."""
    assert read(lambda stream: stream.sendall(sent)) == ("failed", position, offsets), what


def test_a_silent_broker_is_left_to_python(read) -> None:
    def script(stream: socket.socket) -> None:
        stream.sendall(reply(6, batch(3, 3)))
        stream.recv(1)  # until the JVM closes the stream

    assert read(script) == ("failed", 6, [3, 4, 5])


def test_a_plan_that_is_not_for_this_jar_is_no_plan(jvm) -> None:
    """Rule S8: of another version, for another build, cut off, or with a reason of Python."""
    text = plan.plan_of([Task(RANGE, True)])
    build = columnar_jar.build_of_sources()
    refused = {
        text.replace('"v":1', '"v":2'): "its plan is of version 2, this jar knows 1",
        text.replace(build, "0123"): f"its jar is of build {build}, the Python package expects 0123"
        " (pk jars prints the right one)",
        text[:-9]: "its plan is not JSON",
        text.replace('"sections"', '"why":"too few","sections"'): "too few",
    }
    for sent, why in refused.items():
        jvm.stdin.write(sent + "\n")
        jvm.stdin.flush()
        assert jvm.stdout.readline() == f"refused {why}\n"


def test_credit_comes_back_for_what_was_read(read) -> None:
    granted = []

    def script(stream: socket.socket) -> None:
        big = b"".join(columns.encode_lists([b"x" * (3 << 20)]))
        for offset in range(3, 12):
            stream.sendall(reply(offset + 1, struct.pack("<q", offset) + big[8:]))
            if offset < 11:
                granted.append(take(stream).fetch.credit_bytes)

    how, position, offsets = read(script)
    assert (how, position, offsets) == ("end", 12, list(range(3, 12)))
    assert granted == [(3 << 20) + batches.HEADER_BYTES + 4] * 8
