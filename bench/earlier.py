"""`python -m bench.earlier TREE NAME …`: this pk beside an earlier one, whose checkout is TREE.

Both sides are pk: an earlier commit takes the place of Kafka, so a change of a few percent shows
in interleaved rounds on a noisy machine (bench M1).  The clients of both sides run this bench's
code over the public API, each with its own `pk`.  The server of TREE runs in a process of its own,
and so do the administrative calls to it: the two builds may not speak the same protocol.

The line of a row has the quartiles of the ratios of adjacent rounds, above 1 where this pk is
better: of the case's own unit, and of the CPU time a record.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench import cases, processes
from bench.measuring import Bench, Result
from bench.pk_side import STOP_TIMEOUT_S, PkSide
from bench.runs import Sample
from bench.sides import SideFailed

NAMES = ("produce_columnar", "consume_columnar", "produce_record", "consume_record", "latency")


class EarlierPk(PkSide):
    """One node of the pk in another checkout, with the clients of that checkout."""

    def __init__(self, tree: Path) -> None:
        super().__init__()
        self._tree = tree
        self._process: subprocess.Popen[str] | None = None
        self.name = "earlier pk"
        self.description = f"pk of {_commit(tree)}, one node without a tier, its Python client"

    def start(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.earlier", "--serve", str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self._environment(),
        )  # fmt: skip
        self.address = self._ask("start")["address"]
        self._admin = _RemoteAdmin(self._ask)

    def stop(self) -> None:
        if self._process is not None:
            processes.thaw(self.pids())
            self._ask("stop")
            self._process.wait(STOP_TIMEOUT_S)
            self._process = None

    def pids(self) -> list[int]:
        return processes.children(self._process.pid)[1:] if self._process is not None else []

    def probe(self) -> dict[int, int]:
        found = self._ask("probe")
        return {int(partition): epoch for partition, epoch in found.items()}

    def _client(self, *arguments: Any, **named: Any) -> Sample:
        with self.its_pk():
            return super()._client(*arguments, **named)

    def produce(
        self,
        topic: str,
        values: Path,
        records: int,
        compression: str,
        mode: str,
        batch_bytes: int | None = None,
    ) -> Sample:
        mode = "prebuilt" if mode == "fill" else mode  # as plans fill topics of Kafka
        return super().produce(topic, values, records, compression, mode, batch_bytes)

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self._tree / "src")}

    @contextmanager
    def its_pk(self) -> Iterator[None]:
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = str(self._tree / "src")
        try:
            yield
        finally:
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before

    def _ask(self, call: str, **arguments: Any) -> Any:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps({"call": call, **arguments}), file=process.stdin, flush=True)
        line = process.stdout.readline()
        if not line:
            raise SideFailed(f"the earlier pk ended in {call}")
        found = json.loads(line)
        if "failed" in found:
            raise SideFailed(f"the earlier pk, {call}: {found['failed']}")
        return found["result"]


class _RemoteAdmin:
    """The administrative calls that `PkSide` makes, carried out by the serving process."""

    def __init__(self, ask: Any) -> None:
        self._ask = ask

    def create_topic(
        self, topic: str, partitions: int, configs: Mapping[str, str] | None = None
    ) -> None:
        self._ask("create_topic", topic=topic, partitions=partitions, configs=configs)

    def delete_topic(self, topic: str) -> None:
        self._ask("delete_topic", topic=topic)

    def describe_topics(self, topics: Sequence[str]) -> list[SimpleNamespace]:
        leaders = self._ask("leaders", topic=topics[0])
        return [SimpleNamespace(leader=leader) for leader in leaders]


def serve(folder: Path) -> None:
    """Carry out the calls that standard input brings, one object a line, with the `pk` of this
    process.
    """
    side = PkSide()

    def leaders(topic: str) -> list[int]:
        return [each.leader for each in side._admin.describe_topics([topic])]

    def start() -> dict[str, str]:
        side.start(folder)
        return {"address": side.address}

    def stop() -> None:
        side._admin.close()
        side._server.stop(STOP_TIMEOUT_S)

    calls: dict[str, Callable[..., Any]] = {
        "start": start,
        "stop": stop,
        "probe": side.probe,
        "create_topic": side.create_topic,
        "delete_topic": side.delete_topic,
        "leaders": leaders,
    }
    for line in sys.stdin:
        asked = json.loads(line)
        call = asked.pop("call")
        try:
            answer: dict[str, Any] = {"result": calls[call](**asked)}
        except Exception as failure:  # the asking process reports it
            answer = {"failed": f"{type(failure).__name__}: {failure}"}
        print(json.dumps(answer), flush=True)
        if call == "stop":
            return


def row(result: Result, pk_mode: str) -> dict[str, Any]:
    """Return the line of one row: the ratios of adjacent rounds; above 1 = this one is better."""
    this, earlier = result.pk[pk_mode], result.peer[pk_mode]
    less = result.variant.less_is_better
    pairs = list(zip(this, earlier, strict=True))
    return {
        "name": result.case.name,
        "variant": result.variant.name,
        "mode": pk_mode,
        "unit": result.variant.unit,
        "this": statistics.median(each.value for each in this),
        "earlier": statistics.median(each.value for each in earlier),
        "ratio": _spread([b.value / a.value if less else a.value / b.value for a, b in pairs]),
        "cpu_us": [round(statistics.median(map(_cpu_us, each)), 4) for each in (this, earlier)],
        "cpu_ratio": _spread([_cpu_us(b) / _cpu_us(a) for a, b in pairs]),
        "rounds": len(pairs),
    }


def _cpu_us(sample: Sample) -> float:
    """The CPU time of client and server a record; other load of the machine hardly moves it."""
    return 1e6 * (sample.client_cpu_s + sample.server_cpu_s) / sample.records


def _spread(ratios: list[float]) -> list[float]:
    """Return lower quartile, median and upper quartile."""
    found = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return [round(each, 3) for each in found]


def _commit(tree: Path) -> str:
    command = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]))
        return 0
    parser = argparse.ArgumentParser(
        prog="python -m bench.earlier", description="pk beside the pk of an earlier checkout."
    )
    parser.add_argument("tree", type=Path, help="the earlier checkout: git worktree add DIR COMMIT")
    parser.add_argument("names", nargs="*", choices=[*NAMES, []], default=[], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--scale", type=float, default=0.5)
    parser.add_argument("--only", default="none,idle", help="variants (none,idle)")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="pk-bench-"))
    try:
        with Bench(PkSide(), EarlierPk(given.tree.resolve()), folder, _say) as bench:
            for name in given.names or NAMES:
                case = cases.BY_NAME[name]
                both = replace(case, peer_modes=case.pk_modes, peer_records=case.records)
                only = given.only.split(",")
                for result in bench.measure(both, given.rounds, given.scale, only):
                    for mode in case.pk_modes:
                        print(json.dumps(row(result, mode)), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
