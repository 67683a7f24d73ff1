"""How long the next record of a group has waited: the lag of partitions as a time.

The lag of a partition is the newest timestamp in it minus the timestamp of the next record that a
member would get.  Both are record timestamps, so the lag is as exact as the producers' clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from pk.cli.common import opened
from pk.types import TopicPartition

if TYPE_CHECKING:
    from pk.client.admin import AdminClient

#: A partition sends about so many bytes for its one record.
FETCH_BYTES = 64 * 1024
_POLL_S = 0.5


def times_ms(
    admin: AdminClient,
    bootstrap: str,
    behind: Mapping[TopicPartition, int],
    left_s: Callable[[], float],
) -> dict[TopicPartition, int]:
    """Return the lag in ms of partitions whose group has not read all records.

    behind: the next offset of each partition.  Where no committed record is left behind that
    offset, the lag is 0.  The result lacks a partition that sent nothing in time.
    """
    if not behind:
        return {}
    newest = admin.list_offsets(dict.fromkeys(behind, "max_timestamp"), timeout_s=left_s())
    first = _first_timestamps(bootstrap, behind, left_s)
    return {
        place: 0 if at is None else max(0, newest[place][1] - at) for place, at in first.items()
    }


def _first_timestamps(
    bootstrap: str, behind: Mapping[TopicPartition, int], left_s: Callable[[], float]
) -> dict[TopicPartition, int | None]:
    """Return the timestamp of the first record from each offset; None = there is no such record."""
    from pk.client.consumer import Consumer

    found: dict[TopicPartition, int | None] = {}
    reader = Consumer(
        bootstrap, max_partition_fetch_bytes=FETCH_BYTES, auto_offset_reset="earliest"
    )
    with opened(reader, bootstrap) as consumer:
        consumer.assign(list(behind))
        for place, offset in behind.items():
            consumer.seek(place, offset)
        ends = consumer.end_offsets(list(behind), timeout_s=left_s())
        while len(found) < len(behind) and left_s() > _POLL_S:
            for place, rows in consumer.poll_batches(timeout_s=_POLL_S):
                if place not in found and rows.num_rows:
                    found[place] = rows.column("timestamp")[0].value
                    consumer.pause(place)
            for place in behind.keys() - found.keys():
                if consumer.position(place) >= ends[place]:
                    found[place] = None
    return found
