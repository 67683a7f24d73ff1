"""The broker's link to the active controller: registration, heartbeats, calls.

World-generic.  Of several controllers one is active; the others refuse and name it.  The broker
asks one after another (controller_search.py) until a controller registers it, and stays with this
controller while it answers heartbeats.  The stream on which a broker registered is its liveness
stream (rule R7).  While heartbeats on it are answered and the broker is not fenced, the broker has
*contact*.  When the stream breaks, the broker reconnects with jittered back-off and registers again
under the same incarnation id.  Without contact for `broker_session_timeout_ms` it may have been
fenced without knowing (rule R6).

Timeouts: a new active controller waits at least three quarters of a session timeout before it
fences a broker.  A silent controller (stopped, or unreachable) is left after a quarter of that
timeout, and after at most half of it when it is asked again.  So a broker that reaches the active
controller is registered there in time.  If only one controller is known, it may take the whole
session timeout.

Invariants
  K1  A broker epoch is used only with the incarnation to which it was given.
  K2  Contact counts from the moment a heartbeat was *sent*, so a slow reply does not prolong it.
  K3  The waits between reconnections grow from 50 ms to 2 s, with jitter, and never end.  The rest
      of the broker continues.
  K6  Once the link has started, only registration and heartbeats move it to another controller.
      Any other call that times out or is refused only causes an early heartbeat.
  K7  A fenced broker has no contact.  Other brokers may lead its partitions, and it is unfenced
      only after it has reacted to this (rule Q2).  So neither a registration nor the reply to a
      fenced broker's heartbeat renews contact.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from google.protobuf.message import Message

from pk import errors, formats
from pk.backoff import Backoff, equal_jitter, exponential_ms
from pk.server.broker.controller_search import ControllerSearch
from pk.server.replica.directory_reports import DirectoryReports
from pk.server.replica.offline_reports import OfflineReports
from pk.tasks import TaskRegistry
from pk.types import NONE, NodeId, PartitionKey
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import Caller
from pk.world import World

if TYPE_CHECKING:
    from pk.server.broker.clock_watch import ClockWatch

_BACKOFF_MS = (50, 2_000)
#: Refusals that concern this broker; any other error is the controller's own.
_MINE = (
    errors.StaleBrokerEpoch,
    errors.ClusterIdMismatch,
    errors.DirectoryOfAnotherCluster,
    errors.NewerFormat,
)


@dataclass(slots=True)
class BrokerIdentity:
    """The identity under which a broker registers (rule L3)."""

    node_id: int
    cluster_id: str
    incarnation_id: str
    address: str  #: advertised to clients
    rack: str
    boot_id: str
    directory_ids: tuple[str, ...]
    clean_shutdown: bool
    previous_broker_epoch: int = NONE
    format_level: int = formats.LEVEL  #: of `pk.format`, the highest that it knows (rule Q6)


class BrokerLifecycleManager:
    """Registers a broker with the active controller and sends it heartbeats.

    `addresses`: the configured addresses of controllers.  Each controller knows the active one.
    `voters`: the controllers in the metadata image, by node id.  It may have controllers that were
    added after this node was configured.  `peers`: the addresses, by node id, that this node uses
    instead of the advertised ones.
    """

    def __init__(
        self,
        world: World,
        addresses: Sequence[str],
        hello: wire.Hello,
        *,
        session_timeout_ms: int,
        heartbeat_interval_ms: int,
        metadata_offset: Callable[[], int],
        offline_directories: Callable[[], list[str]],
        on_fatal: Callable[[errors.PkError], None],
        on_epoch: Callable[[int], None],
        peers: Mapping[NodeId, str] | None = None,
        voters: Callable[[], Mapping[NodeId, str]] = dict,
        positions: Callable[[Sequence[wire.FetchPartition]], list[wire.ReplicaPosition]] = (
            lambda asked: []
        ),
        offline_replicas: Callable[[], list[wire.FetchPartition]] = list,
        unfit: Callable[[], list[wire.Unfit]] = list,
        partitions_max: int = 0,
        on_contact: Callable[[int], None] = lambda age_ms: None,
        say: Callable[..., None] = lambda event, **facts: None,
        clocks: ClockWatch | None = None,
    ) -> None:
        self._world = world
        self._search = ControllerSearch(addresses)
        self._peers = dict(peers or {})
        self._voters = voters
        self._hello = hello
        self.identity: BrokerIdentity  #: known once the broker starts
        self._session_timeout_ms = session_timeout_ms
        self._interval_ms = heartbeat_interval_ms
        self._metadata_offset = metadata_offset
        self._offline_directories = offline_directories
        self._positions = positions
        self._offline_replicas = offline_replicas
        self._unfit = unfit
        self._partitions_max = partitions_max
        self._clocks = clocks
        #: Called at each renewal of contact, with the age (ms) of the contact.
        self._on_contact = on_contact
        self._say = say  #: (event, **facts): one line in the log of the process
        self._lost = True  #: the log's last line says that no controller answers
        self._on_fatal = on_fatal
        self._on_epoch = on_epoch
        self._broken = False
        self._wait_next = True
        self._wake = asyncio.Event()
        self._registered = asyncio.Event()  #: on the stream that is open now
        self._caller = self._call_at(self._search.address)
        self._closing = TaskRegistry()  #: callers of controllers that the link has left
        self.broker_epoch = NONE
        self.fenced = True
        self.caught_up = False
        self.want_shutdown = False
        self.may_shut_down = asyncio.Event()
        self.offline_reports = OfflineReports()
        self.directory_reports = DirectoryReports()
        self._contact_ms: int | None = None
        self._tasks = TaskRegistry()
        self._started = False

    # -- state others ask for --------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Return the address of the controller that is asked now."""
        return self._search.address

    def in_contact(self) -> bool:
        """Whether the broker has contact; without, it may have been fenced unknowingly (rule
        R6).
        """
        if self._contact_ms is None:
            return False
        return self._world.clock.monotonic_ms() - self._contact_ms < self._session_timeout_ms

    def fatal(self, error: errors.PkError) -> None:
        """Report an error after which the process cannot continue."""
        self._on_fatal(error)

    async def call(self, request: Message, timeout_ms: int) -> frames.Frame:
        """Call the active controller, once the link has one.

        Raises `ControllerUnavailable` if none is reached within `timeout_ms`.
        """
        clock = self._world.clock
        try:
            if not self._started:  # nothing else looks for a controller yet
                return await self._ask(request, min(timeout_ms, self._patience_ms()))
            started_ms = clock.monotonic_ms()
            async with asyncio.timeout(timeout_ms / 1000):
                await self._registered.wait()
            left_ms = max(1, timeout_ms - (clock.monotonic_ms() - started_ms))
            return await self._caller.call(request, timeout_ms=left_ms)
        except errors.ControllerUnavailable:
            self._wake.set()  # K6
            raise
        except TimeoutError:
            raise errors.ControllerUnavailable(
                f"no active controller was found within {timeout_ms} ms"
            ) from None
        except (errors.BrokerUnavailable, errors.RequestTimedOut) as cause:
            raise errors.ControllerUnavailable(cause.message) from cause

    # -- life ------------------------------------------------------------------------------------

    def start(self, identity: BrokerIdentity) -> None:
        """Begin to register and to send heartbeats as `identity`."""
        self.identity = identity
        self._started = True
        self._tasks.spawn(self._run())

    async def close(self) -> None:
        await self._tasks.close()
        await self._caller.close()
        await self._closing.wait()

    def heartbeat_soon(self) -> None:
        """Send the next heartbeat now, after a change that the controller waits for.

        For example the image has caught up, or a directory failed.
        """
        self._wake.set()

    def replica_online(self, key: PartitionKey) -> None:
        """Stop reporting that a replica is offline.  If the replica fails again, it is reported
        again."""
        self.offline_reports.withdraw(key)
        self.heartbeat_soon()

    async def _run(self) -> None:
        backoff = Backoff(_BACKOFF_MS, equal_jitter(self._world.rng))
        refused_since_ms: int | None = None
        while True:
            self._wait_next = True
            try:
                await self._register()
                backoff.reset()
                refused_since_ms = None
                await self._heartbeat()
            except (errors.DuplicateBroker, errors.MetadataBehind) as error:
                # The controller still has the session of this node's previous process, which ends
                # by itself; or it was deposed just now, and its successor has newer metadata.
                now_ms = self._world.clock.monotonic_ms()
                refused_since_ms = now_ms if refused_since_ms is None else refused_since_ms
                if now_ms - refused_since_ms > 3 * self._session_timeout_ms:
                    self._on_fatal(error)
                    return
            except _MINE as error:
                self._on_fatal(error)
                return
            except errors.PkError as error:  # K3: unreachable, slow or still starting
                self._say_lost(error.message)
            else:
                self._say_lost("the stream broke")
            finally:
                self._registered.clear()
            if self._wait_next:
                await self._world.clock.sleep_ms(backoff.next_ms())

    def _say_lost(self, why: str) -> None:
        if not self._lost:
            self._lost = True
            self._say("controller_lost", controller=self.address, why=why)

    # -- which controller ------------------------------------------------------------------------

    def _call_at(self, address: str) -> Caller:
        def on_break() -> None:
            if self._caller is caller:
                self._broken = True
                self._registered.clear()
                self._wake.set()

        world = self._world
        caller = Caller(world.network, world.clock, address, self._hello, on_break=on_break)
        return caller

    def _patience_ms(self) -> int:
        """Return how long the current controller may take to answer."""
        session_ms = self._session_timeout_ms
        if self._search.alone:
            return session_ms
        return exponential_ms(session_ms // 4, session_ms // 2, 1 + self._search.doublings)

    async def _ask(
        self, request: Message, timeout_ms: int, *, registered: bool = False
    ) -> frames.Frame:
        """Call the current controller; if it does not serve, move to the next one and raise.

        `registered`: the broker is registered there, so a lost stream alone does not move the link.
        """
        clock, search = self._world.clock, self._search
        asked_ms = clock.monotonic_ms()
        try:
            return await self._caller.call(request, timeout_ms=timeout_ms)
        except (*_MINE, errors.DuplicateBroker, errors.UserError):
            raise
        except errors.PkError as failure:
            if registered and isinstance(failure, errors.BrokerUnavailable):
                raise
            unanswered = isinstance(failure, errors.BrokerUnavailable | errors.RequestTimedOut)
            took_ms = clock.monotonic_ms() - asked_ms
            silent = unanswered and took_ms >= self._patience_ms() // 2
            before = search.address
            search.learn(self._peers.get(n, where) for n, where in self._voters().items() if where)
            over = search.failed(hint=self._named_in(failure), silent=silent)
            self._wait_next = over and (search.alone or not silent)  # a timeout was wait enough
            if search.address != before:
                self._move()
            raise

    def _named_in(self, refusal: errors.PkError) -> str:
        """Return the active controller's address that a refusal names; '' if it names none."""
        if not isinstance(refusal, errors.ControllerUnavailable):
            return ""
        named = refusal.details.get("controller", "")
        address = self._peers.get(int(named)) if named.isdigit() else None
        return address or refusal.details.get("address", "")

    def _move(self) -> None:
        """Move the link to the controller that the search chose; calls at the old one fail."""
        old, self._caller = self._caller, self._call_at(self._search.address)
        self._closing.spawn(old.close())

    # -- registration and heartbeats -------------------------------------------------------------

    async def _register(self) -> None:
        who = self.identity
        self._broken = False
        frame = await self._ask(
            wire.RegisterBrokerRequest(
                broker_id=who.node_id,
                cluster_id=who.cluster_id,
                incarnation_id=who.incarnation_id,
                address=who.address,
                rack=who.rack,
                previous_broker_epoch=who.previous_broker_epoch,
                boot_id=who.boot_id,
                directory_ids=who.directory_ids,
                clean_shutdown=who.clean_shutdown,
                log_time_ms=self._world.clock.wall_ms(),
                format_level=formats.level_field(who.format_level),
            ),
            self._patience_ms(),
        )
        self.broker_epoch = frame.head.register_broker_reply.broker_epoch
        self._on_epoch(self.broker_epoch)
        # A reconnection is no restart: whatever the process wrote since is in this machine's page
        # cache.
        who.clean_shutdown = True
        who.previous_broker_epoch = self.broker_epoch
        self._search.found()
        self._lost = False
        self._say("registered", controller=self.address, broker_epoch=self.broker_epoch)
        if not self._broken:
            self._registered.set()

    def _renew_contact(self, sent_ms: int) -> None:
        """Extend contact, after the heartbeat that was sent at `sent_ms` was answered (K2, K7)."""
        if self._contact_ms is not None:
            self._on_contact(self._world.clock.monotonic_ms() - self._contact_ms)
        self._contact_ms = sent_ms

    async def _heartbeat(self) -> None:
        """Send heartbeats until the stream breaks or the controller stops answering them."""
        clock = self._world.clock
        asked: Sequence[wire.FetchPartition] = ()  #: positions that the controller wants (R3)
        while not self._broken:
            sent_ms = clock.monotonic_ms()
            sent_boottime_ms = clock.boottime_ms()
            offline = self._offline_replicas()
            frame = await self._ask(
                wire.BrokerHeartbeatRequest(
                    broker_id=self.identity.node_id,
                    broker_epoch=self.broker_epoch,
                    metadata_offset=self._metadata_offset(),
                    want_shutdown=self.want_shutdown,
                    offline_directories=self._offline_directories(),
                    positions=self._positions(asked),
                    offline_replicas=offline,
                    unfit=self._unfit(),
                    partitions_max=self._partitions_max,
                    directories=self.directory_reports.listed(),
                    clock=None if self._clocks is None else self._clocks.reading(),
                ),
                self._patience_ms(),
                registered=True,
            )
            if clock.monotonic_ms() - sent_ms < self._session_timeout_ms // 8:
                self._search.steady()
            self._offline_acknowledged(offline)
            reply = frame.head.broker_heartbeat_reply
            if not reply.fenced:
                self._renew_contact(sent_ms)
            if reply.fenced != self.fenced:
                self._say("fenced" if reply.fenced else "unfenced", broker_epoch=self.broker_epoch)
            self.fenced, self.caught_up = reply.fenced, reply.caught_up
            if self._clocks is not None:
                self._clocks.heartbeat_answered(reply, sent_boottime_ms)
            if reply.may_shut_down:
                self.may_shut_down.set()
            asked = reply.report_positions
            hurry = self.fenced or asked
            wait_ms = min(self._interval_ms, 50) if hurry else self._interval_ms
            await self._wait(wait_ms)

    def _offline_acknowledged(self, reported: Sequence[wire.FetchPartition]) -> None:
        """Note that the controller knows that the replicas in `reported` are offline.

        A replica that came online since the heartbeat was sent does not count: from the next
        heartbeat on the controller may let it join its ISR.
        """
        still = self._offline_replicas() if reported else []
        offline = {PartitionKey(each.topic_id, each.partition) for each in still}
        keys = [PartitionKey(each.topic_id, each.partition) for each in reported]
        self.offline_reports.on_reply(keys, offline)

    async def _wait(self, wait_ms: int) -> None:
        """Wait until the next heartbeat is due or requested, or the stream breaks."""
        if not self._broken:
            try:
                async with asyncio.timeout(wait_ms / 1000):
                    await self._wake.wait()
            except TimeoutError:
                pass
        self._wake.clear()
