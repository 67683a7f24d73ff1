"""Names, settings and secrets: where each is stored, and what is never shown (rules T2, T7,
T14).
"""

from __future__ import annotations

import sys

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pk import errors, settings
from pk.clock import SystemClock
from pk.tiering import layout
from pk.tiering.fsspec_store import open_store
from pk.tiering.layout import DataName
from pk.tiering.store_settings import StoreSettings


@given(
    st.integers(0, 10_000),
    st.integers(0, 2**62),
    st.integers(0, 2**62),
    st.integers(0, 2**31 - 1),
    st.text("0123456789abcdef", min_size=1, max_size=16),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**63 - 1),
)
def test_a_name_tells_its_range_and_its_checksums(
    partition: int, start: int, end: int, epoch: int, attempt: str, crc: int, row_sum: int
) -> None:
    name = DataName(partition, start, end, epoch, attempt, crc, row_sum)
    assert layout.parse_data_path(layout.data_path(name)) == name


def test_the_name_of_a_jobs_file_is_none_of_the_copiers() -> None:
    """C6: it tells the same, and nothing copies such a file again from the local log."""
    name = DataName(3, 10, 20, -1, "a1", 7, 2**62)
    path = layout.job_path(name)
    assert layout.parse_written_path(path) == layout.parse_job_path(path) == name
    assert layout.parse_data_path(path) is None
    assert layout.parse_job_path(layout.data_path(name)) is None


def test_other_names_tell_nothing() -> None:
    for path in (
        "partition=0/part-00000-abc.zstd.parquet",
        "_delta_log/x.json",
        "",
        "partition=x/a",
    ):
        assert layout.parse_data_path(path) is None


def test_a_recreated_topic_has_another_table() -> None:
    assert layout.table_path("t", "id-1") != layout.table_path("t", "id-2")
    assert layout.app_id("id-1", 3, "end") == "pk:id-1:3:end"


def test_both_libraries_are_told_the_same_store() -> None:
    chosen = StoreSettings.of(
        settings.SERVER.resolve(
            {
                "tier_url": "s3://bucket/pre/fix/",
                "tier_endpoint_url": "http://127.0.0.1:1",
                "tier_access_key_id": "id",
                "tier_secret_access_key": "SECRET",
                "tier_region": "eu-central-1",
                "tier_timeout_ms": 4_000,
            }
        )
    )
    assert (chosen.bucket, chosen.prefix) == ("bucket", "pre/fix")
    delta, s3 = chosen.for_deltalake(), chosen.for_s3fs()
    assert delta["AWS_ENDPOINT_URL"] == s3["endpoint_url"] == "http://127.0.0.1:1"
    assert delta["AWS_SECRET_ACCESS_KEY"] == s3["secret"] == "SECRET"
    assert delta["AWS_REGION"] == s3["client_kwargs"]["region_name"] == "eu-central-1"
    assert delta["timeout"] == "4000ms"
    assert s3["config_kwargs"]["read_timeout"] == 4.0
    assert "SECRET" not in str(chosen.public())


def test_without_s3fs_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(errors.StoreRefused, match=r"pip install 'pk-log\[s3\]'"):
        open_store(StoreSettings("s3://bucket/x"), SystemClock())
