"""The metrics of each topic and partition, made when Prometheus asks and never in between.

The broker reads the offsets and counters that its partitions have anyway, so that a broker that is
not scraped pays nothing.  Brokers export the partitions that they lead, in the order of topic and
number, at most `metrics_partition_limit`; `pk_partitions_without_metrics` says how many are left
out.  Rates are Prometheus' business: records and bytes are totals since the partition came to this
process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from pk.server.replica.partition import Partition
from pk.tracing import Family
from pk.types import PartitionKey

_LABELS = ("topic", "partition")

Reading = Callable[[Partition], float]

#: name → (meaning, reading)
_GAUGES: Mapping[str, tuple[str, Reading]] = {
    "pk_partition_log_start_offset": (
        "first offset that readers get, in the log or in the table",
        lambda partition: partition.log.log_start,
    ),
    "pk_partition_local_log_start_offset": (
        "first offset of the local log",
        lambda partition: partition.log.local_log_start,
    ),
    "pk_partition_log_end_offset": (
        "offset of the next record",
        lambda partition: partition.log.written_end,
    ),
    "pk_partition_high_watermark": (
        "offset below which all in-sync replicas have the records",
        lambda partition: partition.high_watermark,
    ),
    "pk_partition_last_stable_offset": (
        "offset below which read_committed readers get the records",
        lambda partition: partition.last_stable_offset,
    ),
    "pk_partition_tiered_end_offset": (
        "offset below which the Delta table has the records; -1 = not tiered",
        lambda partition: partition.log.tiered_end if partition.tiered else -1,
    ),
    "pk_partition_tier_lag_ms": (
        "for how long the oldest stable record has not been in the table",
        lambda partition: partition.tier.waiting_ms,
    ),
    "pk_partition_local_bytes": (
        "bytes of the local log",
        lambda partition: partition.log.size_bytes,
    ),
    "pk_partition_leader_epoch": (
        "epoch of this leadership",
        lambda partition: partition.leader_epoch,
    ),
    "pk_partition_replicas": (
        "assigned replicas",
        lambda partition: 0 if partition.leader is None else len(partition.leader.replicas),
    ),
    "pk_partition_in_sync_replicas": (
        "replicas that are in sync",
        lambda partition: 0 if partition.leader is None else len(partition.leader.isr),
    ),
}
_COUNTERS: Mapping[str, tuple[str, Reading]] = {
    "pk_partition_records_in": (
        "records that producers stored",
        lambda partition: partition.log.records_in,
    ),
    "pk_partition_records_out": (
        "records that consumers got from the local log; markers and gaps between offsets count",
        lambda partition: partition.log.records_out,
    ),
    "pk_partition_bytes_in": (
        "bytes of batches that producers stored",
        lambda partition: partition.log.bytes_in,
    ),
    "pk_partition_bytes_out": (
        "bytes that consumers got from the local log",
        lambda partition: partition.log.bytes_out,
    ),
}


class PartitionMetrics:
    """Reads the partitions that this broker leads, for one scrape."""

    def __init__(self, partitions: Mapping[PartitionKey, Partition], limit: int) -> None:
        self._partitions = partitions
        self._limit = limit

    def families(self) -> Iterator[Family]:
        """Yield the metrics of this moment."""
        led = [each for each in self._partitions.values() if each.leader is not None]
        led.sort(key=lambda each: (each.topic, each.key))
        shown = [
            ((each.topic, str(each.log.topic_partition.partition)), each)
            for each in led[: self._limit]
        ]
        for kind, table in (("gauge", _GAUGES), ("counter", _COUNTERS)):
            for name, (doc, reading) in table.items():
                yield Family(
                    kind, name, doc, _LABELS, [(labels, reading(each)) for labels, each in shown]
                )
        left_out = "partitions led here without metrics of their own (metrics_partition_limit)"
        yield Family(
            "gauge", "pk_partitions_without_metrics", left_out, (), [((), len(led) - len(shown))]
        )
