"""Converts a broker's report of a partition it leads for the copier and the owner.  Pure."""

from __future__ import annotations

from pk import errors
from pk.log.encoding import DECODED_BYTES_MAX
from pk.log.storage import Storage
from pk.tiering.copier import CopySettings, View
from pk.tiering.plan import LogStart
from pk.tiering.uploads import PartitionDirectory
from pk.types import NONE, AbortedTransaction, Epoch, Offset
from pk.wire import pk_pb2 as wire


def _epochs(description: wire.TierPartition) -> tuple[tuple[Epoch, Offset], ...]:
    """Returns the epochs of the leader's log, each with its first offset."""
    return tuple((each.epoch, each.start_offset) for each in description.epochs)


def aborted_end(description: wire.TierPartition) -> Offset:
    """Returns the offset below which the description names every aborted transaction; the copier
    takes no record from there on (server/handlers/tier Y3)."""
    if description.HasField("aborted_end"):
        return min(description.aborted_end, description.last_stable_offset)
    return description.last_stable_offset


def aborted_of(description: wire.TierPartition) -> list[AbortedTransaction]:
    """Returns the aborted transactions that the description names."""
    return [
        AbortedTransaction(each.producer_id, each.first_offset, each.last_offset)
        for each in description.aborted
    ]


def stable_limit(
    description: wire.TierPartition, start: Offset, limit: Offset, *, whole: bool
) -> Offset:
    """Returns how far `[start, limit)` can be copied with the aborted transactions that the
    description names.  It may be newer than the request, and name fewer of them.

    Raises `TierUnavailable` if nothing can be copied, or with `whole` if a part cannot.
    """
    end = min(limit, aborted_end(description))
    if end <= start or (whole and end < limit):
        raise errors.TierUnavailable(
            f"the broker names the aborted transactions below {end}; [{start}, {limit}) waits for "
            "its next description"
        )
    return end


def view_of(description: wire.TierPartition, retry_backoff_ms: int) -> View:
    """Returns the partition in the form that the copier needs."""
    configs = description.configs
    return View(
        leader_epoch=description.leader_epoch,
        ready=description.ready,
        log_start=description.log_start,
        local_log_start=description.local_log_start,
        last_stable_offset=aborted_end(description),
        log_end=description.log_end,
        epochs=_epochs(description),
        settings=CopySettings(
            max_lag_ms=int(configs["tier_max_lag_ms"]),
            file_bytes=int(configs["tier_file_bytes"]),
            drop_delay_ms=int(configs["local_drop_delay_ms"]),
            retry_backoff_ms=retry_backoff_ms,
        ),
    )


def partition_directory_of(
    description: wire.TierPartition, storage: Storage, path: str
) -> PartitionDirectory:
    """Returns the partition in the form that an upload needs.

    The size bound of decoded batches is the largest one.  Stored batches were within the topic's
    bound when they were appended, even if that bound has changed since (L13).
    """
    dense = "compact" not in description.configs["cleanup_policy"]
    return PartitionDirectory(storage, path, DECODED_BYTES_MAX, dense, _epochs(description))


def log_start_of(description: wire.TierPartition) -> LogStart:
    """Returns the log start in the form that the owner needs.

    The epoch is NONE if the leader's epoch cache does not reach down to the log start (T9).
    """
    found = NONE
    for each in description.epochs:
        if each.start_offset < min(description.log_start, description.known_log_start):
            found = each.epoch
    return LogStart(
        description.log_start,
        found,
        description.tiered_end,
        description.leader_epoch,
        description.known_log_start,
    )
