"""The file `quorum-state`: the vote of a controller, and the end of the log noted with it.

The supervisor reads it before a start, so this module imports neither the log nor Arrow.
"""

from __future__ import annotations

from typing import Any

from pk import errors, formats
from pk.log import sealed
from pk.log.storage import Storage
from pk.server.raft.messages import Vote

QUORUM_STATE = "quorum-state"
#: The format of `quorum-state` that this build writes.
FORMAT = 1
#: Advice of the error for a damaged or missing vote.
WITHOUT_VOTE = (
    "In a cluster exchange this controller; its partitions stay. A node that is alone starts "
    "without the file, if its log is whole. docs/REPAIR.md, The saved vote, has the commands"
)


def read_state(storage: Storage, level: int = formats.LEVEL) -> tuple[Vote, int] | None:
    """Read the saved vote and the synced end noted with it; None if there is no file.

    level: of `pk.format`, the highest that this node knows.

    Raises `CorruptLog` for a damaged file, because a guessed vote could be a second vote in its
    epoch, and `NewerFormat`.
    """
    try:
        raw = storage.read_file(QUORUM_STATE)
    except FileNotFoundError:
        return None
    try:
        known = sealed.decode(raw)
        version = sealed.field(known, "format", int)
        if not FORMAT <= version <= formats.number_of(level):
            formats.require_version(f"{storage.root}/{QUORUM_STATE}", version, FORMAT)
        epoch, voted_for = (sealed.field(known, name, int) for name in ("epoch", "voted_for"))
        vote = Vote(epoch, voted_for, sealed.field(known, "voted_directory_id", str))
        return vote, sealed.field(known, "synced_end", int)
    except sealed.CorruptFile as damage:
        raise errors.CorruptLog(
            f"{storage.root}/{QUORUM_STATE} is damaged: {damage}. Nothing here was changed; remove "
            f"nothing. {WITHOUT_VOTE}"
        ) from damage


def state_bytes(vote: Vote, synced_end: int, level: int = 1) -> bytes:
    """Return the content of `quorum-state`; `level`: of the formats in the directory (rule Q6)."""
    known: dict[str, Any] = {
        "format": max(FORMAT, formats.number_of(level)),
        "epoch": vote.epoch,
        "voted_for": vote.voted_for,
        "voted_directory_id": vote.voted_directory_id,
        "synced_end": synced_end,
    }
    return sealed.encode(known)


def first_state() -> bytes:
    """Return the content of `quorum-state` before any vote."""
    return state_bytes(Vote(), 0)


def vote_lost(storage: Storage) -> errors.CorruptLog:
    """Return the error for a lost vote where other voters exist or existed (rule Q5)."""
    return errors.CorruptLog(
        f"{storage.root}/{QUORUM_STATE} is gone, and the metadata log is there: without its vote "
        f"this controller could vote twice in an epoch. Remove nothing here. {WITHOUT_VOTE}"
    )
