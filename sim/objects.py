"""A simulated object store and its Delta tables: slow, unreliable and sometimes unreachable.

The *store* carries out an operation: once a request has left its sender, it is executed even if the
sender dies, and perhaps long after another process has replaced the sender.  The reply may be lost,
so a put or a commit that raised an error may have taken effect (rule T5).

Model
  B1  A request takes a drawn delay, the operation is atomic, and the reply takes a drawn delay.
  B2  While the store is away, calls raise `TierUnavailable` after `deadline_ms`.
  B3  A lost request is never executed; after a lost reply the operation has been executed.  The
      caller cannot tell the two apart.
  B4  A single request or its reply may be held (`stall`), even for as long as a process owns a
      partition; it is executed all the same.
  B5  A table lives as long as its log: removing the objects below its path removes the table.
  B6  A bit of a data file may flip, until an operator restores the file (rule T10).
  B7  A table's log may rot, until an operator restores it (rules T2, T8).  A commit on top of a
      version builds on what was committed, not on what a load returns.
  B8  Another engine may delete rows and restore the version before (rule T17); the files stay.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from pk import errors
from pk.sim.world import SimClock, SimWorld
from pk.tiering import layout, rowhash
from pk.tiering.data_files import DataFile
from pk.tiering.footers import footer_size
from pk.tiering.objects import Buffer, MemoryStore, ObjectInfo
from pk.tiering.row_groups import canonical
from pk.tiering.table import Commit, MayDelete, MemoryTables, Snapshot, always, moved
from pk.types import TopicId

T = TypeVar("T")


class SimObjects:
    """An object store and the tables in it.  Implements `ObjectStore` and `TableFactory`."""

    def __init__(self, world: SimWorld, of: SimObjects | None = None, name: str = "store") -> None:
        """of: the same store, reached by another path with delays and faults of its own"""
        self.memory: MemoryStore = MemoryStore() if of is None else of.memory
        self.tables: MemoryTables = MemoryTables(self.memory.url) if of is None else of.tables
        self.away = False
        self.lost_requests = 0.0  #: chances between 0 and 1
        self.lost_replies = 0.0
        self.stragglers = 0.0  #: chance that a request takes ten times as long to arrive
        #: called at the next commit; returns its delay
        self.late_commit: Callable[[], float] | None = None
        #: Called at each request: returns how long the request and its reply are held (B4).
        self.stall: Callable[[str], tuple[float, float]] | None = None
        self.rotten: dict[str, bytes] = {}  #: the undamaged content of damaged objects
        self.counts: dict[str, int] = {}
        self.delay_ms = (0.5, 8.0)
        self.deadline_ms = 300.0
        self._world = world
        self._clock = SimClock(world.loop)
        self._rng = world.random(name)
        self._moves = 0
        self.tables.on_vacuum = self._vacuumed

    # -- the wire --------------------------------------------------------------------------------

    async def call(self, what: str, work: Callable[[], Awaitable[T]], late_ms: float = 0.0) -> T:
        """Execute one request (B1) outside any node, so that it outlives its sender."""
        remote = self._remote(what, work, late_ms)
        task = self._world.loop.create_task(remote, context=contextvars.Context())
        task.add_done_callback(_seen, context=contextvars.Context())
        result: T = await asyncio.shield(task)
        return result

    async def _remote(self, what: str, work: Callable[[], Awaitable[T]], late_ms: float) -> T:
        rng, clock = self._rng, self._clock
        there, back = rng.uniform(*self.delay_ms), rng.uniform(*self.delay_ms)
        chance = rng.random()
        if rng.random() < self.stragglers:
            there *= 10
        if self.stall is not None:
            held = self.stall(what)
            there, back = there + held[0], back + held[1]
        await clock.sleep_ms(there + late_ms)
        if self.away or chance < self.lost_requests:
            self._lost(what)
            await clock.sleep_ms(self.deadline_ms)
            raise errors.TierUnavailable(f"{what}: no answer from the store")
        result = await work()
        await clock.sleep_ms(back)
        if self.away or rng.random() < self.lost_replies:
            self._world.record(f"store lost the reply to {what}")
            self._lost(what)
            raise errors.TierUnavailable(f"{what}: the answer was lost")
        return result

    def count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def _lost(self, what: str) -> None:
        if what.startswith("commit "):
            self.count("tier commits lost")

    # -- ObjectStore -----------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return self.memory.url

    async def put(self, path: str, data: Buffer) -> None:
        raw = bytes(data)
        await self.call(f"put {path}", lambda: self.memory.put(path, raw))

    async def put_if_absent(self, path: str, data: Buffer) -> ObjectInfo | None:
        raw = bytes(data)
        return await self.call(f"create {path}", lambda: self.memory.put_if_absent(path, raw))

    async def get_range(self, path: str, start: int, size: int) -> bytes:
        return await self.call(f"get {path}", lambda: self.memory.get_range(path, start, size))

    async def head(self, path: str) -> ObjectInfo | None:
        return await self.call(f"head {path}", lambda: self.memory.head(path))

    async def list(self, prefix: str) -> list[ObjectInfo]:
        return await self.call(f"list {prefix}", lambda: self.memory.list(prefix))

    async def delete(self, path: str) -> None:
        async def work() -> None:
            await self.memory.delete(path)
            home, found, _ = path.partition("/" + layout.commit_file(0))
            if found:  # B5: the table goes with its first log entry
                self.tables.drop(f"{self.url}/{home}")

        await self.call(f"delete {path}", work)

    async def close(self) -> None:
        return None

    # -- TableFactory ----------------------------------------------------------------------------

    def table(self, topic: str, topic_id: TopicId) -> SimTable:
        return SimTable(self, topic, topic_id)

    async def probe(self, attempt: str) -> None:
        await self.call("probe", lambda: self.tables.probe(attempt))

    def describe(self) -> dict[str, str]:
        return {}

    def _vacuumed(self, uri: str, paths: Iterable[str]) -> None:
        home = uri.removeprefix(self.url + "/")
        for path in paths:
            self.memory.objects.pop(f"{home}/{path}", None)

    # -- what others do to the tables --------------------------------------------------------------

    def snapshot(self, topic: str, topic_id: TopicId) -> Snapshot | None:
        """Return the newest version of a table, without delay or damage."""
        state = self.tables.state(f"{self.url}/{layout.table_path(topic, topic_id)}")
        return None if state is None else state.versions[-1]

    def covered(self) -> int:
        """Return how many offsets all tables cover together."""
        newest = (state.versions[-1] for state in self.tables.states.values())
        return sum(each.end for version in newest for each in version.counters.values())

    def row_sum(self, topic: str, topic_id: TopicId, paths: Iterable[str]) -> int:
        """Return the sum of the row hashes of files of a table, modulo 2^63."""
        total, home = 0, layout.table_path(topic, topic_id)
        for path in paths:
            raw = pa.BufferReader(self.memory.objects[f"{home}/{path}"])
            # without Arrow's threads, as in the campaign's own reads
            with pq.ParquetFile(raw, pre_buffer=False) as file:
                for number in range(file.num_row_groups):
                    rows = canonical(file.read_row_group(number, use_threads=False))
                    total += rowhash.row_sum(rows)
        return total % layout.SUM_MODULUS

    def optimize(self, topic: str, topic_id: TopicId) -> bool:
        """Move the rows of one file to a file of another name, like another engine's OPTIMIZE."""
        newest = self.snapshot(topic, topic_id)
        if newest is None or not newest.files or self.log_is_rotten(topic, topic_id):
            return False
        file = newest.files[self._rng.choice(sorted(newest.files))]
        self._moves += 1
        path = f"partition={file.partition}/part-{self._moves:05d}.parquet"
        home = layout.table_path(topic, topic_id)
        objects = self.memory.objects
        if f"{home}/{file.path}" not in objects or f"{home}/{file.path}" in self.rotten:
            return False  # the other engine would read the damaged file and fail
        objects[f"{home}/{path}"] = objects[f"{home}/{file.path}"]
        uri = f"{self.url}/{home}"
        self.tables.rewrite(uri, [file.path], [moved(file, path)])
        self.tables.states[uri].tombstones.append(file.path)
        return True

    def rot(self, topic: str, topic_id: TopicId, rng: random.Random) -> str | None:
        """Flip a bit of a data file that the newest version names (B6); return the file's path."""
        newest = self.snapshot(topic, topic_id)
        home, objects = layout.table_path(topic, topic_id), self.memory.objects
        named = [f"{home}/{path}" for path in sorted(newest.files)] if newest is not None else []
        found = [path for path in named if path in objects and path not in self.rotten]
        if not found:
            return None
        path = rng.choice(found)
        self.rotten[path] = whole = objects[path]
        raw = bytearray(whole)
        pages = len(raw) - footer_size(raw)  # the footer is most of a small file
        raw[rng.randrange(pages if rng.random() < 0.8 else len(raw))] ^= 1 << rng.randrange(8)
        objects[path] = bytes(raw)
        return path

    def restore(self, path: str) -> None:
        """Restore a damaged file from a backup, unless it was deleted meanwhile."""
        whole = self.rotten.pop(path)
        if path in self.memory.objects:
            self.memory.objects[path] = whole

    def _uri(self, topic: str, topic_id: TopicId) -> str:
        return f"{self.url}/{layout.table_path(topic, topic_id)}"

    def log_is_rotten(self, topic: str, topic_id: TopicId) -> bool:
        state = self.tables.state(self._uri(topic, topic_id))
        return state is not None and state.altered is not None

    def rot_log(
        self, topic: str, topic_id: TopicId, altered: Callable[[Snapshot], Snapshot]
    ) -> None:
        """Let every load of the table return `altered(version)` from now on (B7)."""
        self.tables.damage(self._uri(topic, topic_id), altered)

    def restore_log(self, topic: str, topic_id: TopicId) -> None:
        """Restore the table's `_delta_log`, as an operator does."""
        self.tables.repair(self._uri(topic, topic_id))

    def delete_rows(self, topic: str, topic_id: TopicId, file: DataFile) -> None:
        """Delete all rows of a live file, as another engine's DELETE does (B8)."""
        self.tables.rewrite(self._uri(topic, topic_id), [file.path], [])

    def restore_rows(self, topic: str, topic_id: TopicId, file: DataFile) -> None:
        """Add the deleted file again, like another engine's RESTORE, if the table still exists."""
        newest = self.snapshot(topic, topic_id)
        if newest is not None and file.path not in newest.files:
            self.tables.rewrite(self._uri(topic, topic_id), [], [file])


class SimTable:
    """The table of one topic, reached through the simulated store.  Implements `Table`."""

    def __init__(self, store: SimObjects, topic: str, topic_id: TopicId) -> None:
        self._store = store
        self._home = layout.table_path(topic, topic_id)
        self._table = store.tables.table(topic, topic_id)

    @property
    def uri(self) -> str:
        return self._table.uri

    async def load(self, partitions: Sequence[int]) -> Snapshot | None:
        store, wanted = self._store, list(partitions)

        async def work() -> Snapshot | None:
            try:
                return await self._table.load(wanted)
            except errors.TierTableChanged:
                store.count("Delta logs refused")
                raise

        return await store.call(f"load {self._home}", work)

    async def create(self) -> Snapshot:
        async def work() -> Snapshot:
            self._store.memory.objects[f"{self._home}/{layout.commit_file(0)}"] = b"{}"
            return await self._table.create()

        return await self._store.call(f"create {self._home}", work)

    async def commit(self, commit: Commit) -> Snapshot:
        store = self._store
        late, store.late_commit = store.late_commit, None
        late_ms = late() if late is not None else 0.0
        if late is not None:
            store.count("tier commits late")

        async def work() -> Snapshot:
            try:
                return await self._table.commit(commit)
            except errors.PkError:
                store.count("tier commits refused")
                raise

        return await store.call(f"commit {self._home}", work, late_ms)

    async def vacuum(self, retention_ms: int, may_delete: MayDelete) -> int | None:
        if not await may_delete():  # runs in the caller and ends with its machine
            return None
        return await self._store.call(
            f"vacuum {self._home}", lambda: self._table.vacuum(retention_ms, always)
        )


def _seen(task: asyncio.Task[object]) -> None:
    if not task.cancelled():
        task.exception()  # its caller may be dead
