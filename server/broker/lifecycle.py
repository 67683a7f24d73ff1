"""The broker's link to the active controller: registration, heartbeats, calls.

World-generic.  Of several controllers one is active; the others refuse and name it.  The link asks
one after another (controller_search.py) until one registers it, and stays there while heartbeats
are answered.  The stream a broker registered on is its liveness stream (rule R7): while heartbeats
on it are answered the broker has *contact*; when it breaks the broker re-connects with jittered
back-off and registers again under the same incarnation id.  Without contact for
`broker_session_timeout_ms` it may have been fenced without knowing (rule R6).

Waits: a new active controller grants every broker three quarters of a session timeout at least.  A
silent controller (it was stopped, or is cut off) is left after a quarter of that timeout, and when
it is asked once more after at most half: a broker that reaches the active controller is registered
there in time.  With nobody else to ask a controller may take the whole session timeout.

Invariants
  K1  a broker epoch is used only with the incarnation that was given it
  K2  contact counts from the moment a heartbeat was *sent*, so a slow reply never stretches it
  K3  re-connection waits grow from 50 ms to 2 s, with jitter, for ever; the rest of the broker goes
      on
  K6  once started, registration and heartbeats alone decide where the link is: a call of somebody's
      with a short patience, or one that is refused, moves nothing; it has the heartbeat look
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from google.protobuf.message import Message

from pk import errors
from pk.backoff import Backoff, equal_jitter, exponential_ms
from pk.server.broker.controller_search import ControllerSearch
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
#: Refusals that concern this broker; what else ails a controller is its own affair.
_MINE = (errors.StaleBrokerEpoch, errors.ClusterIdMismatch, errors.DirectoryOfAnotherCluster)


@dataclass(slots=True)
class Identity:
    """Who registers (rule L3)."""

    node_id: int
    cluster_id: str
    incarnation_id: str
    address: str  #: what clients are told
    rack: str
    boot_id: str
    directory_ids: tuple[str, ...]
    clean_shutdown: bool
    previous_broker_epoch: int = NONE


class BrokerLifecycleManager:
    """Keeps a broker registered and alive in the active controller's eyes.

    `addresses`: of controllers, any of which knows the active one; `voters`: by node id, those that
    the metadata name, which may have come later; `peers`: by node id, what this node connects to
    instead of the address a controller is known by.
    """

    def __init__(
        self,
        world: World,
        addresses: Sequence[str],
        hello: wire.Hello,
        identity: Identity,
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
        on_contact: Callable[[int], None] = lambda age_ms: None,
        say: Callable[..., None] = lambda event, **facts: None,
        clocks: ClockWatch | None = None,
    ) -> None:
        self._world = world
        self._search = ControllerSearch(addresses)
        self._peers = dict(peers or {})
        self._voters = voters
        self._hello = hello
        self.identity = identity
        self._session_timeout_ms = session_timeout_ms
        self._interval_ms = heartbeat_interval_ms
        self._metadata_offset = metadata_offset
        self._offline_directories = offline_directories
        self._positions = positions
        self._offline_replicas = offline_replicas
        self._unfit = unfit
        self._clocks = clocks
        self._on_contact = on_contact  #: how old (ms) contact was when it was renewed
        self._say = say  #: (event, **facts): one line in the log of the process
        self._lost = True  #: the log does not say that a controller answers
        self._on_fatal = on_fatal
        self._on_epoch = on_epoch
        self._broken = False
        self._wait_next = True
        self._wake = asyncio.Event()
        self._registered = asyncio.Event()  #: on the stream that is open now
        self._caller = self._call_at(self._search.address)
        self._closing = TaskRegistry()  #: callers that were left
        self.broker_epoch = NONE
        self.fenced = True
        self.caught_up = False
        self.want_shutdown = False
        self.may_shut_down = asyncio.Event()
        self.offline_reports = OfflineReports()
        self._contact_ms: int | None = None
        self._tasks = TaskRegistry()
        self._started = False

    # -- state others ask for --------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Of the controller that is asked now."""
        return self._search.address

    def in_contact(self) -> bool:
        """False once the broker may have been fenced without hearing of it (rule R6)."""
        if self._contact_ms is None:
            return False
        return self._world.clock.monotonic_ms() - self._contact_ms < self._session_timeout_ms

    def fatal(self, error: errors.PkError) -> None:
        """The process cannot go on."""
        self._on_fatal(error)

    async def call(self, request: Message, timeout_ms: int) -> frames.Frame:
        """One call to the active controller, once the link has one; what cannot be reached is
        `ControllerUnavailable`.
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

    def start(self) -> None:
        self._started = True
        self._tasks.spawn(self._run())

    async def close(self) -> None:
        await self._tasks.close()
        await self._caller.close()
        await self._closing.wait()

    def heartbeat_soon(self) -> None:
        """Something the controller waits for changed (the image caught up, a directory failed)."""
        self._wake.set()

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
                # The controller still holds the session of this node's previous process, which ends
                # by itself; or it was deposed just now, and another knows more.
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
        """How long the controller at hand may take to answer."""
        session_ms = self._session_timeout_ms
        if self._search.alone:
            return session_ms
        return exponential_ms(session_ms // 4, session_ms // 2, 1 + self._search.doublings)

    async def _ask(
        self, request: Message, timeout_ms: int, *, registered: bool = False
    ) -> frames.Frame:
        """Ask the controller at hand; if it does not serve, the next one is at hand.

        `registered`: a lost stream says nothing about who leads; the same one is asked first.
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
            self._wait_next = over and (search.alone or not silent)  # that was a wait enough
            if search.address != before:
                self._move()
            raise

    def _named_in(self, refusal: errors.PkError) -> str:
        """The address of the active controller, as a refusal has it; '' if it does not."""
        if not isinstance(refusal, errors.ControllerUnavailable):
            return ""
        named = refusal.details.get("controller", "")
        address = self._peers.get(int(named)) if named.isdigit() else None
        return address or refusal.details.get("address", "")

    def _move(self) -> None:
        """What is under way where the link was fails now."""
        old, self._caller = self._caller, self._call_at(self._search.address)
        self._closing.spawn(old.close())

    # -- registration and heartbeats -------------------------------------------------------------

    async def _register(self) -> None:
        who = self.identity
        self._broken = False
        sent_ms = self._world.clock.monotonic_ms()
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
            ),
            self._patience_ms(),
        )
        self.broker_epoch = frame.head.register_broker_reply.broker_epoch
        self._on_epoch(self.broker_epoch)
        # A reconnection is no restart: whatever the process wrote since is in this machine's page
        # cache.
        who.clean_shutdown = True
        who.previous_broker_epoch = self.broker_epoch
        self._renew_contact(sent_ms)
        self._search.found()
        self._lost = False
        self._say("registered", controller=self.address, broker_epoch=self.broker_epoch)
        if not self._broken:
            self._registered.set()

    def _renew_contact(self, sent_ms: int) -> None:
        """What was sent then is answered now (K2)."""
        if self._contact_ms is not None:
            self._on_contact(self._world.clock.monotonic_ms() - self._contact_ms)
        self._contact_ms = sent_ms

    async def _heartbeat(self) -> None:
        """Heartbeats until the stream breaks, or the controller does not answer them any more."""
        clock = self._world.clock
        asked: Sequence[wire.FetchPartition] = ()  #: whose positions the controller wants (R3)
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
                    clock=None if self._clocks is None else self._clocks.reading(),
                ),
                self._patience_ms(),
                registered=True,
            )
            self._renew_contact(sent_ms)
            if clock.monotonic_ms() - sent_ms < self._session_timeout_ms // 8:
                self._search.steady()
            self._offline_acknowledged(offline)
            reply = frame.head.broker_heartbeat_reply
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
        """The controller knows that the replicas in `reported` are offline.

        A replica that is online again since the heartbeat was sent does not count: the controller
        may let it join its ISR from the next heartbeat on.
        """
        still = self._offline_replicas() if reported else []
        offline = {PartitionKey(each.topic_id, each.partition) for each in still}
        keys = [PartitionKey(each.topic_id, each.partition) for each in reported]
        self.offline_reports.on_reply(keys, offline)

    async def _wait(self, wait_ms: int) -> None:
        """Until the next heartbeat is due, one is asked for, or the stream breaks."""
        if not self._broken:
            try:
                async with asyncio.timeout(wait_ms / 1000):
                    await self._wake.wait()
            except TimeoutError:
                pass
        self._wake.clear()
