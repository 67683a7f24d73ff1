"""Typed options: names, bounds, relations (docs/SEMANTICS.md §13)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pk import errors, limits, settings

SCOPES = [settings.TOPIC, settings.SERVER, settings.PRODUCER, settings.CONSUMER]
SCOPE = pytest.mark.parametrize("scope", SCOPES, ids=lambda scope: scope.scope)


@SCOPE
def test_the_defaults_are_typed_bounded_and_not_contradictory(scope: settings.Options) -> None:
    resolved = scope.resolve({})
    for name, option in scope.by_name.items():
        assert type(resolved[name]) is option.kind, name
        assert option.parse(option.default) == option.default
        assert option.doc, name


def test_defaults_that_semantics_names() -> None:
    """docs/SEMANTICS.md §13 lists what differs from Kafka's."""
    topic, server = settings.TOPIC.resolve({}), settings.SERVER.resolve({})
    producer = settings.PRODUCER.resolve({})
    assert topic["max_message_bytes"] == 8 << 20
    assert topic["decoded_bytes_max"] == 64 << 20
    assert topic["tier_max_lag_ms"] == 60_000
    assert topic["local_drop_delay_ms"] == 60_000
    assert topic["tier_enable"] is True
    assert producer["batch_size"] == 1 << 20
    assert producer["buffer_memory"] == 64 << 20
    assert server["auto_create_topics_enable"] is False
    assert server["clock_step_max_ms"] == 60_000
    assert server["unclean_recovery_wait_ms"] == 30_000
    assert server["broker_session_timeout_ms"] == 6_000


@pytest.mark.parametrize("name", ["retention.ms", "retention_ms", "RETENTION.MS", "retention-ms"])
def test_kafkas_dotted_names_are_the_same_names(name: str) -> None:
    assert settings.TOPIC.parse({name: "60000"}) == {"retention_ms": 60_000}


def test_an_unknown_name_gets_the_nearest_right_one() -> None:
    with pytest.raises(errors.InvalidConfig, match=r"retention\.sm.*did you mean retention_ms"):
        settings.TOPIC.parse({"retention.sm": 1})


def test_one_setting_under_two_names_is_refused() -> None:
    with pytest.raises(errors.InvalidConfig, match="given twice"):
        settings.TOPIC.parse({"retention.ms": 1, "retention_ms": 1})


@pytest.mark.parametrize(
    ("scope", "name", "value", "words"),
    [
        (settings.TOPIC, "retention_ms", "-2", "at least -1"),
        (settings.TOPIC, "retention_ms", "soon", "whole number"),
        (settings.TOPIC, "retention_ms", True, "whole number"),
        (settings.TOPIC, "max_message_bytes", 1 << 40, "at most"),
        (settings.TOPIC, "cleanup_policy", "shred", "one of delete, compact"),
        (settings.TOPIC, "tier_enable", "perhaps", "true or false"),
        (settings.TOPIC, "min_cleanable_dirty_ratio", "1.5", "at most 1"),
        (settings.PRODUCER, "acks", "2", "one of 0, 1, all"),
        (settings.SERVER, "cold_read_threads", 0, "at least 1"),
    ],
)
def test_bad_values_are_refused_by_name(
    scope: settings.Options, name: str, value: Any, words: str
) -> None:
    with pytest.raises(errors.InvalidConfig, match=words) as refused:
        scope.parse({name: value})
    assert name in refused.value.message
    assert refused.value.details["option"] == name


@pytest.mark.parametrize(
    ("scope", "given"),
    [
        (settings.TOPIC, {"retention_ms": 10, "local_retention_ms": 11}),
        (settings.TOPIC, {"retention_bytes": 10, "local_retention_bytes": 11}),
        (settings.TOPIC, {"min_compaction_lag_ms": 2, "max_compaction_lag_ms": 1}),
        (settings.TOPIC, {"decoded_bytes_max": 1 << 20}),
        (settings.SERVER, {"broker_session_timeout_ms": 2_000}),
        (settings.PRODUCER, {"linger_ms": 100_000}),
        (settings.PRODUCER, {"max_in_flight": limits.IN_FLIGHT_MAX + 1}),
        (settings.PRODUCER, {"buffer_memory": 2048}),
    ],
)
def test_contradictions_are_refused(scope: settings.Options, given: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidConfig, match="contradictory"):
        scope.resolve(given)


@pytest.mark.parametrize(
    "given",
    [
        {"retention_ms": -1, "local_retention_ms": 5},  # -1: for ever
        {"retention_ms": 5, "local_retention_ms": -2},  # -2: as retention
        {"retention_ms": 5, "local_retention_ms": 5},
    ],
)
def test_no_limit_contradicts_nothing(given: dict[str, Any]) -> None:
    assert settings.TOPIC.resolve(given)["retention_ms"] == given["retention_ms"]


def test_given_wins_over_base_wins_over_default() -> None:
    base = settings.TOPIC.parse({"retention_ms": 7, "segment_ms": 9})
    resolved = settings.TOPIC.resolve({"retention_ms": 8}, base)
    assert (resolved["retention_ms"], resolved["segment_ms"]) == (8, 9)
    assert resolved["segment_bytes"] == settings.TOPIC.by_name["segment_bytes"].default


@SCOPE
@given(data=st.data())
def test_any_text_is_parsed_or_refused_in_words(
    scope: settings.Options, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(scope.by_name)))
    value = data.draw(st.one_of(st.text(max_size=12), st.integers().map(str), st.none()))
    try:
        parsed = scope.parse({name: value})[name]
    except errors.InvalidConfig as refusal:
        told = refusal.message
    else:
        assert type(parsed) is scope.by_name[name].kind
        return
    assert name in told
