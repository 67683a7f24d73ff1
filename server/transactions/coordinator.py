"""The transaction coordinator of one broker: a host for each partition of `__transaction_state`
that the broker leads.

World-generic.  The decisions are the machine's (machine.py); this module gives it what a pure core
has not: fresh producer ids, the metadata image, the clock, and the delivery of markers.

Invariants
  N1  A partition is hosted in the leader epoch in which this broker leads it.  When that epoch ends
      the host ends, and the markers that it was delivering are left to the next coordinator.
  N2  While the host replays, requests get CoordinatorLoading.
  N3  After every replay, also after a failed write, each transaction that is prepared has its
      markers sent to all of its partitions.
  N4  No reply leaves a broker without contact to the controller: another broker may coordinate the
      partition by then.
  N5  No transaction times out, and no id is forgotten, while the clock is not trusted (rule L10).
  N6  A timeout passes by the wall clock, or by the monotonic clock since this broker coordinates
      the transaction.  The time in the record may come from a clock that was ahead.
  N7  A partition whose log makes no progress does not delay the timeouts of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from pk import errors, limits
from pk.backoff import Backoff
from pk.effects import Effect, Publish
from pk.server.metadata.cache import MetadataCache
from pk.server.replica.context import (
    ControllerContact,
    Environment,
    InterBrokerCalls,
    MetadataProgress,
)
from pk.server.replica.partition import Partition
from pk.server.replica.replay_log import PartitionReplayLog
from pk.server.runtime.replayed_host import ReplayedHost
from pk.server.transactions import commands, records
from pk.server.transactions.machine import TransactionCoordinator
from pk.server.transactions.marker_sender import Ending, TransactionMarkerSender
from pk.server.transactions.participants.awaited_batches import AwaitedBatches
from pk.server.transactions.participants.leases import Leases
from pk.server.transactions.state import ProducerPair
from pk.server.transactions.verifier import coordinator_of
from pk.tasks import TaskRegistry
from pk.transactional_ids import PARTITIONS, TOPIC, FoundBy, partition_of_id, producer_id
from pk.types import NONE, Epoch, PartitionKey, ProducerId
from pk.wire import frames
from pk.wire import pk_pb2 as wire

TICK_MS = 250
#: How often ids without a transaction are looked for.
FORGET_MS = 60_000
BACKOFF_MS = (50, 2_000)


class TransactionClock(Protocol):
    """The broker's wall clock (broker/clock_watch.py)."""

    def trusted_ms(self) -> int | None: ...


class _Hosted:
    """One partition that this broker coordinates, in one leader epoch."""

    def __init__(
        self,
        rules: commands.TransactionRules,
        epoch: Epoch,
        host: ReplayedHost[Any, Any],
        log: PartitionReplayLog[records.TransactionLogRecord],
        leases: Leases,
        awaited: AwaitedBatches,
    ) -> None:
        self.number = rules.partition
        self._rules = rules
        self.epoch = epoch
        self.host = host
        self._log = log
        self.loading = True  # N2
        self.resumed: Any = None  #: the machine whose prepared transactions were taken up (N3)
        self.deadlines: dict[str, commands.TransactionBegan] = {}
        self.endings: dict[str, Ending] = {}
        self.leases = leases
        self.awaited = awaited
        #: by id and pair: the monotonic time at which `late` first saw the transaction
        self._seen_ms: dict[tuple[str, ProducerId, int], int] = {}
        self.forget_at_ms = 0  #: when ids without a transaction are looked for next
        self._next = 0
        self._spare: list[ProducerId] = []

    async def close(self) -> None:
        """End the host; what waits is refused."""
        await self.host.close()
        self._log.close()

    def late(self, wall_ms: int, now_ms: int) -> list[commands.TransactionBegan]:
        """Return the transactions whose timeout has passed (N6)."""
        opened = {each[:3]: each for each in self.deadlines.values()}
        seen = self._seen_ms = {name: self._seen_ms.get(name, now_ms) for name in opened}
        return [
            each
            for name, each in opened.items()
            if max(wall_ms - each.started_ms, now_ms - seen[name]) > each.timeout_ms
        ]

    def fresh_id(self) -> ProducerId:
        """Return a producer id that was never used."""
        if self._spare:
            return self._spare.pop()
        found = producer_id(self.number, self.epoch, self._next)
        self._next += 1
        return found

    def id_after(self, producer_id: ProducerId, epoch: int) -> ProducerId:
        """Return a fresh producer id if the pair after this one needs it, else NONE."""
        return self.fresh_id() if self._rules.needs_fresh_id(producer_id, epoch) else NONE

    def unused(self, fresh_id: ProducerId) -> None:
        """Take back an id that no record names."""
        self._spare.append(fresh_id)


class TransactionCoordinators:
    """The coordinator partitions of one broker."""

    def __init__(
        self,
        env: Environment,
        metadata: MetadataCache,
        partitions: Mapping[PartitionKey, Partition],
        contact: ControllerContact,
        clocks: TransactionClock,
        calls: InterBrokerCalls,
    ) -> None:
        self._env = env
        self._metadata = metadata
        self._partitions = partitions
        self._contact = contact
        self._clocks = clocks
        self._hosted: dict[int, _Hosted] = {}
        self._tasks = TaskRegistry(partial(env.bug, "a transaction coordinator"))
        self._sender = TransactionMarkerSender(
            env.world, metadata, calls, self._written, partial(env.bug, "sending markers")
        )

    def start(self) -> None:
        """Begin to look for timeouts."""
        self._tasks.spawn(self._ticks())

    async def close(self) -> None:
        hosted, self._hosted = list(self._hosted.values()), {}
        await self._sender.close()
        await self._tasks.close()
        for each in hosted:
            await each.close()

    # -- leadership ------------------------------------------------------------------------------

    def partition_moved(self, partition: Partition) -> None:
        """Host the partition, or end its host, if its leadership changed (N1)."""
        number, epoch = partition.key.partition, partition.leader_epoch
        hosted = self._hosted.get(number)
        if hosted is not None and hosted.epoch == epoch:
            return
        if hosted is not None:
            del self._hosted[number]
            for ending in hosted.endings.values():
                self._sender.drop(ending)
            self._tasks.spawn(hosted.close())
        if epoch != NONE and number < PARTITIONS:
            self._tasks.spawn(self._load(self._host(partition, number, epoch)))

    def _host(self, partition: Partition, number: int, epoch: Epoch) -> _Hosted:
        server = self._env.server
        state = self._metadata.image.partition(partition.key)
        rules = commands.TransactionRules(
            number,
            server["transaction_max_timeout_ms"],
            server["transactional_id_expiration_ms"],
            NONE if state is None else state.unclean_epoch,
        )
        log = PartitionReplayLog(
            partition,
            epoch,
            self._env.clock,
            records.to_row,
            records.from_row,
        )
        host: ReplayedHost[Any, Any] = ReplayedHost(
            partial(TransactionCoordinator, rules),
            log,
            self._env.clock,
            on_fatal=partial(self._env.bug, f"{TOPIC}-{number}"),
            on_effects=partial(self._effects, number, epoch),
            unavailable=errors.NotCoordinator,
        )
        leases = Leases(server["participant_lease_ms"], server["participant_transaction_max_ms"])
        awaited = AwaitedBatches(server["prepared_max_ms"])
        hosted = self._hosted[number] = _Hosted(rules, epoch, host, log, leases, awaited)
        return hosted

    async def _load(self, hosted: _Hosted) -> None:
        """Replay the partition and take up what a predecessor left (N2, N3)."""
        backoff = Backoff(BACKOFF_MS)
        began_ms = self._env.now_ms
        while self._hosted.get(hosted.number) is hosted:
            try:
                await hosted.host.start()
                break
            except errors.PkError as failure:
                self._env.warn(
                    "coordinator_not_loaded", partition=hosted.number, error=failure.message
                )
                await self._env.clock.sleep_ms(backoff.next_ms())
        else:
            return
        await self._resume(hosted)
        hosted.loading = False
        took_ms = self._env.now_ms - began_ms
        self._env.say("coordinator_loaded", partition=hosted.number, took_ms=took_ms)

    async def _resume(self, hosted: _Hosted) -> None:
        """Take up the open and the prepared transactions of the machine (N3)."""
        machine = hosted.host.machine
        hosted.deadlines.clear()  # effects of commands behind this one may fill it already
        hosted.endings.clear()
        hosted.leases.clear()
        hosted.awaited.clear()
        try:
            found = await hosted.host.ask(commands.Resume())
        except errors.PkError:
            return  # the leadership ended, or the next tick asks again
        hosted.resumed = machine
        for each in found:
            if isinstance(each, commands.TransactionBegan):
                hosted.deadlines.setdefault(each.transactional_id, each)
            elif isinstance(each, commands.BatchBegan):
                hosted.leases.began(each, self._env.now_ms)
            elif isinstance(each, commands.BatchAwaits):
                hosted.awaited.began(each, self._env.now_ms)
            elif each.transactional_id not in hosted.endings:
                self._deliver(hosted, each)

    # -- effects ---------------------------------------------------------------------------------

    def _effects(self, number: int, epoch: Epoch, effects: Sequence[Effect]) -> None:
        hosted = self._hosted.get(number)
        if hosted is None or hosted.epoch != epoch:
            return
        for effect in effects:
            assert isinstance(effect, Publish)
            event = effect.value
            if effect.name == commands.BEGAN:
                hosted.deadlines[event.transactional_id] = event
            elif effect.name == commands.BATCH_BEGAN:
                hosted.leases.began(event, self._env.now_ms)
            elif effect.name == commands.BATCH_AWAITS:
                hosted.leases.ended(event.job, event.transaction)
                hosted.awaited.began(event, self._env.now_ms)
            elif effect.name == commands.PREPARED:
                self._decided(hosted, event)
                self._deliver(hosted, event)
            elif effect.name == commands.ENDED:
                self._decided(hosted, event)
                hosted.endings.pop(event.transactional_id, None)

    def _decided(self, hosted: _Hosted, event: Any) -> None:
        if isinstance(event, commands.BatchPrepared | commands.BatchEnded):
            hosted.leases.ended(event.job, event.transaction)
            hosted.awaited.ended(event.job, event.transaction)
        else:
            hosted.deadlines.pop(event.transactional_id, None)

    def _deliver(
        self, hosted: _Hosted, event: commands.TransactionPrepared | commands.BatchPrepared
    ) -> None:
        if isinstance(event, commands.BatchPrepared):
            markers, number, batch = event.markers, event.transaction, event.batch
        else:
            marker = commands.ParticipantMarker(event.producer_id, event.marker_epoch, event.commit)
            markers, number, batch = (marker,), NONE, NONE
        ending = Ending(
            event.transactional_id,
            markers,
            hosted.epoch,
            event.partitions,
            event.metadata_offset,
            number,
            batch,
        )
        hosted.endings[ending.transactional_id] = ending
        self._sender.deliver(ending)

    def _written(self, ending: Ending) -> None:
        self._tasks.spawn(self._complete(ending))

    async def _complete(self, ending: Ending) -> None:
        number = partition_of_id(ending.transactional_id)
        command: commands.Command
        if ending.transaction == NONE:
            (marker,) = ending.markers
            command = commands.MarkersWritten(
                ending.transactional_id, marker.producer_id, marker.producer_epoch
            )
        else:
            command = commands.BatchMarked(ending.transactional_id, ending.transaction)
        hosted = self._hosted.get(number)
        if hosted is None or hosted.epoch != ending.coordinator_epoch:
            return
        try:
            await hosted.host.ask(command)
        except errors.PkError:
            hosted.resumed = None  # the next tick takes it up again

    # -- time ------------------------------------------------------------------------------------

    async def _ticks(self) -> None:
        while True:
            await self._env.clock.sleep_ms(TICK_MS)
            self._env.metrics.awaited_batches.set(
                sum(len(each.awaited) for each in self._hosted.values())
            )
            for hosted in list(self._hosted.values()):
                name = (hosted.number, hosted.epoch)
                reading = hosted.loading or hosted.host.replaying
                if not reading and name not in self._tasks:  # N7
                    self._tasks.spawn(self._tick(hosted), name)

    async def _tick(self, hosted: _Hosted) -> None:
        """Do what is due in one partition."""
        if hosted.resumed is not hosted.host.machine:
            await self._resume(hosted)
        await self._expire(hosted)

    async def _expire(self, hosted: _Hosted) -> None:
        """Abort the transactions whose timeout has passed, and forget old ids (N5)."""
        now_ms = self._clocks.trusted_ms()
        if now_ms is None or not self._contact.in_contact():
            return
        late = hosted.late(now_ms, self._env.now_ms)
        self._report_awaited(hosted, now_ms)
        try:
            if late:
                timed_out = tuple(
                    commands.TimedOut(
                        each.transactional_id,
                        each.producer_id,
                        each.producer_epoch,
                        hosted.id_after(each.producer_id, each.producer_epoch),
                    )
                    for each in late
                )
                await hosted.host.ask(commands.ExpireTransactions(timed_out))
                for each in late:
                    if hosted.deadlines.get(each.transactional_id) is each:
                        del hosted.deadlines[each.transactional_id]
                self._env.warn(
                    "transactions_timed_out",
                    transactional_ids=[each.transactional_id for each in late[:20]],
                    count=len(late),
                )
            await self._expire_batches(hosted, now_ms)
            if self._env.now_ms >= hosted.forget_at_ms:
                hosted.forget_at_ms = self._env.now_ms + FORGET_MS
                while await hosted.host.ask(commands.ForgetExpired()) == commands.FORGET_MAX:
                    pass
        except errors.PkError:
            return  # the next tick asks again

    async def _expire_batches(self, hosted: _Hosted, wall_ms: int) -> None:
        """Abort the batches that no task has held for their lease (X4)."""
        late = hosted.leases.late(wall_ms, self._env.now_ms)
        if not late:
            return
        await hosted.host.ask(commands.ExpireBatches(tuple(late)))
        for job, transaction in late:
            hosted.leases.ended(job, transaction)
        jobs = [job for job, _ in late]
        self._env.warn("participants_timed_out", jobs=jobs[:20], count=len(jobs))

    def _report_awaited(self, hosted: _Hosted, wall_ms: int) -> None:
        """Log the prepared batches that wait for their tables for longer than prepared_max_ms."""
        for each in hosted.awaited.late(wall_ms, self._env.now_ms):
            self._env.warn(
                "batch_awaits_table",
                job=each.job,
                batch=each.batch,
                table=each.url,
                waiting_ms=wall_ms - each.since_ms,
                advice=f"start its query again, or use pk transactions resolve {each.job}",
            )

    # -- requests --------------------------------------------------------------------------------

    def _serving(self, number: int) -> _Hosted:
        """Return the host of a partition; raises why it cannot answer (N2, N4)."""
        self._check_contact()
        hosted = self._hosted.get(number)
        if hosted is None:
            leader = coordinator_of(self._metadata, number)
            raise errors.NotCoordinator(
                f"this broker does not lead {TOPIC}-{number}", leader=str(leader)
            )
        if hosted.loading or hosted.host.replaying:
            raise errors.CoordinatorLoading(f"{TOPIC}-{number} is being read")
        return hosted

    def _check_contact(self) -> None:
        if not self._contact.in_contact():
            raise errors.CoordinatorUnavailable("this broker has no contact to the controller")

    async def _ask(self, hosted: _Hosted, command: Any) -> Any:
        try:
            return await hosted.host.ask(command)
        finally:
            self._check_contact()  # N4

    async def init_producer(self, request: wire.InitProducerIdRequest) -> wire.InitProducerIdReply:
        """Begin a session of a transactional producer."""
        hosted = self._serving(partition_of_id(request.transactional_id))
        fresh_id = hosted.fresh_id()
        reply: wire.InitProducerIdReply = await self._ask(
            hosted, commands.InitProducer(request, fresh_id)
        )
        if reply.producer_id != fresh_id:
            hosted.unused(fresh_id)
        return reply

    async def end(self, request: wire.EndTxnRequest) -> wire.EndTxnReply:
        """Commit or abort a transaction."""
        hosted = self._serving(partition_of_id(request.transactional_id))
        fresh_id = hosted.id_after(request.producer_id, request.producer_epoch)
        command = commands.EndTransaction(request, self._metadata.image, fresh_id)
        reply: wire.EndTxnReply = await self._ask(hosted, command)
        return reply

    async def add_partitions(
        self, request: wire.AddPartitionsToTxnRequest, progress: MetadataProgress, timeout_ms: int
    ) -> wire.AddPartitionsToTxnReply:
        """Answer leaders' questions about producers, once this broker knows what they know."""
        hosted = self._serving(request.coordinator_partition)
        await progress.reached(request.metadata_offset, timeout_ms)
        answers = await self._ask(hosted, commands.AddPartitions(request))
        return wire.AddPartitionsToTxnReply(coordinator_epoch=hosted.epoch, answers=answers)

    async def join(
        self, request: wire.JoinTransactionRequest, progress: MetadataProgress, timeout_ms: int
    ) -> wire.JoinTransactionReply:
        """Make a task a participant of its batch (X5)."""
        hosted = self._serving(partition_of_id(request.batch.job))
        await progress.reached(request.metadata_offset, timeout_ms)
        fresh_id = hosted.fresh_id()
        command = commands.JoinTransaction(request, self._metadata.image, fresh_id)
        reply: wire.JoinTransactionReply = await self._ask(hosted, command)
        if reply.producer_id != fresh_id:
            hosted.unused(fresh_id)
        reply.lease_ms = hosted.leases.lease_ms
        self._heard(hosted, reply.producer_id, reply.producer_epoch)
        return reply

    async def heartbeat(
        self, request: wire.ParticipantHeartbeatRequest
    ) -> wire.ParticipantHeartbeatReply:
        """Renew the lease of a batch for one of its tasks (X4)."""
        hosted = self._serving(partition_of_id(request.batch.job))
        participant = request.participant
        if not self._heard(
            hosted, participant.producer_id, participant.producer_epoch, finished=request.finished
        ):
            raise errors.InvalidTxnState(
                f"({participant.producer_id}, {participant.producer_epoch}) is not part of an open "
                f"transaction of {request.batch.job!r}: its batch was ended"
            )
        return wire.ParticipantHeartbeatReply()

    def _heard(
        self, hosted: _Hosted, producer_id: ProducerId, epoch: int, *, finished: bool = False
    ) -> bool:
        """Renew the lease of a participant's batch; False if the batch is not open."""
        machine: Any = hosted.host.machine
        found = machine.jobs.owner(producer_id)
        if found is None:
            return False
        job, participant = found
        if not job.joined(participant) or participant.epoch != epoch or not job.open:
            return False
        pair = ProducerPair(producer_id, epoch)
        hosted.leases.heard(job.job, job.transaction, pair, self._env.now_ms, finished=finished)
        return True

    async def commit_participants(
        self, request: wire.CommitParticipantsRequest
    ) -> wire.CommitParticipantsReply:
        """Commit a batch, and abort its participants that are not named (X7)."""
        hosted = self._serving(partition_of_id(request.batch.job))
        command = commands.CommitParticipants(request, self._metadata.image)
        reply: wire.CommitParticipantsReply = await self._ask(hosted, command)
        self._report_resolved(request.batch, request.evidence, "committed", reply.warning)
        return reply

    async def prepare_participants(
        self, request: wire.PrepareParticipantsRequest
    ) -> wire.PrepareParticipantsReply:
        """Prepare the participants of a batch, whose end a Delta table decides (X11)."""
        hosted = self._serving(partition_of_id(request.batch.job))
        command = commands.PrepareParticipants(request, self._metadata.image)
        reply: wire.PrepareParticipantsReply = await self._ask(hosted, command)
        return reply

    async def abort_participants(
        self, request: wire.AbortParticipantsRequest
    ) -> wire.AbortParticipantsReply:
        """Abort the open batch of a run."""
        hosted = self._serving(partition_of_id(request.batch.job))
        reply: wire.AbortParticipantsReply = await self._ask(
            hosted, commands.AbortParticipants(request)
        )
        ended = "committed" if reply.committed else "aborted"
        self._report_resolved(request.batch, request.evidence, ended)
        return reply

    def _report_resolved(
        self, batch: wire.JobBatch, evidence: wire.TableEvidence, ended: str, warning: str = ""
    ) -> None:
        """Log how a prepared batch ended, unless its own driver ended it without a warning."""
        if warning or evidence.found_by in (FoundBy.RESOLVER, FoundBy.OPERATOR):
            self._env.warn(
                "prepared_batch_resolved",
                job=batch.job,
                batch=batch.batch,
                table=evidence.table.url,
                ended=ended,
                by=FoundBy(evidence.found_by or FoundBy.DRIVER).name.lower(),
                warning=warning,
            )

    async def abort(self, request: wire.AbortTransactionRequest) -> wire.AbortTransactionReply:
        """Abort a transaction as an operator asks."""
        hosted = self._serving(partition_of_id(request.transactional_id))
        command = commands.AbortTransaction(request, hosted.fresh_id())
        reply: wire.AbortTransactionReply = await self._ask(hosted, command)
        return reply

    async def forget(self, request: wire.ForgetTransactionRequest) -> wire.ForgetTransactionReply:
        """Remove a transactional id as an operator asks."""
        hosted = self._serving(partition_of_id(request.transactional_id))
        reply: wire.ForgetTransactionReply = await self._ask(
            hosted, commands.ForgetTransaction(request)
        )
        return reply

    async def describe(
        self, request: wire.DescribeTransactionsRequest
    ) -> wire.DescribeTransactionsReply:
        """Describe transactional ids; the ones of other coordinators have NotCoordinator."""
        reply = wire.DescribeTransactionsReply()
        if len(request.transactional_ids) > limits.TRANSACTIONS_DESCRIBED_MAX:
            raise errors.InvalidRequest(
                f"{len(request.transactional_ids)} ids in one request; "
                f"{limits.TRANSACTIONS_DESCRIBED_MAX} are allowed"
            )
        for each in request.transactional_ids:
            described = reply.transactions.add(transactional_id=each)
            try:
                hosted = self._serving(partition_of_id(each))
                (found,) = await self._ask(hosted, commands.DescribeTransactions((each,)))
                described.CopyFrom(found)
                self._describe_leases(hosted, described)
            except errors.PkError as error:
                described.error.CopyFrom(frames.error_of(error))
            described.coordinator_id = self._env.node_id
        return reply

    def _describe_leases(self, hosted: _Hosted, described: wire.TransactionDescription) -> None:
        """Add what the coordinator heard of each participant."""
        for each in described.job.joined:
            pair = ProducerPair(each.producer_id, each.producer_epoch)
            heard = hosted.leases.last_heard(described.transactional_id, pair)
            if heard is not None:
                each.heard_ago_ms = self._env.now_ms - heard.at_ms
                each.finished = heard.finished

    async def list(self, request: wire.ListTransactionsRequest) -> wire.ListTransactionsReply:
        """List the transactional ids that this broker coordinates."""
        self._check_contact()
        reply = wire.ListTransactionsReply()
        for number, hosted in sorted(self._hosted.items()):
            if hosted.loading:
                reply.loading.append(number)
                continue
            command = commands.ListTransactions(request)
            reply.transactions.extend(await self._ask(hosted, command))
        return reply
