"""Requests that only other brokers may send (rule L17)."""

from __future__ import annotations

from typing import Any

import pytest

from pk import errors
from pk.wire import pk_pb2 as wire
from pk.wire.calls import PROTOCOL, Caller

QUESTION = wire.WriteTxnMarkersRequest()


def test_a_request_between_brokers_is_refused_for_clients(cluster: Any) -> None:
    """A broker whose registration is not known yet may try again, on the same stream."""
    cluster.start()
    broker = cluster.broker
    asked: list[Any] = []

    async def answer(request: Any, _frame: Any) -> wire.WriteTxnMarkersReply:
        asked.append(request)
        return wire.WriteTxnMarkersReply()

    broker.core.channels.handlers["write_txn_markers"] = answer

    def caller(node_id: int, incarnation_id: str) -> Caller:
        hello = wire.Hello(
            client_id="test", protocol=PROTOCOL, cluster_id=cluster.run.cluster_id,
            node_id=node_id, incarnation_id=incarnation_id,
        )  # fmt: skip
        return Caller(cluster.client.network, cluster.client.clock, broker.address, hello)

    async def story() -> None:
        client = cluster.caller()
        with pytest.raises(errors.InvalidRequest, match="clients may not send"):
            await client.call(QUESTION, timeout_ms=1_000)
        await client.close()
        other = caller(1, "not registered yet")
        with pytest.raises(errors.BrokerUnavailable, match="does not have the registration"):
            await other.call(QUESTION, timeout_ms=1_000)
        assert not asked
        registered = broker.core.metadata.image.brokers[1]
        object.__setattr__(registered, "incarnation_id", "not registered yet")
        await other.call(QUESTION, timeout_ms=1_000)
        assert len(asked) == 1
        await other.close()

    cluster.do(story())
