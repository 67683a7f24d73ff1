"""The real object stores: a directory, and S3 through s3fs.  No other module imports fsspec or
s3fs.

Reads and uploads have separate pools (tiering/objects O1): threads for a directory, event loops
with their own connections for S3.  A slow transfer in one direction therefore delays neither the
other direction nor the event loop that serves the broker.  Each call has a deadline; transient
failures are tried again twice, with back-off.

Failures and the errors that callers get
  not found                                    FileNotFoundError (get_range), None (head)
  read-only, no permission, no such bucket     StoreRefused: the operator acts
  everything else, deadlines included          TierUnavailable: retried by the caller
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import fcntl
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pk import errors
from pk.backoff import Backoff
from pk.clock import Clock
from pk.tiering.objects import Buffer, ObjectInfo, ObjectStore
from pk.tiering.output_buffer import BLOCK_BYTES
from pk.tiering.s3_head import S3Heads
from pk.tiering.store_calls import DELETE, GET, HEAD, LIST, PUT, StoreCalls
from pk.tiering.store_errors import error_text
from pk.tiering.store_settings import StoreSettings, check_url

T = TypeVar("T")

ATTEMPTS = 3
THREADS = 4
#: Objects smaller than this go through the page cache because they are read again (the table's log,
#: footers).
DIRECT_BYTES_MIN = 1024 * 1024
#: Prefix of temporary names of uploads to a directory; readers ignore them, VACUUM deletes
#: leftovers.
_TEMPORARY = ".pk-upload-"
_REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)


def open_store(
    settings: StoreSettings, clock: Clock, calls: StoreCalls | None = None
) -> ObjectStore:
    """Opens the store of a URL; counts its requests in `calls`.  Raises `StoreRefused` for schemes
    that have not been tried."""
    check_url(settings.url)
    kind = DirectoryStore if settings.scheme == "file" else S3Store
    return kind(settings, clock, StoreCalls() if calls is None else calls)


class _Calls:
    """Deadlines, retries and the translation of failures; the same for both stores."""

    def __init__(self, settings: StoreSettings, clock: Clock, calls: StoreCalls) -> None:
        self._settings = settings
        self._clock = clock
        self._calls = calls

    @property
    def url(self) -> str:
        return self._settings.url

    async def _call(
        self,
        operation: str,
        doing: str,
        work: Callable[[], Awaitable[T]],
        *,
        deadline_ms: int | None = None,
    ) -> T:
        """Runs `work` with a deadline; transient failures are retried with back-off."""
        limit_s = (deadline_ms or self._settings.timeout_ms) / 1000
        first_ms = self._settings.retry_backoff_ms
        backoff = Backoff((first_ms, 2**ATTEMPTS * first_ms))
        last: BaseException | None = None
        for attempt in range(ATTEMPTS):
            if attempt:
                await self._clock.sleep_ms(backoff.next_ms())
            self._calls.count(operation)
            try:
                async with asyncio.timeout(limit_s):
                    return await work()
            except (FileNotFoundError, FileExistsError, errors.PkError):
                raise
            except PermissionError as cause:
                raise self._refused(doing, cause) from cause
            except TimeoutError:
                last = TimeoutError(f"no answer within {limit_s:g} s")
                break  # a slow store is not asked again immediately
            except Exception as cause:
                if isinstance(cause, OSError) and cause.errno in _REFUSED:
                    raise self._refused(doing, cause) from cause
                last = cause
        why = error_text(_text(last))
        raise errors.TierUnavailable(f"{self.url}: {doing}: {why}", url=self.url) from last

    def _refused(self, doing: str, cause: BaseException) -> errors.StoreRefused:
        return errors.StoreRefused(f"{self.url}: {doing}: {error_text(_text(cause))}", url=self.url)

    def _upload_deadline_ms(self, size: int) -> int:
        """Returns the deadline of an upload; a large one may take longer, at 1 MiB/s or more."""
        return self._settings.timeout_ms + size // 1024


class DirectoryStore(_Calls):
    """A store in a directory (file://): atomic by rename, durable by fsync."""

    def __init__(self, settings: StoreSettings, clock: Clock, calls: StoreCalls) -> None:
        super().__init__(settings, clock, calls)
        self._root = Path(settings.directory)
        self._reads = concurrent.futures.ThreadPoolExecutor(THREADS, "pk-store-read")
        self._uploads = concurrent.futures.ThreadPoolExecutor(THREADS, "pk-store-upload")
        self._counter = 0
        self._made: set[Path] = set()  #: directories whose names are synced

    def _path(self, path: str) -> Path:
        full = self._root / path
        if ".." in full.parts:
            raise errors.InvalidRequest(f"{path!r} leaves the store")
        return full

    async def _in(
        self,
        pool: concurrent.futures.Executor,
        operation: str,
        doing: str,
        work: Callable[[], T],
        size: int = 0,
    ) -> T:
        loop = asyncio.get_running_loop()
        return await self._call(
            operation,
            doing,
            lambda: loop.run_in_executor(pool, work),
            deadline_ms=self._upload_deadline_ms(size),
        )

    async def put(self, path: str, data: Buffer) -> None:
        await self._in(
            self._uploads, PUT, f"writing {path}", lambda: self._write(path, data, False), len(data)
        )

    async def put_if_absent(self, path: str, data: Buffer) -> ObjectInfo | None:
        try:
            return await self._in(
                self._uploads,
                PUT,
                f"writing {path}",
                lambda: self._write(path, data, True),
                len(data),
            )
        except FileExistsError:
            return None

    def _write(self, path: str, data: Buffer, absent: bool) -> ObjectInfo:
        full = self._path(path)
        self._counter += 1
        fresh = full.parent / f"{_TEMPORARY}{os.getpid()}-{self._counter}-{full.name[:80]}"
        try:
            for attempt in range(ATTEMPTS):
                self._make(full.parent)
                try:
                    written = _write_synced(fresh, data)
                    break
                except FileNotFoundError:  # `delete` found the directory empty and removed it
                    self._made.discard(full.parent)
                    if attempt == ATTEMPTS - 1:
                        raise
            if absent:
                os.link(fresh, full)  # fails if the name is taken; rename would replace the file
            else:
                os.rename(fresh, full)
            _sync_directory(full.parent)
            return _info(path, written)
        finally:
            fresh.unlink(missing_ok=True)

    def _make(self, directory: Path) -> None:
        """Creates the directory and syncs its name and those above it: the object is found through
        them."""
        if directory in self._made:
            return
        directory.mkdir(parents=True, exist_ok=True)
        for above in directory.relative_to(self._root).parents:
            _sync_directory(self._root / above)
        self._made.add(directory)

    async def get_range(self, path: str, start: int, size: int) -> bytes:
        def read() -> bytes:
            with open(self._path(path), "rb") as file:
                file.seek(start)
                return file.read(size)

        return await self._in(self._reads, GET, f"reading {path}", read)

    async def head(self, path: str) -> ObjectInfo | None:
        def stat() -> ObjectInfo | None:
            try:
                found = os.stat(self._path(path))
            except (FileNotFoundError, NotADirectoryError):
                return None
            return _info(path, found)

        return await self._in(self._reads, HEAD, f"looking at {path}", stat)

    async def list(self, prefix: str) -> list[ObjectInfo]:
        def walk() -> list[ObjectInfo]:
            found = []
            for directory, _, names in os.walk(self._path(prefix)):
                for name in names:
                    full = Path(directory, name)
                    try:
                        seen = full.stat()
                    except FileNotFoundError:
                        continue
                    path = full.relative_to(self._root).as_posix()
                    found.append(ObjectInfo(path, seen.st_size, seen.st_mtime_ns // 1_000_000))
            return sorted(found)

        return await self._in(self._reads, LIST, f"listing {prefix}", walk)

    async def delete(self, path: str) -> None:
        def remove() -> None:
            full = self._path(path)
            full.unlink(missing_ok=True)
            for parent in full.parents:  # empty directories are no objects
                if parent == self._root or not parent.is_relative_to(self._root):
                    return
                try:
                    parent.rmdir()
                except OSError:
                    return

        await self._in(self._uploads, DELETE, f"deleting {path}", remove)

    async def close(self) -> None:
        self._reads.shutdown(wait=False, cancel_futures=True)
        self._uploads.shutdown(wait=False, cancel_futures=True)


def _info(path: str, found: os.stat_result) -> ObjectInfo:
    tag = f"{found.st_ino}-{found.st_mtime_ns}-{found.st_size}"
    return ObjectInfo(path, found.st_size, found.st_mtime_ns // 1_000_000, tag)


def _write_synced(path: Path, data: Buffer) -> os.stat_result:
    """Writes a new file; it is on the disk when this returns."""
    view = memoryview(data)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        at = _write_directly(descriptor, view)
        while at < len(view):
            at += os.pwrite(descriptor, view[at:], at)
        os.fsync(descriptor)
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


def _write_directly(descriptor: int, view: memoryview) -> int:
    """Writes the whole blocks of a large object with O_DIRECT, past the page cache.  The object is
    not read soon, the log's own pages stay cached, and a copy is saved.  Returns how much was
    written; 0 if the memory or the file system does not permit it."""
    whole = len(view) // BLOCK_BYTES * BLOCK_BYTES
    direct = getattr(os, "O_DIRECT", 0)
    if (
        whole < DIRECT_BYTES_MIN
        or not direct
        or np.frombuffer(view, np.uint8).ctypes.data % BLOCK_BYTES
    ):
        return 0
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    at = 0
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | direct)
        while at < whole:
            at += os.pwrite(descriptor, view[at:whole], at)
    except OSError as cause:
        if cause.errno != errno.EINVAL:
            raise
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return at


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _LoopThread:
    """An event loop in a thread with its own s3fs, which is one pool of connections."""

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        try:
            import s3fs
        except ImportError as cause:
            raise errors.StoreRefused(
                "s3:// needs the package s3fs: pip install 'pk-log[s3]'"
            ) from cause
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self.fs = s3fs.S3FileSystem(asynchronous=True, loop=self.loop, **arguments)
        self.fs.retries = 2
        self._session: Any = None

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async def inner() -> T:
            if self._session is None:
                self._session = await self.fs.set_session()
            return await work()

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(inner(), self.loop))

    async def close(self) -> None:
        async def end() -> None:
            if self._session is not None:
                await self._session.close()

        try:
            async with asyncio.timeout(2):
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(end(), self.loop))
        except Exception:
            pass  # the process ends in any case
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(2)


class S3Store(_Calls):
    """A store in S3 (s3://).  The server makes one PUT atomic and durable."""

    def __init__(self, settings: StoreSettings, clock: Clock, calls: StoreCalls) -> None:
        super().__init__(settings, clock, calls)
        self._reads = _LoopThread("pk-s3-read", settings.for_s3fs())
        self._uploads = _LoopThread("pk-s3-upload", settings.for_s3fs())
        self._heads = S3Heads(settings)

    def _key(self, path: str) -> str:
        prefix = self._settings.prefix
        return f"{prefix}/{path}" if prefix else path

    async def put(self, path: str, data: Buffer) -> None:
        fs, bucket = self._uploads.fs, self._settings.bucket
        full = f"{bucket}/{self._key(path)}"
        await self._write(path, len(data), lambda: fs._pipe_file(full, bytes(data)))

    async def put_if_absent(self, path: str, data: Buffer) -> ObjectInfo | None:
        fs, bucket = self._uploads.fs, self._settings.bucket

        async def write() -> ObjectInfo | None:
            try:
                reply = await fs._call_s3(
                    "put_object",
                    Bucket=bucket,
                    Key=self._key(path),
                    Body=bytes(data),
                    IfNoneMatch="*",
                )
            except OSError as error:
                if _status(error) in (409, 412):
                    return None
                raise
            return ObjectInfo(path, len(data), 0, str(reply["ETag"]))

        return await self._write(path, len(data), write)

    async def _write(self, path: str, size: int, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            return await self._call(
                PUT,
                f"writing {path}",
                lambda: self._uploads.run(work),
                deadline_ms=self._upload_deadline_ms(size),
            )
        except FileNotFoundError as cause:
            raise self._no_bucket() from cause

    def _no_bucket(self) -> errors.StoreRefused:
        bucket = self._settings.bucket
        return errors.StoreRefused(
            f"{self.url}: bucket {bucket} does not exist: create it", url=self.url
        )

    async def get_range(self, path: str, start: int, size: int) -> bytes:
        fs, bucket = self._reads.fs, self._settings.bucket

        async def read() -> bytes:
            try:
                reply = await fs._call_s3(
                    "get_object",
                    Bucket=bucket,
                    Key=self._key(path),
                    Range=f"bytes={start}-{start + size - 1}",
                )
            except OSError as error:
                if _status(error) == 416:
                    return b""  # at or beyond the end
                raise
            async with reply["Body"] as body:
                data: bytes = await body.read()
            return data

        if size <= 0:
            return b""
        return await self._call(GET, f"reading {path}", lambda: self._reads.run(read))

    async def head(self, path: str) -> ObjectInfo | None:
        key = self._key(path)
        return await self._call(HEAD, f"looking at {path}", lambda: self._heads.head(key, path))

    async def list(self, prefix: str) -> list[ObjectInfo]:
        fs, bucket = self._reads.fs, self._settings.bucket
        below = self._key(prefix.rstrip("/") + "/" if prefix else "")
        cut = len(self._key(""))

        async def pages() -> list[ObjectInfo]:
            found: list[ObjectInfo] = []
            more: dict[str, str] = {}
            while True:
                page = await fs._call_s3("list_objects_v2", Bucket=bucket, Prefix=below, **more)
                for item in page.get("Contents", ()):
                    modified = int(item["LastModified"].timestamp() * 1000)
                    size = int(item["Size"])
                    found.append(ObjectInfo(item["Key"][cut:], size, modified, item["ETag"]))
                if not page.get("IsTruncated"):
                    return sorted(found)
                more = {"ContinuationToken": page["NextContinuationToken"]}

        try:
            return await self._call(LIST, f"listing {prefix}", lambda: self._reads.run(pages))
        except FileNotFoundError as cause:
            raise self._no_bucket() from cause

    async def delete(self, path: str) -> None:
        fs, bucket = self._uploads.fs, self._settings.bucket

        async def remove() -> None:
            await fs._call_s3("delete_object", Bucket=bucket, Key=self._key(path))

        try:
            await self._call(DELETE, f"deleting {path}", lambda: self._uploads.run(remove))
        except FileNotFoundError:
            pass

    async def close(self) -> None:
        self._heads.close()
        await self._reads.close()
        await self._uploads.close()


def _text(error: BaseException | None) -> str:
    """Returns the store's message with its own error code, which s3fs omits."""
    response = getattr(getattr(error, "__cause__", None), "response", None)
    code = response.get("Error", {}).get("Code", "") if isinstance(response, dict) else ""
    text = str(error) or repr(error)
    return text if not code or str(code) in text else f"{code}: {text}"


def _status(error: BaseException) -> int:
    """Returns the HTTP status behind an error that s3fs translated."""
    response = getattr(error.__cause__, "response", None)
    if not isinstance(response, dict):
        return 0
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return int(status)
