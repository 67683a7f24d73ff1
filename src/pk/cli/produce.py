"""`pk produce TOPIC`: one record a line, from standard input or a file."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from pk import errors
from pk.cli.common import (
    DEFAULT_BOOTSTRAP,
    TIMEOUT_MS_MAX,
    AsJson,
    BootstrapOption,
    opened,
    quiet_end,
    say,
)

app = typer.Typer(add_completion=False)

#: The most time to wait for a broker, however long acknowledgements may take.
MAX_CONNECT_MS = 60_000
_BAR_EVERY = 2_000  #: records between two updates of the progress bar


@app.command(help=__doc__)
def produce(
    topic: Annotated[str, typer.Argument(help="topic name", metavar="TOPIC")],
    file: Annotated[Path | None, typer.Option(help="read lines from FILE, not from stdin")] = None,
    key_separator: Annotated[
        str | None,
        typer.Option(help="what stands before it in a line is the key; a line without it has none"),
    ] = None,
    null_value: Annotated[
        str | None, typer.Option(help="a value of exactly this text is null (a tombstone)")
    ] = None,
    partition: Annotated[int | None, typer.Option(min=0, help="send to this partition")] = None,
    acks: Annotated[str, typer.Option(help="0, 1 or all")] = "all",
    compression: Annotated[str, typer.Option(help="none, lz4 or zstd")] = "none",
    linger_ms: Annotated[float, typer.Option(min=0, help="how long a batch may wait")] = 5.0,
    timeout_ms: Annotated[
        int,
        typer.Option(
            "--timeout-ms",
            min=1,
            max=TIMEOUT_MS_MAX,
            help="how long to wait for a broker, and after the last line for acknowledgements",
        ),
    ] = 120_000,
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    as_json: AsJson = False,
) -> None:
    """Send each line of the input as one record."""
    from pk.client.producer import Producer

    if key_separator == "":
        raise errors.InvalidOption("--key-separator is empty", option="key_separator")
    separator = None if key_separator is None else key_separator.encode()
    null = None if null_value is None else null_value.encode()
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
                value: bytes | None = line.rstrip(b"\n").removesuffix(b"\r")
                key = None
                if separator is not None and value is not None and separator in value:
                    key, _, value = value.partition(separator)
                if value == null and null is not None:
                    value = None
                producer.send(
                    topic, value, key=key, partition=partition, on_delivery=count.delivered
                )
                count.sent += 1
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
