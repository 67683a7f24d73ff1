"""The requests of the administration client."""

from __future__ import annotations

from typing import Any

import pytest

from pk.client.admin import AdminClient
from pk.client.admin.connection import AdminConnection
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
