"""Translates the tier's settings for the libraries that access the store (rule T14).

Data files go through fsspec (`fsspec_store.py`), HEAD requests through Arrow (`s3_head.py`), the
Delta log through deltalake (`delta.py`).  All must use the same bucket, endpoint, credentials and
deadlines.  Only the `for_*` methods return secrets; users and `describe_tier` see `public`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from pk import errors

#: Schemes that have been tried against a real store.
SCHEMES = ("file", "s3")
#: Schemes that both libraries know; refused until they have been tried.
UNTRIED = ("gs", "gcs", "az", "abfs", "abfss", "azure", "r2", "hdfs", "oss", "adl")


@dataclass(slots=True, frozen=True)
class StoreSettings:
    """The URL of the tier and how to access it."""

    url: str
    endpoint_url: str = ""
    access_key_id: str = ""
    secret_access_key: str = ""
    region: str = "us-east-1"
    timeout_ms: int = 10_000
    retry_backoff_ms: int = 500

    @staticmethod
    def of(server: Mapping[str, Any]) -> StoreSettings:
        """Builds the settings from resolved `settings.SERVER`.  Raises `StoreRefused` for a scheme
        that has not been tried."""
        url = str(server["tier_url"]).rstrip("/")
        check_url(url)
        return StoreSettings(
            url=url,
            endpoint_url=str(server["tier_endpoint_url"]),
            access_key_id=str(server["tier_access_key_id"]),
            secret_access_key=str(server["tier_secret_access_key"]),
            region=str(server["tier_region"]),
            timeout_ms=int(server["tier_timeout_ms"]),
            retry_backoff_ms=int(server["tier_retry_backoff_ms"]),
        )

    @property
    def scheme(self) -> str:
        return urlsplit(self.url).scheme

    @property
    def directory(self) -> str:
        """Returns the directory of a file:// URL."""
        assert self.scheme == "file", self.url
        return unquote(urlsplit(self.url).path) or "/"

    @property
    def bucket(self) -> str:
        """Returns the bucket of an s3:// URL."""
        return urlsplit(self.url).netloc

    @property
    def prefix(self) -> str:
        """Returns the prefix of every key of an s3:// URL, without slashes at its ends."""
        return urlsplit(self.url).path.strip("/")

    def for_deltalake(self) -> dict[str, str]:
        """Returns storage options of deltalake that fail fast: the owner's back-off does the
        waiting."""
        if self.scheme != "s3":
            return {}
        options = {
            "AWS_REGION": self.region,
            "max_retries": "2",
            "retry_timeout": f"{self.timeout_ms}ms",
            "timeout": f"{self.timeout_ms}ms",
            "connect_timeout": f"{min(self.timeout_ms, 3_000)}ms",
        }
        if self.endpoint_url:
            options["AWS_ENDPOINT_URL"] = self.endpoint_url
            options["AWS_ALLOW_HTTP"] = str(self.endpoint_url.startswith("http://")).lower()
        if self.access_key_id:
            options["AWS_ACCESS_KEY_ID"] = self.access_key_id
            options["AWS_SECRET_ACCESS_KEY"] = self.secret_access_key
        return options

    def for_s3fs(self) -> dict[str, Any]:
        """Returns the arguments of s3fs.S3FileSystem."""
        seconds = self.timeout_ms / 1000
        arguments: dict[str, Any] = {
            "client_kwargs": {"region_name": self.region},
            "config_kwargs": {
                "connect_timeout": min(seconds, 3.0),
                "read_timeout": seconds,
                "retries": {"max_attempts": 1},
                "max_pool_connections": 16,
                # pk compares its own checksums, and its errors name the damage (T2, T10)
                "response_checksum_validation": "when_required",
            },
            "use_listings_cache": False,
            "skip_instance_cache": True,
        }
        if self.endpoint_url:
            arguments["endpoint_url"] = self.endpoint_url
        if self.access_key_id:
            arguments["key"] = self.access_key_id
            arguments["secret"] = self.secret_access_key
        return arguments

    def for_arrow(self) -> dict[str, Any]:
        """Returns the arguments of pyarrow.fs.S3FileSystem."""
        seconds = self.timeout_ms / 1000
        arguments: dict[str, Any] = {
            "region": self.region,
            "connect_timeout": min(seconds, 3.0),
            "request_timeout": seconds,
        }
        if self.endpoint_url:
            arguments["endpoint_override"] = self.endpoint_url
        if self.access_key_id:
            arguments["access_key"] = self.access_key_id
            arguments["secret_key"] = self.secret_access_key
        return arguments

    def public(self) -> dict[str, str]:
        """Returns what a user needs to open the table elsewhere, without secrets."""
        if self.scheme != "s3":
            return {}
        shown = {"AWS_REGION": self.region}
        if self.endpoint_url:
            shown["AWS_ENDPOINT_URL"] = self.endpoint_url
            shown["AWS_ALLOW_HTTP"] = str(self.endpoint_url.startswith("http://")).lower()
        return shown


def check_url(url: str) -> None:
    """Raises `StoreRefused` unless the URL names a store that pk has been tried on."""
    scheme = urlsplit(url).scheme
    if scheme == "file":
        if urlsplit(url).netloc not in ("", "localhost") or not urlsplit(url).path.startswith("/"):
            raise errors.StoreRefused(f"{url}: a file:// URL needs an absolute path: file:///dir")
        return
    if scheme == "s3":
        if not urlsplit(url).netloc:
            raise errors.StoreRefused(f"{url}: an s3:// URL needs a bucket: s3://bucket/prefix")
        return
    if scheme in ("s3a", "s3n"):  # Hadoop's names of the same store
        raise errors.StoreRefused(f"{url}: use s3://{url.partition('://')[2]}", scheme=scheme)
    tried = " and ".join(f"{name}://" for name in SCHEMES)
    if scheme in UNTRIED:
        raise errors.StoreRefused(
            f"{url}: {scheme}:// has not been tried with pk yet; {tried} have", scheme=scheme
        )
    raise errors.StoreRefused(f"{url}: no known store; {tried} can be used", scheme=scheme)
