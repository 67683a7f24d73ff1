"""The files of a log's first segment are removed while its broker is down (rule L9)."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pk import AdminClient, Consumer, Producer, TopicPartition, errors
from pk.cli.embedded import EmbeddedServer
from pk.clock import block_s, monotonic_s

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "abuse"))

import _replica_damage as replica_damage

pytestmark = pytest.mark.integration

PK = Path(sys.executable).parent / "pk"
PATIENCE_S = 60
TOPIC = "flights"
PLACE = TopicPartition(TOPIC, 0)
COUNT = 20
SETTINGS = {"retention_ms": -1, "segment_bytes": 65_536}


def fill(server: EmbeddedServer, start: int, count: int) -> None:
    """Produce one record per batch, about three batches per segment."""
    with Producer(server.address, linger_ms=0) as producer:
        for number in range(start, start + count):
            value = b"%03d" % number + bytes(20_000)
            stored = producer.send(TOPIC, value, partition=0).result(PATIENCE_S)
            assert stored.offset == number


def lose_the_first(folder: Path) -> int:
    """Remove every file of the first segment; return where the log begins then."""
    bases = sorted(path.stem for path in folder.glob("*.log"))
    for path in folder.glob(f"{bases[0]}.*"):
        path.unlink()
    return int(bases[1])


def read(server: EmbeddedServer, end: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Read from the beginning: the numbers, and the ranges that the consumer reports as lost."""
    got: list[int] = []
    lost: list[tuple[int, int]] = []
    deadline = monotonic_s() + PATIENCE_S
    with Consumer(server.address, auto_offset_reset="earliest") as consumer:
        consumer.assign([PLACE])
        while consumer.position(PLACE, timeout_s=PATIENCE_S) < end:
            assert monotonic_s() < deadline, server.tail()
            try:
                got += [int((each.value or b"")[:3]) for each in consumer.poll(0.5)]
            except errors.DataLoss as told:
                lost.append((int(told.details["offset"]), int(told.details["next_offset"])))
    return got, lost


def pk_log(server: EmbeddedServer, command: str, *options: str) -> Any:
    done = subprocess.run(
        [PK, "log", command, server.data, "--json", *options],
        capture_output=True, text=True, timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def ranges(server: EmbeddedServer, *options: str) -> list[tuple[int, int]]:
    """Return the ranges that `pk log repair` shows."""
    found = pk_log(server, "repair", *options)["ranges"]
    return [(each["offset"], each["next_offset"]) for each in found]


@pytest.mark.parametrize("started", [False, True])
def test_of_the_only_copy_it_is_a_damaged_range(tmp_path: Path, started: bool) -> None:
    """As with a missing middle segment, the range is reported once, listed, read around and
    repaired, whether or not a broker has met it.
    """
    server = EmbeddedServer(tmp_path)
    with server:
        with AdminClient(server.address) as admin:
            admin.create_topic(TOPIC, 1, SETTINGS)
        fill(server, 0, COUNT)
    begins = lose_the_first(server.data / "topics" / f"{TOPIC}-0")
    end = COUNT
    if started:
        with server:
            assert read(server, end) == ([*range(begins, end)], [(0, begins)])
            with AdminClient(server.address) as admin:
                (state,) = admin.describe_topics([TOPIC])
            assert isinstance(state.error, errors.CorruptLog)
            assert f"{TOPIC}-0: offsets [0, {begins}) are damaged" in state.error.message
            fill(server, end, 1)
            end += 1
            server.kill("broker")
            assert read(server, end) == ([*range(begins, end)], [(0, begins)])
    (listed,) = pk_log(server, "list")
    assert (listed["status"], listed["damaged_ranges"]) == ("damaged", 1)
    assert f"offsets [0, {begins}) are damaged" in listed["problem"]
    assert ranges(server) == [(0, begins)]
    assert ranges(server, "--yes") == [(0, begins)]
    assert ranges(server) == []
    with server:
        fill(server, end, 1)
        assert read(server, end + 1) == ([*range(begins, end + 1)], [])


def test_the_table_has_what_was_copied_before(tmp_path: Path) -> None:
    """A tiered topic is read from its table; records that were not copied yet are lost, and the
    tier reports the range that it waits in front of.
    """
    (tmp_path / "tier").mkdir()
    url = (tmp_path / "tier").as_uri()
    settings = {**SETTINGS, "tier_max_lag_ms": 100, "tier_file_bytes": 32_768}
    server = EmbeddedServer(tmp_path / "node", tier_url=url)
    folder = server.data / "topics" / f"{TOPIC}-0"
    with server, AdminClient(server.address) as admin:
        admin.create_topic(TOPIC, 1, settings)
        fill(server, 0, COUNT)
        deadline = monotonic_s() + PATIENCE_S
        while admin.describe_topics([TOPIC])[0].tiered_end < COUNT:
            assert monotonic_s() < deadline, server.tail()
            block_s(0.1)
    assert lose_the_first(folder) > 0
    assert pk_log(server, "list")[0]["status"] == "ok"
    with server:
        assert read(server, COUNT) == ([*range(COUNT)], [])
        assert "damaged_range" not in server.log.read_text()
    hot = EmbeddedServer(server.directory)  # without its tier nothing more is copied
    with hot:
        fill(hot, COUNT, COUNT)
    names = sorted(path.stem for path in folder.glob("*.log"))
    begins = max(int(name) for name in names if int(name) > COUNT)
    for name in names:
        if int(name) < begins:
            for path in folder.glob(f"{name}.*"):
                path.unlink()
    with server, AdminClient(server.address) as admin:
        got, lost = read(server, 2 * COUNT)
        assert lost == [(COUNT, begins)]
        assert got == [*range(COUNT), *range(begins, 2 * COUNT)]
        problem = admin.describe_tier(TOPIC).problem
        assert problem is not None
        assert f"{TOPIC}-0: offsets [{COUNT}, {begins}) are damaged" in problem.message
    assert ranges(server, "--yes") == [(COUNT, begins)]
    with server, AdminClient(server.address) as admin:
        assert read(server, 2 * COUNT) == (got, [])
        deadline = monotonic_s() + PATIENCE_S
        while admin.describe_topics([TOPIC])[0].tiered_end < 2 * COUNT:
            assert monotonic_s() < deadline, server.tail()
            block_s(0.1)
        assert read(server, 2 * COUNT) == (got, [])


def test_among_three_replicas_the_one_without_it_is_made_anew(tmp_path: Path) -> None:
    (verdict,) = replica_damage.run(random.Random(5), tmp_path / "three", 1, "first segment")
    assert verdict.kept, verdict
