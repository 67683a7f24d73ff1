"""One term of the active controller: from the first committed record of its epoch until another
node leads.

World-generic.  Over the metadata log stands the controller machine; brokers register, beat and ask
on control streams.  The stream a broker registered on is its liveness stream (rule R7).  Whatever
a term knows besides the log (sessions, waits) is made anew by the next one.

Invariants
  T1  a term serves only after everything in the log it began with is committed and applied
  T2  a term that ends refuses what waits; what it had appended is the log's to keep or undo
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pk import errors
from pk.server.controller import commands
from pk.server.controller.machine import Command, Controller
from pk.server.controller.records import MetadataRecord
from pk.server.controller.sessions import Session, Sessions
from pk.server.quorum.log import MetadataLog
from pk.server.runtime import ReplayedHost
from pk.types import PartitionKey
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import Handler
from pk.world import Disconnected, StreamKind, World

if TYPE_CHECKING:
    from pk.server.run_config import RunConfig

#: R7: how long a broker whose stream was reset may take to accept a connection.
PROBE_MS = 250
TICK_MS = 100

Say = Callable[..., None]


class Term:
    """See the module."""

    def __init__(
        self,
        world: World,
        run: RunConfig,
        metadata: MetadataLog,
        *,
        say: Say,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self._world = world
        self._run = run
        self._say = say
        self._on_fatal = on_fatal
        rules = commands.Rules(run.node_id, run.server, run.topic_defaults)
        self.epoch = metadata.epoch
        self.host: ReplayedHost[Command, MetadataRecord] = ReplayedHost(
            lambda: Controller(rules), metadata, world.clock, on_fatal=on_fatal
        )
        self.sessions = Sessions(int(run.server["broker_session_timeout_ms"]))
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._waiting: dict[PartitionKey, int] = {}  # leaderless since

    @property
    def machine(self) -> Controller:
        machine = self.host.machine
        assert isinstance(machine, Controller)
        return machine

    # -- life --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Replay the log and serve (T1).  Raises `DirectoryOfAnotherCluster`."""
        await self.host.start()
        cluster_id = await self.host.ask(commands.Bootstrap(self._run.cluster_id))
        if cluster_id != self._run.cluster_id:
            raise errors.DirectoryOfAnotherCluster(
                f"{self._run.metadata_dir} holds the metadata of cluster {cluster_id}, "
                f"not of {self._run.cluster_id}"
            )
        unfenced = [
            (broker.broker_id, broker.broker_epoch)
            for broker in self.machine.image.brokers.values()
            if not broker.fenced
        ]
        self.sessions.grant(unfenced, self._world.clock.monotonic_ms())
        self._spawn(self._watch())

    async def close(self) -> None:
        """T2."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.host.close()

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (bug := task.exception()) is not None:
            self._on_fatal(bug)

    # -- streams -----------------------------------------------------------------------------------

    def lost(self, stream: int) -> None:
        """The control stream of this number broke."""
        for session in self.sessions.lose(stream):
            self._spawn(self._probe(session))

    def handlers(self, stream: int) -> Mapping[str, Handler]:
        """What may be asked on the control stream of this number."""

        def asks(make: Callable[[Any], Command]) -> Handler:
            async def handle(request: Any, _frame: frames.Frame) -> Any:
                return await self.host.ask(make(request))

            return handle

        async def register(request: Any, _frame: frames.Frame) -> Any:
            return await self._register(stream, request)

        async def heartbeat(request: Any, _frame: frames.Frame) -> Any:
            return await self._heartbeat(stream, request)

        return {
            "register_broker": register,
            "broker_heartbeat": heartbeat,
            "create_topics": asks(self._create_topics),
            "delete_topics": asks(commands.DeleteTopics),
            "create_partitions": asks(commands.CreatePartitions),
            "alter_configs": asks(commands.AlterConfigs),
            "describe_configs": asks(commands.DescribeConfigs),
            "allocate_producer_ids": asks(commands.AllocateProducerIds),
            "alter_partition": asks(commands.AlterPartition),
        }

    def _create_topics(self, request: wire.CreateTopicsRequest) -> commands.CreateTopics:
        return commands.CreateTopics(request, tuple(self._world.new_id() for _ in request.topics))

    # -- brokers -----------------------------------------------------------------------------------

    async def _register(
        self, stream: int, request: wire.RegisterBrokerRequest
    ) -> wire.RegisterBrokerReply:
        live = self.sessions.live(request.broker_id, except_stream=stream)
        reply: wire.RegisterBrokerReply = await self.host.ask(commands.Register(request, live))
        now_ms = self._world.clock.monotonic_ms()
        self.sessions.open(request.broker_id, reply.broker_epoch, stream, now_ms)
        self._say("broker_registered", broker=request.broker_id, epoch=reply.broker_epoch)
        return reply

    async def _heartbeat(
        self, stream: int, request: wire.BrokerHeartbeatRequest
    ) -> wire.BrokerHeartbeatReply:
        now_ms = self._world.clock.monotonic_ms()
        self.sessions.beat(request.broker_id, request.broker_epoch, stream, now_ms)
        reply: wire.BrokerHeartbeatReply = await self.host.ask(commands.Beat(request))
        return reply

    async def _probe(self, session: Session) -> None:
        """R7: a stream was lost; if the broker's address refuses a connection, it is gone."""
        broker = self.machine.image.brokers.get(session.broker_id)
        if broker is None or broker.broker_epoch != session.broker_epoch:
            return
        try:
            async with asyncio.timeout(PROBE_MS / 1000):
                address = self._run.peer_addresses.get(session.broker_id, broker.address)
                stream = await self._world.network.connect(address, StreamKind.CONTROL)
        except TimeoutError:
            return  # neither there nor gone: the session timeout decides
        except Disconnected:
            if self.sessions.is_lost(session):
                await self._fence(session, "its stream was lost and its address refuses")
            return
        stream.close()

    async def _fence(self, session: Session, why: str) -> None:
        self.sessions.end(session)
        fence = commands.Fence(session.broker_id, session.broker_epoch)
        broker = self.machine.image.brokers.get(session.broker_id)
        event = "broker_fenced"
        if broker is not None and broker.in_controlled_shutdown:
            event, why = "broker_left", "it was shut down in order"
        try:
            if await self.host.ask(fence):
                self._say(event, broker=session.broker_id, why=why)
        except errors.RetriableError as failure:  # the disk is full, say: the next tick tries again
            self.sessions.retry(session)
            self._say("fence_failed", broker=session.broker_id, why=failure.message)

    # -- time --------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Sessions that expired, elections whose wait is over."""
        clock = self._world.clock
        while True:
            await clock.sleep_ms(TICK_MS)
            for session in self.sessions.expired(clock.monotonic_ms()):
                await self._fence(session, "no heartbeat within broker_session_timeout_ms")
            await self._recover(clock.monotonic_ms())

    async def _recover(self, now_ms: int) -> None:
        leaderless = self.machine.leaderless
        for key in [key for key in self._waiting if key not in leaderless]:
            del self._waiting[key]
        for key in leaderless:
            self._waiting.setdefault(key, now_ms)
        wait_ms = int(self._run.server["unclean_recovery_wait_ms"])
        over = [key for key, since_ms in self._waiting.items() if now_ms - since_ms >= wait_ms]
        if not over:
            return
        for key in over:
            self._waiting[key] = now_ms
        try:
            elected = await self.host.ask(commands.Recover(tuple(over)))
            self._say("leaderless", partitions=len(over), elected=elected)
        except errors.RetriableError as failure:
            self._say("recovery_failed", why=failure.message)
