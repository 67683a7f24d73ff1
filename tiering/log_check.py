"""Checks whether a version of a table is what pk committed (rules T2, T8, T10).  Pure.

Delta's log has no checksums.  One flipped bit in a commit's JSON or in a checkpoint may drop a
file, or alter a range or a counter, and every engine accepts it.  Therefore pk's commits state
checksums of their own content:

  commitInfo `pk.check`   CRC-32C of the commit's own actions
  commitInfo `pk.files`   the live files after the commit: their number, the sum of the hashes of
                          their paths, the sum of the hashes of their facts
  txn `<partition>:check` hash of the partition's counters

A load compares new commits with their `pk.check`, the live files with `pk.files` of pk's newest
commit, and the counters with `check`.  A checkpoint is compared in this way, too, and never
trusted.

Commits of other engines (OPTIMIZE, Z-order, VACUUM, DELETE) have no checksum.  The paths that they
add and remove after pk's newest commit are followed.

Invariants
  H1  A commit without `pk.check` holds none of pk's txn actions.  A commit that holds one was
      written by pk, and is damaged.
  H2  The hash of a file's facts counts only files whose statistics are in the log, so that every
      reader computes the same sum.
  H3  A walk reads at most WALK_MAX commits.  With more, files are compared only with their names.
"""

from __future__ import annotations

import hashlib
import json
import struct
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from crc32c import crc32c

from pk import errors
from pk.tiering.data_files import DataFile, NewFile
from pk.tiering.layout import (
    COUNTERS_OF_VERSION_1,
    PARTITION_COLUMN,
    SUM_MODULUS,
    PartitionCounters,
    parse_written_path,
)

#: Keys in a commit's commitInfo.
CHECK = "pk.check"
FILES = "pk.files"
#: Prefix of the application ids of pk's txn actions (rule T2).
APP_PREFIX = "pk:"
#: Maximum number of other engines' commits that a load follows after pk's newest commit.
WALK_MAX = 256
#: Number of commits that are read at once.
WALK_STEP = 8
_FACTS = struct.Struct("<iqqqqqq")
#: Delta's text of a timestamp holds the years 1 to 9999.
_TIME_LEAST, _TIME_MOST = -62_135_596_800_000, 253_402_300_799_999

Action = Mapping[str, Any]


def clamped_ms(timestamp_ms: int) -> int:
    """Returns the nearest timestamp that Delta's statistics can hold."""
    return min(max(timestamp_ms, _TIME_LEAST), _TIME_MOST)


def _hash(data: bytes) -> int:
    """Returns a hash of 63 bits: a txn version holds no more (rule T2)."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") % SUM_MODULUS


# -- what commits say ------------------------------------------------------------------------------


class FileSums(NamedTuple):
    """The number and hashes of a version's live files."""

    files: int = 0
    paths: int = 0  #: sum of the hashes of their paths
    facts: int = 0  #: sum of the hashes of their facts (H2)

    def plus(self, files: Iterable[DataFile], sign: int = 1) -> FileSums:
        """Returns the sums with `files` added; with `files` removed if `sign` is -1."""
        count, paths, facts = self
        for file in files:
            count += sign
            paths += sign * path_hash(file.path)
            if file.stats:
                facts += sign * _facts_hash(file)
        return FileSums(count, paths % SUM_MODULUS, facts % SUM_MODULUS)

    def text(self) -> str:
        return f"{self.files}-{self.paths:016x}-{self.facts:016x}"

    @staticmethod
    def parse(text: object) -> FileSums | None:
        """Parses the sums from a commit's text; None if the text is no such sums."""
        parts = text.split("-") if isinstance(text, str) else []
        try:
            count, paths, facts = parts
            return FileSums(int(count), int(paths, 16), int(facts, 16))
        except ValueError:
            return None


def path_hash(path: str) -> int:
    return _hash(path.encode())


def _facts_hash(file: DataFile) -> int:
    facts = _FACTS.pack(
        file.partition,
        file.min_offset,
        file.max_offset,
        clamped_ms(file.min_timestamp_ms),
        clamped_ms(file.max_timestamp_ms),
        file.rows,
        file.size,
    )
    return _hash(facts + file.path.encode())


def counters_check(counters: PartitionCounters) -> int:
    """Returns the txn `check` of a partition with these counters.

    Counters that version 1 has are hashed as version 1 hashed them, so that the tables of earlier
    builds are read on.
    """
    stated = counters[:COUNTERS_OF_VERSION_1] if counters.version == 1 else counters
    return _hash(b"".join(struct.pack("<q", value) for value in stated))


def of_actions(actions: Iterable[Action]) -> str:
    """Returns `pk.check` of a commit: a checksum of its actions, independent of their order and
    layout in the file.

    Of commitInfo only pk's own keys count: the engine adds its time and name.
    """
    lines = []
    for action in actions:
        plain = _without_nulls(action)
        info = plain.get("commitInfo")
        if isinstance(info, dict):
            kept = {name: info[name] for name in ("isBlindAppend", FILES) if name in info}
            plain = {"commitInfo": kept}
        lines.append(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode())
    crc = 0
    for line in sorted(lines):
        crc = crc32c(line + b"\n", crc)
    return f"{crc:08x}"


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return value


def expected_actions(
    adds: Sequence[tuple[NewFile, str]],
    removes: Sequence[DataFile],
    data_change: bool,
    now_ms: int,
    versions: Mapping[str, int],
    info: Mapping[str, Any],
) -> list[Action]:
    """Returns the actions that deltalake writes for a commit; `adds` come with the text of their
    statistics."""
    actions: list[Action] = [{"commitInfo": dict(info)}]
    for new, stats in adds:
        add = {
            "path": quoted(new.file.path),
            "partitionValues": {PARTITION_COLUMN: str(new.file.partition)},
            "size": new.file.size,
            "modificationTime": new.modified_ms,
            "dataChange": new.data_change,
            "stats": stats,
        }
        actions.append({"add": add})
    for file in removes:
        remove = {
            "path": quoted(file.path),
            "dataChange": data_change,
            "deletionTimestamp": now_ms,
            "extendedFileMetadata": True,
            "partitionValues": {PARTITION_COLUMN: str(file.partition)},
            "size": file.size,
        }
        actions.append({"remove": remove})
    actions += [{"txn": {"appId": app, "version": value}} for app, value in versions.items()]
    return actions


def quoted(path: str) -> str:
    """Returns a path as it stands in Delta's log."""
    return urllib.parse.quote(path, safe="/=")


# -- what a load compares --------------------------------------------------------------------------


class CommitFacts(NamedTuple):
    """The facts in one commit's JSON."""

    ours: bool  #: whether it has pk's checksum and the checksum is right
    files: FileSums | None
    added: tuple[str, ...]
    removed: tuple[str, ...]


def read_commit(uri: str, version: int, data: bytes) -> CommitFacts:
    """Returns the facts of a commit; raises `TierTableChanged` if it is damaged."""

    def damaged(what: str) -> errors.TierTableChanged:
        return errors.TierTableChanged(
            f"{uri}: version {version} of the table's log {what}; restore "
            f"_delta_log/{version:020d}.json",
            uri=uri,
            version=str(version),
        )

    try:
        actions = [json.loads(line) for line in data.split(b"\n") if line.strip()]
        if not all(isinstance(action, dict) for action in actions):
            raise ValueError("an action is no object")
        infos = [action["commitInfo"] for action in actions if "commitInfo" in action]
        added = tuple(_path(action["add"]) for action in actions if "add" in action)
        removed = tuple(_path(action["remove"]) for action in actions if "remove" in action)
        apps = [str(action["txn"]["appId"]) for action in actions if "txn" in action]
        info = infos[0] if infos else {}
        check = info.get(CHECK)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as cause:
        raise damaged(f"is damaged ({cause})") from cause
    if check is None:
        if any(app.startswith(APP_PREFIX) for app in apps):  # H1
            raise damaged("sets pk's counters and has no checksum")
        return CommitFacts(False, None, added, removed)
    found = of_actions(actions)
    if check != found:
        raise damaged(f"is damaged: its checksum is {check}, its actions give {found}")
    return CommitFacts(True, FileSums.parse(info.get(FILES)), added, removed)


def _path(action: Any) -> str:
    path = action["path"]
    if not isinstance(path, str):
        raise ValueError("a path is no text")
    return urllib.parse.unquote(path)


class CommitWalk:
    """Reads a table's newest commits backwards and compares its files with them.

    `found` are the sums of the files of `version`.  `known` is the newest version that was compared
    before, -1 if there is none.  The caller asks for `wanted` versions, passes each commit to
    `take` until `wanted` is empty, then calls `finish`.
    """

    def __init__(self, uri: str, version: int, found: FileSums, known: int) -> None:
        self._uri = uri
        self._version = version
        self._found = found
        self._known = known
        self._next = version
        self._base: FileSums | None = None  #: of pk's newest commit
        self._behind: list[CommitFacts] = []  #: other engines' commits after it, newest first
        self._lost = False  #: a commit that should be followed no longer exists

    def wanted(self) -> list[int]:
        """Returns the versions to read next, newest first."""
        if self._base is None and not self._lost:
            least = 0
        else:
            least = self._known + 1 if self._known >= 0 else self._version + 1
        least = max(least, self._version - WALK_MAX + 1)
        return list(range(self._next, max(self._next - WALK_STEP, least - 1), -1))

    def take(self, version: int, data: bytes | None) -> None:
        """Takes the JSON of `version`, None if it does not exist.  Raises `TierTableChanged`."""
        assert version == self._next, (version, self._next)
        self._next -= 1
        if data is None:
            self._lost = self._lost or self._base is None
            return
        facts = read_commit(self._uri, version, data)
        if self._base is not None or self._lost:
            return
        if facts.ours and facts.files is not None:
            self._base = facts.files
        else:
            self._behind.append(facts)
            if version == 0:
                self._base = FileSums()

    def finish(self) -> None:
        """Raises `TierTableChanged` if the files differ from those of the log (H3)."""
        if self._base is None:
            return
        # An engine may also add a live file again, with other statistics, or restore the files of
        # pk's newest commit (RESTORE), whatever its commits before that did.
        expected = [self._followed(again) for again in (False, True)]
        expected.append((self._base.files, self._base.paths))
        facts = None if self._behind else self._base.facts
        _check_sums(self._uri, self._version, self._found, expected, facts, len(self._behind))

    def _followed(self, again: bool) -> tuple[int, int]:
        """Returns number and hash of the paths after the commits of other engines; `again`: the
        files they add were live before."""
        assert self._base is not None
        count, paths, _ = self._base
        live: dict[str, bool] = {}
        for commit in reversed(self._behind):
            for path in commit.removed:
                if live.get(path, True):
                    count, paths = count - 1, paths - path_hash(path)
                live[path] = False
            for path in commit.added:
                if not live.get(path, again):
                    count, paths = count + 1, paths + path_hash(path)
                live[path] = True
        return count, paths % SUM_MODULUS


def compare(
    uri: str,
    version: int,
    files: Mapping[str, DataFile],
    read: Callable[[int], bytes | None],
) -> None:
    """Raises `TierTableChanged` unless `files` are what was committed up to `version`; `read`
    returns the JSON of a version."""
    check_names(uri, version, files.values())
    walk = CommitWalk(uri, version, FileSums().plus(files.values()), -1)
    while wanted := walk.wanted():
        for each in wanted:
            walk.take(each, read(each))
    walk.finish()


def check_counters(
    uri: str, version: int, partition: int, counters: PartitionCounters, check: int | None
) -> None:
    """Raises `TierTableChanged` unless `check` is that of `counters`."""
    if counters == PartitionCounters() and check is None:
        return
    if check != counters_check(counters):
        raise errors.TierTableChanged(
            f"{uri}: version {version}: the counters of partition {partition} {counters} do not "
            f"agree with their checksum ({'none' if check is None else check}): the log or its "
            "checkpoint is damaged; restore _delta_log",
            uri=uri,
            version=str(version),
        )


def check_sums(uri: str, version: int, found: FileSums, said: FileSums) -> None:
    """Raises `TierTableChanged` unless the sums of the live files are those that were `said`."""
    _check_sums(uri, version, found, [(said.files, said.paths)], said.facts)


def _check_sums(
    uri: str,
    version: int,
    found: FileSums,
    expected: Sequence[tuple[int, int]],
    facts: int | None,
    foreign: int = 0,
) -> None:
    """Compares sums: `expected` are the possible values of number and hash of the paths; `facts`
    None = the hash of the facts is unknown; `foreign`: how many commits of other engines are the
    newest ones."""
    what = ""
    if (found.files, found.paths) not in expected:
        what = f"names {found.files} files, the commits say {expected[0][0]}"
        if found.files == expected[0][0]:
            what = "names other files than the commits say"
    elif facts not in (None, found.facts):
        what = "states other facts of a file than pk committed"
    if what:
        advice = "restore _delta_log, or remove the damaged checkpoint"
        if foreign:
            advice = (
                f"restore version {version - foreign}, if another engine, which committed all "
                f"later ones, replaced files that were already gone; otherwise {advice}"
            )
        raise errors.TierTableChanged(
            f"{uri}: version {version} {what}: the log or its checkpoint is damaged; {advice}",
            uri=uri,
            version=str(version),
        )


def check_names(uri: str, version: int, files: Iterable[DataFile]) -> None:
    """Raises `TierTableChanged` unless the statistics of pk's files lie within their names."""
    for file in files:
        name = parse_written_path(file.path)
        if name is None or not file.stats:
            continue
        inside = name.start <= file.min_offset <= file.max_offset < name.end
        if name.partition != file.partition or not inside or file.rows > name.end - name.start:
            raise errors.TierTableChanged(
                f"{uri}: version {version} states partition {file.partition}, offsets "
                f"{file.min_offset} to {file.max_offset} and {file.rows} rows of {file.path}: its "
                "name says otherwise; restore _delta_log",
                uri=uri,
                version=str(version),
            )
