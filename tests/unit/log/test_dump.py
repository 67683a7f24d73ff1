"""`pk log dump`: every kind of file, and damage with its place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pk.cli import app
from pk.log import columns, control_rows
from pk.log.control_rows import Marker
from pk.server.metadata import snapshot
from pk.server.metadata.image import MetadataImage
from pk.server.metadata.records import record_of
from pk.server.raft.snapshot_id import SnapshotId, file_name
from pk.wire import pk_pb2 as wire

NOW = 1_700_000_000_000
Make = Callable[..., Any]  #: conftest.Bench


@pytest.fixture
def folder(bench: Make, tmp_path: Path) -> Path:
    """A closed log's files, copied from the simulated disk."""
    b = bench(segment_bytes=900)
    for number in range(8):
        raw = columns.encode_lists(
            [b"v%d" % number, None],
            [b"key", b"\xff\xfe"],
            [NOW, NOW + number],
            [[("trace", b"1")], None],
            producer_id=9,
            producer_epoch=2,
            base_sequence=2 * number,
        )
        b.append(b"".join(raw), epoch=1)
    b.decide(
        b"".join(control_rows.encode_markers([Marker(9, 3, False)], NOW)),
        epoch=1,
        from_client=False,
    )
    b.write()
    b.log.close()
    for path, raw in b.storage.files().items():
        (tmp_path / Path(path).name).write_bytes(raw)
    return tmp_path


def dump(path: Path, *options: str) -> tuple[int, list[dict[str, object]], str]:
    """Return (exit code, objects of --json, text)."""
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = app.run(["log", "dump", str(path), "--json", *options])
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        assert app.run(["log", "dump", str(path), *options]) == code
    return code, [json.loads(line) for line in out.getvalue().splitlines()], text.getvalue()


def first(folder: Path, suffix: str) -> Path:
    return sorted(folder.glob(f"*{suffix}"))[0]


def test_batches_and_rows(folder: Path) -> None:
    code, found, text = dump(first(folder, ".log"), "--records")
    assert code == 0
    batch = found[0]
    assert (batch["position"], batch["base_offset"], batch["last_offset"], batch["records"]) == (
        0,
        0,
        1,
        2,
    )
    assert (batch["producer_id"], batch["base_sequence"], batch["leader_epoch"]) == (9, 0, 1)
    rows = batch["rows"]
    assert isinstance(rows, list)
    assert rows[0] == {
        "offset": 0,
        "timestamp": NOW,
        "key": "key",
        "value": "v0",
        "headers": [{"key": "trace", "value": "1"}],
    }
    assert rows[1]["value"] is None
    assert rows[1]["key"] == {"base64": "//4="}
    assert "position=0 base_offset=0" in text
    assert "    offset=1 " in text
    assert "rows" not in dump(first(folder, ".log"))[1][0]


def test_markers_are_named(folder: Path) -> None:
    last = sorted(folder.glob("*.log"))[-1]
    batch = dump(last, "--records")[1][-1]
    assert batch["control"]
    (marker,) = batch["markers"]
    assert marker == Marker(9, 3, False)._asdict()


@pytest.mark.parametrize(
    ("suffix", "name"),
    [(".index", "position"), (".timeindex", "offset"), (".snapshot", "producers")],
)
def test_derived_files(folder: Path, suffix: str, name: str) -> None:
    path = first(folder, suffix)
    code, found, text = dump(path)
    assert code == 0
    assert text
    assert any(name in one for one in found)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    code, found, text = dump(path)
    assert code == 1
    assert "CORRUPT at 0" in text


def test_checkpoints(folder: Path) -> None:
    assert dump(folder / "leader-epoch-checkpoint")[:2] == (0, [{"epoch": 1, "start_offset": 0}])
    assert dump(first(folder, ".txnindex"))[:2] == (0, [])


def test_a_corrupt_batch_is_named_and_stepped_over(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = first(folder, ".log")
    raw = bytearray(path.read_bytes())
    second = dump(path)[1][1]["position"]
    assert isinstance(second, int)
    raw[second + 90] ^= 1
    path.write_bytes(raw)
    code, found, text = dump(path)
    assert code == 1
    assert f"CORRUPT at {second}: checksum" in text
    assert f"at position {second}: checksum" in capsys.readouterr().err
    assert [("corrupt" in one) for one in found[:3]] == [False, True, False]
    path.write_bytes(raw[: len(raw) - 5])
    assert "torn tail" in dump(path)[2]
    path.write_bytes(raw[:second] + b"\0" * 100)
    assert f"CORRUPT at {second}: batch header: magic" in dump(path)[2]


def test_other_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("")
    assert app.run(["log", "dump", str(tmp_path / "notes.txt")]) == 1
    assert "no file of a log" in capsys.readouterr().err
    assert app.run(["log", "dump", str(tmp_path / "missing.log")]) == 1
    assert "No such file" in capsys.readouterr().err


def test_a_metadata_snapshot_is_printed(tmp_path: Path) -> None:
    """The checkpoint files of `DIR/metadata`: the number of rows of each kind, or the rows."""
    image = MetadataImage()
    bodies = [
        wire.VotersRecord(voters=[wire.Voter(node_id=1, directory_id="d", address="c:1")]),
        wire.RegisterBrokerRecord(broker_id=7, broker_epoch=1, address="b:1", fenced=True),
        wire.TopicRecord(name="flights", topic_id="id"),
        wire.PartitionRecord(topic_id="id", partition=0, replicas=[7], isr=[7], leader=7),
    ]
    for offset, body in enumerate(bodies):
        image.apply(offset, record_of(body))
    made = SnapshotId(4, 2)
    raw = b"".join(snapshot.encode(made, snapshot.rows_of(image)))
    path = tmp_path / file_name(made)
    path.write_bytes(raw)
    code, (head,), text = dump(path)
    assert code == 0
    assert head == {
        "snapshot_end": 4, "epoch": 2, "bytes": len(raw), "rows_in_all": 5,
        "voters": 1, "register_broker": 1, "topic": 1, "partition": 1, "no_op": 1,
    }  # fmt: skip
    assert "snapshot_end=4 epoch=2" in text
    code, (_, *rows), _ = dump(path, "--records")
    assert code == 0
    assert rows[1]["record"] == "register_broker"
    assert (rows[1]["offset"], rows[1]["broker_id"], rows[1]["fenced"]) == (1, 7, True)
    assert rows[0]["voters"] == [{"node_id": 1, "directory_id": "d", "address": "c:1"}]
    assert (rows[3]["offset"], rows[3]["replicas"], rows[3]["isr"]) == (3, [7], [7])
    loading = tmp_path / (path.name + ".load")
    loading.write_bytes(raw[:-1])
    code, (damage, _error), _ = dump(loading)
    assert code == 1
    assert "torn" in str(damage["corrupt"])
