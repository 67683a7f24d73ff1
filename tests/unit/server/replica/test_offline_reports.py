"""Which replicas the controller knows to be offline, and when the image includes that."""

from __future__ import annotations

from pk.server.replica.offline_reports import OfflineReports
from pk.types import PartitionKey

ONE, TWO = (PartitionKey("11111111-1111-4111-8111-111111111111", n) for n in (1, 2))


def test_a_report_is_acknowledged_then_in_the_image() -> None:
    """broker/metadata_publisher M7: a fetch that was sent before the reply does not count."""
    reports = OfflineReports()
    before = reports.acknowledged
    reports.on_reply([ONE], {ONE})
    assert list(reports.acknowledged) == [ONE]
    reports.on_image(before)
    assert not reports.in_image(ONE)
    reports.on_image(reports.acknowledged)
    assert reports.in_image(ONE)
    assert not reports.in_image(TWO)


def test_a_later_reply_keeps_the_first_acknowledgement() -> None:
    reports = OfflineReports()
    reports.on_reply([ONE], {ONE})
    reports.on_image(reports.acknowledged)
    reports.on_reply([ONE, TWO], {ONE, TWO})
    assert (reports.in_image(ONE), reports.in_image(TWO)) == (True, False)


def test_a_replica_that_is_online_again_is_reported_again() -> None:
    """replica/offline_reports O1: between the heartbeat and its reply, or after the reply."""
    reports = OfflineReports()
    reports.on_reply([ONE], set())
    assert not reports.acknowledged
    reports.on_reply([ONE], {ONE})
    image = reports.acknowledged
    reports.on_image(image)
    reports.withdraw(ONE)
    assert not reports.in_image(ONE)
    reports.on_reply([ONE], {ONE})
    assert not reports.in_image(ONE), "the image is from before the second report"
    reports.on_image(reports.acknowledged)
    assert reports.in_image(ONE)


def test_a_reply_to_a_heartbeat_without_reports_ends_them() -> None:
    reports = OfflineReports()
    reports.on_reply([ONE], {ONE})
    reports.on_reply([], set())
    assert not reports.acknowledged


def test_what_a_fetch_began_with_does_not_change_under_it() -> None:
    """replica/offline_reports O2: only acknowledgements from before the fetch are in the image."""
    reports = OfflineReports()
    reports.on_reply([ONE], {ONE})
    began = reports.acknowledged
    reports.withdraw(ONE)
    reports.on_reply([ONE, TWO], {ONE, TWO})
    assert list(began) == [ONE]
    reports.on_image(began)
    assert not reports.in_image(ONE)
