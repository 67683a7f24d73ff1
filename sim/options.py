"""What one simulated run does: its machines, duration, load and faults, drawn from its seed.

Each seed enables its own subset of the faults and draws its own cluster and topics.  So rare
combinations come up, and so does a run without faults.  The caller may give any option; the seed
then draws the other options as it would have done without it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pk import limits

#: The first group of faults.  A seed draws later groups after everything older, so that old seeds
#: keep their runs.
_FIRST_FAULTS = (
    "kill_broker",
    "kill_controller",
    "kill_tier",
    "kill_client",
    "kill_machine",
    "kill_leader",
    "torn_write",
    "power",
    "replace_disk",
    "drain",
    "pause",
    "break_streams",
    "slow_network",
    "flaky_network",
    "cut",
    "isolate",
    "split",
    "disk_full",
    "disk_slow",
    "store_outage",
    "store_flaky",
    "late_commit",
    "optimize",
    "clock_step",
)
_LATER_FAULTS = (
    "rot",
    "empty_metadata",
    "lost_isr_change",
    "crash_anew",
    "rot_and_cut",
    "late_frames",
)
#: Faults that delay, or refuse, a single operation while all others go on.
_SINGLE_FAULTS = ("disk_stall", "stream_stall", "disk_short", "store_stall", "clock_jump")
#: What disappears from the disk of a broker that is down (identity_faults.py).
_IDENTITY_FAULTS = ("identity_lost", "identity_rot", "partition_lost")
#: Disks of leaders that stay full for so long that other brokers must lead (rule L16).
_ROOM_FAULTS = ("leader_full",)
#: Damage to objects of the store (objects.py).
_OBJECT_FAULTS = ("object_rot",)
#: The faults that are drawn after all older ones.
_LAST_FAULTS = ("wrong_start",)
#: What other engines and bit rot do to tables (table_faults.py).
_TABLE_FAULTS = ("delta_rot", "delete_rows")
#: Files of another build on a stopped node, and a node of an older build (format_faults.py).  Only
#: runs that name them have them.
FORMAT_FAULTS = ("other_version", "unknown_field", "older_build")
#: Disks that seem full because their process has no free descriptor (log/descriptor_pool).
_DESCRIPTOR_FAULTS = ("no_descriptors",)
#: Disks of active controllers that stay full for so long that another one must lead (rule L16).
_CONTROLLER_FAULTS = ("controller_full",)
#: Segments that disappear from the front of a log while its broker is down (identity_faults.py).
_FRONT_FAULTS = ("front_lost",)
#: Faults of transactions (transaction_faults.py).  Only runs with transactions or jobs draw them.
TRANSACTION_FAULTS = (
    "late_control",
    "kill_coordinator",
    "kill_at_markers",
    "coordinator_full",
)
#: Faults of the table of batches that log and table get together (lake.py).  Only runs with such
#: jobs draw them.
LAKE_FAULTS = ("lake_away", "lake_slow", "lake_late")
#: Faults of cleanings (compaction_faults.py).  Only runs with compacted topics draw them.
COMPACTION_FAULTS = ("power_in_swap", "death_in_swap", "full_in_swap", "election_in_cleaning")
#: The faults of a run that names none.
_USUAL_FAULTS = (
    *_FIRST_FAULTS,
    *_LATER_FAULTS,
    *_SINGLE_FAULTS,
    *_IDENTITY_FAULTS,
    *_ROOM_FAULTS,
    *_OBJECT_FAULTS,
    *_LAST_FAULTS,
    *_TABLE_FAULTS,
    *_FRONT_FAULTS,
    *_DESCRIPTOR_FAULTS,
)
#: The faults that a seed may draw; `SimOptions.faults` holds those that a run may meet.
FAULTS = (
    *_USUAL_FAULTS,
    *TRANSACTION_FAULTS,
    *LAKE_FAULTS,
    *COMPACTION_FAULTS,
    *_CONTROLLER_FAULTS,
)
#: The administrator's chores, in two groups: a seed draws the second group later, too.
_FIRST_CHORES = ("recreate", "grow", "delete_records", "configure", "reassign", "elect")
_LATER_CHORES = ("reassign_back", "toggle")
#: The chores of a run that names none; drawn runs may have all of CHORES.
_USUAL_CHORES = (*_FIRST_CHORES, *_LATER_CHORES)
#: Moves to another number of replicas, drawn after everything else.
_MOVE_CHORES = ("resize",)
CHORES = (*_USUAL_CHORES, *_MOVE_CHORES)
#: The level of `pk.format` that the builds of a run with "older_build" know.
NEWER_LEVEL = 2
SEGMENT_BYTES_LEAST = 14_336
#: The directory of the Delta table that resolvers may read.
LAKE_URL = "file:///lake"
CONTROLLER, BROKER, TIER = "controller", "broker", "tier"
#: Bytes between two snapshots of the metadata log: so many that a run seldom has a snapshot, or so
#: few that a node that was away for a moment has to load one.
SNAPSHOT_BYTES = (20 * limits.MIB, 20_000, 3_000)
#: In most runs every event has a time of its own.  A large grain gives many events the same time,
#: as in a busy event loop.
GRAIN_US = (1, 1, 1_000, 4_000, 20_000)
#: How long a producer may be silent.  The shorter time is still longer than any producer of a run
#: retries (workload.DELIVERY_MS) and than an unnoticed clock step.
EXPIRATION_MS = (86_400_000, 120_000)
#: Longer than a run with all its clock steps: by true time no record expires.
RETENTION_MS = "7200000"
#: Records that are kept without limit of time.
KEPT = {"retention_ms": "-1"}
#: Bytes of the ends of logs kept in memory (log/batch_cache.py); 0 = every reader needs the disk;
#: None = as in production.
RECENT_BYTES = (None, None, 0, 4_000)
#: disk_reserve_bytes.  A full disk of the simulator has up to 30 kB left; without a reserve it
#: fills up entirely.
RESERVE_BYTES = (0, 4_000, 16_000)
#: The share of seeds with transactions.
TRANSACTIONS_CHANCE = 0.4
#: The share of seeds with jobs, of those with JOB_BROKERS_MIN brokers: with fewer, the topic of the
#: coordinators promises little (loss_model.py).
JOBS_CHANCE = 0.3
JOB_BROKERS_MIN = 3
#: The share of seeds with jobs whose batches a table decides, of those with JOB_BROKERS_MIN.
TOGETHER_CHANCE = 0.2
#: prepared_max_ms of their resolvers.
PREPARED_MAX_MS = (1_000, 3_000, 8_000)
#: The share of seeds with compacted topics.
COMPACTION_CHANCE = 0.25
#: The share of seeds with maintained tables: compacted topics with a tier.
MAINTENANCE_CHANCE = 0.2
#: The share of seeds that have a consumer group, and how often the tier copies its offsets.
GROUP_CHANCE = 0.35
OFFSET_COPIES_MS = (300, 1_000, 60_000)
#: The share of seeds with a query that lags behind and holds retention.
HOLDS_CHANCE = 0.25
#: The least fault phase of such a run: a tombstone leaves a table in it.
MAINTENANCE_MS = 15_000
#: delete_retention_ms of compacted topics.
DELETE_RETENTION_MS = (1_500, 4_000, 60_000)
#: participant_lease_ms and participant_transaction_max_ms; the longer one is at most the longest
#: timeout of transactions.TIMEOUT_MS.
LEASE_MS = (2_000, 5_000, 10_000)
BATCH_MAX_MS = (15_000, 30_000)
#: How far a machine's clock may differ from true time from the start.
SKEW_MS = 2_000


@dataclass(slots=True, frozen=True)
class NodePlan:
    """One machine and the processes that run on it."""

    number: int  #: its node id in the cluster
    roles: tuple[str, ...] = (CONTROLLER, BROKER, TIER)
    skew_ms: int = 0
    #: Prefix of its name in a world of several clusters (restore_run.py); not in `repr`: a run of
    #: one cluster keeps its digest.
    cluster: str = field(default="", repr=False)

    @property
    def name(self) -> str:
        return f"{self.cluster}n{self.number}"


@dataclass(slots=True, frozen=True)
class TopicPlan:
    """One topic of a run, with its settings."""

    name: str
    partitions: int
    configs: Mapping[str, str]
    replication_factor: int = 1

    @property
    def flushed(self) -> bool:
        """Whether acknowledged records are SYNCED (rule L2): no power loss may lose them."""
        return self.configs.get("flush_on_ack") == "true"

    @property
    def tiered(self) -> bool:
        return self.configs.get("tier_enable") != "false"

    @property
    def expires(self) -> bool:
        """Whether the topic's size-based retention moves log_start without a request."""
        return "retention_bytes" in self.configs

    @property
    def keeps(self) -> bool:
        """Whether no record expires by age, whatever the clocks say."""
        return self.configs.get("retention_ms") == "-1"

    @property
    def unclean(self) -> bool:
        """Whether the topic may elect a leader without all last-known members (rule R3)."""
        return self.configs.get("unclean_leader_election_enable") == "true"

    @property
    def copies(self) -> int:
        """How many replicas hold an acknowledged record at least (rule R1)."""
        return min(int(self.configs.get("min_insync_replicas", "1")), self.replication_factor)


@dataclass(slots=True, frozen=True)
class SimOptions:
    """All options of one run."""

    topics: tuple[TopicPlan, ...]
    nodes: tuple[NodePlan, ...] = (NodePlan(1),)
    faults: tuple[str, ...] = _USUAL_FAULTS
    chores: tuple[str, ...] = _USUAL_CHORES
    fault_ms: int = 5_000
    heal_ms: int = 180_000  #: virtual time within which the cluster must work again
    acknowledged_min: int = 0  #: the fault phase goes on until this many acknowledgements
    grain_us: int = 1  #: timers due within it fire at once (sim/loop W5)
    tick_ms: int = 5  #: interval of the checks of faults and supervisors
    fault_every_ms: tuple[int, int] = (150, 1_200)
    chore_every_ms: tuple[int, int] = (300, 1_500)
    pace_ms: tuple[int, int] = (10, 120)  #: pause between two bursts of a producer
    burst: tuple[int, int] = (1, 6)
    value_bytes: tuple[int, int] = (20, 2_000)
    codecs: tuple[str, ...] = ("none", "lz4")  #: one idempotent producer for each codec
    server: Mapping[str, Any] = field(default_factory=dict)
    timing: Mapping[str, int] = field(default_factory=dict)  #: timing of the metadata quorum
    vacuum: bool = False  #: deleted tier files are removed at once
    recent_bytes: int | None = None  #: bytes of the ends of logs in memory; None = as in production
    #: Number of transactional ids that producers write with; 0 = no transactions.  This field and
    #: the next are not in `repr`: a run without transactions keeps its digest.
    transactions: int = field(default=0, repr=False)
    transaction_topics: tuple[TopicPlan, ...] = field(default=(), repr=False)
    #: Number of jobs, whose tasks write to the topics of transactions; not in `repr` either.
    jobs: int = field(default=0, repr=False)
    #: Number of jobs whose batches a Delta table decides; not in `repr` either.
    together_jobs: int = field(default=0, repr=False)
    #: Number of members of the consumer group that reads the topics; not in `repr` either.
    groups: int = field(default=0, repr=False)
    #: Whether a query that lags behind holds retention; not in `repr` either.
    holds: bool = field(default=False, repr=False)
    #: Topics whose logs or tables are cleaned, with writers and readers of their own; not in `repr`
    #: either.
    compacted_topics: tuple[TopicPlan, ...] = field(default=(), repr=False)
    #: Whether `flush_on_ack` is the default of the cluster, which pk's own topics follow; those of
    #: the run name it themselves.  Without it, power losses may lose what coordinators decided.
    internal_flushed: bool = field(default=True, repr=False)

    @property
    def job_ids(self) -> tuple[str, ...]:
        """Return the transactional id of each job."""
        return tuple(f"job{number}" for number in range(self.jobs))

    @property
    def together_job_ids(self) -> tuple[str, ...]:
        """Return the transactional id of each job whose batches a Delta table decides."""
        return tuple(f"both{number}" for number in range(self.together_jobs))

    @property
    def transactional_ids(self) -> tuple[str, ...]:
        """Return every transactional id of the run."""
        plain = (f"id{number}" for number in range(self.transactions))
        return (*plain, *self.job_ids, *self.together_job_ids)

    @property
    def maintained_topics(self) -> tuple[TopicPlan, ...]:
        """Return the compacted topics whose tables jobs maintain."""
        return tuple(plan for plan in self.compacted_topics if plan.tiered)

    def with_role(self, role: str) -> tuple[NodePlan, ...]:
        """Return the machines that run a process of `role`."""
        return tuple(node for node in self.nodes if role in node.roles)


def drawn(rng: random.Random, *, faults: Iterable[str] | None = None, **given: Any) -> SimOptions:
    """Draw the options of a seed; `given` options replace the drawn ones."""
    nodes = given.get("nodes") or nodes_drawn(rng)
    brokers = sum(BROKER in node.roles for node in nodes)
    chosen = tuple(name for name in _FIRST_FAULTS if rng.random() < 0.5)
    chores = tuple(name for name in _FIRST_CHORES if rng.random() < 0.6)
    topics = tuple(_topic(rng, number, brokers) for number in range(rng.randint(1, 3)))
    every_ms = rng.choice([250, 600, 1_500, 4_000])
    slow = rng.choice([1, 1, 2, 4])
    options = SimOptions(
        topics=topics,
        nodes=nodes,
        faults=chosen,
        chores=chores,
        fault_every_ms=(every_ms // 4, 2 * every_ms),
        chore_every_ms=(1_000, 6_000),
        pace_ms=(50, rng.choice([200, 500])),
        vacuum=rng.random() < 0.3,
        codecs=("none", "lz4") if rng.random() < 0.5 else ("none",),
        server={
            "producer_id_expiration_ms": 86_400_000,
            "broker_session_timeout_ms": rng.choice([1_500, 3_000, 6_000]),
            "broker_heartbeat_interval_ms": rng.choice([200, 400]),
            "unclean_recovery_wait_ms": rng.choice([500, 3_000]),
            "replica_lag_time_max_ms": rng.choice([1_000, 3_000, 10_000]),
        },
        timing={"election_ms": 500 * slow, "fetch_ms": 1_000 * slow, "wait_ms": 250 * slow},
    )
    options = _drawn_room(rng, _drawn_last(rng, _drawn_later(rng, options)))
    if faults is not None:
        given["faults"] = tuple(faults)
    options = replace(options, **given)
    if faults is not None or {"transactions", "jobs", "together_jobs"} & given.keys():
        return options
    if rng.random() < TRANSACTIONS_CHANCE:
        options = with_transactions(rng, options, brokers)
    if rng.random() < JOBS_CHANCE and brokers >= JOB_BROKERS_MIN:
        options = with_jobs(rng, options, brokers)
    if rng.random() < COMPACTION_CHANCE:
        options = with_compaction(rng, options, brokers)
    if rng.random() < MAINTENANCE_CHANCE:
        options = with_maintenance(rng, options, brokers)
    if rng.random() < TOGETHER_CHANCE and brokers >= JOB_BROKERS_MIN:
        options = with_together(rng, options, brokers)
    more = tuple(name for name in _DESCRIPTOR_FAULTS if rng.random() < 0.3)
    options = replace(options, faults=(*options.faults, *more))
    if rng.random() < GROUP_CHANCE and brokers >= JOB_BROKERS_MIN:
        options = with_group(rng, options)
    internal_flushed, holds = rng.random() < 0.5, rng.random() < HOLDS_CHANCE
    more = tuple(name for name in _CONTROLLER_FAULTS if rng.random() < 0.3)
    return replace(
        options,
        faults=(*options.faults, *more),
        internal_flushed=internal_flushed,
        holds=options.holds or holds,
    )


def with_transactions(rng: random.Random, options: SimOptions, brokers: int) -> SimOptions:
    """Return the options with drawn transactional ids, topics for their records, and faults."""
    topics = tuple(
        _transaction_topic(rng, number, brokers) for number in range(rng.choice([1, 1, 2]))
    )
    faults = tuple(name for name in TRANSACTION_FAULTS if rng.random() < 0.6)
    return replace(
        options,
        transactions=rng.randint(1, 3),
        transaction_topics=topics,
        faults=(*options.faults, *faults),
    )


def with_jobs(rng: random.Random, options: SimOptions, brokers: int) -> SimOptions:
    """Return the options with drawn jobs, and with what their batches need.

    Their topics are those of plain transactions, if the run has such.
    """
    if not options.transactions:
        options = replace(with_transactions(rng, options, brokers), transactions=0)
    leases = {
        "participant_lease_ms": rng.choice(LEASE_MS),
        "participant_transaction_max_ms": rng.choice(BATCH_MAX_MS),
    }
    return replace(options, jobs=rng.randint(1, 2), server={**options.server, **leases})


def with_together(rng: random.Random, options: SimOptions, brokers: int) -> SimOptions:
    """Return the options with drawn jobs of log and table, faults of the table, and resolvers."""
    if not options.jobs:
        options = replace(with_jobs(rng, options, brokers), jobs=0)
    faults = tuple(name for name in LAKE_FAULTS if rng.random() < 0.6)
    resolvers = {"prepared_max_ms": rng.choice(PREPARED_MAX_MS), "resolver_table_urls": LAKE_URL}
    return replace(
        options,
        together_jobs=rng.randint(1, 2),
        faults=(*options.faults, *faults),
        server={**options.server, **resolvers},
    )


def with_group(rng: random.Random, options: SimOptions) -> SimOptions:
    """Return the options with a drawn group, whose offsets the tier may copy."""
    copies = {"tier_offsets_interval_ms": rng.choice(OFFSET_COPIES_MS)}
    return replace(options, groups=rng.randint(2, 6), server={**options.server, **copies})


def with_compaction(rng: random.Random, options: SimOptions, brokers: int) -> SimOptions:
    """Return the options with drawn compacted topics, and faults that hit their cleanings."""
    topics = tuple(
        _compacted_topic(rng, number, brokers) for number in range(rng.choice([1, 1, 2]))
    )
    faults = tuple(name for name in COMPACTION_FAULTS if rng.random() < 0.6)
    backoff = {"log_cleaner_backoff_ms": rng.choice([100, 300, 1_000])}
    return replace(
        options,
        compacted_topics=topics,
        faults=(*options.faults, *faults),
        server={**options.server, **backoff},
    )


def with_maintenance(rng: random.Random, options: SimOptions, brokers: int) -> SimOptions:
    """Return the options with a drawn compacted topic whose table jobs maintain."""
    drawn = _compacted_topic(rng, 0, brokers)
    configs = {
        **drawn.configs,
        "tier_enable": "true",
        "tier_max_lag_ms": str(rng.choice([50, 200])),
        # the copier has AHEAD_MAX files under way: smaller ones would not keep up with the writers
        "tier_file_bytes": str(rng.choice([60_000, 200_000])),
        "local_drop_delay_ms": str(rng.choice([0, 200])),
        "local_retention_bytes": str(rng.choice([0, 0, 15_000])),
        "delete_retention_ms": str(rng.choice(DELETE_RETENTION_MS[:2])),
    }
    if rng.random() < 0.3:
        configs.update(cleanup_policy="compact,delete", retention_bytes="60000")
    topic = replace(drawn, name="maintained", configs=configs)
    return replace(
        options,
        compacted_topics=(*options.compacted_topics, topic),
        fault_ms=max(options.fault_ms, MAINTENANCE_MS),
    )


def _compacted_topic(rng: random.Random, number: int, brokers: int) -> TopicPlan:
    drawn = _topic(rng, number, brokers)
    kept = ("segment_bytes", "index_interval_bytes", "file_delete_delay_ms", "min_insync_replicas",
            "unclean_leader_election_enable", "flush_on_ack", "message_timestamp_type")  # fmt: skip
    configs = {name: value for name, value in drawn.configs.items() if name in kept}
    configs.update(
        KEPT,
        tier_enable="false",
        cleanup_policy="compact",
        segment_bytes=str(SEGMENT_BYTES_LEAST),
        min_cleanable_dirty_ratio=str(rng.choice([0.0, 0.1, 0.4])),
        delete_retention_ms=str(rng.choice(DELETE_RETENTION_MS)),
    )
    if rng.random() < 0.3:
        configs["max_compaction_lag_ms"] = "2000"
    partitions = rng.randint(1, 2)
    return replace(drawn, name=f"compacted{number}", partitions=partitions, configs=configs)


def _transaction_topic(rng: random.Random, number: int, brokers: int) -> TopicPlan:
    """Draw a topic of transactions: no record of it expires, and it has no unclean elections."""
    drawn = _topic(rng, number, brokers)
    left_out = ("retention_bytes", "flush_ms", "unclean_leader_election_enable")
    configs = {name: value for name, value in drawn.configs.items() if name not in left_out}
    configs.update(KEPT, flush_on_ack="true")
    return replace(drawn, name=f"transactions{number}", configs=configs)


def _drawn_later(rng: random.Random, options: SimOptions) -> SimOptions:
    """Draw the second group of options after the first, so that the draws of the first stay the
    same."""
    snapshots = {"metadata_log_max_record_bytes_between_snapshots": rng.choice(SNAPSHOT_BYTES)}
    faults = tuple(name for name in _LATER_FAULTS if rng.random() < 0.5)
    chores = tuple(name for name in _LATER_CHORES if rng.random() < 0.4)
    return replace(
        options,
        grain_us=rng.choice(GRAIN_US),
        server={**options.server, **snapshots},
        faults=(*options.faults, *faults),
        chores=(*options.chores, *chores),
    )


def _drawn_last(rng: random.Random, options: SimOptions) -> SimOptions:
    """Draw the options that came third.

    With a short producer expiration there are no clock steps: a broker may take repeated small
    steps for time that has passed, and then expire producers.
    """
    faults = (*options.faults, *(name for name in _SINGLE_FAULTS if rng.random() < 0.4))
    expiration_ms = rng.choice(EXPIRATION_MS)
    if expiration_ms != EXPIRATION_MS[0]:
        faults = tuple(name for name in faults if name != "clock_step")
    recent_bytes = rng.choice(RECENT_BYTES)
    faults = (*faults, *(name for name in _IDENTITY_FAULTS if rng.random() < 0.3))
    faults = (*faults, *(name for name in _OBJECT_FAULTS if rng.random() < 0.3))
    return replace(
        options,
        faults=faults,
        server={**options.server, "producer_id_expiration_ms": expiration_ms},
        recent_bytes=recent_bytes,
    )


def _drawn_room(rng: random.Random, options: SimOptions) -> SimOptions:
    """Draw the last options: the disk reserve, and whether disks of leaders fill up."""
    faults = (*options.faults, *(name for name in _ROOM_FAULTS if rng.random() < 0.4))
    reserve = {"disk_reserve_bytes": rng.choice(RESERVE_BYTES)}
    faults = (*faults, *(name for name in _LAST_FAULTS if rng.random() < 0.4))
    faults = (*faults, *(name for name in _TABLE_FAULTS if rng.random() < 0.3))
    faults = (*faults, *(name for name in _FRONT_FAULTS if rng.random() < 0.15))
    if "delete_rows" in faults:  # this fault needs topics without expiry by age
        topics = (replace(each, configs={**each.configs, **KEPT}) for each in options.topics)
        options = replace(options, topics=tuple(topics))
    chores = (*options.chores, *(name for name in _MOVE_CHORES if rng.random() < 0.4))
    return replace(options, faults=faults, chores=chores, server={**options.server, **reserve})


def nodes_drawn(rng: random.Random) -> tuple[NodePlan, ...]:
    """Draw mostly 3 to 5 controllers and brokers, on shared or separate machines."""
    if rng.random() < 0.1:
        controllers, brokers = 1, rng.randint(1, 2)
    else:
        controllers, brokers = rng.choice([1, 3, 3, 3, 5]), rng.choice([3, 3, 4, 5])
    both = rng.randint(0, min(controllers, brokers))
    if rng.random() < 0.4:
        both = min(controllers, brokers)
    roles: list[tuple[str, ...]] = [(CONTROLLER, BROKER, TIER)] * both
    roles += [(CONTROLLER,)] * (controllers - both)
    roles += [(BROKER, TIER)] * (brokers - both)
    return tuple(
        NodePlan(number, each, rng.choice([0, 0, rng.randint(-SKEW_MS, SKEW_MS)]))
        for number, each in enumerate(roles, 1)
    )


def _topic(rng: random.Random, number: int, brokers: int) -> TopicPlan:
    configs = {
        "segment_bytes": str(rng.choice([SEGMENT_BYTES_LEAST, 20_000, 60_000])),
        "index_interval_bytes": str(rng.choice([0, 1_000, 4_096])),
        "file_delete_delay_ms": str(rng.choice([0, 300, 2_000])),
        "retention_ms": RETENTION_MS,
    }
    factor = rng.choice([1, 2, 3, 3, 3, brokers])
    factor = min(factor, brokers)
    if factor > 1:
        configs["min_insync_replicas"] = str(rng.choice([1, 2, 2, 2, factor]))
    if rng.random() < 0.2:
        configs["unclean_leader_election_enable"] = "true"
    if rng.random() < 0.4:
        configs["flush_on_ack"] = "true"
    elif rng.random() < 0.3:
        configs["flush_ms"] = str(rng.randint(50, 500))
    if rng.random() < 0.3:
        configs["message_timestamp_type"] = "LogAppendTime"
    if rng.random() < 0.2:
        configs["tier_enable"] = "false"
    else:
        configs["tier_max_lag_ms"] = str(rng.choice([50, 200, 1_000]))
        configs["tier_file_bytes"] = str(rng.choice([20_000, 100_000, 1_000_000]))
        configs["local_drop_delay_ms"] = str(rng.choice([0, 200, 1_000]))
        configs["local_retention_bytes"] = str(rng.choice([0, 15_000, 40_000]))
        if rng.random() < 0.15:
            configs["retention_bytes"] = "60000"
    return TopicPlan(f"topic{number}", rng.randint(1, 3), configs, factor)
