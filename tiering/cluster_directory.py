"""The directory of everything in the tier that belongs to no topic, and its owner (rule T13).

    _cluster/<cluster id>/<restore generation>/owner
    _cluster/<cluster id>/<restore generation>/offsets/…     tiering/offset_files.py
    _cluster/<cluster id>/<restore generation>/metadata/…    tiering/metadata_copies.py

Two clusters may have the same id: a cluster that was lost, and another one that an operator
formatted with its id afterwards.  The second one must not replace the copies of the first one,
because a restore needs them.  So the first process that writes below a generation puts an owner
there, by put-if-absent.  The owner is the genesis of the metadata log, which is drawn once for each
log.

Invariants
  H1  A process writes or removes a copy only after it has read, or put, an owner with the genesis
      of its cluster.
  H2  An owner never changes.  So a process checks it once for each start.
"""

from __future__ import annotations

import json
from urllib.parse import quote

from pk import errors, formats
from pk.log import checkpoints
from pk.tiering.objects import ObjectStore

CLUSTER_DIRECTORY = "_cluster"
#: The restore generation of a cluster that was never restored from its tier (T13).
FIRST_GENERATION = 0
TITLE = "cluster-owner"
VERSION = 0
OWNER_BYTES_MAX = 4_096


def directory_of(cluster_id: str, generation: int = FIRST_GENERATION) -> str:
    """Return the directory of a cluster's copies below the tier's root."""
    return f"{CLUSTER_DIRECTORY}/{quote(cluster_id, safe='')}/{generation}"


def owner_path(cluster_id: str, generation: int = FIRST_GENERATION) -> str:
    return f"{directory_of(cluster_id, generation)}/owner"


def encode_owner(cluster_id: str, genesis: str) -> bytes:
    line = json.dumps({"cluster_id": cluster_id, "genesis": genesis})
    return checkpoints.encode(TITLE, (line,), VERSION)


def decode_owner(path: str, raw: bytes) -> str:
    """Return the genesis of the owner.  Raises `DamagedTierFile`, `NewerFormat`."""
    try:
        with formats.named(path):
            (line,) = checkpoints.decode(TITLE, raw, VERSION)
        return str(json.loads(line)["genesis"])
    except (ValueError, KeyError, TypeError) as cause:
        raise errors.DamagedTierFile(f"{path} is damaged: {cause}", path=path) from cause


class ClusterOwner:
    """Checks who owns the copies of this cluster."""

    def __init__(self, store: ObjectStore, cluster_id: str) -> None:
        self._store = store
        self._cluster_id = cluster_id
        self._checked = ""  #: the genesis that the store has confirmed (H2)

    @property
    def checked(self) -> bool:
        """Return whether the store has confirmed an owner."""
        return bool(self._checked)

    async def require(self, genesis: str) -> None:
        """Own the copies for the cluster of `genesis` (H1).

        Raises `TierOfAnotherCluster`, `DamagedTierFile`, `NewerFormat` and the refusals of the
        store.
        """
        if genesis == self._checked:
            return
        path = owner_path(self._cluster_id)
        if await self._store.put_if_absent(path, encode_owner(self._cluster_id, genesis)) is None:
            found = decode_owner(path, await self._store.get_range(path, 0, OWNER_BYTES_MAX))
            if found != genesis:
                raise errors.TierOfAnotherCluster(
                    f"{path}: the copies belong to another cluster with the id "
                    f"{self._cluster_id!r} (its metadata log is {found}, that of this cluster "
                    f"{genesis}); this cluster copies nothing. If the other cluster is not needed "
                    "any more, move the directory away; else format this one with another id",
                    path=path,
                )
        self._checked = genesis
