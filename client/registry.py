"""A schema registry over HTTP: the Confluent API's register and get.

Answers are cached for the life of the client: an id never changes its schema, and a subject's
schema never changes its id.  Every call has a deadline and a bounded number of attempts.  The
password never appears in an error message.
"""

from __future__ import annotations

import base64
import json
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from http.client import HTTPException
from typing import Any

from pk import errors
from pk.backoff import Backoff
from pk.client import arguments
from pk.clock import block_s, monotonic_s

_ACCEPT = "application/vnd.schemaregistry.v1+json, application/json"
_ATTEMPTS = 3
_BACKOFF_MS = (100, 1_000)
#: The largest response that is accepted as a schema.
_ANSWER_BYTES_MAX = 16 * 1024 * 1024
#: HTTP statuses that are retried.
_RETRIED = {408, 429, 500, 502, 503, 504}


class HttpRegistry:
    """`Registry` (pk.client.serializers) over the Confluent schema registry's REST API."""

    def __init__(
        self,
        urls: str | Iterable[str],
        *,
        user: str | None = None,
        password: str = "",
        timeout_s: float = 10.0,
    ) -> None:
        given = urls.split(",") if isinstance(urls, str) else arguments.items(urls, "urls")
        given = [arguments.text(url, "urls").strip() for url in given]
        self._urls = [url.rstrip("/") for url in given if url]
        if not self._urls:
            raise errors.InvalidOption("no registry URL given", option="urls")
        for url in self._urls:
            if not _is_http(url):
                raise errors.InvalidOption(
                    f"registry {arguments.shown(url)} is not http:// or https://", option="urls"
                )
        if arguments.seconds(timeout_s) <= 0:
            raise errors.InvalidOption("timeout_s must be positive", option="timeout_s")
        self._timeout_s = timeout_s
        self._headers = {
            "Accept": _ACCEPT,
            "Content-Type": "application/vnd.schemaregistry.v1+json",
        }
        arguments.text(password, "password", secret=True)
        if user is not None:
            arguments.text(user, "user")
            token = base64.b64encode(f"{user}:{password}".encode()).decode()
            self._headers["Authorization"] = f"Basic {token}"
        self._lock = threading.Lock()
        self._ids: dict[tuple[str, str, str], int] = {}
        self._schemas: dict[int, tuple[str, str]] = {}

    def register(self, subject: str, schema: str, schema_type: str = "AVRO") -> int:
        """Return the id of `schema` under `subject`, registered if it is new.  Raises
        `RegistryError`.
        """
        for name, given in (("subject", subject), ("schema", schema), ("schema_type", schema_type)):
            arguments.text(given, name)
        key = (subject, schema, schema_type)
        with self._lock:
            known = self._ids.get(key)
        if known is not None:
            return known
        body: dict[str, Any] = {"schema": schema}
        if schema_type != "AVRO":
            body["schemaType"] = schema_type
        answer = self._call(
            "POST", f"/subjects/{urllib.parse.quote(subject, safe='')}/versions", body
        )
        found = answer.get("id")
        if not isinstance(found, int) or not 0 <= found < 2**32:
            raise errors.RegistryError(f"the registry answered no schema id for {subject}")
        with self._lock:
            self._ids[key] = found
        return found

    def get(self, schema_id: int) -> tuple[str, str]:
        """Return `(schema, schema type)` of an id.  Raises `RegistryError`."""
        schema_id = arguments.whole(schema_id, "schema_id", 0, 2**32 - 1)
        with self._lock:
            known = self._schemas.get(schema_id)
        if known is not None:
            return known
        answer = self._call("GET", f"/schemas/ids/{schema_id}", None)
        schema = answer.get("schema")
        if not isinstance(schema, str):
            raise errors.RegistryError(f"the registry answered no schema for id {schema_id}")
        found = (schema, str(answer.get("schemaType") or "AVRO"))
        with self._lock:
            self._schemas[schema_id] = found
        return found

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """Send one request, repeated on the other addresses or after a pause, within the
        deadline.
        """
        deadline = monotonic_s() + self._timeout_s
        backoff = Backoff(_BACKOFF_MS)
        problem = "it was not asked"
        for attempt in range(_ATTEMPTS):
            for url in self._urls:
                left = deadline - monotonic_s()
                if left <= 0:
                    break
                try:
                    return self._once(method, url + path, body, left)
                except urllib.error.HTTPError as cause:
                    with cause:
                        problem = _problem(cause)
                    if cause.code not in _RETRIED:
                        raise errors.RegistryError(
                            f"{method} {path}: {problem}", status=str(cause.code)
                        ) from None
                except (OSError, HTTPException, ValueError) as cause:
                    problem = f"{url}: {cause}"
            pause = min(backoff.next_ms() / 1000, deadline - monotonic_s())
            if attempt + 1 < _ATTEMPTS and pause > 0:
                block_s(pause)
        raise errors.RegistryError(
            f"{method} {path}: {problem} (tried for {self._timeout_s:g} s at most)"
        )

    def _once(
        self, method: str, url: str, body: dict[str, Any] | None, timeout_s: float
    ) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, self._headers, method=method)
        with urllib.request.urlopen(request, timeout=timeout_s) as reply:
            raw = reply.read(_ANSWER_BYTES_MAX + 1)
        if len(raw) > _ANSWER_BYTES_MAX:
            raise ValueError(f"an answer of more than {_ANSWER_BYTES_MAX} bytes")
        answer = json.loads(raw)
        if not isinstance(answer, dict):
            raise ValueError("the answer is no JSON object")
        return answer


def _problem(cause: urllib.error.HTTPError) -> str:
    """Return the registry's own error message, or the status."""
    try:
        answer = json.loads(cause.read(64 * 1024))
        return f"{answer['message']} (error {answer['error_code']})"
    except (ValueError, KeyError, TypeError, OSError):
        return f"HTTP {cause.code}"


def _is_http(url: str) -> bool:
    try:
        found = urllib.parse.urlsplit(url)
        return found.scheme in ("http", "https") and bool(found.hostname) and found.port != 0
    except ValueError:  # a port that is not a number, or unmatched brackets
        return False
