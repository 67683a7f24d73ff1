"""The compacted topics of one run: their administrator, clients, and the judgement at the end.

A run with compacted topics has topics of its own for them (options.py).  They are not in the oracle
of the other topics, whose offsets have no gaps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pk.log import batch as batches
from pk.log import columns
from pk.sim.checkers import Violation
from pk.sim.cluster import SimCluster
from pk.sim.compaction import CompactionClient, CompactionReader, KeyedWriter, read_place
from pk.sim.compaction_checkers import check_rows
from pk.sim.compaction_history import CompactionHistory, KeyedRow, keyed_rows_of
from pk.sim.disk import observing
from pk.sim.machine import SimMachine
from pk.sim.options import BROKER, SimOptions
from pk.sim.oracle import Oracle
from pk.sim.samples import Observer
from pk.sim.table_run import TableRun
from pk.sim.workload import OnTrouble, SimAdmin
from pk.sim.world import SimWorld
from pk.types import Offset, PartitionKey, TopicPartition
from pk.world import World

NODE = "admin/compaction"
#: The chores of compacted topics, of those that the run has.
CHORES = ("reassign", "reassign_back", "elect", "resize")
READERS = 2
WRITERS = 2
#: Decoded bytes of a batch.
DECODED_BYTES_MAX = 1 << 24


class CompactionRun:
    """The compacted topics of one run; `counts` takes what happened."""

    def __init__(
        self,
        world: SimWorld,
        cluster: SimCluster,
        observer: Observer,
        oracle: Oracle,
        counts: dict[str, int],
        trouble: OnTrouble,
        bounds_of: Callable[[str, int], tuple[int, int]],
    ) -> None:
        self._world = world
        self._cluster = cluster
        self._observer = observer
        self._counts = counts
        options: SimOptions = cluster.options
        topics = options.compacted_topics
        self._known = Oracle(topics)  #: topic ids and numbers of partitions
        self._known.now_ms = oracle.now_ms
        retention_ms = {each.name: int(each.configs["delete_retention_ms"]) for each in topics}
        self.history = CompactionHistory(self._known, oracle, retention_ms)
        self.shared = CompactionClient(
            cluster.bootstrap,
            self.history,
            options,
            trouble,
            world.record,
            oracle.now_ms,
            self.end_of,
            deleted=oracle.thinned_tables,
            rotten=oracle.rotten_files,
        )
        chores = tuple(name for name in CHORES if name in options.chores)
        self.admin = SimAdmin(
            world.world_of(NODE),
            cluster.bootstrap,
            self._known,
            replace(options, topics=topics, chores=(*chores, "elect")),
            world.random(f"{NODE}/chores"),
            bounds_of,
            trouble,
        )
        cluster.listeners["log_cleaned"] = self._cleaned
        self._was_offline = cluster.listeners["partition_offline"]
        cluster.listeners["partition_offline"] = self._offline
        self.tables = TableRun(world, cluster, observer, self.shared, counts)
        self.history.log_start_of = observer.invariants.log_start
        self.chores: Any = None
        self._writers: list[KeyedWriter] = []

    def end_of(self, place: TopicPartition) -> Offset:
        """Return the largest high watermark of any leader so far.

        A leader that has just begun may know a lower one.  Where records were lost, the present one
        counts.
        """
        topic = self._known.topics[place.topic]
        key = PartitionKey(topic.topic_id, place.partition)
        if not self.history.may_be_cut(place):
            return self._observer.highest.get(key, 0)
        sample = self._observer.latest.get(key)
        return 0 if sample is None else sample.high_watermark

    def _cleaned(self, _machine: SimMachine, told: dict[str, object]) -> None:
        name = "tombstones removed"
        self._counts[name] = self._counts.get(name, 0) + int(str(told["tombstones"]))

    def _offline(self, machine: SimMachine, told: dict[str, object]) -> None:
        """Check that no replica refuses to follow: only what is committed may be cleaned."""
        self._was_offline(machine, told)
        topic, _, partition = str(told["partition"]).rpartition("-")
        if topic in self._known.topics and "no unclean election explains" in str(told["error"]):
            place = TopicPartition(topic, int(partition))
            if not self.history.may_be_cut(place):
                self.shared.trouble(f"V29: {machine.name} lost what it had cleaned: {told}")

    # -- phases ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the administrator."""
        self._world.record(f"compacted topics {self._cluster.options.compacted_topics}")
        self.chores = self._world.spawn(NODE, self.admin.run())

    def start_client(self, world: World, life: int) -> None:
        """Start the writers and readers of one life of the client; call it in its node."""
        self.history.forget_pending()
        random_of = self._world.random
        self._writers = [
            KeyedWriter(world, self.shared, name, random_of(name))
            for name in (f"w{number}.{life}" for number in range(WRITERS))
        ]
        for writer in self._writers:
            writer.start()
        for number in range(READERS):
            name = f"r{number}.{life}"
            CompactionReader(world, self.shared, name, random_of(name)).start()
        self.tables.start_client(world, life)

    def rest(self) -> None:
        """Let the administrator, the writers and the readers end, and begin nothing."""
        self.admin.resting = self.shared.stopping = True

    @property
    def over(self) -> bool:
        """Whether a writer can send no more, which is a reason to restart the client."""
        return not self.shared.stopping and any(writer.over for writer in self._writers)

    def unsettled(self) -> str:
        """Return what is not ended yet; '' = nothing."""
        if not self.chores.done():
            return "a chore of compacted topics goes on"
        pending = self.history.pending()
        return f"{pending} keyed records wait" if pending else self.tables.unsettled()

    # -- validation --------------------------------------------------------------------------------

    async def read(self, world: World) -> None:
        """Check every partition from its start, as a last reader gets it."""
        await self.tables.finish(world)
        for place in self.history.places():
            await read_place(world, self.shared, place, 0, "the last reader", insist=True)

    def judge(self) -> None:
        """Check every replica (V29) and every maintained table (V30)."""
        self.tables.judge()
        now_ms = self.shared.now_ms()
        for machine in self._cluster.with_role(BROKER):
            broker = machine.broker
            if broker is None:
                raise Violation(f"V29: {machine.name} is down")
            for partition in list(broker.core.partitions.values()):
                topic = self._known.topics.get(partition.topic)
                if topic is None or partition.key.topic_id != topic.topic_id:
                    continue
                place = TopicPartition(partition.topic, partition.key.partition)
                rows = self._rows(partition.log, partition.high_watermark, now_ms)
                check_rows(
                    self.history,
                    place,
                    rows,
                    start=partition.log.local_log_start if partition.tiered else 0,
                    began_ms=now_ms,
                    now_ms=now_ms,
                    rule="V29",
                    who=machine.name,
                )

    @staticmethod
    def _rows(log: Any, end: Offset, now_ms: float) -> list[KeyedRow]:
        found: list[KeyedRow] = []
        at = log.local_log_start
        while at < end:
            with observing():
                read = log.read(at, bound=end, max_bytes=1 << 20)
            if not read.data:
                break
            for header, raw in batches.iter_batches(read.data):
                if header.record_count and not header.control:
                    rows = columns.decode(raw, decoded_bytes_max=DECODED_BYTES_MAX)
                    found += keyed_rows_of(rows, now_ms)
            at = read.next_offset
        return found

    def figures(self) -> dict[str, int]:
        """Return the counters of the run."""
        events = self._cluster.events
        chores = {f"chore {name} of compacted topics": n for name, n in self.admin.counts.items()}
        return {
            "keyed records": len(self.history.sent),
            "reads of compacted topics": self.shared.reads,
            "cleanings": events.get("log_cleaned", 0),
            "cleanings that failed": events.get("log_not_cleaned", 0),
            **chores,
        }
