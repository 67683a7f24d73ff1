"""A broker and a controller after another build (rule Q7)."""

from __future__ import annotations

from typing import Any

import pytest

from pk import settings
from pk.server.broker.node import BrokerNode
from pk.server.controller.node import ControllerNode

Cluster = Any  # conftest.py's


def test_a_setting_of_a_newer_build_is_named_and_does_not_stop_the_broker(
    cluster: Cluster, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer build stored a setting, and this build starts on the same metadata."""
    with monkeypatch.context() as newer:
        option = settings.Option("balance_weight", int, 1, "of a newer build")
        newer.setitem(settings.TOPIC.by_name, "balance_weight", option)
        cluster.start()
        topic_id = cluster.do(cluster.create("flights", balance_weight="7"))
    for node, storage in (("broker", "d1"), ("controller", "meta")):
        cluster.kill(node, storage)
    lines: list[tuple[type, str, Any]] = []
    for node, method in ((BrokerNode, "_warn"), (ControllerNode, "_say")):

        def note(self: object, event: str, **facts: Any) -> None:
            lines.append((type(self), event, facts.get("settings")))

        monkeypatch.setattr(node, method, note)
    cluster.start()
    assert cluster.do(cluster.produce(kit, topic_id, 1)) == [0]
    assert sorted(str(line) for line in lines if line[1] == "settings_unknown") == [
        str((node, "settings_unknown", ["balance_weight"])) for node in (BrokerNode, ControllerNode)
    ]
