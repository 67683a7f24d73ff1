"""Flipped bits in log files: of topics with one copy, and of one replica of three (rule L9).

The run fills a server with topics of every codec, and flips bits of batches in its `.log` files:
while the server runs, after a stop, or after a kill.  Then it reads everything.  What must hold:

  whole     each acknowledged record outside the damaged batches is read, with its own value
  reported  each damaged batch is reported as DataLoss, and no other batch is
  continues the partition takes new records, at offsets that were not given before
  repaired  `pk log repair --yes` leaves the same records, and no error

Each damaged batch gets one flip; the batch's header is as likely to be hit as its body.  Two
undamaged batches lie between any two damaged ones, except in the last round of the long form.
There an undamaged batch between two damaged ones may be reported as lost, because nothing proves
its place (log/damage D1); all records that are read must still be right.

Then the same for three nodes of which one replica is damaged (_replica_damage.py).
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import _replica_damage as replica_damage
from verdicts import Verdict

from pk import AdminClient, Consumer, Producer, TopicPartition, errors
from pk.cli.embedded import EmbeddedServer
from pk.clock import monotonic_s
from pk.log import batch as batches

PK = Path(sys.executable).parent / "pk"
PATIENCE_S = 120
CODECS = ("none", "lz4", "zstd")
PARTITIONS = 2
SETTINGS = {"segment_bytes": 1024 * 1024, "retention_ms": -1}
#: How the damage meets the broker.
MODES = ("while it runs", "after a clean stop", "after a kill")


@dataclass(slots=True)
class Ledger:
    """The acknowledged records, and the damaged offsets."""

    values: dict[TopicPartition, dict[int, bytes]] = field(default_factory=dict)
    hit: dict[TopicPartition, set[int]] = field(default_factory=dict)
    anywhere: bool = False  #: neighbours are hit, too


@dataclass(slots=True)
class Readings:
    """What all readers got."""

    wrong: int = 0
    missing: int = 0
    untold: int = 0
    beyond: int = 0
    errors: int = 0
    told: int = 0

    def kept(self, ledger: Ledger) -> bool:
        """Check what is read.  Between neighbours with damaged headers a whole batch may be
        reported lost.
        """
        if self.wrong or self.untold or self.errors:
            return False
        return ledger.anywhere or not (self.missing or self.beyond)

    def __str__(self) -> str:
        return (
            f"{self.wrong} wrong values, {self.missing} whole records missing, {self.untold} "
            f"damaged records without DataLoss, {self.beyond} whole records in a DataLoss, "
            f"{self.errors} other errors; {self.told} DataLoss"
        )


def fill(server: EmbeddedServer, ledger: Ledger, rng: random.Random, count: int) -> None:
    """Produce `count` records for every partition, in batches of some records."""
    for codec in CODECS:
        options = {"compression": codec, "linger_ms": 5, "batch_size": 4096}
        with Producer(server.address, **options) as producer:
            sent = []
            for number in range(count):
                for partition in range(PARTITIONS):
                    value = b"%d:" % number + rng.randbytes(rng.randrange(1, 400))
                    future = producer.send(f"t-{codec}", value, partition=partition)
                    sent.append((partition, value, future))
            producer.flush(PATIENCE_S)
        for partition, value, future in sent:
            place = TopicPartition(f"t-{codec}", partition)
            offset = future.result(0).offset
            known = ledger.values.setdefault(place, {})
            assert offset not in known, f"{place} gave offset {offset} twice"
            known[offset] = value


def batches_of(
    server: EmbeddedServer, place: TopicPartition
) -> Iterator[tuple[Path, int, batches.Header]]:
    """Return file, position and header of every batch."""
    directory = server.data / "topics" / f"{place.topic}-{place.partition}"
    for path in sorted(directory.glob("*.log")):
        for position, header in batches.iter_headers(path.read_bytes()):
            yield path, position, header


def flip(server: EmbeddedServer, ledger: Ledger, rng: random.Random, count: int) -> None:
    """Flip one bit in each of `count` batches, two others between any two unless `ledger.anywhere`.

    The last two batches of a partition are spared: which offsets a damaged tail held is not always
    known.
    """
    found = [
        (place, number, *batch)
        for place in sorted(ledger.values)
        for number, batch in enumerate(list(batches_of(server, place))[:-2])
    ]
    rng.shuffle(found)
    chosen: set[tuple[TopicPartition, int]] = set()
    for place, number, path, position, header in found:
        near = any((place, number + step) in chosen for step in (-2, -1, 1, 2))
        if not count or (near and not ledger.anywhere):
            continue
        count -= 1
        chosen.add((place, number))
        hit = ledger.hit.setdefault(place, set())
        offsets = range(header.base_offset, header.next_offset)
        hit.update(offsets)
        at = rng.randrange(batches.HEADER_BYTES if rng.random() < 0.5 else header.length)
        with path.open("r+b") as file:
            file.seek(position + at)
            byte = file.read(1)[0] ^ 1 << rng.randrange(8)
            file.seek(position + at)
            file.write(bytes([byte]))
    assert not count, f"{count} flips found no batch"


def read(server: EmbeddedServer, ledger: Ledger, *, repaired: bool) -> Readings:
    found = Readings()
    for place, values in ledger.values.items():
        got, lost = _read_one(server, place, found)
        hit = ledger.hit.get(place, set())
        found.wrong += sum(values.get(offset) != value for offset, value in got.items())
        found.missing += sum(offset not in got for offset in values if offset not in hit)
        if repaired:
            found.errors += bool(lost)
            continue
        # What the broker still has in memory may be read: it is right, or it counts as wrong.
        found.untold += len(hit - lost - set(got))
        found.beyond += len(lost - hit)
    return found


def _read_one(
    server: EmbeddedServer, place: TopicPartition, found: Readings
) -> tuple[dict[int, bytes], set[int]]:
    got: dict[int, bytes] = {}
    lost: set[int] = set()
    deadline = monotonic_s() + PATIENCE_S
    with Consumer(server.address, auto_offset_reset="earliest") as consumer:
        consumer.assign([place])
        (end,) = consumer.end_offsets([place], timeout_s=PATIENCE_S).values()
        while True:
            try:
                if consumer.position(place, timeout_s=PATIENCE_S) >= end:
                    return got, lost
                for record in consumer.poll(0.2):
                    got[record.offset] = record.value or b""
            except errors.DataLoss as told:
                found.told += 1
                lost |= set(range(int(told.details["offset"]), int(told.details["next_offset"])))
            except errors.PkError as error:
                print(f"{place}: {type(error).__name__}: {error}", flush=True)
                found.errors += 1
                return got, lost
            if monotonic_s() > deadline:
                print(f"{place}: stands at {consumer.position(place)} of {end}", flush=True)
                found.errors += 1
                return got, lost


def repair(server: EmbeddedServer) -> int:
    """Repair every range; return how many there were."""
    command = [PK, "log", "repair", server.data, "--json", "--yes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    return len(json.loads(done.stdout)["ranges"])


def one_round(
    server: EmbeddedServer, rng: random.Random, mode: str, scale: int, *, anywhere: bool
) -> list[Verdict]:
    ledger = Ledger(anywhere=anywhere)
    with server:
        with AdminClient(server.address) as admin:
            for codec in CODECS:
                admin.create_topic(f"t-{codec}", PARTITIONS, SETTINGS)
        fill(server, ledger, rng, 100 * scale)
        if mode == "while it runs":
            flip(server, ledger, rng, 4 * scale)
            before = read(server, ledger, repaired=False)
        elif mode == "after a kill":
            for role in ("supervisor", "broker"):
                server.kill(role)
    if mode != "while it runs":
        flip(server, ledger, rng, 4 * scale)
        with server:
            before = read(server, ledger, repaired=False)
    with server:
        fill(server, ledger, rng, 20)
        again = read(server, ledger, repaired=False)
    ranges = repair(server)
    with server:
        fill(server, ledger, rng, 20)
        after = read(server, ledger, repaired=True)
    hits = sum(len(hit) for hit in ledger.hit.values())
    case = f"{4 * scale} flips {'anywhere ' if anywhere else ''}{mode}"
    return [
        Verdict(case, before.kept(ledger), f"{hits} records hit: {before}"),
        Verdict(f"{case}, appended to and restarted", again.kept(ledger), str(again)),
        Verdict(f"{case}, repaired", after.kept(ledger) and ranges > 0, f"{ranges} gaps: {after}"),
    ]


def run(seed: int, work: Path, short: bool) -> list[Verdict]:
    rng = random.Random(seed)
    rounds, scale = (1, 3) if short else (4, 20)
    verdicts = []
    for number in range(rounds):
        for mode in MODES:
            server = EmbeddedServer(work / f"{number}-{mode.replace(' ', '-')}")
            anywhere = not short and number == rounds - 1
            verdicts += one_round(server, rng, mode, scale, anywhere=anywhere)
    return verdicts + replicated(rng, work, short)


def replicated(rng: random.Random, work: Path, short: bool) -> list[Verdict]:
    """Run the same on three nodes; a case that raises is a broken verdict, and the others still
    run.
    """
    verdicts = []
    for number in range(1 if short else 3):
        for name in replica_damage.CASES:
            home = work / f"replicas-{number}-{name.replace(' ', '-')}"
            try:
                verdicts += replica_damage.run(rng, home, 1 + number, name)
            except Exception as error:
                traceback.print_exc()
                verdicts.append(Verdict(name, False, f"{type(error).__name__}: {error}"))
    return verdicts
