"""`python -m bench NAME … [--json] [--rounds N] [--records N] [--compression none,lz4]`.

NAME is one of the cases, several of them, or `all`.  With `--json` standard output is one line a
case; what happens meanwhile goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from bench import cases, report
from bench.cases import Bench
from bench.runs import RunFailed
from bench.sides import SideFailed


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
        "--records", type=int, help="records of one run of pk, warm-up included (1,000,000)"
    )
    parser.add_argument(
        "--compression",
        default="none,lz4",
        help="codecs to measure, the first is the headline (none,lz4)",
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page docs/bench.md")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="work in DIR and keep it (default: a temporary folder)",
    )
    given = parser.parse_args()
    given.codecs = given.compression.split(",")
    if unknown := [codec for codec in given.codecs if codec not in cases.COMPRESSIONS]:
        parser.error(f"unknown compression {unknown[0]!r}")
    if given.rounds < 1:
        parser.error("--rounds must be at least 1")
    return given


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    from bench.kafka.side import KafkaSide
    from bench.pk_side import PkSide

    given = _arguments()
    names = list(cases.BY_NAME) if "all" in given.names else list(dict.fromkeys(given.names))
    folder = given.keep or Path(tempfile.mkdtemp(prefix="pk-bench-"))
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    try:
        with Bench(PkSide(), KafkaSide(), folder, _say) as bench:
            descriptions = {side.name: side.description for side in (bench.pk, bench.peer)}
            for name in names:
                case = cases.BY_NAME[name]
                codecs = [codec for codec in given.codecs if codec in case.codecs]
                results = [
                    bench.measure(case, codec, given.rounds, given.records)
                    for codec in codecs or case.codecs[:1]
                ]
                lines.append(report.line(results, descriptions))
                if given.json:
                    print(json.dumps(lines[-1]), flush=True)
    except (SideFailed, RunFailed) as failure:
        _say(f"{type(failure).__name__}: {failure}")
        return 1
    finally:
        if given.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    if not given.json:
        from rich.console import Console

        Console().print(report.table(lines))
    if given.write:
        report.write_page(given.write, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
