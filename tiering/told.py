"""What a broker tells of a partition it leads, as the copier and the owner take it.  Pure."""

from __future__ import annotations

from pk.tiering.copier import CopySettings, View
from pk.tiering.plan import LogStart
from pk.types import NONE
from pk.wire import pk_pb2 as wire


def view_of(told: wire.TierPartition, retry_backoff_ms: int) -> View:
    """For the copier."""
    configs = told.configs
    return View(
        leader_epoch=told.leader_epoch,
        ready=told.ready,
        log_start=told.log_start,
        local_log_start=told.local_log_start,
        last_stable_offset=told.last_stable_offset,
        log_end=told.log_end,
        epochs=tuple((each.epoch, each.start_offset) for each in told.epochs),
        settings=CopySettings(
            max_lag_ms=int(configs["tier_max_lag_ms"]),
            file_bytes=int(configs["tier_file_bytes"]),
            drop_delay_ms=int(configs["local_drop_delay_ms"]),
            retry_backoff_ms=retry_backoff_ms,
        ),
    )


def log_start_of(told: wire.TierPartition) -> LogStart:
    """For the owner; its epoch is NONE if the leader's cache does not reach down to it."""
    found = NONE
    for each in told.epochs:
        if each.start_offset < told.log_start:
            found = each.epoch
    return LogStart(told.log_start, found, told.tiered_end, told.leader_epoch)
