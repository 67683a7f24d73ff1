"""Serializers, the registry's wire format, and the HTTP client with a tiny registry."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pk import errors
from pk.client.registry import HttpRegistry
from pk.client.serializers import (
    RegistryDeserializer,
    RegistrySerializer,
    deserializer,
    frame,
    json_deserializer,
    json_serializer,
    serializer,
    string_deserializer,
    string_serializer,
    unframe,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(st.text())
def test_text_survives(text: str) -> None:
    try:
        data = string_serializer("t", text)
    except errors.SerializationError:
        assert any("\ud800" <= each <= "\udfff" for each in text)
        return
    assert string_deserializer("t", data) == text


@given(JSON)
def test_json_survives(value: Any) -> None:
    try:
        data = json_serializer("t", value)
    except errors.SerializationError:
        return  # a lone surrogate
    assert json_deserializer("t", data) == value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), b"x", {1, 2}])
def test_what_is_no_json_is_refused(value: Any) -> None:
    with pytest.raises(errors.SerializationError, match="t: not JSON"):
        json_serializer("t", value)


def test_none_is_a_tombstone_everywhere() -> None:
    for name in ("bytes", "string", "json"):
        assert serializer(name, "value_serializer")("t", None) is None  # type: ignore[misc]
    assert serializer(str.encode, "value_serializer")("t", None) is None  # type: ignore[misc]


def test_bad_bytes_are_told() -> None:
    with pytest.raises(errors.SerializationError, match="utf-8"):
        string_deserializer("t", b"\xff")
    with pytest.raises(errors.SerializationError, match="JSON"):
        json_deserializer("t", b"{")


def test_callables_with_and_without_topic() -> None:
    one = serializer(lambda v: v.encode(), "value_serializer")
    assert one("t", "a") == b"a"  # type: ignore[misc]
    both = serializer(lambda t, v: (t + v).encode(), "value_serializer")
    assert both("t", "a") == b"ta"  # type: ignore[misc]
    with pytest.raises(errors.SerializationError):
        deserializer(json.loads, "value_deserializer")("t", b"{")  # type: ignore[misc]
    with pytest.raises(errors.InvalidOption, match="bytes, string, json"):
        serializer("avro", "value_serializer")


@given(st.integers(0, 2**32 - 1), st.binary(max_size=50))
def test_the_wire_format(schema_id: int, payload: bytes) -> None:
    data = frame(schema_id, payload)
    assert data[0] == 0
    assert data[1:5] == schema_id.to_bytes(4, "big")
    assert unframe(data) == (schema_id, payload)


@pytest.mark.parametrize("data", [b"", b"\x00\x00\x00\x01", b"\x01\x00\x00\x00\x01x"])
def test_what_is_not_the_wire_format_is_told(data: bytes) -> None:
    with pytest.raises(errors.SerializationError):
        unframe(data)


# -- a registry ----------------------------------------------------------------------------------


class Registry(HTTPServer):
    """Answers register and get like the Confluent API."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.schemas: list[dict[str, Any]] = []
        self.calls: list[tuple[str, str, str | None]] = []
        self.failures: list[int] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Registry

    def log_message(self, *_arguments: Any) -> None:
        pass

    def _answer(self, status: int, body: Any) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def _failed(self) -> bool:
        self.server.calls.append((self.command, self.path, self.headers["Authorization"]))
        if self.server.failures:
            self._answer(self.server.failures.pop(0), {"no": "message"})
            return True
        return False

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._failed():
            return
        if body["schema"] == "broken":
            self._answer(422, {"error_code": 42201, "message": "Invalid schema"})
            return
        if body not in self.server.schemas:
            self.server.schemas.append(body)
        self._answer(200, {"id": self.server.schemas.index(body) + 1})

    def do_GET(self) -> None:
        if self._failed():
            return
        number = int(self.path.rsplit("/", 1)[1])
        if not 0 < number <= len(self.server.schemas):
            self._answer(404, {"error_code": 40403, "message": "Schema not found"})
            return
        self._answer(200, self.server.schemas[number - 1])


@pytest.fixture
def registry() -> Iterator[Registry]:
    server = Registry()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_value_goes_through_the_registry_and_back(registry: Registry) -> None:
    client = HttpRegistry(registry.url, user="u", password="p")
    write = RegistrySerializer(client, '{"type": "string"}', str.encode, schema_type="JSON")
    read = RegistryDeserializer(
        HttpRegistry([registry.url]), lambda payload, schema: (payload.decode(), schema)
    )
    for text in ("a", "b"):
        data = write("flights", text)
        assert data is not None
        assert data[:5] == b"\x00\x00\x00\x00\x01"
        assert read("flights", data) == (text, '{"type": "string"}')
    assert [call[:2] for call in registry.calls] == [
        ("POST", "/subjects/flights-value/versions"),
        ("GET", "/schemas/ids/1"),
    ], "asked once each"
    assert registry.calls[0][2] == "Basic dTpw"


def test_a_refusal_names_what_the_registry_said(registry: Registry) -> None:
    client = HttpRegistry(registry.url)
    with pytest.raises(errors.RegistryError, match="Invalid schema \\(error 42201\\)"):
        client.register("s", "broken")
    with pytest.raises(errors.RegistryError, match="Schema not found"):
        client.get(99)
    assert len(registry.calls) == 2, "a refusal is not repeated"


def test_a_passing_failure_is_tried_again_and_a_lasting_one_told(registry: Registry) -> None:
    registry.failures = [503]
    assert HttpRegistry(registry.url).register("s", "x") == 1
    registry.failures = [500] * 10
    with pytest.raises(errors.RegistryError, match="HTTP 500"):
        HttpRegistry(registry.url).get(1)
    assert len(registry.calls) == 2 + 3


def test_an_unreachable_registry_falls_to_the_next(registry: Registry) -> None:
    client = HttpRegistry(f"http://127.0.0.1:1,{registry.url}")
    assert client.register("s", "x") == 1
    with pytest.raises(errors.RegistryError, match="refused"):
        HttpRegistry("http://127.0.0.1:1", timeout_s=0.5).get(1)


@pytest.mark.parametrize("url", ["", "ftp://x", "localhost:8081"])
def test_a_bad_address_is_refused(url: str) -> None:
    with pytest.raises(errors.InvalidOption):
        HttpRegistry(url)
