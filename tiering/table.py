"""A topic's table as the owner uses it: snapshots, exact commits, and a fake with the same
guarantees.

The protocol is small: `load` the newest version, `commit` on exactly the version that was loaded.
`delta.py` has the real implementation.  `MemoryTable` here serves the simulator and the property
tests; both pass the same contract tests (tests/contract/test_table.py).

Invariants
  D1  A commit lands only if the version it read is still the newest (rule T3); nothing is rebased.
  D2  A `commit` that raises may have landed: the caller reloads and looks for its own change (rule
      T5).
  D3  A snapshot never changes; a later version is another snapshot.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from pk import errors, generations
from pk.tiering import accounting, commit_pacing, layout, log_check
from pk.tiering.accounting import RowsMissing
from pk.tiering.data_files import DataFile, NewFile
from pk.tiering.layout import PartitionCounters
from pk.tiering.live_files import LiveFiles, PartitionFiles
from pk.tiering.log_check import FileSums
from pk.types import NONE, Epoch, Offset

#: Called before files are deleted; False = delete none.
MayDelete = Callable[[], Awaitable[bool]]


async def always() -> bool:
    """Returns True: nothing forbids the deletion."""
    return True


@dataclass(slots=True, frozen=True)
class TableProtocol:
    """The protocol that readers and writers of a table must support (rule T8)."""

    reader: int = layout.READER_VERSION
    writer: int = layout.WRITER_VERSION
    features: tuple[str, ...] = ()

    def check(self, uri: str) -> None:
        """Raises `TierTableChanged` unless this is the protocol pk accepts."""
        if self.features or (self.reader, self.writer) != (
            layout.READER_VERSION,
            layout.WRITER_VERSION,
        ):
            wanted = f"reader {layout.READER_VERSION}, writer {layout.WRITER_VERSION}, no features"
            raise errors.TierTableChanged(
                f"{uri}: the table's protocol is now reader {self.reader}, writer {self.writer}, "
                f"features {', '.join(self.features) or 'none'}; pk accepts {wanted}. Tiering and "
                "cold reads of this topic stop. If another engine changed it, drop the feature, or "
                f"restore the table's earlier version{layout.OR_DAMAGED}",
                uri=uri,
            )


def first_epoch(claim: Epoch) -> Epoch:
    """Returns the first epoch of the restored cluster that made a claim; NONE = it was none."""
    return generations.generation_of_epoch(claim) * generations.EPOCHS or NONE


class Snapshot:
    """One version of a table (D3).

    restored: the first epoch of the cluster that was restored last; NONE = none was (rule T13).  An
    earlier cluster may not append to any partition, also not to one that is younger than the
    restore and has no claim.  A restore claims all partitions at once, so this is known from any.
    owners: whose commits made the newest versions, and the last version of each, as far as this
    process has followed them (commit_pacing)
    """

    __slots__ = (
        "_missing",
        "_sums",
        "counters",
        "files",
        "owners",
        "protocol",
        "restored",
        "table_id",
        "version",
    )

    def __init__(
        self,
        version: int,
        table_id: str,
        files: Mapping[str, DataFile],
        counters: Mapping[int, PartitionCounters],
        protocol: TableProtocol | None = None,
        restored: Epoch = NONE,
    ) -> None:
        self.version = version
        self.table_id = table_id
        self.files = files if isinstance(files, LiveFiles) else LiveFiles.of(files.values())
        self.counters = counters
        self.protocol = protocol or TableProtocol()
        self.owners: Mapping[str, int] = {}
        self._sums: FileSums | None = None
        self._missing: dict[int, RowsMissing | None] = {}
        claims = (each.claim for each in counters.values())
        self.restored: Epoch = max(restored, first_epoch(max(claims, default=NONE)))

    def rows_missing(self, partition: int) -> RowsMissing | None:
        """Returns the missing rows of `partition` in this version (rule T17); None = no row is
        missing."""
        if partition not in self._missing:
            self._missing[partition] = accounting.rows_missing(self, partition)
        return self._missing[partition]

    @property
    def sums(self) -> FileSums:
        """Returns number and hashes of the live files, as a commit states them (log_check.py)."""
        if self._sums is None:
            self._sums = FileSums().plus(self.files.values())
        return self._sums

    def partition(self, partition: int) -> PartitionCounters:
        """Returns the counters of `partition`; zeros if the table has none yet."""
        return self.counters.get(partition, _NO_COUNTERS)

    def files_of(self, partition: int) -> PartitionFiles:
        """Returns the files of `partition` by smallest offset."""
        return self.files.partitions.get(partition, _NO_FILES)

    def covering(self, partition: int, start: Offset, end: Offset) -> list[DataFile]:
        """Returns the files that may hold offsets of `[start, end)`, by smallest offset."""
        return self.files_of(partition).covering(start, end)

    def bytes_of(self, partition: int) -> int:
        return self.files_of(partition).bytes

    def after(self, commit: Commit, version: int) -> Snapshot:
        """Returns the table's snapshot once `commit` has landed as `version`."""
        files = self.files.after(commit.removes, [new.file for new in commit.adds])
        counters = {**self.counters, **commit.counters}
        later = Snapshot(version, self.table_id, files, counters, self.protocol, self.restored)
        later._sums = self.sums_after(commit)
        later.owners = commit_pacing.owners_after(self.owners, commit.owner, version)
        # Only other engines remove rows without counting them.
        later._missing = {p: None for p, known in self._missing.items() if known is None}
        return later

    def sums_after(self, commit: Commit) -> FileSums:
        """Returns `sums` once `commit` has landed."""
        left = self.sums.plus([self.files[path] for path in commit.removes], -1)
        return left.plus([new.file for new in commit.adds])


_NO_COUNTERS = PartitionCounters()
_NO_FILES = PartitionFiles()


@dataclass(slots=True, frozen=True)
class Commit:
    """One version, to be written on top of `read` and of no other version (D1)."""

    read: Snapshot
    adds: tuple[NewFile, ...] = ()
    removes: tuple[str, ...] = ()
    counters: Mapping[int, PartitionCounters] = field(default_factory=dict)  #: new absolute values
    data_change: bool = True  #: of the removes; compaction and repair do not change the data
    owner: str = ""  #: who commits, for the other owners (commit_pacing); empty = unknown

    @property
    def blind(self) -> bool:
        """Returns whether the commit only appends (rule T7).  It read no file, so it does not
        conflict with outside maintenance."""
        return not self.removes


class Table(Protocol):
    """The Delta table of one topic."""

    @property
    def uri(self) -> str: ...

    async def load(self, partitions: Sequence[int]) -> Snapshot | None:
        """Returns the newest version with the counters of `partitions`; None if there is no table.

        Raises `TierUnavailable`, or `TierTableChanged` if the table was re-created, rolled back or
        altered.
        """
        ...

    async def create(self) -> Snapshot:
        """Creates the table (rule T7).  If it exists meanwhile, loads it."""
        ...

    async def commit(self, commit: Commit) -> Snapshot:
        """Writes one version (D1).  After any error the outcome is unknown (D2)."""
        ...

    async def vacuum(self, retention_ms: int, may_delete: MayDelete) -> int | None:
        """Deletes files that were removed more than `retention_ms` ago; returns how many.

        `may_delete` is called once the files are known; if it returns False, no file is deleted and
        the answer is None.
        """
        ...


class TableFactory(Protocol):
    """Creates the handles of tables; also probes the store at start-up (rule T14)."""

    def table(self, topic: str, topic_id: str) -> Table: ...

    async def probe(self, attempt: str) -> None:
        """Raises `StoreRefused` if the store does not honour put-if-absent, `TierUnavailable` if it
        does not answer."""
        ...

    def describe(self) -> dict[str, str]:
        """Returns the storage options without secrets."""
        ...


class CommitConflict(errors.TierUnavailable):
    """Another version landed first: reload and try again (rule T3)."""

    code = -1  # never leaves this process


def check_successor(uri: str, old: Snapshot | None, new: Snapshot) -> None:
    """Raises `TierTableChanged` unless `new` is a later version of the same table."""
    new.protocol.check(uri)
    if old is None:
        return
    if new.table_id != old.table_id:
        raise errors.TierTableChanged(
            f"{uri}: the table was re-created (id {new.table_id}, was {old.table_id}); restore "
            "the old table, or delete the topic and create it again",
            uri=uri,
        )
    if new.version < old.version:
        raise errors.TierTableChanged(
            f"{uri}: the table went back from version {old.version} to {new.version}; restore the "
            "missing versions of its _delta_log",
            uri=uri,
        )
    for partition, counters in old.counters.items():
        if new.partition(partition).end < counters.end:
            raise errors.TierTableChanged(
                f"{uri}: partition {partition} ended at {counters.end} and now ends at "
                f"{new.partition(partition).end}; restore the table's newest version",
                uri=uri,
            )


def check_known(uri: str, found: Snapshot, said: Snapshot) -> None:
    """Compares the version that the fake loads with the version that its commits state
    (log_check.py).  Raises `TierTableChanged` if they differ."""
    log_check.check_names(uri, found.version, found.files.values())
    log_check.check_sums(uri, found.version, found.sums, said.sums)
    for partition, counters in found.counters.items():
        check = log_check.counters_check(said.partition(partition))
        log_check.check_counters(uri, found.version, partition, counters, check)


# -- the fake --------------------------------------------------------------------------------------


class MemoryTables:
    """Tables in memory, with the exact-commit semantics and the faults of a real store.

    `before_commit` and `after_commit` are called before and after a commit lands, and may raise.  A
    raise before is a lost request; a raise after is a lost reply (the commit has landed, D2).
    """

    def __init__(self, root: str = "memory://tier") -> None:
        self.root = root
        self.states: dict[str, _TableState] = {}
        self.before_commit: Callable[[str, Commit], None] = lambda uri, commit: None
        self.after_commit: Callable[[str, Commit], None] = lambda uri, commit: None
        self.before_load: Callable[[str], None] = lambda uri: None
        self.on_vacuum: Callable[[str, Iterable[str]], None] = lambda uri, paths: None
        self._created = 0

    def table(self, topic: str, topic_id: str) -> MemoryTable:
        return MemoryTable(self, f"{self.root}/{layout.table_path(topic, topic_id)}", topic_id)

    async def probe(self, attempt: str) -> None:
        self.before_load(attempt)

    def describe(self) -> dict[str, str]:
        return {}

    def drop(self, uri: str) -> None:
        """Deletes the table, as an operator might."""
        self.states.pop(uri, None)

    def roll_back(self, uri: str, versions: int) -> None:
        """Removes the newest versions from the log, as a restored backup does."""
        del self.states[uri].versions[-versions:]

    def damage(self, uri: str, altered: Callable[[Snapshot], Snapshot]) -> None:
        """Flips bits of the log: every load returns `altered` from now on, which differs from what
        the commits state (rule T2)."""
        self.states[uri].altered = altered

    def repair(self, uri: str) -> None:
        """Restores the log, as an operator would."""
        if uri in self.states:
            self.states[uri].altered = None

    def rewrite(self, uri: str, old: Sequence[str], new: Sequence[DataFile]) -> None:
        """Replaces files without changing the data, as outside maintenance (OPTIMIZE) does."""
        state = self.states[uri]
        newest = state.versions[-1]
        adds = tuple(NewFile(file, 0, data_change=False) for file in new)
        commit = Commit(newest, adds, tuple(old), data_change=False)
        state.versions.append(newest.after(commit, newest.version + 1))

    def state(self, uri: str) -> _TableState | None:
        return self.states.get(uri)

    def new_state(self, uri: str) -> _TableState:
        self._created += 1
        first = Snapshot(0, f"table-{self._created}", {}, {})
        state = self.states[uri] = _TableState([first])
        return state


@dataclass(slots=True)
class _TableState:
    versions: list[Snapshot]
    #: the version that the flipped bits produce
    altered: Callable[[Snapshot], Snapshot] | None = None
    tombstones: list[str] = field(default_factory=list)


class MemoryTable:
    """One fake table.  Several objects may stand for one uri, as several processes hold handles."""

    def __init__(self, tables: MemoryTables, uri: str, topic_id: str) -> None:
        self._tables = tables
        self._uri = uri
        self._topic_id = topic_id

    @property
    def uri(self) -> str:
        return self._uri

    async def load(self, partitions: Sequence[int]) -> Snapshot | None:
        self._tables.before_load(self._uri)
        state = self._tables.state(self._uri)
        if state is None:
            return None
        said = newest = state.versions[-1]
        if state.altered is not None:
            newest = state.altered(said)
            check_known(self._uri, newest, said)
        counters = {partition: newest.partition(partition) for partition in partitions}
        found = Snapshot(
            newest.version,
            newest.table_id,
            newest.files,
            counters,
            newest.protocol,
            newest.restored,
        )
        found.owners = newest.owners
        return found

    async def create(self) -> Snapshot:
        self._tables.before_load(self._uri)
        state = self._tables.state(self._uri) or self._tables.new_state(self._uri)
        return state.versions[-1]

    async def commit(self, commit: Commit) -> Snapshot:
        self._tables.before_commit(self._uri, commit)
        state = self._tables.state(self._uri)
        if state is None:
            raise errors.TierUnavailable(f"{self._uri}: no table")
        newest = state.versions[-1]
        if newest.version != commit.read.version or newest.table_id != commit.read.table_id:
            raise CommitConflict(f"{self._uri}: version {commit.read.version + 1} exists")
        state.versions.append(newest.after(commit, newest.version + 1))
        state.tombstones.extend(commit.removes)
        self._tables.after_commit(self._uri, commit)
        return commit.read.after(commit, newest.version + 1)

    async def vacuum(self, retention_ms: int, may_delete: MayDelete) -> int | None:
        state = self._tables.state(self._uri)
        if state is None or retention_ms > 0:
            return 0
        if not await may_delete():
            return None
        live = state.versions[-1].files
        pending_delete = [path for path in state.tombstones if path not in live]
        state.tombstones = []
        self._tables.on_vacuum(self._uri, pending_delete)
        return len(pending_delete)


def moved(file: DataFile, path: str) -> DataFile:
    """Returns a file with the same rows under another name (as an OPTIMIZE of one file does)."""
    return replace(file, path=path)
