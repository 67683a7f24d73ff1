"""Typed options: name, type, unit, default, bounds, meaning.

One table per scope; docs/settings.md is made from it.

Kafka's dotted names (`retention.ms`) and pk's own (`retention_ms`) are the same name.  Unknown
names are refused with the nearest right one, contradictions with the relation that is broken.
Times in ms and sizes in bytes may have a unit: `12h`, `64MiB` (pk.units).
Where docs/SEMANTICS.md §13 does not say otherwise, defaults are Kafka's.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pk import errors, limits, units

MIB = limits.MIB
INT64_MAX = 2**63 - 1
#: Times and sizes of clients travel as 32 bits.
INT32_MAX = 2**31 - 1


@dataclass(slots=True, frozen=True)
class Option:
    """One setting.

    `kind` is int, bool, str or float; `unit` is for people.  A bound of None = only the bounds of
    64 bits.
    """

    name: str
    kind: type
    default: Any
    doc: str
    unit: str = ""
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()

    def parse(self, value: Any) -> Any:
        """Return `value` (text, or already typed) as this option's type.  Raises
        `InvalidConfig`.
        """
        try:
            if isinstance(value, str) and self.unit in units.EXAMPLES:
                value = _without_unit(value, self.unit)
            parsed = _parse(self.kind, value)
        except (ValueError, TypeError, OverflowError):
            unit = f" ({self.unit})" if self.unit else ""
            if self.unit in units.EXAMPLES:
                unit += f" or {units.EXAMPLES[self.unit]}"
            raise self._refusal(f"takes {_WORDS[self.kind]}{unit}, not {_shown(value)}") from None
        most = INT64_MAX if self.most is None and self.kind is int else self.most
        if self.least is not None and parsed < self.least:
            raise self._refusal(f"must be at least {_bound(self.least)}, not {_shown(parsed)}")
        if most is not None and parsed > most:
            raise self._refusal(f"must be at most {_bound(most)}, not {_shown(parsed)}")
        if self.choices and parsed not in self.choices:
            raise self._refusal(f"is one of {', '.join(self.choices)}, not {_shown(parsed)}")
        return parsed

    def _refusal(self, words: str) -> errors.InvalidConfig:
        return errors.InvalidConfig(f"{self.name} {words}", option=self.name)


def _bound(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:  # an integer of thousands of digits
        return "a huge number"


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _without_unit(text: str, unit: str) -> str | int:
    """Return the number that a duration or a size stands for; other texts as they are."""
    try:
        return units.plain(text, unit)
    except ValueError:
        return text


def _parse(kind: type, value: Any) -> Any:
    if kind is bool:
        if isinstance(value, bool):
            return value
        text = str(value).strip().lower()
        if text in ("true", "1", "yes", "on"):
            return True
        if text in ("false", "0", "no", "off"):
            return False
        raise ValueError(value)
    if kind is int:
        if isinstance(value, bool):
            raise ValueError(value)
        return int(str(value).strip()) if not isinstance(value, int) else value
    if kind is float:
        found = float(value)
        if not math.isfinite(found):
            raise ValueError(value)
        return found
    if not isinstance(value, str | int | float) and not hasattr(value, "__fspath__"):
        raise TypeError(value)
    text = str(value)
    text.encode()  # a lone surrogate is not valid text
    return text


#: A relation that must hold between options: its words, and its test.
Relation = tuple[str, Callable[[Mapping[str, Any]], bool]]


class Options:
    """A scope's options.  `resolve` turns user input into a complete, checked mapping."""

    def __init__(
        self, scope: str, options: Iterable[Option], relations: Iterable[Relation] = ()
    ) -> None:
        self.scope = scope
        self.by_name: dict[str, Option] = {}
        for option in options:
            assert option.name not in self.by_name, option.name
            self.by_name[option.name] = option
        self.relations = tuple(relations)

    def canonical(self, name: str) -> str:
        """Return pk's spelling of `name`.  Raises `InvalidConfig` with the nearest right name."""
        key = name.strip().lower().replace(".", "_").replace("-", "_")
        if key in self.by_name:
            return key
        near = difflib.get_close_matches(key, self.by_name, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise errors.InvalidConfig(f"unknown {self.scope} setting {name!r}{hint}", option=name)

    def parse(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the given options only, with canonical names and typed values.

        Refuses an option that is given twice.
        """
        parsed: dict[str, Any] = {}
        for name, value in given.items():
            key = self.canonical(name)
            if key in parsed:
                raise errors.InvalidConfig(f"{self.scope} setting {key} is given twice", option=key)
            parsed[key] = self.by_name[key].parse(value)
        return parsed

    def known(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Return the stored settings that this build knows; a newer build may have stored others
        (rule Q7).  `stored` has canonical names.
        """
        return {name: value for name, value in stored.items() if name in self.by_name}

    def resolve(
        self, given: Mapping[str, Any], base: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return every option: `given` has precedence over `base`, and `base` over the defaults.

        Checks the relations between the options.
        """
        full = {name: option.default for name, option in self.by_name.items()}
        full.update(base or {})
        full.update(self.parse(given))
        for words, holds in self.relations:
            if not holds(full):
                raise errors.InvalidConfig(f"contradictory {self.scope} settings: {words}")
        return full


def _at_most(low: str, high: str, *, unlimited_below: int | None = None) -> Relation:
    """Return the relation that `low` does not exceed `high`.

    A value below `unlimited_below` means "no limit".
    """

    def holds(o: Mapping[str, Any]) -> bool:
        values = (o[low], o[high])
        if unlimited_below is not None and min(values) < unlimited_below:
            return True
        return bool(values[0] <= values[1])

    return f"{low} may not exceed {high}", holds


DAY_MS = 86_400_000

# The tables have one or two lines per option, so that they read as tables.
# fmt: off
TOPIC = Options(
    "topic",
    [
        Option("cleanup_policy", str, "delete",
               "what retention does to old data", choices=("delete", "compact", "compact,delete")),
        Option("retention_ms", int, 7 * DAY_MS,
               "records older than this may be deleted; -1 = never", "ms", -1),
        Option("retention_bytes", int, -1,
               "the oldest data of a partition larger than this (tier included) is deleted; -1 = "
               "no limit", "bytes", -1),
        Option("local_retention_ms", int, -2,
               "how long tiered data is also kept on local disk; -2 = retention_ms", "ms", -2),
        Option("local_retention_bytes", int, -2,
               "how much tiered data is also kept on local disk; -2 = retention_bytes",
               "bytes", -2),
        Option("segment_bytes", int, 1024 * MIB,
               "a segment is closed at this size", "bytes", 1024 * 14, 2**31 - 1),
        Option("segment_ms", int, 7 * DAY_MS, "a segment is closed at this age", "ms", 1),
        Option("index_interval_bytes", int, 64 * 1024,
               "the index has one entry for this many log bytes", "bytes", 0),
        Option("max_message_bytes", int, 8 * MIB,
               "the largest batch that the broker accepts",
               "bytes", 1024, limits.MESSAGE_BYTES_MAX),
        Option("decoded_bytes_max", int, 64 * MIB,
               "largest size of a batch after decompression", "bytes", 1024),
        Option("message_timestamp_type", str, "CreateTime",
               "CreateTime: the client sets timestamps; LogAppendTime: the broker",
               choices=("CreateTime", "LogAppendTime")),
        Option("message_timestamp_after_max_ms", int, 3_600_000,
               "records further in the future are refused (KIP-937)", "ms", 0),
        Option("message_timestamp_before_max_ms", int, 2**63 - 1,
               "records further in the past are refused", "ms", 0),
        Option("min_insync_replicas", int, 1, "acks=all needs this many in-sync replicas", "", 1),
        Option("unclean_leader_election_enable", bool, False,
               "allow elections that may lose acknowledged records"),
        Option("flush_messages", int, 2**63 - 1, "fsync after this many records", "", 1),
        Option("flush_ms", int, 2**63 - 1, "fsync at least this often", "ms", 1),
        Option("flush_on_ack", bool, False, "acknowledge only fsynced records"),
        Option("file_delete_delay_ms", int, 60_000,
               "deleted segments stay on disk this long", "ms", 0),
        Option("delete_retention_ms", int, DAY_MS,
               "how long tombstones are kept after they were first cleaned", "ms", 0),
        Option("min_cleanable_dirty_ratio", float, 0.5,
               "a compacted log is cleaned once its dirty share reaches this", "", 0, 1),
        Option("min_compaction_lag_ms", int, 0,
               "records stay uncompacted at least this long", "ms", 0),
        Option("max_compaction_lag_ms", int, 2**63 - 1,
               "records are compacted after this at the latest", "ms", 1),
        Option("tier_enable", bool, True,
               "tier this topic (has an effect once the server has a tier_url)"),
        Option("tier_max_lag_ms", int, 60_000,
               "stable records are tiered after this at the latest", "ms", 0),
        Option("tier_file_bytes", int, 64 * MIB,
               "the log bytes that go into one tier file", "bytes", 1024),
        Option("tier_small_file_bytes", int, 4 * MIB,
               "the tier process merges files smaller than this; 0 = none", "bytes", 0),
        Option("local_drop_delay_ms", int, 60_000,
               "local data is kept this long after the tier commit that covers it", "ms", 0),
    ],
    [
        _at_most("local_retention_ms", "retention_ms", unlimited_below=0),
        _at_most("local_retention_bytes", "retention_bytes", unlimited_below=0),
        _at_most("min_compaction_lag_ms", "max_compaction_lag_ms"),
        _at_most("max_message_bytes", "decoded_bytes_max"),
    ],
)

SERVER = Options(
    "server",
    [
        Option("node_id", int, 1, "this node's id, unique in the cluster", "", 0, 2**31 - 1),
        Option("process_roles", str, "broker,controller",
               "what this node is: broker, controller, or both"),
        Option("cluster_id", str, "",
               "the id of the cluster, the same on every node; empty = the id for which the "
               "directory is formatted"),
        Option("controller_quorum_voters", str, "",
               "the first voters of the metadata quorum, ID@HOST:PORT,…, the same on every node; "
               "empty = this node alone"),
        Option("controller_quorum_bootstrap_servers", str, "",
               "HOST:PORT,… of controllers, for a broker without controller_quorum_voters"),
        Option("controller_listen", str, "",
               "HOST:PORT to which the controller binds; empty = this node's entry among the "
               "voters, or a unix socket if the node is alone"),
        Option("peer_addresses", str, "",
               "ID=HOST:PORT,…: addresses to which this node connects instead of a broker's "
               "advertised address"),
        Option("peer_controller_addresses", str, "",
               "ID=HOST:PORT,…: addresses to which this node connects instead of a controller's "
               "address"),
        Option("listen", str, "127.0.0.1:9292", "address to which the broker binds"),
        Option("advertise", str, "", "address that clients connect to; empty = listen"),
        Option("metrics", str, "", "HOST:PORT of the Prometheus and health endpoint; empty = none"),
        Option("metrics_partition_limit", int, 1_000,
               "the partitions that have metrics of their own; 0 = none", "", 0, 100_000),
        Option("rack", str, "", "failure domain of this node"),
        Option("tier_url", str, "", "object store of the tier (file://…, s3://…); empty = no tier"),
        Option("tier_endpoint_url", str, "", "S3 endpoint if not AWS"),
        Option("tier_access_key_id", str, "", "store credentials; empty = the environment's"),
        Option("tier_secret_access_key", str, "", "store credentials; empty = the environment's"),
        Option("tier_region", str, "us-east-1", "store region"),
        Option("tier_timeout_ms", int, 10_000, "deadline of one store call", "ms", 100),
        Option("tier_retry_backoff_ms", int, 500,
               "first wait after a failed store call; doubles up to 30 s", "ms", 1),
        Option("tier_refresh_max_ms", int, 300_000,
               "the longest time between two looks for changes that other engines made to a tier "
               "table, while no client reads it and nothing happens", "ms", 5_000),
        Option("tier_merge_interval_ms", int, 300_000,
               "small files of each table are merged in one commit at this interval", "ms", 100),
        Option("tier_offsets_interval_ms", int, 60_000,
               "how often changed committed offsets of groups are copied to the tier (T13); "
               "0 = never", "ms", 0),
        Option("tier_metadata_interval_ms", int, 60_000,
               "how often changed metadata of the cluster are copied to the tier (T13); 0 = never",
               "ms", 0),
        Option("maintenance_runner", bool, False,
               "whether this node runs the schedules of maintenance jobs: one more process, with a "
               "JVM while a job needs Spark. Several nodes may: each job is run by one of them"),
        Option("maintenance_master", str, "local[*]", "Spark's master for the node's runner"),
        Option("tier_vacuum_interval_ms", int, DAY_MS,
               "how often files that a tier table no longer names are deleted; 0 = never", "ms", 0),
        Option("tier_vacuum_retention_ms", int, 7 * DAY_MS,
               "how long a file stays readable after the table's newest version has dropped it; "
               "whole hours, rounded up, for files that other engines removed",
               "ms", 0),
        Option("default_num_partitions", int, 1,
               "partitions of a topic created without a count", "", 1),
        Option("default_replication_factor", int, 1,
               "replicas of a topic created without a factor", "", 1),
        Option("auto_create_topics_enable", bool, False, "create unknown topics on first use"),
        Option("broker_session_timeout_ms", int, 6_000,
               "a silent broker is fenced after this", "ms", 100),
        Option("broker_heartbeat_interval_ms", int, 1_000,
               "how often a broker sends a heartbeat", "ms", 10),
        Option("unclean_recovery_wait_ms", int, 30_000,
               "how long a recovery election waits for missing members", "ms", 0),
        Option("auto_leader_rebalance_enable", bool, True,
               "leadership returns to the first replica when that replica is in sync"),
        Option("leader_imbalance_check_interval_seconds", int, 300,
               "how often the controller looks for leaderships to move back", "s", 1),
        Option("replica_lag_time_max_ms", int, 30_000,
               "a follower that lags for longer leaves the ISR", "ms", 1),
        Option("log_retention_check_interval_ms", int, 300_000,
               "how often retention runs", "ms", 10),
        Option("log_cleaner_enable", bool, True, "clean the logs of compacted topics"),
        Option("log_cleaner_backoff_ms", int, 15_000,
               "how often the cleaner looks for logs to clean", "ms", 10),
        Option("log_cleaner_dedupe_buffer_size", int, 128 * MIB,
               "memory for the keys of one cleaning; if it is full, the next cleaning continues",
               "bytes", 1024, 2**30 - 1),
        Option("log_flush_offset_checkpoint_interval_ms", int, 60_000,
               "how often recovery points are written", "ms", 10),
        Option("metadata_log_max_record_bytes_between_snapshots", int, 20 * MIB,
               "most bytes of metadata between two snapshots of a controller", "bytes", 1),
        Option("metadata_log_max_snapshot_interval_ms", int, 3_600_000,
               "a controller also makes a snapshot after this time, if there are new metadata; 0 = "
               "only by bytes", "ms", 0),
        Option("clock_step_max_ms", int, 60_000,
               "if a wall clock was set by more, or is further ahead of the median of all nodes, "
               "nothing expires by age and no producer is forgotten", "ms", 0),
        Option("clock_gap_max_ms", int, DAY_MS,
               "if a wall clock is further past the broker's last run, nothing expires for "
               "clock_grace_ms", "ms", 0),
        Option("clock_grace_ms", int, 3_600_000,
               "if a clock does not fit the last run, records and producers expire only after this "
               "time, in which time synchronisation may set the clock", "ms", 0),
        Option("remote_fetch_max_wait_ms", int, 5_000,
               "how long a fetch waits for the tier", "ms", 0),
        Option("producer_id_expiration_ms", int, DAY_MS,
               "the broker forgets the state of an idle idempotent producer after this", "ms", 1),
        Option("transaction_max_timeout_ms", int, 900_000,
               "largest transaction_timeout_ms of producers", "ms", 1, INT32_MAX),
        Option("transactional_id_expiration_ms", int, 7 * DAY_MS,
               "a transactional id without a transaction for this time is forgotten", "ms", 1),
        Option("participant_lease_ms", int, 60_000,
               "a transaction of many producers is aborted if none of its tasks was heard for this "
               "time and none has finished", "ms", 1_000, INT32_MAX),
        Option("participant_transaction_max_ms", int, 900_000,
               "a transaction of many producers is aborted after this time", "ms", 1_000,
               INT32_MAX),
        Option("prepared_max_ms", int, 900_000,
               "a batch of log and Delta table that is prepared for longer is reported, and the "
               "resolver reads the table", "ms", 1_000, INT32_MAX),
        Option("group_min_session_timeout_ms", int, 6_000,
               "smallest session_timeout_ms of consumers", "ms", 1, INT32_MAX),
        Option("group_max_session_timeout_ms", int, 1_800_000,
               "largest session_timeout_ms of consumers", "ms", 1, INT32_MAX),
        Option("group_initial_rebalance_delay_ms", int, 3_000,
               "how long the first rebalance of an empty group waits for further members", "ms", 0,
               INT32_MAX),
        Option("group_max_size", int, 1_000, "largest number of members of a group", "", 1, 10_000),
        Option("offsets_retention_minutes", int, 10_080,
               "offsets expire this long after their group became empty", "minutes", 1, INT32_MAX),
        Option("hold_max_ms", int, DAY_MS,
               "a query with holdRetention holds what it has not processed for so long after its "
               "last word", "ms", 1_000),
        Option("hold_max_bytes", int, 10 * 1024 * MIB,
               "a query holds a partition at most so far behind its end; -1 = without a bound",
               "bytes", -1),
        Option("hold_grace_ms", int, 60_000,
               "a new leader lets nothing expire for so long, unless every coordinator of groups "
               "has reported its holds", "ms", 0),
        Option("offset_metadata_max_bytes", int, 4_096,
               "largest metadata of a committed offset", "bytes", 0, 64 * 1024),
        Option("resolver_table_urls", str, "",
               "Delta tables that the tier process may read to decide prepared batches: URLs of "
               "tables, or of directories above them, separated by commas"),
        Option("inbound_bytes_max", int, 512 * MIB,
               "memory of a process for all frames that arrive from its peers; at least twice "
               "the 16 KiB that each connection has of its own", "bytes", 16 * MIB),
        Option("partitions_max", int, 0,
               "replicas that the broker may hold; more are refused before they are created; 0 = "
               "as many as fit a quarter of the memory, at 24 KiB each", "", 0),
        Option("disk_reserve_bytes", int, 64 * MIB,
               "a directory with less free space refuses produce, and its leaderships move to "
               "replicas with twice as much; followers, metadata and checkpoints still use it",
               "bytes", 0),
        Option("shutdown_timeout_ms", int, 10_000,
               "a draining process is stopped after this", "ms", 0),
        Option("cold_cache_bytes", int, 256 * MIB, "memory of the tier's read cache", "bytes", 0),
        Option("cold_read_ahead_bytes", int, 64 * MIB,
               "part of cold_cache_bytes, at most half of it, for rows that clients which read "
               "straight on have not requested yet; 0 = no read-ahead", "bytes", 0),
        Option("cold_read_threads", int, 2, "concurrent reads from the tier", "", 1, 64),
    ],
    [
        (
            "broker_heartbeat_interval_ms must be less than half of broker_session_timeout_ms",
            lambda o: o["broker_heartbeat_interval_ms"] * 2 < o["broker_session_timeout_ms"],
        ),
    ],
)

#: Topic settings may also stand in the server's configuration, as the cluster's defaults.

PRODUCER = Options(
    "producer",
    [
        Option("acks", str, "all",
               "replicas that must have a record before it is acknowledged",
               choices=("0", "1", "all", "-1")),
        Option("linger_ms", float, 5.0,
               "how long a batch may wait for more records", "ms", 0, INT32_MAX),
        Option("batch_size", int, 1 * MIB, "bytes of a full batch", "bytes", 1, INT32_MAX),
        Option("buffer_memory", int, 64 * MIB,
               "bytes of records that are not yet acknowledged; above it send blocks",
               "bytes", 1024),
        Option("max_block_ms", int, 60_000,
               "how long send may block while it waits for memory, a broker or a topic",
               "ms", 0, INT32_MAX),
        Option("compression", str, "none", "codec of batches", choices=("none", "lz4", "zstd")),
        Option("compression_level", int, 3, "zstd level", "", 1, 19),
        Option("max_in_flight", int, 5,
               "frames in flight per broker; a frame without answers for 500 ms does not count",
               "", 1, 64),
        Option("delivery_timeout_ms", int, 120_000,
               "a record that is not acknowledged after this time fails", "ms", 1, INT32_MAX),
        Option("request_timeout_ms", int, 30_000,
               "a request without an answer after this time is retried", "ms", 1, INT32_MAX),
        Option("retry_backoff_ms", int, 100, "first wait before a retry", "ms", 0, INT32_MAX),
        Option("retry_backoff_max_ms", int, 1_000,
               "longest wait before a retry", "ms", 0, INT32_MAX),
        Option("enable_idempotence", bool, True,
               "store no duplicates and keep the order of sends, also with retries"),
        Option("max_request_size", int, 8 * MIB,
               "largest batch this producer builds", "bytes", 1024, INT32_MAX),
        Option("client_id", str, "", "name in logs and metrics"),
        Option("transactional_id", str, "",
               "name of the producer across restarts; with it the producer writes in transactions"),
        Option("transaction_timeout_ms", int, 60_000,
               "the coordinator aborts a transaction that is open for longer", "ms", 1, INT32_MAX),
    ],
    [
        (
            "linger_ms + request_timeout_ms may not exceed delivery_timeout_ms",
            lambda o: o["linger_ms"] + o["request_timeout_ms"] <= o["delivery_timeout_ms"],
        ),
        (
            "enable_idempotence needs max_in_flight of at most 5",
            lambda o: not o["enable_idempotence"] or o["max_in_flight"] <= limits.IN_FLIGHT_MAX,
        ),
        (
            "transactional_id needs enable_idempotence",
            lambda o: not o["transactional_id"] or o["enable_idempotence"],
        ),
        _at_most("batch_size", "buffer_memory"),
        _at_most("batch_size", "max_request_size"),
    ],
)

CONSUMER = Options(
    "consumer",
    [
        Option("group_id", str, "",
               "consumer group: its members share the partitions of their subscriptions"),
        Option("group_instance_id", str, "",
               "name of a static member, which restarts without a rebalance (KIP-345)"),
        Option("partition_assignment_strategy", str, "range,cooperative-sticky",
               "range, roundrobin, sticky, cooperative-sticky: the preferred assignor first"),
        Option("session_timeout_ms", int, 45_000,
               "the group removes a member that is not heard for this time", "ms", 1, INT32_MAX),
        Option("heartbeat_interval_ms", int, 3_000,
               "how often a member sends a heartbeat; it waits for news at most so long", "ms", 1,
               INT32_MAX),
        Option("max_poll_interval_ms", int, 300_000,
               "a member that does not poll for this time leaves its group", "ms", 1, INT32_MAX),
        Option("enable_auto_commit", bool, True,
               "a poll commits, every auto_commit_interval_ms, what was returned before it"),
        Option("auto_commit_interval_ms", int, 5_000,
               "how often offsets are committed by themselves", "ms", 0, INT32_MAX),
        Option("auto_offset_reset", str, "latest",
               "where a consumer without a position starts",
               choices=("earliest", "latest", "none")),
        Option("isolation_level", str, "read_committed",
               "read_committed hides open and aborted transactions", choices=("read_committed",
               "read_uncommitted")),
        Option("fetch_min_bytes", int, 1,
               "the broker answers once it has this much", "bytes", 0, INT32_MAX),
        Option("fetch_max_wait_ms", int, 500,
               "the broker answers after this time at the latest", "ms", 0, INT32_MAX),
        Option("fetch_max_bytes", int, 4 * MIB, "bytes of one frame", "bytes", 1, INT32_MAX),
        Option("max_partition_fetch_bytes", int, 4 * MIB,
               "bytes of one partition in a frame", "bytes", 1, INT32_MAX),
        Option("fetch_buffer_bytes", int, 16 * MIB,
               "bytes that are fetched and not yet polled, per broker", "bytes", 1, INT32_MAX),
        Option("max_poll_records", int, 2_000,
               "the largest number of records in the result of one poll", "", 1, INT32_MAX),
        Option("check_crcs", bool, True, "verify every batch's checksum"),
        Option("decoded_bytes_max", int, 64 * MIB,
               "largest size of a batch after decompression", "bytes", 1024),
        Option("request_timeout_ms", int, 30_000,
               "a request without an answer after this time is retried", "ms", 1, INT32_MAX),
        Option("default_api_timeout_ms", int, 60_000,
               "how long a blocking call retries before it fails", "ms", 1, INT32_MAX),
        Option("retry_backoff_ms", int, 100, "first wait before a retry", "ms", 0, INT32_MAX),
        Option("retry_backoff_max_ms", int, 1_000,
               "longest wait before a retry", "ms", 0, INT32_MAX),
        Option("metadata_max_age_ms", int, 300_000,
               "metadata is refreshed at least this often", "ms", 1, INT32_MAX),
        Option("client_id", str, "", "name in logs and metrics"),
    ],
    [
        (
            "heartbeat_interval_ms must be less than session_timeout_ms",
            lambda o: o["heartbeat_interval_ms"] < o["session_timeout_ms"],
        ),
        (
            "group_instance_id needs a group_id",
            lambda o: not o["group_instance_id"] or o["group_id"],
        ),
    ],
)
