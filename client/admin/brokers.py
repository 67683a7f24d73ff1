"""Descriptions of brokers, and the calls of `AdminClient` that concern one broker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import Message

from pk import errors
from pk.client import arguments
from pk.client.network_client import NetworkClient
from pk.client.options import TIMEOUT_S
from pk.wire import pk_pb2 as wire

T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class BrokerDescription:
    """One registered broker.

    state: "active", "fenced" or "shutting down".
    clock_skew_ms: its wall clock minus the median of all nodes; None = no recent reading.
    clock_trusted: a broker that does not trust its clock lets nothing expire by age (rule L10).
    clock_doubt: why the clock is not trusted: "start", "step", "ahead", "not_compared"; "" = it is.
    """

    broker_id: int
    address: str
    rack: str
    state: str
    epoch: int
    clock_skew_ms: int | None
    clock_trusted: bool
    clock_doubt: str


def description_of(said: wire.BrokerDescription) -> BrokerDescription:
    """Convert the reply."""
    return BrokerDescription(
        said.broker_id, said.address, said.rack, said.state, said.broker_epoch,
        said.clock_skew_ms if said.HasField("clock_skew_ms") else None,
        said.clock_trusted, said.clock_doubt,
    )  # fmt: skip


class BrokerCalls:
    """The calls of `AdminClient` that concern brokers."""

    _cluster: NetworkClient

    def _ask(self, request: Message, kind: type[T], timeout_s: float) -> T:
        """Ask any broker and return its reply of type `kind`.  `AdminClient` implements it."""
        raise NotImplementedError

    def _joined(self, attempt: Callable[[int], Awaitable[T]], timeout_s: float) -> T:
        """Repeat `attempt` until it succeeds.  `AdminClient` implements it."""
        raise NotImplementedError

    def list_brokers(self, *, timeout_s: float = TIMEOUT_S) -> list[BrokerDescription]:
        """Return every registered broker, by id, as the active controller knows it."""
        reply = self._ask(wire.ListBrokersRequest(), wire.ListBrokersReply, timeout_s)
        return [description_of(each) for each in reply.brokers]

    def confirm_clock(self, broker_id: int, *, timeout_s: float = TIMEOUT_S) -> str:
        """Declare a broker's wall clock right: records and producers expire by it again.

        Returns the doubt that this ended, "" if the broker trusted its clock already.  Raises
        `BrokerUnavailable` if the broker is not in service.
        """

        broker_id = arguments.whole(broker_id, "broker_id")

        async def attempt(one_ms: int) -> Message:
            cluster = self._cluster
            if broker_id not in await cluster.brokers(one_ms):
                raise errors.BrokerUnavailable(f"broker {broker_id} is not in service")
            request = wire.ConfirmClockRequest(broker_id=broker_id)
            return await cluster.call_node(broker_id, request, timeout_ms=one_ms)

        reply = self._joined(attempt, timeout_s)
        assert isinstance(reply, wire.ConfirmClockReply)
        return reply.doubt
