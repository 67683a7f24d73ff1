"""The registry of formats (pk.formats): each file of another version is refused by name (rule L21).

The tests are generated from the registry.  A new entry needs a line in `WRITERS`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

from pk import errors, formats
from pk.formats import FORMATS, KnownFormat
from pk.log import aborted, batch, checkpoints, columns, control_rows, directory, index, sealed
from pk.log.aborted import AbortedEntry
from pk.log.encoding import encode_lists
from pk.log.index import Extent, SparseIndex
from pk.log.producers import Producers
from pk.server.groups import records as group_records
from pk.server.node import format as node_format
from pk.server.raft import quorum_state_store, snapshot_framing
from pk.server.raft.messages import Vote
from pk.server.raft.snapshot_id import SnapshotId
from pk.server.transactions import records
from pk.sim.disk import SimStorage
from pk.sparkconnector import offsets
from pk.tiering import layout, offset_files

Write = Callable[[], Any]
Read = Callable[[Any], Any]


def indexes() -> tuple[bytes, bytes]:
    sparse = SparseIndex(0)
    sparse.add(5, 700, 9)
    return index.encode(sparse, Extent(900, 12, 9, 5, 1, 2, 700, 77))


def pk_json() -> bytes:
    made = directory.Format(directory.FORMAT, "b", "c", 1, "d")
    return sealed.encode(made._asdict())


def directory_json() -> bytes:
    known = {
        "format": node_format.METADATA_FORMAT, "cluster_id": "c", "node_id": 1, "directory_id": "d",
    }  # fmt: skip
    return json.dumps(known).encode()


def stored(name: str, raw: bytes) -> SimStorage:
    storage = SimStorage("d")
    storage.replace_file(name, raw)
    return storage


def transaction_key() -> bytes:
    """A batch with the key of a transactional id: the checksum of the batch covers it."""
    return b"".join(encode_lists([None], [records.encode_key("t")]))


def read_transaction_key(raw: bytes) -> str:
    batch.check(raw)
    rows = columns.decode(raw, decoded_bytes_max=1000)
    return records.decode_key(rows.column("key")[0].as_py())


def group_key() -> bytes:
    """A batch with the key of a group."""
    key = group_records.encode_key(group_records.GROUP, "g")
    return b"".join(encode_lists([None], [key]))


def read_group_key(raw: bytes) -> group_records.GroupKey:
    batch.check(raw)
    rows = columns.decode(raw, decoded_bytes_max=1000)
    return group_records.decode_key(rows.column("key")[0].as_py())


def checkpoint(name: str) -> tuple[Write, Read]:
    return lambda: checkpoints.encode(name, ["line"]), lambda raw: checkpoints.decode(name, raw)


def process_run(name: str) -> tuple[Write, Read]:
    run = directory.ProcessRun("boot", 7)
    return lambda: directory.encode_run(run), lambda raw: directory.decode_run(name, raw)


OFFSETS_PATH = offset_files.copy_path("c", 3, offset_files.CopyName(1, 2))


def offsets_copy() -> bytes:
    return offset_files.CopyLines().encode("c", 3, offset_files.CopyName(1, 2), 0)


def read_offsets_copy(raw: bytes) -> offset_files.OffsetsCopy:
    return offset_files.decode(OFFSETS_PATH, raw)


WRITERS: dict[str, tuple[Write, Read]] = {
    "run.json": process_run("run.json"),
    "clean-shutdown": process_run("clean-shutdown"),
    "pk.json": (pk_json, lambda raw: directory.read_format(stored("pk.json", raw))),
    ".snapshot": (lambda: Producers().snapshot(7), Producers.from_snapshot),
    "control row": (
        lambda: b"".join(control_rows.encode_markers([control_rows.Marker(1, 2, True)], 5)),
        lambda raw: batch.check(raw) and control_rows.decode_markers(raw),
    ),
    "__transaction_state key": (transaction_key, read_transaction_key),
    "__consumer_offsets key": (group_key, read_group_key),
    ".txnindex": (lambda: aborted.encode([AbortedEntry(1, 2, 3, 4)]), aborted.decode),
    ".index": (lambda: indexes()[0], lambda raw: index.decode_entries(raw, index.OFFSETS)),
    ".timeindex": (lambda: indexes()[1], lambda raw: index.decode_entries(raw, index.TIMES)),
    ".checkpoint": (
        lambda: b"".join(snapshot_framing.framed(SnapshotId(7, 3), [(1, b"rows")])),
        snapshot_framing.check,
    ),
    "quorum-state": (
        lambda: quorum_state_store.state_bytes(Vote(3, 1, "d"), 8),
        lambda raw: quorum_state_store.read_state(stored("quorum-state", raw)),
    ),
    "directory.json": (
        directory_json,
        lambda raw: node_format.read_metadata_identity(SimStorage("d"), raw),
    ),
    "table counters": (
        lambda: layout.COUNTERS_VERSION,
        lambda version: layout.check_version("file:///t", 0, version),
    ),
    "copy of committed offsets": (offsets_copy, read_offsets_copy),
    "spark checkpoint": (lambda: offsets.to_json({}), offsets.from_json),
    **{
        each.name: checkpoint(each.name)
        for each in FORMATS
        if each.decode == "pk.log.checkpoints:decode"
    },
}


def named(path: str) -> Any:
    module, _, attributes = path.partition(":")
    found: Any = import_module(module)
    for attribute in attributes.split("."):
        found = getattr(found, attribute)
    return found


def test_every_format_has_a_line_here_and_every_name_exists() -> None:
    assert [each.name for each in FORMATS if each.name not in WRITERS] == []
    assert len({each.name for each in FORMATS}) == len(FORMATS)
    for each in FORMATS:
        assert isinstance(named(each.version), int)
        assert callable(named(each.decode))


@pytest.mark.parametrize("entry", FORMATS, ids=lambda each: each.name)
def test_another_version_is_refused_by_name(
    entry: KnownFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L21: neither damage, which would be repaired, nor empty."""
    write, read = WRITERS[entry.name]
    read(write())
    with monkeypatch.context() as newer:
        newer.setattr(entry.version.replace(":", "."), named(entry.version) + 1)
        raw = write()
    with pytest.raises((errors.NewerFormat, errors.UnsupportedFeature)) as refused:
        read(raw)
    assert str(named(entry.version) + 1) in refused.value.message


@pytest.mark.parametrize(
    "entry",
    [
        each
        for each in FORMATS
        if each.name not in ("spark checkpoint", "directory.json", "table counters")
    ],
    ids=lambda each: each.name,
)
def test_a_flipped_version_is_damage(entry: KnownFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """L21: the checksum covers the version, so a changed bit in it is not another version."""
    write, read = WRITERS[entry.name]
    known = write()
    with monkeypatch.context() as newer:
        newer.setattr(entry.version.replace(":", "."), named(entry.version) + 1)
        other = write()
    at = next(at for at, (a, b) in enumerate(zip(known, other, strict=True)) if a != b)
    damaged = known[:at] + other[at : at + 1] + known[at + 1 :]
    damage = (ValueError, errors.CorruptLog, errors.CorruptBatch, errors.DamagedTierFile)
    with pytest.raises(damage):
        read(damaged)


def test_the_path_of_the_file_is_in_front() -> None:
    refused = pytest.raises(errors.NewerFormat, match=r"^/d/topics/t-0: an index")
    with refused, formats.named("/d/topics/t-0"):
        formats.require_version("an index", 1, 0)
