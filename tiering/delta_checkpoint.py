"""Makes a table's checkpoint from the previous one and the commits since, with few requests.

deltalake's own checkpoint reads each commit since the previous one from the store four times, and
lists the log.  An owner knows these commits: it wrote or read them.  So it reads the previous
checkpoint, lets deltalake merge both in a directory of this machine, and puts the result.  Of a
large table deltalake does not see the files that no commit names (checkpoint_files).

A checkpoint holds every live file, so its cost grows with the table and that of a commit does not.
Therefore the commits between two checkpoints grow with the table, too: a checkpoint comes once they
have a part of its bytes, after at least INTERVAL and at most COMMITS_MOST commits.

Invariants
  K1  A checkpoint is made of the bytes that the store has: the previous checkpoint, and exactly the
      commits behind it up to its own version.
  K2  Commits of at most RECENT_BYTES_MAX are kept; older ones are read again.  If there are more
      than COMMITS_READ_MOST, the whole is left to deltalake.
  K3  A reader compares every checkpoint with the commits (rule T2), so a wrong one is refused and
      harms no data.
"""

from __future__ import annotations

import json
import tempfile
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
from deltalake import DeltaTable

from pk.tiering import app_transactions, checkpoint_files, layout, log_reading
from pk.tiering.objects import ObjectStore

#: The fewest commits between two checkpoints.  An owner that does not know the last checkpoint
#: makes one at each version whose successor is a multiple of this, as deltalake does.
INTERVAL = int(layout.TABLE_PROPERTIES["delta.checkpointInterval"])
#: The most commits between two checkpoints: deltalake reads each in a thread of its own, all at
#: once, and a reader's first look at the table waits for them.
COMMITS_MOST = 50
#: The commits have at least one byte for this many bytes of the checkpoint before them.
BYTES_SHARE = 16
#: Bytes of commits that are kept for the next checkpoint (K2).
RECENT_BYTES_MAX = 512 * 1024
COMMITS_READ_MOST = 2 * COMMITS_MOST
LAST = "_delta_log/_last_checkpoint"
#: A larger one is left to deltalake.
CHECKPOINT_BYTES_MAX = 512 * 1024 * 1024
#: Rows of a checkpoint from which its files are carried over; deltalake merges fewer in less time.
CARRIED_ROWS_LEAST = 4_096
#: Fields of `_last_checkpoint` that deltalake writes for a checkpoint in one file.
_TOLD = frozenset(("version", "size", "sizeInBytes", "numOfAddFiles"))


class Checkpoint(NamedTuple):
    """A checkpoint in one file, and the text of `_last_checkpoint` that names it."""

    version: int
    data: bytes
    told: bytes = b""  #: b"" = it is not known
    plain_bytes: int = 0  #: its size before compression, which `RecentCommits` paces with


class RecentCommits:
    """The newest commits of one table, by version, without gaps."""

    def __init__(self) -> None:
        self.checkpoint = -1  #: the newest checkpoint that this process made; -1 = none
        self._checkpoint_bytes = 0
        self._bytes = 0  #: of all commits since the checkpoint, kept or not
        self._kept_bytes = 0
        self._commits: dict[int, bytes] = {}

    def add(self, version: int, data: bytes) -> None:
        """Notes the newest commit."""
        if version - 1 not in self._commits:
            self._commits.clear()
            self._kept_bytes = 0
        self._commits[version] = data
        self._bytes += len(data)
        self._kept_bytes += len(data)
        while self._kept_bytes > RECENT_BYTES_MAX:
            self._kept_bytes -= len(self._commits.pop(next(iter(self._commits))))

    def clear(self) -> None:
        """Forgets everything: the log may be another one."""
        self.checkpoint = -1
        self._checkpoint_bytes = self._bytes = self._kept_bytes = 0
        self._commits.clear()

    def made(self, version: int, size: int) -> None:
        """Notes a checkpoint of `size` bytes; the commits that it holds are not needed again."""
        self.checkpoint, self._checkpoint_bytes = version, size
        self._commits = {at: data for at, data in self._commits.items() if at > version}
        self._bytes = self._kept_bytes = sum(map(len, self._commits.values()))

    def is_due(self, version: int) -> bool:
        """Returns whether a checkpoint follows the commit of this version."""
        if self.checkpoint < 0:
            return (version + 1) % INTERVAL == 0
        since = version - self.checkpoint
        enough = self._bytes * BYTES_SHARE >= self._checkpoint_bytes
        return since >= COMMITS_MOST or (since >= INTERVAL and enough)

    def get(self, version: int) -> bytes | None:
        return self._commits.get(version)


class Sources(NamedTuple):
    """What a checkpoint is made of: the previous one, None = there is none, and the commits."""

    previous: Checkpoint | None
    commits: Mapping[int, bytes]


async def sources(
    store: ObjectStore, home: str, recent: RecentCommits, version: int
) -> Sources | None:
    """Reads what is missing for a checkpoint of `version`; None = deltalake must make it whole."""
    base, told = recent.checkpoint, b""
    if base < 0 or version - base > COMMITS_READ_MOST:  # other owners make checkpoints, too
        try:
            told = await store.get_range(f"{home}/{LAST}", 0, log_reading.COMMIT_BYTES_MAX)
            fields = json.loads(told)
            base = int(fields["version"])
            if any(fields.get(name) is not None for name in app_transactions.IN_PARTS):
                return None
        except FileNotFoundError:
            base = -1  # no checkpoint was made yet
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
    if version - base > COMMITS_READ_MOST or base >= version:
        return None
    previous = None
    if base >= 0:
        try:
            path = f"{home}/{checkpoint_file(base)}"
            data = await store.get_range(path, 0, CHECKPOINT_BYTES_MAX)
        except FileNotFoundError:
            return None
        if len(data) >= CHECKPOINT_BYTES_MAX:
            return None
        previous = Checkpoint(base, data, told)
    commits: dict[int, bytes] = {}
    for each in range(base + 1, version + 1):
        found = recent.get(each)
        if found is None:
            found = await log_reading.read_commit(store, home, each)
        if found is None:
            return None
        commits[each] = found
    return Sources(previous, commits)


def make(given: Sources, version: int) -> Checkpoint:
    """Makes a checkpoint.  Runs in a thread.

    Raises what deltalake raises, `OSError`, and for a damaged checkpoint or commit `ValueError`,
    `KeyError`, `TypeError` or `AttributeError`.
    """
    made = None
    if given.previous is not None:
        try:
            made = _carried_over(given.previous, given.commits, version)
        except (pa.ArrowException, KeyError, OSError):
            pass  # deltalake may read what Arrow does not, or says what is wrong
        pa.default_memory_pool().release_unused()
    return made or _by_deltalake(given.previous, given.commits, version)


def _carried_over(
    before: Checkpoint, commits: Mapping[int, bytes], version: int
) -> Checkpoint | None:
    """Makes a checkpoint with the files of the previous one (checkpoint_files); None = deltalake
    must make it whole."""
    if checkpoint_files.rows_of(before.data) < CARRIED_ROWS_LEAST:
        return None
    rest = Checkpoint(before.version, checkpoint_files.without_files(before.data))
    made = _by_deltalake(rest, commits, version)
    told = json.loads(made.told)
    if told.keys() != _TOLD:
        return None
    paths = checkpoint_files.paths_of(commits.values())
    whole = checkpoint_files.with_files(made.data, before.data, paths)
    if whole is None:
        return None
    told["size"] += whole.files
    told["numOfAddFiles"] += whole.files
    told["sizeInBytes"] = len(whole.data)
    return Checkpoint(version, whole.data, json.dumps(told).encode(), whole.plain_bytes)


def _by_deltalake(
    before: Checkpoint | None, commits: Mapping[int, bytes], version: int
) -> Checkpoint:
    """Lets deltalake merge a checkpoint with commits, in a directory of this machine."""
    with tempfile.TemporaryDirectory(prefix="pk-checkpoint-") as directory:
        log = Path(directory, "_delta_log")
        log.mkdir()
        if before is not None:
            Path(directory, checkpoint_file(before.version)).write_bytes(before.data)
            told = {"version": before.version, "size": 0}
            (log / "_last_checkpoint").write_bytes(before.told or json.dumps(told).encode())
        for each, data in commits.items():
            Path(directory, layout.commit_file(each)).write_bytes(data)
        handle = DeltaTable("file://" + urllib.parse.quote(directory))
        if handle.version() != version:
            raise ValueError(f"the commits end at version {handle.version()}, not at {version}")
        handle.create_checkpoint()
        made = Path(directory, checkpoint_file(version)).read_bytes()
        return Checkpoint(version, made, (log / "_last_checkpoint").read_bytes(), len(made))


async def put(store: ObjectStore, home: str, made: Checkpoint) -> None:
    """Puts the checkpoint and then its name, so that the name is never ahead."""
    await store.put(f"{home}/{checkpoint_file(made.version)}", made.data)
    await store.put(f"{home}/{LAST}", made.told)


def checkpoint_file(version: int) -> str:
    """Returns the path of a checkpoint in one file relative to its table."""
    return f"_delta_log/{version:020d}.checkpoint.parquet"
