"""The tier process configures its allocators before the libraries that contain them are loaded
(tiering/resources Z2).
"""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, sys
import pk.server.tier.node
assert "deltalake" not in sys.modules, "its allocator has read its settings already"
from pk.tiering import resources
os.environ["TOKIO_WORKER_THREADS"] = "7"
resources.configure()
import pyarrow
assert pyarrow.cpu_count() == resources.ARROW_THREADS
assert os.environ["_RJEM_MALLOC_CONF"] == resources.DELTA_MALLOC
assert os.environ["TOKIO_WORKER_THREADS"] == "7", "the user's word stands"
import deltalake
"""


def test_before_anything_is_loaded() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "jemalloc" not in done.stderr, "it did not understand its settings"
