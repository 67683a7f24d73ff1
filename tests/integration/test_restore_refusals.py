"""What `pk tier restore` refuses, as processes over a store of files (rule T13).

The copies are those of a cluster that never ran.  `test_restore.py` has what a cluster that lives,
and a restored one that has started, add to this.
"""

from __future__ import annotations

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from node_starts import completed
from real_cluster import PATIENCE_S

from pk.cli.embedded import pk_command
from pk.server.metadata import snapshot
from pk.server.raft.snapshot_id import SnapshotId
from pk.tiering import metadata_copies
from pk.tiering.metadata_copies import MetadataName
from tests.unit.server.tier.test_restore import lost_image

pytestmark = pytest.mark.integration


def encoded() -> tuple[str, bytes]:
    """Return a copy of the metadata of the cluster `c`: its path in the store, and its bytes."""
    image = lost_image()
    made = SnapshotId(image.offset + 1, image.leader_epoch)
    path = metadata_copies.metadata_path("c", MetadataName(made.epoch, made.end))
    return path, b"".join(snapshot.encode(made, snapshot.rows_of(image)))


def restore(tier: Path, node: Path) -> subprocess.CompletedProcess[str]:
    command = ["tier", "restore", "--tier-url", tier.as_uri(), "--dir", str(node), "--json"]
    return completed(pk_command(*command), PATIENCE_S)


def error_of(done: subprocess.CompletedProcess[str]) -> tuple[str, str]:
    """Return the name of a command's error, and its message; an operator must act."""
    assert done.returncode != 0, done.stdout
    error = json.loads(done.stdout)["error"]
    assert error["acts"] == "operator", error
    return error["name"], error["message"]


def refused(tier: Path, node: Path, error: str, *words: str) -> None:
    """The restore ends with this error, whose message has the words, and changes nothing."""
    before = sorted(tier.rglob("*"))
    name, message = error_of(restore(tier, node))
    assert name == error, message
    assert all(each in message for each in words), message
    assert sorted(tier.rglob("*")) == before
    assert not node.exists()


def test_a_tier_without_copies_that_can_be_read_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, node = tmp_path / "tier", tmp_path / "node"
    tier.mkdir()
    refused(tier, node, "NothingToRestore", "--tier-url", "has no copy")
    path, whole = encoded()
    copy = tier / path
    copy.parent.mkdir(parents=True)
    copy.write_bytes(whole[:-9] + b"torn here")
    refused(tier, node, "DamagedTierFile", path)
    with monkeypatch.context() as patch:
        patch.setattr("pk.server.raft.snapshot_framing.FORMAT", 7)
        copy.write_bytes(encoded()[1])
    refused(tier, node, "NewerFormat", path)


def test_of_two_restores_at_once_one_is_refused(tmp_path: Path) -> None:
    path, whole = encoded()
    tier = tmp_path / "tier"
    (tier / path).parent.mkdir(parents=True)
    (tier / path).write_bytes(whole)
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(restore, [tier] * 2, [tmp_path / "a", tmp_path / "b"]))
    won, lost = sorted(both, key=lambda done: done.returncode)
    assert won.returncode == 0, won.stderr
    assert json.loads(won.stdout)["generation"] == 1
    name, message = error_of(lost)
    assert name == "RestoreUnderWay"
    assert "--join" in message
    formatted = [name for name in ("a", "b") if (tmp_path / name).exists()]
    assert len(formatted) == 1, "the other node is not formatted"
