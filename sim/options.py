"""What one simulated run does: how long, how busy, which faults; drawn from its seed.

Each seed enables its own subset of the faults and draws its own topics, so that rare combinations
come up and a plain run is among them.  Anything may be given instead of drawn: then the seed still
decides the rest in the same way.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

#: Every fault there is; `SimOptions.faults` holds those a run may meet.
FAULTS = (
    "kill_broker",
    "kill_controller",
    "kill_tier",
    "kill_client",
    "kill_all",
    "torn_write",
    "power",
    "drain",
    "break_streams",
    "slow_network",
    "cut",
    "disk_full",
    "store_outage",
    "store_flaky",
    "late_commit",
    "optimize",
    "clock_step",
)
#: What an administrator does meanwhile.
CHORES = ("recreate", "grow", "delete_records", "configure")
SEGMENT_BYTES_LEAST = 14_336


@dataclass(slots=True, frozen=True)
class TopicPlan:
    """One topic of a run."""

    name: str
    partitions: int
    configs: Mapping[str, str]

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


@dataclass(slots=True, frozen=True)
class SimOptions:
    """One run."""

    topics: tuple[TopicPlan, ...]
    faults: tuple[str, ...] = FAULTS
    chores: tuple[str, ...] = CHORES
    unrest_ms: int = 5_000
    heal_ms: int = 180_000  #: virtual time within which everything must be well again
    tick_ms: int = 5  #: invariants are looked at this often
    fault_every_ms: tuple[int, int] = (150, 1_200)
    chore_every_ms: tuple[int, int] = (300, 1_500)
    pace_ms: tuple[int, int] = (10, 120)  #: between two bursts of one producer
    burst: tuple[int, int] = (1, 6)
    value_bytes: tuple[int, int] = (20, 3_000)
    codecs: tuple[str, ...] = ("none", "lz4")  #: one idempotent producer each
    server: Mapping[str, Any] = field(default_factory=dict)
    vacuum: bool = False  #: deleted tier files go at once


def drawn(rng: random.Random, *, faults: Iterable[str] | None = None, **given: Any) -> SimOptions:
    """The options of a seed; `given` ones replace what was drawn."""
    chosen = tuple(name for name in FAULTS if rng.random() < 0.5)
    chores = tuple(name for name in CHORES if rng.random() < 0.6)
    topics = tuple(_topic(rng, number) for number in range(rng.randint(1, 3)))
    options = SimOptions(
        topics=topics,
        faults=chosen,
        chores=chores,
        vacuum=rng.random() < 0.3,
        codecs=("none", "lz4") if rng.random() < 0.5 else ("none",),
        server={"producer_id_expiration_ms": 86_400_000},
    )
    if faults is not None:
        given["faults"] = tuple(faults)
    return replace(options, **given)


def _topic(rng: random.Random, number: int) -> TopicPlan:
    configs = {
        "segment_bytes": str(rng.choice([SEGMENT_BYTES_LEAST, 20_000, 60_000])),
        "index_interval_bytes": str(rng.choice([0, 1_000, 4_096])),
        "file_delete_delay_ms": str(rng.choice([0, 300, 2_000])),
    }
    if rng.random() < 0.5:
        configs["flush_on_ack"] = "true"
    elif rng.random() < 0.3:
        configs["flush_ms"] = str(rng.randint(50, 500))
    if rng.random() < 0.3:
        configs["message_timestamp_type"] = "LogAppendTime"
    if rng.random() < 0.2:
        configs["tier_enable"] = "false"
    else:
        configs["tier_max_lag_ms"] = str(rng.choice([50, 200, 1_000]))
        configs["tier_file_bytes"] = str(rng.choice([4_000, 30_000, 1_000_000]))
        configs["local_drop_delay_ms"] = str(rng.choice([0, 200, 1_000]))
        configs["local_retention_bytes"] = str(rng.choice([0, 15_000, 40_000]))
        if rng.random() < 0.15:
            configs["retention_bytes"] = "60000"
    return TopicPlan(f"topic{number}", rng.randint(1, 3), configs)
