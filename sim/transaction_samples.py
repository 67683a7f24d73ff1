"""Takes samples of transaction coordinators and of the logs of transactions, for the checkers.

What a coordinator has decided counts only once it is committed: the samples leave a machine out
while records of it are not committed yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pk import errors
from pk.log import batch as batches
from pk.log.control_rows import decode_markers
from pk.log.storage import Buffer
from pk.server.replica.partition import Partition
from pk.server.transactions.participants.jobs import Jobs
from pk.server.transactions.participants.state import Job
from pk.server.transactions.state import NO_PAIR, ProducerPair, TransactionMetadata
from pk.server.transactions.state import TransactionState as State
from pk.sim.checkers import require
from pk.sim.cluster import SimCluster
from pk.sim.disk import observing
from pk.sim.job_checkers import HistoriesCheck
from pk.sim.options import BROKER
from pk.sim.oracle import Oracle
from pk.sim.samples import READ_BYTES, Observer
from pk.sim.together_checkers import EvidenceCheck
from pk.sim.transaction_checkers import DecisionsCheck, FencesCheck
from pk.sim.transaction_history import TransactionHistory
from pk.transactional_ids import TOPIC, partition_of_id, partition_of_producer
from pk.types import NONE, PartitionKey

#: A refusal may be this old when its driver gets it: calls of jobs have 8 s.
ANSWER_MS = 10_000

_COMPLETE = (State.COMPLETE_COMMIT, State.COMPLETE_ABORT)
_PREPARED = (State.PREPARE_COMMIT, State.PREPARE_ABORT)


class TransactionSamples:
    """Watches the coordinators and the partitions of `history`; the module says how."""

    def __init__(
        self, cluster: SimCluster, observer: Observer, oracle: Oracle, counts: dict[str, int]
    ) -> None:
        self._cluster = cluster
        self._observer = observer
        self._oracle = oracle
        self._counts = counts
        self.history: TransactionHistory | None = None
        self.decisions = DecisionsCheck()
        self.histories = HistoriesCheck()
        self.evidence = EvidenceCheck(cluster.lake.has, cluster.lake.reads)
        self._fences: dict[PartitionKey, tuple[float, FencesCheck]] = {}
        self._read: dict[PartitionKey, int] = {}
        self._coordinators: dict[int, int] = {}  #: partition → its newest leader epoch seen
        #: partition → when a broker was last seen to coordinate it in an epoch that was over
        self._deposed_ms: dict[int, float] = {}

    # -- the topic of the coordinators -------------------------------------------------------------

    def coordinator_key(self, transactional_id: str) -> tuple[str, int]:
        """Return topic id and partition of the coordinator of an id; the topic id may be ""."""
        return self.state_topic_id, partition_of_id(transactional_id)

    @property
    def state_topic_id(self) -> str:
        topic = self._observer.image.topic(TOPIC)
        return "" if topic is None else topic.topic_id

    def _lost_ms(self, partition: int) -> float:
        return self._oracle.lost_ms(self.state_topic_id, partition)

    def coordinator_of(self, transactional_id: str) -> int:
        """Return the broker that coordinates an id now; NONE = no broker does."""
        topic_id, number = self.coordinator_key(transactional_id)
        state = self._observer.image.partition(PartitionKey(topic_id, number))
        return NONE if state is None else state.leader

    def deposed(self, transactional_id: str) -> bool:
        """Return whether a deposed coordinator may have answered about an id lately.

        Within its lease a coordinator answers from what it knows, also if it has not heard yet that
        another broker leads (rule R6).  It commits nothing then, but its refusals are stale.
        """
        seen_ms = self._deposed_ms.get(partition_of_id(transactional_id), NONE)
        return seen_ms != NONE and self._oracle.now_ms() - seen_ms <= ANSWER_MS

    # -- samples -----------------------------------------------------------------------------------

    def look(self) -> None:
        """Check what the coordinators and the leaders have committed since the last call."""
        for machine in self._cluster.with_role(BROKER):
            broker = machine.broker
            if broker is None or not machine.serving:
                continue
            for number, hosted in broker.core.coordinators._hosted.items():
                self._is_it_current(number, hosted.epoch)
                log = hosted._log
                reading = hosted.loading or hosted.host.replaying
                if not reading and log.committed == log.end:
                    self._coordinated(machine.name, number, hosted.epoch)
                    machine_of: Any = hosted.host.machine
                    who = f"{machine.name} in epoch {hosted.epoch}"
                    for known in machine_of.transactions.values():
                        self._decided(who, known)
                    for job in machine_of.jobs.items().values():
                        newest = hosted.epoch >= self._coordinators[number]
                        self._decided_batch(who, job, machine_of.jobs, newest=newest)
        for partition in self._led():
            self._scan(partition)

    def _is_it_current(self, number: int, epoch: int) -> None:
        state = self._observer.image.partition(PartitionKey(self.state_topic_id, number))
        if state is not None and epoch < state.leader_epoch:
            self._deposed_ms[number] = self._oracle.now_ms()

    def _coordinated(self, name: str, number: int, epoch: int) -> None:
        before = self._coordinators.get(number, epoch)
        if epoch > before:
            moves = self._counts.get("coordinators moved", 0)
            self._counts["coordinators moved"] = moves + 1
        self._coordinators[number] = max(epoch, before)

    def _decided(self, who: str, known: TransactionMetadata) -> None:
        pair: ProducerPair = NO_PAIR
        if known.state in _PREPARED:
            pair = known.current
        elif known.state in _COMPLETE:
            pair = known.previous
        if pair != NO_PAIR:
            lossy = self._lost_ms(partition_of_id(known.transactional_id)) != NONE
            self.decisions.decided(pair, known.state.committed, who, lossy=lossy)

    def _decided_batch(self, who: str, job: Job, jobs: Jobs, *, newest: bool) -> None:
        """Check what a coordinator has decided about the last batch of a job, and its history.

        `newest`: no later leader epoch of the coordinator was seen; its history has every batch.
        """
        lossy = self._lost_ms(partition_of_id(job.job)) != NONE
        if job.state in (*_PREPARED, *_COMPLETE):
            for producer_id, each in jobs.joined(job):
                commit = job.state.committed and producer_id in job.named
                self.decisions.decided((producer_id, each.epoch), commit, who, lossy=lossy)
        if lossy:
            return
        self._evidence(who, job)
        if job.state in (*_PREPARED, *_COMPLETE) and job.state.committed:
            self.histories.committed(who, job.job, job.batch, job.transaction)
        if newest:
            self.histories.seen(who, job.job, job.last_committed, jobs.history(job.job))

    def _evidence(self, who: str, job: Job) -> None:
        """Check V35: note a job that waits for its table, and how its transaction ended."""
        if job.awaited is not None:
            self.evidence.prepared(job.job, job.transaction, job.batch, job.opened_by)
        elif job.state in (*_PREPARED, *_COMPLETE):
            commit, now_ms = job.state.committed, self._oracle.now_ms()
            self.evidence.ended(who, job.job, job.transaction, now_ms, commit=commit)

    def _led(self) -> Iterator[Partition]:
        """Yield the partitions of transactions, each on its current leader."""
        for facts in self._observer.facts():
            machine = self._cluster.by_id.get(facts.leader)
            if facts.topic not in self._topics or machine is None or machine.broker is None:
                continue
            partition = machine.broker.core.partitions.get(facts.key)
            leader = None if partition is None else partition.leader
            if partition is None or leader is None or not machine.serving:
                continue
            if leader.leader_epoch == facts.leader_epoch:
                yield partition

    @property
    def _topics(self) -> list[str]:
        return [plan.name for plan in self._cluster.options.transaction_topics]

    def _scan(self, partition: Partition) -> None:
        """Check the batches that were committed since the last call.

        After the end of an era the check begins again: markers may be lost.
        """
        key, log, lost_ms = partition.key, partition.log, self._oracle.lost_ms(*partition.key)
        known = self._fences.get(key)
        if known is None or known[0] != lost_ms:
            known = self._fences[key] = lost_ms, FencesCheck(str(partition))
            self._read[key] = log.local_log_start
        at, fences = max(self._read[key], log.local_log_start), known[1]
        while at < partition.high_watermark:
            try:
                with observing():
                    found = log.read(at, bound=partition.high_watermark, max_bytes=READ_BYTES)
            except (errors.OffsetOutOfRange, errors.CorruptLog):
                return
            if not found.data:
                break
            for header, raw in batches.iter_batches(found.data):
                if header.control:
                    self._markers(str(partition), fences, header.base_offset, raw)
                elif header.transactional and not self._forgotten(header.producer_id):
                    producer = header.producer_id, header.producer_epoch
                    fences.batch(header.base_offset, *producer)
            at = found.next_offset
        self._read[key] = at

    def _forgotten(self, producer_id: int) -> bool:
        """Return whether the coordinator of a producer id may have lost decisions."""
        return self._lost_ms(partition_of_producer(producer_id)) != NONE

    def _markers(self, where: str, fences: FencesCheck, offset: int, raw: Buffer) -> None:
        for row in decode_markers(raw):
            lossy = self._forgotten(row.producer_id)
            pair = row.producer_id, row.producer_epoch - 1
            self.decisions.decided(pair, row.commit, f"a marker in {where}", lossy=lossy)
            self._counts["markers"] = self._counts.get("markers", 0) + 1
            if not lossy:
                place = offset, row.producer_id, row.producer_epoch
                fences.marker(*place, row.coordinator_epoch)

    def check_none_waits(self, jobs: Iterable[str]) -> None:
        """Check V35: no coordinator has a prepared batch, unless it may have lost decisions."""
        for name in jobs:
            machine = self._cluster.by_id.get(self.coordinator_of(name))
            number = partition_of_id(name)
            if machine is None or machine.broker is None or self._lost_ms(number) != NONE:
                continue
            hosted = machine.broker.core.coordinators._hosted.get(number)
            found: Any = None if hosted is None else hosted.host.machine
            job = None if found is None else found.jobs.items().get(name)
            waits = job is not None and job.awaited is not None
            require(not waits, "V35", "{} waits for its table after the end of all faults", job)

    # -- the end -----------------------------------------------------------------------------------

    def unstable(self) -> str:
        """Return a partition whose LSO is below the high watermark; '' = there is none (V22).

        A partition does not count if the coordinators of all its open transactions may have lost
        their decisions.
        """
        for partition in self._led():
            stable, high = partition.last_stable_offset, partition.high_watermark
            if stable < high:
                producers = partition.log.producers.open_transactions
                if not producers or not all(self._forgotten(each) for each in producers):
                    return f"{partition}: LSO {stable}, HW {high}, open {producers}"
        return ""
