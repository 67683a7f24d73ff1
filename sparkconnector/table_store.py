"""Opens the store of a topic's table with Arrow's file systems, for Spark's driver and executors.

Credentials come from the environment of the process; the table's place holds none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from pk import errors


def with_credentials(storage_options: Mapping[str, str]) -> dict[str, str]:
    """Return the storage options with credentials from the environment."""
    from pk.tiering import credentials

    return credentials.completed(storage_options, os.environ)


def file_system(uri: str, storage_options: Mapping[str, str]) -> tuple[Any, str]:
    """Return an Arrow file system and the table's root in it.

    Raises `StoreRefused` for schemes other than file and s3.
    """
    from pyarrow import fs

    parts = urlsplit(uri)
    root = local_root(uri)
    if root is not None:
        return fs.LocalFileSystem(), root
    if parts.scheme not in ("s3", "s3a"):
        raise errors.StoreRefused(
            f"{uri}: {parts.scheme}:// is not yet tried; file:// and s3:// are"
        )
    options = {name.lower(): value for name, value in with_credentials(storage_options).items()}
    arguments: dict[str, Any] = {"connect_timeout": 10, "request_timeout": 30}
    endpoint = options.get("aws_endpoint_url") or options.get("endpoint_url") or ""
    if endpoint:
        target = urlsplit(endpoint)
        arguments |= {"endpoint_override": target.netloc, "scheme": target.scheme or "http"}
    for ours, theirs in (
        ("access_key", "aws_access_key_id"),
        ("secret_key", "aws_secret_access_key"),
        ("session_token", "aws_session_token"),
        ("region", "aws_region"),
    ):
        if options.get(theirs):
            arguments[ours] = options[theirs]
    return fs.S3FileSystem(**arguments), f"{parts.netloc}{unquote(parts.path)}".rstrip("/")


def local_root(uri: str) -> str | None:
    """Return the directory of a table on a file system of this machine; None for other stores."""
    parts = urlsplit(uri)
    if parts.scheme not in ("", "file"):
        return None
    return (unquote(parts.path) if parts.scheme else uri).rstrip("/")


def put_file(source: Any, path: str, data: memoryview) -> None:
    """Write a new file; on a local disk it is synced before this returns.

    Raises `TierUnavailable`.
    """
    from pyarrow import fs

    try:
        with source.open_output_stream(path) as stream:
            stream.write(data)
        if isinstance(source, fs.LocalFileSystem):
            for each in (path, os.path.dirname(path)):
                descriptor = os.open(each, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
    except (OSError, pa.ArrowException) as cause:
        raise errors.TierUnavailable(f"{path}: {cause}") from cause
