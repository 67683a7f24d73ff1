"""The place of a topic's table, as jobs and readers of snapshots ask for it."""

from __future__ import annotations

from typing import Any

import pytest

from pk import errors
from pk.client import admin
from pk.client.admin.described import TierDescription
from pk.client.snapshots import newest_snapshot
from pk.sparkconnector.maintenance import tables

AWAY = errors.TierUnavailable("the tier process restarts")


class Admin:
    """Says the same of every topic."""

    described = TierDescription("t", "id", "", -1, "unavailable", (), {}, AWAY)

    def __init__(self, bootstrap: str) -> None:
        pass

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, *raised: Any) -> None:
        pass

    def describe_tier(self, topic: str, **_: Any) -> TierDescription:
        return self.described


def test_a_tier_process_that_restarts_is_no_missing_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job may be run again; InvalidRequest would say that the topic has no tier."""
    monkeypatch.setattr(admin, "AdminClient", Admin)
    with pytest.raises(errors.TierUnavailable, match="restarts"):
        tables.place_of("b:1", "t")
    with pytest.raises(errors.TierUnavailable, match="restarts"):
        newest_snapshot(Admin.described)


def test_a_topic_without_a_tier_has_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    off = TierDescription("t", "id", "", -1, "off: tier_enable is off for this topic", (), {})
    monkeypatch.setattr(admin, "AdminClient", Admin)
    monkeypatch.setattr(Admin, "described", off)
    with pytest.raises(errors.InvalidRequest, match="tier_enable is off"):
        tables.place_of("b:1", "t")
    with pytest.raises(errors.InvalidRequest, match="no snapshot"):
        newest_snapshot(off)
