"""What a canary is: one broken rule, and the options of a run that notices it (canaries.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from pk.sim.campaign import Run
from pk.sim.options import KEPT, LAKE_URL, NodePlan, SimOptions, TopicPlan

TIERED = {
    "segment_bytes": "14336",
    "tier_max_lag_ms": "50",
    "tier_file_bytes": "4000",
    "local_drop_delay_ms": "0",
    "local_retention_bytes": "0",
    "file_delete_delay_ms": "0",
}
HOT = {"tier_enable": "false"}
FLUSHED = {**HOT, "flush_on_ack": "true"}
COMPACTED = {
    **HOT,
    **KEPT,
    "cleanup_policy": "compact",
    "segment_bytes": "14336",
    "min_cleanable_dirty_ratio": "0.0",
    "delete_retention_ms": "1500",
    "flush_on_ack": "true",
}
MAINTAINED = {
    **COMPACTED,
    "tier_enable": "true",
    "tier_max_lag_ms": "50",
    "tier_file_bytes": "100000",
    "local_drop_delay_ms": "0",
    "local_retention_bytes": "0",
}
SAFE = {**HOT, "min_insync_replicas": "2"}
#: Machines lose power one at a time, with long pauses, so that every remaining copy counts.
THREE = tuple(NodePlan(number) for number in (1, 2, 3))
ALONE = (NodePlan(1),)


@dataclass(frozen=True)
class Canary:
    """One broken rule: how it is broken, and the options of a run that notices it."""

    rule: str
    patches: Callable[[ExitStack], None]
    caught_as: str  #: the checks that may notice it: first words of the violation
    configs: Mapping[str, str]
    faults: tuple[str, ...]
    chores: tuple[str, ...] = ()
    nodes: tuple[NodePlan, ...] = ALONE
    copies: int = 1
    fault_ms: int = 4_000
    fault_every_ms: tuple[int, int] = (100, 500)
    lag_ms: int = 1_000  #: replica_lag_time_max_ms
    session_ms: int = 1_500  #: broker_session_timeout_ms
    heartbeat_ms: int = 300  #: broker_heartbeat_interval_ms
    expiration_ms: int = 86_400_000  #: producer_id_expiration_ms
    pace_ms: tuple[int, int] = (20, 200)
    recent_bytes: int | None = None
    reserve_bytes: int = 0  #: disk_reserve_bytes
    snapshot_bytes: int | None = None  #: metadata_log_max_record_bytes_between_snapshots
    transactions: int = 0  #: number of transactional ids
    jobs: int = 0
    together_jobs: int = 0  #: jobs whose batches a Delta table decides
    groups: int = 0  #: number of members of the consumer group
    copies_ms: int = 0  #: tier_offsets_interval_ms; 0 = no copies of committed offsets
    holds: bool = False  #: a query holds retention
    compacted: Mapping[str, str] | None = None  #: configs of a compacted topic
    maintained: Mapping[str, str] | None = None  #: configs of a topic whose table jobs maintain
    lease_ms: int = 5_000  #: participant_lease_ms, if there are jobs

    @property
    def options(self) -> SimOptions:
        option, size = "metadata_log_max_record_bytes_between_snapshots", self.snapshot_bytes
        return SimOptions(
            topics=(TopicPlan("t", 2, self.configs, self.copies),),
            nodes=self.nodes,
            faults=self.faults,
            chores=self.chores,
            fault_ms=self.fault_ms,
            heal_ms=60_000,
            fault_every_ms=self.fault_every_ms,
            chore_every_ms=(50, 200),
            pace_ms=self.pace_ms,
            server={
                "replica_lag_time_max_ms": self.lag_ms,
                "broker_session_timeout_ms": self.session_ms,
                "broker_heartbeat_interval_ms": self.heartbeat_ms,
                "producer_id_expiration_ms": self.expiration_ms,
                "disk_reserve_bytes": self.reserve_bytes,
                **({} if size is None else {option: size}),
                "tier_offsets_interval_ms": self.copies_ms,
                **self._leases,
                **({} if self.compacted is None else {"log_cleaner_backoff_ms": 100}),
            },
            recent_bytes=self.recent_bytes,
            transactions=self.transactions,
            transaction_topics=self._transaction_topics,
            jobs=self.jobs,
            together_jobs=self.together_jobs,
            groups=self.groups,
            holds=self.holds,
            compacted_topics=self._compacted_topics,
        )

    @property
    def _compacted_topics(self) -> tuple[TopicPlan, ...]:
        plans = (
            ("compacted", COMPACTED, self.compacted),
            ("maintained", MAINTAINED, self.maintained),
        )
        return tuple(
            TopicPlan(name, 1, {**usual, **own}, self.copies)
            for name, usual, own in plans
            if own is not None
        )

    @property
    def _leases(self) -> dict[str, Any]:
        if not (self.jobs or self.together_jobs):
            return {}
        leases: dict[str, Any] = {
            "participant_lease_ms": self.lease_ms,
            "participant_transaction_max_ms": 15_000,
        }
        if self.together_jobs:
            leases.update(prepared_max_ms=1_000, resolver_table_urls=LAKE_URL)
        return leases

    @property
    def _transaction_topics(self) -> tuple[TopicPlan, ...]:
        if not (self.transactions or self.jobs or self.together_jobs):
            return ()
        configs = {**self.configs, **KEPT, "flush_on_ack": "true"}
        return (TopicPlan("transactions", 3, configs, self.copies),)

    @contextmanager
    def broken(self) -> Iterator[None]:
        """Break the rule while this context is open."""
        with ExitStack() as stack:
            self.patches(stack)
            yield

    def notices(self, seed: int) -> str:
        """Run a seed with the broken rule; return the violation, '' = none."""
        with self.broken():
            return Run(seed, self.options).execute().violation

    def passes(self, seed: int) -> str:
        """Run a seed with the rule whole; return the violation, '' = none."""
        return Run(seed, self.options).execute().violation

    def caught(self, violation: str) -> bool:
        return violation.split(":")[0] in self.caught_as.split()
