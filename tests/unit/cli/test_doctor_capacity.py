"""`pk doctor capacity`."""

from __future__ import annotations

import json

import pytest

from pk import errors
from pk.cli import app
from pk.cli.doctor_capacity import machine_of

SMALL = ["--memory", "4GiB", "--cores", "2", "--descriptors", "4096"]


def test_a_plan_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--partitions", "100", "--topics", "10", "--gb-per-day", "86.4", "--tier-max-lag-ms"]
    assert app.run(["doctor", "capacity", *given, "10m", *SMALL]) == 0
    said = capsys.readouterr().out
    assert "100 partitions in 10 topics, 1 MB/s (86.4 GB a day)" in said
    assert "432,000 files at most × 1" in said, "100 partitions, each 10 min"
    assert "ulimit -Hn 4,096 is filled by:" in said


def test_a_plan_that_is_too_much(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--connections", "10000", "--no-tier", "--json"]
    assert app.run(["doctor", "capacity", *given, *SMALL]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["fits"] is False
    assert said["limits"][0]["name"] == "connections"
    assert "ulimit -Hn" in said["limits"][0]["advice"]
    assert said["prices"]["put"] == 0.005
    assert {need["name"] for need in said["needs"]} >= {"memory", "CPU at rest", "open files"}


@pytest.mark.parametrize(
    "given",
    [
        ["--partitions", "0"],
        ["--mb-per-s", "nan"],
        ["--mb-per-s", "1", "--gb-per-day", "1"],
        ["--gb-per-day", "-1"],
        ["--memory", "much"],
        ["--cores", "-1"],
        ["--tier-file-bytes", "3 parsecs"],
    ],
)
def test_nonsense_is_refused(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["doctor", "capacity", *given, "--json"]) == 1
    refused = json.loads(capsys.readouterr().out)["error"]
    assert refused["name"] in {"InvalidOption", "InvalidConfig"}
    assert refused["acts"] == "user"


def test_the_machine_is_this_one_unless_another_is_given() -> None:
    here = machine_of()
    assert here.memory_bytes > 0
    assert here.cores > 0
    assert machine_of("1GiB", 3, 1_000).descriptors == 1_000
    with pytest.raises(errors.InvalidOption):
        machine_of("1kB")
