"""The options of `format("pk")`: those of Spark's Kafka connector, under the same names (rule S2).

Spark passes every key in lower case, so names are compared in lower case and shown as the docs
spell them.  `kafka.X` means `pk.X`.  Each given name falls into one class:

  known        parsed and checked here; contradictions are refused
  client's     `pk.` + a setting of pk's Consumer (source) or Producer (sink), dotted names too
  meaningless  valid for Kafka's connector or clients, without effect in pk: one warning each
  other side   a source's option given to a sink or the other way round: one warning each
  security     refused: pk has no security yet and must not ignore such an option silently
  Spark's own  ignored
  unknown      refused, with the nearest valid name

If several of them are given, one timestamp has precedence over timestamps by partition, and these
over offsets.  This is Kafka's order; one warning names the others.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pk import errors, settings

#: Kafka's special offsets in JSON.
EARLIEST = -2
LATEST = -1

PartitionOffsets = dict[str, dict[int, int]]

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


SOURCE_NAMES = (
    "subscribe", "subscribePattern", "assign", "startingOffsets", "startingTimestamp",
    "startingOffsetsByTimestamp", "startingOffsetsByTimestampStrategy", "endingOffsets",
    "endingTimestamp", "endingOffsetsByTimestamp", "failOnDataLoss", "minPartitions",
    "maxRecordsPerPartition", "maxBytesPerPartition", "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger", "maxTriggerDelay", "maxBytesPerTrigger", "columns",
)  # fmt: skip
SINK_NAMES = ("topic", "truncateTopic")
BOTH_NAMES = ("includeHeaders", "connectTimeoutMs")
CLIENT_NAMES = ("bootstrap.servers", "isolation.level")

#: Accepted with one warning each: Kafka has these options, in pk they have no effect.
MEANINGLESS = frozenset(
    name.lower()
    for name in (
        "kafkaConsumer.pollTimeoutMs", "fetchOffset.numRetries", "fetchOffset.retryIntervalMs",
        "groupIdPrefix", "useDeprecatedOffsetFetching", "pk.group.id", "pk.group.instance.id",
        "pk.key.deserializer", "pk.value.deserializer", "pk.key.serializer",
        "pk.value.serializer", "pk.auto.offset.reset", "pk.enable.auto.commit",
        "pk.auto.commit.interval.ms", "pk.interceptor.classes", "pk.max.poll.records",
        "pk.max.poll.interval.ms", "pk.session.timeout.ms", "pk.heartbeat.interval.ms",
        "pk.partition.assignment.strategy", "pk.allow.auto.create.topics",
        "pk.exclude.internal.topics", "pk.client.dns.lookup", "pk.client.rack",
        "pk.connections.max.idle.ms", "pk.receive.buffer.bytes", "pk.send.buffer.bytes",
        "pk.reconnect.backoff.ms", "pk.reconnect.backoff.max.ms",
        "pk.socket.connection.setup.timeout.ms", "pk.socket.connection.setup.timeout.max.ms",
        "pk.metric.reporters", "pk.metrics.num.samples", "pk.metrics.recording.level",
        "pk.metrics.sample.window.ms", "pk.metadata.max.age.ms", "pk.metadata.max.idle.ms",
        "pk.partitioner.class", "pk.partitioner.ignore.keys",
        "pk.partitioner.adaptive.partitioning.enable", "pk.partitioner.availability.timeout.ms",
        "pk.retries", "pk.auto.include.jmx.reporter", "pk.enable.metrics.push",
        "pk.group.protocol", "pk.group.remote.assignor",
    )
)  # fmt: skip
_SECURITY = ("pk.security.", "pk.ssl.", "pk.sasl.", "pk.delegation.")
#: Options that Spark itself adds or reads.
_SPARKS_OWN = frozenset(
    (
        "path", "paths", "checkpointlocation", "queryname", "outputmode", "mode", "format",
        "mergeschema", "overwriteschema", "timezone", "serialization.format", "provider",
        "location", "owner",
)
)  # fmt: skip
#: Client settings that Kafka names differently.
_RENAMED = {
    "compression_type": "compression",
    "max_in_flight_requests_per_connection": "max_in_flight",
}
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
#: How long a process tries to reach the first broker; later calls have pk's own time-outs.
CONNECT_TIMEOUT_MS = 10_000


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
class Source:
    """The checked options of a source."""

    bootstrap: str
    topics: tuple[str, ...] = ()
    pattern: str | None = None
    assigned: dict[str, tuple[int, ...]] | None = None
    starting: OffsetRangeLimit = field(default_factory=lambda: OffsetRangeLimit("latest"))
    ending: OffsetRangeLimit = field(default_factory=lambda: OffsetRangeLimit("latest"))
    when_no_such_time: str = "error"  #: a strategy name: "error" or "latest"
    fail_on_data_loss: bool = True
    include_headers: bool = False
    columns: tuple[str, ...] = ()
    read_committed: bool = True
    min_partitions: int = 0
    max_records_per_partition: int = 0
    max_bytes_per_partition: int = 0
    max_offsets: int = 0
    min_offsets: int = 0
    max_bytes: int = 0
    max_trigger_delay_ms: int = 0
    connect_timeout_ms: int = CONNECT_TIMEOUT_MS
    client: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(slots=True, frozen=True)
class SinkOptions:
    """The checked options of a sink."""

    bootstrap: str
    topic: str | None = None
    client: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    truncate: bool = False  #: mode overwrite may delete the topic's older records
    connect_timeout_ms: int = CONNECT_TIMEOUT_MS


# -- sorting names --------------------------------------------------------------------------------


class _Names:
    """Sorts the given names into classes; collects the warnings and the client settings."""

    def __init__(
        self, known: tuple[str, ...], other_side: tuple[str, ...], client: settings.Options
    ) -> None:
        self._known = {name.lower(): name for name in known}
        self._other = {name.lower(): name for name in other_side}
        self._client_options = client
        self.values: dict[str, str] = {}
        self.client: dict[str, Any] = {}
        self.warnings: list[str] = []

    def take(self, given: Mapping[str, str]) -> None:
        seen: dict[str, tuple[str, str]] = {}
        for name, value in sorted(given.items()):
            key = name.strip().lower()
            if key in _SPARKS_OWN or key.startswith("__"):
                continue
            key = "pk." + key[len("kafka.") :] if key.startswith("kafka.") else key
            key = "pk.isolation.level" if key == "isolation.level" else key
            before = seen.get(key)
            if before is not None and before[1] != str(value):
                raise errors.InvalidOption(
                    f"{before[0]} and {name} are the same option, with two values", option=name
                )
            if before is None:
                seen[key] = (name, str(value))
                self._place(key, name, str(value))

    def _place(self, key: str, name: str, value: str) -> None:
        if key in self._known:
            self.values[self._known[key]] = value
        elif key.startswith("pk.") and key[3:] in CLIENT_NAMES:
            self.values[key[3:]] = value
        elif key.startswith(_SECURITY):
            raise errors.UnsupportedFeature(
                f"{name}: pk has no security yet, and could not do what this option asks for",
                option=name,
            )
        elif key in MEANINGLESS:
            self.warnings.append(f"option {name} has no meaning for pk and is ignored")
        elif key in self._other:
            self.warnings.append(
                f"option {name} has no effect on this side of the connector and is ignored"
            )
        elif key.startswith("pk."):
            self._client(key, name, value)
        else:
            raise errors.InvalidOption(f"unknown option {name!r}{self._nearest(key)}", option=name)

    def _client(self, key: str, name: str, value: str) -> None:
        setting = key[3:].replace(".", "_").replace("-", "_")
        setting = _RENAMED.get(setting, setting)
        option = self._client_options.by_name.get(setting)
        if option is None:
            for other in (settings.CONSUMER, settings.PRODUCER):
                if setting in other.by_name:
                    self.warnings.append(
                        f"option {name} has no effect on this side of the connector and is ignored"
                    )
                    return
            raise errors.InvalidOption(f"unknown option {name!r}{self._nearest(key)}", option=name)
        try:
            self.client[setting] = option.parse(value)
        except errors.InvalidConfig as cause:
            raise errors.InvalidOption(f"option {name}: {cause.message}", option=name) from cause

    def _nearest(self, key: str) -> str:
        right = [*self._known.values(), *(f"pk.{name}" for name in CLIENT_NAMES)]
        right += [f"pk.{name.replace('_', '.')}" for name in self._client_options.by_name]
        by_key = {name.lower(): name for name in right}
        near = difflib.get_close_matches(key, by_key, n=1) or difflib.get_close_matches(
            f"pk.{key}", by_key, n=1
        )
        return f"; did you mean {by_key[near[0]]}?" if near else ""

    # -- values ------------------------------------------------------------------------------------

    def bootstrap(self) -> str:
        text = ",".join(
            part.strip()
            for part in self.values.get("bootstrap.servers", "").split(",")
            if part.strip()
        )
        if not text:
            raise errors.InvalidOption("pk.bootstrap.servers must be given: HOST:PORT of a broker")
        return text

    def flag(self, name: str, default: bool) -> bool:
        text = self.values.get(name, str(default)).strip().lower()
        if text not in ("true", "false"):
            raise errors.InvalidOption(
                f"{name} is true or false, not {self.values[name]!r}", option=name
            )
        return text == "true"

    def number(self, name: str) -> int:
        """Return the option as a positive whole number; 0 = not given."""
        text = self.values.get(name)
        if text is None:
            return 0
        try:
            number = int(text.strip())
        except ValueError:
            number = 0
        if number <= 0:
            raise errors.InvalidOption(
                f"{name} is a whole number greater than 0, not {text!r}", option=name
            )
        return number

    def choice(self, name: str, default: str, choices: tuple[str, ...]) -> str:
        text = self.values.get(name, default).strip().lower()
        if text not in choices:
            raise errors.InvalidOption(
                f"{name} is one of {', '.join(choices)}, not {text!r}", option=name
            )
        return text


# -- the two sides --------------------------------------------------------------------------------


def source(given: Mapping[str, str], *, streaming: bool) -> Source:
    """Return the options of a read.  Raises `InvalidOption`, `UnsupportedFeature`."""
    names = _Names(SOURCE_NAMES + BOTH_NAMES, SINK_NAMES, settings.CONSUMER)
    names.take(given)
    topics, pattern, assigned = _subscription(names)
    starting = _position(names, "starting", "latest" if streaming else "earliest")
    ending = OffsetRangeLimit("latest")
    if streaming:
        for name in ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"):
            if name in names.values:
                raise errors.InvalidOption(
                    f"{name} has no meaning for a stream, which does not end", option=name
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
        when_no_such_time=names.choice(
            "startingOffsetsByTimestampStrategy", "error", ("error", "latest")
        ),
        fail_on_data_loss=names.flag("failOnDataLoss", True),
        include_headers=names.flag("includeHeaders", False),
        columns=_columns(names),
        read_committed=isolation == "read_committed",
        min_partitions=names.number("minPartitions"),
        max_records_per_partition=names.number("maxRecordsPerPartition"),
        max_bytes_per_partition=names.number("maxBytesPerPartition"),
        max_offsets=names.number("maxOffsetsPerTrigger"),
        min_offsets=names.number("minOffsetsPerTrigger"),
        max_bytes=names.number("maxBytesPerTrigger"),
        max_trigger_delay_ms=duration_ms(
            "maxTriggerDelay", names.values.get("maxTriggerDelay", _DEFAULT_TRIGGER_DELAY)
        ),
        connect_timeout_ms=names.number("connectTimeoutMs") or CONNECT_TIMEOUT_MS,
        client=names.client,
        warnings=tuple(names.warnings),
    )
    _check_source(read, names)
    return read


def _ending(names: _Names) -> OffsetRangeLimit:
    """Return where a batch read ends."""
    ending = _position(names, "ending", "latest")
    if ending.kind == "earliest":
        raise errors.InvalidOption("endingOffsets earliest would read nothing: a batch ends later")
    _refuse(ending.offsets, EARLIEST, "endingOffsets", "-2 (earliest)")
    return ending


def sink(given: Mapping[str, str]) -> SinkOptions:
    """Return the options of a write.  Raises `InvalidOption`, `UnsupportedFeature`."""
    names = _Names(SINK_NAMES + BOTH_NAMES, SOURCE_NAMES, settings.PRODUCER)
    names.take(given)
    if "isolation.level" in names.values:
        names.warnings.append("option isolation.level has no effect on a sink and is ignored")
    names.flag(
        "includeHeaders", False
    )  # a headers column is written if the DataFrame has one, as in Kafka's connector
    for setting, needed in (("enable_idempotence", True), ("acks", "all")):
        if names.client.get(setting, needed) not in (needed, "-1"):
            raise errors.InvalidOption(
                f"pk.{setting.replace('_', '.')} of a sink is {needed}: it reports what was stored",
                option=setting,
            )
        names.client.pop(setting, None)
    if names.client.pop("transactional_id", ""):
        raise errors.UnsupportedFeature("pk.transactional.id: this build has no transactions")
    topic = names.values.get("topic", "").strip() or None
    return SinkOptions(
        names.bootstrap(),
        topic,
        names.client,
        tuple(names.warnings),
        names.flag("truncateTopic", False),
        names.number("connectTimeoutMs") or CONNECT_TIMEOUT_MS,
    )


def _check_source(read: Source, names: _Names) -> None:
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
    names: _Names,
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


def _position(names: _Names, side: str, default: str) -> OffsetRangeLimit:
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


def _columns(names: _Names) -> tuple[str, ...]:
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
