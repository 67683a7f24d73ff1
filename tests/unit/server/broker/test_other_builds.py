"""A broker and a controller after another build (rule Q7)."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from pk import settings

Cluster = Any  # conftest.py's


def test_a_setting_of_a_newer_build_is_named_and_does_not_stop_the_broker(
    cluster: Cluster, kit: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A newer build stored a setting, and this build starts on the same metadata."""
    with monkeypatch.context() as newer:
        option = settings.Option("balance_weight", int, 1, "of a newer build")
        newer.setitem(settings.TOPIC.by_name, "balance_weight", option)
        cluster.start()
        topic_id = cluster.do(cluster.create("flights", balance_weight="7"))
    for node, storage in (("broker", "d1"), ("controller", "meta")):
        cluster.kill(node, storage)
    with caplog.at_level(logging.INFO):
        cluster.start()
        assert cluster.do(cluster.produce(kit, topic_id, 1)) == [0]
    named = [r.getMessage() for r in caplog.records if "settings_unknown" in r.getMessage()]
    assert len(named) == 2  # one line of the broker, one of the controller
    assert all("balance_weight" in line for line in named)
