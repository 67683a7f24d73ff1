"""Damage in the metadata log: no SYNCED record is cut away, and every cut is logged (raft/recovery
O2).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pk import AdminClient, Producer, errors
from pk.cli.embedded import EmbeddedServer

pytestmark = pytest.mark.integration


def metadata(server: EmbeddedServer) -> Path:
    """Return the active segment of the metadata log."""
    return sorted((server.data / "metadata" / "__cluster_metadata-0").glob("*.log"))[-1]


def served(server: EmbeddedServer) -> list[str]:
    """Return the topics that the node serves, once it has created one more."""
    with server, AdminClient(server.address) as admin:
        names = sorted(topic.name for topic in admin.list_topics())
        admin.create_topic(f"topic-{len(names)}")
        return names


def test_a_flipped_bit_after_a_clean_stop_is_reported_and_cuts_nothing(tmp_path: Path) -> None:
    """raft/recovery O2: a clean stop notes how far the log is SYNCED."""
    server = EmbeddedServer(tmp_path / "node")
    assert served(server) == []
    assert served(server) == ["topic-0"]
    log = metadata(server)
    good = log.read_bytes()
    raw = bytearray(good)
    raw[-20] ^= 1
    log.write_bytes(bytes(raw))
    with pytest.raises(errors.CorruptLog, match="damaged"):
        server.start()
    assert log.read_bytes() == bytes(raw)
    log.write_bytes(good)
    assert served(server) == ["topic-0", "topic-1"]
    assert "BUG" not in server.log.read_text(), server.tail()


def test_a_torn_tail_after_a_kill_is_cut_with_its_range_in_the_log(tmp_path: Path) -> None:
    """Every cut is logged in one line: the bytes from and to, and the offset."""
    server = EmbeddedServer(tmp_path / "node")
    assert served(server) == []
    with server:
        server.kill("supervisor")
    log = metadata(server)
    size = log.stat().st_size
    with log.open("ab") as out:
        out.write(b"\xff" * 50)
    assert served(server) == ["topic-0"]
    (cut,) = [line for line in server.log.read_text().splitlines() if "metadata_log_cut" in line]
    assert f"cut from {size + 50} to {size} bytes, at offset " in cut


def test_a_server_whose_directories_vanish_ends_without_a_bug(tmp_path: Path) -> None:
    """Removed directories are no bug of the program: it ends as it does with a failed disk."""
    server = EmbeddedServer(tmp_path / "node")
    with server:
        with AdminClient(server.address) as admin:
            admin.create_topic("t")
        with Producer(server.address) as producer:
            producer.send("t", b"x").result(60)
        shutil.rmtree(server.data / "topics")
    text = server.log.read_text()
    assert "BUG" not in text, server.tail()
    assert "Traceback" not in text, server.tail()
