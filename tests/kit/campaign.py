"""What campaigns with real processes have in common: their verdict, options, stores and readers.

A campaign is a program `run.py` that `make` starts.  It prints its seed first and its verdict last,
and exits 1 if a promise is broken.  `--short` is the form that the suites run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import node_starts
from judging import bugs
from versitygw import S3Server, find_binary, free_port

from pk import Consumer, TopicPartition
from pk.cli.embedded import EmbeddedCluster
from pk.clock import monotonic_s

#: The columns that a campaign compares.
ROW = ("offset", "key", "value")


@dataclass
class Verdict:
    """What a campaign found; each campaign adds its figures."""

    seed: int
    broken: list[str] = field(default_factory=list, kw_only=True)

    def check(self, holds: bool, words: str) -> None:
        """Note a broken promise."""
        if not holds:
            self.broken.append(words)

    def check_nodes(self, cluster: EmbeddedCluster) -> None:
        """Note the bugs that the nodes have logged."""
        self.broken += [f"a node logged a bug: {line}" for line in bugs(cluster)[:5]]

    def end(self, told: str, json_file: Path | None) -> int:
        """Write and print the verdict; return the exit code."""
        if json_file is not None:
            json_file.write_text(json.dumps(vars(self), indent=1) + "\n")
        print(f"seed {self.seed}: {told}: {'BROKEN' if self.broken else 'ok'}", flush=True)
        for words in self.broken:
            print(f"  {words}", flush=True)
        return 1 if self.broken else 0


def options(doc: str | None, short: str) -> argparse.ArgumentParser:
    """Return the parser of the options that all campaigns have."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n", 1)[0])
    parser.add_argument("--short", action="store_true", help=short)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the verdict to this file")
    parser.add_argument("--dir", type=Path, help="keep everything in this directory")
    return parser


def begun(given: argparse.Namespace, name: str) -> Path:
    """Print the seed; return the directory of the run.  Its nodes are forked (node_starts.py)."""
    node_starts.install()
    folder: Path = given.dir or Path(tempfile.mkdtemp(prefix=f"pk-{name}-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"SEED {given.seed}, {folder}", flush=True)
    return folder


def rows_of(
    address: str,
    topic: str,
    partitions: int,
    patience_s: float,
    *,
    columns: Sequence[str] = ROW,
    committed: bool = True,
) -> dict[int, list[tuple[Any, ...]]]:
    """Return the columns of all that a consumer reads from each partition, in its order.

    Raises `TimeoutError` if the ends are not reached within `patience_s`.
    """
    level = "read_committed" if committed else "read_uncommitted"
    places = [TopicPartition(topic, number) for number in range(partitions)]
    found: dict[int, list[Any]] = {place.partition: [] for place in places}
    deadline = monotonic_s() + patience_s
    with Consumer(address, isolation_level=level, auto_offset_reset="earliest") as consumer:
        consumer.assign(places)
        ends = consumer.end_offsets(places, timeout_s=60)
        while any(consumer.position(place) < ends[place] for place in places):
            for place, batch in consumer.poll_batches(timeout_s=1.0):
                cells = [batch.column(name).to_pylist() for name in columns]
                found[place.partition] += zip(*cells, strict=True)
            if monotonic_s() > deadline:
                raise TimeoutError(f"{topic} cannot be read to {ends}")
    return found


@contextlib.contextmanager
def store_of(name: str, work: Path) -> Iterator[tuple[dict[str, Any], dict[str, str] | None]]:
    """Yield the server's settings of the tier, and the options with which deltalake opens it.

    name: `file`, or `s3` for an S3 server of its own
    """
    if name == "file":
        (work / "tier").mkdir()
        yield {"tier_url": (work / "tier").as_uri()}, None
        return
    binary = find_binary()
    if binary is None:
        raise SystemExit("--store s3 needs versitygw: install Go, or set PK_VERSITYGW")
    server = S3Server(binary, work, free_port())
    server.start()
    try:
        yield (
            server.server_settings("tier"),
            {
                "AWS_ACCESS_KEY_ID": server.access_key,
                "AWS_SECRET_ACCESS_KEY": server.secret_key,
                "AWS_ENDPOINT_URL": server.endpoint,
                "AWS_REGION": "us-east-1",
                "AWS_ALLOW_HTTP": "true",
            },
        )
    finally:
        server.stop()
