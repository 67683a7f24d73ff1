"""The canaries of compaction: rules C1, C4, C7 and C8 broken, and what notices it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np

from pk.compaction import retain
from pk.compaction.retain import NO_HORIZON, Cleaning
from pk.log import swap
from pk.log.swapping import SegmentSwaps
from pk.log.writing import LocalLogWriter
from pk.server.broker import cleaning
from pk.server.replica.leader import EVERYTHING, Leader
from pk.sim.canary import HOT, SAFE, THREE, Canary

CLEANED = "V28 V29"


def _older_record_kept(stack: ExitStack) -> None:
    """Keep the oldest record of each key in a block, and drop the newer ones."""
    whole = retain.retain_rows

    def wrong(rows: Any, offset_map: Any, cleaning: Cleaning) -> Any:
        found = whole(rows, offset_map, cleaning)
        keep = found.keep.copy()
        first: dict[object, int] = {}
        for at, key in enumerate(rows.keys.to_pylist()):
            if rows.offsets[at] < cleaning.end and first.setdefault(key, at) != at:
                keep[at], keep[first[key]] = False, True
        return found._replace(keep=keep)

    stack.enter_context(patch.object(retain, "retain_rows", wrong))


def _tombstone_removed_early(stack: ExitStack) -> None:
    """Let every horizon that is set count as passed."""

    def passed(_self: Cleaning, horizons: Any) -> Any:
        return np.asarray(horizons != NO_HORIZON)

    stack.enter_context(patch.object(Cleaning, "passed", passed))


def _tombstone_removed_before_its_record(stack: ExitStack) -> None:
    """Remove tombstones while a replica that is down has the older record, and tell it nothing."""
    stack.enter_context(patch.object(Leader, "settled_end", EVERYTHING))
    stack.enter_context(patch.object(SegmentSwaps, "hides_from", lambda *_: False))


def _dirty_end_past_the_stable_offset(stack: ExitStack) -> None:
    """Clean up to the end of the log: records that are not committed replace committed ones."""
    whole = cleaning._plan_of

    def wrong(log: Any, limits: Any, _stable: int, now_ms: Any, *, reads: bool) -> Any:
        return whole(log, limits, log.written_end, now_ms, reads=reads)

    stack.enter_context(patch.object(cleaning, "_plan_of", wrong))


def _swap_that_syncs_nothing(stack: ExitStack) -> None:
    """Rename the files before the checkpoint that names the swap (log/swap: step 2)."""
    put = LocalLogWriter.swap

    def careless(self: LocalLogWriter, made: Any, segments: Any) -> None:
        with patch.object(swap, "write", lambda *_: None):
            put(self, made, segments)

    stack.enter_context(patch.object(LocalLogWriter, "swap", careless))


COMPACTION_CANARIES = {
    "an older record kept over a newer one": Canary(
        "C1",
        _older_record_kept,
        CLEANED,
        HOT,
        (),
        compacted={},
    ),
    "a tombstone removed early": Canary(
        "C4",
        _tombstone_removed_early,
        CLEANED,
        HOT,
        (),
        compacted={"delete_retention_ms": "3000"},
    ),
    "a tombstone removed while a replica has the older record": Canary(
        "C4",
        _tombstone_removed_before_its_record,
        CLEANED,
        SAFE,
        ("pause", "isolate"),
        nodes=THREE,
        copies=3,
        compacted={"min_insync_replicas": "1", "delete_retention_ms": "0"},
        fault_ms=8_000,
        fault_every_ms=(300, 1_500),
    ),
    "a cleaning past the last stable offset": Canary(
        "C1",
        _dirty_end_past_the_stable_offset,
        f"{CLEANED} V8 V14 liveness",
        SAFE,
        ("pause", "cut", "kill_leader"),
        nodes=THREE,
        copies=3,
        compacted={"min_insync_replicas": "2"},
        fault_ms=8_000,
        fault_every_ms=(150, 600),
        lag_ms=5_000,
    ),
    "a swap that is not decided": Canary(
        "C7",
        _swap_that_syncs_nothing,
        f"{CLEANED} V5 V12 V14 liveness assertion",
        HOT,
        ("death_in_swap", "power_in_swap"),
        compacted={},
        fault_ms=8_000,
    ),
}
