"""What every suite shares: hypothesis profiles, and nothing that touches the world."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A deadline measures the machine, not the code; a failure prints what reproduces it.
_COMMON = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow],
}
settings.register_profile("dev", max_examples=50, **_COMMON)
settings.register_profile("ci", max_examples=150, **_COMMON)
settings.register_profile("long", max_examples=3000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

# A JVM of the tests lives for a minute and shares two cores with workers and a server: the first
# compiler alone has it up in half the time.  Spark's own way to say so, for sessions of any kind.
for _name in ("SPARK_SUBMIT_OPTS", "SPARK_LAUNCHER_OPTS"):
    os.environ.setdefault(_name, "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

# A shell's background job ignores Ctrl-C, and so would the processes that the tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Helpers shared across suites: imported by their plain names; the repository's root is not on
# sys.path.
sys.path.insert(0, str(Path(__file__).parent / "fixtures"))
s3_server = importlib.import_module("versitygw").s3_server


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--rewrite`: write golden traces again instead of comparing them."""
    parser.addoption("--rewrite", action="store_true", help="write the golden traces again")
