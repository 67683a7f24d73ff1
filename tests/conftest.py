"""What every suite shares: hypothesis profiles, the order of tests, and their groups."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

#: Tests that share a Spark session, and those beside them that have JVMs of their own or none.
SESSION = "tests/spark/"
NO_SESSION = tuple(f"{SESSION}test_columnar_{name}.py" for name in ("broker", "cluster", "decoder"))

#: Markers of tests that start real nodes.
REAL = ("integration", "spark", "s3", "chaos")

# A deadline would measure the machine, not the code.  A failure prints how to reproduce it.
_COMMON = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow],
}
settings.register_profile("dev", max_examples=50, **_COMMON)
settings.register_profile("long", max_examples=3000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

# A shell's background job ignores Ctrl-C, and so would the processes that the tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Helpers shared across suites: imported by their plain names; the repository's root is not on
# sys.path.
sys.path.insert(0, str(Path(__file__).parent / "fixtures"))
s3_server = importlib.import_module("versitygw").s3_server

# Spark's own way to say so, for sessions of any kind.
_java = importlib.import_module("java_archive")
os.environ.setdefault("SPARK_SUBMIT_OPTS", _java.quick())
os.environ.setdefault("SPARK_LAUNCHER_OPTS", _java.QUICK)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--rewrite`: write golden traces again instead of comparing them."""
    parser.addoption("--rewrite", action="store_true", help="write the golden traces again")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests that share a session, then the files that have a `long` test.

    One that began last would leave the other workers idle.
    """
    long = {scope_of(item.nodeid) for item in items if item.get_closest_marker("long")}

    def place(item: pytest.Item) -> tuple[bool, bool]:
        scope = scope_of(item.nodeid)
        return scope != SESSION, scope not in long

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Exclude modules and tests, which live until the end, from garbage collections."""
    gc.collect()
    gc.freeze()


def cpu_s() -> tuple[float, float]:
    """Return the CPU seconds of this process, and of its children that have ended."""
    spent = os.times()
    return spent.user + spent.system, spent.children_user + spent.children_system


CPU_BEFORE = pytest.StashKey[tuple[float, float]]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Real nodes are forked from a process that has loaded pk, unless a test is `executed`."""
    item.stash[CPU_BEFORE] = cpu_s()
    if "pk.cli.embedded" in sys.modules and any(map(item.get_closest_marker, REAL)):
        node_starts = importlib.import_module("node_starts")
        node_starts.install()
        node_starts.STARTS.executed = item.get_closest_marker("executed") is not None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Any:
    """Add what a test cost to its last report, which xdist sends to the process that prints."""
    report = yield
    if call.when == "teardown" and CPU_BEFORE in item.stash:
        spent = [now - then for now, then in zip(cpu_s(), item.stash[CPU_BEFORE], strict=True)]
        report.user_properties.append(("cpu_s", spent))
    return report


class CpuTimes:
    """Prints which files took the most CPU time: on a machine that is busy, durations do not say.

    A child counts in the test in which it was waited for.
    """

    SHOWN, LEAST_S = 25, 300.0

    def __init__(self) -> None:
        self.files: dict[str, list[float]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, spent in report.user_properties:
            if name == "cpu_s" and report.when == "teardown":
                own, children = self.files.get(report.location[0], (0.0, 0.0))
                self.files[report.location[0]] = [own + spent[0], children + spent[1]]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        total = [sum(column) for column in zip(*self.files.values(), strict=True)]
        if sum(total) < self.LEAST_S:
            return
        terminalreporter.section("CPU seconds: tests, their children")
        most = sorted(self.files.items(), key=lambda each: -sum(each[1]))[: self.SHOWN]
        for path, (own, children) in [("all files", total), *most]:
            terminalreporter.write_line(f"{own:8.1f} {children:8.1f}  {path}")


class FailuresAtOnce:
    """Prints a failure when it happens.

    After an internal error pytest prints no summary.  Then its last lines name what had failed, and
    the error.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.told: list[str] = []
        self.broken = False

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            last = report.longreprtext.strip().rpartition("\n")[2]
            self.told.append(f"FAILED {report.nodeid} ({report.when}): {last}")
            terminal.write_line(f"\n{self.told[-1]}")

    def pytest_internalerror(self, excrepr: object) -> None:
        self.broken = True
        self.told += [f"internal error: {line}" for line in str(excrepr).splitlines()[-12:]]

    def pytest_unconfigure(self) -> None:
        for line in self.told[-30:] if self.broken else ():
            print(line[:200])


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # a worker of xdist reports to the process that prints
        config.pluginmanager.register(FailuresAtOnce(config))
        config.pluginmanager.register(CpuTimes())


def scope_of(nodeid: str) -> str:
    """Return what runs in one worker: a file, or all tests that share a session."""
    file = nodeid.partition("::")[0]
    return SESSION if file.startswith(SESSION) and file not in NO_SESSION else file


class ScopesInOrder(LoadScopeScheduling):
    """Gives every worker that is free the next scope, in the order of the collection.

    Tests of a file may share a server.  `--dist loadgroup` could say which do; xdist 3.8 does not
    apply it under pytest 9.
    """

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ScopesInOrder | None:
    """`--dist loadfile` is ScopesInOrder."""
    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    return ScopesInOrder(config, log)
