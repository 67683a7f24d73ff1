"""Commits to a table of many files that no job has merged (tiering/delta_checkpoint).

    python -m bench.aged_table [--files 100000] [--commits 100] [--checkpoint-every N]

One owner's table in a directory, without a server, in a process that is set up as the tier's is
(tiering/resources).  The table first gets its files, in the largest commits that an owner makes.
Then each commit adds one file, all to one partition, which is the worst case.  It prints one line
of JSON: the CPU time of a commit in seconds (mean, median, largest; checkpoints included), the
number of checkpoints, and the peak memory of the process in MB before the files, with them, and at
the end.

--checkpoint-every: a checkpoint after exactly so many commits, to compare with.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import tempfile
import time
from pathlib import Path

from pk import settings
from pk.clock import SystemClock
from pk.tiering import delta_checkpoint, layout, plan, resources
from pk.tiering.data_files import DataFile, NewFile
from pk.tiering.delta import DeltaTables
from pk.tiering.fsspec_store import open_store
from pk.tiering.store_settings import StoreSettings
from pk.tiering.table import Commit, Snapshot

TOPIC, TOPIC_ID = "aged", "5f0b2b0e-7a1e-4f0c-9a51-3f2f5d1c7a10"
ROWS = 10


def commit_of(read: Snapshot, count: int) -> Commit:
    """Return a commit that appends `count` files to partition 0."""
    counters, adds = read.partition(0), []
    for _ in range(count):
        start, end = counters.end, counters.end + ROWS
        path = layout.data_path(layout.DataName(0, start, end, 0, "a", 0, 0))
        file = DataFile(path, 0, start, end - 1, 1_700_000_000_000, 1_700_000_000_999, ROWS, 1_000)
        adds.append(NewFile(file, 1_700_000_001_000))
        counters = counters._replace(end=end, epoch=0, rows=counters.rows + ROWS)
    return Commit(read, tuple(adds), (), {0: counters})


def peak_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


async def measured(root: Path, files: int, commits: int) -> dict[str, object]:
    chosen = StoreSettings.of(settings.SERVER.resolve({"tier_url": root.as_uri()}))
    store = open_store(chosen, SystemClock())
    tables = DeltaTables(chosen, store, SystemClock())
    try:
        table = tables.table(TOPIC, TOPIC_ID)
        await table.create()
        snapshot = await table.load([0])
        assert snapshot is not None
        empty_mb = peak_mb()
        while len(snapshot.files) < files:
            count = min(plan.ACTIONS_PER_COMMIT_MAX, files - len(snapshot.files))
            snapshot = await table.commit(commit_of(snapshot, count))
        filled_mb, log = peak_mb(), root / layout.table_path(TOPIC, TOPIC_ID) / "_delta_log"
        before = len(list(log.glob("*.checkpoint.parquet")))
        spent = []
        for _ in range(commits):
            snapshot.files_of(0)  # the owner's plan needs the files by partition
            commit = commit_of(snapshot, 1)
            begin = time.process_time()
            snapshot = await table.commit(commit)
            spent.append(time.process_time() - begin)
    finally:
        await tables.close()
        await store.close()
    return {
        "files": len(snapshot.files),
        "commits": commits,
        "checkpoints": len(list(log.glob("*.checkpoint.parquet"))) - before,
        "mean_s": round(statistics.fmean(spent), 4),
        "median_s": round(statistics.median(spent), 4),
        "most_s": round(max(spent), 4),
        "peak_mb": [empty_mb, filled_mb, peak_mb()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--commits", type=int, default=100)
    parser.add_argument("--checkpoint-every", type=int)
    given = parser.parse_args()
    if given.checkpoint_every:
        delta_checkpoint.INTERVAL = delta_checkpoint.COMMITS_MOST = given.checkpoint_every
    resources.configure()
    with tempfile.TemporaryDirectory() as directory:
        found = asyncio.run(measured(Path(directory), given.files, given.commits))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
