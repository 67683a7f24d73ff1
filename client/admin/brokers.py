"""The calls of `AdminClient` that concern brokers."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.message import Message

from pk import errors
from pk.client import arguments
from pk.client.admin.connection import AdminConnection
from pk.wire import pk_pb2 as wire


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
    """The calls that concern brokers; `AdminClient` documents their arguments."""

    def __init__(self, connection: AdminConnection) -> None:
        self._connection = connection

    def list_brokers(self, timeout_s: float) -> list[BrokerDescription]:
        """Return every registered broker, by id."""
        reply = self._connection.ask(wire.ListBrokersRequest(), wire.ListBrokersReply, timeout_s)
        return [description_of(each) for each in reply.brokers]

    def unregister_broker(self, broker_id: int, timeout_s: float) -> None:
        """Remove a broker from the cluster."""
        request = wire.UnregisterBrokerRequest(broker_id=arguments.whole(broker_id, "broker_id"))
        self._connection.ask(request, wire.UnregisterBrokerReply, timeout_s)

    def confirm_clock(self, broker_id: int, timeout_s: float) -> str:
        """Declare a broker's wall clock right; returns the doubt that this ended."""
        broker_id = arguments.whole(broker_id, "broker_id")
        cluster = self._connection.cluster

        async def attempt(one_ms: int) -> Message:
            if broker_id not in await cluster.brokers(one_ms):
                raise errors.BrokerUnavailable(f"broker {broker_id} is not in service")
            request = wire.ConfirmClockRequest(broker_id=broker_id)
            return await cluster.call_node(broker_id, request, timeout_ms=one_ms)

        reply = self._connection.retrying(attempt, timeout_s)
        assert isinstance(reply, wire.ConfirmClockReply)
        return reply.doubt
