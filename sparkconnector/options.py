"""The options of a source `format("pk")` (sparkconnector/option_names sorts the names).

If several positions are given, one timestamp has precedence over timestamps by partition, and these
over offsets.  This is Kafka's order; one warning names the others.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from pk import errors, limits, settings
from pk.sparkconnector import packing
from pk.sparkconnector.option_names import (
    BOTH_NAMES,
    CONNECT_TIMEOUT_MS,
    SINK_NAMES,
    SOURCE_NAMES,
    OptionNames,
)

#: Kafka's special offsets in JSON.
EARLIEST = -2
LATEST = -1

PartitionOffsets = dict[str, dict[int, int]]

#: Options that say where a batch read ends.
BATCH_ONLY = (
    "endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp",
    "versionAsOf", "timestampAsOf", "pinned",
)  # fmt: skip

#: The source's columns, in order, with Spark's names and types; headers only with includeHeaders.
COLUMNS: dict[str, str] = {
    "key": "binary",
    "value": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "timestampType": "int",
    "headers": "array<struct<key:string,value:binary>>",
}

#: The other columns have a value in every row. Spark then checks none of them for null, which saves
#: a tenth of the JVM's time per row (docs/design/0004-spark-costs.md).
MAY_BE_NULL = frozenset({"key", "value", "headers"})


class Column(NamedTuple):
    """A column of a reader's schema; Spark compares nullability too."""

    name: str  #: as the query spells it
    nullable: bool


_DURATION = re.compile(r"\s*(\d+)\s*(us|ms|s|m|min|h|d)?\s*", re.IGNORECASE)
_DURATION_MS = {
    "us": 0.001,
    "ms": 1,
    "s": 1000,
    "m": 60_000,
    "min": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
}
_DEFAULT_TRIGGER_DELAY = "15m"


@dataclass(slots=True, frozen=True)
class OffsetRangeLimit:
    """Where a read begins or ends: `earliest`, `latest`, explicit `offsets`, or by timestamp.

    `times` maps topic → partition → ms; `time_ms` is one time for all partitions.  The position is
    the first record at or after the time.
    """

    kind: str  #: earliest | latest | offsets | times | time
    offsets: PartitionOffsets = field(default_factory=dict)
    times: PartitionOffsets = field(default_factory=dict)
    time_ms: int = 0


@dataclass(slots=True, frozen=True)
class AsOf:
    """The version of a topic's table that a batch reads: by number, by time, or by its end."""

    version: int = -1  #: its number; -1 = not given
    time_ms: int = -1  #: the newest version that is not later; -1 = not given
    pinned: bool = False  #: the first version that holds all records below endingOffsets


@dataclass(slots=True, frozen=True)
class Source:
    """The checked options of a source."""

    bootstrap: str
    topics: tuple[str, ...] = ()
    pattern: str | None = None
    assigned: dict[str, tuple[int, ...]] | None = None
    starting: OffsetRangeLimit = field(default_factory=lambda: OffsetRangeLimit("latest"))
    ending: OffsetRangeLimit = field(default_factory=lambda: OffsetRangeLimit("latest"))
    as_of: AsOf | None = None  #: None = the topic as it is now
    when_no_such_time: str = "error"  #: a strategy name: "error" or "latest"
    fail_on_data_loss: bool = True
    include_headers: bool = False
    columns: tuple[str, ...] = ()
    read_committed: bool = True
    min_partitions: int = 0
    max_records_per_partition: int = 0
    max_bytes_per_partition: int = 0
    pack_partitions: bool = True  #: one task of Spark may read several partitions
    open_cost_bytes: int = packing.OPEN_COST_BYTES  #: of each range, when ranges are packed
    max_offsets: int = 0
    min_offsets: int = 0
    max_bytes: int = 0
    max_trigger_delay_ms: int = 0
    columnar: bool = False  #: the jar is there: the JVM reads columns where the plan allows it
    connect_timeout_ms: int = CONNECT_TIMEOUT_MS
    group_id: str = ""  #: the group that shows the progress of a stream (S1); "" = none
    hold_retention: bool = False  #: what the stream has not processed is kept (S1)
    client: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def source(given: Mapping[str, str], *, streaming: bool) -> Source:
    """Return the options of a read.  Raises `InvalidOption`, `UnsupportedFeature`."""
    names = OptionNames(SOURCE_NAMES + BOTH_NAMES, SINK_NAMES, settings.CONSUMER)
    names.take(given)
    topics, pattern, assigned = _subscription(names)
    starting = _position(names, "starting", "latest" if streaming else "earliest")
    ending = OffsetRangeLimit("latest")
    if streaming:
        for name in BATCH_ONLY:
            if name in names.values:
                raise errors.InvalidOption(
                    f"{name} has no meaning for a stream, which does not end: drop it", option=name
                )
    else:
        if starting.kind == "latest":
            raise errors.InvalidOption(
                "startingOffsets latest would read nothing: a batch starts earlier"
            )
        _refuse(starting.offsets, LATEST, "startingOffsets", "-1 (latest)")
        ending = _ending(names)
        for name in (
            "maxOffsetsPerTrigger",
            "minOffsetsPerTrigger",
            "maxTriggerDelay",
            "maxBytesPerTrigger",
            "groupId",
            "holdRetention",
        ):
            if name in names.values:
                names.warnings.append(f"option {name} has no effect on a batch read and is ignored")
    if (
        streaming
        and "maxTriggerDelay" in names.values
        and "minOffsetsPerTrigger" not in names.values
    ):
        names.warnings.append("option maxTriggerDelay has no effect without minOffsetsPerTrigger")
    isolation = names.choice(
        "isolation.level", "read_committed", ("read_committed", "read_uncommitted")
    )
    read = Source(
        bootstrap=names.bootstrap(),
        topics=topics,
        pattern=pattern,
        assigned=assigned,
        starting=starting,
        ending=ending,
        as_of=None if streaming else _as_of(names, starting, ending),
        when_no_such_time=names.choice(
            "startingOffsetsByTimestampStrategy", "error", ("error", "latest")
        ),
        fail_on_data_loss=names.flag("failOnDataLoss", True),
        include_headers=names.flag("includeHeaders", False),
        columns=_columns(names),
        read_committed=isolation == "read_committed",
        **_tasks(names),
        columnar=names.columnar(),
        max_offsets=names.number("maxOffsetsPerTrigger"),
        min_offsets=names.number("minOffsetsPerTrigger"),
        max_bytes=names.number("maxBytesPerTrigger"),
        max_trigger_delay_ms=duration_ms(
            "maxTriggerDelay", names.values.get("maxTriggerDelay", _DEFAULT_TRIGGER_DELAY)
        ),
        connect_timeout_ms=names.number("connectTimeoutMs") or CONNECT_TIMEOUT_MS,
        group_id=_group_id(names) if streaming else "",
        hold_retention=_holds(names) if streaming else False,
        client=names.client,
        warnings=tuple(names.warnings),
    )
    _check_source(read, names)
    return read


def _as_of(names: OptionNames, starting: OffsetRangeLimit, ending: OffsetRangeLimit) -> AsOf | None:
    """Return which version of the tables a batch reads, None if the options name none."""
    pinned = names.flag("pinned", False)
    given: list[str] = [n for n in ("versionAsOf", "timestampAsOf") if n in names.values]
    given += ["pinned"] if pinned else []
    if not given:
        return None
    if len(given) > 1:
        raise errors.InvalidOption(
            f"{' and '.join(given)} both name a version of the table: give one of them",
            option=given[1],
        )
    for position, side in ((starting, "starting"), (ending, "ending")):
        if position.kind in ("time", "times"):
            raise errors.InvalidOption(
                f"{given[0]} and a position by time cannot be combined: give {side}Offsets",
                option=given[0],
            )
    if pinned:
        offsets = [offset for each in ending.offsets.values() for offset in each.values()]
        if ending.kind != "offsets" or LATEST in offsets:
            raise errors.InvalidOption(
                "pinned=true needs endingOffsets with an offset of each partition", option="pinned"
            )
        return AsOf(pinned=True)
    text = names.values[given[0]].strip()
    if given[0] == "timestampAsOf":
        return AsOf(time_ms=time_ms("timestampAsOf", text))
    if not re.fullmatch(r"\d{1,18}", text):
        raise errors.InvalidOption(
            f"versionAsOf is the number of a version of the table, not {text!r} "
            "(pk tier history TOPIC lists them)",
            option="versionAsOf",
        )
    return AsOf(version=int(text))


def time_ms(name: str, text: str) -> int:
    """Parse a time in ISO 8601 with its zone, or in milliseconds since 1970."""
    if re.fullmatch(r"\d{1,18}", text):
        return int(text)
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        raise errors.InvalidOption(
            f"{name} is a time with its zone, such as 2026-01-31T12:00:00Z, or milliseconds since "
            f"1970, not {text!r}",
            option=name,
        )
    return int(found.timestamp() * 1000)


def _tasks(names: OptionNames) -> dict[str, Any]:
    """Return the options that say what one task reads."""
    return {
        "min_partitions": names.number("minPartitions"),
        "max_records_per_partition": names.number("maxRecordsPerPartition"),
        "max_bytes_per_partition": names.number("maxBytesPerPartition"),
        "pack_partitions": names.flag("packPartitions", True),
        "open_cost_bytes": names.number("openCostBytes") or packing.OPEN_COST_BYTES,
    }


def _group_id(names: OptionNames) -> str:
    """Return the group that shows the progress of a stream."""
    if "groupId" not in names.values:
        return ""
    group_id = names.values["groupId"].strip()
    size = len(group_id.encode())
    if not 0 < size <= limits.GROUP_ID_BYTES_MAX:
        raise errors.InvalidOption(
            f"groupId has 1 to {limits.GROUP_ID_BYTES_MAX} bytes of UTF-8, not {size}",
            option="groupId",
        )
    return group_id


def _holds(names: OptionNames) -> bool:
    """Return whether the stream holds retention at its position."""
    holds = names.flag("holdRetention", False)
    if holds and "groupId" not in names.values:
        raise errors.InvalidOption(
            "holdRetention needs groupId: the coordinator of the group keeps the position",
            option="holdRetention",
        )
    return holds


def _ending(names: OptionNames) -> OffsetRangeLimit:
    """Return where a batch read ends."""
    ending = _position(names, "ending", "latest")
    if ending.kind == "earliest":
        raise errors.InvalidOption("endingOffsets earliest would read nothing: a batch ends later")
    _refuse(ending.offsets, EARLIEST, "endingOffsets", "-2 (earliest)")
    return ending


def _check_source(read: Source, names: OptionNames) -> None:
    if read.max_offsets and read.min_offsets > read.max_offsets:
        raise errors.InvalidOption("minOffsetsPerTrigger may not exceed maxOffsetsPerTrigger")
    starts, ends = read.starting.offsets, read.ending.offsets
    for topic in sorted(starts.keys() & ends.keys()):
        for partition in sorted(starts[topic].keys() & ends[topic].keys()):
            start, end = starts[topic][partition], ends[topic][partition]
            if 0 <= end < start:
                raise errors.InvalidOption(
                    f"startingOffsets {start} is behind endingOffsets {end}: {topic}-{partition}"
                )
    if (
        read.columns
        and "headers" in read.columns
        and "includeHeaders" in names.values
        and not read.include_headers
    ):
        raise errors.InvalidOption("columns names headers, includeHeaders is false")


def _subscription(
    names: OptionNames,
) -> tuple[tuple[str, ...], str | None, dict[str, tuple[int, ...]] | None]:
    given = [name for name in ("subscribe", "subscribePattern", "assign") if name in names.values]
    if len(given) != 1:
        found = " and ".join(given) if given else "none"
        raise errors.InvalidOption(
            f"give exactly one of subscribe, subscribePattern, assign; found {found}"
        )
    text = names.values[given[0]]
    if given[0] == "subscribe":
        topics = tuple(sorted({topic.strip() for topic in text.split(",") if topic.strip()}))
        if not topics:
            raise errors.InvalidOption("subscribe names no topic", option="subscribe")
        return topics, None, None
    if given[0] == "subscribePattern":
        try:
            re.compile(text)
        except re.error as cause:
            raise errors.InvalidOption(
                f"subscribePattern {text!r} is no regular expression: {cause}"
            ) from cause
        if not text.strip():
            raise errors.InvalidOption("subscribePattern is empty", option="subscribePattern")
        return (), text.strip(), None
    assigned = _json(text, "assign", lambda value: isinstance(value, list), "[partitions]")
    try:
        return (
            (),
            None,
            {
                topic: tuple(sorted({_partition(p) for p in listed}))
                for topic, listed in sorted(assigned.items())
            },
        )
    except ValueError:
        raise errors.InvalidOption(
            f'assign takes JSON like {{"flights":[0,1]}}, not {text!r}'
        ) from None


def _json(text: str, name: str, fits: Callable[[Any], bool], what: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if (
        not isinstance(parsed, dict)
        or not parsed
        or not all(fits(value) for value in parsed.values())
    ):
        raise errors.InvalidOption(
            f"{name} takes a JSON object {{topic: {what}}}, not {text!r}", option=name
        )
    return parsed


def _partition(value: Any) -> int:
    number = int(value)
    if number < 0 or isinstance(value, (bool, float)):
        raise ValueError(value)
    return number


def _position(names: OptionNames, side: str, default: str) -> OffsetRangeLimit:
    """Return the position by Kafka's precedence: one time, times by partition, offsets.

    Warns about each given option that another one overrides.
    """
    ordered = [f"{side}Timestamp", f"{side}OffsetsByTimestamp", f"{side}Offsets"]
    given = [name for name in ordered if name in names.values]
    for loser in given[1:]:
        names.warnings.append(f"option {loser} is ignored: {given[0]} wins over it")
    if not given:
        return OffsetRangeLimit(default)
    name, text = given[0], names.values[given[0]].strip()
    if name == ordered[0]:
        if not re.fullmatch(r"\d+", text):
            raise errors.InvalidOption(
                f"{name} is milliseconds since 1970, not {text!r}", option=name
            )
        return OffsetRangeLimit("time", time_ms=int(text))
    if name == ordered[1]:
        return OffsetRangeLimit("times", times=_by_partition(text, name, "milliseconds", least=0))
    if text.lower() in ("earliest", "latest"):
        return OffsetRangeLimit(text.lower())
    return OffsetRangeLimit("offsets", offsets=_by_partition(text, name, "offset", least=EARLIEST))


def _by_partition(text: str, name: str, what: str, least: int) -> PartitionOffsets:
    parsed = _json(
        text, name, lambda value: isinstance(value, dict) and bool(value), f"{{partition: {what}}}"
    )
    found: PartitionOffsets = {}
    for topic in sorted(parsed):
        for partition, value in parsed[topic].items():
            if (
                not isinstance(value, int)
                or isinstance(value, bool)
                or value < least
                or not partition.isdigit()
            ):
                raise errors.InvalidOption(
                    f"{name}: {topic}-{partition} is {value!r}; expected: {what} >= {least}",
                    option=name,
                )
            found.setdefault(topic, {})[int(partition)] = value
    return found


def _refuse(offsets: PartitionOffsets, special: int, name: str, words: str) -> None:
    for topic, partitions in offsets.items():
        for partition, offset in partitions.items():
            if offset == special:
                raise errors.InvalidOption(
                    f"{name}: {topic}-{partition} is {words}; a batch then reads nothing"
                )


def _columns(names: OptionNames) -> tuple[str, ...]:
    text = names.values.get("columns")
    if text is None:
        return ()
    by_key = {name.lower(): name for name in COLUMNS}
    chosen: list[str] = []
    for part in text.split(","):
        key = part.strip().lower()
        if key not in by_key:
            near = difflib.get_close_matches(key, by_key, n=1)
            hint = (
                f"; did you mean {by_key[near[0]]}?"
                if near
                else f"; there are {', '.join(COLUMNS)}"
            )
            raise errors.InvalidOption(
                f"columns: unknown column {part.strip()!r}{hint}", option="columns"
            )
        if by_key[key] in chosen:
            raise errors.InvalidOption(f"columns names {by_key[key]} twice", option="columns")
        chosen.append(by_key[key])
    return tuple(chosen)


def duration_ms(name: str, text: str) -> int:
    """Parse Spark's time strings (`15m`, `30s`, `500ms`) to ms; a bare number is milliseconds."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise errors.InvalidOption(
            f"{name} is a duration like 30s or 15m, not {text!r}", option=name
        )
    return int(int(found[1]) * _DURATION_MS[(found[2] or "ms").lower()])


def column_names(read: Source) -> tuple[str, ...]:
    """Return the columns of a read whose query gives no schema."""
    if read.columns:
        return read.columns
    return tuple(name for name in COLUMNS if name != "headers" or read.include_headers)


def ddl(names: tuple[str, ...]) -> str:
    """Return the columns `names` as a schema string (DDL) for Spark."""
    never = {one.name for one in columns_of(names) if not one.nullable}
    return ", ".join(
        f"{name} {COLUMNS[name]}{' NOT NULL' if name in never else ''}" for name in names
    )


def columns_of(names: Sequence[str]) -> tuple[Column, ...]:
    """Return the columns of the schema that `ddl` returns."""
    return tuple(Column(name, name.lower() in MAY_BE_NULL) for name in names)
