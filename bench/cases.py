"""The benchmarks by name, and how one is measured on both sides (rules M1–M5 of the package)."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench import sides, values
from bench.runs import Sample
from bench.sides import Side
from pk.limits import MIB

COMPRESSIONS = ("none", "lz4")
#: Between rounds: deleted topics vanish and the disk takes a breath.
PAUSE_S = 1.5
#: Rule M6: what the topics of two rounds of both sides take.
TOUCH_BYTES = 5 * 1024 * MIB

Say = Callable[[str], None]


@dataclass(slots=True, frozen=True)
class Case:
    """One benchmark.  pk's figure is its first mode, the peer's the best of its modes."""

    name: str
    what: str
    against: str
    direction: str  #: produce | consume | latency
    pk_modes: tuple[str, ...]
    peer_modes: tuple[str, ...]
    least: float  #: ratio that must be reached
    aim: float
    records: int  #: a run, warm-up included, on pk; `peer_records` on the peer
    peer_records: int
    unit: str = "records/s"
    codecs: tuple[str, ...] = COMPRESSIONS
    less_is_better: bool = False  #: then the ratio is peer ÷ pk


CASES = (
    Case(
        name="produce_columnar",
        what="batches built from Python lists of bytes inside the timing, acks=all",
        against="Java ProducerPerformance",
        direction="produce",
        pk_modes=("lists", "prebuilt"),
        peer_modes=("java",),
        least=5.0,
        aim=8.0,
        records=12_000_000,
        peer_records=7_000_000,
    ),
    Case(
        name="consume_columnar",
        what="poll_batches, value bytes counted",
        against="Java ConsumerPerformance",
        direction="consume",
        pk_modes=("batches",),
        peer_modes=("java",),
        least=2.5,
        aim=5.0,
        records=12_000_000,
        peer_records=12_000_000,
    ),
    Case(
        name="produce_record",
        what="send per record, acks=all",
        against="the better of the Java and the confluent-kafka producer",
        direction="produce",
        pk_modes=("record",),
        peer_modes=("java", "confluent"),
        least=1.5,
        aim=2.5,
        records=5_000_000,
        peer_records=7_000_000,
    ),
    Case(
        name="consume_record",
        what="record by record, value bytes counted",
        against="confluent-kafka",
        direction="consume",
        pk_modes=("records",),
        peer_modes=("confluent",),
        least=3.0,
        aim=5.0,
        records=6_000_000,
        peer_records=4_000_000,
    ),
    Case(
        name="latency",
        what="p99 of produce to consume, one record in flight, acks=all",
        against="Java EndToEndLatency (whole milliseconds, 30,000 messages)",
        direction="latency",
        pk_modes=("latency",),
        peer_modes=("java",),
        least=1.0,
        aim=1.5,
        records=6_000,
        peer_records=30_000,
        unit="ms",
        codecs=("none",),
        less_is_better=True,
    ),
)
BY_NAME = {case.name: case for case in CASES}


@dataclass(slots=True)
class Result:
    """All rounds of one case and compression: samples by mode of each side."""

    case: Case
    compression: str
    pk: dict[str, list[Sample]] = field(default_factory=dict)
    peer: dict[str, list[Sample]] = field(default_factory=dict)

    @property
    def peer_mode(self) -> str:
        """The better one."""
        best = min if self.case.less_is_better else max
        return best(self.peer, key=lambda mode: median(self.peer[mode]))

    @property
    def ratio(self) -> float:
        pk, peer = median(self.pk[self.case.pk_modes[0]]), median(self.peer[self.peer_mode])
        return peer / pk if self.case.less_is_better else pk / peer


def median(samples: Sequence[Sample]) -> float:
    return statistics.median(sample.value for sample in samples)


def touch(path: Path, size: int) -> None:
    """Rule M6."""
    block = bytes(MIB)
    with path.open("wb", buffering=0) as file:
        for _ in range(size // MIB):
            file.write(block)
    path.unlink()


class Bench:
    """Two sides, one of them stopped at any time."""

    def __init__(self, pk: Side, peer: Side, folder: Path, say: Say) -> None:
        self.pk, self.peer = pk, peer
        self._folder = folder
        self._values = folder / "values.txt"
        self._say = say
        self._awake: Side | None = None
        self._numbers = itertools.count(1)

    def __enter__(self) -> Bench:
        self._say("touching the page cache")
        touch(self._folder / "touch", TOUCH_BYTES)
        values.write(self._values, values.make())
        for side in (self.pk, self.peer):
            self._say(f"starting {side.name}")
            side.start(self._folder / side.name)
            sides.settle(side)
            sides.freeze(side)
        return self

    def __exit__(self, *_: object) -> None:
        for side in (self.pk, self.peer):
            side.stop()

    def _wake(self, side: Side) -> None:
        """Rule M2."""
        if self._awake is side:
            return
        if self._awake is not None:
            sides.freeze(self._awake)
        self._awake = side
        sides.thaw(side)

    def measure(self, case: Case, compression: str, rounds: int, records: int | None) -> Result:
        """Interleaved rounds of `case`; `records` overrides those of one run of pk."""
        result = Result(case, compression)
        scale = 1.0 if records is None else records / case.records
        counts = {"pk": int(case.records * scale), "kafka": int(case.peer_records * scale)}
        topics = self._fill(case, compression, counts) if case.direction == "consume" else {}
        for number in range(rounds):
            turn = [(self.pk, case.pk_modes, result.pk), (self.peer, case.peer_modes, result.peer)]
            for side, modes, samples in turn if number % 2 == 0 else reversed(turn):
                self._wake(side)
                for mode in modes:
                    sample = self._round(side, case, compression, mode, counts[side.name], topics)
                    samples.setdefault(mode, []).append(sample)
                    label = f"{case.name} {compression} round {number + 1}/{rounds}"
                    self._say(f"{label} {side.name} {mode}: {sample.value:,.6g} {case.unit}")
        for side in (self.pk, self.peer):
            if side.name in topics:
                self._wake(side)
                side.delete_topic(topics[side.name])
        return result

    def _fill(self, case: Case, compression: str, counts: dict[str, int]) -> dict[str, str]:
        topics: dict[str, str] = {}
        for side, mode in ((self.pk, "prebuilt"), (self.peer, "fill")):
            self._wake(side)
            topics[side.name] = topic = f"{case.name}-{compression}-{next(self._numbers)}".replace(
                "_", "-"
            )
            self._say(f"filling {topic} of {side.name}")
            side.create_topic(topic)
            side.produce(topic, self._values, counts[side.name], compression, mode)
        return topics

    def _round(
        self,
        side: Side,
        case: Case,
        compression: str,
        mode: str,
        records: int,
        topics: dict[str, str],
    ) -> Sample:
        if case.direction == "consume":
            return side.consume(topics[side.name], records, mode)
        topic = f"{case.name}-{mode}-{next(self._numbers)}".replace("_", "-")
        side.create_topic(topic)
        try:
            if case.direction == "latency":
                return side.latency(topic, records)
            return side.produce(topic, self._values, records, compression, mode)
        finally:
            side.delete_topic(topic)
            time.sleep(PAUSE_S)
