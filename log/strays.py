"""Directories of partitions that nobody knew when a broker looked at its disks.

What a broker knows at its start may be old: the controller that told it may have been deposed
without having heard of it.  A partition that it does not know may then have been created since, and
this directory hold what others count on.  So a stray is only noted, and repaired like the others:
a later start in the same boot must not take what a power loss did to it for damage.  It goes when
the metadata holds the registration of this very process (rule Q2): then it holds everything that
could have brought a partition here before.  And it goes only if those metadata can know it: it was
created under this very metadata log, below the offset that the metadata have reached.  Any other
directory is kept, and listed (rule L15): other metadata may know it.

Invariants
  Y1  nothing is renamed or removed before `unknown` is asked
  Y2  a partition that turns out to be known goes on in the directory where it stands
  Y3  what has a stray's name when its turn comes goes only if it is that stray: the topic's next
      life may have begun there, on a disk that had no room for it before
  Y4  the directory of a partition that the metadata cannot know is neither renamed nor removed
"""

from __future__ import annotations

import contextlib

from pk import errors, settings
from pk.log.directory import Directory
from pk.log.identity import Identity
from pk.log.partition_log import PartitionLog
from pk.log.plan import LogConfig
from pk.types import PartitionKey

#: The repair needs no settings: nothing is served.
_ANY = LogConfig.of(settings.TOPIC.resolve({}))


class Strays:
    """Those of one broker."""

    def __init__(self) -> None:
        self._found: dict[PartitionKey, tuple[Directory, str, Identity]] = {}

    async def note(self, directory: Directory, path: str, found: Identity, now_ms: int) -> None:
        """The metadata do not know the partition in `path`.  Raises the storage's errors."""
        key = found.key
        self._found[key] = (directory, path, found)

        def repair() -> None:
            PartitionLog.open(
                directory.disk.storage, path, found.topic_partition, key.topic_id, _ANY,
                clean=directory.closed_properly, same_boot=directory.same_boot,
                recovery_point=directory.recovery_points.get(key, 0),
                log_start=directory.log_starts.get(key), now_ms=now_ms,
            ).close(clean=False)  # fmt: skip

        with contextlib.suppress(errors.CorruptLog):  # whoever opens it for good will say so
            await directory.disk.write(repair)

    def __contains__(self, key: PartitionKey) -> bool:
        return key in self._found

    def known(self, key: PartitionKey) -> None:
        """It is no stray (Y2), whether or not it can be opened."""
        self._found.pop(key, None)

    def unknown(self) -> list[tuple[Directory, str, Identity]]:
        """What no partition is, for `directory.give_up` to look at once more (Y3)."""
        found, self._found = self._found, {}
        return [home for home in found.values() if home[0].failed is None]
