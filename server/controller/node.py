"""The controller process: a voter of the metadata quorum, and the active controller while it leads.

`ControllerNode` is world-generic; `main` gives it the real disk and network.  The other voters have
control streams to it for quorum messages.  Each broker has a control stream for its requests
(active.py), on which it also fetches the committed metadata log by long poll.  A controller that
does not lead refuses the requests of brokers and names the leader.

Order of a start: lock the directory, recover the log, listen, join the quorum.  A quorum of one
elects itself and serves before `start` returns.

Invariants
  N1  A client never receives a failure of this node as an answer.  It receives an error that sends
      it to another controller.  A damaged log, or a disk that cannot be read, stops this node
      (rule L9), so that another node leads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pk
from pk import errors, limits, tracing
from pk.log.storage import Buffer, Disk
from pk.running_since import RunningSince
from pk.server.controller.active import ActiveController
from pk.server.controller.machine import Controller
from pk.server.metadata.record_serde import MetadataRecordSerde
from pk.server.metadata.snapshot_generator import SnapshotGenerator
from pk.server.node.settings import voter_directory_id
from pk.server.raft import membership
from pk.server.raft.log import RaftLog
from pk.server.raft.messages import Voter
from pk.server.raft.recovery import SnapshotRules
from pk.server.raft.reserve import RESERVE_BYTES
from pk.server.raft.snapshot_id import file_name
from pk.server.raft.timing import Timing
from pk.tasks import TaskRegistry
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import PROTOCOL, Handler, accept_stream, error_head, serve_control
from pk.wire.connection_quotas import proven_by_address
from pk.world import Listener, Stream, StreamKind, World

if TYPE_CHECKING:
    from pk.server.node.run_config import RoleContext, RunConfig

GRACE_MS = 500
FETCH_BYTES_MAX = 4 * limits.MIB
FETCH_WAIT_MS_MAX = 30_000
#: Requests of brokers and tools; only the active controller answers them.
_ASKED = (
    "register_broker", "broker_heartbeat", "create_topics", "delete_topics", "create_partitions",
    "alter_configs", "describe_configs", "allocate_producer_ids", "alter_partition",
    "alter_reassignments", "list_reassignments", "elect_leaders", "unregister_broker",
    "tier_purged", "list_brokers", "describe_cluster", "upgrade_cluster", "create_internal_topic",
    "acquire_lease", "renew_lease", "release_lease",
    "set_schedule", "delete_schedule", "list_schedules", "note_run",
)  # fmt: skip

#: Requests whose reply shows a broker that it is not fenced.  A leader that may have been replaced
#: by another one does not answer them.
_CONTACT = ("register_broker", "broker_heartbeat")

MetadataLogReply = tuple[wire.FetchMetadataLogReply, Iterable[Buffer]]


def first_voters(run: RunConfig) -> dict[Voter, str] | None:
    """Return the voters of the settings, as `pk server format --initial-controllers` writes
    them.
    """
    return {
        Voter(node_id, voter_directory_id(run.cluster_id, node_id)): address
        for node_id, address in run.voters.items()
    } or None


class ControllerNode:
    """One controller over a World and the disk of `DIR/metadata`.

    `voters`: the first voters of a new quorum, with their addresses.  Default: the voters of the
    settings, or this node alone if the settings name none.
    """

    def __init__(
        self,
        world: World,
        disk: Disk,
        run: RunConfig,
        *,
        log: tracing.Log | None = None,
        on_fatal: Callable[[BaseException], None] | None = None,
        voters: Mapping[Voter, str] | None = None,
        address: str | None = None,
        timing: Timing | None = None,
        reserve_bytes: int = RESERVE_BYTES,
    ) -> None:
        self.world = world
        self.run = run
        self.failed: BaseException | None = None
        self._disk = disk
        self._log = log
        self._on_fatal = on_fatal
        self._address = run.controller_listen if address is None else address
        voters = first_voters(run) if voters is None else voters
        self.metadata = RaftLog(
            world,
            disk,
            MetadataRecordSerde(run.format_level),
            SnapshotGenerator,
            me=Voter(run.node_id, run.metadata_directory_id or run.directory_ids[0]),
            address=run.voters.get(run.node_id, self._address),
            on_fatal=self._fatal,
            voters=voters,
            timing=timing,
            cluster_id=run.cluster_id,
            rules=SnapshotRules(
                int(run.server["metadata_log_max_record_bytes_between_snapshots"]),
                int(run.server["metadata_log_max_snapshot_interval_ms"]),
            ),
            say=self._say,
            peers=run.peer_controller_addresses,
            reserve_bytes=reserve_bytes,
            format_level=run.format_level,
        )
        self._running_since = RunningSince(world.clock)
        self.active: ActiveController | None = None  #: while this node is the active controller
        self._listener: Listener | None = None
        self._tasks = TaskRegistry()
        self._next_stream = 1

    @property
    def machine(self) -> Controller:
        """The machine of the present term.  Raises `ControllerUnavailable` if there is none."""
        return self._active().machine

    @property
    def address(self) -> str:
        assert self._listener is not None
        return self._listener.address

    # -- life --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the node.  Returns when it listens, and also serves if it is the only voter.

        Raises typed errors that say who must act.
        """
        await self._disk.write(self._disk.storage.lock)
        try:
            await self.metadata.open()
            if self.metadata.alone:
                await self._begin_term()
            self._listener = await self.world.network.listen(self._address, self._accept)
        except OSError as cause:
            await self._release(clean=False)
            raise errors.AddressInUse(f"{self._address}: {cause}") from cause
        except BaseException:
            await self._release(clean=False)
            raise
        self._tasks.spawn(self._serve_terms())

    async def _begin_term(self) -> None:
        """Begin a term of this node.  Raises `ControllerUnavailable` if another node leads
        first.
        """
        await self.metadata.lead()
        active = ActiveController(
            self.world, self.run, self.metadata, say=self._say, on_fatal=self._fatal,
            running_since=self._running_since,
        )  # fmt: skip
        try:
            await active.start()
        except BaseException:
            await active.close()
            raise
        self.active = active
        self._say("active_controller", epoch=active.epoch)

    async def _serve_terms(self) -> None:
        """Run the terms of this node, one after another."""
        try:
            while True:
                if self.active is None:
                    try:
                        await self._begin_term()
                    except errors.ControllerUnavailable:
                        continue
                assert self.active is not None
                await self.metadata.leadership_over(self.active.epoch)
                await self._end_term()
        except asyncio.CancelledError:
            raise
        except BaseException as bug:
            self._fatal(bug)

    async def _end_term(self) -> None:
        active, self.active = self.active, None
        if active is not None:
            await active.close()
            self._say("controller_resigned", epoch=active.epoch)

    async def close(self) -> None:
        """Stop the node.  Decisions in flight are committed or refused first."""
        if self._listener is not None:
            await self._listener.close(GRACE_MS)
        await self._tasks.close()
        await self._end_term()
        if not self.metadata.alone and self.failed is None:
            await self.metadata.resign()
        await self._release(clean=self.failed is None)

    async def _release(self, clean: bool) -> None:
        await self._end_term()
        try:
            await self.metadata.close(clean)
        finally:
            await self._disk.write(self._disk.storage.unlock)

    def _fatal(self, failure: BaseException) -> None:
        if self.failed is None:
            self.failed = failure
            if self._log is not None:
                self._log.error("fatal", error=repr(failure))
            if self._on_fatal is not None:
                self._on_fatal(failure)

    def _say(self, event: str, **facts: object) -> None:
        if self._log is not None:
            self._log.info(event, **facts)

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
        if await accept_stream(stream, reply, lambda hello: self._proven(hello, stream)) is None:
            return
        number = self._next_stream
        self._next_stream += 1
        try:
            await serve_control(stream, self._handlers(number), on_error=self._bug)
        finally:
            if self.active is not None:
                self.active.lost(number)

    def _proven(self, hello: wire.Hello, stream: Stream) -> bool:
        """Whether the peer is a registered broker that knows its incarnation, or a voter (L17)."""
        if proven_by_address(stream.peer, self.metadata.voters.addresses.values()):
            return True
        if self.active is None:
            return False
        broker = self.active.machine.image.brokers.get(hello.node_id)
        return broker is not None and broker.incarnation_id == hello.incarnation_id != ""

    def _bug(self, where: str, bug: BaseException) -> None:
        if self._log is not None:
            self._log.bug(where, bug)

    def _active(self) -> ActiveController:
        """Return the present term.  Raises `ControllerUnavailable`, which names a known leader."""
        if self.active is not None:
            return self.active
        leader = self.metadata.leadership.leader
        if leader is None or leader.node_id == self.run.node_id:
            raise errors.ControllerUnavailable("no controller is active yet")
        raise errors.ControllerUnavailable(
            f"controller {leader.node_id} is active, not {self.run.node_id}",
            controller=str(leader.node_id),
            address=self.metadata.address_of(leader.node_id),
        )

    def _handlers(self, number: int) -> Mapping[str, Handler]:
        def active(name: str) -> Handler:
            async def handle(request: Any, frame: frames.Frame) -> Any:
                active = self._active()
                if name in _CONTACT and not self.metadata.in_touch():  # R6
                    raise errors.ControllerUnavailable(
                        "this controller has no contact to a majority"
                    )
                return await active.handlers(number)[name](request, frame)

            return handle

        async def fetch(request: Any, _frame: frames.Frame) -> MetadataLogReply:
            return await self._fetch(request)

        of_quorum = self.metadata.handlers()

        async def fetch_of_voter(request: Any, frame: frames.Frame) -> Any:
            if self.active is not None:
                self.active.voter_fetched(request)
            return await of_quorum["quorum_fetch"](request, frame)

        table = {
            **of_quorum,
            "quorum_fetch": fetch_of_voter,
            **{name: active(name) for name in _ASKED},
            **self._membership(),
            "fetch_metadata_log": fetch,
        }
        return {name: self._unless_failed(name, handler) for name, handler in table.items()}

    def _unless_failed(self, name: str, handler: Handler) -> Handler:
        """Run a request; translate a failure of this node (N1).

        The host of the machine handles refusals of the term itself (runtime/replayed_host.py).
        """

        async def handle(request: Any, frame: frames.Frame) -> Any:
            try:
                return await handler(request, frame)
            except Exception as failure:
                damage = isinstance(failure, errors.CorruptLog | errors.StorageFailed)
                if damage and name not in _ASKED:
                    self._fatal(failure)
                if self.failed is None:
                    raise
                raise errors.ControllerUnavailable(
                    f"controller {self.run.node_id} failed: {self.failed}"
                ) from failure

        return handle

    # -- who votes ---------------------------------------------------------------------------------

    def _membership(self) -> Mapping[str, Handler]:
        log, clock = self.metadata, self.world.clock

        async def describe(_request: Any, _frame: frames.Frame) -> Any:
            self._active()
            return membership.describe(log.quorum, log.address_of, clock.monotonic_ms())

        async def add(request: wire.AddVoterRequest, _frame: frames.Frame) -> Any:
            self._active()
            voter = Voter(request.node_id, request.directory_id)
            if not request.directory_id or not request.address:
                raise errors.InvalidRequest("a voter has a directory id and an address")
            voters = membership.with_voter(log.quorum, voter, clock.monotonic_ms())
            return await self._vote_with(voters, {voter.node_id: request.address})

        async def remove(request: wire.RemoveVoterRequest, _frame: frames.Frame) -> Any:
            self._active()
            voters = membership.without_voter(
                log.quorum, request.node_id, request.directory_id, clock.monotonic_ms()
            )
            return await self._vote_with(voters, {})

        return {"describe_quorum": describe, "add_voter": add, "remove_voter": remove}

    async def _vote_with(
        self, voters: tuple[Voter, ...], addresses: Mapping[int, str]
    ) -> wire.ChangeVotersReply:
        log = self.metadata
        if voters != log.quorum.voters:
            await log.change_voters(voters, addresses)
        self._say("voters_changed", voters=",".join(str(voter.node_id) for voter in voters))
        reply = wire.ChangeVotersReply(metadata_offset=log.committed - 1)
        for each in voters:
            reply.voters.add(
                node_id=each.node_id,
                directory_id=each.directory_id,
                address=log.address_of(each.node_id),
            )
        return reply

    # -- the metadata log --------------------------------------------------------------------------

    async def _fetch(self, request: wire.FetchMetadataLogRequest) -> MetadataLogReply:
        """Return committed batches from an offset; wait for the first one.

        For an offset below the start of the log the reply names a snapshot (KIP-630).  Raises
        `CorruptLog`.
        """
        self._active()
        log, offset = self.metadata, request.from_offset
        if 0 <= offset < log.log_start and log.newest_snapshot is not None:
            return self._fetched(offset, snapshot=file_name(log.newest_snapshot)), ()
        if offset > log.end and not log.alone:
            # The broker has seen later committed records: another controller leads a later epoch.
            raise errors.ControllerUnavailable(
                f"offset {offset}: the metadata log of this controller ends at {log.end}"
            )
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
            try:
                raw, following = await log.read(offset, min(request.max_bytes, FETCH_BYTES_MAX))
            except errors.OffsetOutOfRange as gone:  # cut by a snapshot meanwhile
                raise errors.ControllerUnavailable(
                    f"now in a snapshot only: {gone.message}"
                ) from gone
        return self._fetched(following), (raw,)

    def _fetched(self, following: int, *, snapshot: str = "") -> wire.FetchMetadataLogReply:
        log = self.metadata
        return wire.FetchMetadataLogReply(
            high_watermark=log.committed,
            log_start=log.log_start,
            next_offset=following,
            leader_epoch=log.epoch,
            leader_id=self.run.node_id,
            snapshot=snapshot,
        )


# -- the shell (◦) ---------------------------------------------------------------------------------


def main(run: RunConfig) -> int:
    """`python -m pk.server controller`."""
    from pk.server.node.run_config import process_main

    return process_main("controller", run, _serve_process)


async def _serve_process(process: RoleContext) -> None:
    from pk.log.files import RealDisk, RealStorage
    from pk.server.node.metrics_endpoint import serve_metrics

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
