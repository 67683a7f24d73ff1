"""Replaces the epoch files of many logs together.

An epoch is SYNCED in the epoch file before its first batch is written (log/loading O6).  After an
election or a creation of many partitions, their first batches arrive in the same round of the
writer, and each file would cost two syncs and a rename of its own.  A journal commits syncs that
wait side by side together, and renames that free a replaced file wait side by side, too.  So
replacing the files together takes a small part of that time.

Only a plan that begins with its epoch takes part.  Another one may have to repair the file first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

from pk import errors
from pk.log import epochs
from pk.log.epochs import LeaderEpochs
from pk.log.plan import EpochOp, WritePlan
from pk.log.storage import Storage

#: So many files are replaced together.  More take hardly longer, and if one of them fails, all are
#: left to their plans.
TOGETHER_MAX = 256


class EpochFile(NamedTuple):
    """The epoch file that a plan replaces before its first batch."""

    path: str  #: of the log
    plan: WritePlan
    content: bytes


def epoch_file_of(path: str, plan: WritePlan) -> EpochFile | None:
    """Return the epoch file of a plan that may be replaced ahead of the plan; None = there is none.

    path: of the log
    """
    first = plan.ops[0] if plan.ops else None
    return EpochFile(path, plan, first.content) if isinstance(first, EpochOp) else None


def replace_together(storage: Storage, files: Sequence[EpochFile]) -> None:
    """Replace the files, SYNCED, and note that in their plans (`epochs_synced`).

    If one of `TOGETHER_MAX` files fails, these are left to their plans: each then has an error of
    its own.
    """
    for at in range(0, len(files) if len(files) > 1 else 0, TOGETHER_MAX):
        _replace(storage, files[at : at + TOGETHER_MAX])


def _replace(storage: Storage, files: Sequence[EpochFile]) -> None:
    try:
        storage.replace_all({f"{each.path}/{epochs.FILE}": each.content for each in files})
    except (errors.PkError, FileNotFoundError):
        return
    for each in files:
        each.plan.epochs_synced = True


def write(storage: Storage, path: str, known: LeaderEpochs) -> None:
    """Write the file of one log, SYNCED, unless it has this content: it was SYNCED, then."""
    name, content = f"{path}/{epochs.FILE}", known.encode()
    with contextlib.suppress(FileNotFoundError):
        if storage.read_file(name) == content:
            return
    storage.replace_file(name, content)
