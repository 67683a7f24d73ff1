"""Durations and sizes as people write them (pk.units)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pk import errors, settings, units


@pytest.mark.parametrize(
    ("text", "ms"),
    [("0", 0), ("250", 250), ("-1", -1), ("250ms", 250), ("1s", 1000), ("1.5h", 5_400_000),
     ("1h30m", 5_400_000), (" 2 d ", 172_800_000), ("1w 1D", 691_200_000), ("0.001s", 1)],
)  # fmt: skip
def test_durations(text: str, ms: int) -> None:
    assert units.duration_ms(text) == ms


@pytest.mark.parametrize(
    ("text", "size"),
    [("7", 7), ("7B", 7), ("1kB", 1000), ("1KiB", 1024), ("64MiB", 64 << 20), ("1.5GiB", 3 << 29),
     ("2TB", 2 * 10**12), ("1mib", 1 << 20)],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert units.size_bytes(text) == size


@pytest.mark.parametrize("text", ["", " ", "h", "1x", "1h-", "-1h", "1.h", "1e3s", "0.1ms"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="no number with a unit"):
        units.duration_ms(text)


@pytest.mark.parametrize("text", ["", "1K", "1M", "1h", "GiB", "0.3B", "1PiB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="no number with a unit"):
        units.size_bytes(text)


@given(st.text(max_size=12))
def test_any_text_is_a_number_or_refused(text: str) -> None:
    for parse in (units.duration_ms, units.size_bytes):
        try:
            assert isinstance(parse(text), int)
        except ValueError:
            pass


def test_settings_take_them() -> None:
    parsed = settings.TOPIC.parse(
        {"retention.ms": "1d", "segment_bytes": "64MiB", "retention_bytes": "-1"}
    )
    assert parsed == {
        "retention_ms": 86_400_000, "segment_bytes": 64 << 20, "retention_bytes": -1,
    }  # fmt: skip
    assert settings.CONSUMER.parse({"session_timeout_ms": "45s"}) == {"session_timeout_ms": 45_000}
    with pytest.raises(errors.InvalidConfig, match="or a duration such as 12h, not '1 month'"):
        settings.TOPIC.parse({"retention_ms": "1 month"})
    with pytest.raises(errors.InvalidConfig, match="or a size such as 64MiB, not '1h'"):
        settings.TOPIC.parse({"segment_bytes": "1h"})
    with pytest.raises(errors.InvalidConfig, match="must be at least"):
        settings.TOPIC.parse({"segment_bytes": "1KiB"})
    with pytest.raises(errors.InvalidConfig, match="whole number, not '5s'"):
        settings.SERVER.parse({"default_num_partitions": "5s"})
