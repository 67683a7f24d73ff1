"""Canaries of rules L21, Q6 and Q7: what another build wrote is read as if this build had written
it.
"""

from __future__ import annotations

from contextlib import ExitStack
from unittest.mock import patch

from pk import errors
from pk.log import checkpoints
from pk.server.controller import brokers
from pk.server.metadata import record_serde, records, snapshot, snapshot_loader
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


def level_not_compared(stack: ExitStack) -> None:
    """Register brokers, and read records, of any level of `pk.format`."""

    def lenient(record: MetadataRecord, _known: int) -> int:
        return record.feature_level.level if record.HasField("feature_level") else 0

    stack.enter_context(patch.object(brokers, "require_known", lambda *_: None))
    for module in (records, record_serde, snapshot_loader):
        stack.enter_context(patch.object(module, "level_in", lenient))
