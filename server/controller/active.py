"""One term of the active controller: from the first committed record of its epoch until another
node leads the metadata log.

World-generic.  The term runs the controller machine over the metadata log.  Brokers register, send
heartbeats and ask on control streams.  The stream on which a broker registered is its liveness
stream (rule R7).  A term also has soft state: sessions, waits, and the reports of brokers about
their replicas.  The next term builds this state again, and each command carries the part of it that
the decision needs.

Invariants
  A1  A term serves only after every record that was in the log at its start is committed and
      applied.
  A2  A term that ends refuses the requests that wait.  The log keeps or cuts the records that the
      term had appended.
  A3  A term takes up the unfinished work of the term before: when it begins it tries an election
      for each leaderless partition, and tries to complete each reassignment.
  A4  Every reply waits until the records that the decision saw are committed (rule Q3), with one
      exception.  A heartbeat that changes nothing is answered at once.  That reply states only
      committed facts: the registration exists and is not fenced.  The lease (`in_touch`), which is
      checked in the same turn of the loop, shows that no other controller can have fenced the
      broker.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pk import errors
from pk.effects import Effect, Publish
from pk.running_since import RunningSince
from pk.server.controller import commands, internal_topics, leaders, reassignments
from pk.server.controller.batched_decision import CHANGES_MAX, UNCLEAN_ELECTION, More
from pk.server.controller.clocks import Clocks
from pk.server.controller.config_changes import MIN_ISR, UNKNOWN
from pk.server.controller.elections import LeaderEligibility, waits_for
from pk.server.controller.events import EVENT
from pk.server.controller.leader_rebalancer import LeaderRebalancer
from pk.server.controller.machine import Command, Controller
from pk.server.controller.maintenance import MaintenanceRequests
from pk.server.controller.reports import Report, Reports, reported
from pk.server.controller.requested_elections import RequestedElections
from pk.server.controller.sessions import Session, Sessions
from pk.server.metadata.image import BROKER_RESOURCE, MetadataImage
from pk.server.metadata.records import MetadataRecord
from pk.server.raft.log import RaftLog
from pk.server.raft.log_reader import Say
from pk.server.runtime.replayed_host import ReplayedHost
from pk.tasks import TaskRegistry
from pk.types import NONE, NodeId, PartitionKey
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import Handler
from pk.world import Disconnected, StreamKind, World

if TYPE_CHECKING:
    from pk.server.node.run_config import RunConfig

#: Time a broker has to accept a connection after its stream was reset (rule R7).
PROBE_MS = 250
#: A new active controller gives brokers this time to register with it before it probes them.
EXPECT_MS = 300
TICK_MS = 100
#: Longest turn of a busy event loop.  A longer wait means that the process was stopped.
LATE_MS = 20
#: Wait before an election is tried again that failed, for example because the disk was full.
RETRY_MS = 1_000
#: The most names that a log line lists.
NAMED_MAX = 20


class ActiveController:
    """The active controller of one term: sessions, decisions and replies.  See the module."""

    def __init__(
        self,
        world: World,
        run: RunConfig,
        metadata: RaftLog[MetadataRecord],
        *,
        say: Say,
        on_fatal: Callable[[BaseException], None],
        running_since: RunningSince | None = None,
    ) -> None:
        self._world = world
        self._run = run
        self._say = say
        self._on_fatal = on_fatal
        rules = commands.Rules(run.node_id, run.server, run.topic_defaults, run.format_level)
        self.epoch = metadata.epoch
        self._metadata = metadata
        self._answered_until_ms = metadata.leadership.answered_until_ms
        self.host: ReplayedHost[Command, MetadataRecord] = ReplayedHost(
            lambda: Controller(rules), metadata, world.clock,
            on_fatal=on_fatal, on_effects=self._effects,
        )  # fmt: skip
        self.sessions = Sessions(int(run.server["broker_session_timeout_ms"]))
        self.reports: dict[NodeId, Report] = {}
        self.clocks = Clocks(run.node_id, int(run.server["broker_session_timeout_ms"]))
        self._running_since = RunningSince(world.clock) if running_since is None else running_since
        self._tasks = TaskRegistry(on_fatal)
        #: when the next attempt is due (A3); None: none is due
        self._elections_due_ms: int | None = 0
        #: (offset, time): the image had reached `offset` at that time.  From these entries the
        #: controller computes which partitions have waited long enough.
        self._marks: deque[tuple[int, int]] = deque()
        self._over = NONE  #: partitions without a leader since this offset or earlier have waited
        self._moves_may_end = True  #: a reassignment may be complete now (A3)
        self._ends: dict[NodeId, int] = {}  #: commands under way that end a registration (A4)
        self._losing: frozenset[PartitionKey] = frozenset()  #: an unclean election is allowed
        self._moves: deque[PartitionKey] = deque()  #: leaderships to move to the preferred leader
        self._balance_ms = 0
        self._rebalancer = LeaderRebalancer()
        self._levels: dict[NodeId, int] = {}  #: levels of `pk.format` that voters know (Q6)
        self._maintenance = MaintenanceRequests(
            world.clock, self._ask, lambda: self._image, self.clocks
        )
        self._raise_due_ms: int | None = 0  #: when replicas are added to internal topics
        wait_ms = 3 * int(run.server["broker_heartbeat_interval_ms"]) + RETRY_MS
        self._requested = RequestedElections(
            world.clock, self._ask, lambda: self._image, self._known, wait_ms
        )

    @property
    def machine(self) -> Controller:
        machine = self.host.machine
        assert isinstance(machine, Controller)
        return machine

    @property
    def _image(self) -> MetadataImage:
        return self.machine.image

    async def _ask(self, command: Command) -> Any:
        """Return the reply to `command`; a large decision takes several steps (`More`)."""
        while True:
            reply = await self.host.ask(command)
            if not isinstance(reply, More):
                return reply

    async def _ask_to_end(self, who: NodeId, command: Command) -> Any:
        """Like `_ask`, for a command that ends the registration of broker `who`.

        Heartbeats of this broker that arrive meanwhile are decided after the command (A4).
        """
        self._ends[who] = self._ends.get(who, 0) + 1
        try:
            return await self._ask(command)
        finally:
            self._ends[who] -= 1

    def _effects(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if not isinstance(effect, Publish):
                continue
            if effect.name == UNCLEAN_ELECTION:
                self._say(UNCLEAN_ELECTION, **effect.value)
            elif effect.name == EVENT:
                self._say(effect.value.name, **effect.value.facts)

    # -- life --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Replay the log, then serve (A1).  Raises `DirectoryOfAnotherCluster`."""
        await self.host.start()
        genesis = "" if self.machine.image.cluster_id else self._world.new_id()
        cluster_id = await self.host.ask(commands.Bootstrap(self._run.cluster_id, genesis))
        if cluster_id != self._run.cluster_id:
            raise errors.DirectoryOfAnotherCluster(
                f"{self._run.metadata_dir} holds the metadata of cluster {cluster_id}, "
                f"not of {self._run.cluster_id}"
            )
        self._compare_min_isr()
        unknown = self._image.unknown_settings()
        if unknown:
            self._say("settings_unknown", settings=unknown[:NAMED_MAX], why=UNKNOWN)
        unfenced = [
            (broker.broker_id, broker.broker_epoch)
            for broker in self.machine.image.brokers.values()
            if not broker.fenced
        ]
        now_ms = self._world.clock.monotonic_ms()
        self._maintenance.begin()
        until_ms = now_ms if self._answered_until_ms is None else self._answered_until_ms
        for session in self.sessions.grant(unfenced, now_ms, now_ms - until_ms):
            self._tasks.spawn(self._expect(session))
        self._balance_ms = now_ms + self._balance_interval_ms
        self._tasks.spawn(self._watch())

    def _compare_min_isr(self) -> None:
        """Log a line if min_insync_replicas of the file differs from the cluster's (rule R1).

        The cluster takes the value of a file once, when its metadata are created.
        """
        given = self._run.topic_defaults.get(MIN_ISR)
        stored = self._image.configs.get((BROKER_RESOURCE, ""), {}).get(MIN_ISR)
        if given is not None and stored is not None and int(given) != int(stored):
            why = "the cluster's default wins; alter that one"
            self._say("setting_ignored", setting=MIN_ISR, file=given, cluster=stored, why=why)

    async def close(self) -> None:
        """End the term: refuse the requests that wait, and stop the tasks (A2)."""
        await self._tasks.close()
        await self.host.close()

    # -- streams -----------------------------------------------------------------------------------

    def lost(self, stream: int) -> None:
        """The control stream with this number broke."""
        for session in self.sessions.lose(stream):
            self._tasks.spawn(self._probe(session))

    def handlers(self, stream: int) -> Mapping[str, Handler]:
        """The requests that the control stream with this number accepts, and their handlers."""

        def asks(make: Callable[[Any], Command]) -> Handler:
            async def handle(request: Any, _frame: frames.Frame) -> Any:
                return await self._ask(make(request))

            return handle

        async def register(request: Any, _frame: frames.Frame) -> Any:
            return await self._register(stream, request)

        async def heartbeat(request: Any, _frame: frames.Frame) -> Any:
            return await self._heartbeat(stream, request)

        async def alter_configs(request: Any, _frame: frames.Frame) -> Any:
            try:
                return await self._ask(commands.AlterConfigs(request))
            finally:  # also if the stream that asked has closed: the decision counts
                self._moves_may_end = True  # a smaller min_insync_replicas may now be enough
                self._try_elections()

        async def list_brokers(request: Any, _frame: frames.Frame) -> Any:
            reply: wire.ListBrokersReply = await self._ask(commands.ListBrokers(request))
            clock = self._world.clock
            self.clocks.describe(list(reply.brokers), clock.wall_ms(), clock.boottime_ms())
            return reply

        async def elect_leaders(request: Any, _frame: frames.Frame) -> Any:
            return await self._requested.elect(request)

        return {
            "register_broker": register,
            "broker_heartbeat": heartbeat,
            "create_topics": asks(self._create_topics),
            "create_internal_topic": asks(commands.CreateInternalTopic),
            "delete_topics": asks(commands.DeleteTopics),
            "tier_purged": asks(commands.TierPurged),
            "create_partitions": asks(lambda r: commands.CreatePartitions(r, self._known())),
            "alter_configs": alter_configs,
            "describe_configs": asks(commands.DescribeConfigs),
            "allocate_producer_ids": asks(commands.AllocateProducerIds),
            "alter_partition": asks(lambda r: commands.AlterPartition(r, self._known())),
            "alter_reassignments": asks(lambda r: commands.AlterReassignments(r, self._known())),
            "list_reassignments": asks(commands.ListReassignments),
            "elect_leaders": elect_leaders,
            "unregister_broker": asks(commands.UnregisterBroker),
            "list_brokers": list_brokers,
            "describe_cluster": asks(lambda r: commands.DescribeCluster(r, dict(self._levels))),
            "upgrade_cluster": asks(lambda r: commands.UpgradeCluster(r, dict(self._levels))),
            **self._maintenance.handlers(),
        }

    def _create_topics(self, request: wire.CreateTopicsRequest) -> commands.CreateTopics:
        ids = tuple(self._world.new_id() for _ in request.topics)
        return commands.CreateTopics(request, ids, self._known())

    # -- brokers -----------------------------------------------------------------------------------

    async def _register(
        self, stream: int, request: wire.RegisterBrokerRequest
    ) -> wire.RegisterBrokerReply:
        live = self.sessions.live(request.broker_id, except_stream=stream)
        command = commands.Register(request, live, self._known())
        self._resume(stream, request)
        who = request.broker_id
        reply: wire.RegisterBrokerReply = await self._ask_to_end(who, command)
        now_ms = self._world.clock.monotonic_ms()
        self.sessions.open(request.broker_id, reply.broker_epoch, stream, now_ms)
        self._say("broker_registered", broker=request.broker_id, epoch=reply.broker_epoch)
        return reply

    def _resume(self, stream: int, request: wire.RegisterBrokerRequest) -> None:
        """Renew the session of a broker process that registers again on another stream.

        The request itself shows that the process is alive.  A slow disk of the controller must not
        count as silence of the broker (rule R7).
        """
        broker = self._image.brokers.get(request.broker_id)
        if broker is not None and broker.incarnation_id == request.incarnation_id:
            now_ms = self._world.clock.monotonic_ms()
            self.sessions.heartbeat(request.broker_id, broker.broker_epoch, stream, now_ms)

    async def _heartbeat(
        self, stream: int, request: wire.BrokerHeartbeatRequest
    ) -> wire.BrokerHeartbeatReply:
        clock, who = self._world.clock, request.broker_id
        now_ms, came_ms = clock.monotonic_ms(), clock.wall_ms()
        broker = self._image.brokers.get(who)
        known = broker is not None and broker.broker_epoch == request.broker_epoch
        if known:  # a heartbeat of another registration does not count
            self.sessions.heartbeat(who, request.broker_epoch, stream, now_ms)
            self.clocks.observe(who, request.clock, clock.boottime_ms(), broker=True)
        retry = self._hear(request) if known else ()
        asked = self._requested.unclean
        unclean = self._losing.union(asked) if asked else self._losing
        command = commands.Heartbeat(request, self._known(), retry, unclean)
        if known and (settled := self._settled(command)) is not None:
            return self._with_clocks(settled, came_ms)
        try:
            return self._with_clocks(await self._ask(command), came_ms)
        finally:  # also if the stream has closed: the decision counts
            now = self._image.brokers.get(who)
            if broker is not None and broker.fenced and now is not None and not now.fenced:
                self._try_elections()  # the elections that this decision had no room for
                self._raise_due_ms = 0

    def voter_fetched(self, request: wire.QuorumFetchRequest) -> None:
        """Note the clock and the level that another controller sent with its fetch (rules L10,
        Q6).
        """
        self._levels[request.sender.node_id] = max(1, request.format_level)
        boottime_ms = self._world.clock.boottime_ms()
        self.clocks.observe(request.sender.node_id, request.clock, boottime_ms, broker=False)

    def _with_clocks(
        self, reply: wire.BrokerHeartbeatReply, came_ms: int
    ) -> wire.BrokerHeartbeatReply:
        """Add all nodes' clocks to the reply of a request received at `came_ms` (rule L10)."""
        clock = self._world.clock
        sent_ms, boottime_ms = clock.wall_ms(), clock.boottime_ms()
        reply.clocks.extend(self.clocks.samples(sent_ms, boottime_ms, self._running_since()))
        reply.clock_received_ms, reply.clock_sent_ms = came_ms, sent_ms
        return reply

    def _settled(self, command: commands.Heartbeat) -> wire.BrokerHeartbeatReply | None:
        """Return the reply to a heartbeat that changes nothing, or None if it must be queued (A4).

        Thereby brokers keep contact (rule R6) while the metadata disk of the controller hangs.
        """
        request, image, committed = command.request, self._image, self._metadata.committed
        broker = image.brokers[request.broker_id]
        if image.offset + 1 < committed or broker.changed_offset >= committed or broker.fenced:
            return None  # the machine replays, or the last change is not committed
        if self._ends.get(broker.broker_id) or request.offline_replicas:
            return None  # the reply must wait for the commit of the change
        decision = self.machine.decide(command, self._world.clock.wall_ms())
        reply: wire.BrokerHeartbeatReply = decision.reply
        return None if decision.records else reply

    def _known(self) -> Reports:
        """A copy of the brokers' reports, which a command may keep."""
        return dict(self.reports)

    def _hear(self, request: wire.BrokerHeartbeatRequest) -> tuple[PartitionKey, ...]:
        """Store the report that a heartbeat carries; return the partitions for which it is new."""
        before = self.reports.get(request.broker_id)
        report = reported(before, request, self.machine.leaderless)
        self.reports[request.broker_id] = report
        self._hear_fitness(request.broker_id, before, report)
        if before is None or before.broker_epoch != report.broker_epoch:
            self._try_elections()  # elections that waited for a report of this broker
            return ()
        retry = [PartitionKey(each.topic_id, each.partition) for each in request.positions]
        retry += [key for key in before.offline if key not in report.offline]
        if retry:
            self._try_elections()
        return tuple(retry)

    def _hear_fitness(self, who: NodeId, before: Report | None, now: Report) -> None:
        """Note which replicas of the broker are unfit to lead, and move leaderships soon (L16)."""
        if self._rebalancer.report_changed(before, now):
            self._balance_ms = min(self._balance_ms, self._world.clock.monotonic_ms())
            why = sorted({each.reason + "!" * each.gives_up for each in now.unfit})
            self._say("broker_fitness", broker=who, unfit=why)

    async def _expect(self, session: Session) -> None:
        """Probe a broker that has not registered with this new active controller (rule R7).

        A living broker registers by itself.  A broker that died together with the former active
        controller has no stream to this one, so no broken stream would show its death.
        """
        await self._world.clock.sleep_ms(EXPECT_MS)
        if self.sessions.is_lost(session):
            await self._probe(session)

    async def _probe(self, session: Session) -> None:
        """Fence the broker of a lost stream if its address refuses a connection (rule R7)."""
        broker = self.machine.image.brokers.get(session.broker_id)
        if broker is None or broker.broker_epoch != session.broker_epoch:
            return
        try:
            async with asyncio.timeout(PROBE_MS / 1000):
                address = self._run.peer_addresses.get(session.broker_id, broker.address)
                stream = await self._world.network.connect(address, StreamKind.CONTROL)
        except TimeoutError:
            return  # no answer and no refusal: the session timeout decides
        except Disconnected:
            if self.sessions.is_lost(session):
                await self._fence(session, "its stream was lost and its address refuses")
            return
        stream.close()

    async def _fence(self, session: Session, why: str) -> None:
        self.sessions.end(session)
        fence = commands.Fence(session.broker_id, session.broker_epoch, self._known())
        broker = self.machine.image.brokers.get(session.broker_id)
        event = "broker_fenced"
        if broker is not None and broker.in_controlled_shutdown:
            event, why = "broker_left", "it was shut down in order"
        try:
            if await self._ask_to_end(session.broker_id, fence):
                self._say(event, broker=session.broker_id, why=why)
        except errors.RetriableError as failure:  # for example a full disk: try again
            self.sessions.retry(session)
            self._say("fence_failed", broker=session.broker_id, why=failure.message)

    # -- time --------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """At each tick: fence expired sessions, try elections, move leaderships back."""
        clock = self._world.clock
        while True:
            due_ms = clock.monotonic_ms() + TICK_MS
            await clock.sleep_ms(TICK_MS)
            await self._fence_silent(clock.monotonic_ms() - due_ms)
            await self._recover(clock.monotonic_ms())
            await self._hand_over(clock.monotonic_ms())
            await self._balance(clock.monotonic_ms())
            await self._raise_replication(clock.monotonic_ms())

    async def _fence_silent(self, late_ms: int) -> None:
        """Fence the brokers whose session has expired (rule R7).

        If this process itself was stopped, it first handles the heartbeats that arrived meanwhile.
        """
        clock = self._world.clock
        silent = self.sessions.expired(clock.monotonic_ms())
        if silent and late_ms > LATE_MS:
            await clock.sleep_ms(TICK_MS)
        for session in silent:
            if self.sessions.is_expired(session, clock.monotonic_ms()):  # fencing takes time, too
                await self._fence(session, "no heartbeat within broker_session_timeout_ms")

    def _try_elections(self) -> None:
        self._elections_due_ms = 0

    async def _recover(self, now_ms: int) -> None:
        """Try elections of leaderless partitions (rule R3), and complete reassignments.

        It runs when a report is new, or when a partition has waited `unclean_recovery_wait_ms`.
        """
        if self._wait_over(now_ms):
            self._try_elections()
        if self._elections_due_ms is None or now_ms < self._elections_due_ms:
            return
        self._elections_due_ms = None
        waited = []
        for key, since in self.machine.leaderless.items():
            if since > self._over:
                break
            waited.append(key)
        rules, image = self.machine.rules, self._image
        allowed = {name: rules.unclean_enabled(image, name) for name in self._topics_of(waited)}
        self._losing = frozenset(k for k in waited if allowed[image.topics[k.topic_id].name])
        found, over = dict.fromkeys(self.machine.leaderless), frozenset(waited)
        if self._moves_may_end:
            found.update(dict.fromkeys(reassignments.under_way(image)))
            self._moves_may_end = False
        keys = tuple(found)
        try:
            for start in range(0, len(keys), CHANGES_MAX):
                chunk = keys[start : start + CHANGES_MAX]
                await self._ask(commands.Recover(chunk, over, self._known()))
        except errors.RetriableError as failure:
            self._elections_due_ms = now_ms + RETRY_MS
            self._moves_may_end = True
            self._say("recovery_failed", why=failure.message)

    def _wait_over(self, now_ms: int) -> bool:
        """Whether more partitions have waited `unclean_recovery_wait_ms`.  Logs the brokers that
        are missing."""
        image = self._image
        if self._marks and image.offset < self._marks[-1][0]:
            self._marks.clear()  # the log was truncated: measure the wait again
            self._over = NONE
        if not self._marks or self._marks[-1][0] != image.offset:
            self._marks.append((image.offset, now_ms))
        wait_ms = int(self._run.server["unclean_recovery_wait_ms"])
        before = self._over
        while self._marks and now_ms - self._marks[0][1] >= wait_ms:
            self._over = self._marks.popleft()[0]
        if self._over == before:
            return False
        over = []
        for key, since in image.leaderless.items():
            if since > self._over:
                break
            if since > before:
                over.append(key)
        if not over:
            return False
        brokers: dict[NodeId, None] = {}
        cluster = LeaderEligibility(image, self.reports)
        for key in over:
            state = image.partition(key)
            if state is not None:
                there = partial(cluster.eligible, key=key)
                brokers.update(dict.fromkeys(waits_for(state, there)))
        topics = self._topics_of(over)[:NAMED_MAX]
        self._say("leaderless", partitions=len(over), topics=topics, waits_for=sorted(brokers))
        return True

    def _topics_of(self, keys: Sequence[PartitionKey]) -> list[str]:
        topics = self._image.topics
        return list(dict.fromkeys(topics[k.topic_id].name for k in keys if k.topic_id in topics))

    @property
    def _balance_interval_ms(self) -> int:
        return 1_000 * int(self._run.server["leader_imbalance_check_interval_seconds"])

    async def _balance(self, now_ms: int) -> None:
        """Move a bounded number of leaderships to their preferred leader at each tick."""
        if now_ms >= self._balance_ms and not self._moves:
            self._balance_ms = now_ms + self._balance_interval_ms
            if self._run.server["auto_leader_rebalance_enable"]:
                found = list(leaders.imbalanced(self._image))
                self._moves.extend(key for key in found if not self._rebalancer.rests(key, now_ms))
                rest_ends_ms = self._rebalancer.rest_ends_ms(now_ms)
                if rest_ends_ms is not None:
                    self._balance_ms = min(self._balance_ms, rest_ends_ms)
        if not self._moves:
            return
        chunk = tuple(
            self._moves.popleft() for _ in range(min(len(self._moves), leaders.MOVES_MAX))
        )
        try:
            moved = await self._ask(commands.Prefer(chunk, self._known()))
        except errors.RetriableError as failure:
            self._moves.clear()
            self._say("rebalance_failed", why=failure.message)
            return
        if moved:
            self._rebalancer.came_back(self._image, chunk, now_ms)
            self._say("preferred_leaders", moved=moved, left=len(self._moves))

    async def _hand_over(self, now_ms: int) -> None:
        """Move leaderships away from replicas that give up the lead (rule L16)."""
        for (who, reason), keys in self._rebalancer.wanted(
            self._image, self.reports, now_ms
        ).items():
            try:
                moved = await self._ask(commands.HandOver(tuple(keys), self._known()))
            except errors.RetriableError as failure:
                self._say("hand_over_failed", broker=who, reason=reason, why=failure.message)
                return
            self._rebalancer.handed_over(self._image, moved, now_ms)
            if moved:
                self._say("handed_over", broker=who, reason=reason, moved=len(moved))

    async def _raise_replication(self, now_ms: int) -> None:
        """Add replicas to internal topics after brokers became available; one decision a turn."""
        if self._raise_due_ms is None or now_ms < self._raise_due_ms:
            return
        self._raise_due_ms = None
        if next(internal_topics.short(self._image), None) is None:
            return
        try:
            raised = await self._ask(commands.RaiseReplication(self._known()))
        except errors.RetriableError as failure:
            self._raise_due_ms = now_ms + RETRY_MS
            self._say("raise_replication_failed", why=failure.message)
            return
        if raised.again:
            self._raise_due_ms = now_ms + RETRY_MS
        if raised.partitions:
            topics = self._topics_of(raised.partitions)
            self._say("replication_raised", topics=topics, partitions=len(raised.partitions))
