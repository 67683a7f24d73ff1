"""Python values ⇄ bytes: bytes, text, JSON, and the schema registry's wire format.

A serializer is called `(topic, value) -> bytes | None`, a deserializer `(topic, data) -> value`.
None stays None: it is a tombstone, not a value.  Registry wire format: byte 0, a 4-byte big-endian
schema id, the payload.
"""

from __future__ import annotations

import inspect
import json
import struct
from collections.abc import Callable
from typing import Any, Protocol

from pk import errors
from pk.client.arguments import flag, function, shown, text

Serializer = Callable[[str, Any], "bytes | None"]
Deserializer = Callable[[str, "bytes | None"], Any]

_WIRE = struct.Struct(">bI")
MAGIC = 0
HEADER_BYTES = _WIRE.size


class Registry(Protocol):
    """The part of a schema registry that serializers use."""

    def register(self, subject: str, schema: str, schema_type: str = "AVRO") -> int:
        """Return the id of `schema` under `subject`, registered if it is new.  Raises
        `RegistryError`.
        """
        ...

    def get(self, schema_id: int) -> tuple[str, str]:
        """Return `(schema, schema type)` of an id.  Raises `RegistryError`."""
        ...


def bytes_serializer(topic: str, value: Any) -> bytes | None:
    """Return bytes-like objects unchanged, as bytes."""
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    raise errors.SerializationError(f"{topic}: {type(value).__name__} is not bytes")


def bytes_deserializer(topic: str, data: bytes | None) -> bytes | None:
    return data


def string_serializer(topic: str, value: Any) -> bytes | None:
    """Encode str as UTF-8."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise errors.SerializationError(f"{topic}: {type(value).__name__} is not text")
    try:
        return value.encode()
    except UnicodeEncodeError as cause:
        raise errors.SerializationError(f"{topic}: {cause}") from cause


def string_deserializer(topic: str, data: bytes | None) -> str | None:
    try:
        return None if data is None else bytes(memoryview(data)).decode()
    except (TypeError, UnicodeDecodeError) as cause:
        raise errors.SerializationError(f"{topic}: not utf-8: {cause}") from cause


def json_serializer(topic: str, value: Any) -> bytes | None:
    """Encode as compact JSON in UTF-8; NaN and infinities, which JSON lacks, are refused."""
    if value is None:
        return None
    try:
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode()
    except (TypeError, ValueError, RecursionError) as cause:
        raise errors.SerializationError(f"{topic}: not JSON: {cause}") from cause


def json_deserializer(topic: str, data: bytes | None) -> Any:
    try:
        return None if data is None else json.loads(data)
    except (TypeError, ValueError, RecursionError) as cause:
        raise errors.SerializationError(f"{topic}: not JSON: {cause}") from cause


def frame(schema_id: int, payload: bytes) -> bytes:
    """Put `payload` into the registry's wire format.  Raises `SerializationError`."""
    if not isinstance(schema_id, int) or not 0 <= schema_id < 2**32:
        raise errors.SerializationError(f"schema id {shown(schema_id)} does not fit four bytes")
    if not isinstance(payload, bytes | bytearray):
        raise errors.SerializationError(f"payload must be bytes, not {shown(payload)}")
    return _WIRE.pack(MAGIC, schema_id) + payload


def unframe(data: bytes) -> tuple[int, bytes]:
    """Return `(schema id, payload)`.  Raises `SerializationError` if it is not the wire format."""
    if not isinstance(data, bytes | bytearray):
        raise errors.SerializationError(f"data must be bytes, not {shown(data)}")
    if len(data) < HEADER_BYTES:
        raise errors.SerializationError(
            f"{len(data)} bytes are no registry message: at least 5 are needed"
        )
    magic, schema_id = _WIRE.unpack_from(data)
    if magic != MAGIC:
        raise errors.SerializationError(
            f"no registry message: it begins with byte {magic & 0xFF}, not 0"
        )
    return schema_id, bytes(data[HEADER_BYTES:])


def subject_of(topic: str, is_key: bool) -> str:
    """Return the subject by TopicNameStrategy, the registry's default."""
    return f"{topic}-{'key' if is_key else 'value'}"


class RegistrySerializer:
    """Registers `schema` once per topic, and puts the schema's id before the bytes from
    `encode`.
    """

    def __init__(
        self,
        registry: Registry,
        schema: str,
        encode: Callable[[Any], bytes],
        *,
        schema_type: str = "AVRO",
        is_key: bool = False,
        subject: Callable[[str, bool], str] = subject_of,
    ) -> None:
        self._registry = registry
        self._schema = text(schema, "schema")
        self._encode = function(encode, "encode")
        self._schema_type = text(schema_type, "schema_type")
        self._is_key = flag(is_key, "is_key")
        self._subject = function(subject, "subject")
        self._ids: dict[str, int] = {}

    def __call__(self, topic: str, value: Any) -> bytes | None:
        if value is None:
            return None
        schema_id = self._ids.get(topic)
        if schema_id is None:
            subject = self._subject(topic, self._is_key)
            schema_id = self._registry.register(subject, self._schema, self._schema_type)
            self._ids[topic] = schema_id
        try:
            payload = self._encode(value)
        except errors.PkError:
            raise
        except Exception as cause:
            raise errors.SerializationError(f"{topic}: {cause}") from cause
        return frame(schema_id, payload)


class RegistryDeserializer:
    """Looks up the schema of the id, and lets `decode(payload, schema)` read the payload."""

    def __init__(self, registry: Registry, decode: Callable[[bytes, str], Any]) -> None:
        self._registry = registry
        self._decode = function(decode, "decode")
        self._schemas: dict[int, str] = {}

    def __call__(self, topic: str, data: bytes | None) -> Any:
        if data is None:
            return None
        schema_id, payload = unframe(data)
        schema = self._schemas.get(schema_id)
        if schema is None:
            schema, _ = self._registry.get(schema_id)
            self._schemas[schema_id] = schema
        try:
            return self._decode(payload, schema)
        except errors.PkError:
            raise
        except Exception as cause:
            raise errors.SerializationError(f"{topic}: schema {schema_id}: {cause}") from cause


NAMED_SERIALIZERS: dict[str, Serializer] = {
    "bytes": bytes_serializer, "string": string_serializer, "json": json_serializer,
}  # fmt: skip
NAMED_DESERIALIZERS: dict[str, Deserializer] = {
    "bytes": bytes_deserializer, "string": string_deserializer, "json": json_deserializer,
}  # fmt: skip


def serializer(given: Any, name: str) -> Serializer | None:
    """Return the serializer for an argument: None, a name, `f(value)` or `f(topic, value)`."""
    found: Serializer | None = _callable(given, name, NAMED_SERIALIZERS)
    return found


def deserializer(given: Any, name: str) -> Deserializer | None:
    found: Deserializer | None = _callable(given, name, NAMED_DESERIALIZERS)
    return found


def _callable(given: Any, name: str, named: dict[str, Any]) -> Any:
    if given is None:
        return None
    if isinstance(given, str):
        found = named.get(given.lower())
        if found is None:
            raise errors.InvalidOption(
                f"{name} is one of {', '.join(named)} or a callable, not {given!r}", option=name
            )
        return None if given.lower() == "bytes" and name.endswith("deserializer") else found
    if not callable(given):
        raise errors.InvalidOption(
            f"{name} must be callable, not {type(given).__name__}", option=name
        )
    return given if _takes_topic(given) else _without_topic(given)


def _takes_topic(function: Callable[..., Any]) -> bool:
    """Return whether a function takes (topic, value) rather than (value)."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return False
    try:
        signature.bind("topic", b"")
    except TypeError:
        return False
    required = [
        p for p in signature.parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]  # fmt: skip
    return len(required) == 2


def _without_topic(function: Callable[[Any], Any]) -> Callable[[str, Any], Any]:
    def call(topic: str, value: Any) -> Any:
        if value is None:
            return None
        try:
            return function(value)
        except errors.PkError:
            raise
        except Exception as cause:
            raise errors.SerializationError(f"{topic}: {cause!r}") from cause

    return call
