"""Runs docs/REPAIR.md's commands: each damage is made, reported, and repaired as the page says.

Only places change: the data directory, the broker's address, and names of topics and files that an
operator would copy from the output of pk.

The page's sections on missing rows, metadata, disks and clocks name commands in their text and have
no code block.  Other tests run these: test_rows_missing.py repairs and accepts (by AdminClient),
test_cluster.py runs `pk server format` and `pk quorum`, test_clocks.py runs `pk brokers
confirm-clock`.  Restoring `_delta_log` or a metadata directory from a backup, freeing space and
setting a clock are no commands of pk.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pk import AdminClient, Consumer, Producer, TopicPartition, errors
from pk.cli.embedded import EmbeddedServer
from pk.clock import block_s, monotonic_s

pytestmark = pytest.mark.integration

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "REPAIR.md").read_text()
BIN = Path(sys.executable).parent
PATIENCE_S = 60
TOPIC = "flights"


def commands(section: str) -> list[str]:
    """Return the lines of the bash blocks below a heading, one per command."""
    text = PAGE.split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    found = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    return [line for block in found for line in block.splitlines()]


def run(command: str, data: Path, **places: str) -> str:
    """Run one command of the page; return its output."""
    for name, place in {"/var/lib/pk": str(data), **places}.items():
        command = command.replace(name, place)
    done = subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"},
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def fill(server: EmbeddedServer, count: int) -> None:
    """Produce records `<n>` and more bytes, one per batch."""
    with Producer(server.address, linger_ms=0) as producer:
        for number in range(count):
            value = b"<%03d>" % number + bytes(20_000)
            producer.send(TOPIC, value, partition=0).result(PATIENCE_S)


def numbers(server: EmbeddedServer, count: int) -> list[int]:
    """Return the next records from the first offset on."""
    found: list[int] = []
    deadline = monotonic_s() + PATIENCE_S
    with Consumer(server.address, auto_offset_reset="earliest") as consumer:
        consumer.assign([TopicPartition(TOPIC, 0)])
        while len(found) < count:
            assert monotonic_s() < deadline, (found, server.tail())
            found += [int((record.value or b"")[1:4]) for record in consumer.poll(0.5)]
    return found


def flip(path: Path, wanted: bytes) -> None:
    """Flip one bit behind `wanted` in a file."""
    raw = path.read_bytes()
    place = raw.index(wanted) + len(wanted) + 100
    with path.open("r+b") as out:
        out.seek(place)
        out.write(bytes([raw[place] ^ 0x10]))


def until(what: str, holds: Callable[[], bool], server: EmbeddedServer) -> None:
    deadline = monotonic_s() + PATIENCE_S
    while not holds():
        assert monotonic_s() < deadline, f"{what}\n{server.tail()}"
        block_s(0.1)


def test_a_damaged_batch_of_the_only_copy(tmp_path: Path) -> None:
    """The copier waits in front of it: no record behind the range is tiered until it is repaired,
    and then the table continues behind the gap.
    """
    look, go_past = commands("A damaged batch: the only copy")
    tier = (tmp_path / "tier").as_uri()
    (tmp_path / "tier").mkdir()
    with EmbeddedServer(tmp_path, tier_url=tier, settings={"tier_max_lag_ms": 3_600_000}) as server:
        with AdminClient(server.address) as admin:
            admin.create_topic(TOPIC, 1, {"retention_ms": -1})
        fill(server, 8)
    (path,) = (server.data / "topics" / f"{TOPIC}-0").glob("*.log")
    flip(path, b"<005>")
    server.settings["tier_max_lag_ms"] = 200
    with server, AdminClient(server.address) as admin:
        until(
            "the copier says nothing",
            lambda: isinstance(admin.describe_topics([TOPIC])[0].error, errors.CorruptLog),
            server,
        )
        (described,) = admin.describe_topics([TOPIC])
        assert described.error is not None
        assert re.search(
            r"offsets \[5, 6\) are damaged: .*; stop the broker and run pk log repair",
            described.error.message,
        )
        assert described.tiered_end <= 5
        out = run(look, server.data)
        assert re.search(rf"{TOPIC}-0 +5 +6 ", out)
        assert "nothing was changed" in out
        assert numbers(server, 5) == list(range(5))
    assert "gaps now" in run(go_past, server.data)
    with server, AdminClient(server.address) as admin:
        until(
            "the table does not go on",
            lambda: admin.describe_topics([TOPIC])[0].tiered_end == 8,
            server,
        )
        assert admin.describe_topics([TOPIC])[0].error is None
        assert numbers(server, 7) == [0, 1, 2, 3, 4, 6, 7]
        fill(server, 1)
        assert numbers(server, 8)[-1] == 0
    assert run(look, server.data).strip() == "no damaged range"


def test_a_lost_identity(tmp_path: Path) -> None:
    """Both copies of it are lost: the log is kept, offline, until an operator adopts it."""
    look, adopt, _ = commands("The identity of a log")
    with EmbeddedServer(tmp_path) as server:
        with AdminClient(server.address) as admin:
            admin.create_topic(TOPIC, 1, {"retention_ms": -1})
        fill(server, 4)
    (server.data / "topics" / f"{TOPIC}-0" / "partition.json").unlink()
    (server.data / "partition-identity-checkpoint").unlink()
    with server, AdminClient(server.address) as admin:
        (described,) = admin.describe_topics([TOPIC])
        assert isinstance(described.error, errors.LogUnidentified)
        (topic_id,) = {described.topic_id}
        assert f"{TOPIC}-0" in run(look, server.data)
    (given,) = re.findall(r"--topic-id (\S+)", adopt)
    run(adopt, server.data, **{given: topic_id})
    with server:
        assert numbers(server, 4) == [0, 1, 2, 3]
        fill(server, 1)
        assert numbers(server, 5) == [0, 1, 2, 3, 0]


def test_a_log_that_is_given_up(tmp_path: Path) -> None:
    """The same damage with the other decision: the only replica begins empty, and takes records."""
    _, _, discard = commands("The identity of a log")
    with EmbeddedServer(tmp_path) as server:
        with AdminClient(server.address) as admin:
            admin.create_topic(TOPIC, 1, {"retention_ms": -1})
        fill(server, 4)
    (server.data / "topics" / f"{TOPIC}-0" / "partition.json").unlink()
    (server.data / "partition-identity-checkpoint").unlink()
    with server, AdminClient(server.address) as admin:
        (described,) = admin.describe_topics([TOPIC])
        assert isinstance(described.error, errors.LogUnidentified)
    run(discard, server.data)
    with server, AdminClient(server.address) as admin:
        fill(server, 2)
        (described,) = admin.describe_topics([TOPIC])
        assert (described.error, described.log_end) == (None, 2)
        assert numbers(server, 2) == [0, 1]


def test_a_data_file_that_is_restored(tmp_path: Path) -> None:
    """A file of the table is cut short, and no other copy has its rows: the damage is listed until
    the object is back under its name.
    """
    (describe,) = commands("A data file of a table")
    (tmp_path / "tier").mkdir()
    quick = {"tier_max_lag_ms": 100, "log_retention_check_interval_ms": 100}
    cold = {
        "retention_ms": -1, "segment_bytes": 65_536, "local_retention_bytes": 0,
        "tier_file_bytes": 65_536, "local_drop_delay_ms": 0, "file_delete_delay_ms": 0,
    }  # fmt: skip
    with (
        EmbeddedServer(tmp_path, tier_url=(tmp_path / "tier").as_uri(), settings=quick) as server,
        AdminClient(server.address) as admin,
    ):
        described = describe + f" --bootstrap {server.address}"
        admin.create_topic(TOPIC, 1, cold)
        fill(server, 12)
        until(
            "nothing leaves the local log",
            lambda: admin.describe_topics([TOPIC])[0].local_log_start >= 6,
            server,
        )
        assert "status: ok" in run(described, server.data)
        file = next((tmp_path / "tier").glob(f"{TOPIC}/*/partition=0/{0:020d}-*.parquet"))
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        place = TopicPartition(TOPIC, 0)
        with Consumer(server.address, auto_offset_reset="earliest") as consumer:
            consumer.assign([place])
            with pytest.raises(errors.DamagedTierFile, match=file.name):
                consumer.poll(PATIENCE_S)
        told = run(described, server.data)
        assert "status: damaged" in told
        assert file.name in told
        file.write_bytes(whole)
        until(
            "it is not found to be whole",
            lambda: "status: ok" in run(described, server.data),
            server,
        )
        assert file.name not in run(described, server.data)
        assert numbers(server, 12) == list(range(12))
