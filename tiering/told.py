"""What a broker tells of a partition it leads, as the copier and the owner take it.  Pure."""

from __future__ import annotations

from pk.log.encoding import DECODED_BYTES_MAX
from pk.log.storage import Storage
from pk.tiering.copier import CopySettings, View
from pk.tiering.plan import LogStart
from pk.tiering.uploads import Source
from pk.types import NONE, Epoch, Offset
from pk.wire import pk_pb2 as wire


def _epochs(told: wire.TierPartition) -> tuple[tuple[Epoch, Offset], ...]:
    """Of the leader's log: each epoch and its first offset."""
    return tuple((each.epoch, each.start_offset) for each in told.epochs)


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
        epochs=_epochs(told),
        settings=CopySettings(
            max_lag_ms=int(configs["tier_max_lag_ms"]),
            file_bytes=int(configs["tier_file_bytes"]),
            drop_delay_ms=int(configs["local_drop_delay_ms"]),
            retry_backoff_ms=retry_backoff_ms,
        ),
    )


def source_of(told: wire.TierPartition, storage: Storage, path: str) -> Source:
    """For an upload.  L13: what is stored was within the topic's bound when it came, whatever that
    is now.
    """
    dense = "compact" not in told.configs["cleanup_policy"]
    return Source(storage, path, DECODED_BYTES_MAX, dense, _epochs(told))


def log_start_of(told: wire.TierPartition) -> LogStart:
    """For the owner; its epoch is NONE if the leader's cache does not reach down to it (T9)."""
    found = NONE
    for each in told.epochs:
        if each.start_offset < min(told.log_start, told.known_log_start):
            found = each.epoch
    return LogStart(told.log_start, found, told.tiered_end, told.leader_epoch, told.known_log_start)
