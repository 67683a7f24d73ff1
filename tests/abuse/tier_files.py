"""Abuse of a table's data files: flipped bits in pages and footers, lost and cut files.

A real server tiers a topic and drops its local segments, so that a consumer reads the files.  Then
bits flip.  A default consumer, the Spark executors' reader and the tier's own reader must return
the produced rows, or a typed error that names the file: no other value, no null, no missing row,
and no process that ends.  The sweeps of whole files run in a process of their own, because a parser
that meets a damaged footer may end its process.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

sys.path.insert(0, str(Path(__file__).parent))

from verdicts import Verdict

from pk import AdminClient, Consumer, Producer, TopicPartition, errors
from pk.cli.embedded import EmbeddedServer
from pk.clock import SystemClock, block_s, monotonic_s
from pk.tiering import footers
from pk.tiering.layout import PartitionCounters, parse_data_path

PATIENCE_S = 60
TOPIC = "flights"
PLACE = TopicPartition(TOPIC, 0)
COLUMNS = ("offset", "timestamp", "key", "value", "headers")
Row = tuple[Any, ...]


class Bench:
    """One node, and one topic of one partition whose older records are in the table only."""

    def __init__(self, server: EmbeddedServer, records: int) -> None:
        self.server = server
        self.admin = AdminClient(server.address)
        settings = {
            "retention_ms": -1,
            "segment_bytes": 32_768,
            "local_retention_bytes": 0,
            "tier_max_lag_ms": 100,
            "tier_file_bytes": 24_576,
            "local_drop_delay_ms": 0,
            "file_delete_delay_ms": 0,
        }
        self.admin.create_topic(TOPIC, 1, settings)
        numbers = random.Random(7)
        with Producer(server.address, batch_size=8_192) as producer:
            for n in range(records):
                producer.send(
                    TOPIC,
                    value=None if n % 50 == 49 else numbers.randbytes(numbers.randrange(20, 120)),
                    key=b"k%d" % (n % 9) if n % 4 else None,
                    headers=[("h", b"%d" % n)] if n % 3 == 0 else None,
                    partition=0,
                )
            producer.flush(PATIENCE_S)
        self.rows = self.read(0, records)[0]
        assert len(self.rows) == records
        self.until(lambda: self.state().local_log_start > 0.8 * records)
        uri = self.admin.describe_tier(TOPIC).uri
        self.home = Path(unquote(urlsplit(uri).path))
        local = self.state().local_log_start
        found = {path: parse_data_path(f"partition=0/{path.name}") for path in self.paths()}
        self.files = [path for path, name in found.items() if name and name.end <= local]
        self.names = {path: name for path, name in found.items() if name is not None}
        self.pids = server.pids()

    def paths(self) -> list[Path]:
        return sorted(self.home.glob("partition=0/*.parquet"))

    def state(self) -> Any:
        return self.admin.describe_topics([TOPIC])[0]

    def until(self, holds: Callable[[], Any]) -> Any:
        deadline = monotonic_s() + PATIENCE_S
        while not (answer := holds()):
            assert monotonic_s() < deadline, self.server.tail()
            block_s(0.05)
        return answer

    def read(self, start: int, end: int) -> tuple[list[Row], errors.PkError | None]:
        """What a default consumer gives of `[start, end)`, and the error it ends in."""
        found: list[Row] = []
        with Consumer(self.server.address) as consumer:
            consumer.assign([PLACE])
            consumer.seek(PLACE, start)
            deadline = monotonic_s() + PATIENCE_S
            while True:
                assert monotonic_s() < deadline, self.server.tail()
                try:
                    if consumer.position(PLACE) >= end:
                        break
                    for _, rows in consumer.poll_batches(0.5):
                        found += _rows(rows)
                except errors.PkError as error:
                    # An error is raised before rows that were fetched earlier: return those rows
                    # first.
                    reached = found[-1][0] + 1 if found else start
                    if reached >= min(int(error.details.get("start", 0)), end):
                        return found, error
        return [row for row in found if row[0] < end], None

    def judge(self, path: Path, counts: Counter[str]) -> None:
        """Read the range of one file and count the outcomes."""
        name = self.names[path]
        found, error = self.read(name.start, name.end)
        wanted = self.rows[name.start : name.end]
        found = found[: len(wanted)]
        if found != wanted[: len(found)]:
            counts["wrong"] += 1
        elif error is None:
            counts["lost" if len(found) < len(wanted) else "whole"] += 1
        elif isinstance(error, errors.DamagedTierFile) and path.name in error.message:
            counts["told"] += 1
        else:
            counts[f"other error {error!r}"] += 1


def _rows(rows: Any) -> list[Row]:
    return [tuple(repr(row[name]) if name == "headers" else row[name] for name in COLUMNS)
            for row in rows.to_pylist()]  # fmt: skip


def flip(path: Path, bit: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)


def run(seed: int, work: Path, short: bool) -> list[Verdict]:
    """Run all cases; see verdicts.py."""
    numbers = random.Random(seed)
    tier = work / "tier"
    tier.mkdir()
    server = EmbeddedServer(
        work / "pk",
        tier_url=tier.as_uri(),
        settings={"log_retention_check_interval_ms": 100, "cold_cache_bytes": 0},
    )
    with server:
        bench = Bench(server, 1_500 if short else 8_000)
        try:
            found = [
                pages(bench, numbers, 8 if short else 500),
                footer_bits(bench, numbers, 4 if short else 60),
                lost_file(bench, numbers),
                *sweeps(bench, numbers, short),
                restored(bench),
            ]
        finally:
            bench.admin.close()
        ended = {role for role, pid in bench.pids.items() if server.pids().get(role) != pid}
        found.append(Verdict("no process of the server ended", not ended, f"ended: {ended or '-'}"))
    bugs = server.log.read_text().count("BUG")
    return [*found, Verdict("the server's log has no bug", not bugs, f"{bugs} BUG lines")]


def pages(bench: Bench, numbers: random.Random, flips: int) -> Verdict:
    """Flip bits of pages, their headers and dictionaries; read with a default consumer."""
    counts: Counter[str] = Counter()
    for turn in range(flips):
        path = bench.files[turn % len(bench.files)]
        raw = path.read_bytes()
        flip(path, numbers.randrange(32, 8 * (len(raw) - footers.footer_size(raw))))
        bench.judge(path, counts)
        path.write_bytes(raw)
    return _verdict(f"{flips} bits of pages, consumer", counts)


def footer_bits(bench: Bench, numbers: random.Random, flips: int) -> Verdict:
    """Flip bits of footers; read with a default consumer and a new tier process, which has no
    footer cached.
    """
    counts: Counter[str] = Counter()
    for at in range(0, flips, len(bench.files)):
        whole = {path: path.read_bytes() for path in bench.files[: flips - at]}
        for path, raw in whole.items():
            flip(path, 8 * len(raw) - 1 - numbers.randrange(8 * footers.footer_size(raw)))
        bench.server.kill("tier")
        bench.until(
            lambda: bench.server.pids().get("tier", bench.pids["tier"]) != bench.pids["tier"]
        )
        bench.pids = bench.server.pids()
        for path, raw in whole.items():
            bench.judge(path, counts)
            path.write_bytes(raw)
    return _verdict(f"{flips} bits of footers, consumer", counts, told=flips)


def lost_file(bench: Bench, numbers: random.Random) -> Verdict:
    """Remove one file: reads of its range fail and name it; the rows before and after it are
    readable.
    """
    path = bench.files[len(bench.files) // 2]
    name, raw = bench.names[path], path.read_bytes()
    path.unlink()
    before, error = bench.read(0, len(bench.rows))
    after, other = bench.read(name.end, len(bench.rows))
    described = bench.admin.describe_tier(TOPIC)
    listed = [(each.start, each.end) for each in described.damaged if path.name in each.path]
    path.write_bytes(raw)
    checks = {
        "rows before it": before == bench.rows[: name.start],
        "error names it": isinstance(error, errors.DamagedTierFile) and path.name in error.message,
        "rows after it": after == bench.rows[name.end :] and other is None,
        "described": described.status == "damaged" and listed == [(name.start, name.end)],
    }
    lacking = [what for what, holds in checks.items() if not holds]
    return Verdict("one file lost", not lacking, f"lacking: {', '.join(lacking) or '-'}")


def restored(bench: Bench) -> Verdict:
    """Put every file back: all rows are readable, without a restart."""
    found, error = bench.read(0, len(bench.rows))
    kept = found == bench.rows and error is None
    return Verdict("after restoring the files", kept, f"{len(found)} rows, error: {error!r}")


def _verdict(case: str, counts: Counter[str], told: int = 1) -> Verdict:
    allowed = {"told", "whole"}
    kept = set(counts) <= allowed and counts["told"] >= told
    return Verdict(case, kept, ", ".join(f"{counts[what]} {what}" for what in sorted(counts)))


# -- sweeps over the bits of one file, in a process of their own -----------------------------------


def sweeps(bench: Bench, numbers: random.Random, short: bool) -> list[Verdict]:
    """Flip every bit of a footer, and bits of pages; read as the executors and the tier do."""
    path = bench.files[numbers.randrange(len(bench.files))]
    step = 199 if short else 1
    found = []
    for what, wanted in (("footer", step), ("pages", 3_001 if short else 41)):
        command = [sys.executable, __file__, str(path), what, str(wanted)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1_800, check=False)
        case = f"bits of {what}, tier_scan and TierReader"
        if done.returncode:
            figures = f"the reader ended with {done.returncode}: {done.stderr[-200:]}"
            found.append(Verdict(case, False, figures))
            continue
        counts = Counter(json.loads(done.stdout))
        bits = counts.pop("bits")
        told = 2 * bits if what == "footer" else bits
        found.append(_verdict(f"{bits} {case}", counts, told))
    return found


def sweep(path: Path, what: str, step: int) -> dict[str, int]:
    """Flip every `step`-th bit of a file's footer or pages in a copy of it; return what the readers
    report.
    """
    from tempfile import TemporaryDirectory

    raw = path.read_bytes()
    boundary = 8 * (len(raw) - footers.footer_size(raw))
    bits = range(boundary, 8 * len(raw), step) if what == "footer" else range(32, boundary, step)
    with TemporaryDirectory() as folder:
        readers = _Readers(Path(folder), path.name, raw)
        good = readers.read()
        assert all(isinstance(each, list) and each for each in good), good
        counts: Counter[str] = Counter(bits=len(bits))
        for bit in bits:
            bad = bytearray(raw)
            bad[bit // 8] ^= 1 << bit % 8
            readers.path.write_bytes(bad)
            for whole, found in zip(good, readers.read(), strict=True):
                if isinstance(found, errors.DamagedTierFile):
                    counts["told"] += 1
                elif isinstance(found, list):
                    counts["whole" if found == whole else "wrong"] += 1
                else:
                    counts[f"other error {found!r}"] += 1
    return dict(counts)


class _Readers:
    """A table of one file, read as an executor does and as the tier process does."""

    def __init__(self, folder: Path, name: str, raw: bytes) -> None:
        from pk import settings
        from pk.sparkconnector import options, rows
        from pk.sparkconnector.offsets import Range
        from pk.sparkconnector.ranges import TierFile
        from pk.sparkconnector.tier_scan import ColdRange
        from pk.tiering.data_files import DataFile
        from pk.tiering.fsspec_store import open_store
        from pk.tiering.store_settings import StoreSettings
        from pk.tiering.table import Snapshot

        known = parse_data_path(f"partition=0/{name}")
        assert known is not None
        home = folder / "t"
        self.path = home / "partition=0" / name
        self.path.parent.mkdir(parents=True)
        self.path.write_bytes(raw)
        offsets = known.start, known.end - 1
        count = known.end - known.start
        listed = TierFile(f"partition=0/{name}", *offsets, len(raw), count)
        self.range = Range("t", "id", 0, known.start, known.end)
        self.cold = ColdRange(home.as_uri(), {}, (listed,))
        names = ("offset", "timestamp", "key", "value", "headers")
        self.shape = rows.Shape(options.columns_of(names))
        chosen = StoreSettings.of(settings.SERVER.resolve({"tier_url": folder.as_uri()}))
        self.store = open_store(chosen, SystemClock())
        file = DataFile(f"partition=0/{name}", 0, *offsets, 0, 2**62, count, len(raw))
        counters = {0: PartitionCounters(end=known.end)}
        self.snapshot = Snapshot(1, "id", {file.path: file}, counters)

    def read(self) -> list[Any]:
        """Of each reader its rows, or its error."""
        return [self._scan(), asyncio.run(self._fetch())]

    def _scan(self) -> Any:
        from pk.sparkconnector import table_files, tier_scan

        table_files.list_files = lambda *_: table_files.TableFiles(
            {0: list(self.cold.files)}, {0: 0}, {}, {0: self.range.end}
        )

        def lost(part: Any) -> None:
            raise AssertionError(part)

        try:
            found = tier_scan.scan(self.range, self.cold, self.shape, lost)
            return [row for batch in found for row in batch.to_pylist()]
        except Exception as error:
            return error

    async def _fetch(self) -> Any:
        from pk.clock import SystemClock
        from pk.log import columns
        from pk.tiering.reader import TablePartition, TierReader

        async def here(work: Callable[[], Any]) -> Any:
            return work()

        reader = TierReader(self.store, here, SystemClock(), 0, 0)  # type: ignore[arg-type]
        place = TablePartition("t", 0, self.snapshot)
        at, end, found = self.range.start, self.range.end, []
        try:
            while at < end:
                fetched = await reader.fetch(place, at, end, 1 << 30)
                for batch in fetched.batches:
                    found += columns.decode(batch, decoded_bytes_max=1 << 26).to_pylist()
                at = fetched.next_offset
            return found
        except Exception as error:
            return error
        finally:
            await reader.close()


if __name__ == "__main__":
    print(json.dumps(sweep(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
