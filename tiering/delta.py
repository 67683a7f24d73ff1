"""A topic's table through deltalake; no other module imports it.  docs/design explains why its
commits are exact.

A commit is one `create_write_transaction` with `max_commit_retries=0` on exactly the version that
an `update_incremental` in `load` reached.  deltalake refuses a stale handle, for adds and removes
alike.  A commit that raises may have landed (a lost reply); the owner reloads and looks (rule T5).

deltalake's handle does not notice that its table was deleted or replaced.  Therefore `load` first
HEADs the commit file of the version it knows.  If the object is missing or has another tag, `load`
opens the table again and compares (rule T8).

Invariants
  E1  One call at a time runs on a handle.  A handle whose call raised or overran its deadline is
      discarded.
  E2  After its own commit, pk derives the new snapshot from the one before and does not list the
      files again, because the commit was exact.
  E3  pk never commits on a snapshot of a table with another protocol than reader 1 / writer 2
      without features.
  E4  A loaded version is compared with the checksums of pk's commits before it is used
      (log_check.py).  This covers the checkpoint that the version was read from.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from pk import errors
from pk.clock import Clock
from pk.tiering import layout, log_check, log_reading, log_sync
from pk.tiering.data_files import DataFile
from pk.tiering.delta_actions import (
    LogUnreadable,
    add_action,
    check_columns,
    check_properties,
    counters_of,
    files_of,
    is_panic,
    protocol_of,
    stats_of,
    translated,
)
from pk.tiering.layout import PARTITION_COLUMN, TABLE_SCHEMA, app_id
from pk.tiering.objects import ObjectInfo, ObjectStore
from pk.tiering.store_settings import StoreSettings
from pk.tiering.table import (
    Commit,
    CommitConflict,
    MayDelete,
    Snapshot,
    Table,
    TableProtocol,
)
from pk.tiering.tombstones import RemovalDates, Tombstones

T = TypeVar("T")

THREADS = 4
DELETES_MAX = 8  #: deletes under way at once
#: Deadline of one deltalake call, as a multiple of the store's: a call makes several requests.
DEADLINE_FACTOR = 3
_HOUR_MS = 3_600_000


class DeltaTables:
    """The tables below one tier URL."""

    def __init__(self, settings: StoreSettings, store: ObjectStore, clock: Clock) -> None:
        self._settings = settings
        self._store = store
        self._clock = clock
        self._options = settings.for_deltalake()
        self._pool = concurrent.futures.ThreadPoolExecutor(THREADS, "pk-delta")

    def table(self, topic: str, topic_id: str) -> Table:
        return DeltaLogTable(self, topic, topic_id)

    def describe(self) -> dict[str, str]:
        return self._settings.public()

    @property
    def store(self) -> ObjectStore:
        return self._store

    @property
    def options(self) -> dict[str, str] | None:
        return self._options or None

    def wall_ms(self) -> int:
        return self._clock.wall_ms()

    def now_ms(self) -> int:
        """Returns the time of a monotonic clock."""
        return self._clock.monotonic_ms()

    def uri(self, path: str) -> str:
        """Returns the URI for deltalake, which wants local paths with a scheme and percent signs
        escaped."""
        if self._settings.scheme == "file":
            return "file://" + urllib.parse.quote(f"{self._settings.directory.rstrip('/')}/{path}")
        return f"{self._settings.url}/{path}"

    async def run(self, doing: str, work: Callable[[], T]) -> T:
        """Runs one deltalake call in a thread, with a deadline."""
        loop = asyncio.get_running_loop()
        limit_s = self._settings.timeout_ms * DEADLINE_FACTOR / 1000
        try:
            async with asyncio.timeout(limit_s):
                return await loop.run_in_executor(self._pool, work)
        except TimeoutError:
            raise errors.TierUnavailable(
                f"{self._settings.url}: {doing}: no answer within {limit_s:g} s"
            ) from None

    async def sync_log(self, path: str, after: int) -> None:
        """Syncs the log files above version `after`, so that they survive a power loss
        (pk.tiering.log_sync)."""
        if self._settings.scheme != "file":
            return
        root, doing = Path(self._settings.directory), f"syncing the log of {path}"
        try:
            await self.run(doing, lambda: log_sync.sync_log(root, path, after))
        except OSError as cause:
            raise errors.TierUnavailable(f"{self._settings.url}: {doing}: {cause}") from cause

    async def probe(self, attempt: str) -> None:
        """Commits the same version from two handles (rule T14); exactly one may succeed."""
        path = layout.probe_path(attempt)
        try:
            await self.run("probing put-if-absent", lambda: self._probe(self.uri(path)))
        finally:
            try:
                for found in await self._store.list(path):
                    await self._store.delete(found.path)
            except errors.PkError:
                pass  # leftovers of a probe do no harm

    def _probe(self, uri: str) -> None:
        try:
            schema = pa.schema([pa.field("x", pa.int32())])
            DeltaTable.create(uri, schema=schema, storage_options=self.options)
            first = DeltaTable(uri, storage_options=self.options)
            second = DeltaTable(uri, storage_options=self.options)
            _write(first, [], schema, {"probe": 1}, {})
        except Exception as cause:
            raise translated(self._settings.url, "probing put-if-absent", cause) from cause
        try:
            _write(second, [], schema, {"probe": 2}, {})
        except CommitFailedError:
            return
        except Exception as cause:
            raise translated(self._settings.url, "probing put-if-absent", cause) from cause
        raise errors.StoreRefused(
            f"{self._settings.url}: the store lets two writers put the same object "
            "(no put-if-absent): commits to a table would overwrite each other; use a store that "
            "honours If-None-Match",
            url=self._settings.url,
        )

    async def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class DeltaLogTable:
    """One topic's table."""

    def __init__(self, tables: DeltaTables, topic: str, topic_id: str) -> None:
        self._tables = tables
        self._topic_id = topic_id
        self._path = layout.table_path(topic, topic_id)
        self._uri = tables.uri(self._path)
        self._handle: DeltaTable | None = None
        self._seen: ObjectInfo | None = None  #: result of HEAD on the known version's commit file
        self._snapshot: Snapshot | None = None
        self._counts: dict[str, DataFile] = {}  #: files whose footers were read for their rows
        self._table_id = ""  #: id of the table that was opened first; another id is refused (T8)
        self._synced = ("", -1)  #: table id and version up to which the log is synced
        self._turn = asyncio.Lock()
        self._tombstones = Tombstones(tables.now_ms())
        self._dates = RemovalDates()

    @property
    def uri(self) -> str:
        return self._uri

    async def load(self, partitions: Sequence[int]) -> Snapshot | None:
        async with self._turn:
            return await self._load(partitions)

    async def _load(self, partitions: Sequence[int]) -> Snapshot | None:
        handle, known = self._handle, self._snapshot
        if handle is not None and known is not None and not await self._is_known(known.version):
            handle = None
        self._handle = None  # E1: there is no handle until the call has returned
        try:
            found = await self._tables.run(
                f"loading {self._uri}", lambda: self._open_or_update(handle, partitions)
            )
        except LogUnreadable:
            await log_reading.find_damaged(self._tables.store, self._path, self._uri)
            raise
        if found is None:
            self._snapshot = self._seen = None
            return None
        compared = known if handle is not None else None
        handle, snapshot = found
        if snapshot.table_id == self._table_id and snapshot.protocol == TableProtocol():
            await self._compare(compared, snapshot)
            snapshot = await self._counted(snapshot)
        if known is None or snapshot.version != known.version:
            self._tombstones.foreign(self._tables.now_ms())
        await self._note(handle, snapshot)
        return snapshot

    async def _compare(self, known: Snapshot | None, snapshot: Snapshot) -> None:
        """Raises `TierTableChanged` unless the version is what was committed (E4)."""
        version = -1 if known is None else known.version
        if snapshot.version != version:
            await log_reading.compare(self._tables.store, self._path, self._uri, snapshot, version)

    async def _counted(self, snapshot: Snapshot) -> Snapshot:
        """Reads the rows of files without statistics, which another engine wrote, from their
        footers (rule T17)."""
        unknown = [file for file in snapshot.files.values() if not file.stats and not file.rows]
        if not unknown:
            return snapshot
        store, cache = self._tables.store, self._counts
        found = await log_reading.counted(store, self._path, unknown, cache)
        self._counts = {path: file for path, file in cache.items() if path in snapshot.files}
        return Snapshot(
            snapshot.version,
            snapshot.table_id,
            {**snapshot.files, **found},
            snapshot.counters,
            snapshot.protocol,
        )

    async def _is_known(self, version: int) -> bool:
        """Returns whether the commit file of the known version is still the same object."""
        seen = await self._tables.store.head(f"{self._path}/{layout.commit_file(version)}")
        return seen is not None and self._seen is not None and seen.tag == self._seen.tag

    async def _note(self, handle: DeltaTable, snapshot: Snapshot) -> None:
        path = f"{self._path}/{layout.commit_file(snapshot.version)}"
        table_id, version = self._synced
        if (snapshot.table_id, snapshot.version) != self._synced:
            after = version if table_id == snapshot.table_id and version < snapshot.version else -1
            await self._tables.sync_log(self._path, after)
            self._synced = snapshot.table_id, snapshot.version
        self._seen = await self._tables.store.head(path)
        if self._seen is not None:
            self._dates.seen(self._seen.modified_ms, self._tables.now_ms())
        self._handle, self._snapshot = handle, snapshot

    def _open_or_update(
        self, handle: DeltaTable | None, partitions: Sequence[int]
    ) -> tuple[DeltaTable, Snapshot] | None:
        known = self._snapshot if handle is not None else None
        try:
            if handle is None:
                handle = DeltaTable(self._uri, storage_options=self._tables.options)
            else:
                handle.update_incremental()
            if known is not None and handle.version() == known.version:
                fresh = [p for p in partitions if p not in known.counters]
                if not fresh:
                    return handle, known
                counters = {
                    **known.counters,
                    **counters_of(self._uri, handle, self._topic_id, fresh),
                }
                return handle, Snapshot(
                    known.version, known.table_id, known.files, counters, known.protocol
                )
            return handle, self._read(handle, partitions)
        except TableNotFoundError:
            return None
        except BaseException as cause:
            if not isinstance(cause, Exception) and not is_panic(cause):
                raise
            error = translated(self._uri, "loading the table", cause)
            if type(error) is errors.TierUnavailable:
                error = LogUnreadable(error.message, **error.details)
            raise error from cause

    def _read(self, handle: DeltaTable, partitions: Sequence[int]) -> Snapshot:
        """Reads a snapshot from the log itself."""
        protocol = protocol_of(handle)
        metadata = handle.metadata()
        self._table_id = self._table_id or str(metadata.id)
        if str(metadata.id) != self._table_id or protocol != TableProtocol():
            # T8: nothing further is read; the owner refuses it by its protocol or its id
            return Snapshot(handle.version(), str(metadata.id), {}, {}, protocol)
        check_columns(self._uri, handle)
        check_properties(self._uri, handle, self._topic_id)
        return Snapshot(
            handle.version(),
            str(metadata.id),
            files_of(pa.table(handle.get_add_actions(flatten=True))),
            counters_of(self._uri, handle, self._topic_id, partitions),
            protocol,
        )

    async def create(self) -> Snapshot:
        async with self._turn:
            self._table_id = ""
            try:
                await self._tables.run(f"creating {self._uri}", self._create)
            except errors.TierUnavailable:
                pass  # the outcome is unknown: the next load shows it
            snapshot = await self._load(())
            if snapshot is None:
                raise errors.TierUnavailable(f"{self._uri}: the table could not be created")
            return snapshot

    def _create(self) -> None:
        try:
            DeltaTable.create(
                self._uri,
                schema=TABLE_SCHEMA,
                mode="ignore",
                partition_by=[PARTITION_COLUMN],
                configuration={**layout.TABLE_PROPERTIES, layout.TOPIC_ID_PROPERTY: self._topic_id},
                storage_options=self._tables.options,
                raise_if_key_not_exists=False,
            )
        except Exception as cause:
            raise translated(self._uri, "creating the table", cause) from cause

    async def commit(self, commit: Commit) -> Snapshot:
        async with self._turn:
            handle, self._handle = self._handle, None  # E1
            if handle is None or handle.version() != commit.read.version:
                raise CommitConflict(f"{self._uri}: version {commit.read.version} is not loaded")
            date_ms = self._dates.date(self._tables.wall_ms(), self._tables.now_ms())
            await self._tables.run(
                f"committing to {self._uri}", lambda: self._commit(handle, commit, date_ms)
            )
            snapshot = commit.read.after(commit, commit.read.version + 1)  # E2
            if handle.version() != snapshot.version:
                raise CommitConflict(f"{self._uri}: version {handle.version()} came in between")
            self._tombstones.removed(commit.removes, self._tables.now_ms())
            await self._note(handle, snapshot)
            return snapshot

    def _commit(self, handle: DeltaTable, commit: Commit, now_ms: int) -> None:
        adds = [(new, stats_of(new)) for new in commit.adds]
        removes = [commit.read.files[path] for path in commit.removes]
        actions: list[AddAction | RemoveAction] = [add_action(new, text) for new, text in adds]
        for file in removes:
            actions.append(
                RemoveAction(
                    log_check.quoted(file.path),
                    commit.data_change,
                    now_ms,
                    file.size,
                    {PARTITION_COLUMN: str(file.partition)},
                )
            )
        versions = self._versions(commit)
        info: dict[str, Any] = {"isBlindAppend": True} if commit.blind else {}
        info[log_check.FILES] = commit.read.sums_after(commit).text()
        said = log_check.expected_actions(adds, removes, commit.data_change, now_ms, versions, info)
        info[log_check.CHECK] = log_check.of_actions(said)
        try:
            _write(handle, actions, TABLE_SCHEMA, versions, info)
            handle.update_incremental()
        except Exception as cause:
            raise translated(self._uri, "committing", cause) from cause

    def _versions(self, commit: Commit) -> dict[str, int]:
        """Returns the txn actions of a commit: the counters that changed, and their hash (T2)."""
        versions: dict[str, int] = {}
        for partition, counters in commit.counters.items():
            before = commit.read.partition(partition)
            for name, value in counters._asdict().items():
                if value >= 0 and value != getattr(before, name):
                    versions[app_id(self._topic_id, partition, name)] = value
            if counters.version > 1:
                version = app_id(self._topic_id, partition, layout.VERSION_NAME)
                versions[version] = counters.version
            check = app_id(self._topic_id, partition, layout.COUNTERS_CHECK)
            versions[check] = log_check.counters_check(counters)
        return versions

    async def vacuum(self, retention_ms: int, may_delete: MayDelete) -> int | None:
        """Deletes files that commits removed at least `retention_ms` ago.  Returns their number.

        Calls `may_delete` once the files are known.  If it returns False, deletes no file and
        returns None.

        Nothing is written to the log: a vacuum that commits makes every handle read it again.
        """
        async with self._turn:
            known = self._snapshot
            snapshot = await self._load(tuple(known.counters) if known is not None else ())
            if snapshot is None or known is None or snapshot.table_id != known.table_id:
                return 0
            if snapshot.protocol != TableProtocol():
                return 0  # T8: its files are unknown; the owner stops at its next load
            tombstones, now_ms = self._tombstones, self._tables.now_ms()
            hours = -(-retention_ms // _HOUR_MS)  # rounded up: deltalake takes only whole hours
            look = tombstones.must_look(hours * _HOUR_MS)
            named = await self._named(hours) if look else []
            # deltalake compares with the wall clock, as read just now (L10)
            if not await may_delete():
                return None
            pending_delete = tombstones.looked(named, now_ms) if look else []
            # noted after the last call that may fail, so that no deleted file is forgotten
            pending_delete += tombstones.expired(retention_ms, now_ms)
            pending_delete = [
                path for path in dict.fromkeys(pending_delete) if path not in snapshot.files
            ]
        try:
            for at in range(0, len(pending_delete), DELETES_MAX):
                some = pending_delete[at : at + DELETES_MAX]
                await asyncio.gather(
                    *(self._tables.store.delete(f"{self._path}/{path}") for path in some)
                )
                tombstones.deleted(some, hours * _HOUR_MS)
        except errors.PkError:
            tombstones.foreign(self._tables.now_ms())  # the log still names the files that are left
            raise
        return len(pending_delete)

    async def _named(self, retention_hours: int) -> list[str]:
        """Returns the files that deltalake would delete in Delta's LITE mode: only files that the
        log names as removed, so uploads under way survive."""
        handle, self._handle = self._handle, None  # E1
        if handle is None:
            return []

        def look() -> list[str]:
            try:
                return handle.vacuum(
                    retention_hours=retention_hours,
                    dry_run=True,
                    enforce_retention_duration=False,
                    full=False,
                )
            except Exception as cause:
                raise translated(self._uri, "vacuuming", cause) from cause

        found = await self._tables.run(f"vacuuming {self._uri}", look)
        self._handle = handle
        return found


def _write(
    handle: DeltaTable,
    actions: list[AddAction | RemoveAction],
    schema: pa.Schema,
    versions: Mapping[str, int],
    info: Mapping[str, Any],
) -> None:
    """Writes one exact commit (rule T3)."""
    partitioned = [PARTITION_COLUMN] if PARTITION_COLUMN in schema.names else None
    handle.create_write_transaction(
        actions,
        mode="append",
        schema=schema,
        partition_by=partitioned,
        commit_properties=CommitProperties(
            custom_metadata=dict(info),
            max_commit_retries=0,
            app_transactions=[Transaction(app, version) for app, version in versions.items()],
        ),
        post_commithook_properties=PostCommitHookProperties(),
    )
