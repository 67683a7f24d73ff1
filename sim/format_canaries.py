"""Canaries of rules L21 and Q7: a file of another build is read as a file of this build."""

from __future__ import annotations

from contextlib import ExitStack
from unittest.mock import patch

from pk import errors
from pk.log import checkpoints
from pk.server.metadata import records, snapshot
from pk.server.metadata.records import MetadataRecord


def read_as_empty(stack: ExitStack) -> None:
    """Take a checkpoint of another version for a damaged one, which is read as empty."""
    decode = checkpoints.decode

    def lenient(title: str, raw: bytes) -> list[str]:
        try:
            return decode(title, raw)
        except errors.NewerFormat as newer:
            raise checkpoints.CorruptCheckpoint(newer.message) from newer

    stack.enter_context(patch.object(checkpoints, "decode", lenient))


def unknown_field_dropped(stack: ExitStack) -> None:
    """Ignore the fields of a metadata record that are not known."""

    def lenient(value: bytes | None) -> MetadataRecord:
        return MetadataRecord.FromString(value or b"")

    for module in (records, snapshot):
        stack.enter_context(patch.object(module, "decode_record", lenient))
