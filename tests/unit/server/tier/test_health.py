"""The log lines when tiering fails and works again (server/tier/health.py)."""

from __future__ import annotations

from pk import errors
from pk.server.tier.health import NAMED_MAX, REPEAT_MS, TierHealth

AWAY = errors.TierUnavailable("the store does not answer")
CHANGED = errors.TierTableChanged("the protocol is (3, 7)")


def test_a_store_that_is_away_has_one_line_for_all_topics_and_one_a_minute() -> None:
    health = TierHealth()
    failing = {f"t{n:02}": AWAY for n in range(30)}
    ((event, facts),) = health.observe(failing, 1_000)
    assert event == "tier_failing"
    assert (facts["error"], facts["topics"]) == ("TierUnavailable", 30)
    assert facts["named"].split(",") == [f"t{n:02}" for n in range(NAMED_MAX)]
    assert facts["message"] == "the store does not answer"
    assert health.observe(failing, 1_000 + REPEAT_MS - 1) == []
    assert len(health.observe(failing, 1_000 + REPEAT_MS)) == 1


def test_each_kind_of_error_has_a_line() -> None:
    lines = TierHealth().observe({"a": AWAY, "b": CHANGED}, 0)
    assert [facts["error"] for _, facts in lines] == ["TierUnavailable", "TierTableChanged"]


def test_a_topic_that_works_again_is_said_once() -> None:
    health = TierHealth()
    health.observe({"a": AWAY, "b": AWAY}, 0)
    assert health.observe({"b": AWAY}, 10) == [("tier_recovered", {"topics": 1, "named": "a"})]
    assert health.observe({}, 20) == [("tier_recovered", {"topics": 1, "named": "b"})]
    assert health.observe({}, 30) == []
    assert len(health.observe({"a": AWAY}, 40)) == 1, "a new failure is said at once"


def test_a_failure_that_no_line_told_does_not_recover() -> None:
    health = TierHealth()
    health.observe({"a": AWAY}, 0)
    assert health.observe({"a": AWAY, "b": AWAY}, 10) == []
    assert health.observe({"a": AWAY}, 20) == []
