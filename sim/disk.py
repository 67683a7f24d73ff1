"""A simulated Storage with the losses of a real disk, and a Disk whose lanes run in the loop.

Model (log/storage D1–D4, L1)
  WRITTEN  `crash` (the process died) keeps the effect of every completed operation.  Of an append
           in which the process died, any prefix may be left.
  SYNCED   `power_loss` keeps, of every file, the last synced content plus any subset of the 4 KiB
           blocks written since (a lost block inside the file reads as zeroes).  It keeps, of every
           directory, a prefix of the creates, renames and removes since its last `sync_dir`.

Faults
  capacity  the disk is full beyond this size (StorageFull)
  fault     an operation raises the returned exception
  crash_at  the process dies in the n-th mutation
  rot       a bit that was written reads as another one
  lose      a file or directory disappears
  lag_ms    the whole disk is slow
  stall     one job of a lane lasts long while the other lanes go on; the job takes effect at its
            beginning or at its end

All random choices come from the `Random` that the caller passes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from pk import errors
from pk.clock import Clock
from pk.log.storage import Buffer, File

T = TypeVar("T")

BLOCK = 4096

#: What the error of a full disk says.
NO_ROOM = "no space for"
#: What the error of an operation says that found no descriptor.
NO_DESCRIPTOR = "Too many open files"
#: The operations that need space: for data, or for names in directories.
GROWING = ("append", "write_at", "create", "make_dir", "rename")
#: The operations that need a descriptor: they open a file or a directory, or open a file again
#: because its descriptor was closed (log/descriptor_pool).  A directory whose names changed is
#: synced with a spare one.
OPENING = ("open", "create", "list", "read", "append", "write_at", "truncate", "sync")


#: Set while an observer of the simulator reads: no fault hits it.
_observing = False


@contextlib.contextmanager
def observing() -> Iterator[None]:
    """Read logs without their faults."""
    global _observing
    before, _observing = _observing, True
    try:
        yield
    finally:
        _observing = before


class Crashed(BaseException):
    """The simulated process died here.  It is not an `Exception`, so that no code handles it."""


class _Inode:
    """The bytes of a file: now, and at the last sync."""

    def __init__(self, number: int = 0) -> None:
        self.number = number  #: no other file or directory of the storage had it
        self.version = 0  #: counts the changes that a file system would note
        self.data = bytearray()
        self.durable = bytearray()
        self.dirty: set[int] = set()  # block numbers; always iterated in sorted order

    def touch(self, start: int, end: int) -> None:
        self.version += 1
        self.dirty.update(range(start // BLOCK, -(-max(end, start + 1) // BLOCK)))

    def sync(self) -> None:
        self.durable = bytearray(self.data)
        self.dirty.clear()

    def lose(self, rng: random.Random) -> None:
        """Apply a power loss: any subset of the blocks written since the last sync survives."""
        if not self.dirty and len(self.durable) == len(self.data):
            return
        kept = bytearray(self.durable)
        for block in sorted(self.dirty):
            start = block * BLOCK
            piece = self.data[start : start + BLOCK]
            if rng.random() < 0.5 or not piece:
                continue
            if len(kept) < start:
                kept.extend(bytes(start - len(kept)))
            kept[start : start + len(piece)] = piece
        if len(self.data) > len(kept) and rng.random() < 0.3:
            # the new size survived, the data did not
            kept.extend(bytes(len(self.data) - len(kept)))
        if len(self.data) < len(self.durable) and rng.random() < 0.5:
            del kept[len(self.data) :]  # the truncation survived
        self.data = kept
        self.durable = bytearray(kept)
        self.dirty.clear()


class _Dir:
    """The names in a directory, and the changes since the last sync_dir."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.entries: dict[str, _Inode | _Dir] = {}
        self.durable: dict[str, _Inode | _Dir] = {}
        self.pending: list[list[tuple[str, _Inode | _Dir | None]]] = []

    def change(self, *edits: tuple[str, _Inode | _Dir | None]) -> None:
        """Apply one atomic operation that sets or removes (None) several names."""
        self.pending.append(list(edits))
        _apply(self.entries, edits)

    def sync(self) -> None:
        self.durable = dict(self.entries)
        self.pending.clear()

    def lose(self, rng: random.Random) -> None:
        kept = dict(self.durable)
        for edits in self.pending[: rng.randint(0, len(self.pending))]:
            _apply(kept, edits)
        self.entries = kept
        self.sync()
        for name in sorted(kept):
            kept[name].lose(rng)


def _apply(
    entries: dict[str, _Inode | _Dir], edits: Sequence[tuple[str, _Inode | _Dir | None]]
) -> None:
    for name, node in edits:
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


class SimFile:
    """One open file of a `SimStorage`."""

    def __init__(self, storage: SimStorage, path: str, inode: _Inode, life: int) -> None:
        self.path = path
        self._storage = storage
        self._inode = inode
        self._life = life
        self._open = True

    def size(self) -> int:
        return len(self._inode.data)

    def append(self, buffers: Sequence[Buffer]) -> int:
        start = len(self._inode.data)
        raw = b"".join(buffers)
        self._write("append", start, raw)
        return start

    def write_at(self, position: int, data: Buffer) -> None:
        self._write("write_at", position, bytes(data))

    def _write(self, operation: str, position: int, raw: bytes) -> None:
        inode = self._inode

        def put(data: bytes) -> None:
            if len(inode.data) < position:
                inode.touch(len(inode.data), position)
                inode.data.extend(bytes(position - len(inode.data)))
            inode.data[position : position + len(data)] = data
            if data:
                inode.touch(position, position + len(data))

        self._check()
        growth = position + len(raw) - len(inode.data)
        self._storage.mutate(
            operation,
            self.path,
            lambda: put(raw),
            partly=lambda n: put(raw[:n]),
            size=len(raw),
            growth=growth,
        )

    def read(self, position: int, size: int) -> bytes:
        self._check()
        self._storage.observe("read", self.path)
        return bytes(self._inode.data[position : position + size])

    def truncate(self, size: int) -> None:
        self._check()

        def cut() -> None:
            old = len(self._inode.data)
            if size < old:
                del self._inode.data[size:]
            else:
                self._inode.data.extend(bytes(size - old))
            self._inode.touch(min(size, old), max(size, old))

        self._storage.mutate("truncate", self.path, cut)

    def sync(self) -> None:
        self._check()
        self._storage.mutate("sync", self.path, self._inode.sync)

    def close(self) -> None:
        self._open = False

    def _check(self) -> None:
        if self._life != self._storage.life:
            raise Crashed(f"{self.path} was opened by a process that died")
        if not self._open:  # a closed file raises (log/storage D4)
            raise FileNotFoundError(f"{self.path} was closed")


class SimStorage:
    """A directory tree in memory; it outlives `crash()` and `power_loss()` of its process."""

    def __init__(
        self, root: str = "sim", rng: random.Random | None = None, capacity: int | None = None
    ) -> None:
        self.root = root
        self.failed: Exception | None = None
        self.capacity = capacity
        self.fault: Callable[[str, str], Exception | None] | None = None
        #: the process dies in the n-th mutation from here (0 = the next)
        self.crash_at: int | None = None
        self.lag_ms = 0.0  #: extra time of every operation on a slow disk
        #: Called with the lane ("read", "write") at each job: returns the delay before the job is
        #: done and the delay after it, before its caller gets the result.
        self.stall: Callable[[str], tuple[float, float]] | None = None
        self.mutations = 0
        self.life = 0
        self._rng = rng or random.Random(0)
        self._tree = _Dir()
        self._numbers = itertools.count(1)
        self._dead = False
        self._locked_by = -1

    # -- what the test does to it ------------------------------------------------------------------
    def crash(self) -> None:
        """Let the process die: what is WRITTEN stays, open files and the lock become invalid."""
        self.life += 1
        self.failed = None
        self.crash_at = None
        self._dead = False
        self._locked_by = -1

    def power_loss(self, rng: random.Random | None = None) -> None:
        """Let the machine lose power: only what is SYNCED is sure to stay (log/storage D3)."""
        self.crash()
        self._tree.lose(rng or self._rng)

    def peek(self, path: str) -> bytes:
        """Return a file's content without any fault; empty if there is no such file."""
        node = self._find(path)
        return bytes(node.data) if isinstance(node, _Inode) else b""

    def exchange(self, path: str, content: bytes) -> None:
        """Replace the content of a file that exists, SYNCED, while no process uses it."""
        node = self._find(path)
        assert isinstance(node, _Inode), path
        node.data[:] = content
        node.version += 1
        node.sync()

    def names(self, path: str) -> list[str]:
        """Return the names in a directory without any fault."""
        node = self._find(path)
        return sorted(node.entries) if isinstance(node, _Dir) else []

    def synced_bytes(self, path: str) -> int:
        """Return how many leading bytes of a file are SYNCED; 0 = there is no such file."""
        node = self._find(path)
        if not isinstance(node, _Inode):
            return 0
        same = min(len(node.data), len(node.durable))
        return min([same, *(block * BLOCK for block in node.dirty)])

    def rot(self, path: str, position: int, bit: int) -> Callable[[], bool]:
        """Flip one bit of a file; return a function that says whether the damage is still there."""
        node = self._find(path)
        assert isinstance(node, _Inode), path
        was = node.data[position]
        node.data[position] = now = was ^ 1 << bit
        if position < len(node.durable) and node.durable[position] == was:
            node.durable[position] = now

        def there() -> bool:
            return (
                self._find(path) is node
                and position < len(node.data)
                and node.data[position] == now
            )

        return there

    def used_bytes(self) -> int:
        return _bytes_of(self._tree)

    def files(self) -> dict[str, bytes]:
        """Return every file's content by path, to compare two states."""
        found: dict[str, bytes] = {}

        def walk(prefix: str, node: _Dir) -> None:
            for name in sorted(node.entries):
                child = node.entries[name]
                path = f"{prefix}{name}"
                if isinstance(child, _Dir):
                    walk(path + "/", child)
                else:
                    found[path] = bytes(child.data)

        walk("", self._tree)
        return found

    # -- the gate every operation passes -----------------------------------------------------------
    def mutate(
        self,
        operation: str,
        path: str,
        apply: Callable[[], None],
        *,
        partly: Callable[[int], None] | None = None,
        size: int = 0,
        growth: int = 0,
    ) -> None:
        if self._dead:
            raise Crashed("the process is dead")
        if self.failed is not None:
            raise errors.StorageFailed(f"{self.root} is offline: {self.failed}")
        at, self.mutations = self.mutations, self.mutations + 1
        if self.crash_at is not None:
            if self.crash_at == 0:
                self._die(apply, partly, size)
            self.crash_at -= 1
        self._faulty(operation, path)
        if growth > 0 and self.capacity is not None and self.used_bytes() + growth > self.capacity:
            raise errors.StorageFull(
                f"{self.root}: {NO_ROOM} {path} (operation {at})", directory=self.root
            )
        apply()

    def _die(
        self, apply: Callable[[], None], partly: Callable[[int], None] | None, size: int
    ) -> None:
        self._dead = True
        chance = self._rng.random()
        if chance < 0.33:
            apply()
        elif chance < 0.9 and partly is not None:
            partly(self._rng.randint(0, size))
        raise Crashed("the process died in this operation")

    def observe(self, operation: str, path: str) -> None:
        if self._dead:
            raise Crashed("the process is dead")
        self._faulty(operation, path)

    def _faulty(self, operation: str, path: str) -> None:
        fault = None if _observing else self.fault
        error = fault(operation, path) if fault is not None else None
        if error is None:
            return
        if isinstance(error, errors.StorageFull) or operation == "read":
            raise error
        self.failed = error
        raise errors.StorageFailed(
            f"{self.root}: {operation} {path}: {error}", directory=self.root
        ) from error

    def lose(self, path: str) -> None:
        """Remove a file or directory; no power loss brings it back."""
        parent, name = self._parent(path)
        parent.entries.pop(name, None)
        parent.durable.pop(name, None)
        parent.pending = [[each for each in edits if each[0] != name] for edits in parent.pending]

    # -- Storage -----------------------------------------------------------------------------------
    def _find(self, path: str) -> _Inode | _Dir | None:
        node: _Inode | _Dir | None = self._tree
        for part in path.split("/") if path else ():
            node = node.entries.get(part) if isinstance(node, _Dir) else None
            if node is None:
                return None
        return node

    def _parent(self, path: str) -> tuple[_Dir, str]:
        head, tail = os.path.split(path)
        node = self._find(head)
        if not isinstance(node, _Dir):
            raise FileNotFoundError(f"{head}: no such directory")
        return node, tail

    def open(self, path: str, *, create: bool = False, write: bool = True) -> File:
        self.observe("open", path)
        node = self._find(path)
        if node is None and create:
            parent, name = self._parent(path)
            fresh = _Inode(next(self._numbers))
            self.mutate("create", path, lambda: parent.change((name, fresh)))
            node = fresh
        if not isinstance(node, _Inode):
            raise FileNotFoundError(path)
        return SimFile(self, path, node, self.life)

    def exists(self, path: str) -> bool:
        self.observe("exists", path)
        return self._find(path) is not None

    def list(self, path: str) -> list[str]:
        self.observe("list", path)
        node = self._find(path)
        return sorted(node.entries) if isinstance(node, _Dir) else []

    def stamp(self, path: str) -> str:
        self.observe("list", path)
        node = self._find(path)
        if not isinstance(node, _Dir):
            return ""
        rows = [f"{node.number}"]
        for name, each in sorted(node.entries.items()):
            version = f".{each.version}.{len(each.data)}" if isinstance(each, _Inode) else ""
            rows.append(f"{name}.{each.number}{version}")
        return ",".join(rows)

    def make_dir(self, path: str) -> None:
        built = ""
        for part in path.split("/"):
            built = f"{built}/{part}" if built else part
            if self._find(built) is None:
                parent, name = self._parent(built)
                fresh = _Dir(next(self._numbers))
                self.mutate("make_dir", built, partial(parent.change, (name, fresh)))

    def remove(self, path: str) -> None:
        if self._find(path) is not None:
            parent, name = self._parent(path)
            self.mutate("remove", path, lambda: parent.change((name, None)))

    def remove_tree(self, path: str) -> None:
        self.remove(path)

    def rename(self, old: str, new: str) -> None:
        node = self._find(old)
        if node is None:
            raise FileNotFoundError(old)
        source, was = self._parent(old)
        target, name = self._parent(new)

        def move() -> None:
            if source is target:
                source.change((was, None), (name, node))
            else:
                source.change((was, None))
                target.change((name, node))

        self.mutate("rename", f"{old} {new}", move)

    def sync_dir(self, path: str) -> None:
        node = self._find(path)
        if not isinstance(node, _Dir):
            raise FileNotFoundError(path)
        self.mutate("sync_dir", path, node.sync)

    def sync_all(self, files: Sequence[File], directories: Sequence[str] = ()) -> None:
        for file in files:
            file.sync()
        for path in directories:
            self.sync_dir(path)

    def read_file(self, path: str) -> bytes:
        self.observe("read", path)
        node = self._find(path)
        if not isinstance(node, _Inode):
            raise FileNotFoundError(path)
        return bytes(node.data)

    def replace_file(self, path: str, data: bytes) -> None:
        self.replace_all({path: data})

    def replace_all(self, files: Mapping[str, bytes]) -> None:
        for path, data in files.items():
            file = self.open(path + ".tmp", create=True)
            try:
                file.truncate(0)
                file.append([data])
                file.sync()
            finally:
                file.close()
        for path in files:
            self.rename(path + ".tmp", path)
        for path in dict.fromkeys(map(os.path.dirname, files)):
            self.sync_dir(path)

    def free_bytes(self) -> int:
        return 2**50 if self.capacity is None else max(0, self.capacity - self.used_bytes())

    def lock(self) -> None:
        self.observe("lock", ".lock")
        if self._locked_by == self.life:
            raise errors.DirectoryLocked(f"{self.root} is in use", directory=self.root)
        self._locked_by = self.life

    def unlock(self) -> None:
        self._locked_by = -1


def _bytes_of(node: _Inode | _Dir) -> int:
    if isinstance(node, _Inode):
        return len(node.data)
    return sum(_bytes_of(child) for child in node.entries.values())


class SimDisk:
    """Executors in the loop: `write` jobs run in order, every job after a drawn virtual delay."""

    def __init__(
        self,
        storage: SimStorage,
        clock: Clock,
        rng: random.Random,
        *,
        write_ms: tuple[float, float] = (0.05, 2.0),
        read_ms: tuple[float, float] = (0.05, 1.0),
    ) -> None:
        self.storage = storage
        self._clock = clock
        self._rng = rng
        self._write_ms = write_ms
        self._read_ms = read_ms
        self._life = storage.life
        self._order: asyncio.Lock | None = None
        self._running: dict[asyncio.Task[object], None] = {}
        self._closing = False

    async def write(self, work: Callable[[], T]) -> T:
        if self._closing:
            raise errors.StorageFailed(f"{self.storage.root} is closed")
        return await self._shielded(self._ordered(work, self._rng.uniform(*self._write_ms)))

    async def read(self, work: Callable[[], T]) -> T:
        return await self._shielded(self._later(work, self._rng.uniform(*self._read_ms), "read"))

    async def compute(self, work: Callable[[], T]) -> T:
        return await self._shielded(self._later(work, self._rng.uniform(*self._read_ms)))

    async def close(self) -> None:
        self._closing = True
        await asyncio.gather(*list(self._running), return_exceptions=True)

    def kill(self) -> None:
        """Let the process die: queued jobs do not run any more."""
        self._closing = True
        for task in list(self._running):
            task.cancel()

    async def _shielded(self, coroutine: Coroutine[None, None, T]) -> T:
        """Run a queued job to its end even if its caller is cancelled (log/files F2)."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._running[task] = None
        task.add_done_callback(self._done)
        return await asyncio.shield(task)

    def _done(self, task: asyncio.Task[object]) -> None:
        self._running.pop(task, None)
        if not task.cancelled():
            task.exception()  # take the exception: the caller may have been cancelled

    async def _ordered(self, work: Callable[[], T], delay_ms: float) -> T:
        if self._order is None:
            self._order = asyncio.Lock()
        async with self._order:
            return await self._later(work, delay_ms, "write")

    async def _later(self, work: Callable[[], T], delay_ms: float, lane: str = "") -> T:
        """Run a job later.  `lane` is a lane of the disk; '' = pure computation, never stalled."""
        storage = self.storage
        before, after = (0.0, 0.0) if storage.stall is None or not lane else storage.stall(lane)
        await self._clock.sleep_ms(delay_ms + storage.lag_ms + before)
        if self._life != storage.life:
            raise Crashed("this disk belongs to a process that died")
        done = work()
        if after:
            await self._clock.sleep_ms(after)
        return done
