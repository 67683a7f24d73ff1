"""What one simulated run does: which machines, how long, how busy, which faults; drawn from its
seed.

Each seed enables its own subset of the faults and draws its own cluster and topics, so that rare
combinations come up and a plain run is among them.  Anything may be given instead of drawn: then
the seed still decides the rest in the same way.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pk import limits

#: The first part of every fault there is; a seed draws those that came later behind all else.
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
#: Those that hold back, or refuse, a single thing while all others go on.
_SINGLE_FAULTS = ("disk_stall", "stream_stall", "disk_short", "store_stall", "clock_jump")
#: What goes while a broker is down (identities.py).
_IDENTITY_FAULTS = ("identity_lost", "identity_rot", "partition_lost")
#: Disks of leaders that fill up for so long that others must lead (rule L16).
_ROOM_FAULTS = ("leader_full",)
#: What happens to objects of the store (objects.py).
_OBJECT_FAULTS = ("object_rot",)
#: Those that are drawn behind all else.
_LAST_FAULTS = ("wrong_start",)
#: What happens to tables from outside (table_faults.py).
_TABLE_FAULTS = ("delta_rot", "delete_rows")
#: Every fault there is; `SimOptions.faults` holds those a run may meet.
FAULTS = (
    *_FIRST_FAULTS,
    *_LATER_FAULTS,
    *_SINGLE_FAULTS,
    *_IDENTITY_FAULTS,
    *_ROOM_FAULTS,
    *_OBJECT_FAULTS,
    *_LAST_FAULTS,
    *_TABLE_FAULTS,
)
#: What an administrator does meanwhile, in two parts as well.
_FIRST_CHORES = ("recreate", "grow", "delete_records", "configure", "reassign", "elect")
_LATER_CHORES = ("reassign_back", "toggle")
CHORES = (*_FIRST_CHORES, *_LATER_CHORES)
SEGMENT_BYTES_LEAST = 14_336
CONTROLLER, BROKER, TIER = "controller", "broker", "tier"
#: Between two snapshots of the metadata log: seldom in a run, or so often that who was away for a
#: moment has to load one.
SNAPSHOT_BYTES = (20 * limits.MIB, 20_000, 3_000)
#: Mostly every event has an instant of its own; or the loops are busy, and many share one.
GRAIN_US = (1, 1, 1_000, 4_000, 20_000)
#: How long a producer may be silent; the shorter one is still longer than any of a run asks again
#: (workload.DELIVERY_MS) and a clock may step unnoticed.
EXPIRATION_MS = (86_400_000, 120_000)
#: Longer than a run, with all the steps of its clocks: nothing has expired, by the true time.
RETENTION_MS = "7200000"
#: The same for ever.
KEPT = {"retention_ms": "-1"}
#: What is kept of the ends of logs in memory (log/batch_cache.py); none = every reader needs the
#: disk.
RECENT_BYTES = (None, None, 0, 4_000)
#: disk_reserve_bytes: full disks of the simulator have up to 30 kB left; 0 = they fill up entirely.
RESERVE_BYTES = (0, 4_000, 16_000)
#: How far the clocks of two machines may be apart from the start.
SKEW_MS = 2_000


@dataclass(slots=True, frozen=True)
class NodePlan:
    """One machine: which processes run on it."""

    number: int  #: its node id
    roles: tuple[str, ...] = (CONTROLLER, BROKER, TIER)
    skew_ms: int = 0

    @property
    def name(self) -> str:
        return f"n{self.number}"


@dataclass(slots=True, frozen=True)
class TopicPlan:
    """One topic of a run."""

    name: str
    partitions: int
    configs: Mapping[str, str]
    replication_factor: int = 1

    @property
    def flushed(self) -> bool:
        """Acknowledged means SYNCED (rule L2): nothing of it may go in a power loss."""
        return self.configs.get("flush_on_ack") == "true"

    @property
    def tiered(self) -> bool:
        return self.configs.get("tier_enable") != "false"

    @property
    def expires(self) -> bool:
        """Topic retention moves log_start without being asked."""
        return "retention_bytes" in self.configs

    @property
    def keeps(self) -> bool:
        """Nothing expires by age, whatever the clocks say."""
        return self.configs.get("retention_ms") == "-1"

    @property
    def unclean(self) -> bool:
        """It may elect a leader without all last-known members (rule R3)."""
        return self.configs.get("unclean_leader_election_enable") == "true"

    @property
    def copies(self) -> int:
        """How many replicas hold what is acknowledged, at least (rule R1)."""
        return min(int(self.configs.get("min_insync_replicas", "1")), self.replication_factor)


@dataclass(slots=True, frozen=True)
class SimOptions:
    """One run."""

    topics: tuple[TopicPlan, ...]
    nodes: tuple[NodePlan, ...] = (NodePlan(1),)
    faults: tuple[str, ...] = FAULTS
    chores: tuple[str, ...] = CHORES
    fault_ms: int = 5_000
    heal_ms: int = 180_000  #: virtual time within which everything must be well again
    acknowledged_min: int = 0  #: the fault phase goes on until so many records were acknowledged
    grain_us: int = 1  #: what comes due within it is ready at once
    tick_ms: int = 5  #: faults and the supervisors are looked at this often
    fault_every_ms: tuple[int, int] = (150, 1_200)
    chore_every_ms: tuple[int, int] = (300, 1_500)
    pace_ms: tuple[int, int] = (10, 120)  #: between two bursts of one producer
    burst: tuple[int, int] = (1, 6)
    value_bytes: tuple[int, int] = (20, 2_000)
    codecs: tuple[str, ...] = ("none", "lz4")  #: one idempotent producer each
    server: Mapping[str, Any] = field(default_factory=dict)
    timing: Mapping[str, int] = field(default_factory=dict)  #: of the metadata quorum
    vacuum: bool = False  #: deleted tier files go at once
    recent_bytes: int | None = None  #: of the ends of logs, kept in memory; None = as in production

    def with_role(self, role: str) -> tuple[NodePlan, ...]:
        """The machines that have `role`."""
        return tuple(node for node in self.nodes if role in node.roles)


def drawn(rng: random.Random, *, faults: Iterable[str] | None = None, **given: Any) -> SimOptions:
    """The options of a seed; `given` ones replace what was drawn."""
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
    return replace(options, **given)


def _drawn_later(rng: random.Random, options: SimOptions) -> SimOptions:
    """What came after seeds were known: drawn behind all else, so that it moves nothing else."""
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
    """And what came after that.  Where producers expire soon no clock steps by a little, again and
    again: that a broker takes for the time that passed, and it may.
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
    """And behind that: how much room is kept, and whether leaders run out of it."""
    faults = (*options.faults, *(name for name in _ROOM_FAULTS if rng.random() < 0.4))
    reserve = {"disk_reserve_bytes": rng.choice(RESERVE_BYTES)}
    faults = (*faults, *(name for name in _LAST_FAULTS if rng.random() < 0.4))
    faults = (*faults, *(name for name in _TABLE_FAULTS if rng.random() < 0.3))
    if "delete_rows" in faults:  # which leaves topics alone whose records expire by age
        topics = (replace(each, configs={**each.configs, **KEPT}) for each in options.topics)
        options = replace(options, topics=tuple(topics))
    return replace(options, faults=faults, server={**options.server, **reserve})


def nodes_drawn(rng: random.Random) -> tuple[NodePlan, ...]:
    """Mostly 3 to 5 controllers and brokers, on machines of their own or not."""
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
