"""The controller process: the quorum's log, the controller machine over it, and who may talk to
them.

`ControllerNode` is world-generic; `main` gives it the real disk and network.  Brokers keep one
CONTROL stream to it: they register, beat, fetch the committed metadata log by long poll and
forward administration. The stream a broker registered on is its liveness stream (rule R7).

Order of a start: lock the directory, recover the log, win the election (epoch + 1, SYNCED),
replay, then listen; whoever connects earlier is refused and comes back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pk
from pk import errors, limits, tracing
from pk.log.storage import Buffer, Disk
from pk.server.controller import commands
from pk.server.controller.machine import Command, Controller
from pk.server.controller.records import MetadataRecord
from pk.server.controller.sessions import Session, Sessions
from pk.server.quorum.log import MetadataLog
from pk.server.quorum.messages import Voter
from pk.server.runtime import ReplayedHost
from pk.types import PartitionKey
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import PROTOCOL, Handler, accept_stream, error_head, serve_control
from pk.world import Disconnected, Listener, Stream, StreamKind, World

if TYPE_CHECKING:
    from pk.server.run_config import Process, RunConfig

#: R7: how long a broker whose stream was reset may take to accept a connection.
PROBE_MS = 250
TICK_MS = 100
GRACE_MS = 500
FETCH_BYTES_MAX = 4 * limits.MIB
FETCH_WAIT_MS_MAX = 30_000

FetchReply = tuple[wire.FetchMetadataLogReply, Iterable[Buffer]]


class ControllerNode:
    """One controller over a World and the disk of `DIR/metadata`."""

    def __init__(
        self,
        world: World,
        disk: Disk,
        run: RunConfig,
        *,
        log: tracing.Log | None = None,
        on_fatal: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.world = world
        self.run = run
        self.failed: BaseException | None = None
        self._disk = disk
        self._log = log
        self._on_fatal = on_fatal
        self.metadata = MetadataLog(
            world,
            disk,
            me=Voter(run.node_id, run.directory_ids[0]),
            address=run.controller_address,
            on_fatal=self._fatal,
            cluster_id=run.cluster_id,
        )
        rules = commands.Rules(run.node_id, run.server, run.topic_defaults)
        self.host: ReplayedHost[Command, MetadataRecord] = ReplayedHost(
            lambda: Controller(rules), self.metadata, world.clock, on_fatal=self._fatal
        )
        self.sessions = Sessions(int(run.server["broker_session_timeout_ms"]))
        self._listener: Listener | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._next_stream = 1
        self._waiting: dict[PartitionKey, int] = {}  # leaderless since

    @property
    def machine(self) -> Controller:
        machine = self.host.machine
        assert isinstance(machine, Controller)
        return machine

    @property
    def address(self) -> str:
        assert self._listener is not None
        return self._listener.address

    # -- life --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Returns when the controller serves.  Raises typed errors that say who must act."""
        await self._disk.write(self._disk.storage.lock)
        try:
            await self.metadata.open()
            await self.metadata.lead()
            await self.host.start()
            await self._bootstrap()
            self._listener = await self.world.network.listen(
                self.run.controller_address, self._accept
            )
        except OSError as cause:
            await self._release(clean=False)
            raise errors.AddressInUse(f"{self.run.controller_address}: {cause}") from cause
        except BaseException:
            await self._release(clean=False)
            raise
        self._spawn(self._watch())

    async def _bootstrap(self) -> None:
        cluster_id = await self.host.ask(commands.Bootstrap(self.run.cluster_id))
        if cluster_id != self.run.cluster_id:
            raise errors.DirectoryOfAnotherCluster(
                f"{self._disk.storage.root} holds the metadata of cluster {cluster_id}, "
                f"not of {self.run.cluster_id}"
            )
        unfenced = [
            (broker.broker_id, broker.broker_epoch)
            for broker in self.machine.image.brokers.values()
            if not broker.fenced
        ]
        self.sessions.grant(unfenced, self.world.clock.monotonic_ms())

    async def close(self) -> None:
        """Stop serving; what was decided is committed or refused."""
        if self._listener is not None:
            await self._listener.close(GRACE_MS)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._release(clean=self.failed is None)

    async def _release(self, clean: bool) -> None:
        await self.host.close()
        try:
            await self.metadata.close(clean)
        finally:
            await self._disk.write(self._disk.storage.unlock)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (bug := task.exception()) is not None:
            self._fatal(bug)

    def _fatal(self, failure: BaseException) -> None:
        if self.failed is None:
            self.failed = failure
            if self._log is not None:
                self._log.error("fatal", error=repr(failure))
            if self._on_fatal is not None:
                self._on_fatal(failure)

    # -- streams -----------------------------------------------------------------------------------

    async def _accept(self, kind: StreamKind, stream: Stream) -> None:
        reply = wire.HelloReply(
            cluster_id=self.run.cluster_id,
            node_id=self.run.node_id,
            build=pk.__version__,
            protocol=PROTOCOL,
            role="controller",
        )
        if kind is not StreamKind.CONTROL:
            refusal = errors.UnsupportedFeature("a controller has control streams only")
            await stream.send(frames.encode(error_head(0, refusal)))
            return
        if await accept_stream(stream, reply) is None:
            return
        number = self._next_stream
        self._next_stream += 1
        try:
            await serve_control(stream, self._handlers(number), on_error=self._bug)
        finally:
            for session in self.sessions.lose(number):
                self._spawn(self._probe(session))

    def _bug(self, where: str, bug: BaseException) -> None:
        if self._log is not None:
            self._log.bug(where, bug)

    def _handlers(self, number: int) -> Mapping[str, Handler]:
        def asks(make: Callable[[Any], Command]) -> Handler:
            async def handle(request: Any, _frame: frames.Frame) -> Any:
                return await self.host.ask(make(request))

            return handle

        async def register(request: Any, _frame: frames.Frame) -> Any:
            return await self._register(number, request)

        async def heartbeat(request: Any, _frame: frames.Frame) -> Any:
            return await self._heartbeat(number, request)

        async def fetch(request: Any, _frame: frames.Frame) -> FetchReply:
            return await self._fetch(request)

        return {
            "register_broker": register,
            "broker_heartbeat": heartbeat,
            "fetch_metadata_log": fetch,
            "create_topics": asks(self._create_topics),
            "delete_topics": asks(commands.DeleteTopics),
            "create_partitions": asks(commands.CreatePartitions),
            "alter_configs": asks(commands.AlterConfigs),
            "describe_configs": asks(commands.DescribeConfigs),
            "allocate_producer_ids": asks(commands.AllocateProducerIds),
            "alter_partition": asks(commands.AlterPartition),
        }

    def _create_topics(self, request: wire.CreateTopicsRequest) -> commands.CreateTopics:
        return commands.CreateTopics(request, tuple(self.world.new_id() for _ in request.topics))

    # -- brokers -----------------------------------------------------------------------------------

    async def _register(
        self, number: int, request: wire.RegisterBrokerRequest
    ) -> wire.RegisterBrokerReply:
        live = self.sessions.live(request.broker_id, except_stream=number)
        reply: wire.RegisterBrokerReply = await self.host.ask(commands.Register(request, live))
        now_ms = self.world.clock.monotonic_ms()
        self.sessions.open(request.broker_id, reply.broker_epoch, number, now_ms)
        self._say("broker_registered", broker=request.broker_id, epoch=reply.broker_epoch)
        return reply

    async def _heartbeat(
        self, number: int, request: wire.BrokerHeartbeatRequest
    ) -> wire.BrokerHeartbeatReply:
        now_ms = self.world.clock.monotonic_ms()
        self.sessions.beat(request.broker_id, request.broker_epoch, number, now_ms)
        reply: wire.BrokerHeartbeatReply = await self.host.ask(commands.Beat(request))
        return reply

    async def _probe(self, session: Session) -> None:
        """R7: a stream was lost; if the broker's address refuses a connection, it is gone."""
        broker = self.machine.image.brokers.get(session.broker_id)
        if broker is None or broker.broker_epoch != session.broker_epoch:
            return
        try:
            async with asyncio.timeout(PROBE_MS / 1000):
                stream = await self.world.network.connect(broker.address, StreamKind.CONTROL)
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

    def _say(self, event: str, **facts: object) -> None:
        if self._log is not None:
            self._log.info(event, **facts)

    # -- time --------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Sessions that expired, elections whose wait is over."""
        clock = self.world.clock
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
        wait_ms = int(self.run.server["unclean_recovery_wait_ms"])
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

    # -- the metadata log --------------------------------------------------------------------------

    async def _fetch(self, request: wire.FetchMetadataLogRequest) -> FetchReply:
        """Committed batches from an offset; waits for the first one."""
        log, offset = self.metadata, request.from_offset
        if not 0 <= offset <= log.end:
            raise errors.OffsetOutOfRange(f"offset {offset}: the metadata log is [0, {log.end})")
        if offset >= log.committed:
            wait_ms = min(max(request.max_wait_ms, 0), FETCH_WAIT_MS_MAX)
            try:
                async with asyncio.timeout(wait_ms / 1000):
                    await log.wait_committed(offset + 1)
            except TimeoutError:
                pass
        raw, following = b"", offset
        if offset < log.committed:
            raw, following = await log.read(offset, min(request.max_bytes, FETCH_BYTES_MAX))
        reply = wire.FetchMetadataLogReply(
            high_watermark=log.committed,
            log_start=0,
            next_offset=following,
            leader_epoch=log.epoch,
            leader_id=self.run.node_id,
        )
        return reply, (raw,)


# -- the shell (◦) ---------------------------------------------------------------------------------


def main(run: RunConfig) -> int:
    """`python -m pk.server controller`."""
    from pk.server.run_config import process_main

    return process_main("controller", run, _serve_process)


async def _serve_process(process: Process) -> None:
    from pk.log.files import RealDisk, RealStorage
    from pk.server.metrics_endpoint import serve_metrics

    disk = RealDisk(RealStorage(process.run.metadata_dir))
    node = ControllerNode(
        process.world,
        disk,
        process.run,
        log=process.log,
        on_fatal=lambda _failure: process.stopping.set(),
    )
    await node.start()
    http = await serve_metrics(process)
    process.ready(node.address)
    await process.stopping.wait()
    process.health.not_ready = "shutting down"
    await node.close()
    if http is not None:
        http.close()
    await disk.close()
    if node.failed is not None:
        raise node.failed
