"""URLs of Delta tables that users name: one spelling for each, and which ones an operator allows.

Spark writes `file:/lake/t` and `s3a://bucket/t` for what deltalake calls `file:///lake/t` and
`s3://bucket/t`.
"""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from pk import errors
from pk.tiering.store_settings import check_url


def normal_url(text: str) -> str:
    """Return the URL of a table as deltalake takes it.

    Raises `StoreRefused` for a store that pk has not been tried on, and for a path with `..`.
    """
    url = text.strip().rstrip("/")
    if url.startswith("/"):
        url = f"file://{url}"
    parts = urlsplit(url)
    if parts.scheme == "file" and not parts.netloc:
        url = f"file://{parts.path}"
    elif parts.scheme == "s3a":
        url = f"s3://{parts.netloc}{parts.path}"
    check_url(url)
    path = unquote(urlsplit(url).path)
    if any(each in ("", ".", "..") for each in path.split("/")[1:]):
        raise errors.StoreRefused(f"{text}: the path of a table has no empty part, '.' or '..'")
    return url


def prefixes_of(setting: str) -> tuple[str, ...]:
    """Return the URLs of the setting resolver_table_urls.  Raises `InvalidConfig`."""
    try:
        return tuple(normal_url(each) for each in setting.split(",") if each.strip())
    except errors.StoreRefused as cause:
        raise errors.InvalidConfig(
            f"resolver_table_urls: {cause.message}", option="resolver_table_urls"
        ) from cause


def is_listed(url: str, prefixes: tuple[str, ...]) -> bool:
    """Return whether a normal URL is one of the prefixes, or below one."""
    return any(url == each or url.startswith(f"{each}/") for each in prefixes)
