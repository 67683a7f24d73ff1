"""HEAD requests to S3 through Arrow's client.

An owner looks at each of its tables again and again by asking for two names (rule T3).  A request
of botocore takes 4 ms of CPU time, one of Arrow's client less than 1 ms, so that the looks at a
thousand tables at rest take less than 1 % of a core.  All other requests go through s3fs
(`fsspec_store.py`).

Invariants
  A1  A HEAD is one request: Arrow makes it when it opens the object, and reads nothing.
  A2  The threads are bounded, and each request has the store's deadline, in Arrow's client itself.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from pk import errors
from pk.tiering.objects import ObjectInfo
from pk.tiering.store_settings import StoreSettings

#: As many as s3fs has connections: the HEADs of one commit's files go side by side.
THREADS = 16
#: Arrow's names of refusals.  The reply to a HEAD has no body, so a wrong key is one of these, too.
_REFUSED = ("AWS Error ACCESS_DENIED", "HTTP status 401", "HTTP status 403")


class S3Heads:
    """The HEAD requests of one store."""

    def __init__(self, settings: StoreSettings) -> None:
        """Raises `StoreRefused` if this build of pyarrow has no S3."""
        self._bucket = settings.bucket
        self._fs = _file_system(settings.for_arrow())
        self._pool = concurrent.futures.ThreadPoolExecutor(THREADS, "pk-s3-head")

    async def head(self, key: str, path: str) -> ObjectInfo | None:
        """Returns what the store says about the object `key`, under the name `path`; None if there
        is none.  Raises `PermissionError` if the store refuses, `OSError` for all other failures.
        """
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._pool, self._look, key)
        return None if found is None else found._replace(path=path)

    def _look(self, key: str) -> ObjectInfo | None:
        try:
            with self._fs.open_input_file(f"{self._bucket}/{key}") as file:
                size, told = file.size(), file.metadata()
        except FileNotFoundError:
            return None
        except OSError as cause:
            if any(each in str(cause) for each in _REFUSED):
                raise PermissionError(str(cause)) from cause
            raise
        return ObjectInfo(key, size, _modified_ms(told), _text(told, "ETag"))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _file_system(arguments: Mapping[str, Any]) -> Any:
    try:
        from pyarrow import fs
    except ImportError as cause:
        raise errors.StoreRefused(f"s3:// needs a pyarrow with S3: {cause}") from cause
    if not hasattr(fs, "S3FileSystem"):
        raise errors.StoreRefused("s3:// needs a pyarrow with S3; this build has none")
    once = fs.AwsStandardS3RetryStrategy(max_attempts=1)  # the store's own calls try again
    return fs.S3FileSystem(retry_strategy=once, **arguments)


def _text(told: Mapping[str, bytes], name: str) -> str:
    return told.get(name, b"").decode("latin-1")


def _modified_ms(told: Mapping[str, bytes]) -> int:
    """Returns the time of the last change, in ms; 0 if it is not known."""
    text = _text(told, "Last-Modified")
    return int(datetime.fromisoformat(text).timestamp() * 1000) if text else 0
