"""The interface of an object store as the tier needs it, and a store in memory with the same
semantics.

Paths are relative to the store's root and use '/'.  A `put` is atomic: a reader sees the whole
object or none.  Once `put` has returned, the object survives a crash (file:// by fsync, s3:// by
the server's guarantee).  Every call has the store's own deadline.  A store that does not answer
raises `TierUnavailable`; one that refuses by rule (read-only, no such bucket) raises
`StoreRefused`.

Invariants
  O1  Reads and uploads use separate pools: a slow upload never delays a cold read, and vice versa.
  O2  Retries are bounded: a call ends within `tier_timeout_ms` times its few attempts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from crc32c import crc32c

from pk.world import Buffer as Buffer

T = TypeVar("T")


class Executor(Protocol):
    """Runs work that would block the event loop: in a few threads, or in place in the simulator."""

    def __call__(self, work: Callable[[], T]) -> Awaitable[T]: ...


class ObjectInfo(NamedTuple):
    """The result of a HEAD."""

    path: str
    size: int
    modified_ms: int
    tag: str = ""  #: changes whenever the content does


class ObjectStore(Protocol):
    """A store of objects: a bucket and a prefix, or a directory."""

    @property
    def url(self) -> str: ...

    async def put(self, path: str, data: Buffer) -> None: ...

    async def put_if_absent(self, path: str, data: Buffer) -> ObjectInfo | None:
        """Writes an object.  Returns None, and writes nothing, if it exists.

        Exactly one of several concurrent calls returns the new object, with the tag that a HEAD
        would return (`modified_ms` 0 = unknown).
        """
        ...

    async def get_range(self, path: str, start: int, size: int) -> bytes:
        """Returns bytes `[start, start + size)`, fewer at the end.  Raises `FileNotFoundError`."""
        ...

    async def head(self, path: str) -> ObjectInfo | None: ...

    async def list(self, prefix: str) -> list[ObjectInfo]:
        """Returns every object below the directory `prefix`, sorted by path."""
        ...

    async def delete(self, path: str) -> None:
        """Deletes an object; a missing one is no error."""
        ...

    async def close(self) -> None: ...


async def remove_all(store: ObjectStore, prefixes: Sequence[str]) -> int | None:
    """Deletes every object below the directories `prefixes`; returns how many, None if objects
    still come."""
    removed = 0
    for _ in range(3):  # an upload under way may still land
        found = [each for prefix in prefixes for each in await store.list(prefix)]
        for each in found:
            await store.delete(each.path)
        removed += len(found)
        if not found:
            return removed
    return None


class MemoryStore:
    """An object store in a dict.  `fault` is called before each operation and may raise."""

    def __init__(self, url: str = "memory://tier") -> None:
        self._url = url
        self.objects: dict[str, bytes] = {}
        self.fault: Callable[[str, str], None] = lambda operation, path: None

    @property
    def url(self) -> str:
        return self._url

    async def put(self, path: str, data: Buffer) -> None:
        self.fault("put", path)
        self.objects[path] = bytes(data)

    async def put_if_absent(self, path: str, data: Buffer) -> ObjectInfo | None:
        self.fault("put_if_absent", path)
        if path in self.objects:
            return None
        self.objects[path] = bytes(data)
        return self._info(path)

    async def get_range(self, path: str, start: int, size: int) -> bytes:
        self.fault("get_range", path)
        data = self.objects.get(path)
        if data is None:
            raise FileNotFoundError(path)
        return data[start : start + size]

    async def head(self, path: str) -> ObjectInfo | None:
        self.fault("head", path)
        return self._info(path)

    def _info(self, path: str) -> ObjectInfo | None:
        data = self.objects.get(path)
        return ObjectInfo(path, len(data), 0, f"{crc32c(data):08x}") if data is not None else None

    async def list(self, prefix: str) -> list[ObjectInfo]:
        self.fault("list", prefix)
        below = prefix.rstrip("/") + "/" if prefix else ""
        return [
            ObjectInfo(path, len(data), 0)
            for path, data in sorted(self.objects.items())
            if path.startswith(below)
        ]

    async def delete(self, path: str) -> None:
        self.fault("delete", path)
        self.objects.pop(path, None)

    async def close(self) -> None:
        return None
