"""The broker: composes the parts of the process, starts them and stops them.

`BrokerNode` is world-generic: the simulator runs it unmodified over simulated disks and streams.
`main` gives it the real ones.  A start has these steps; each is the condition of the next:
  1. lock and read the data directories (directories of another process, cluster or format are
     refused here)
  2. bind the address (a port in use is refused before anything else is changed)
  3. fetch the committed metadata: the partitions of this broker and their settings
  4. open their logs and rename strays
  5. register, so that the controller may elect this broker; then serve
A stream that arrives before step 5 waits for the reply to its hello.

A stop has these steps: the controller moves leadership away (controlled shutdown), streams end,
parked requests are answered, decided appends are written, everything is SYNCED, and the
clean-shutdown file is written last (rule L3).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import pk
from pk import errors, limits, tracing
from pk.log.manager import LogManager
from pk.log.storage import Disk
from pk.server.broker.cleaning import Cleaner
from pk.server.broker.clock_watch import ClockWatch
from pk.server.broker.core import BrokerCore
from pk.server.broker.lifecycle import BrokerIdentity, BrokerLifecycleManager
from pk.server.handlers.admin import AdminRequests, ProducerIds
from pk.server.handlers.admission import Admission
from pk.server.handlers.appends import Appends
from pk.server.handlers.control import ControlStream
from pk.server.handlers.coordinators import CoordinatorRequests
from pk.server.handlers.fetch import FetchStream
from pk.server.handlers.groups import GroupRequests
from pk.server.handlers.metadata import MetadataRequests
from pk.server.handlers.offsets import OffsetRequests
from pk.server.handlers.partition_descriptions import PartitionDescriptions
from pk.server.handlers.peers import Peer
from pk.server.handlers.produce import ProducerStreams, ProduceStream
from pk.server.handlers.tier import TierRequests
from pk.server.handlers.transactions import TransactionRequests
from pk.server.metadata.cache import MetadataCache
from pk.server.replica.context import Environment
from pk.server.replica.metrics import BrokerMetrics
from pk.server.tier.client import TierClient
from pk.tasks import TaskRegistry, awaited
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import PROTOCOL, accept_stream, error_head
from pk.world import Disconnected, Listener, Stream, StreamKind, World

if TYPE_CHECKING:
    from pk.server.node.run_config import RoleContext, RunConfig

CONTROLLED_SHUTDOWN_MS = 3_000
#: How long a drained stream may take to end by itself.
GRACE_MS = 1_000


class BrokerStreams:
    """Makes the handler of each accepted stream from the parts of a broker."""

    def __init__(self, core: BrokerCore) -> None:
        env, hosted, metadata = core.env, core.hosted, core.metadata
        self._admission = Admission(core.lifecycle)
        self.appends = Appends(hosted, self._admission, core.clocks, core.manager, core.verifier)
        self.producers = ProducerStreams()
        self._produce = partial(ProduceStream, env, self.appends, self.producers, core.purgatory)
        self._fetch = partial(
            FetchStream, env, hosted, core.corruption, core.tier, core.alter_partition
        )
        self.metadata = MetadataRequests(env, metadata, core.lifecycle, core.publisher)
        self.offsets = OffsetRequests(
            hosted, core.manager, core.corruption, core.tier, core.due, core.holds
        )
        self.tier = TierRequests(
            env,
            hosted,
            metadata,
            core.clocks,
            core.corruption,
            core.failures,
            core.feed,
            core.tier,
            core.due,
        )
        self.transactions = TransactionRequests(
            env, hosted, core.clocks, core.coordinators, core.verifier, core.publisher
        )
        groups = GroupRequests(
            core.groups, core.publisher, self.appends, core.holds, core.hold_reports
        )
        core.channels.handlers.update(self.transactions.between_brokers())
        core.channels.handlers.update(groups.between_brokers())
        self._control = partial(
            ControlStream,
            env,
            self.metadata,
            core.publisher,
            AdminRequests(
                env,
                hosted,
                core.replicas,
                metadata,
                core.lifecycle,
                core.publisher,
                core.clocks,
            ),
            ProducerIds(env, self._admission, core.lifecycle),
            self.transactions,
            self.offsets,
            PartitionDescriptions(hosted, core.replicas, metadata, core.corruption, core.holds),
            self.tier,
            CoordinatorRequests(metadata, core.internal_topics),
            groups,
            core.channels.handlers,
        )

    async def serve(self, kind: StreamKind, stream: Stream, peer: Peer) -> None:
        """Serve a stream whose hello was accepted, until it ends."""
        if kind is not StreamKind.CONTROL:
            try:
                self._admission.check_new_session()
            except errors.PkError as refusal:
                await stream.send(frames.encode(error_head(0, refusal)))
                return
        await self.handler(kind, stream, peer).serve()

    def handler(
        self, kind: StreamKind, stream: Stream, peer: Peer
    ) -> ControlStream | ProduceStream | FetchStream:
        """Return the handler of one stream."""
        if kind is StreamKind.CONTROL:
            return self._control(stream, peer)
        return self._produce(stream) if kind is StreamKind.PRODUCE else self._fetch(stream)


class BrokerNode:
    """One broker over a World and its disks."""

    def __init__(
        self,
        world: World,
        disks: list[Disk],
        run: RunConfig,
        *,
        boot_id: str,
        incarnation_id: str,
        metrics: tracing.Metrics | None = None,
        log: tracing.Log | None = None,
        on_fatal: Callable[[errors.PkError], None] | None = None,
        cleaner: Cleaner | None = None,
    ) -> None:
        self.world = world
        self.run = run
        self._boot_id = boot_id
        self._incarnation_id = incarnation_id
        self._log = log
        self._on_fatal = on_fatal
        self.failed: errors.PkError | None = None
        self._crowded = False  #: streams are refused, and the log says so
        self._manager = LogManager(
            disks,
            node_id=run.node_id,
            cluster_id=run.cluster_id,
            build=pk.__version__,
            world=world,
            boot_id=boot_id,
            producer_id_expiration_ms=run.server["producer_id_expiration_ms"],
            level=run.format_level,
        )
        env = Environment(
            world,
            run.node_id,
            run.server,
            BrokerMetrics(metrics or tracing.Metrics()),
            self._bug,
            self._warn,
            self._say,
        )
        self._env = env
        self.core = self._compose(env, cleaner)
        self._streams_of = BrokerStreams(self.core)
        self._listener: Listener | None = None
        self._serving = asyncio.Event()
        self._streams: dict[asyncio.Task[None], None] = {}

    def _compose(self, env: Environment, cleaner: Cleaner | None) -> BrokerCore:
        """Compose the broker; nothing of it runs before `start`."""
        run, server = self.run, self.run.server
        hello = wire.Hello(
            client_id=f"broker-{run.node_id}",
            build=pk.__version__,
            protocol=PROTOCOL,
            cluster_id=run.cluster_id,
            node_id=run.node_id,
            incarnation_id=self._incarnation_id,
        )
        metadata = MetadataCache(
            run.node_id,
            self._incarnation_id,
            run.topic_defaults,
            tier_enabled=bool(run.tier_url),
            peer_addresses=run.peer_addresses,
        )
        clocks = ClockWatch(env, self._manager, metadata)
        lifecycle = BrokerLifecycleManager(
            self.world,
            run.controller_addresses,
            hello,
            peers=run.peer_controller_addresses,
            voters=lambda: {each.node_id: each.address for each in metadata.image.voters},
            session_timeout_ms=server["broker_session_timeout_ms"],
            heartbeat_interval_ms=server["broker_heartbeat_interval_ms"],
            metadata_offset=lambda: self.core.publisher.reacted,
            offline_directories=lambda: self.core.report.offline_directories(),
            positions=lambda asked: self.core.report.positions(asked),
            offline_replicas=lambda: self.core.report.offline_replicas(),
            unfit=lambda: self.core.report.unfit(),
            partitions_max=server["partitions_max"],
            on_contact=env.metrics.contact_age.observe,
            say=self._say,
            clocks=clocks,
            on_fatal=self._fatal,
            on_epoch=self._manager.remember_broker_epoch,
        )
        tier = TierClient(
            self.world,
            run.tier_address,
            hello,
            enabled=bool(run.tier_url),
            fetch_wait_ms=server["remote_fetch_max_wait_ms"],
        )
        return BrokerCore(env, self._manager, metadata, clocks, lifecycle, tier, hello, cleaner)

    @property
    def address(self) -> str:
        """Return the address that clients connect to."""
        assert self._listener is not None
        return self.run.advertise or self._listener.address

    def frame_bytes_max(self) -> int:
        """Return the size of the largest frame that a client may send (rule L17)."""
        return self._streams_of.appends.frame_bytes_max()

    # -- start -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the broker; return when it serves.  Raises typed errors that say what to do."""
        run, core = self.run, self.core
        await self._manager.open()
        try:
            self._listener = await self.world.network.listen(run.broker_address, self._accept)
        except OSError as cause:
            await self._manager.close(clean=True)
            raise errors.AddressInUse(f"{run.broker_address}: {cause}") from cause
        await core.publisher.catch_up()
        await core.publisher.load()
        fresh = not self._manager.logs() and not core.replicas.unopened()
        appended_ms = await core.clocks.newest_append_ms()
        core.clocks.begin(self._boot_id, fresh=fresh, appended_ms=appended_ms)
        await core.free_space.measure_all()  # L16: before the controller may elect it
        core.lifecycle.start(self._identity())
        core.publisher.start()
        core.scheduler.start()
        core.cleaner.start()
        core.coordinators.start()
        core.open_transactions.start()
        core.group_gauges.start()
        core.hold_reports.start()
        await self._until_unfenced()
        self._serving.set()

    def _identity(self) -> BrokerIdentity:
        run, directories = self.run, self._manager.directories
        there = [each for each in directories if each.failure is None]  # R11: at least one
        epochs = {each.previous_broker_epoch for each in there}
        return BrokerIdentity(
            node_id=run.node_id,
            cluster_id=run.cluster_id,
            incarnation_id=self._incarnation_id,
            address=self.address,
            rack=str(run.server["rack"]),
            boot_id=self._boot_id,
            directory_ids=tuple(each.directory_id for each in directories if each.directory_id),
            # The controller compares the boot id with its own record.
            # All closed by one process: one that was restored from an older copy has another epoch.
            # A directory that failed is missing, and costs only the replicas that lay in it.
            clean_shutdown=all(each.closed_properly for each in there) and len(epochs) == 1,
            previous_broker_epoch=max(epochs),
            format_level=run.format_level,
        )

    async def _until_unfenced(self) -> None:
        while self.core.lifecycle.fenced:
            if self.failed is not None:
                raise self.failed
            await self.world.clock.sleep_ms(10)

    # -- streams ---------------------------------------------------------------------------------

    async def _accept(self, kind: StreamKind, stream: Stream) -> None:
        """Serve one incoming stream until it ends."""
        task = asyncio.current_task()
        assert task is not None
        if len(self._streams) >= limits.STREAMS_MAX + limits.STREAMS_RESERVED:
            stream.close()
            return
        self._streams[task] = None
        gauge = self._env.metrics.streams.labels(kind.value)
        gauge.inc()
        try:
            await self._serve(kind, stream)
        except Disconnected:
            pass
        finally:
            gauge.dec()
            self._streams.pop(task, None)
            stream.close()

    async def _serve(self, kind: StreamKind, stream: Stream) -> None:
        await self._serving.wait()
        said = await accept_stream(
            stream,
            wire.HelloReply(
                cluster_id=self.run.cluster_id,
                node_id=self.run.node_id,
                build=pk.__version__,
                protocol=PROTOCOL,
                role="broker",
            ),
            self._admitted,
        )
        if said is None:
            return
        await self._streams_of.serve(kind, stream, Peer(said, partial(self._proven, said)))

    def _admitted(self, hello: wire.Hello) -> bool:
        """Return whether the peer is a broker; other brokers are served before clients.

        Raises `ThrottledError` if as many streams are open as clients may have.
        """
        proven = self._proven(hello)
        most = limits.STREAMS_MAX
        if proven or len(self._streams) <= most:
            self._crowded = self._crowded and len(self._streams) > most // 2
            return proven
        if not self._crowded:
            self._crowded = True
            self._warn("streams_refused", streams=len(self._streams), most=most)
        raise errors.ThrottledError(
            f"broker {self.run.node_id} serves {most} streams, which is the most: close clients, "
            "or let more brokers lead their partitions and coordinate their groups"
        )

    def _proven(self, hello: wire.Hello) -> bool:
        """Whether the hello has the incarnation id of a registered broker (rule L17).

        Only that broker and the controllers know the id.
        """
        broker = self.core.metadata.image.brokers.get(hello.node_id)
        return broker is not None and broker.incarnation_id == hello.incarnation_id != ""

    # -- stop ------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Drain and stop the broker; afterwards its directories are marked clean."""
        core = self.core
        if not self._serving.is_set():  # it never served: nothing to drain
            await core.close()
            await self._manager.close(clean=True)
            return
        core.lifecycle.want_shutdown = True
        core.lifecycle.heartbeat_soon()
        try:
            async with asyncio.timeout(CONTROLLED_SHUTDOWN_MS / 1000):
                await core.lifecycle.may_shut_down.wait()
        except TimeoutError:
            self._warn("controlled_shutdown_timed_out")
        for writer in core.writers.all():
            await writer.idle()
        for partition in core.partitions.values():
            partition.step_down(partition.leader_hint)  # answers what is parked (L5)
        if self._listener is not None:
            await self._listener.close(GRACE_MS)
        tasks = list(self._streams)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await core.close()
        for writer in core.writers.all():
            await writer.idle()
        await self._note_run()
        await self._manager.close(clean=True)

    async def _note_run(self) -> None:
        run = self.core.clocks.last_run()
        if run is None:
            return
        for each in self._manager.directories:
            try:
                await self.core.clocks.note(each, run)
            except errors.PkError as error:  # it was stored some seconds ago
                self._env.metrics.refused(error)

    # -- reports ---------------------------------------------------------------------------------

    def _bug(self, where: str, bug: BaseException) -> None:
        if self._log is not None:
            self._log.bug(where, bug)
        else:
            asyncio.get_running_loop().call_exception_handler({"message": where, "exception": bug})

    def _warn(self, event: str, **facts: Any) -> None:
        if self._log is not None:
            self._log.warning(event, **facts)

    def _say(self, event: str, **facts: Any) -> None:
        if self._log is not None:
            self._log.info(event, **facts)

    def _fatal(self, error: errors.PkError) -> None:
        self.failed = error
        self._warn("fatal", error=type(error).__name__, message=error.message)
        if self._on_fatal is not None:
            self._on_fatal(error)


# -- the shell (◦) -------------------------------------------------------------------------------


def main(run: RunConfig) -> int:
    """`python -m pk.server broker`."""
    from pk.server.node.run_config import process_main

    return process_main("broker", run, _serve_process)


def open_disks(run: RunConfig) -> list[Disk]:
    """Open the node's directories.  A directory that was replaced since the node's start is failed.

    For example, if a disk was unmounted, its path leads to an empty directory instead of the
    directory that the supervisor found or created.
    """
    from pk.log import directory
    from pk.log.files import RealDisk, RealStorage

    disks: list[Disk] = []
    for path, directory_id in zip(run.dirs, run.directory_ids, strict=True):
        storage = RealStorage(path)
        try:
            found = directory.read_format(storage)
        except errors.StorageFailed as failure:
            storage.failed = failure
        else:
            if found is None or found.directory_id != directory_id:
                storage.failed = errors.StorageFailed(
                    f"{path} is not the directory that this node was started with (id "
                    f"{directory_id}): mount it again and restart",
                    directory=path,
                )
        disks.append(RealDisk(storage))
    return disks


async def _serve_process(process: RoleContext) -> None:
    from pk.server.broker.cleaner_child import CleanerChild
    from pk.server.broker.partition_metrics import PartitionMetrics
    from pk.server.node.metrics_endpoint import serve_metrics

    disks = open_disks(process.run)
    node = BrokerNode(
        process.world,
        disks,
        process.run,
        boot_id=process.boot_id,
        incarnation_id=process.incarnation_id,
        metrics=process.metrics,
        log=process.log,
        on_fatal=lambda _: process.stopping.set(),
        cleaner=CleanerChild(process.world.clock),
    )
    process.memory.find_frame_bytes_max = node.frame_bytes_max
    limit = process.run.server["metrics_partition_limit"]
    process.metrics.at_scrape(PartitionMetrics(node.core.partitions, limit).families)
    tasks = TaskRegistry(awaited)
    stopping = tasks.spawn(process.stopping.wait())
    starting = tasks.spawn(node.start())
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():  # asked to stop, or refused, while no controller had registered it
        await tasks.close()
        await node.close()
        if node.failed is not None:
            raise node.failed
        return
    await starting
    http = await serve_metrics(process)
    process.ready(node.address)
    await process.stopping.wait()
    process.health.not_ready = "shutting down"
    await node.close()
    if http is not None:
        http.close()
    for disk in disks:
        await disk.close()
    if node.failed is not None:
        raise node.failed
