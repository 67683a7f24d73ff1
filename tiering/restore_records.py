"""The restores of a store, one object for each generation (rule T13).

    _cluster/_restores/<generation>/restore       which cluster is restored, and as which one
    _cluster/_restores/<generation>/metadata      the first metadata of the restored cluster

Invariants
  A1  A generation belongs to one restore in the whole store: put-if-absent decides between two.
  A2  The first metadata are put after every table was claimed, and never change.  Every node of the
      restored cluster begins with them.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass

from pk import errors, formats
from pk.log import checkpoints
from pk.tiering.cluster_directory import CLUSTER_DIRECTORY
from pk.tiering.objects import ObjectStore

RESTORES = f"{CLUSTER_DIRECTORY}/_restores"
TITLE = "cluster-restore"
VERSION = 0
RECORD_BYTES_MAX = 4_096
_NAME = re.compile(rf"^{RESTORES}/(?P<generation>\d{{5}})/restore$")


@dataclass(slots=True, frozen=True)
class RestoreRecord:
    """One restore."""

    generation: int
    source: str  #: id of the cluster that was lost
    copy: str  #: path of the copy of its metadata
    cluster_id: str  #: id of the restored cluster
    genesis: str  #: of its metadata log
    began_ms: int  #: wall clock of the machine that began it


def record_path(generation: int) -> str:
    return f"{RESTORES}/{generation:05d}/restore"


def seed_path(generation: int) -> str:
    """Return the path of the first metadata of the restored cluster."""
    return f"{RESTORES}/{generation:05d}/metadata"


async def put_record(store: ObjectStore, record: RestoreRecord) -> bool:
    """Begin a restore; return False if its generation is taken (A1)."""
    raw = checkpoints.encode(TITLE, (json.dumps(asdict(record)),), VERSION)
    return await store.put_if_absent(record_path(record.generation), raw) is not None


async def restores_in(store: ObjectStore) -> list[RestoreRecord]:
    """Return the restores of the store by generation.  Raises `DamagedTierFile`, `NewerFormat`."""
    found = []
    for each in await store.list(RESTORES):
        if _NAME.match(each.path):
            found.append(decode(each.path, await store.get_range(each.path, 0, RECORD_BYTES_MAX)))
    return sorted(found, key=lambda record: record.generation)


def decode(path: str, raw: bytes) -> RestoreRecord:
    try:
        with formats.named(path):
            (line,) = checkpoints.decode(TITLE, raw, VERSION)
        return RestoreRecord(**json.loads(line))
    except (ValueError, KeyError, TypeError) as cause:
        raise errors.DamagedTierFile(f"{path} is damaged: {cause}", path=path) from cause
