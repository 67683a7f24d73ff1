"""How a case is measured: in interleaved rounds, with one role running at a time (bench M1, M2,
M6).
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from bench import plans, sides, values
from bench.cases import Case, Variant
from bench.runs import Sample
from bench.sides import ClusterSide, Party, Side, TieredSide
from bench.spark.worker import SparkSession
from pk.limits import MIB

#: Between rounds: deleted topics vanish and the disk takes a breath.
PAUSE_S = 1.5
#: bench M6: the bytes that the topics of two rounds take on both sides.
TOUCH_BYTES = 5 * 1024 * MIB

P = TypeVar("P", bound=Party)
Say = Callable[[str], None]


@dataclass(slots=True)
class Result:
    """All rounds of one row: the samples of each role by mode."""

    case: Case
    variant: Variant
    pk: dict[str, list[Sample]] = field(default_factory=dict)
    peer: dict[str, list[Sample]] = field(default_factory=dict)

    @property
    def peer_mode(self) -> str:
        """Return the peer's better mode."""
        best = min if self.variant.less_is_better else max
        return best(self.peer, key=lambda mode: median(self.peer[mode]))

    @property
    def ratio(self) -> float:
        pk, peer = median(self.pk[self.case.pk_modes[0]]), median(self.peer[self.peer_mode])
        above, below = (peer, pk) if self.variant.less_is_better else (pk, peer)
        return above / below if below else 0.0


def median(samples: Sequence[Sample]) -> float:
    return statistics.median(sample.value for sample in samples)


def touch(path: Path, size: int) -> None:
    """Write a file of `size` bytes and remove it (bench M6)."""
    block = bytes(MIB)
    with path.open("wb", buffering=0) as file:
        for _ in range(size // MIB):
            file.write(block)
    path.unlink()


class Bench:
    """The sides, started when first needed; all that are not measured are stopped (bench M2)."""

    def __init__(
        self,
        pk: Side,
        peer: Side,
        folder: Path,
        say: Say,
        tiered: TieredSide | None = None,
        size_gb: float = 20.0,
        clusters: Mapping[str, ClusterSide] | None = None,
    ) -> None:
        self.pk, self.peer = pk, peer
        self._clusters = clusters or {}
        self._tiered = tiered
        self.folder = folder
        self.values = folder / "values.txt"
        self.say = say
        self.size_gb = size_gb
        self.sessions: dict[str, SparkSession] = {}  #: by kind; started as any other party
        self._started: list[Party] = []
        self._awake: list[Party] = []
        self._own: dict[str, Any] = {}
        self._numbers = itertools.count(1)

    def __enter__(self) -> Bench:
        self.say("touching the page cache")
        touch(self.folder / "touch", TOUCH_BYTES)
        values.write(self.values, values.make())
        return self

    def __exit__(self, *_: object) -> None:
        for party in reversed(self._started):
            party.stop()

    @property
    def tiered(self) -> TieredSide:
        assert self._tiered is not None, "no side with a tier was given"
        return self._tiered

    def cluster(self, role: str) -> ClusterSide:
        """Return three nodes of a role's side."""
        return self._clusters[role]

    def party(self, name: str, make: Callable[[], P]) -> P:
        """Return a party of a plan's own; the bench starts and stops it as any other."""
        if name not in self._own:
            self._own[name] = make()
        found: P = self._own[name]
        return found

    def descriptions(self) -> dict[str, str]:
        """Return the descriptions of the sides that were measured."""
        return {party.name: party.description for party in self._started}

    def wake(self, *wanted: Party) -> None:
        """Let only the `wanted` parties run, and freeze the others (bench M2).

        The wanted parties start in their order; each has settled before the next one starts.
        """
        for party in reversed([one for one in self._awake if one not in wanted]):
            sides.freeze(party)
            self._awake.remove(party)
        for party in wanted:
            if party in self._awake:
                continue
            if party in self._started:
                sides.thaw(party)
            else:
                self.say(f"starting {party.name}")
                self._started.append(party)
                party.start(self.folder / party.name.replace(" ", "-"))
                sides.settle(party)
            self._awake.append(party)

    def fresh(self, prefix: str) -> str:
        """Return a topic name that was never used."""
        return f"{prefix}-{next(self._numbers)}".replace("_", "-").replace(" ", "-")

    def measure(
        self, case: Case, rounds: int, scale: float = 1.0, only: Iterable[str] = ()
    ) -> list[Result]:
        """Measure every variant of a case, or those named in `only`."""
        chosen = [v for v in case.variants if v.name in only] or list(case.variants)
        rounds = 1 if case.exact else rounds
        if case.joint:
            whole = self._rounds(case, case.variants[0], rounds, scale)
            return [_share(whole, variant) for variant in chosen]
        return [self._rounds(case, variant, rounds, scale) for variant in chosen]

    def _rounds(self, case: Case, variant: Variant, rounds: int, scale: float) -> Result:
        result = Result(case, variant)
        counts = {
            role: max(int(count * scale), min(case.records_least, count))
            for role, count in (("pk", case.records), ("peer", case.peer_records))
        }
        plan = plans.load(case.plan)(self, case, variant, counts)
        try:
            plan.prepare()
            for number in range(rounds):
                turn = [("pk", case.pk_modes, result.pk), ("peer", case.peer_modes, result.peer)]
                for role, modes, samples in turn if number % 2 == 0 else reversed(turn):
                    for mode in modes:
                        self.wake(*plan.parties(role))
                        sample = plan.round(role, mode)
                        samples.setdefault(mode, []).append(sample)
                        self._tell(case, variant, f"{number + 1}/{rounds} {role} {mode}", sample)
                        time.sleep(0 if case.exact else PAUSE_S)
        finally:
            plan.close()
        return result

    def _tell(self, case: Case, variant: Variant, where: str, sample: Sample) -> None:
        told = sample.figures | {name: part.value for name, part in sample.parts.items()}
        figures = ", ".join(f"{name} {number:,.6g}" for name, number in told.items())
        what = f"{sample.value:,.6g} {variant.unit}" if not case.joint else ""
        name = case.name if case.joint else f"{case.name} {variant.name}"
        self.say(f"{name} round {where}: {what} {f'({figures})' if figures else ''}")


def _share(whole: Result, variant: Variant) -> Result:
    """Return the part of joint rounds that concerns one variant."""

    def of(samples: dict[str, list[Sample]]) -> dict[str, list[Sample]]:
        return {
            mode: [each.parts[variant.name] for each in every] for mode, every in samples.items()
        }

    return Result(whole.case, variant, of(whole.pk), of(whole.peer))
