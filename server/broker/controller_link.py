"""The broker's one stream to the controller: registration, heartbeats, calls.

World-generic.  The stream a broker registered on is its liveness stream (rule R7): while heartbeats
on it are answered the broker has *contact*; when it breaks the broker re-connects with jittered
back-off and registers again under the same incarnation id.  Without contact for
`broker_session_timeout_ms` it may have been fenced without knowing (rule R6).

Invariants
  K1  a broker epoch is used only with the incarnation that was given it
  K2  contact counts from the moment a heartbeat was *sent*, so a slow reply never stretches it
  K3  re-connection waits grow from 50 ms to 2 s, with jitter, for ever; the rest of the broker goes
      on
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.message import Message

from pk import errors
from pk.types import NONE
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import Caller
from pk.world import World

_BACKOFF_MS = (50, 2_000)


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


class ControllerLink:
    """Keeps a broker registered and alive in the controller's eyes."""

    def __init__(
        self,
        world: World,
        address: str,
        hello: wire.Hello,
        identity: Identity,
        *,
        session_timeout_ms: int,
        heartbeat_interval_ms: int,
        metadata_offset: Callable[[], int],
        offline_directories: Callable[[], list[str]],
        on_fatal: Callable[[errors.PkError], None],
        on_epoch: Callable[[int], None],
    ) -> None:
        self._world = world
        self._address = address
        self.identity = identity
        self._session_timeout_ms = session_timeout_ms
        self._interval_ms = heartbeat_interval_ms
        self._metadata_offset = metadata_offset
        self._offline_directories = offline_directories
        self._on_fatal = on_fatal
        self._on_epoch = on_epoch
        self._broken = False
        self._wake = asyncio.Event()
        self.caller = Caller(world.network, world.clock, address, hello, on_break=self._on_break)
        self.broker_epoch = NONE
        self.fenced = True
        self.caught_up = False
        self.want_shutdown = False
        self.may_shut_down = asyncio.Event()
        self._contact_ms: int | None = None
        self._task: asyncio.Task[None] | None = None

    # -- state others ask for --------------------------------------------------------------------

    def in_contact(self) -> bool:
        """False once the broker may have been fenced without hearing of it (rule R6)."""
        if self._contact_ms is None:
            return False
        return self._world.clock.monotonic_ms() - self._contact_ms < self._session_timeout_ms

    def fatal(self, error: errors.PkError) -> None:
        """The process cannot go on."""
        self._on_fatal(error)

    async def call(self, request: Message, timeout_ms: int) -> frames.Frame:
        """One call to the controller; what cannot be reached is `ControllerUnavailable`."""
        try:
            return await self.caller.call(request, timeout_ms=timeout_ms)
        except (errors.BrokerUnavailable, errors.RequestTimedOut) as cause:
            raise errors.ControllerUnavailable(cause.message) from cause

    # -- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.caller.close()

    def beat_soon(self) -> None:
        """Something the controller waits for changed (the image caught up, a directory failed)."""
        self._wake.set()

    async def _run(self) -> None:
        backoff_ms = _BACKOFF_MS[0]
        refused_since_ms: int | None = None
        while True:
            try:
                await self._register()
                backoff_ms, refused_since_ms = _BACKOFF_MS[0], None
                await self._beat()
            except errors.DuplicateBroker as error:
                # The controller still holds the session of this node's previous process; it ends by
                # itself.
                now_ms = self._world.clock.monotonic_ms()
                refused_since_ms = now_ms if refused_since_ms is None else refused_since_ms
                if now_ms - refused_since_ms > 3 * self._session_timeout_ms:
                    self._on_fatal(error)
                    return
            except errors.OperatorError as error:
                self._on_fatal(error)
                return
            except errors.PkError:
                pass  # K3: unreachable, slow or still starting
            await self._world.clock.sleep_ms(backoff_ms * self._world.rng.uniform(0.5, 1.0))
            backoff_ms = min(2 * backoff_ms, _BACKOFF_MS[1])

    async def _register(self) -> None:
        who = self.identity
        self._broken = False
        sent_ms = self._world.clock.monotonic_ms()
        frame = await self.caller.call(
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
            timeout_ms=self._session_timeout_ms,
        )
        self.broker_epoch = frame.head.register_broker_reply.broker_epoch
        self._on_epoch(self.broker_epoch)
        # A reconnection is no restart: whatever the process wrote since is in this machine's page
        # cache.
        who.clean_shutdown = True
        who.previous_broker_epoch = self.broker_epoch
        self._contact_ms = sent_ms  # K2

    async def _beat(self) -> None:
        """Heartbeats until the stream breaks."""
        clock = self._world.clock
        while not self._broken:
            sent_ms = clock.monotonic_ms()
            frame = await self.caller.call(
                wire.BrokerHeartbeatRequest(
                    broker_id=self.identity.node_id,
                    broker_epoch=self.broker_epoch,
                    metadata_offset=self._metadata_offset(),
                    want_shutdown=self.want_shutdown,
                    offline_directories=self._offline_directories(),
                ),
                timeout_ms=self._session_timeout_ms,
            )
            self._contact_ms = sent_ms
            reply = frame.head.broker_heartbeat_reply
            self.fenced, self.caught_up = reply.fenced, reply.caught_up
            if reply.may_shut_down:
                self.may_shut_down.set()
            wait_ms = self._interval_ms if not self.fenced else min(self._interval_ms, 50)
            await self._wait(wait_ms)

    async def _wait(self, wait_ms: int) -> None:
        """Until the next heartbeat is due, one is asked for, or the stream breaks."""
        if not self._broken:
            try:
                async with asyncio.timeout(wait_ms / 1000):
                    await self._wake.wait()
            except TimeoutError:
                pass
        self._wake.clear()

    def _on_break(self) -> None:
        self._broken = True
        self._wake.set()
