"""The versions of a topic's Delta table: which its log can rebuild, and which one a time names.

A table's log is a directory with one commit for each version (Delta protocol, "Delta Log
Entries").  A version has the time at which the store received its commit.  A commit that is not
later than the one before it counts as one millisecond later.  This is Delta's own rule for tables
without in-commit timestamps, so pk and Spark's Delta resolve a time to the same version.

A version can be read until VACUUM removes one of its files, or until the log drops its commits.
VACUUM removes the files that were replaced first.  Therefore, if a version can be read, so can
every later one, and a binary search finds the oldest (docs/design/0023-as-of.md).

Invariants
  K1  A time names the newest version that is not later.  A time behind the newest version names
      none: a version that is committed later could still be at or before it.
  K2  An answer depends only on versions that exist.  No later commit changes it.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from pk import errors
from pk.sparkconnector import table_files, table_store
from pk.tiering.damage import damaged

if TYPE_CHECKING:
    from pk.sparkconnector.ranges import TierFile

LOG = "_delta_log"
_COMMIT = re.compile(r"(\d{20})\.json")
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint(\..+)?\.parquet")
_HISTORY = "pk tier history lists the versions"


class LogVersions(NamedTuple):
    """The versions whose commits a table's log holds."""

    first: int  #: version of the oldest commit
    times: tuple[int, ...]  #: ms since 1970 of the versions from `first` on, strictly growing
    oldest: int  #: the oldest version that can be rebuilt: 0, or the one of the oldest checkpoint

    @property
    def newest(self) -> int:
        return self.first + len(self.times) - 1


def of_listing(uri: str, names: Iterable[tuple[str, int]]) -> LogVersions:
    """Return the versions of a log from its files: their names and times in ms.

    Raises `TierTableChanged` if the log holds no commit.
    """
    commits: dict[int, int] = {}
    checkpoints: list[int] = []
    for name, at_ms in names:
        if match := _COMMIT.fullmatch(name):
            commits[int(match[1])] = at_ms
        elif match := _CHECKPOINT.fullmatch(name):
            checkpoints.append(int(match[1]))
    if not commits:
        raise errors.TierTableChanged(f"{uri}: there is no table (any more): its log is empty")
    first = newest = max(commits)
    while first - 1 in commits:  # commits below a gap belong to a log that was cut
        first -= 1
    times: list[int] = []
    for version in range(first, newest + 1):
        times.append(max(commits[version], times[-1] + 1) if times else commits[version])
    usable = [version for version in checkpoints if first - 1 <= version <= newest]
    oldest = 0 if first == 0 else max(first, min(usable, default=newest))
    return LogVersions(first, tuple(times), oldest)


def numbered(uri: str, found: LogVersions, version: int) -> int:
    """Return `version`.  Raises `TableVersionNotFound` unless the log can rebuild it."""
    if version > found.newest:
        raise errors.TableVersionNotFound(
            f"{uri} has no version {version} yet; the newest one is {found.newest} ({_HISTORY})"
        )
    if version < found.oldest:
        raise errors.TableVersionNotFound(
            f"{uri}: the log no longer holds version {version}; the oldest one left is "
            f"{found.oldest} ({_HISTORY})"
        )
    return version


def at_time(uri: str, found: LogVersions, time_ms: int) -> int:
    """Return the newest version that is not later than a time (K1).

    Raises `TableVersionNotFound` if the time is before the oldest version or behind the newest one.
    """
    oldest, newest = found.times[found.oldest - found.first], found.times[-1]
    if time_ms < oldest:
        raise errors.TableVersionNotFound(
            f"{uri}: {time_text(time_ms)} is before the oldest version left, {found.oldest} of "
            f"{time_text(oldest)} ({_HISTORY})"
        )
    if time_ms > newest:
        raise errors.TableVersionNotFound(
            f"{uri}: {time_text(time_ms)} is after the newest version, {found.newest} of "
            f"{time_text(newest)}: a later commit could still change the answer; give a time up to "
            f"that one, or versionAsOf={found.newest}"
        )
    return found.first + bisect.bisect_right(found.times, time_ms) - 1


def covering(
    uri: str,
    found: LogVersions,
    wanted: Mapping[int, int],
    ends_at: Callable[[int], Mapping[int, int]],
) -> int:
    """Return the first version that holds all offsets below `wanted`, which are by partition.

    ends_at: returns the table's ends at a version; they never shrink (rule T2).  Raises
    `TableVersionNotFound` if records are not tiered yet, or if the log no longer shows which
    version was the first.
    """

    def lacking(version: int) -> list[int]:
        ends = ends_at(version)
        return [each for each, end in wanted.items() if ends.get(each, 0) < end]

    if short := lacking(found.newest):
        raise errors.TableVersionNotFound(
            f"{uri}: partitions {short} are not yet tiered up to endingOffsets: wait for the tier "
            "(pk tier describe shows its ends), or read without pinned"
        )
    low, high = found.oldest, found.newest
    if low > 0 and not lacking(low):
        raise errors.TableVersionNotFound(
            f"{uri}: the log no longer shows which version was the first with endingOffsets; the "
            f"oldest one left, {low}, has more: give versionAsOf ({_HISTORY})"
        )
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if lacking(middle) else (low, middle)
    return low


def oldest_whole(low: int, high: int, is_whole: Callable[[int], bool]) -> int:
    """Return the oldest version of `(low, high]` whose files all exist; `high` is known to be."""
    low += 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_whole(middle) else (middle + 1, high)
    return low


def time_text(time_ms: int) -> str:
    """Return a time as ISO 8601 in UTC, with milliseconds."""
    try:
        found = datetime.fromtimestamp(time_ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{time_ms} ms"
    return found.isoformat(timespec="milliseconds").replace("+00:00", "Z")


# -- the store -------------------------------------------------------------------------------------


def log_versions(uri: str, storage_options: Mapping[str, str]) -> LogVersions:
    """List a table's log.  Raises `TierUnavailable`, `TierTableChanged`."""
    source, root = table_store.file_system(uri, storage_options)
    return of_listing(uri, _listed(uri, source, f"{root}/{LOG}"))


def _listed(uri: str, source: object, folder: str) -> list[tuple[str, int]]:
    from pyarrow import fs

    try:
        found = source.get_file_info(fs.FileSelector(folder))  # type: ignore[attr-defined]
    except FileNotFoundError as cause:
        raise errors.TierTableChanged(f"{uri}: there is no table (any more)") from cause
    except OSError as cause:
        raise errors.TierUnavailable(f"{uri}: {cause}") from cause
    return [(each.base_name, (each.mtime_ns or 0) // 1_000_000) for each in found if each.is_file]


def lost(
    uri: str,
    storage_options: Mapping[str, str],
    version: int,
    file: TierFile,
    partitions: Sequence[int],
    topic_id: str,
) -> errors.PkError:
    """Return the error for a file of `version` that is not in the store.

    `TableVersionNotFound` names the oldest version that can still be read.  If the newest version
    needs the file, too, the file was not removed by VACUUM: `DamagedTierFile`.
    """
    from pyarrow import fs

    source, root = table_store.file_system(uri, storage_options)
    newest = log_versions(uri, storage_options).newest

    def files_at(each: int) -> set[str]:
        snapshot = table_files.load_snapshot(uri, storage_options, topic_id, partitions, each)
        return set(snapshot.files)

    if file.path in files_at(newest):
        return damaged(uri, file, partitions[0], "it is not in the store")
    there = {
        each.path.removeprefix(f"{root}/")
        for each in source.get_file_info(fs.FileSelector(root, recursive=True))
        if each.is_file
    }
    oldest = oldest_whole(version, newest, lambda each: files_at(each) <= there)
    return errors.TableVersionNotFound(
        f"{uri}: version {version} can no longer be read: VACUUM removed its file {file.path}; the "
        f"oldest version left is {oldest} (the table's property delta.deletedFileRetentionDuration "
        "says how long replaced files stay)",
        version=str(version),
        oldest=str(oldest),
    )
