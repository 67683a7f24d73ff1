"""The directories of one node: their identity, and the checks of a start.

A node that is alone formats empty directories when it starts.  The directories of a cluster's node
are formatted by `pk server format`, as Kafka's are by kafka-storage.  So an operator notices an
empty directory where data was expected, above all an empty metadata directory (rule Q1).

    DIR/pk.json                   cluster, node, uuid of the directory (pk.log.directory)
    DIR/metadata/directory.json   the same for the metadata log, of the first directory only
    DIR/metadata/quorum-state     the vote; exists after the format, or, if the node is alone,
                                  after its first election

Rules
  F1  The uuid of a first voter is computed from cluster and node, so that all first voters know
      each other from the settings alone.  The uuid of any other controller is random, and the
      quorum has to add it (KIP-853).
  F2  Data directories always have random uuids.  So an emptied directory is not taken for the lost
      one (L3).
  F3  Missing metadata that was formatted before is a loss, not a new node.  A node that is alone
      also refuses to begin new metadata beside partitions: the new metadata do not name them, and
      they would be removed as strays (log/strays.py).
  F4  Every directory of the last start must exist, unless the operator says that it is lost.
      Otherwise its partitions would begin again elsewhere, empty.  DIR/run/config.json lists them.
  F5  A controller that was formatted for a cluster never begins a cluster of its own.
  F6  A directory with pk's data is not formatted when its pk.json is missing or damaged, and no
      other directory is formatted beside it (rule L18).
  F7  Metadata that an operator removed are formatted again only for a node of a cluster, and never
      as a first voter (rule Q5).
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pk
from pk import errors, formats
from pk.clock import block_s
from pk.log import directory as directories
from pk.log.files import RealStorage
from pk.log.storage import Storage
from pk.server.node.memory import memory_bytes, partitions_max
from pk.server.node.run_config import RunConfig
from pk.server.node.settings import Resolved, is_clustered, roles_of, voter_directory_id, voters_of
from pk.server.raft.quorum_state_store import (
    QUORUM_STATE,
    WITHOUT_VOTE,
    first_state,
    read_state,
    vote_lost,
)

METADATA_FILE = "directory.json"
METADATA_FORMAT = 1
_METADATA_FIELDS = ("format", "cluster_id", "node_id", "directory_id")


class Seed(NamedTuple):
    """The first snapshot of the metadata log of a restored cluster."""

    name: str  #: of the file
    raw: bytes
    directory_id: str  #: of this node's metadata, if the node is alone


#: Name of the identity file of a data directory (pk.log.directory).
PARTITIONS = "topics"
LOCK_ATTEMPTS = 10
LOCK_WAIT_S = 0.05


@dataclass(slots=True, frozen=True)
class Formatted:
    """The result of `pk server format`."""

    cluster_id: str
    node_id: int
    made: tuple[str, ...]  #: directories that this call formatted
    metadata_directory_id: str  #: '' = this node has no controller
    voter: bool  #: the controller is one of the first voters


def new_id() -> str:
    """Return a fresh uuid."""
    return str(uuid.uuid4())  # noqa: TID251 - a shell


# -- a start ---------------------------------------------------------------------------------------


def prepare(dirs: Sequence[str], resolved: Resolved) -> tuple[RunConfig, RealStorage]:
    """Prepare the directories for a start.

    Formats empty directories if the node is alone, checks the others, locks the run directory, and
    saves the configuration.

    Raises `DirectoryLocked`, `DirectoryNotFormatted`, `DirectoryOfAnotherCluster`,
    `DirectoryOfAnotherBuild`, `NewerFormat`, `CorruptLog`, `StorageFailed`, `StorageFull`,
    `InvalidConfig`.
    """
    paths, server = _absolute(dirs), resolved.server
    node_id, clustered = int(server["node_id"]), is_clustered(server)
    _require_free(paths)
    _require_identities(paths)
    if "controller" in roles_of(server):
        _require_metadata(paths, clustered)
    _require_known(paths)
    if clustered:
        _require_formatted(paths)
    for path in (*paths, os.path.join(paths[0], "run")):
        _make(path)
    if "controller" in roles_of(server):
        _make(os.path.join(paths[0], "metadata"))
    run = RealStorage(os.path.join(paths[0], "run"))
    lock(run)
    try:
        formats = _format_all(paths, node_id, str(server["cluster_id"]))
        config = RunConfig(
            dirs=tuple(paths),
            directory_ids=tuple(each.directory_id for each in formats),
            run_dir=run.root,
            cluster_id=formats[0].cluster_id,
            node_id=node_id,
            server={
                **server,
                "partitions_max": server["partitions_max"] or partitions_max(memory_bytes()),
            },
            topic_defaults=dict(resolved.topic_defaults),
            metadata_directory_id=_metadata_id(paths[0], formats[0].cluster_id, server),
        )
        config.save()
    except BaseException:
        run.unlock()
        raise
    return config, run


def _absolute(dirs: Sequence[str]) -> list[str]:
    if not dirs:
        raise errors.InvalidConfig("no data directory: give --dir DIR", option="dir")
    paths = [os.path.abspath(each) for each in dirs]
    if len({os.path.realpath(each) for each in paths}) < len(paths):
        raise errors.InvalidConfig("a data directory is given twice", option="dir")
    return paths


def _make(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as cause:
        raise errors.StorageFailed(f"cannot make {path}: {cause.strerror}") from cause


def _require_free(paths: Sequence[str]) -> None:
    """Raise `DirectoryLocked` for a directory in use, before any other check of it."""
    for path in paths:
        if os.path.isdir(path) and directories.read_format(RealStorage(path)) is not None:
            storage = RealStorage(path)
            lock(storage)
            storage.unlock()


def _require_identities(paths: Sequence[str]) -> None:
    """Raise `CorruptLog` for a directory with data whose pk.json is missing or damaged (F6)."""
    for path in paths:
        if os.path.isdir(path):
            storage = RealStorage(path)
            if directories.read_format(storage) is None:
                directories.require_no_data(storage)


def _require_formatted(paths: Sequence[str]) -> None:
    for path in paths:
        if not os.path.isdir(path) or directories.read_format(RealStorage(path)) is None:
            raise errors.DirectoryNotFormatted(
                f"{path} is not formatted, and this node is one of a cluster: run `pk server "
                "format` with this node's --config, for a new cluster with --initial-controllers, "
                "for a new or replaced disk without",
                directory=path,
            )


def _require_known(paths: Sequence[str]) -> None:
    """Check that every directory of the last start exists (F4), and that none is a copy.

    Raises `StorageFailed` for one that is missing, `InvalidConfig` for a copy.
    """
    there: dict[str, str] = {}
    formatted: dict[str, directories.Format] = {}
    for path in paths:
        found = directories.read_format(RealStorage(path)) if os.path.isdir(path) else None
        if found is None:
            continue
        if found.directory_id in there:
            raise errors.InvalidConfig(
                f"{path} and {there[found.directory_id]} are one directory, or one is a copy of "
                "the other: give only one",
                option="dir",
            )
        formatted[path], there[found.directory_id] = found, path
    for path, found in formatted.items():
        file = os.path.join(path, "run", "config.json")
        for directory_id, where in _last_start(file, found).items():
            if directory_id not in there and where not in formatted:
                raise errors.StorageFailed(
                    f"{where} was one of this node's directories (id {directory_id}) and is "
                    "missing, or not given: partitions that only it holds would begin empty. Mount "
                    f"it, or give it too; if it is lost, or no longer wanted, delete {file} and "
                    "start without it",
                    directory=where,
                )


def _last_start(file: str, owner: directories.Format) -> dict[str, str]:
    """Return the directories that `file` names: uuid → path; {} if it is of another node."""
    try:
        with open(file, encoding="utf-8") as known:
            last = json.load(known)
        if (last["cluster_id"], last["node_id"]) != (owner.cluster_id, owner.node_id):
            return {}
        return dict(zip(last["directory_ids"], last["dirs"], strict=True))
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _require_metadata(paths: Sequence[str], clustered: bool) -> None:
    """Check that the first directory has the metadata (F3).

    Raises `InvalidConfig` if another one has them, `CorruptLog` if none of a node that is alone.
    """
    found = [
        RealStorage(path) for path in paths if os.path.isdir(path)
    ]  # formatting creates the others
    held = {
        each.root: [name for name in each.list("metadata") if name != ".lock"] for each in found
    }
    if held.get(paths[0]):
        return
    for path, names in held.items():
        if names:
            raise errors.InvalidConfig(
                f"the node's metadata are in {path}/metadata: give that directory first, not "
                f"{paths[0]}",
                option="dir",
            )
    if clustered:
        return  # `_metadata_id` reports missing files
    formatted = {each.root: each for each in found if directories.read_format(each) is not None}
    for root, each in formatted.items():
        if each.list(PARTITIONS):
            raise errors.CorruptLog(
                f"{root} holds partitions, and {paths[0]}/metadata is empty: the metadata are lost,"
                " or in a directory that was not given. Give all directories, the one with the "
                "metadata first"
            )
    if formatted and paths[0] not in formatted:  # the first directory is formatted
        raise errors.CorruptLog(
            f"{next(iter(formatted))} belongs to a node whose metadata are not in {paths[0]}, which"
            " is empty: mount the directory with the metadata, and give it first"
        )


def _format_all(paths: Sequence[str], node_id: int, cluster_id: str) -> list[directories.Format]:
    """Return the identity of every directory; format empty ones for the cluster of the others.

    All directories are locked meanwhile, so that none is formatted beside a directory in use.
    """
    locked: list[RealStorage] = []
    try:
        for path in paths:
            storage = RealStorage(path)
            lock(storage)
            locked.append(storage)
        found = [directories.read_format(storage) for storage in locked]
        known = [each for each in found if each is not None]
        cluster_id = cluster_id or (known[0].cluster_id if known else new_id())
        for storage, each in zip(locked, found, strict=True):
            if each is not None:
                directories.check_format(
                    storage, each, cluster_id=cluster_id, node_id=node_id, build=pk.__version__
                )
        return [
            each or _format(storage, cluster_id, node_id)
            for storage, each in zip(locked, found, strict=True)
        ]
    finally:
        for storage in locked:
            storage.unlock()


def _format(storage: RealStorage, cluster_id: str, node_id: int) -> directories.Format:
    fresh = directories.Format(directories.FORMAT, pk.__version__, cluster_id, node_id, new_id())
    directories.format_directory(storage, fresh)
    return fresh


def lock(storage: RealStorage) -> None:
    """Lock a directory; wait a moment for a process that is ending with its supervisor."""
    for _ in range(LOCK_ATTEMPTS):
        try:
            storage.lock()
            return
        except errors.DirectoryLocked:
            block_s(LOCK_WAIT_S)
    storage.lock()


# -- the metadata's directory ----------------------------------------------------------------------


def _metadata_id(path: str, cluster_id: str, server: Any) -> str:
    """Return the uuid of `path/metadata`; '' = none of its own.  Raises `CorruptLog` (F3)."""
    if "controller" not in roles_of(server):
        return ""
    storage = RealStorage(os.path.join(path, "metadata"))
    vote = read_state(storage)
    try:
        raw = storage.read_file(METADATA_FILE)
    except FileNotFoundError:
        if not is_clustered(server):
            return ""
        raise errors.CorruptLog(
            f"{storage.root}/{METADATA_FILE} is gone: the metadata here is lost, or is that of a "
            f"node that was alone. Remove nothing here. {WITHOUT_VOTE}"
        ) from None
    known = read_metadata_identity(storage, raw)
    owner, directory_id = (known["cluster_id"], known["node_id"]), str(known["directory_id"])
    if owner != (cluster_id, int(server["node_id"])):
        raise errors.DirectoryOfAnotherCluster(
            f"{storage.root} belongs to node {owner[1]} of cluster {owner[0]}, not to node "
            f"{server['node_id']} of cluster {cluster_id}",
            directory=storage.root,
        )
    for_cluster = known.get("clustered") or directory_id == voter_directory_id(*owner)
    if for_cluster and not is_clustered(server):  # F5
        raise errors.InvalidConfig(
            f"{storage.root} was formatted for a cluster, and controller_quorum_voters is not set: "
            "start it with the --config that it was formatted with",
            option="controller_quorum_voters",
        )
    if vote is None and is_clustered(server):  # for a node that is alone the log decides (Q5)
        raise vote_lost(storage)
    return directory_id


def read_metadata_identity(storage: Storage, raw: bytes) -> dict[str, Any]:
    """Decode directory.json.  Raises `CorruptLog` if it is damaged, `NewerFormat`."""
    where = f"{storage.root}/{METADATA_FILE}"
    try:
        known: dict[str, Any] = json.loads(raw)
        missing = [name for name in _METADATA_FIELDS if name not in known]
        if missing:
            raise KeyError(missing[0])
    except (ValueError, KeyError, TypeError, RecursionError) as cause:
        raise errors.CorruptLog(f"{where} is damaged: {cause}") from cause
    formats.require_version(where, known["format"], METADATA_FORMAT)
    return known


def controller_identity(dirs: Sequence[str], resolved: Resolved) -> tuple[int, str, str]:
    """Return (node id, uuid of the metadata directory, address) of the controller of `settings`.

    Raises `DirectoryNotFormatted`, and for damaged directories the errors of `prepare`.
    """
    path, server = _absolute(dirs)[0], resolved.server
    node_id = int(server["node_id"])
    if "controller" not in roles_of(server):
        raise errors.InvalidConfig(f"node {node_id} has no controller", option="process_roles")
    _require_formatted([path])
    found = directories.read_format(RealStorage(path))
    assert found is not None
    directory_id = _metadata_id(path, found.cluster_id, server)
    address = voters_of(server).get(node_id) or str(server["controller_listen"])
    return node_id, directory_id or found.directory_id, address


# -- pk server format ------------------------------------------------------------------------------


def require_new(dirs: Sequence[str]) -> None:
    """Raise `DirectoryFormatted` for a directory that is not empty, `InvalidConfig` without any."""
    for path in _absolute(dirs):
        if os.path.isdir(path) and os.listdir(path):
            raise errors.DirectoryFormatted(
                f"{path} is not empty: a restore needs new directories. Move it away if the disk "
                "was replaced",
                directory=path,
            )


def format_node(
    dirs: Sequence[str],
    resolved: Resolved,
    *,
    cluster_id: str,
    initial_controllers: bool,
    ignore_formatted: bool,
    seed: Seed | None = None,
) -> Formatted:
    """Format the node's directories.

    seed: the first snapshot of the metadata log, of a cluster that is restored from its tier

    Raises `InvalidConfig` for contradictions, `DirectoryFormatted` for existing directories, and
    the errors of `prepare`.
    """
    paths, server = _absolute(dirs), resolved.server
    node_id, controls = int(server["node_id"]), "controller" in roles_of(server)
    cluster_id = _cluster_id(cluster_id, server)
    if initial_controllers and controls and node_id not in voters_of(server):
        raise errors.InvalidConfig(
            f"node {node_id} is not among controller_quorum_voters: format it without "
            "--initial-controllers, start it, and add it with `pk quorum add-controller`",
            option="controller_quorum_voters",
        )
    _require_identities(paths)
    for path in paths:
        _make(path)
    fresh = [path for path in paths if directories.read_format(RealStorage(path)) is None]
    if len(fresh) < len(paths) and not ignore_formatted:
        raise errors.DirectoryFormatted(
            f"{next(p for p in paths if p not in fresh)} is formatted already; "
            "--ignore-formatted formats only what is not"
        )
    if initial_controllers and controls and paths[0] in fresh and len(fresh) < len(paths):
        raise errors.InvalidConfig(
            f"{next(p for p in paths if p not in fresh)} is formatted already and {paths[0]}, which"
            " is to hold the metadata, is not: its controller was there before and may have voted. "
            "Mount it, or replace it: format it without --initial-controllers",
            option="initial_controllers",
        )
    _require_ours(paths, cluster_id, node_id)
    directory_id = ""
    if controls:
        directory_id = _format_metadata(
            paths[0],
            cluster_id,
            node_id,
            initial_controllers,
            fresh=paths[0] in fresh,
            clustered=is_clustered(server),
            seed=seed,
        )
    _format_all(paths, node_id, cluster_id)
    voter = directory_id == voter_directory_id(cluster_id, node_id)
    return Formatted(cluster_id, node_id, tuple(fresh), directory_id, voter)


def _require_ours(paths: Sequence[str], cluster_id: str, node_id: int) -> None:
    """Refuse to format beside a directory of another node.  Raises as `check_format`."""
    for path in paths:
        storage = RealStorage(path)
        found = directories.read_format(storage)
        if found is not None:
            directories.check_format(
                storage, found, cluster_id=cluster_id, node_id=node_id, build=pk.__version__
            )


def _cluster_id(given: str, server: Any) -> str:
    named = str(server["cluster_id"])
    if given and named and given != named:
        raise errors.InvalidConfig(
            f"--cluster-id {given} contradicts cluster_id {named}", option="cluster_id"
        )
    if not given and not named and is_clustered(server):
        raise errors.InvalidConfig(
            "every node of a cluster is formatted with the same cluster_id: set it, or give "
            f"--cluster-id ({new_id()} is free)",
            option="cluster_id",
        )
    return given or named or new_id()


def _format_metadata(
    path: str,
    cluster_id: str,
    node_id: int,
    initial: bool,
    *,
    fresh: bool,
    clustered: bool,
    seed: Seed | None = None,
) -> str:
    """Format the metadata, before the data directory, so that a formatted directory is complete."""
    root = os.path.join(path, "metadata")
    _make(root)
    storage = RealStorage(root)
    ours = (METADATA_FILE, QUORUM_STATE, ".lock")
    held = [name for name in storage.list("") if name.removesuffix(".tmp") not in ours]
    if fresh and held:
        raise errors.DirectoryOfAnotherCluster(
            f"{root} is not empty (it holds {held[0]!r})", directory=root
        )
    known_here = [name for name in storage.list("") if name != ".lock"]
    if not fresh and (known_here or not clustered):
        try:
            raw = storage.read_file(METADATA_FILE)
            return str(read_metadata_identity(storage, raw)["directory_id"])
        except (FileNotFoundError, errors.CorruptLog):
            return ""
    if initial and not fresh:  # F7
        raise errors.InvalidConfig(
            f"{path} is formatted already and {root} is empty: its controller was there before and "
            "may have voted. Put the metadata back, or format without --initial-controllers",
            option="initial_controllers",
        )
    alone_id = new_id() if seed is None else seed.directory_id
    directory_id = voter_directory_id(cluster_id, node_id) if initial else alone_id  # F1
    if seed is not None:  # the first start finishes the load (raft/recovery)
        storage.replace_file(seed.name, seed.raw)
    storage.replace_file(QUORUM_STATE, first_state())
    known = {
        "format": METADATA_FORMAT,
        "cluster_id": cluster_id,
        "node_id": node_id,
        "directory_id": directory_id,
        "clustered": clustered,
    }
    storage.replace_file(METADATA_FILE, json.dumps(known).encode())
    return directory_id
