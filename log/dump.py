"""Lists the contents of a file of a log as plain objects, for `pk log dump`.  It never raises for
damaged input: damage is an object, too, `{"corrupt": why, "position": where}`, and everything
readable behind it follows.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

from crc32c import crc32c

from pk import errors
from pk.log import (
    aborted,
    checkpoints,
    columns,
    control_rows,
    epochs,
    forgotten,
    identity,
    index,
    swap,
)
from pk.log import batch as batches
from pk.log.batch import HEADER_BYTES, Header
from pk.log.damage import ReadAt
from pk.log.directory import HIGH_WATERMARKS, LOCAL_STARTS, LOG_STARTS, RECOVERY_POINTS
from pk.log.producers import CorruptSnapshot, Producers
from pk.log.segment import INDEX, LOG, SNAPSHOT, TIMEINDEX, TXNINDEX

Object = dict[str, Any]
CHECKPOINTS = (
    epochs.FILE,
    RECOVERY_POINTS,
    HIGH_WATERMARKS,
    LOG_STARTS,
    LOCAL_STARTS,
    swap.FILE,
    forgotten.FILE,
    identity.PARTITION_FILE,
    identity.IDENTITIES,
)
SUFFIXES = (LOG, INDEX, TIMEINDEX, TXNINDEX, SNAPSHOT)


def kind_of(name: str) -> str | None:
    """Return the suffix or checkpoint name that says how to read a file; None = not a file of
    pk.
    """
    name = name.removesuffix(".deleted").removesuffix(".tmp")
    if name in CHECKPOINTS:
        return name
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


def dump(kind: str, read: ReadAt, size: int, *, records: bool = False) -> Iterator[Object]:
    """Yield the objects of a file of `kind`; damage is an object, too.  Raises `NewerFormat`."""
    if kind == LOG:
        yield from dump_log(read, size, records)
        return
    raw = read(0, size)
    try:
        if kind in (INDEX, TIMEINDEX):
            yield from _index(raw, kind)
        elif kind == TXNINDEX:
            yield from (entry._asdict() for entry in aborted.decode(raw))
        elif kind == SNAPSHOT:
            yield from _snapshot(raw)
        elif kind == epochs.FILE:
            yield from (entry._asdict() for entry in epochs.LeaderEpochs.decode(raw).entries)
        elif kind == forgotten.FILE:
            yield forgotten.decode(raw)._asdict()
        elif kind == swap.FILE:
            yield from _swap(raw)
        elif kind == identity.PARTITION_FILE:
            yield _identity(identity.decode(raw, kind))
        elif kind == identity.IDENTITIES:
            for known in identity.parse(checkpoints.decode(kind, raw)).values():
                yield {**_identity(known.identity), "state": known.state}
        else:
            for line in checkpoints.decode(kind, raw):
                topic_id, partition, offset = line.split()
                yield {"topic_id": topic_id, "partition": int(partition), "offset": int(offset)}
    except errors.LogUnidentified as cause:
        yield {"corrupt": cause.message, "position": 0}
    except (
        index.CorruptIndex,
        aborted.CorruptTransactionIndex,
        CorruptSnapshot,
        checkpoints.CorruptCheckpoint,
        ValueError,
    ) as cause:
        yield {"corrupt": str(cause), "position": 0}


def dump_log(read: ReadAt, size: int, records: bool) -> Iterator[Object]:
    """Yield one object per batch, with its rows if `records`.  A batch whose checksum fails is
    stepped over.
    """
    position = 0
    while position < size:
        raw = read(position, HEADER_BYTES)
        try:
            header = batches.read_header(raw)
            batches.check_structure(header)
        except errors.CorruptBatch as cause:
            yield {"corrupt": cause.message, "position": position}
            return
        if header.length > size - position:
            why = f"{header.length} bytes announced, {size - position} left: a torn tail"
            yield {"corrupt": why, "position": position, **_batch(header)}
            return
        raw = read(position, header.length)
        found = crc32c(memoryview(raw)[batches.CRC_START :])
        row: Object = {"position": position, **_batch(header)}
        if found != header.crc:
            row = {"corrupt": f"checksum 0x{found:08x} instead of 0x{header.crc:08x}", **row}
        elif records and header.codec_number < len(batches.CODECS):
            row |= _rows(raw, header)
        yield row
        position += header.length


def _batch(header: Header) -> Object:
    return {
        "base_offset": header.base_offset,
        "last_offset": header.last_offset,
        "records": header.record_count,
        "bytes": header.length,
        "leader_epoch": header.leader_epoch,
        "codec": _codec(header),
        "timestamp_type": "LogAppendTime" if header.log_append_time else "CreateTime",
        "base_timestamp": header.base_timestamp,
        "max_timestamp": header.max_timestamp,
        "producer_id": header.producer_id,
        "producer_epoch": header.producer_epoch,
        "base_sequence": header.base_sequence,
        "transactional": header.transactional,
        "control": header.control,
        "delete_horizon_ms": header.delete_horizon_ms,
        "crc": f"0x{header.crc:08x}",
    }


def _codec(header: Header) -> str:
    number = header.codec_number
    return batches.CODECS[number] if number < len(batches.CODECS) else f"{number} (a newer pk's)"


def _rows(raw: bytes, header: Header) -> Object:
    try:
        if header.control:
            return {"markers": [marker._asdict() for marker in control_rows.decode_markers(raw)]}
        rows = columns.decode(raw, decoded_bytes_max=columns.DECODED_BYTES_MAX)
    except errors.PkError as cause:
        return {"corrupt": cause.message}
    stamps = rows.column("timestamp").view("int64").to_pylist()
    names = ("offset", "key", "value", "headers")
    cells = zip(stamps, *(rows.column(name).to_pylist() for name in names), strict=True)
    return {
        "rows": [
            {
                "offset": offset,
                "timestamp": stamp,
                "key": text(key),
                "value": text(value),
                "headers": [{"key": item["key"], "value": text(item["value"])} for item in headers],
            }
            for stamp, offset, key, value, headers in cells
        ]
    }


def text(data: bytes | None) -> str | Object | None:
    """Return bytes in a readable form: text if they are utf-8, else `{"base64": …}`."""
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def _identity(known: identity.Identity) -> Object:
    fields = known._asdict()
    fields["topic"], fields["partition"] = fields.pop("topic_partition")
    return fields


def _index(raw: bytes, kind: str) -> Iterator[Object]:
    base, extent, entries = index.decode_entries(
        raw, index.OFFSETS if kind == INDEX else index.TIMES
    )
    yield {"base_offset": base, **extent._asdict(), "entries": len(entries)}
    for first, second in entries.tolist():
        if kind == INDEX:
            yield {"offset": base + first, "position": second}
        else:
            yield {"largest_timestamp_before": first, "offset": second}


def _snapshot(raw: bytes) -> Iterator[Object]:
    offset, state = Producers.from_snapshot(raw)
    yield {
        "next_offset": offset,
        "producers": len(state),
        "open_transactions": state.open_transactions,
    }
    for producer_id, producer in state.items():
        batches_known = [span._asdict() for span in producer.batches]
        yield {"producer_id": producer_id, **producer._asdict(), "batches": batches_known}


def _swap(raw: bytes) -> Iterator[Object]:
    found = swap.decode(raw)
    yield {"cleaned_end": found.cleaned_end}
    for each in found.replacements:
        yield {"swap": found.tail, "base_offset": each.base_offset, "replaces": each.replaces}
