"""The two files with the identity and the vote of a node, `pk.json` and `metadata/quorum-state`, on
real processes (rules L18 and Q5): one character of each class is flipped, and each file is removed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pk import AdminClient, errors
from pk.cli.embedded import EmbeddedServer
from pk.log import sealed

pytestmark = pytest.mark.integration

FILES = ("pk.json", "metadata/quorum-state")
TOPIC = "flights"


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a node with one topic, stopped; its directory is copied."""
    home = tmp_path_factory.mktemp("filled")
    with EmbeddedServer(home) as server, AdminClient(server.address) as admin:
        admin.create_topic(TOPIC, 1)
    return home


@pytest.fixture
def server(filled: Path, tmp_path: Path) -> EmbeddedServer:
    shutil.copytree(filled / "data", tmp_path / "data", ignore=shutil.ignore_patterns("*.sock"))
    return EmbeddedServer(tmp_path)


def class_of(char: str) -> str:
    if char.isdigit():
        return "digit"
    return "letter" if char.isalpha() else char


def places(raw: bytes) -> Iterator[tuple[str, int]]:
    """Return the first character of each class in each field, and of each class in the checksum."""
    text = raw.decode()
    seen: set[tuple[int, str]] = set()
    for at, char in enumerate(text):
        where = (text.count(",", 0, at), class_of(char))
        if where not in seen:
            seen.add(where)
            yield f"{char!r} at {at}", at


def names(server: EmbeddedServer) -> list[str]:
    """Start the node and return its topics."""
    with server, AdminClient(server.address) as admin:
        return [topic.name for topic in admin.list_topics()]


def refused(server: EmbeddedServer) -> str:
    with pytest.raises(errors.CorruptLog) as told:
        server.start()
    return told.value.message


def content(home: Path) -> dict[str, bytes]:
    """Return the files that a start could damage: no locks, and no files of a run."""
    return {
        str(path.relative_to(home)): path.read_bytes()
        for path in home.rglob("*")
        if path.is_file() and path.name != ".lock" and "run" not in path.parts[-2:]
    }


@pytest.mark.parametrize("file", FILES)
def test_no_flipped_character_is_believed(server: EmbeddedServer, file: str) -> None:
    """The error names the file and the checksum; nothing changes; with the undamaged file the node
    starts again.
    """
    path = server.data / file
    whole = path.read_bytes()
    tried: set[str] = set()
    believed: list[str] = []
    one_class: set[str] = set()
    for what, at in places(whole):
        kind = class_of(chr(whole[at]))
        if kind in one_class:  # every bit of such a file: tests/unit/log/test_sealed.py
            continue
        one_class.add(kind)
        tried.add(kind)
        raw = bytearray(whole)
        raw[at] ^= 1
        path.write_bytes(raw)
        before = content(server.data)
        try:
            message = refused(server)
        except pytest.fail.Exception:
            server.stop()
            believed.append(what)
            continue
        assert f"{path} is damaged: " in message
        assert "checksum" in message
        assert "remove nothing" in message
        assert content(server.data) == before
    assert believed == []
    assert {"digit", "letter", '"', ":", ",", "{", "}", " "} <= tried
    path.write_bytes(whole)
    assert names(server) == [TOPIC]


def test_an_identity_that_is_gone_beside_data_is_not_made_anew(server: EmbeddedServer) -> None:
    """L18: and the error does not advise to use an empty directory."""
    path = server.data / "pk.json"
    whole = path.read_bytes()
    path.unlink()
    before = content(server.data)
    message = refused(server)
    assert f"{path} is gone, and the directory holds pk's data" in message
    assert "empty" not in message
    assert content(server.data) == before
    path.write_bytes(whole)
    assert names(server) == [TOPIC]


def test_a_node_alone_without_its_vote_says_so_and_uses_no_epoch_twice(
    server: EmbeddedServer,
) -> None:
    # rule Q5
    path = server.data / "metadata/quorum-state"
    before = sealed.decode(path.read_bytes())["epoch"]
    path.unlink()
    assert names(server) == [TOPIC]
    assert sealed.decode(path.read_bytes())["epoch"] > before
    lines = [line for line in server.log.read_text().splitlines() if "quorum_state_missing" in line]
    assert len(lines) == 1
    assert "would not be noticed" in lines[0]
    assert names(server) == [TOPIC]
    assert server.log.read_text().count("quorum_state_missing") == 1


def test_a_node_alone_without_its_vote_cuts_nothing(server: EmbeddedServer) -> None:
    """Q5: bytes that look like a torn tail may have been SYNCED."""
    (server.data / "metadata/quorum-state").unlink()
    (log,) = (server.data / "metadata/__cluster_metadata-0").glob("*.log")
    whole = log.read_bytes()
    log.write_bytes(whole[:-3])
    message = refused(server)
    assert "quorum-state is gone, and " in message
    assert "put the metadata directory back from a backup" in message
    assert log.read_bytes() == whole[:-3]
    log.write_bytes(whole)
    assert names(server) == [TOPIC]
