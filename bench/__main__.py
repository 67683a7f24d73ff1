"""`python -m bench NAME … [--json] [--rounds N] [--scale X] [--only VARIANT,…] [--write FILE]`.

NAME is one case, several cases, or `all`.  With `--json`, standard output has one line per case;
progress goes to standard error.  A case that fails is reported and left out of the result; the
other cases are measured, and the exit code is 1.  `growth` measures curves instead of rounds, with
options of its own (`python -m bench growth --help`).
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from bench import cases, page, report
from bench.measuring import Bench
from bench.runs import RunFailed
from bench.sides import ClusterSide, SideFailed


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="pk beside Apache Kafka, on this machine."
    )
    parser.add_argument(
        "names",
        nargs="+",
        choices=[*cases.BY_NAME, "all"],
        metavar="NAME",
        help=f"{', '.join(cases.BY_NAME)}, all",
    )
    parser.add_argument("--json", action="store_true", help="one JSON line a name")
    parser.add_argument(
        "--rounds", type=int, default=5, help="interleaved rounds; the figure is their median (5)"
    )
    parser.add_argument(
        "--scale", type=float, default=1.0, help="so many times the records of a round (1)"
    )
    parser.add_argument(
        "--only", default="", help="variants to measure, where a case has them (none,lz4,idle,…)"
    )
    parser.add_argument("--size-gb", type=float, default=20.0, help="the log of deep_log (20)")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="merge into the page FILE and its store"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="work in DIR and keep it (default: a temporary folder)",
    )
    given = parser.parse_args()
    given.only = [name for name in given.only.split(",") if name]
    known = {variant.name for case in cases.CASES for variant in case.variants}
    if unknown := [name for name in given.only if name not in known]:
        parser.error(f"unknown variant {unknown[0]!r}")
    if given.rounds < 1:
        parser.error("--rounds must be at least 1")
    return given


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _measured(given: argparse.Namespace, bench: Bench, name: str) -> dict[str, object] | None:
    """Return the line of a case; None if it failed."""
    begin = time.monotonic()
    try:
        results = bench.measure(cases.BY_NAME[name], given.rounds, given.scale, given.only)
    except (SideFailed, RunFailed) as failure:
        _say(f"{name}: {type(failure).__name__}: {failure}")
        return None
    line = report.line(results, bench.descriptions(), given.size_gb)
    _say(f"{name}: {time.monotonic() - begin:.0f} s")
    if given.json:
        print(json.dumps(line), flush=True)
    if given.write:
        page.write(given.write, [line])
    return line


def main() -> int:
    from bench.kafka.cluster import KafkaCluster
    from bench.kafka.side import KafkaSide
    from bench.pk_cluster import PkCluster
    from bench.pk_side import PkSide

    given = _arguments()
    # a signal ended the run: stop the sides and remove the folder, as at the normal end
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    names = list(cases.BY_NAME) if "all" in given.names else list(dict.fromkeys(given.names))
    folder = given.keep or Path(tempfile.mkdtemp(prefix="pk-bench-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        tiered = PkSide(tiered=True)
        clusters: dict[str, ClusterSide] = {"pk": PkCluster(), "peer": KafkaCluster()}
        sides = (PkSide(), KafkaSide(), folder, _say, tiered, given.size_gb, clusters)
        with Bench(*sides) as bench:
            lines = [_measured(given, bench, name) for name in names]
    except (SideFailed, RunFailed) as failure:
        _say(f"{type(failure).__name__}: {failure}")
        return 1
    finally:
        if given.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    done = [line for line in lines if line is not None]
    if not given.json:
        from rich.console import Console

        Console().print(report.table(done))
    return 0 if len(done) == len(lines) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["growth"]:
        from bench.growth import command

        sys.exit(command.main(sys.argv[2:]))
    sys.exit(main())
