"""Sums the row hashes of files whose names do not state them, before they are removed (rule T2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pk import errors
from pk.tiering.accounting import UNREADABLE
from pk.tiering.data_files import DataFile
from pk.tiering.reader import TablePartition, TierReader
from pk.tiering.table import Snapshot


async def row_sums(
    reader: TierReader,
    home: str,
    snapshot: Snapshot,
    files: Sequence[DataFile],
    damage_found: Callable[[DataFile, errors.DamagedTierFile], None],
) -> dict[str, int]:
    """Reads whole files and returns their row sums by path; `UNREADABLE` for a damaged file."""
    sums: dict[str, int] = {}
    for file in files:
        try:
            sums[file.path] = await reader.row_sum(
                TablePartition(home, file.partition, snapshot), file
            )
        except errors.DamagedTierFile as error:
            sums[file.path] = UNREADABLE
            damage_found(file, error)
    return sums
