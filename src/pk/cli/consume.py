"""`pk consume TOPIC`: print records, as they come or up to --max.

With --group, the command is a member of a consumer group.  It commits what it has printed, and
nothing that waits in a buffer: records are flushed to stdout before their offsets are committed.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pk import errors
from pk.cli.common import DEFAULT_BOOTSTRAP, AsJson, BootstrapOption, opened, quiet_end
from pk.clock import monotonic_s
from pk.types import Record, TopicPartition

if TYPE_CHECKING:
    from pk.client.consumer import Consumer

app = typer.Typer(add_completion=False)

_POLL_S = 0.5
#: The group has given the partitions to other members; the next poll joins again.
_REMOVED = (
    errors.UnknownMemberId,
    errors.IllegalGeneration,
    errors.RebalanceInProgress,
    errors.NotPartitionOwner,
)


@app.command(help=__doc__.partition("\n")[0])
def consume(
    topic: Annotated[str, typer.Argument(help="topic name", metavar="TOPIC")],
    from_beginning: Annotated[
        bool,
        typer.Option("--from-beginning", help="start at the first record, not behind the last"),
    ] = False,
    max_records: Annotated[
        int | None, typer.Option("--max", min=1, help="stop after so many records")
    ] = None,
    partition: Annotated[int | None, typer.Option(min=0, help="read only this partition")] = None,
    offset: Annotated[
        int | None, typer.Option(min=0, help="start there (needs --partition)")
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(help="read as a member of this group, and commit what was printed"),
    ] = None,
    isolation: Annotated[
        str, typer.Option(help="read_committed or read_uncommitted")
    ] = "read_committed",
    timeout_ms: Annotated[
        int | None,
        typer.Option(
            "--timeout-ms",
            min=1,
            help="stop when nothing came, or nobody answered, for so long; default: never",
        ),
    ] = None,
    print_key: Annotated[
        bool, typer.Option("--print-key", help="the key before the value")
    ] = False,
    print_headers: Annotated[
        bool, typer.Option("--print-headers", help="headers as name=value,…")
    ] = False,
    print_offset: Annotated[
        bool, typer.Option("--print-offset", help="partition and offset")
    ] = False,
    print_timestamp: Annotated[
        bool, typer.Option("--print-timestamp", help="milliseconds since 1970")
    ] = False,
    separator: Annotated[str, typer.Option(help="between the printed fields")] = "\t",
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    as_json: AsJson = False,
) -> None:
    """Print the records of a topic; Ctrl-C ends it."""
    from pk.client.consumer import Consumer

    if offset is not None and partition is None:
        raise errors.InvalidOption("--offset needs --partition", option="offset")
    if offset is not None and from_beginning:
        raise errors.InvalidOption("--offset and --from-beginning contradict each other")
    if group is not None and partition is not None:
        raise errors.InvalidOption("--group shares all partitions: it takes no --partition")
    shown = _Formatter(print_key, print_headers, print_offset, print_timestamp, separator.encode())
    line: Callable[[Record], bytes] = _json if as_json else shown.of
    seconds = None if timeout_ms is None else timeout_ms / 1000
    left = max_records if max_records is not None else sys.maxsize
    options: dict[str, Any] = {
        "isolation_level": isolation,
        "auto_offset_reset": "earliest" if from_beginning else "latest",
        "max_poll_records": min(10_000, left),
    }
    if group is not None:
        options |= {"group_id": group, "enable_auto_commit": False}
    with quiet_end(), opened(Consumer(bootstrap, **options), bootstrap) as consumer:
        _choose(consumer, topic, partition, offset, seconds)
        _print(consumer, line, left, seconds, commits=group is not None)


def _print(
    consumer: Consumer,
    line: Callable[[Record], bytes],
    left: int,
    seconds: float | None,
    *,
    commits: bool,
) -> None:
    """Print at most `left` records; end when nothing came for `seconds`."""
    out = sys.stdout.buffer
    last = monotonic_s()
    while left:
        polled = consumer.poll(min(_POLL_S, seconds or _POLL_S))
        records = polled[:left]
        for record in records:
            out.write(line(record) + b"\n")
        out.flush()
        left -= len(records)
        now = monotonic_s()
        if commits and records:
            _commit(consumer, records, whole=len(records) == len(polled))
        if records:
            last = now
        elif seconds is not None and now - last >= seconds:
            break


def _commit(consumer: Consumer, records: Sequence[Record], *, whole: bool) -> None:
    """Commit behind the printed records of a poll; whole: all of them were printed."""
    offsets = None
    if not whole:
        offsets = {TopicPartition(each.topic, each.partition): each.offset + 1 for each in records}
    try:
        consumer.commit(offsets)
    except _REMOVED as refusal:
        typer.echo(f"not committed, so other members print it again: {refusal.message}", err=True)


def _choose(
    consumer: Consumer, topic: str, partition: int | None, offset: int | None, seconds: float | None
) -> None:
    places = consumer.partitions_for(topic, timeout_s=seconds)  # fails at once for an unknown topic
    if partition is None:
        consumer.subscribe([topic])
        return
    place = TopicPartition(topic, partition)
    if place not in places:
        raise errors.UnknownTopicOrPartition(
            f"{topic} has no partition {partition}: there are {len(places)}"
        )
    consumer.assign([place])
    if offset is not None:
        consumer.seek(place, offset)


class _Formatter:
    """Formats a record as a line of bytes; keys and values are printed as they were stored."""

    def __init__(
        self, key: bool, headers: bool, offset: bool, timestamp: bool, separator: bytes
    ) -> None:
        self._key, self._headers, self._offset, self._timestamp = key, headers, offset, timestamp
        self._separator = separator

    def of(self, record: Record) -> bytes:
        fields: list[bytes] = []
        if self._timestamp:
            fields.append(b"%d" % record.timestamp_ms)
        if self._offset:
            fields.append(b"%d:%d" % (record.partition, record.offset))
        if self._headers:
            pairs = [name.encode() + b"=" + _shown(value) for name, value in record.headers]
            fields.append(b",".join(pairs))
        if self._key:
            fields.append(_shown(record.key))
        fields.append(_shown(record.value))
        return self._separator.join(fields)


def _shown(data: bytes | None) -> bytes:
    return b"null" if data is None else data


def _json(record: Record) -> bytes:
    """Return a record as a JSON object; bytes that are not utf-8 are in `<name>_base64`."""
    found: dict[str, Any] = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp_ms": record.timestamp_ms,
        **_field("key", record.key),
        **_field("value", record.value),
        "headers": [{"name": name, **_field("value", value)} for name, value in record.headers],
    }
    return json.dumps(found, ensure_ascii=False).encode()


def _field(name: str, data: bytes | None) -> dict[str, Any]:
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}
