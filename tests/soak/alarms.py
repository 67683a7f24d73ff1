"""Changes of a cluster for which the run gave no cause.  Pure.

There are three witnesses.  The metadata log contains every change with its offset and time, so no
change between two looks is missed.  Polls of the admin API return what a client sees.  The nodes'
logs contain what the processes report.  A run without faults causes none of these changes, so each
one is a false alarm: on a busy machine a living node was taken for dead.

A follower that returns to an in-sync set is no alarm by itself, because it was counted when it
left.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from figures import Verdict

FENCED = "brokers fenced"
REGISTERED = "brokers registered again"
ELECTED = "leader changes"
SHRUNK = "in-sync sets shrunk"
GROWN = "in-sync sets grown"
CONTROLLER = "controller changes"
DIED = "processes died"
LOGGED = "warnings and errors logged"
KINDS = (FENCED, REGISTERED, ELECTED, SHRUNK, CONTROLLER, DIED, LOGGED)

_LINE = re.compile(r"^(\S+Z) (INFO|WARNING|ERROR|BUG) (\S+) (\S+)(.*)$")
#: Events that are alarms, at whatever level they are logged.
_MEANING = {
    "broker_fenced": FENCED, "broker_registered": REGISTERED, "active_controller": CONTROLLER,
    "child_died": DIED,
}  # fmt: skip
#: Events of level INFO that lead to an alarm.
_STEPS = (
    "controller_resigned", "leaderless", "fence_failed", "recovery_failed", "child_restarted",
    "preferred_leaders",
)  # fmt: skip


@dataclass(slots=True, frozen=True)
class Alarm:
    """One event; `at_ms` is the wall clock, 0 = unknown."""

    kind: str
    at_ms: int
    what: str


@dataclass(slots=True)
class _Place:
    leader: int
    isr: tuple[int, ...]


def of_metadata(
    records: Iterable[tuple[int, int, Any]], begin: int, end: int, topics: Mapping[str, str]
) -> list[Alarm]:
    """Return the alarms in `(offset, time in ms, record)` from offset 0 on.

    Records in [begin, end) are judged.  Later ones are not read, because they may be half written.
    `topics`: names by id, for people.
    """
    places: dict[tuple[str, int], _Place] = {}
    found: list[Alarm] = []
    for offset, at_ms, record in records:
        kind = record.WhichOneof("record")
        body = getattr(record, kind)
        told: list[tuple[str, str]] = []
        if kind == "partition":
            places[body.topic_id, body.partition] = _Place(body.leader, tuple(body.isr))
        elif kind == "partition_change":
            name = f"{topics.get(body.topic_id, body.topic_id)}-{body.partition}"
            told = _partition_change(name, places.get((body.topic_id, body.partition)), body)
        elif kind == "broker_change" and body.fenced:
            told = [(FENCED, f"broker {body.broker_id}")]
        elif kind == "register_broker":
            told = [(REGISTERED, f"broker {body.broker_id}, epoch {body.broker_epoch}")]
        elif kind == "leader_change":
            told = [(CONTROLLER, f"controller {body.leader_id} leads epoch {body.epoch}")]
        if begin <= offset:
            found += [Alarm(what, at_ms, f"{words} (offset {offset})") for what, words in told]
        if offset >= end - 1:
            break
    return found


def _partition_change(name: str, place: _Place | None, body: Any) -> list[tuple[str, str]]:
    if place is None:
        return []
    told = []
    if body.HasField("leader") and body.leader != place.leader:
        told.append((ELECTED, f"{name}: {place.leader} → {body.leader}"))
        place.leader = body.leader
    if body.HasField("isr"):
        isr = tuple(body.isr.values)
        for what, moved in (
            (SHRUNK, sorted(set(place.isr) - set(isr))),
            (GROWN, sorted(set(isr) - set(place.isr))),
        ):
            if moved:
                told.append((what, f"{name}: {moved}, {list(isr)} are in sync"))
        place.isr = isr
    return told


@dataclass(slots=True, frozen=True)
class Look:
    """What clients saw at one moment; -1 and () where nothing was answered."""

    at_ms: int
    leaders: Mapping[str, tuple[int, int]]  #: partition → (leader, leader epoch)
    isr: Mapping[str, tuple[int, ...]]
    offline: tuple[int, ...]
    controller: tuple[int, int]  #: (node, epoch)


def of_looks(before: Look, after: Look) -> list[Alarm]:
    """Return the changes between two looks."""
    found: list[Alarm] = []

    def add(kind: str, what: str) -> None:
        found.append(Alarm(kind, after.at_ms, what))

    for node in sorted(set(after.offline) - set(before.offline)):
        add(FENCED, f"broker {node}")
    for place, led in after.leaders.items():
        if place in before.leaders and before.leaders[place] != led:
            add(ELECTED, f"{place}: {before.leaders[place]} → {led}")
    for place, isr in after.isr.items():
        if gone := sorted(set(before.isr.get(place, ())) - set(isr)):
            add(SHRUNK, f"{place}: {gone}, {list(isr)} are in sync")
    if before.controller != after.controller:
        add(CONTROLLER, f"{before.controller} → {after.controller}")
    return found


def of_lines(node: int, lines: Iterable[str]) -> list[Alarm]:
    """Return the unusual log lines of a node's processes."""
    found: list[Alarm] = []
    for line in lines:
        match = _LINE.match(line)
        if match is None:
            if "Traceback" in line:
                found.append(Alarm(LOGGED, 0, f"node {node}: {line[:300]}"))
        elif match[4] in _MEANING:
            found.append(Alarm(_MEANING[match[4]], _ms(match[1]), f"node {node}: {line[:300]}"))
        elif match[2] != "INFO":
            found.append(Alarm(LOGGED, _ms(match[1]), f"node {node}: {line[:300]}"))
    return found


def _ms(stamp: str) -> int:
    return round(1000 * datetime.fromisoformat(stamp).timestamp())


def telling(node: int, lines: Iterable[str]) -> list[str]:
    """Return the log lines that explain an alarm."""
    matches = ((line, _LINE.match(line)) for line in lines)
    return [
        f"node {node}: {line[:300]}"
        for line, match in matches
        if match is not None and (match[2] != "INFO" or match[4] in (*_MEANING, *_STEPS))
    ]


def counts(found: Iterable[Alarm]) -> dict[str, int]:
    """Return the number of alarms of each kind, including kinds without an alarm."""
    told = dict.fromkeys(KINDS, 0)
    for alarm in found:
        if alarm.kind in told:
            told[alarm.kind] += 1
    return told


def verdicts(witnesses: Mapping[str, Sequence[Alarm]]) -> list[Verdict]:
    """Return one verdict per kind: it passes if no witness saw it; the figure is the largest count
    of a witness.
    """
    by_witness = {name: counts(found) for name, found in witnesses.items()}
    found = []
    for kind in KINDS:
        told = {name: each[kind] for name, each in by_witness.items() if each[kind]}
        most = max(told.values(), default=0)
        who = ", ".join(f"{name} {number}" for name, number in told.items())
        found.append(Verdict(kind, f"{most} ({who})" if told else "0", "0", not told))
    return found
