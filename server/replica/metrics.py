"""The broker's metrics.  Each is documented where it is created; all names begin with `pk_`.

Per request and per batch, never per record.  Gauges over partitions are summed on a tick of the
scheduler's wheel, not when something moves.
"""

from __future__ import annotations

from pk import errors
from pk.server.replica.delayed_produce import DelayedProduce
from pk.tracing import Metrics

QUEUE, LOCAL, REMOTE, TOTAL = "queue", "local", "remote", "total"
READ, SEND, COLD = "read", "send", "cold"

#: Bounds around broker_heartbeat_interval_ms, and up to broker_session_timeout_ms and beyond.
CONTACT_MS = (1_000, 1_050, 1_100, 1_250, 1_500, 2_000, 2_500, 3_000, 4_000, 5_000, 6_000, 10_000)


class BrokerMetrics:
    """The broker's metrics in the process's registry."""

    def __init__(self, metrics: Metrics) -> None:
        counter, gauge = metrics.counter, metrics.gauge
        frames = counter("frames_total", "data frames handled", ("kind",))
        size = counter("frame_bytes_total", "bytes of data frames", ("kind",))
        self._produce_frames, self._produce_bytes = frames.labels("produce"), size.labels("produce")
        self._fetch_frames, self._fetch_bytes = frames.labels("fetch"), size.labels("fetch")
        self._errors = counter("errors_total", "entries answered with an error", ("error",))
        self._add_times(metrics)
        self.calls = counter("calls_total", "control requests", ("request",))
        self.streams = gauge("streams", "open streams", ("kind",))
        self.parked = gauge("produce_parked", "produce replies that wait for the high watermark")
        self.write_queue = gauge("write_queue_bytes", "decided bytes not yet written", ("dir",))
        self.free = gauge("storage_free_bytes", "free space of a data directory", ("dir",))
        self.full = gauge(
            "storage_full", "1 = a data directory has no room for clients (rule L16)", ("dir",)
        )
        self.partitions = gauge("partitions", "partitions of this broker", ("state",))
        self.offline_directories = gauge(
            "offline_directories", "data directories whose disk failed since the start"
        )
        self.hw_lag = gauge("high_watermark_lag", "records written and not committed")
        self.lso_lag = gauge("last_stable_offset_lag", "records committed and not stable")
        self._add_transactions(metrics)
        self._add_tier(metrics)
        self.damaged_ranges = counter(
            "damaged_ranges_total", "damaged ranges that were found in the only copy of a partition"
        )
        self.damaged_partitions = gauge(
            "damaged_partitions", "partitions led with damaged ranges: pk log repair goes past them"
        )
        self.damaged = counter(
            "corrupt_logs_total", "partitions taken offline because their data is damaged"
        )
        self.kept_directories = gauge(
            "kept_log_directories", "directories with segments that no known partition owns (L15)"
        )
        self.clock_alert = gauge(
            "clock_step_alert", "1 = the wall clock is not trusted, nothing expires by age"
        )
        self.clock_step = gauge("clock_step_ms", "sum of the jumps of the wall clock")
        self.clock_skew = gauge("clock_skew_ms", "the wall clock ahead of the median of all nodes")
        self.violations = counter("invariant_violations_total", "offsets found out of order")
        self.dropped = counter(
            "segments_dropped_total", "segments dropped by retention", ("reason",)
        )
        self._add_cleaner(metrics)
        self._add_groups(metrics)
        self.under_replicated = gauge(
            "under_replicated_partitions", "led here, with replicas that are not in sync"
        )
        self.under_min_isr = gauge(
            "under_min_isr_partitions", "led here, with fewer in sync than acks=all needs"
        )
        self.replica_lag = gauge("replica_lag", "records that followers have not confirmed")
        self.isr_changes = counter("isr_changes_total", "changes of in-sync sets", ("kind",))
        self.truncations = counter("log_truncations_total", "logs cut to follow a leader")
        self.committed_cut = counter(
            "committed_records_cut_total", "records cut to follow a leader elected uncleanly"
        )
        self.starts_anew = counter("log_starts_anew_total", "logs begun anew where a leader's do")
        self.fetch_breaks = counter("replica_stream_breaks_total", "streams to leaders that ended")
        self.in_contact = gauge("controller_contact", "1 = not fenced, and heartbeats are answered")
        self.contact_age = metrics.histogram(
            "controller_contact_age_ms",
            "age of the last answered heartbeat when the next one was answered",
            buckets=CONTACT_MS,
        )

    def _add_times(self, metrics: Metrics) -> None:
        """Create the histograms of requests by stage, as Kafka's RequestMetrics."""
        self._produce_times = metrics.stages(
            "produce_time_ms",
            "time of a produced batch by stage: queue = from its receipt to its append, with its "
            "validation; local = the write; remote = the wait for the in-sync replicas; total = to "
            "the answer",
            (QUEUE, LOCAL, REMOTE, TOTAL),
        )
        self._fetch_times = metrics.stages(
            "fetch_time_ms",
            "time of a frame to a reader by stage: read = from the local log; send = until the "
            "socket took it; cold = a read from the tier",
            (READ, SEND, COLD),
        )

    def _add_tier(self, metrics: Metrics) -> None:
        """Create the metrics of the tier, as the broker sees it."""
        counter, gauge = metrics.counter, metrics.gauge
        self.tier_lag = gauge("tier_lag", "stable records that the tier does not cover yet")
        self.tier_lag_ms = gauge(
            "tier_lag_ms", "for how long the oldest stable record has not been in its table"
        )
        self.tier_problems = gauge("tier_problems", "partitions whose tier reports a problem")
        self.tier_missing = counter("tier_missing_files_total", "tiered files a HEAD did not find")

    def _add_cleaner(self, metrics: Metrics) -> None:
        """Create the metrics of the log cleaner."""
        self.cleaned = metrics.counter(
            "log_cleaner_bytes_total", "bytes that cleanings read and wrote", ("kind",)
        )
        self.cleanings_without_room = metrics.counter(
            "log_cleanings_without_room_total",
            "cleanings that did not begin: their files would not leave disk_reserve_bytes",
        )
        self.cleaner_dirty_ratio = metrics.gauge(
            "log_cleaner_max_dirty_ratio", "the dirty share of the dirtiest compacted log"
        )
        self.uncleanable = metrics.gauge(
            "uncleanable_partitions", "compacted logs that could not be cleaned (see the log)"
        )

    def _add_groups(self, metrics: Metrics) -> None:
        """Create the gauges of consumer groups (groups/lag_gauges)."""
        gauge = metrics.gauge
        self.groups = gauge("groups", "groups that this broker coordinates", ("state",))
        self.group_states: set[str] = set()  #: states that have a series
        self.group_lag = gauge(
            "group_lag",
            "committed offsets behind the last stable offsets, summed; of the 100 groups that this "
            "broker coordinates with the largest lag",
            ("group",),
        )
        self.group_lag_max = gauge(
            "group_lag_max", "the same, of the partition with the largest lag", ("group",)
        )

        self.retention_holds = gauge(
            "retention_holds", "holds of queries on partitions that this broker leads"
        )
        self.retention_holds_fallen = metrics.counter(
            "retention_holds_fallen_total", "holds of queries that fell at a bound (see the log)"
        )

    def _add_transactions(self, metrics: Metrics) -> None:
        """Create the gauges of open transactions."""
        gauge = metrics.gauge
        self.open_transactions = gauge("open_transactions", "open transactions of partitions led")
        self.open_transaction_age = gauge(
            "open_transaction_age_ms",
            "age of the oldest open transaction: read_committed readers wait for it",
        )
        self.awaited_batches = gauge(
            "awaited_batches", "prepared batches that wait for a Delta table's decision (rule X11)"
        )

    def produced(self, size: int) -> None:
        self._produce_frames.inc()
        self._produce_bytes.inc(size)

    def fetched(self, size: int) -> None:
        self._fetch_frames.inc()
        self._fetch_bytes.inc(size)

    def answered(self, delayed: DelayedProduce, now_s: float) -> None:
        """Count where the time of an answered batch went."""
        timing = delayed.timing
        if timing is None:
            return
        observe, appended, written = (
            self._produce_times.observe,
            timing.appended_s,
            timing.written_s,
        )
        if appended is not None:
            observe(QUEUE, appended - timing.received_s)
            if written is not None:
                observe(LOCAL, written - appended)
                observe(REMOTE, now_s - written)
        observe(TOTAL, now_s - timing.received_s)

    def sent(self, read_s: float, send_s: float) -> None:
        """Count where the time of a frame to a reader went."""
        self._fetch_times.observe(READ, read_s)
        self._fetch_times.observe(SEND, send_s)

    def read_cold(self, seconds: float) -> None:
        """Count a read from the tier."""
        self._fetch_times.observe(COLD, seconds)

    def refused(self, error: errors.PkError) -> None:
        self._errors.labels(type(error).__name__).inc()
