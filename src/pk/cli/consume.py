"""`pk consume TOPIC…`: print records, as they come or up to --max.

With --group, the command is a member of a consumer group.  It commits what it has printed, and
nothing that waits in a buffer: records are flushed to stdout before their offsets are committed.

--from, --to and --tail name positions (cli/positions), which are resolved once at the start, for
the partitions that exist then (cli/consumed_topics).

With --json, stdout holds records only.  A failure is a line on stderr, as without it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from pk import errors
from pk.cli import consumed_topics, positions, record_text
from pk.cli.common import DEFAULT_BOOTSTRAP, AsJson, BootstrapOption, duration, opened, quiet_end
from pk.cli.consumed_topics import ReadBounds
from pk.clock import monotonic_s, wall_ms
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


Topics = Annotated[list[str] | None, typer.Argument(help="topic names", metavar="[TOPIC]…")]
Include = Annotated[
    str | None,
    typer.Option(
        "--include",
        metavar="REGEX",
        help="instead of names: all topics whose whole name matches, later ones too",
    ),
]
FromBeginning = Annotated[
    bool,
    typer.Option("--from-beginning", help="start at the first record, not behind the last"),
]
From = Annotated[str | None, typer.Option("--from", help=f"start there: {positions.EXAMPLES}")]
To = Annotated[str | None, typer.Option("--to", help="stop before this position; `end`: as of now")]
Tail = Annotated[
    int | None,
    typer.Option(min=1, help="the last so many offsets of each partition, then stop"),
]
Follow = Annotated[bool, typer.Option("--follow", help="with --tail: go on")]
Max = Annotated[int | None, typer.Option("--max", min=1, help="stop after so many printed records")]
Partition = Annotated[int | None, typer.Option(min=0, help="read only this partition of the topic")]
Offset = Annotated[int | None, typer.Option(min=0, help="start there (needs --partition)")]
Grep = Annotated[
    str | None,
    typer.Option(help="print only records whose key or value matches this regular expression"),
]
Group = Annotated[
    str | None,
    typer.Option(help="read as a member of this group, and commit what was printed"),
]
Isolation = Annotated[str, typer.Option(help="read_committed or read_uncommitted")]
SilenceMs = Annotated[
    int | None,
    typer.Option(
        "--timeout-ms",
        parser=duration(1),
        metavar="DURATION",
        help="stop when nothing came, or nobody answered, for so long; default: never",
    ),
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        help=r"as kcat: '%t %p %o %k %v\n'; %T ms, %d date, %h headers, %K and %S lengths",
    ),
]
PrintTopic = Annotated[bool, typer.Option("--print-topic", help="the topic, first")]
PrintKey = Annotated[bool, typer.Option("--print-key", help="the key before the value")]
PrintHeaders = Annotated[bool, typer.Option("--print-headers", help="headers as name=value,…")]
PrintOffset = Annotated[bool, typer.Option("--print-offset", help="partition and offset")]
PrintTimestamp = Annotated[bool, typer.Option("--print-timestamp", help="milliseconds since 1970")]
Separator = Annotated[
    str, typer.Option(help="between the printed fields", show_default=r"a tab, \t")
]


@app.command()
def consume(
    topics: Topics = None,
    include: Include = None,
    from_beginning: FromBeginning = False,
    begin: From = None,
    end: To = None,
    tail: Tail = None,
    follow: Follow = False,
    max_records: Max = None,
    partition: Partition = None,
    offset: Offset = None,
    grep: Grep = None,
    group: Group = None,
    isolation: Isolation = "read_committed",
    timeout_ms: SilenceMs = None,
    format_: Format = None,
    print_topic: PrintTopic = False,
    print_key: PrintKey = False,
    print_headers: PrintHeaders = False,
    print_offset: PrintOffset = False,
    print_timestamp: PrintTimestamp = False,
    separator: Separator = "\t",
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    as_json: AsJson = False,
) -> None:
    """Print the records of topics; Ctrl-C ends it.

    Examples: pk consume flights --tail 10 --print-key

              pk consume flights --from 1h --to end --grep JFK --json

              pk consume --include 'orders-.*' --print-topic
    """
    from pk.client.consumer import Consumer

    choice = consumed_topics.choice(topics or (), include, partition)
    bounds = _bounds(begin, end, tail, offset, follow=follow, from_beginning=from_beginning)
    if offset is not None and partition is None:
        raise errors.InvalidOption("--offset needs --partition", option="offset")
    if group is not None:
        _check_group(partition, bounds)
    fields = _Fields(print_topic, print_key, print_headers, print_offset, print_timestamp)
    line = _line(fields, separator, format_, as_json=as_json)
    printer = _Printer(
        line,
        None if grep is None else _pattern(grep),
        max_records if max_records is not None else sys.maxsize,
        None if timeout_ms is None else timeout_ms / 1000,
        commits=group is not None,
    )
    options: dict[str, Any] = {
        "isolation_level": isolation,
        "auto_offset_reset": "earliest" if from_beginning else "latest",
        "max_poll_records": min(10_000, printer.left),
    }
    if group is not None:
        options |= {"group_id": group, "enable_auto_commit": False}
    with quiet_end(), opened(Consumer(bootstrap, **options), bootstrap) as consumer:
        stops = consumed_topics.begin(consumer, bootstrap, choice, bounds, printer.seconds)
        printer.print(consumer, stops)


def _at_most_one(**given: object) -> None:
    names = [f"--{name.rstrip('_').replace('_', '-')}" for name, value in given.items() if value]
    if len(names) > 1:
        raise errors.InvalidOption(f"{' and '.join(names)} contradict each other: give one")


def _check_group(partition: int | None, bounds: ReadBounds) -> None:
    if partition is not None:
        raise errors.InvalidOption("--group shares all partitions: it takes no --partition")
    if bounds != ReadBounds():
        raise errors.InvalidOption(
            "--group goes on where the group was: it takes no --from, --to and --tail "
            "(pk groups reset-offsets moves it)"
        )


class _Fields(NamedTuple):
    """Which fields are printed before the value."""

    topic: bool
    key: bool
    headers: bool
    offset: bool
    timestamp: bool


def _line(
    fields: _Fields, separator: str, format_: str | None, *, as_json: bool
) -> Callable[[Record], bytes]:
    """Return what prints a record: JSON, the caller's format, or fields with a separator."""
    _at_most_one(json=as_json, format_=format_ is not None, print_options=any(fields))
    if as_json:
        return record_text.json_line
    if format_ is not None:
        return record_text.format_of(format_)
    return _Formatter(fields, record_text.unescaped(separator)).of


def _pattern(text: str) -> re.Pattern[bytes]:
    try:
        return re.compile(text.encode())
    except re.error as cause:
        raise errors.InvalidOption(f"--grep {text!r}: {cause}", option="grep") from None


def _bounds(
    begin: str | None,
    end: str | None,
    tail: int | None,
    offset: int | None,
    *,
    follow: bool,
    from_beginning: bool,
) -> ReadBounds:
    """Return the bounds of the command's options.  Raises `InvalidOption`."""
    _at_most_one(from_beginning=from_beginning, from_=begin, tail=tail, offset=offset is not None)
    if follow and tail is None:
        raise errors.InvalidOption("--follow goes with --tail; without it, consume goes on anyway")
    _at_most_one(follow=follow, to=end)
    now_ms = wall_ms()
    first = None if begin is None else positions.parse(begin, "--from", now_ms)
    last = None if end is None else positions.parse(end, "--to", now_ms)
    if tail is not None:
        first = positions.TopicPosition(positions.END, tail)
        if last is None and not follow:
            last = positions.TopicPosition(positions.END)
    if offset is not None:
        first = positions.TopicPosition(positions.OFFSET, offset)
    return ReadBounds(first, last)


class _Printer:
    """Prints the records of a consumer until it shall stop."""

    def __init__(
        self,
        line: Callable[[Record], bytes],
        pattern: re.Pattern[bytes] | None,
        left: int,
        seconds: float | None,
        *,
        commits: bool,
    ) -> None:
        self._line, self._pattern, self._commits = line, pattern, commits
        self.left = left  #: how many records may still be printed
        self.seconds = seconds  #: stop when nothing came for so long

    def print(self, consumer: Consumer, stops: Mapping[TopicPartition, int]) -> None:
        """Print up to `stops`, the offsets before which partitions end; all others never end."""
        out = sys.stdout.buffer
        unfinished = dict(stops)
        last = monotonic_s()
        while self.left:
            if stops and not self._open(consumer, unfinished):
                break
            polled = consumer.poll(min(_POLL_S, self.seconds or _POLL_S))
            passed = 0
            for record in polled:
                passed += 1
                if self._wanted(record, stops):
                    out.write(self._line(record))
                    self.left -= 1
                    if not self.left:
                        break
            out.flush()
            now = monotonic_s()
            if self._commits and passed:
                _commit(consumer, polled[:passed], whole=passed == len(polled))
            if polled:
                last = now
            elif self.seconds is not None and now - last >= self.seconds:
                break

    def _wanted(self, record: Record, stops: Mapping[TopicPartition, int]) -> bool:
        if stops and record.offset >= stops[TopicPartition(record.topic, record.partition)]:
            return False
        search = None if self._pattern is None else self._pattern.search
        return search is None or any(
            search(data) is not None for data in (record.key, record.value) if data is not None
        )

    def _open(self, consumer: Consumer, unfinished: dict[TopicPartition, int]) -> bool:
        """Return whether a partition has not reached its stop yet; others are paused."""
        for place, stop in list(unfinished.items()):
            if consumer.position(place, self.seconds) >= stop:
                del unfinished[place]
                consumer.pause(place)
        return bool(unfinished)


def _commit(consumer: Consumer, records: Sequence[Record], *, whole: bool) -> None:
    """Commit behind the printed records of a poll; whole: all of them were printed."""
    offsets = None
    if not whole:
        offsets = {TopicPartition(each.topic, each.partition): each.offset + 1 for each in records}
    try:
        consumer.commit(offsets)
    except _REMOVED as refusal:
        typer.echo(f"not committed, so other members print it again: {refusal.message}", err=True)


class _Formatter:
    """Formats a record as a line of bytes; keys and values are printed as they were stored."""

    def __init__(self, fields: _Fields, separator: bytes) -> None:
        self._fields, self._separator = fields, separator

    def of(self, record: Record) -> bytes:
        fields: list[bytes] = []
        if self._fields.topic:
            fields.append(record.topic.encode())
        if self._fields.timestamp:
            fields.append(b"%d" % record.timestamp_ms)
        if self._fields.offset:
            fields.append(b"%d:%d" % (record.partition, record.offset))
        if self._fields.headers:
            fields.append(record_text.headers_shown(record))
        if self._fields.key:
            fields.append(record_text.shown(record.key))
        fields.append(record_text.shown(record.value))
        return self._separator.join(fields) + b"\n"
