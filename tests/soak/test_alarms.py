"""False alarms: each witness sees each kind of them, and ordinary events are not counted."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import alarms
from alarms import Alarm, Look

from pk.server.metadata.records import record_of
from pk.wire import pk_pb2 as wire

MADE = wire.PartitionRecord(
    topic_id="id", partition=1, replicas=[1, 2, 3], isr=[1, 2, 3], leader=1, leader_epoch=0
)


def changed(isr: list[int] | None = None, leader: int | None = None) -> wire.PartitionChangeRecord:
    body = wire.PartitionChangeRecord(topic_id="id", partition=1, leader=leader)
    if isr is not None:
        body.isr.values.extend(isr)
    return body


def logged(*bodies: Any, begin: int = 1, end: int = 99) -> list[tuple[str, str]]:
    records = [(at, 1_000 + at, record_of(body)) for at, body in enumerate((MADE, *bodies))]
    found = alarms.of_metadata(records, begin, end, {"id": "soak"})
    return [(alarm.kind, alarm.what) for alarm in found]


@pytest.mark.parametrize(
    ("body", "kind", "what"),
    [
        (changed([1, 3]), alarms.SHRUNK, "soak-1: [2], [1, 3] are in sync (offset 1)"),
        (changed(leader=2), alarms.ELECTED, "soak-1: 1 → 2 (offset 1)"),
        (
            wire.BrokerRegistrationChangeRecord(broker_id=3, broker_epoch=9, fenced=True),
            alarms.FENCED,
            "broker 3 (offset 1)",
        ),
        (
            wire.RegisterBrokerRecord(broker_id=3, broker_epoch=9),
            alarms.REGISTERED,
            "broker 3, epoch 9 (offset 1)",
        ),
        (
            wire.LeaderChangeRecord(leader_id=2, epoch=4),
            alarms.CONTROLLER,
            "controller 2 leads epoch 4 (offset 1)",
        ),
    ],
)
def test_the_metadata_log_tells_each_kind(body: Any, kind: str, what: str) -> None:
    assert logged(body) == [(kind, what)]
    assert logged(body, begin=2) == []
    assert logged(body, end=1) == []


def test_an_everyday_record_is_no_alarm() -> None:
    unfenced = wire.BrokerRegistrationChangeRecord(broker_id=3, broker_epoch=9, fenced=False)
    ids = wire.ProducerIdsRecord(broker_id=3, broker_epoch=9, next_producer_id=1000)
    assert logged(unfenced, ids, changed(leader=1), changed([3, 2, 1]), MADE) == []


def test_changes_are_told_against_what_they_changed() -> None:
    """A set that shrinks and grows has shrunk once, however short the time between."""
    found = logged(changed([1]), changed([1, 2, 3]), changed([2, 3], leader=2))
    assert [kind for kind, _ in found] == [
        alarms.SHRUNK,
        alarms.GROWN,
        alarms.ELECTED,
        alarms.SHRUNK,
    ]
    assert found[2][1] == "soak-1: 1 → 2 (offset 3)"
    assert alarms.counts(Alarm(kind, 0, what) for kind, what in found)[alarms.SHRUNK] == 2


def test_what_is_half_written_behind_the_end_is_not_read() -> None:
    def records() -> Any:
        yield 0, 0, record_of(MADE)
        yield 1, 0, record_of(changed(leader=2))
        raise AssertionError("read on")

    assert len(alarms.of_metadata(records(), 1, 2, {})) == 1


LOOK = Look(
    at_ms=5,
    leaders={"soak-0": (1, 0)},
    isr={"soak-0": (1, 2, 3)},
    offline=(),
    controller=(2, 1),
)


@pytest.mark.parametrize(
    ("after", "kind"),
    [
        (replace(LOOK, leaders={"soak-0": (2, 1)}), alarms.ELECTED),
        (replace(LOOK, leaders={"soak-0": (1, 2)}), alarms.ELECTED),  # there and back again
        (replace(LOOK, isr={"soak-0": (1, 2)}), alarms.SHRUNK),
        (replace(LOOK, offline=(3,)), alarms.FENCED),
        (replace(LOOK, controller=(2, 3)), alarms.CONTROLLER),
    ],
)
def test_two_looks_tell_each_kind(after: Look, kind: str) -> None:
    assert [alarm.kind for alarm in alarms.of_looks(LOOK, after)] == [kind]
    assert alarms.of_looks(after, after) == []


def test_a_set_that_grows_again_is_no_second_alarm() -> None:
    thin = replace(LOOK, isr={"soak-0": (1,)}, offline=(2, 3))
    assert alarms.of_looks(thin, LOOK) == []


def test_lines_are_told_by_event_and_level() -> None:
    lines = [
        "2026-01-01T00:00:00.000Z INFO controller broker_fenced broker=2 why=silence",
        "2026-01-01T00:00:00.000Z INFO controller broker_registered broker=2 epoch=7",
        "2026-01-01T00:00:00.000Z INFO controller active_controller epoch=2",
        "2026-01-01T00:00:00.000Z INFO controller controller_resigned epoch=1",
        "2026-01-01T00:00:00.000Z INFO broker ready address=127.0.0.1:1",
        "2026-01-01T00:00:00.000Z WARNING supervisor child_died role=broker how=SIGKILL",
        "2026-01-01T00:00:00.000Z WARNING broker partition_offline partition=soak-0",
        "2026-01-01T00:00:00.000Z BUG broker upkeep error=KeyError",
        "Traceback (most recent call last):",
        "  File …",
    ]
    found = alarms.of_lines(1, lines)
    assert [alarm.kind for alarm in found] == [
        *(alarms.FENCED, alarms.REGISTERED, alarms.CONTROLLER, alarms.DIED),
        *[alarms.LOGGED] * 3,
    ]
    assert [alarm.at_ms for alarm in found] == [1_767_225_600_000] * 6 + [0]
    told = alarms.telling(1, lines)
    assert "broker_fenced" in told[0]
    assert not any(" ready " in line for line in told)
    assert len(told) == 7


def test_one_witness_is_enough() -> None:
    shrunk = Alarm(alarms.SHRUNK, 0, "soak-0")
    grown = Alarm(alarms.GROWN, 0, "soak-0")
    died = Alarm(alarms.DIED, 0, "node 1 broker")
    found = alarms.verdicts(
        {"metadata log": [shrunk, shrunk, grown], "polls": [shrunk, died], "logs": []}
    )
    broken = [verdict for verdict in found if verdict.kept is False]
    assert [verdict.what for verdict in broken] == [alarms.SHRUNK, alarms.DIED]
    assert broken[0].figure == "2 (metadata log 2, polls 1)"
    assert broken[1].figure == "1 (polls 1)"
    assert {verdict.what for verdict in found} == set(alarms.KINDS)
    assert all(verdict.kept for verdict in alarms.verdicts({"polls": [grown]}))
