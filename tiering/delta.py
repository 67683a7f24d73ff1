"""A topic's table in its store.  deltalake reads the log; pk writes its commits.  Only this module
and its helpers (delta_actions, delta_checkpoint, table_evidence) import deltalake.

An owner knows what it committed.  A commit is one put-if-absent on the name of the next version
(rule T3), and the snapshot after it follows from the one before.  A look at a known table asks for
two names: the commit of the version it knows, and the commit of the next one.  The log is listed
only to open a table (docs/design/0020-store-calls.md).

A commit that raises may have landed (a lost reply); the owner looks and finds it (rule T5).

The creation of a table is the put-if-absent of version 0.  Two owners may create it at once: the
second finds the table of the first.  deltalake would write the second creation as version 1, which
gives the table another id.

A known table may be deleted, rolled back or created again.  Therefore a look and a commit HEAD
the commit file of the known version.  If the object is missing or has another tag, the table is
opened again and compared (rule T8).

Invariants
  E1  A commit is put only after the commit file of the version below it has been seen with the tag
      that it had when that version was read or written.
  E2  After its own commit, pk derives the new snapshot from the one before and reads nothing,
      because the commit was exact.
  E3  pk never commits on a snapshot of a table with another protocol than reader 1 / writer 2
      without features.
  E4  A loaded version is compared with the checksums of pk's commits before it is used
      (log_check.py).  This covers the checkpoint that the version was read from.
  E5  A checkpoint that fails does not fail its commit.  The table is opened again before the next
      commit, so what is wrong with its log is reported.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import urllib.parse
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
from deltalake import (
    CommitProperties,
    DeltaTable,
    PostCommitHookProperties,
    Schema,
    Transaction,
)
from deltalake.exceptions import CommitFailedError, TableNotFoundError

from pk import errors
from pk.clock import Clock
from pk.tiering import (
    delta_checkpoint,
    layout,
    log_following,
    log_reading,
    log_sync,
    log_writing,
)
from pk.tiering.app_transactions import transaction_versions
from pk.tiering.data_files import DataFile
from pk.tiering.delta_actions import (
    LogUnreadable,
    check_columns,
    check_properties,
    counter_apps,
    counters_from,
    counters_of,
    files_of,
    is_panic,
    protocol_of,
    translated,
)
from pk.tiering.delta_checkpoint import Checkpoint, RecentCommits, Sources
from pk.tiering.layout import PartitionCounters
from pk.tiering.objects import ObjectInfo, ObjectStore
from pk.tiering.store_calls import DELTALAKE, StoreCalls
from pk.tiering.store_settings import StoreSettings
from pk.tiering.table import (
    Commit,
    CommitConflict,
    MayDelete,
    Snapshot,
    Table,
    TableProtocol,
    first_epoch,
)
from pk.tiering.tombstones import RemovalDates, Tombstones
from pk.types import NONE

T = TypeVar("T")

THREADS = 4
DELETES_MAX = 8  #: deletes under way at once
#: Files of a table up to which deltalake's view of it is kept: it takes 700 bytes a file.
HANDLE_FILES_MAX = 10_000
FOLLOWED_MAX = 64  #: commits that are read one after the other; with more, the table is opened
#: When commits older than the table's log retention are deleted: after the first own checkpoint
#: this long after the start, and then at this interval.  It lists the whole log.
CLEAN_FIRST_MS, CLEAN_MS = 3_600_000, 86_400_000
#: A look that is older than this does not serve a commit (E1): the table may be gone since.
JUST_MS = 1_000
#: Deadline of one deltalake call, as a multiple of the store's: a call makes several requests.
DEADLINE_FACTOR = 3
_HOUR_MS = 3_600_000


class DeltaTables:
    """The tables below one tier URL."""

    def __init__(
        self,
        settings: StoreSettings,
        store: ObjectStore,
        clock: Clock,
        calls: StoreCalls | None = None,
    ) -> None:
        self._settings = settings
        self._calls = calls or StoreCalls()
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

    async def ask(self, doing: str, work: Callable[[], T]) -> T:
        """Runs one deltalake call that makes requests to the store."""
        self._calls.count(DELTALAKE)
        return await self.run(doing, work)

    async def run(self, doing: str, work: Callable[[], T]) -> T:
        """Runs blocking work in a thread, with a deadline."""
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
        """Commits the same version twice, through deltalake and through the store (rule T14);
        exactly one may succeed."""
        path = layout.probe_path(attempt)
        try:
            await self.ask("probing put-if-absent", lambda: self._probe(self.uri(path)))
            first = await self._store.put_if_absent(f"{path}/probe", b"1")
            if first is None or await self._store.put_if_absent(f"{path}/probe", b"2") is not None:
                raise self._no_put_if_absent()
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
            _write(first, schema, 1)
        except Exception as cause:
            raise translated(self._settings.url, "probing put-if-absent", cause) from cause
        try:
            _write(second, schema, 2)
        except CommitFailedError:
            return
        except Exception as cause:
            raise translated(self._settings.url, "probing put-if-absent", cause) from cause
        raise self._no_put_if_absent()

    def _no_put_if_absent(self) -> errors.StoreRefused:
        return errors.StoreRefused(
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
        #: deltalake's view of the known version; None = it is older, or large, or the table is not
        #: open
        self._handle: DeltaTable | None = None
        self._seen: ObjectInfo | None = None  #: the known version's commit file; None = none
        self._snapshot: Snapshot | None = None
        #: when a look has seen the known version's commit file (E1); None = before its last commit
        self._seen_ms: int | None = None
        self._reopen = False  #: a checkpoint failed (E5)
        self._recent = RecentCommits()
        self._counts: dict[str, DataFile] = {}  #: files whose footers were read for their rows
        self._table_id = ""  #: id of the table that was opened first; another id is refused (T8)
        self._synced = ("", -1)  #: table id and version up to which the log is synced
        self._turn = asyncio.Lock()
        self._tombstones = Tombstones(tables.now_ms())
        self._dates = RemovalDates()
        self._clean_ms = tables.now_ms() + CLEAN_FIRST_MS

    @property
    def uri(self) -> str:
        return self._uri

    @property
    def _store(self) -> ObjectStore:
        return self._tables.store

    async def load(self, partitions: Sequence[int]) -> Snapshot | None:
        async with self._turn:
            return await self._load(partitions)

    async def _load(self, partitions: Sequence[int]) -> Snapshot | None:
        known = self._snapshot
        if known is None or self._reopen or known.protocol != TableProtocol():
            return await self._open(partitions)
        looked_ms = self._tables.now_ms()
        same, data = await asyncio.gather(self._is_known(known), self._later(known.version + 1))
        if not same:
            return await self._open(partitions)
        fresh = [each for each in partitions if each not in known.counters]
        snapshot: Snapshot | None = known
        for _ in range(FOLLOWED_MAX):
            assert snapshot is not None
            if data is None:
                if snapshot is not known:
                    self._handle = None
                    self._tombstones.foreign(self._tables.now_ms())
                    await self._note(snapshot)
                self._seen_ms = looked_ms
                return await self._extended(snapshot, fresh) if fresh else snapshot
            snapshot = log_following.followed(self._uri, self._topic_id, snapshot, data)
            if snapshot is None:
                break
            self._recent.add(snapshot.version, data)
            data = await self._commit_of(snapshot.version + 1)
        return await self._open(partitions)

    async def _open(self, partitions: Sequence[int]) -> Snapshot | None:
        """Opens the table with deltalake, which lists the log."""
        known, self._handle, self._seen_ms = self._snapshot, None, None
        self._recent.clear()
        try:
            found = await self._tables.ask(
                f"loading {self._uri}", lambda: self._open_whole(partitions)
            )
        except LogUnreadable:
            await log_reading.find_damaged(self._store, self._path, self._uri)
            raise
        self._reopen = False
        if found is None:
            self._snapshot = self._seen = None
            return None
        handle, snapshot = found
        if snapshot.table_id == self._table_id and snapshot.protocol == TableProtocol():
            await log_reading.compare(self._store, self._path, self._uri, snapshot, -1)
            snapshot = await self._counted(snapshot)
        if known is not None:
            snapshot.owners = known.owners
        if known is None or snapshot.version != known.version:
            self._tombstones.foreign(self._tables.now_ms())
        await self._note(snapshot)
        self._handle, self._seen_ms = handle, self._tables.now_ms()
        return snapshot

    async def _extended(self, known: Snapshot, fresh: Sequence[int]) -> Snapshot | None:
        """Returns the known version with the counters of more partitions.

        The files stay as they are: to read those of a large table again takes seconds, and ten
        owners make a version a second.
        """
        handle, self._handle = self._handle, None  # there is no handle until the call has returned
        options, topic_id = self._tables.options, self._topic_id

        def counters() -> tuple[DeltaTable, dict[int, PartitionCounters]] | None:
            there = handle
            if there is None or there.version() != known.version:
                there = self._handle_of(known)
            if there is None:
                return None
            return there, counters_of(self._uri, there, options, topic_id, fresh)

        found = await self._tables.ask(f"loading {self._uri}", counters)
        if found is None:
            return await self._open([*known.counters, *fresh])
        there, more = found
        self._handle = there if len(known.files) <= HANDLE_FILES_MAX else None
        self._snapshot = Snapshot(
            known.version,
            known.table_id,
            known.files,
            {**known.counters, **more},
            known.protocol,
            known.restored,
        )
        self._snapshot.owners = known.owners
        return self._snapshot

    def _handle_of(self, known: Snapshot) -> DeltaTable | None:
        """Returns deltalake's view of a version; None = it must be opened whole, to say why."""
        try:
            handle = DeltaTable(self._uri, known.version, storage_options=self._tables.options)
            return handle if str(handle.metadata().id) == known.table_id else None
        except BaseException as cause:
            if not isinstance(cause, Exception) and not is_panic(cause):
                raise
            return None

    async def _counted(self, snapshot: Snapshot) -> Snapshot:
        """Reads the rows of files without statistics, which another engine wrote, from their
        footers (rule T17)."""
        unknown = [file for file in snapshot.files.values() if not file.stats and not file.rows]
        if not unknown:
            return snapshot
        cache = self._counts
        found = await log_reading.counted(self._store, self._path, unknown, cache)
        self._counts = {path: file for path, file in cache.items() if path in snapshot.files}
        return Snapshot(
            snapshot.version,
            snapshot.table_id,
            snapshot.files.after((), found.values()),
            snapshot.counters,
            snapshot.protocol,
            snapshot.restored,
        )

    async def _commit_of(self, version: int) -> bytes | None:
        return await log_reading.read_commit(self._store, self._path, version)

    async def _later(self, version: int) -> bytes | None:
        """Returns the JSON of a version that is most likely not there: a HEAD asks first, because
        it costs less."""
        there = await self._store.head(f"{self._path}/{layout.commit_file(version)}")
        return None if there is None else await self._commit_of(version)

    async def _head(self, version: int) -> ObjectInfo | None:
        seen = await self._store.head(f"{self._path}/{layout.commit_file(version)}")
        if seen is not None:
            self._dates.seen(seen.modified_ms, self._tables.now_ms())
        return seen

    async def _is_known(self, known: Snapshot) -> bool:
        """Returns whether the commit file of the known version is still the same object."""
        seen = await self._head(known.version)
        return seen is not None and self._seen is not None and seen.tag == self._seen.tag

    async def _note(self, snapshot: Snapshot) -> None:
        """Takes a version that was read as the known one."""
        table_id, version = self._synced
        if (snapshot.table_id, snapshot.version) != self._synced:
            after = version if table_id == snapshot.table_id and version < snapshot.version else -1
            await self._tables.sync_log(self._path, after)
            self._synced = snapshot.table_id, snapshot.version
        self._seen = await self._head(snapshot.version)
        self._snapshot = snapshot

    def _open_whole(self, partitions: Sequence[int]) -> tuple[DeltaTable | None, Snapshot] | None:
        try:
            return self._read(partitions)
        except TableNotFoundError:
            return None
        except BaseException as cause:
            if not isinstance(cause, Exception) and not is_panic(cause):
                raise
            error = translated(self._uri, "loading the table", cause)
            if type(error) is errors.TierUnavailable:
                error = LogUnreadable(error.message, **error.details)
            raise error from cause

    def _read(self, partitions: Sequence[int]) -> tuple[DeltaTable | None, Snapshot]:
        """Reads the newest version from the log itself.  Returns it with deltalake's view of it,
        unless that is large."""
        handle = DeltaTable(self._uri, storage_options=self._tables.options)
        protocol = protocol_of(handle)
        metadata = handle.metadata()
        self._table_id = self._table_id or str(metadata.id)
        if str(metadata.id) != self._table_id or protocol != TableProtocol():
            # T8: nothing further is read; the owner refuses it by its protocol or its id
            return handle, Snapshot(handle.version(), str(metadata.id), {}, {}, protocol)
        check_columns(self._uri, handle)
        check_properties(self._uri, handle, self._topic_id)
        claim_app = layout.app_id(self._topic_id, 0, "claim")
        apps = [claim_app, *counter_apps(self._topic_id, partitions)]
        transactions = transaction_versions(handle, self._tables.options, apps)
        claim, version = transactions.get(claim_app), handle.version()
        counters = counters_from(self._uri, version, self._topic_id, partitions, transactions)
        actions = pa.table(handle.get_add_actions(flatten=True))
        kept = handle if actions.num_rows <= HANDLE_FILES_MAX else None
        del handle  # before the files come into memory a second time
        files, restored = files_of(actions), first_epoch(NONE if claim is None else claim)
        return kept, Snapshot(version, str(metadata.id), files, counters, protocol, restored)

    async def create(self) -> Snapshot:
        async with self._turn:
            self._table_id = ""
            table_id = str(uuid.uuid4())  # noqa: TID251 - a shell
            schema = Schema.from_arrow(layout.TABLE_SCHEMA).to_json()
            date_ms = self._tables.wall_ms()
            data = log_writing.creation_json(self._topic_id, table_id, schema, date_ms)
            try:
                await self._store.put_if_absent(f"{self._path}/{layout.commit_file(0)}", data)
            except errors.TierUnavailable:
                pass  # the outcome is unknown: the next load shows it
            snapshot = await self._load(())
            if snapshot is None:
                raise errors.TierUnavailable(f"{self._uri}: the table could not be created")
            return snapshot

    async def commit(self, commit: Commit) -> Snapshot:
        async with self._turn:
            known, read = self._snapshot, commit.read
            expected = read.version, read.table_id
            if known is None or self._reopen or (known.version, known.table_id) != expected:
                raise CommitConflict(f"{self._uri}: version {read.version} is not loaded")
            seen_ms, self._seen_ms = self._seen_ms, None
            looked = seen_ms is not None and self._tables.now_ms() - seen_ms <= JUST_MS
            if not looked and not await self._is_known(known):  # E1
                raise CommitConflict(f"{self._uri}: version {read.version} is not what it was")
            version = read.version + 1
            date_ms = self._dates.date(self._tables.wall_ms(), self._tables.now_ms())
            data = log_writing.commit_json(self._topic_id, commit, date_ms)
            path = f"{self._path}/{layout.commit_file(version)}"
            put = await self._store.put_if_absent(path, data)
            if put is None:
                raise CommitConflict(f"{self._uri}: version {version} exists")
            snapshot = read.after(commit, version)  # E2
            self._seen, self._snapshot, self._handle = put, snapshot, None
            if self._synced == (read.table_id, read.version):
                self._synced = read.table_id, version  # the store has synced it
            self._tombstones.removed(commit.removes, self._tables.now_ms())
            self._recent.add(version, data)
            if self._recent.is_due(version):
                await self._checkpoint(version)
            return snapshot

    async def _checkpoint(self, version: int) -> None:
        """Makes a checkpoint after an own commit (E5)."""
        store, home, doing = self._store, self._path, f"a checkpoint of {self._uri}"
        try:
            given = await delta_checkpoint.sources(store, home, self._recent, version)
            if given is None:
                await self._tables.ask(doing, self._checkpoint_whole)
                await self._tables.sync_log(self._path, version - 1)
            else:
                made = await self._tables.run(doing, lambda: self._merged(given, version))
                await delta_checkpoint.put(store, home, made)
                self._recent.made(version, made.plain_bytes)
            if self._tables.now_ms() >= self._clean_ms:
                self._clean_ms = self._tables.now_ms() + CLEAN_MS
                await self._tables.ask(f"cleaning the log of {self._uri}", self._clean)
        except errors.PkError:
            self._reopen = True

    def _merged(self, given: Sources, version: int) -> Checkpoint:
        try:
            return delta_checkpoint.make(given, version)
        except BaseException as cause:
            if not isinstance(cause, Exception) and not is_panic(cause):
                raise
            raise translated(self._uri, "making a checkpoint", cause) from cause

    def _checkpoint_whole(self) -> None:
        self._through_deltalake("making a checkpoint", lambda handle: handle.create_checkpoint())

    def _clean(self) -> None:
        """Deletes commits that are older than the table's log retention and not needed."""
        self._through_deltalake("cleaning the log", lambda handle: handle.cleanup_metadata())

    def _through_deltalake(self, doing: str, work: Callable[[DeltaTable], T]) -> T:
        try:
            return work(DeltaTable(self._uri, storage_options=self._tables.options))
        except BaseException as cause:
            if not isinstance(cause, Exception) and not is_panic(cause):
                raise
            raise translated(self._uri, doing, cause) from cause

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

        def look(handle: DeltaTable) -> list[str]:
            return handle.vacuum(
                retention_hours=retention_hours,
                dry_run=True,
                enforce_retention_duration=False,
                full=False,
            )

        doing = f"vacuuming {self._uri}"
        return await self._tables.ask(doing, lambda: self._through_deltalake(doing, look))


def _write(handle: DeltaTable, schema: pa.Schema, version: int) -> None:
    """Writes one exact commit through deltalake."""
    handle.create_write_transaction(
        [],
        mode="append",
        schema=schema,
        commit_properties=CommitProperties(
            max_commit_retries=0, app_transactions=[Transaction("probe", version)]
        ),
        post_commithook_properties=PostCommitHookProperties(),
    )
