"""The other engines of the campaign: OPTIMIZE and Z-order by Delta's Spark library, VACUUM by
deltalake, beside pk's jobs.

The OPTIMIZE of deltalake does not notice that its files were replaced meanwhile (maintenance.md),
so it is no engine to run beside jobs.  Delta's Spark library has no S3 client here: in a campaign
on S3 deltalake takes its place, under the lease of the table, which keeps pk from replacing files.

It also leaves uploads that no version names, as a job does that died long ago.  Only a sweep may
remove them, and nothing else.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from load import TOPICS
from runs import RUN_S, Drivers

from pk import errors
from pk.client.maintenance_lease import MaintenanceLease
from pk.clock import SystemClock, block_s
from pk.tiering import layout
from pk.types import NONE

OPERATIONS = ("optimize", "z-order", "vacuum")
STATEMENTS = {
    "optimize": "OPTIMIZE delta.`{uri}`",
    "z-order": "OPTIMIZE delta.`{uri}` ZORDER BY (key)",
}
#: A merge that was under way when the lease was granted has landed after this time.
SETTLED_S = 3.0
PAUSE_S, SHORT_PAUSE_S = (1.0, 6.0), (0.2, 1.0)
#: Age of an upload that is left behind: a sweep takes those older than an hour.
AGE_S = 7_200
TARGET_BYTES = 40_000


class Outside(threading.Thread):
    """Runs one operation after the other on a random table; `counts` has what landed."""

    def __init__(
        self,
        drivers: Drivers,
        bootstrap: str,
        uris: dict[str, str],
        options: dict[str, str] | None,
        store: Path,
        rng: random.Random,
        broken: Callable[[str], None],
        *,
        short: bool,
    ) -> None:
        super().__init__(daemon=True)
        self.counts: Counter[str] = Counter()
        self._drivers, self._address = drivers, bootstrap
        self.left: list[Path] = []
        self._uris, self._options, self._store = uris, options, store
        self._rng, self._broken, self._short = rng, broken, short
        self._ended = threading.Event()

    @property
    def done(self) -> bool:
        """Whether each operation has landed."""
        return all(self.counts[name] for name in OPERATIONS)

    def run(self) -> None:
        pause_s = SHORT_PAUSE_S if self._short else PAUSE_S
        while not self._ended.wait(self._rng.uniform(*pause_s)):
            if self._short and self.done:
                return
            fewest = min(self.counts[name] for name in OPERATIONS)
            name = self._rng.choice([n for n in OPERATIONS if self.counts[n] == fewest])
            topic = self._rng.choice(TOPICS)
            try:
                self.operate(name, topic)
                self._leave(topic)
            except (DeltaError, errors.LeaseHeld):  # pk committed meanwhile: Delta's own rule
                self.counts[f"{name} conflicts"] += 1
            except BaseException as failure:
                self._broken(f"outside {name} of {topic}: {failure!r}")
                return

    def stop(self) -> None:
        """End after the operation under way."""
        self._ended.set()
        self.join(120)

    def operate(self, name: str, topic: str) -> None:
        """Run one operation on the newest version."""
        if name == "vacuum":
            self._table(topic).vacuum(retention_hours=168, dry_run=False)
        elif self._options is None:
            self._by_spark(name, topic)
            return
        else:
            with MaintenanceLease(self._address, topic, "optimize"):
                block_s(SETTLED_S)
                if name == "optimize":
                    self._table(topic).optimize.compact(target_size=TARGET_BYTES)
                else:
                    self._table(topic).optimize.z_order(["key"])
        self.counts[name] += 1

    def _table(self, topic: str) -> DeltaTable:
        return DeltaTable(self._uris[topic], storage_options=self._options)

    def _by_spark(self, name: str, topic: str) -> None:
        """Run a statement; a refused one and a killed one are tried again later."""
        statement = STATEMENTS[name].format(uri=self._home(topic))
        run = self._drivers.run("outside", topic, {"statement": statement})
        run.ended.wait(RUN_S)
        result = run.result
        if result is None:
            self.counts[f"{name} killed"] += 1
        elif "outcome" in result:
            self.counts[name] += 1
        elif "Concurrent" in result["error"] + result["told"]:
            self.counts[f"{name} conflicts"] += 1
        else:
            raise RuntimeError(str(result))

    def _leave(self, topic: str) -> None:
        """Leave an old upload that no version names: a copy of a file, under a name of its own."""
        home = self._home(topic)
        files = sorted(home.glob("partition=*/*.parquet"))
        if not files:
            return
        name = layout.DataName(0, 0, 1, NONE, f"{self._rng.getrandbits(64):016x}", 0, 0)
        path = home / layout.job_path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self._rng.choice(files), path)
        then_s = SystemClock().wall_ms() / 1000 - AGE_S
        os.utime(path, (then_s, then_s))
        self.left.append(path)

    def _home(self, topic: str) -> Path:
        """Return the directory of a table; an S3 server's objects are files, too."""
        found = urlsplit(self._uris[topic])
        if found.scheme == "file":
            return Path(unquote(found.path))
        return self._store / found.netloc / found.path.lstrip("/")
