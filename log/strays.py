"""Strays: directories of partitions that the metadata did not know when the broker looked at its
disks.

The metadata of a broker may be old when it starts: the controller that sent them may have been
deposed already.  A partition that they do not have may have been created since, and its directory
may hold records that other replicas rely on.  So a stray is only noted, and repaired like other
logs; otherwise a later start in the same boot would take the effects of a power loss for damage.

The broker discards a stray only after its metadata hold the registration of this very process
(rule Q2): they then hold every earlier record that could have placed a partition here.  The stray
must also have been created under this very metadata log, below the offset that the metadata have
reached.  Any other directory is kept, and listed (rule L15), because other metadata may know it.

Invariants
  Y1  No directory is renamed or removed before `unknown` is called.
  Y2  A partition that becomes known is served from the directory where it stands.
  Y3  A directory is discarded only if it still belongs to the topic id that was noted as a stray.
      A re-creation of the topic at the same path, which a full disk had prevented, may have
      succeeded since.
  Y4  The directory of a partition that the metadata cannot know is neither renamed nor removed.
"""

from __future__ import annotations

import contextlib

from pk import errors, settings
from pk.log.directory import Directory
from pk.log.identity import Identity
from pk.log.partition_log import PartitionLog
from pk.log.plan import LogConfig
from pk.types import PartitionKey

#: Default settings: the repair needs none, for a stray is not served.
_ANY = LogConfig.of(settings.TOPIC.resolve({}))


class Strays:
    """The strays of one broker."""

    def __init__(self) -> None:
        self._found: dict[PartitionKey, tuple[Directory, str, Identity]] = {}

    async def note(self, directory: Directory, path: str, found: Identity, now_ms: int) -> None:
        """Note that the metadata do not know the partition in `path`, and repair its log.  Raises
        the storage's errors.
        """
        key = found.key
        self._found[key] = (directory, path, found)

        def repair() -> None:
            PartitionLog.open(
                directory.disk.storage, path, found.topic_partition, key.topic_id, _ANY,
                clean=directory.closed_properly, same_boot=directory.outlived(key),
                recovery_point=directory.recovery_points.get(key, 0),
                log_start=directory.log_starts.get(key), now_ms=now_ms,
            ).close(clean=False)  # fmt: skip

        # the next opening of the log reports the error
        with contextlib.suppress(errors.CorruptLog):
            await directory.disk.write(repair)

    def __contains__(self, key: PartitionKey) -> bool:
        return key in self._found

    def known(self, key: PartitionKey) -> None:
        """Forget a stray that has become known (Y2), whether or not its log can be opened."""
        self._found.pop(key, None)

    def unknown(self) -> list[tuple[Directory, str, Identity]]:
        """Return the identities that are still strays; `directory.give_up` checks each again
        (Y3).
        """
        found, self._found = self._found, {}
        return [home for home in found.values() if home[0].failed is None]
