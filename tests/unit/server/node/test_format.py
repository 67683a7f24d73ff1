"""Which node the directories belong to (node/format F1–F5)."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pk import errors
from pk.log.directory import read_format
from pk.log.files import RealStorage
from pk.server.node.format import Formatted, controller_identity, format_node, prepare
from pk.server.node.run_config import RunConfig
from pk.server.node.settings import Resolved, resolve, voter_directory_id
from pk.server.raft.quorum_state_store import first_state

CLUSTER = "11111111-2222-4333-8444-555555555555"
VOTERS = "1@127.0.0.1:1,2@127.0.0.1:2,3@127.0.0.1:3"


def node(**flags: Any) -> Resolved:
    return resolve({}, {}, {"cluster_id": CLUSTER, "controller_quorum_voters": VOTERS, **flags})


def make(path: Path, resolved: Resolved, **more: Any) -> Formatted:
    given = {"cluster_id": "", "initial_controllers": True, "ignore_formatted": False, **more}
    return format_node([str(path)], resolved, **given)


def start(path: Path, resolved: Resolved) -> RunConfig:
    config, lock = prepare([str(path)], resolved)
    lock.unlock()
    return config


def test_a_node_alone_formats_what_is_empty(tmp_path: Path) -> None:
    first = start(tmp_path, resolve({}, {}, {}))
    assert first.metadata_directory_id == ""
    assert start(tmp_path, resolve({}, {}, {})).directory_ids == first.directory_ids
    with pytest.raises(errors.DirectoryOfAnotherCluster):
        start(tmp_path, resolve({}, {}, {"cluster_id": CLUSTER}))


def test_a_node_of_a_cluster_starts_on_nothing_that_was_not_formatted(tmp_path: Path) -> None:
    with pytest.raises(errors.DirectoryNotFormatted, match="pk server format"):
        start(tmp_path / "data", node())
    assert not (tmp_path / "data").exists(), "nothing is made"


def test_first_voters_know_each_other_and_nobody_knows_a_replacement(tmp_path: Path) -> None:
    # node/format F1, Q1
    made = make(tmp_path / "a", node())
    assert made.voter
    assert made.metadata_directory_id == voter_directory_id(CLUSTER, 1)
    config = start(tmp_path / "a", node())
    assert config.metadata_directory_id == made.metadata_directory_id
    assert config.directory_ids[0] != made.metadata_directory_id, "F2"
    replaced = make(tmp_path / "b", node(), initial_controllers=False)
    assert not replaced.voter
    assert replaced.metadata_directory_id != made.metadata_directory_id
    assert controller_identity([str(tmp_path / "b")], node()) == (
        1,
        replaced.metadata_directory_id,
        "127.0.0.1:1",
    )


def test_what_is_formatted_is_not_formatted_again(tmp_path: Path) -> None:
    first = make(tmp_path, node())
    with pytest.raises(errors.DirectoryFormatted, match="--ignore-formatted"):
        make(tmp_path, node())
    again = make(tmp_path, node(), initial_controllers=False, ignore_formatted=True)
    assert again.made == ()
    assert again.metadata_directory_id == first.metadata_directory_id
    with pytest.raises(errors.DirectoryOfAnotherCluster):
        make(tmp_path, node(node_id=2), ignore_formatted=True)


@pytest.mark.parametrize("lost", ["directory.json", "quorum-state"])
def test_metadata_that_is_gone_is_a_loss(tmp_path: Path, lost: str) -> None:
    """node/format F3: without its vote a controller could vote twice."""
    make(tmp_path, node())
    (tmp_path / "metadata" / lost).unlink()
    with pytest.raises(errors.CorruptLog, match=r"gone.*emove nothing here.*REPAIR"):
        start(tmp_path, node())


@pytest.mark.parametrize("alone", [True, False])
def test_a_damaged_vote_ends_the_start_before_any_process(tmp_path: Path, alone: bool) -> None:
    # rule Q5
    resolved = resolve({}, {}, {}) if alone else node()
    if alone:
        start(tmp_path, resolved)
    else:
        make(tmp_path, resolved)
    path = tmp_path / "metadata/quorum-state"
    path.write_bytes(first_state().replace(b'"epoch": 0', b'"epoch": 1'))
    with pytest.raises(errors.CorruptLog, match=f"{path} is damaged: its checksum does not match"):
        start(tmp_path, resolved)


def every_flip(raw: bytes) -> Iterator[bytes]:
    for at in range(len(raw)):
        for bit in range(8):
            flipped = bytearray(raw)
            flipped[at] ^= 1 << bit
            yield bytes(flipped)


def test_no_flipped_bit_of_a_nodes_identity_is_believed(tmp_path: Path) -> None:
    """L18: this includes node, cluster and directory, format and layout."""
    start(tmp_path, resolve({}, {}, {}))
    path = tmp_path / "pk.json"
    for raw in every_flip(path.read_bytes()):
        path.write_bytes(raw)
        with pytest.raises(errors.CorruptLog, match=f"{path} is damaged: .*remove nothing"):
            read_format(RealStorage(str(tmp_path)))


@pytest.mark.parametrize(
    "held",
    ["topics/t-0", "metadata/__cluster_metadata-0/0.log", "run.json", "clock-checkpoint",
     "partition-identity-checkpoint", "recovery-point-offset-checkpoint", "clean-shutdown"],
)  # fmt: skip
def test_data_without_the_nodes_identity_is_not_formatted(tmp_path: Path, held: str) -> None:
    """node/format F6: neither by a start nor by `pk server format`, nor as one of several
    directories.
    """
    (tmp_path / "b" / held).mkdir(parents=True)
    alone = resolve({}, {}, {})
    ignoring = {"ignore_formatted": True, "initial_controllers": False}
    for attempt in (
        lambda: prepare([str(tmp_path / "b")], alone),
        lambda: prepare([str(tmp_path / "a"), str(tmp_path / "b")], alone),
        lambda: start(tmp_path / "b", node()),
        lambda: make(tmp_path / "b", node(), **ignoring),
    ):
        with pytest.raises(errors.CorruptLog, match=r"b/pk\.json is gone.*remove nothing") as told:
            attempt()
        assert "empty" not in told.value.message
    assert not (tmp_path / "a").exists(), "nothing is made"
    assert not (tmp_path / "b/pk.json").exists()


def test_metadata_that_was_taken_away_is_formatted_again_as_nobodys_vote(tmp_path: Path) -> None:
    """node/format F7: the partitions beside it stay; a node that is alone begins no other
    metadata.
    """
    first = make(tmp_path, node())
    whole = (tmp_path / "pk.json").read_bytes()
    (tmp_path / "metadata").rename(tmp_path / "metadata.damaged")
    with pytest.raises(errors.InvalidConfig, match="may have voted"):
        make(tmp_path, node(), ignore_formatted=True)
    again = make(tmp_path, node(), initial_controllers=False, ignore_formatted=True)
    assert not again.voter
    assert again.metadata_directory_id not in ("", first.metadata_directory_id)
    assert start(tmp_path, node()).metadata_directory_id == again.metadata_directory_id
    assert (tmp_path / "pk.json").read_bytes() == whole
    alone = resolve({}, {}, {})
    start(tmp_path / "b", alone)
    shutil.rmtree(tmp_path / "b/metadata")
    known = read_format(RealStorage(str(tmp_path / "b")))
    assert known is not None
    make(tmp_path / "b", alone, cluster_id=known.cluster_id, ignore_formatted=True,
         initial_controllers=False)  # fmt: skip
    assert not list((tmp_path / "b/metadata").glob("*"))
    (tmp_path / "metadata").rename(tmp_path / "metadata.second")
    with pytest.raises(errors.DirectoryOfAnotherCluster):
        make(tmp_path, node(node_id=2), initial_controllers=False, ignore_formatted=True)
    assert not (tmp_path / "metadata").exists(), "nothing is made in another node's directory"


def test_a_node_alone_begins_no_metadata_beside_partitions(tmp_path: Path) -> None:
    """node/format F3: all partitions would be strays, and be removed."""
    alone, (a, b) = resolve({}, {}, {}), (tmp_path / "a", tmp_path / "b")
    dirs = [str(a), str(b)]
    for _ in range(2):  # a failed start may be repeated, with the directories in any order
        prepare(dirs, alone)[1].unlock()
        prepare(dirs[::-1], alone)[1].unlock()
    (a / "metadata/quorum-state").write_bytes(first_state())
    with pytest.raises(errors.InvalidConfig, match=f"{a}/metadata: give that directory first"):
        prepare(dirs[::-1], alone)
    (b / "topics/t-0").mkdir(parents=True)
    prepare(dirs, alone)[1].unlock()
    shutil.rmtree(a)
    for given in (dirs, dirs[::-1], dirs[1:]):
        with pytest.raises(errors.CorruptLog, match=f"{b} holds partitions"):
            prepare(given, alone)
    assert not a.exists(), "nothing is made"


def test_a_directory_of_the_last_start_is_there_or_given_up(tmp_path: Path) -> None:
    """node/format F4: an empty mount point, or a directory that was left out; a path may change."""
    alone, (a, b, c) = resolve({}, {}, {}), (str(tmp_path / name) for name in "abc")
    prepare([a, b], alone)[1].unlock()
    (tmp_path / "b").rename(tmp_path / "c")
    prepare([a, c], alone)[1].unlock()
    (tmp_path / "c").rename(tmp_path / "b")
    (tmp_path / "c").mkdir()
    for given in ([a, c], [a]):
        with pytest.raises(errors.StorageFailed, match=f"{c} was one of .* delete {a}/run") as lost:
            prepare(given, alone)
        assert lost.value.details["directory"] == c
    assert not list((tmp_path / "c").iterdir()), "nothing is made"
    prepare([a, b], alone)[1].unlock()
    (tmp_path / "a/run/config.json").unlink()  # as the error says
    prepare([a], alone)[1].unlock()


def test_a_disk_that_was_replaced_by_format_is_no_lost_one(tmp_path: Path) -> None:
    """node/format F4: the operator who formats the replaced disk knows that the old one is gone."""
    broker, dirs = node(node_id=9, process_roles="broker"), [str(tmp_path / name) for name in "ab"]
    given = {"cluster_id": "", "initial_controllers": False}
    format_node(dirs, broker, ignore_formatted=False, **given)
    prepare(dirs, broker)[1].unlock()
    shutil.rmtree(tmp_path / "b")
    with pytest.raises(errors.StorageFailed, match="Mount it"):
        prepare(dirs, broker)
    format_node(dirs, broker, ignore_formatted=True, **given)
    prepare(dirs, broker)[1].unlock()


def test_an_empty_first_directory_before_a_formatted_one_is_a_loss(tmp_path: Path) -> None:
    """node/format F3: the first directory is formatted first."""
    alone, (a, b) = resolve({}, {}, {}), (str(tmp_path / "a"), str(tmp_path / "b"))
    prepare([a, b], alone)[1].unlock()
    shutil.rmtree(a)
    with pytest.raises(errors.CorruptLog, match=f"not in {a}"):
        prepare([a, b], alone)


def test_one_directory_is_given_once(tmp_path: Path) -> None:
    alone, a = resolve({}, {}, {}), tmp_path / "a"
    prepare([str(a)], alone)[1].unlock()
    (tmp_path / "link").symlink_to(a)
    with pytest.raises(errors.InvalidConfig, match="given twice"):
        prepare([str(a), str(tmp_path / "link")], alone)
    shutil.copytree(a, tmp_path / "copy")
    with pytest.raises(errors.InvalidConfig, match="copy"):
        prepare([str(a), str(tmp_path / "copy")], alone)


def test_a_directory_in_use_is_told_as_that(tmp_path: Path) -> None:
    """Its metadata are in use, too: the operator need not name the metadata directory first."""
    alone, a = resolve({}, {}, {}), tmp_path / "a"
    prepare([str(a)], alone)[1].unlock()
    (a / "metadata/quorum-state").write_bytes(first_state())
    held = RealStorage(str(a))
    held.lock()
    try:
        with pytest.raises(errors.DirectoryLocked):
            prepare([str(tmp_path / "b"), str(a)], alone)
    finally:
        held.unlock()


def test_the_directories_of_a_controller_in_another_order(tmp_path: Path) -> None:
    """node/format F3: the node does not report that its metadata are gone."""
    dirs = [str(tmp_path / name) for name in "ab"]
    format_node(dirs, node(), cluster_id="", initial_controllers=True, ignore_formatted=False)
    with pytest.raises(errors.InvalidConfig, match=f"{dirs[0]}/metadata: give that directory"):
        prepare(dirs[::-1], node())


@pytest.mark.parametrize("initial", [True, False])
def test_what_was_formatted_for_a_cluster_begins_none_of_its_own(
    tmp_path: Path, initial: bool
) -> None:
    """node/format F5: it is started without the settings that name the other nodes."""
    make(tmp_path / "a", node(), initial_controllers=initial)
    with pytest.raises(errors.InvalidConfig, match="--config") as refused:
        start(tmp_path / "a", resolve({}, {}, {}))
    assert refused.value.details["option"] == "controller_quorum_voters"
    alone = resolve({}, {}, {})
    make(tmp_path / "b", alone, initial_controllers=False)
    start(tmp_path / "b", alone)


def test_metadata_of_another_node_or_damaged(tmp_path: Path) -> None:
    for name, number in (("a", 1), ("b", 2)):
        make(tmp_path / name, node(node_id=number))
    shutil.rmtree(tmp_path / "a/metadata")
    shutil.copytree(tmp_path / "b/metadata", tmp_path / "a/metadata")
    with pytest.raises(errors.DirectoryOfAnotherCluster, match="node 2"):
        start(tmp_path / "a", node())
    (tmp_path / "b/metadata/directory.json").write_text("{}")
    with pytest.raises(errors.CorruptLog, match="damaged"):
        start(tmp_path / "b", node(node_id=2))


def test_a_format_that_was_interrupted_can_be_repeated(tmp_path: Path) -> None:
    make(tmp_path, node())
    (tmp_path / "pk.json").unlink()  # written last
    assert make(tmp_path, node()).voter
    assert start(tmp_path, node()).node_id == 1


@pytest.mark.parametrize("name", ["quorum-state", "directory.json"])
def test_a_format_that_died_as_it_wrote_can_be_repeated(tmp_path: Path, name: str) -> None:
    (tmp_path / "metadata").mkdir()
    (tmp_path / f"metadata/{name}.tmp").write_text("{")
    assert make(tmp_path, node()).voter


def test_a_controller_that_may_have_voted_is_no_first_voter(tmp_path: Path) -> None:
    """node/format F1: the disk of the metadata was replaced, and another disk of the node is
    there.
    """
    dirs = [str(tmp_path / name) for name in "ab"]
    given = {"cluster_id": "", "ignore_formatted": True}
    format_node(dirs, node(), initial_controllers=True, **given)
    shutil.rmtree(dirs[0])
    with pytest.raises(errors.InvalidConfig, match="without --initial-controllers"):
        format_node(dirs, node(), initial_controllers=True, **given)
    assert not format_node(dirs, node(), initial_controllers=False, **given).voter


def test_a_full_disk_is_told_and_what_stands_there_already_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = start(tmp_path, resolve({}, {}, {}))

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "open", full)
    config.save()
    other = dataclasses.replace(config, server={**config.server, "rack": "other"})
    with pytest.raises(errors.StorageFull, match="No space left"):
        other.save()


def test_a_directory_with_somebodys_metadata_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metadata/__cluster_metadata-0").mkdir(parents=True)
    with pytest.raises(errors.DirectoryOfAnotherCluster, match="not empty"):
        make(tmp_path, node())


def test_a_broker_alone_has_no_metadata(tmp_path: Path) -> None:
    broker = node(node_id=9, process_roles="broker")
    made = make(tmp_path, broker)
    assert (made.metadata_directory_id, made.voter) == ("", False)
    start(tmp_path, broker)
    assert not (tmp_path / "metadata").exists()
    with pytest.raises(errors.InvalidConfig, match="no controller"):
        controller_identity([str(tmp_path)], broker)


def test_who_is_no_voter_cannot_be_a_first_one(tmp_path: Path) -> None:
    late = node(node_id=4, controller_listen="127.0.0.1:4")
    with pytest.raises(errors.InvalidConfig, match="add-controller"):
        make(tmp_path, late)
    assert not make(tmp_path, late, initial_controllers=False).voter


def test_the_cluster_has_to_be_named(tmp_path: Path) -> None:
    unnamed = resolve({}, {}, {"controller_quorum_voters": VOTERS})
    with pytest.raises(errors.InvalidConfig, match="same cluster_id"):
        make(tmp_path, unnamed)
    with pytest.raises(errors.InvalidConfig, match="contradicts"):
        make(tmp_path, node(), cluster_id="other")
    assert make(tmp_path, unnamed, cluster_id=CLUSTER).cluster_id == CLUSTER
    assert json.loads((tmp_path / "pk.json").read_text())["cluster_id"] == CLUSTER
