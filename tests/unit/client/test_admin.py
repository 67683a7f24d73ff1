"""The requests of the administration client."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pk import errors
from pk.client.admin import AdminClient
from pk.client.admin.connection import AdminConnection
from pk.client.network_client import NetworkClient
from pk.types import TopicPartition
from pk.wire import pk_pb2 as wire


def test_topics_are_created_by_a_request_that_may_be_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each request has an id, by which the controller recognises it when the reply was lost."""
    asked: list[wire.CreateTopicsRequest] = []

    def ask(_self: AdminConnection, request: Any, _kind: Any, _timeout_s: float) -> Any:
        asked.append(request)
        return wire.CreateTopicsReply(results=[wire.TopicResult(name="t", topic_id="x")])

    monkeypatch.setattr(AdminConnection, "ask", ask)
    admin = AdminClient("127.0.0.1:1")
    for _ in range(2):
        assert admin.create_topic("t").topic_id == "x"
    admin.close()
    first, second = (each.request_id for each in asked)
    assert first
    assert second
    assert first != second


def test_a_move_names_the_id_of_a_topic_that_the_broker_asked_does_not_know_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R10: the client waits for a new topic; the controller answers for an unknown one."""
    asked: list[wire.AlterReassignmentsRequest] = []

    def ask(_self: AdminConnection, request: Any, _kind: Any, _timeout_s: float) -> Any:
        if isinstance(request, wire.MetadataRequest):
            return wire.MetadataReply(topics=[wire.TopicInfo(name=name) for name in request.topics])
        asked.append(request)
        return wire.AlterReassignmentsReply()

    async def topic(_self: NetworkClient, name: str, _timeout_ms: int, _unknown_ms: int) -> Any:
        if name == "new":
            return SimpleNamespace(topic_id="x")
        raise errors.UnknownTopicOrPartition(f"topic {name} does not exist")

    monkeypatch.setattr(AdminConnection, "ask", ask)
    monkeypatch.setattr(NetworkClient, "topic", topic)
    admin = AdminClient("127.0.0.1:1")
    places = {TopicPartition(name, 0): [1] for name in ("new", "unknown")}
    admin.alter_partition_reassignments(places)
    admin.close()
    (request,) = asked
    assert {each.topic: each.topic_id for each in request.reassignments} == {
        "new": "x",
        "unknown": "",
    }
