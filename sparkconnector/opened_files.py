"""Opens the Parquet files of a task, the next ones while the task reads.

A file of a table in an object store costs a round trip for its size, one for its footer and one for
its rows.  A task that reads many small files would wait for the store most of its time.  So threads
open the next files of the task, in the order in which it reads them, and a small file is fetched
whole with its footer.  The files of a local directory are opened when the task reads them: there is
nothing to wait for.

Invariants
  O1  At most AHEAD_FILES files that the task has not asked for are open or being opened.  Each of
      them holds at most WHOLE_BYTES in memory.
  O2  An error of a file is raised when the task asks for the file, and never otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import pyarrow as pa

from pk import errors
from pk.sparkconnector import table_store
from pk.sparkconnector.ranges import TierFile
from pk.tiering import footers
from pk.tiering.footers import Footer, Part

#: Files that are open ahead of the task.
AHEAD_FILES = 8
#: A file of an object store with at most so many bytes is fetched whole: about what a connection
#: delivers during the round trip that is saved.
WHOLE_BYTES = 1 << 20


class FailedTierFile(Exception):
    """A file of the plan is missing in the store, or its bytes are damaged."""

    def __init__(self, file: TierFile, why: str, *, missing: bool = False) -> None:
        super().__init__(why)
        self.file = file
        self.missing = missing


class OpenTierFile(NamedTuple):
    """An open file and its footer."""

    file: TierFile
    handle: Any
    footer: Footer


class TableFile(NamedTuple):
    """A file of a table, as a task names it."""

    uri: str  #: of the table
    storage_options: Mapping[str, str]
    file: TierFile


def open_file(source: Any, root: str, file: TierFile, *, whole_bytes: int = 0) -> OpenTierFile:
    """Open a file and read its footer; fetch it whole if it has at most `whole_bytes`.

    Raises `FailedTierFile`, `TierUnavailable`.
    """
    path = file.path if "://" in file.path else f"{root}/{file.path}"
    try:
        handle = source.open_input_file(path)
        size = handle.size()
        if size <= whole_bytes:
            with handle:
                handle = pa.BufferReader(handle.read_buffer())
        tail = read_part(handle, footers.tail_part(size))
        longer = footers.longer_tail(tail, size)
        if longer is not None:
            tail = read_part(handle, longer)
    except FileNotFoundError:
        raise FailedTierFile(file, "it is not in the store", missing=True) from None
    except footers.UnreadableFile as cause:
        raise FailedTierFile(file, str(cause)) from cause
    except (OSError, pa.ArrowException) as cause:
        if "does not exist" in str(cause) or "NoSuchKey" in str(cause):
            raise FailedTierFile(file, "it is not in the store", missing=True) from cause
        raise errors.TierUnavailable(f"{path}: {cause}") from cause
    try:
        footer = footers.open_footer(file, tail)
    except footers.UnreadableFile as cause:
        raise FailedTierFile(file, str(cause)) from cause
    return OpenTierFile(file, handle, footer)


def read_part(handle: Any, part: Part) -> bytes:
    """Return some bytes of an open file."""
    return bytes(handle.read_at(part.size, part.start))


class TaskFiles:
    """The files of a task.  `coming`: those it is going to ask for, in this order.

    The caller owns what `get` returns, and calls `close` at the end of the task.
    """

    def __init__(self, coming: Iterable[TableFile] = ()) -> None:
        far = {
            (each.uri, each.file.path): each
            for each in coming
            if table_store.local_root(each.uri) is None
        }
        self._coming = list(far.values())
        self._numbers = {key: number for number, key in enumerate(far)}
        self._next = 0  #: number of the first file that was neither asked for nor opened ahead
        self._ahead: dict[int, Future[OpenTierFile]] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._stores: dict[str, tuple[Any, str]] = {}

    def get(self, place: TableFile) -> OpenTierFile:
        """Return the open file.  Raises `FailedTierFile`, `TierUnavailable`, `StoreRefused`."""
        number = self._numbers.get((place.uri, place.file.path), -1)
        opened = self._ahead.pop(number, None)
        self._next = max(self._next, number + 1)
        for passed in [each for each in self._ahead if each < number]:
            _close_later(self._ahead.pop(passed))
        self._open_ahead()
        return self._open(place) if opened is None else opened.result()

    def close(self) -> None:
        """Close what was opened ahead.  A file that is being opened is closed once it is open."""
        for each in self._ahead.values():
            each.cancel()
            _close_later(each)
        self._ahead.clear()
        self._coming.clear()
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    def _open_ahead(self) -> None:
        while len(self._ahead) < AHEAD_FILES and self._next < len(self._coming):
            if self._threads is None:
                self._threads = ThreadPoolExecutor(AHEAD_FILES, "pk-open-ahead")
            self._store(self._coming[self._next])  # by this thread, so that there is one of each
            self._ahead[self._next] = self._threads.submit(self._open, self._coming[self._next])
            self._next += 1

    def _open(self, place: TableFile) -> OpenTierFile:
        far = table_store.local_root(place.uri) is None
        source, root = self._store(place)
        return open_file(source, root, place.file, whole_bytes=WHOLE_BYTES if far else 0)

    def _store(self, place: TableFile) -> tuple[Any, str]:
        """Return the file system of the table, one for all its files: it keeps connections."""
        found = self._stores.get(place.uri)
        if found is None:
            found = table_store.file_system(place.uri, place.storage_options)
            self._stores[place.uri] = found
        return found


def _close_later(opened: Future[OpenTierFile]) -> None:
    def close(done: Future[OpenTierFile]) -> None:
        if not done.cancelled() and done.exception() is None:
            done.result().handle.close()

    opened.add_done_callback(close)
