"""Flipped bits in every identity and checkpoint file of a data directory; and lost files of these
kinds.

The run fills one directory and closes it.  For each case it copies the directory back, damages or
removes one file, and starts the server on it.  A case passes if each acknowledged record is read
with its value, or a typed error reports that it is missing, and if no offset is assigned twice.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from verdicts import Verdict

from pk import AdminClient, Consumer, Producer, TopicPartition, errors
from pk.cli.embedded import EmbeddedServer
from pk.clock import monotonic_s

TOPIC = "flights"
PARTITIONS = 2
RECORDS = 40
PATIENCE_S = 60
#: Flips in each file; all of them in the short form together.
FLIPS, FLIPS_SHORT = 12, 3
#: Files of the data directory that contain its identity, or offsets.
KINDS = (
    "pk.json",
    "run.json",
    "clean-shutdown",
    "*-checkpoint",
    "topics/*/partition.json",
    "topics/*/leader-epoch-checkpoint",
    "topics/*/*.snapshot",
    "metadata/directory.json",
    "metadata/quorum-state",
)
Harm = Callable[[Path], str]


def run(seed: int, work: Path, short: bool) -> list[Verdict]:
    rng = random.Random(seed)
    home, whole = work / "pk", work / "whole"
    with EmbeddedServer(home) as server:
        _fill(server.address)
    shutil.copytree(home, whole)
    files = sorted(
        path.relative_to(whole) for kind in KINDS for path in (whole / "data").glob(kind)
    )
    flips = [(path, _flip(rng)) for path in files for _ in range(FLIPS)]
    losses: list[tuple[Path, Harm]] = [(path, _remove) for path in files]
    trees: list[tuple[Path, Harm]] = [
        (Path("data/topics") / f"{TOPIC}-{number}", _remove) for number in range(PARTITIONS)
    ]
    if short:
        flips, losses, trees = rng.sample(flips, FLIPS_SHORT), rng.sample(losses, 1), trees[:1]
    return [
        _verdict(f"{len(cases)} {what}", list(_cases(home, whole, cases)))
        for what, cases in (
            ("bit flips in identities and checkpoints", flips),
            ("lost identities and checkpoints", losses),
            ("lost partition directories", trees),
        )
    ]


def _value(partition: int, number: int) -> bytes:
    return b"%d/%06d" % (partition, number)


def _fill(address: str) -> None:
    with AdminClient(address) as admin:
        admin.create_topic(TOPIC, PARTITIONS, {"retention_ms": -1})
    with Producer(address, linger_ms=0) as producer:
        futures = [
            producer.send(TOPIC, _value(partition, number), partition=partition)
            for number in range(RECORDS)
            for partition in range(PARTITIONS)
        ]
        for future in futures:
            future.result(PATIENCE_S)


def _flip(rng: random.Random) -> Harm:
    def harm(path: Path) -> str:
        raw = bytearray(path.read_bytes())
        if not raw:
            return "empty"
        at, bit = rng.randrange(len(raw)), rng.randrange(8)
        raw[at] ^= 1 << bit
        path.write_bytes(raw)
        return f"bit {bit} of byte {at}"

    return harm


def _remove(path: Path) -> str:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return "removed"


def _cases(
    home: Path, whole: Path, cases: list[tuple[Path, Harm]]
) -> Iterator[tuple[str, str, bool]]:
    """Yield for each case: what was done, the outcome, and whether the promise was kept."""
    for path, harm in cases:
        shutil.rmtree(home)
        shutil.copytree(whole, home)
        done = f"{path}: {harm(home / path)}"
        try:
            with EmbeddedServer(home) as server:
                told = [_look(server.address, number) for number in range(PARTITIONS)]
        except errors.PkError as refusal:
            yield done, f"refused at start: {type(refusal).__name__}", _typed(refusal)
            continue
        worst = next((each for each in told if each != "whole"), "whole")
        yield done, worst, not worst.startswith("WRONG")


def _typed(refusal: errors.PkError) -> bool:
    """Return whether the outcome is a typed error; a server that only ended, or hung, reported
    nothing.
    """
    return not isinstance(refusal, errors.BrokerUnavailable | errors.InternalError)


def _look(address: str, partition: int) -> str:
    """Return what a reader and a producer find."""
    try:
        found = _read(address, partition)
    except errors.PkError as error:
        if not _typed(error):
            return f"WRONG: {error}"
        return type(error).__name__
    wanted = [(number, _value(partition, number)) for number in range(RECORDS)]
    if found != wanted:
        return f"WRONG: {len(found)} of {RECORDS} records of partition {partition}"
    with Producer(address) as producer:
        sent = producer.send(TOPIC, b"new", partition=partition).result(PATIENCE_S)
    return "whole" if sent.offset >= RECORDS else f"WRONG: offset {sent.offset} was given again"


def _read(address: str, partition: int) -> list[tuple[int, bytes | None]]:
    """Read all records.  Raises what the consumer raises."""
    found: list[tuple[int, bytes | None]] = []
    place = TopicPartition(TOPIC, partition)
    with Consumer(address, auto_offset_reset="none") as consumer:
        consumer.assign([place])
        consumer.seek(place, 0)
        deadline = monotonic_s() + PATIENCE_S
        while len(found) < RECORDS and monotonic_s() < deadline:
            found += [(record.offset, record.value) for record in consumer.poll(0.5)]
            if not found and consumer.end_offsets([place])[place] == 0:
                break  # it began empty
    return found


def _verdict(what: str, rows: list[tuple[str, str, bool]]) -> Verdict:
    counts = Counter(outcome.split(":")[0] for _, outcome, _ in rows)
    figures = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    broken = [f"{done}: {outcome}" for done, outcome, kept in rows if not kept]
    return Verdict(what, not broken, "; ".join((figures, *broken)))
