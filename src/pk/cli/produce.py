"""`pk produce TOPIC`: one record a line, from standard input or a file."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from pk import errors
from pk.cli import positions, record_text
from pk.cli.common import (
    DEFAULT_BOOTSTRAP,
    BootstrapOption,
    LingerMs,
    duration,
    opened,
    quiet_end,
    say,
)
from pk.cli.record_text import NewRecord
from pk.clock import wall_ms

app = typer.Typer(add_completion=False)

#: The most time to wait for a broker, however long acknowledgements may take.
MAX_CONNECT_MS = 60_000
_BAR_EVERY = 2_000  #: records between two updates of the progress bar


Topic = Annotated[str, typer.Argument(help="topic name", metavar="TOPIC")]
File = Annotated[Path | None, typer.Option(help="read lines from FILE, not from stdin")]
KeySeparator = Annotated[
    str | None,
    typer.Option(help="what stands before it in a line is the key; a line without it has none"),
]
NullValue = Annotated[
    str | None, typer.Option(help="a value of exactly this text is null (a tombstone)")
]
Partition = Annotated[int | None, typer.Option(min=0, help="send to this partition")]
Header = Annotated[
    list[str] | None, typer.Option("--header", help="name=value, on each record; repeatable")
]
Timestamp = Annotated[
    str | None,
    typer.Option(help="of each record: 2026-11-27T12:00:00Z, @MILLISECONDS or 12h (ago)"),
]
Acks = Annotated[str, typer.Option(help="0, 1 or all")]
Compression = Annotated[str, typer.Option(help="none, lz4 or zstd")]
DeliveryMs = Annotated[
    int,
    typer.Option(
        "--timeout-ms",
        parser=duration(1),
        metavar="DURATION",
        help="how long to wait for a broker, and after the last line for acknowledgements",
    ),
]
JsonLines = Annotated[
    bool,
    typer.Option("--json", help="lines as `pk consume --json` prints them; the result as JSON"),
]


@app.command()
def produce(
    topic: Topic,
    file: File = None,
    key_separator: KeySeparator = None,
    null_value: NullValue = None,
    partition: Partition = None,
    header: Header = None,
    timestamp: Timestamp = None,
    acks: Acks = "all",
    compression: Compression = "none",
    linger_ms: LingerMs = 5.0,
    timeout_ms: DeliveryMs = 120_000,
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    as_json: JsonLines = False,
) -> None:
    """Send each line of the input as one record.

    Examples: seq 10 | pk produce numbers --header source=seq

              pk consume flights --from start --to end --json | pk produce copy --json
    """
    from pk.client.producer import Producer

    if as_json and (key_separator is not None or null_value is not None):
        raise errors.InvalidOption(
            "--json lines have keys and nulls of their own: it takes no "
            "--key-separator and --null-value"
        )
    if key_separator == "":
        raise errors.InvalidOption("--key-separator is empty", option="key_separator")
    given = _Given(header, partition, timestamp)
    read_line = record_text.of_json if as_json else _Lines(key_separator, null_value).record
    options: dict[str, Any] = {"acks": acks, "compression": compression, "linger_ms": linger_ms}
    with quiet_end(), _input(file) as (lines, total):
        count = _Count()
        client = Producer(bootstrap, **options)
        with opened(client, bootstrap) as producer, _progress(total) as moved:
            read = 0
            for line in lines:
                if not read:  # fails soon for a dead address or an unknown topic
                    producer.partitions_for(topic, min(timeout_ms, MAX_CONNECT_MS) / 1000)
                read += len(line)
                count.sent += 1
                record = given.to(read_line(line, count.sent))
                producer.send(topic, *record, on_delivery=count.delivered)
                if count.sent % _BAR_EVERY == 0:
                    count.raise_first()
                    moved(read, count.sent)
            moved(read, count.sent)
            try:
                producer.flush(timeout_ms / 1000)
            except TimeoutError:
                missing = count.sent - count.stored
                raise errors.DeliveryTimedOut(
                    f"{missing} of {count.sent} records were not acknowledged "
                    f"within {timeout_ms} ms"
                ) from None
        count.raise_first()
    if as_json:
        say({"topic": topic, "sent": count.sent, "acknowledged": count.stored})
    else:
        typer.echo(f"{count.stored} records acknowledged", err=True)


class _Lines:
    """Makes records of plain lines."""

    def __init__(self, key_separator: str | None, null_value: str | None) -> None:
        self._separator = None if key_separator is None else key_separator.encode()
        self._null = None if null_value is None else null_value.encode()

    def record(self, line: bytes, _number: int) -> NewRecord:
        value: bytes | None = line.rstrip(b"\n").removesuffix(b"\r")
        key = None
        if self._separator is not None and value is not None and self._separator in value:
            key, _, value = value.partition(self._separator)
        if value == self._null and self._null is not None:
            value = None
        return NewRecord(value, key, (), None, None)


class _Given:
    """What the command says of every record; it has precedence over the line, headers are added."""

    def __init__(
        self, headers: Sequence[str] | None, partition: int | None, timestamp: str | None
    ) -> None:
        self._headers: record_text.Headers = tuple(_header(text) for text in headers or ())
        self._partition = partition
        self._timestamp_ms: int | None = None
        if timestamp is not None:
            try:
                self._timestamp_ms = positions.time_ms(timestamp, wall_ms())
            except ValueError:
                raise errors.InvalidOption(
                    "--timestamp is a time with its zone, such as 2026-11-27T12:00:00Z, "
                    f"@MILLISECONDS, or 12h; not {timestamp!r}",
                    option="timestamp",
                ) from None

    def to(self, record: NewRecord) -> NewRecord:
        return NewRecord(
            record.value,
            record.key,
            record.headers + self._headers,
            record.partition if self._partition is None else self._partition,
            record.timestamp_ms if self._timestamp_ms is None else self._timestamp_ms,
        )


def _header(text: str) -> tuple[str, bytes | None]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise errors.InvalidOption(f"--header takes name=value, not {text!r}", option="header")
    return name, value.encode()


class _Count:
    """Counts acknowledged and failed records."""

    def __init__(self) -> None:
        self.sent = 0
        self.stored = 0
        self.failed = 0
        self.first: errors.PkError | None = None

    def delivered(self, _metadata: object, error: errors.PkError | None) -> None:
        if error is None:
            self.stored += 1
            return
        self.failed += 1
        self.first = self.first or error

    def raise_first(self) -> None:
        if self.first is not None:
            raise self.first


@contextlib.contextmanager
def _input(file: Path | None) -> Iterator[tuple[BinaryIO, int | None]]:
    """Return the input and its size, None if the size is unknown."""
    if file is None:
        yield sys.stdin.buffer, None
        return
    try:
        opened = file.open("rb", buffering=io.DEFAULT_BUFFER_SIZE * 8)
    except OSError as cause:
        raise errors.InvalidOption(f"{file}: {cause.strerror}", file=str(file)) from cause
    with opened:
        yield opened, file.stat().st_size if file.is_file() else None


@contextlib.contextmanager
def _progress(total: int | None) -> Iterator[Any]:
    """Show a bar on stderr, if stderr is a terminal and the input is not."""
    if not sys.stderr.isatty() or (total is None and sys.stdin.isatty()):
        yield lambda _read, _sent: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("produce"), BarColumn(), TextColumn("{task.fields[sent]:,} records"),
        TimeElapsedColumn(), console=Console(stderr=True),
    )  # fmt: skip
    with bar:
        task = bar.add_task("produce", total=total, sent=0)
        yield lambda read, sent: bar.update(task, completed=read, sent=sent)
