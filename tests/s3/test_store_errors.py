"""The error that a person reads when a real S3 server refuses: one sentence from each of both
libraries.
"""

from __future__ import annotations

import asyncio
import dataclasses
import http.server
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from versitygw import S3Server, free_port

from pk import errors
from pk.clock import SystemClock
from pk.tiering.delta import DeltaTables
from pk.tiering.fsspec_store import open_store
from pk.tiering.store_settings import StoreSettings

pytestmark = [pytest.mark.s3, pytest.mark.integration]


def settings_of(s3: S3Server) -> StoreSettings:
    return StoreSettings(
        f"s3://{s3.bucket}/words", s3.endpoint, s3.access_key, s3.secret_key,
        timeout_ms=5_000, retry_backoff_ms=10,
    )  # fmt: skip


def told(settings: StoreSettings) -> list[errors.PkError]:
    """Return the errors of a write and of the probe of the Delta log."""

    async def ask() -> list[errors.PkError]:
        store = open_store(settings, SystemClock())
        tables = DeltaTables(settings, store, SystemClock())
        found: list[errors.PkError] = []
        for work in (store.put("a", b"x"), store.list("a"), tables.probe("p")):
            with pytest.raises(errors.PkError) as refused:
                await work
            found.append(refused.value)
        await tables.close()
        await store.close()
        return found

    return asyncio.run(ask())


def check(settings: StoreSettings, words: str) -> None:
    for error in told(settings):
        assert words in error.message
        assert settings.bucket in error.message
        assert len(error.message) < 300
        assert not set("<>\x1b\n") & set(error.message)
        assert "Error performing" not in error.message
        assert settings.secret_access_key not in error.message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"access_key_id": "nobody"}, "check tier_access_key_id"),
        ({"secret_access_key": "not-the-secret"}, "check tier_secret_access_key"),
        ({"url": "s3://no-such-bucket/words"}, "does not exist: create it"),
    ],
)
def test_wrong_keys_and_buckets(s3_server: S3Server, change: dict[str, Any], words: str) -> None:
    check(dataclasses.replace(settings_of(s3_server), **change), words)


def test_a_dead_endpoint(s3_server: S3Server) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    settings = dataclasses.replace(settings_of(s3_server), endpoint_url=nowhere)
    check(settings, "no connection to the store's endpoint")


class Refusing(http.server.BaseHTTPRequestHandler):
    """Answers every request as S3 does, with the given code."""

    protocol_version = "HTTP/1.1"
    code = ""

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = (
            f"<Error><Code>{self.code}</Code><Message>No.</Message><RequestId>7</RequestId></Error>"
        ).encode()
        self.send_response(403)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = _answer

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def refusing() -> Iterator[http.server.ThreadingHTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(
    ("code", "words"),
    [("RequestTimeTooSkewed", "synchronise them"), ("AccessDenied", "access is denied")],
)
def test_a_wrong_clock_and_a_missing_permission(
    refusing: http.server.ThreadingHTTPServer, monkeypatch: Any, code: str, words: str
) -> None:
    monkeypatch.setattr(Refusing, "code", code)
    at = f"http://127.0.0.1:{refusing.server_port}"
    check(StoreSettings("s3://b/words", at, "key", "not-told", timeout_ms=5_000), words)
