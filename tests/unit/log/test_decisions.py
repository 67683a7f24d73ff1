"""The decision tables: append (validate.py), retention (retention.py), opening (recovery.py); every
row once.
"""

from __future__ import annotations

from typing import Any

import pytest

from pk import errors, transactional_ids
from pk.log import batch, index, recovery, retention, validate
from pk.log.batch import Header
from pk.log.control_rows import Marker
from pk.log.plan import LogConfig, RetentionPlan
from pk.log.producers import ProducerStateEntry, Span
from pk.log.recovery import IndexState, RecoveryAction, Stop
from pk.log.retention import SegmentFacts
from pk.log.validate import MarkerResult, ValidationResult

NOW = 1_700_000_000_000


def config(**given: Any) -> LogConfig:
    from dataclasses import replace

    from pk import settings

    return replace(LogConfig.of(settings.TOPIC.resolve({})), **given)


def header(**fields: Any) -> Header:
    plain = Header(0, 100, -1, batch.MAGIC, 0, batch.VALUE | batch.KEY, -1, 1, NOW, NOW, -1, -1, 2)
    return plain._replace(**fields)


#: A transactional batch, and the fields by which its producer is known.
TXN = batch.TRANSACTIONAL | batch.VALUE | batch.KEY
OURS = {"producer_id": transactional_ids.TRANSACTIONAL, "producer_epoch": 0, "base_sequence": 0}


# -- batch table -----------------------------------------------------------------------------------

REFUSED = [
    ("A", errors.RecordTooLarge, {"length": 2000}, {"max_message_bytes": 1999}),
    ("B", errors.InvalidRecord, {"record_count": 0}, {}),
    ("B", errors.InvalidRecord, {"last_offset_delta": 5}, {}),
    ("B", errors.InvalidRecord, {"attributes": batch.OFFSET_DELTAS}, {}),
    ("C", errors.InvalidRecord, {"attributes": batch.CONTROL}, {}),
    ("C", errors.InvalidRecord, {"attributes": batch.LOG_APPEND_TIME}, {}),
    ("C", errors.InvalidRecord, {"attributes": batch.DELETE_HORIZON}, {}),
    ("D", errors.InvalidRecord, {"attributes": TXN}, {}),
    ("D", errors.InvalidRecord, {"attributes": TXN, **OURS, "producer_id": -1}, {}),
    ("D", errors.InvalidRecord, {"attributes": TXN, **OURS, "producer_epoch": -1}, {}),
    ("D", errors.InvalidRecord, {"attributes": TXN, **OURS, "base_sequence": -1}, {}),
    ("E", errors.InvalidRecord, {"attributes": batch.VALUE}, {"cleanup_policy": "compact"}),
    (
        "E",
        errors.InvalidRecord,
        {"attributes": batch.KEY | batch.KEY_NULLS},
        {"cleanup_policy": "compact,delete"},
    ),
    ("F", errors.InvalidRecord, {"max_timestamp": NOW + 3_600_001}, {}),
    (
        "G",
        errors.InvalidRecord,
        {"base_timestamp": NOW - 1001},
        {"message_timestamp_before_max_ms": 1000},
    ),
    ("H", errors.InvalidRecord, {"producer_id": 5, "producer_epoch": 0}, {}),
    ("I", errors.InvalidRecord, {"attributes": TXN, **OURS, "producer_id": 5}, {}),
    ("J", errors.InvalidRecord, OURS, {}),
]


@pytest.mark.parametrize(("row", "kind", "fields", "options"), REFUSED)
def test_refused(
    row: str, kind: type[errors.PkError], fields: dict[str, Any], options: dict[str, Any]
) -> None:
    with pytest.raises(kind) as caught:
        validate.check_batch(header(**fields), config(**options), NOW)
    assert caught.value.details["row"] == row


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {}),
        ({"length": 2000}, {"max_message_bytes": 2000}),
        ({}, {"cleanup_policy": "compact"}),
        ({"max_timestamp": NOW + 3_600_000}, {}),
        ({"max_timestamp": NOW * 2}, {"message_timestamp_type": "LogAppendTime"}),
        ({"base_timestamp": 0}, {}),
        ({"base_timestamp": NOW - 1000}, {"message_timestamp_before_max_ms": 1000}),
        ({"producer_id": 5, "producer_epoch": 0, "base_sequence": 0}, {}),
        ({"attributes": TXN, **OURS}, {}),
    ],
)
def test_accepted(fields: dict[str, Any], options: dict[str, Any]) -> None:
    validate.check_batch(header(**fields), config(**options), NOW)


def test_every_row_of_the_table_is_tried() -> None:
    assert {row for row, *_ in REFUSED} == {case.label for case in validate.BATCH_TABLE}


# -- producer table --------------------------------------------------------------------------------


def produced(sequence: int, epoch: int = 3, count: int = 2) -> Header:
    return header(
        producer_id=9,
        producer_epoch=epoch,
        base_sequence=sequence,
        record_count=count,
        last_offset_delta=count - 1,
    )


KNOWN = ProducerStateEntry(3, tuple(Span(s, s + 1, 100 + s, 101 + s, -1) for s in range(10, 20, 2)))
OPEN = KNOWN._replace(transaction_start=110)
WRAPPED = ProducerStateEntry(3, (Span(2**31 - 2, 2**31 - 1, 7, 8, -1),))


@pytest.mark.parametrize(
    ("row", "batch_header", "known"),
    [
        ("a", header(), KNOWN),
        ("b", produced(0), None),
        ("e", produced(0, epoch=4), KNOWN),
        ("h", produced(20), KNOWN),
        ("h", produced(20), OPEN),
        ("h", produced(0), WRAPPED),
        ("h", produced(0), ProducerStateEntry(3)),
    ],
)
def test_assigned(row: str, batch_header: Header, known: ProducerStateEntry | None) -> None:
    assert validate.check_producer(batch_header, known) == (ValidationResult.ASSIGN, None), row


@pytest.mark.parametrize("sequence", [10, 14, 18])
def test_duplicate_of_any_batch_in_the_window(sequence: int) -> None:
    verdict, span = validate.check_producer(produced(sequence), KNOWN)
    assert verdict is ValidationResult.DUPLICATE
    assert span is not None
    assert (span.base_offset, span.last_offset) == (100 + sequence, 101 + sequence)


@pytest.mark.parametrize(
    ("row", "kind", "batch_header", "known"),
    [
        ("c", errors.UnknownProducerId, produced(1), None),
        ("d", errors.InvalidProducerEpoch, produced(20, epoch=2), KNOWN),
        ("f", errors.OutOfOrderSequence, produced(1, epoch=4), KNOWN),
        ("i", errors.OutOfOrderSequence, produced(21), KNOWN),
        ("i", errors.OutOfOrderSequence, produced(8), KNOWN),
        ("i", errors.OutOfOrderSequence, produced(18, count=1), KNOWN),
        ("i", errors.OutOfOrderSequence, produced(5), ProducerStateEntry(3)),
        ("j", errors.ConcurrentTransactions, produced(0, epoch=4), OPEN),
        ("d", errors.InvalidProducerEpoch, produced(0, epoch=2), OPEN),
    ],
)
def test_out_of_line(
    row: str, kind: type[errors.PkError], batch_header: Header, known: ProducerStateEntry | None
) -> None:
    with pytest.raises(kind) as caught:
        validate.check_producer(batch_header, known)
    assert caught.value.details["row"] == row


# -- marker table ----------------------------------------------------------------------------------

ENDED = ProducerStateEntry(3, coordinator_epoch=7)


@pytest.mark.parametrize(
    ("row", "epoch", "coordinator_epoch", "known", "result"),
    [
        ("l", 4, 7, None, MarkerResult.APPEND),
        ("m", 4, 0, OPEN, MarkerResult.APPEND),
        ("m", 4, 7, ENDED, MarkerResult.APPEND),
        ("m", 9, 8, ENDED, MarkerResult.APPEND),
        ("n", 3, 7, ENDED, MarkerResult.DONE),
        ("n", 3, 8, OPEN, MarkerResult.DONE),
        ("n", 2, 8, OPEN, MarkerResult.DONE),
    ],
)
def test_markers(
    row: str,
    epoch: int,
    coordinator_epoch: int,
    known: ProducerStateEntry | None,
    result: MarkerResult,
) -> None:
    """Rule X1: only an epoch above the known one ends a transaction."""
    marker = Marker(9, epoch, True, coordinator_epoch)
    assert validate.check_marker(marker, known) is result, row


@pytest.mark.parametrize("epoch", [3, 4])
def test_a_marker_of_a_former_coordinator(epoch: int) -> None:
    with pytest.raises(errors.InvalidProducerEpoch) as caught:
        validate.check_marker(Marker(9, epoch, True, 6), ENDED)
    assert caught.value.details["row"] == "k"


# -- retention -------------------------------------------------------------------------------------

#: Three full segments and the active one; newest records 30, 20, 10 and 5 s old.
SEGMENTS = tuple(
    SegmentFacts(base, base + 100, 1000, NOW - age)
    for base, age in ((0, 30_000), (100, 20_000), (200, 10_000), (300, 5_000))
)


def plan(segments: tuple[SegmentFacts, ...] = SEGMENTS, **given: Any) -> RetentionPlan:
    options: dict[str, Any] = {
        "log_start": 0,
        "tiered_end": -1,
        "droppable_end": 0,
        "high_watermark": 400,
        "hold": None,
        "now_ms": NOW,
    }
    options |= {name: given.pop(name) for name in list(given) if name in options}
    limits = {"retention_ms": -1, "retention_bytes": -1, **given}
    return retention.plan(segments, config(**limits), **options)


@pytest.mark.parametrize(
    ("row", "given", "drop", "log_start", "roll"),
    [
        ("nothing set", {}, (), 0, False),
        ("E1", {"log_start": 150}, (0,), 150, False),
        ("E1, all", {"log_start": 400}, (0, 100, 200), 400, True),
        ("E2", {"retention_ms": 15_000}, (0, 100), 200, False),
        ("E2, exactly as old", {"retention_ms": 20_000}, (0,), 100, False),
        ("E3", {"retention_bytes": 2500}, (0,), 100, False),
        ("E3, exactly full", {"retention_bytes": 3000}, (0,), 100, False),
        ("E3, whole segments only", {"retention_bytes": 3001}, (), 0, False),
        ("E2 or E3", {"retention_bytes": 2500, "retention_ms": 15_000}, (0, 100), 200, False),
        ("E6, high watermark", {"retention_ms": 15_000, "high_watermark": 150}, (0,), 100, False),
        ("E6, hold", {"retention_ms": 15_000, "hold": 199}, (0,), 100, False),
        ("E7", {"retention_ms": 1_000}, (0, 100, 200), 300, True),
        (
            "compact keeps",
            {"retention_ms": 1, "retention_bytes": 0, "cleanup_policy": "compact"},
            (),
            0,
            False,
        ),
        (
            "compact, deleted records",
            {"log_start": 150, "cleanup_policy": "compact"},
            (0,),
            150,
            False,
        ),
    ],
)
def test_retention(
    row: str, given: dict[str, Any], drop: tuple[int, ...], log_start: int, roll: bool
) -> None:
    found = plan(**given)
    assert (found.drop, found.log_start, found.roll) == (drop, log_start, roll), row
    assert found.empty == (not drop and not roll)


@pytest.mark.parametrize(
    ("row", "given", "drop", "log_start"),
    [
        ("no local limit: the topic's", {"retention_ms": 15_000}, (0, 100), 200),
        ("local only: log_start stays", {"local_retention_ms": 15_000}, (0, 100), 0),
        (
            "compact: local segments only",
            {"local_retention_ms": 15_000, "retention_ms": 1, "cleanup_policy": "compact"},
            (0, 100),
            0,
        ),
        ("local bytes", {"local_retention_bytes": 2000}, (0, 100), 0),
        ("E4, not committed yet", {"local_retention_ms": 1, "droppable_end": 250}, (0, 100), 0),
        ("E4, nothing confirmed", {"local_retention_ms": 1, "droppable_end": 0}, (), 0),
        ("E1 beats E4", {"log_start": 150, "droppable_end": 0}, (0,), 150),
        (
            "E5, expired and covered",
            {"retention_ms": 15_000, "tiered_end": 150, "droppable_end": 0},
            (),
            100,
        ),
        (
            "E5, behind what only the tier has",
            {"retention_ms": 15_000, "log_start": 50, "segments": SEGMENTS[1:], "droppable_end": 0},
            (),
            50,
        ),
        ("E5, hold", {"retention_ms": 15_000, "hold": 100}, (0, 100), 100),
    ],
)
def test_retention_with_a_tier(
    row: str, given: dict[str, Any], drop: tuple[int, ...], log_start: int
) -> None:
    found = plan(**{"tiered_end": 400, "droppable_end": 300, **given})
    assert (found.drop, found.log_start) == (drop, log_start), row


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"retention_ms": 15_000}, "older than retention_ms"),
        ({"retention_bytes": 2000}, "beyond retention_bytes"),
        ({"retention_ms": 15_000, "tiered_end": 400}, "older than retention_ms"),
        ({"local_retention_ms": 15_000, "tiered_end": 400}, "older than local_retention_ms"),
        ({"local_retention_bytes": 2000, "tiered_end": 400}, "beyond local_retention_bytes"),
        ({"local_retention_ms": 15_000, "log_start": 100, "tiered_end": 400}, "below log_start"),
    ],
)
def test_retention_names_the_setting_that_dropped(given: dict[str, Any], reason: str) -> None:
    assert plan(**{"droppable_end": 300, **given}).reason == reason


def test_an_empty_active_segment_is_left_alone() -> None:
    rolled = (*SEGMENTS[:2], SegmentFacts(200, 200, 0, index.NO_TIMESTAMP))
    found = plan(rolled, retention_ms=1, high_watermark=200)
    assert (found.drop, found.roll) == ((0, 100), False)


def test_retention_never_counts_future_records_as_old() -> None:
    future = (SegmentFacts(0, 100, 1000, NOW + 50_000), *SEGMENTS[1:])
    assert plan(future, retention_ms=1).empty


# -- opening ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "trusted", "state", "action"),
    [
        ("A", True, IndexState.COMPLETE, RecoveryAction.USE),
        ("B", True, IndexState.SHORT, RecoveryAction.REINDEX),
        ("B", True, IndexState.UNUSABLE, RecoveryAction.REINDEX),
        ("C", False, IndexState.COMPLETE, RecoveryAction.SCAN),
        ("C", False, IndexState.BEYOND, RecoveryAction.SCAN),
        ("D", True, IndexState.BEYOND, RecoveryAction.CORRUPT),
    ],
)
def test_before_looking(row: str, trusted: bool, state: IndexState, action: RecoveryAction) -> None:
    assert recovery.before(trusted=trusted, index=state) == (row, action)


@pytest.mark.parametrize(
    ("row", "stop", "given", "action"),
    [
        ("E", Stop.END, {}, RecoveryAction.USE),
        ("F", Stop.SHORT, {"trusted": True}, RecoveryAction.CORRUPT),
        ("F", Stop.BAD, {"offset": 99}, RecoveryAction.CORRUPT),
        ("G", Stop.BAD, {"same_boot": False, "torn": False}, RecoveryAction.CUT),
        ("G", Stop.SHORT, {"same_boot": False}, RecoveryAction.CUT),
        ("H", Stop.SHORT, {}, RecoveryAction.CUT),
        ("I", Stop.SHORT, {"torn": False}, RecoveryAction.CORRUPT),
        ("I", Stop.BAD, {}, RecoveryAction.CORRUPT),
    ],
)
def test_after_a_walk(row: str, stop: Stop, given: dict[str, Any], action: RecoveryAction) -> None:
    facts = {
        "trusted": False,
        "offset": 100,
        "recovery_point": 100,
        "same_boot": True,
        "torn": True,
        **given,
    }
    assert recovery.after(stop, **facts) == (row, action)


@pytest.mark.parametrize(
    ("row", "given", "action"),
    [
        ("J", {"base_offset": 50}, RecoveryAction.USE),
        ("K", {"empty": True}, RecoveryAction.REMOVE),
        ("L", {"power_lost": True, "recovery_point": 50}, RecoveryAction.CUT),
        ("L", {"power_lost": True, "compacted": True}, RecoveryAction.CUT),
        ("M", {"compacted": True}, RecoveryAction.USE),
        ("M", {"compacted": True, "power_lost": True, "recovery_point": 60}, RecoveryAction.USE),
        ("N", {}, RecoveryAction.CORRUPT),
        ("N", {"power_lost": True, "recovery_point": 55}, RecoveryAction.CORRUPT),
        ("N", {"base_offset": 40, "compacted": True}, RecoveryAction.CORRUPT),
    ],
)
def test_joints(row: str, given: dict[str, Any], action: RecoveryAction) -> None:
    facts = {
        "end_before": 50,
        "base_offset": 60,
        "empty": False,
        "compacted": False,
        "power_lost": False,
        "recovery_point": 0,
    }
    assert recovery.joint(**{**facts, **given}) == (row, action)
