"""Replicas whose directory the metadata do not name (rule R11)."""

from __future__ import annotations

from pk.server.replica.directory_reports import REPORTS_MAX, DirectoryReports
from pk.types import PartitionKey

KEY = PartitionKey("id", 0)


def listed(reports: DirectoryReports) -> list[tuple[int, str]]:
    return [(each.partition, each.directory_id) for each in reports.listed()]


def test_a_replica_is_reported_until_its_directory_is_named() -> None:
    reports = DirectoryReports()
    reports.note(KEY, "", "a")
    assert listed(reports) == listed(reports) == [(0, "a")]
    reports.note(KEY, "b", "a")
    assert listed(reports) == [(0, "a")]
    reports.note(KEY, "a", "a")
    assert listed(reports) == []
    reports.note(KEY, "", "")
    assert listed(reports) == []


def test_a_replica_that_is_gone_is_not_reported_any_more() -> None:
    reports = DirectoryReports()
    reports.note(KEY, "", "a")
    reports.forget(KEY)
    reports.forget(KEY)
    assert listed(reports) == []


def test_a_heartbeat_has_a_bound() -> None:
    reports = DirectoryReports()
    for number in range(REPORTS_MAX + 10):
        reports.note(PartitionKey("id", number), "", "a")
    assert len(listed(reports)) == REPORTS_MAX
