"""Which changes of the sources make another campaign."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from pk.sim import campaign_key

CODE = "def f():\n    return 1\n"
SOURCES = ("types.py", "log/segment.py")


def package(home: Path) -> Path:
    """Return a package as it is in a checkout: the simulator is a link."""
    for name in ("pk/types.py", "log/segment.py", "elsewhere/sim/options.py",
                 "elsewhere/sim/faults.py", "elsewhere/sim/long.py"):  # fmt: skip
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(CODE)
    (home / "pk" / "log").symlink_to(home / "log")
    (home / "pk" / "sim").symlink_to(home / "elsewhere" / "sim")
    return home / "pk"


def digests(home: Path, sources: Sequence[str] = SOURCES) -> tuple[str, str]:
    files = [home / name for name in sources]
    return campaign_key.tested(home, files), campaign_key.simulator(home)


@pytest.mark.parametrize("name", SOURCES)
def test_production_code_that_changes_is_another_campaign(tmp_path: Path, name: str) -> None:
    home = package(tmp_path)
    before = digests(home)
    (home / name).write_text(CODE.replace("1", "2"))
    assert digests(home)[0] != before[0]
    assert digests(home)[1] == before[1]
    (home / name).write_text(CODE)
    assert digests(home) == before
    (home / "log" / "more.py").write_text(CODE)
    assert digests(home, (*SOURCES, "log/more.py"))[0] != before[0]


def test_words_about_the_code_make_no_other_campaign(tmp_path: Path) -> None:
    home = package(tmp_path)
    before = digests(home)
    for name in (*SOURCES, "sim/faults.py", "sim/options.py"):
        (home / name).write_text('"""Theory."""\n# why\ndef f():\n    "What."\n\n    return (1)\n')
    assert digests(home) == before


def test_how_options_are_drawn_is_a_part_of_it_and_the_rest_of_the_simulator_is_not(
    tmp_path: Path,
) -> None:
    home = package(tmp_path)
    before = digests(home)
    (home / "sim" / "faults.py").write_text("more = 1")
    after = digests(home)
    assert (after[0], after[1] != before[1]) == (before[0], True)
    (home / "sim" / "long.py").write_text("more = 1")
    assert digests(home) == after
    (home / "sim" / "options.py").write_text("otherwise = 1")
    assert digests(home)[0] != after[0]


RUN = """
import logging
logging.disable(logging.CRITICAL)
from pathlib import Path
import pk
from pk.sim.campaign_key import imported
from pk.sim.long import run_seed
home = Path(pk.__file__).parent
before = set(imported(home))
run_seed(4, {"fault_ms": 500})
print(len(before), sorted(map(str, set(imported(home)) - before)))
print(sorted({path.relative_to(home).parts[0] for path in before if path.parent != home}))
"""


def test_a_history_runs_only_modules_that_are_in_the_key() -> None:
    done = subprocess.run([sys.executable, "-c", RUN], check=True, capture_output=True, text=True)
    counted, parts = done.stdout.splitlines()
    number, later = counted.split(" ", 1)
    assert int(number) > 300
    assert later == "[]"
    expected = "['client', 'compaction', 'log', 'server', 'sparkconnector', 'tiering', 'wire']"
    assert parts == expected
