"""Delta's text of a file's statistics, to and from pk's classes.  Pure."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import Any

from pk.tiering import log_check
from pk.tiering.data_files import OFFSET_MAX, DataFile, NewFile
from pk.tiering.layout import PARTITION_COLUMN

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MILLISECOND = datetime.timedelta(milliseconds=1)
#: "no statistics": the file may hold any timestamp.
_ANY_TIME = (-(2**62), 2**62)


def stats_of(new: NewFile) -> str:
    """Returns the statistics by which readers skip a file (rule T10)."""
    file = new.file
    stats = {
        "numRecords": file.rows,
        "minValues": {"offset": file.min_offset, "timestamp": _iso(file.min_timestamp_ms)},
        "maxValues": {"offset": file.max_offset, "timestamp": _iso(file.max_timestamp_ms)},
        "nullCount": {"offset": 0, "timestamp": 0, "key": new.null_keys, "value": new.null_values},
    }
    return json.dumps(stats)


def added_file(path: str, add: Mapping[str, Any]) -> NewFile:
    """Returns the file of an add action; missing statistics become "anything".

    Raises `ValueError`, `KeyError`, `TypeError` or `AttributeError` for another shape.
    """
    stats = json.loads(add["stats"]) if add.get("stats") else {}
    least, most = stats.get("minValues", {}), stats.get("maxValues", {})
    nulls = stats.get("nullCount", {})
    rows, low, high = stats.get("numRecords"), least.get("offset"), most.get("offset")
    file = DataFile(
        path,
        int(add["partitionValues"][PARTITION_COLUMN]),
        0 if low is None else int(low),
        OFFSET_MAX if high is None else int(high),
        _ms(least.get("timestamp"), _ANY_TIME[0]),
        _ms(most.get("timestamp"), _ANY_TIME[1]),
        int(rows or 0),
        int(add["size"]),
        None not in (rows, low, high),
    )
    return NewFile(
        file,
        int(add["modificationTime"]),
        int(nulls.get("key") or 0),
        int(nulls.get("value") or 0),
        bool(add["dataChange"]),
    )


def _ms(text: str | None, default: int) -> int:
    if text is None:
        return default
    return (datetime.datetime.fromisoformat(text) - _EPOCH) // _MILLISECOND


def _iso(timestamp_ms: int) -> str:
    """Returns Delta's text of a timestamp.

    For a timestamp out of Delta's range it returns the nearest text with which readers do not skip
    a file that they need.
    """
    clamped = log_check.clamped_ms(timestamp_ms)
    moment = _EPOCH + datetime.timedelta(milliseconds=clamped)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{clamped % 1000:03d}Z"
