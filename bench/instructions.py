"""`python -m bench.instructions TREE NAME…`: instructions of clients of this pk and an earlier one.

On a shared machine the CPU time of one build differs by 10 % and more between rounds.  The number
of instructions that a client executes differs by less than 3 %, whatever else runs.  valgrind's
callgrind counts them (Debian package `valgrind`).  Each mode runs twice, with few and with more
records; the difference, divided by the difference of the records, leaves out the start and the end
of the process.  The servers run without valgrind and are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

from bench import values
from bench.earlier import EarlierPk
from bench.pk_side import PkSide
from bench.runs import ROOT

#: Few and more records of each mode, by the name of its case.
RECORDS = {
    "produce_record": ("record", 300_000, 1_200_000),
    "produce_columnar_lists": ("lists", 2_000_000, 8_000_000),
    "produce_columnar": ("prebuilt", 2_000_000, 8_000_000),
    "consume_record": ("records", 300_000, 1_200_000),
    "consume_columnar": ("batches", 2_000_000, 8_000_000),
}
CONSUMING = ("records", "batches")
_TIMEOUT_S = 1800
_COUNTED = re.compile(r"Collected : (\d+)")


class NotCounted(Exception):
    """The client failed, or valgrind did not say its count."""


def per_record(side: PkSide, folder: Path, name: str) -> float:
    """Return how many instructions the client executes per record.  Raises `NotCounted`."""
    mode, few, more = RECORDS[name]
    found = {count: _count(side, folder, f"{name}-{count}", mode, count) for count in (few, more)}
    return (found[more] - found[few]) / (more - few)


def _count(side: PkSide, folder: Path, topic: str, mode: str, records: int) -> int:
    side.create_topic(topic)
    command = [
        sys.executable, "-m", "bench.pk_client", mode, "--bootstrap", side.address,
        "--topic", topic, "--values", str(folder / "values.txt"), "--records", str(records),
        "--warm-up", "0",
    ]  # fmt: skip
    with side.its_pk() if isinstance(side, EarlierPk) else nullcontext():
        if mode in CONSUMING:
            filling = [each if each != mode else "prebuilt" for each in command]
            subprocess.run(filling, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
        ended = subprocess.run(
            ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", *command],
            cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": "0"}, timeout=_TIMEOUT_S,
            capture_output=True, text=True,
        )  # fmt: skip
    side.delete_topic(topic)
    counted = _COUNTED.search(ended.stderr)
    if ended.returncode or counted is None:
        raise NotCounted(f"{mode}, {records} records: {ended.stderr[-2000:]}")
    return int(counted.group(1))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.instructions", description=__doc__)
    parser.add_argument("tree", type=Path, help="the earlier checkout: git worktree add DIR COMMIT")
    parser.add_argument("names", nargs="*", choices=[*RECORDS, []], default=[], metavar="NAME")
    given = parser.parse_args()
    if shutil.which("valgrind") is None:
        parser.error("valgrind is not installed: apt-get install valgrind")
    with tempfile.TemporaryDirectory(prefix="pk-bench-") as made:
        folder = Path(made)
        values.write(folder / "values.txt", values.make())
        for name in given.names or RECORDS:
            found: dict[str, float] = {}
            for what, side in (("this", PkSide()), ("earlier", EarlierPk(given.tree.resolve()))):
                side.start(folder / f"{name}-{what}")
                try:
                    found[what] = per_record(side, folder, name)
                finally:
                    side.stop()
            found["ratio"] = found["earlier"] / found["this"]  # above 1 = this one is better
            rounded = {key: round(figure, 3) for key, figure in found.items()}
            print(json.dumps({"name": name, **rounded}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
