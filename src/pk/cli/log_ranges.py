"""Finds the damaged ranges of a log in a data directory, for `pk log list` and `pk log repair`."""

from __future__ import annotations

from pk.log import directory as directories
from pk.log import identity
from pk.log import repair as repairing
from pk.log.damaged_ranges import FAR
from pk.log.files import RealStorage
from pk.log.identity import ADOPTED, Identity
from pk.log.repair import Finding
from pk.server.node.format import PARTITIONS
from pk.server.node.run_config import boot_id
from pk.types import Offset


def findings(storage: RealStorage, name: str) -> list[Finding]:
    """Return every damaged range of the log in directory `name`, ascending; reads every batch.

    Returns none for a log without an identity.  Raises `LogUnidentified` for a damaged identity.
    """
    path = f"{PARTITIONS}/{name}"
    owner = identity.read(storage, path)
    if owner is None:
        return []
    key = owner.key
    run, closed = directories.read_run(storage)
    points = directories.read_offsets(storage, directories.RECOVERY_POINTS)
    marks = directories.read_offsets(storage, directories.HIGH_WATERMARKS)
    point = points.get(key, 0)
    floor = max(point, marks.get(key, 0))
    begins = _local_start(storage, owner) if closed else FAR
    found = repairing.look(storage, path, trusted=closed, floor=floor, local_start=begins)
    # a power loss: the next start truncates the torn end itself
    if not closed and (run.boot_id != boot_id() or key in run.torn):
        found = [each for each in found if each.damage.start < point]
    return found


def _local_start(storage: RealStorage, owner: Identity) -> Offset:
    """Return the largest offset at which the log may begin; FAR if the checkpoints do not say.

    After a clean stop they do.  After another end, the topic's table may reach further than the
    checkpoints know; the broker asks it at its next start.
    """
    known = identity.read_all(storage).get(str(owner.topic_partition))
    if known is not None and known.state == ADOPTED:
        return FAR
    named = (directories.LOG_STARTS, directories.LOCAL_STARTS)
    starts = [directories.read_offsets(storage, each).get(owner.key) for each in named]
    return FAR if None in starts else max(each for each in starts if each is not None)
