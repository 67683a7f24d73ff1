"""Single flipped bits in the Delta log of a real table: commits and checkpoints (rules T2, T8).

A server writes the table: appends, deletions, a compaction by another engine.  Then one bit at a
time is flipped in a copy, and the copy is opened as the tier process opens it, afresh or by a
handle that knows an older version, and as Spark's planner lists it.  Each load must give exactly
what the undamaged log gives, or a typed error that names the table.  Loads run in a child process:
a panic or an abort inside deltalake counts as a crash.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from deltalake import DeltaTable
from verdicts import Verdict

from pk import AdminClient, Producer, TopicPartition, errors, settings
from pk.cli.embedded import EmbeddedServer
from pk.clock import SystemClock, block_s, monotonic_s
from pk.tiering.delta import DeltaTables
from pk.tiering.fsspec_store import open_store
from pk.tiering.store_settings import StoreSettings
from pk.tiering.table import check_successor

PATIENCE_S = 60
TOPIC = "flights"
PARTITIONS = 2
FLIPS = 1_200
CHECKPOINT_FLIPS = 400
SHORT = 20  #: a short run flips so many times fewer
TOPIC_SETTINGS = {
    "retention_ms": -1,
    "tier_max_lag_ms": 100,
    "tier_file_bytes": 16_384,
    "local_drop_delay_ms": 3_600_000,
    "file_delete_delay_ms": 0,
}


def run(seed: int, work: Path, short: bool) -> list[Verdict]:
    """Return one verdict for commits and one for checkpoints."""
    home = made_table(work, short)
    rng = random.Random(seed)
    commits = sorted((home / "_delta_log").glob("*.json"))
    others = [
        *sorted((home / "_delta_log").glob("*.checkpoint.parquet"))[-1:],
        home / "_delta_log" / "_last_checkpoint",
    ]
    share = SHORT if short else 1
    kinds = {
        "commit JSONs": [commit_flip(rng, commits) for _ in range(FLIPS // share)],
        "checkpoint and its pointer": [
            flip_in(rng, rng.choice(others)) for _ in range(CHECKPOINT_FLIPS // share)
        ],
    }
    return [judged(kind, flips, home, work) for kind, flips in kinds.items()]


def judged(kind: str, flips: list[dict[str, Any]], home: Path, work: Path) -> Verdict:
    outcomes = Counter(outcome for _, outcome in loads(flips, home, work))
    wrong = sum(count for outcome, count in outcomes.items() if outcome.startswith(("WRONG", "CR")))
    figures = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    return Verdict(f"{len(flips)} bit flips in {kind}", wrong == 0, figures)


# -- the table -------------------------------------------------------------------------------------


def made_table(work: Path, short: bool) -> Path:
    """Return a table that a server wrote, after its load has ended."""
    rounds = 6 if short else 14
    server = EmbeddedServer(work / "pk", tier_url=(work / "tier").as_uri())
    with server, AdminClient(server.address) as admin:
        admin.create_topic(TOPIC, PARTITIONS, TOPIC_SETTINGS)
        with Producer(server.address, batch_size=4_096) as producer:
            for turn in range(rounds):
                for number in range(60):
                    producer.send(TOPIC, b"%d" % number * 40, partition=number % PARTITIONS)
                producer.flush()
                until(lambda: settled(admin))
                if turn == rounds // 2:
                    DeltaTable(str(table_of(admin))).optimize.compact()
                if turn == rounds // 2 + 2:
                    admin.delete_records({TopicPartition(TOPIC, 0): 45})
        home = table_of(admin)
    return home


def table_of(admin: AdminClient) -> Path:
    return Path(unquote(urlsplit(admin.describe_tier(TOPIC).uri).path))


def settled(admin: AdminClient) -> bool:
    return all(each.tiered_end == each.log_end for each in admin.describe_topics([TOPIC]))


def until(holds: Any) -> None:
    deadline = monotonic_s() + PATIENCE_S
    while not holds():
        assert monotonic_s() < deadline
        block_s(0.05)


# -- flips -----------------------------------------------------------------------------------------


def commit_flip(rng: random.Random, commits: list[Path]) -> dict[str, Any]:
    """Draw a bit: half of them in the newest commit, which every load reads, most others behind the
    last checkpoint.
    """
    chance = rng.random()
    newest = commits[-1:] if chance < 0.5 else commits[-5:] if chance < 0.9 else commits
    return flip_in(rng, rng.choice(newest))


def flip_in(rng: random.Random, path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    return {"file": path.name, "bit": rng.randrange(8 * size), "behind": rng.random() < 0.3}


def loads(
    flips: list[dict[str, Any]], home: Path, work: Path
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each flip and its outcome; a child that dies is restarted behind the flip at which it
    died.
    """
    left = list(flips)
    while left:
        command = [sys.executable, __file__, str(home), str(work / "copy")]
        given = "".join(json.dumps(flip) + "\n" for flip in left)
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
        outcomes = [line[1:] for line in done.stdout.splitlines() if line.startswith(">")]
        yield from zip(left, outcomes, strict=False)
        left = left[len(outcomes) :]
        if left:
            yield left.pop(0), f"CRASHED (exit {done.returncode})"


# -- the child -------------------------------------------------------------------------------------


async def child(home: Path, copy: Path) -> None:
    """Read flips from stdin, and write one outcome per line."""
    known = await loaded(home, -1)
    assert not isinstance(known, str), known
    for line in sys.stdin:
        print(">" + await outcome_of(json.loads(line), home, copy, known), flush=True)


async def outcome_of(flip: dict[str, Any], home: Path, copy: Path, known: Any) -> str:
    root = copy / home.parent.name / home.name
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(home / "_delta_log", root / "_delta_log")
    damaged = root / "_delta_log" / flip["file"]
    raw = bytearray(damaged.read_bytes())
    raw[flip["bit"] // 8] ^= 1 << flip["bit"] % 8
    later: list[tuple[Path, bytes]] = []
    if flip["behind"] and damaged.suffix == ".json":  # a handle knows the version before
        for path in sorted((root / "_delta_log").iterdir()):
            if path.name[:20].isdecimal() and int(path.name[:20]) >= int(flip["file"][:20]):
                later.append((path, bytes(raw) if path == damaged else path.read_bytes()))
        if not any(p.name.endswith(".json") for p in (root / "_delta_log").iterdir()):
            later = []
        pointer = root / "_delta_log" / "_last_checkpoint"
        if json.loads(pointer.read_bytes())["version"] >= int(flip["file"][:20]):
            later = []
    if not later:
        damaged.write_bytes(raw)
    found = await loaded(root, len(later), later)
    if isinstance(found, str):
        return found
    if found != known:
        return f"WRONG {flip}"
    listed = as_spark(root)
    if isinstance(listed, str):
        return listed
    return "of no meaning" if listed == as_spark(home) else f"WRONG in Spark {flip}"


async def loaded(root: Path, behind: int, later: list[tuple[Path, bytes]] | None = None) -> Any:
    """Return what the tier process sees of the table, or the name of its typed error."""
    clock = SystemClock()
    chosen = StoreSettings.of(settings.SERVER.resolve({"tier_url": root.parent.parent.as_uri()}))
    store = open_store(chosen, clock)
    tables = DeltaTables(chosen, store, clock)
    table = tables.table(TOPIC, root.name)
    try:
        for path, _ in later or ():
            path.unlink()
        if behind > 0:
            await table.load([])
            for path, data in later or ():
                path.write_bytes(data)
        snapshot = await table.load(range(PARTITIONS))
        if snapshot is not None:
            check_successor(root.as_uri(), None, snapshot)  # as the owner does (T8)
    except errors.PkError as error:
        if isinstance(error, errors.TierTableChanged):
            return "TierTableChanged"
        return type(error).__mro__[0].__name__ if error.code >= 0 else "TierUnavailable"
    finally:
        await tables.close()
        await store.close()
    if snapshot is None:
        return "WRONG: no table"
    return snapshot.version, dict(snapshot.files), dict(snapshot.counters)


def as_spark(root: Path) -> Any:
    from pk.sparkconnector.table_files import list_files

    try:
        found = list_files(root.as_uri(), {}, root.name, list(range(PARTITIONS)))
    except errors.PkError as error:
        return type(error).__name__
    return found.starts, {number: sorted(files) for number, files in found.files.items()}


if __name__ == "__main__":
    asyncio.run(child(Path(sys.argv[1]), Path(sys.argv[2])))
