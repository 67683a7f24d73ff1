"""The tier process's calls to the active controller.

World-generic.  The tier process reads the cluster's metadata for the copies of rule T13, seldom and
without haste.  It asks the controllers that the settings name, and those that refusals name.

Invariants
  U1  A call asks each controller at most once, so it ends after a bounded number of timeouts.
"""

from __future__ import annotations

from google.protobuf.message import Message

from pk import errors
from pk.server.node.run_config import RunConfig
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import Caller
from pk.world import World


class ControllerLink:
    """Calls the active controller of a node's cluster."""

    def __init__(self, world: World, run: RunConfig, hello: wire.Hello) -> None:
        self._world = world
        self._run = run
        self._hello = hello
        self._address = run.controller_addresses[0]
        self._caller: Caller | None = None

    async def call(self, request: Message, timeout_ms: int) -> frames.Frame:
        """Return the reply of the active controller.

        Raises its typed error, and `ControllerUnavailable` if no controller is active.
        """
        asked: dict[str, None] = {}
        hint, why = "", ""
        while (address := self._next(asked, hint)) is not None:
            asked[address], hint = None, ""
            try:
                return await (await self._at(address)).call(request, timeout_ms=timeout_ms)
            except errors.ControllerUnavailable as refusal:
                hint, why = self._named_in(refusal), refusal.message
            except (errors.BrokerUnavailable, errors.RequestTimedOut) as failure:
                why = failure.message
        raise errors.ControllerUnavailable(f"no controller is active: {why}")

    async def close(self) -> None:
        if self._caller is not None:
            await self._caller.close()

    def _next(self, asked: dict[str, None], hint: str) -> str | None:
        """Return the controller to ask next; None = each was asked (U1)."""
        order = (hint, self._address, *self._run.controller_addresses)
        return next((each for each in order if each and each not in asked), None)

    async def _at(self, address: str) -> Caller:
        if self._caller is None or address != self._address:
            await self.close()
            world = self._world
            self._caller = Caller(world.network, world.clock, address, self._hello)
            self._address = address
        return self._caller

    def _named_in(self, refusal: errors.PkError) -> str:
        """Return the active controller's address that a refusal names; "" if it names none."""
        named = refusal.details.get("controller", "")
        address = self._run.peer_controller_addresses.get(int(named)) if named.isdigit() else None
        return address or refusal.details.get("address", "")
