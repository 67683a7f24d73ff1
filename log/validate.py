"""Decides whether a batch or a marker may be appended.  Three tables, read from the top; the first
row that applies decides.

Batch: what the topic accepts (`header` passed `batch.check`, the body `columns.validate_body`)
  A  larger than max_message_bytes                          RecordTooLarge
  B  no records, or offsets with gaps                       InvalidRecord   only cleaning makes such
  C  a control batch, a delete horizon, LogAppendTime set   InvalidRecord   only brokers make such
  D  transactional without a producer id and a sequence     InvalidRecord
  E  null keys on a compacted topic                         InvalidRecord   (rule L14)
  F  CreateTime later than now + after_max                  InvalidRecord   (KIP-937)
  G  CreateTime earlier than now − before_max               InvalidRecord
  H  a producer id without a sequence                       InvalidRecord
  I  transactional with a plain producer's id               InvalidRecord
  J  not transactional with a producer id of transactions   InvalidRecord   (rule X3)

Producer: idempotence, KIP-98, KIP-360 (s = base sequence, window = the last five batches)
  a  no producer id                                         ASSIGN
  b  producer unknown, s = 0                                ASSIGN
  c  producer unknown, s > 0                                UnknownProducerId   its state expired
  d  epoch older than the known one                         InvalidProducerEpoch   fenced
  j  epoch newer, a transaction of the known one is open    ConcurrentTransactions   its marker is
                                                            still to come
  e  epoch newer, s = 0                                     ASSIGN
  f  epoch newer, s > 0                                     OutOfOrderSequence
  g  same first and last sequence as a batch in the window  DUPLICATE
  h  s follows the last sequence (it wraps after 2^31 − 1)  ASSIGN
  i  anything else: a gap, or older than the window         OutOfOrderSequence

Marker: the end of a transaction, KIP-890, KIP-1228 (rule X1)
  k  coordinator epoch older than the last marker's         InvalidProducerEpoch
  l  producer unknown                                       APPEND   fences late batches (rule X6)
  m  epoch newer than the known one                         APPEND
  n  anything else                                          DONE   the log has it, or a later one
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pk import errors
from pk.log.batch import DELETE_HORIZON, Header
from pk.log.control_rows import Marker
from pk.log.plan import LogConfig
from pk.log.producers import ProducerStateEntry, Span
from pk.transactional_ids import is_transactional
from pk.types import NONE


class ValidationResult(enum.Enum):
    ASSIGN = "assign"
    DUPLICATE = "duplicate"


class MarkerResult(enum.Enum):
    """What the leader does with a marker that the log does not refuse."""

    APPEND = "append"
    DONE = "done"  #: nothing: the log has this marker or a later one


class Case(NamedTuple):
    """A row of the first table: the batch is refused with `error` and `words` if `applies` returns
    true.
    """

    label: str
    applies: Callable[[Header, LogConfig, int], bool]
    error: type[errors.PkError]
    words: Callable[[Header, LogConfig, int], str]


BATCH_TABLE: tuple[Case, ...] = (
    Case(
        "A",
        lambda h, c, now: h.length > c.max_message_bytes,
        errors.RecordTooLarge,
        lambda h, c, now: (
            f"a batch of {h.length} bytes; max_message_bytes is {c.max_message_bytes}"
        ),
    ),
    Case(
        "B",
        lambda h, c, now: (
            h.record_count < 1 or h.sparse or h.last_offset_delta != h.record_count - 1
        ),
        errors.InvalidRecord,
        lambda h, c, now: (
            f"a producer's batch has dense offsets, not {h.last_offset_delta + 1} "
            f"for {h.record_count} records"
        ),
    ),
    Case(
        "C",
        lambda h, c, now: h.control or h.log_append_time or bool(h.attributes & DELETE_HORIZON),
        errors.InvalidRecord,
        lambda h, c, now: f"attributes 0x{h.attributes:04x} are the broker's to set",
    ),
    Case(
        "D",
        lambda h, c, now: (
            h.transactional
            and (h.producer_id < 0 or h.producer_epoch < 0 or h.base_sequence == NONE)
        ),
        errors.InvalidRecord,
        lambda h, c, now: (
            f"a transactional batch with producer id {h.producer_id}, epoch {h.producer_epoch}, "
            f"sequence {h.base_sequence}"
        ),
    ),
    Case(
        "E",
        lambda h, c, now: c.compacted and h.has_null_keys,
        errors.InvalidRecord,
        lambda h, c, now: "a compacted topic refuses null keys",
    ),
    Case(
        "F",
        lambda h, c, now: (
            not c.log_append_time and h.max_timestamp - now > c.message_timestamp_after_max_ms
        ),
        errors.InvalidRecord,
        lambda h, c, now: (
            f"timestamp {h.max_timestamp} is {h.max_timestamp - now} ms ahead of the broker; "
            f"message_timestamp_after_max_ms is {c.message_timestamp_after_max_ms}"
        ),
    ),
    Case(
        "G",
        lambda h, c, now: (
            not c.log_append_time and now - h.base_timestamp > c.message_timestamp_before_max_ms
        ),
        errors.InvalidRecord,
        lambda h, c, now: (
            f"timestamp {h.base_timestamp} is {now - h.base_timestamp} ms old; "
            f"message_timestamp_before_max_ms is {c.message_timestamp_before_max_ms}"
        ),
    ),
    Case(
        "H",
        lambda h, c, now: h.producer_id != NONE and h.base_sequence == NONE,
        errors.InvalidRecord,
        lambda h, c, now: f"producer id {h.producer_id} without a sequence number",
    ),
    Case(
        "I",
        lambda h, c, now: h.transactional and not is_transactional(h.producer_id),
        errors.InvalidRecord,
        lambda h, c, now: (
            f"a transactional batch of producer {h.producer_id}, which no transaction coordinator "
            "has allocated: call init_transactions first"
        ),
    ),
    Case(
        "J",
        lambda h, c, now: not h.transactional and is_transactional(h.producer_id),
        errors.InvalidRecord,
        lambda h, c, now: (
            f"a batch outside of a transaction by producer {h.producer_id}, whose id is one of "
            "transactions"
        ),
    ),
)


def check_batch(header: Header, config: LogConfig, now_ms: int) -> None:
    """Check a batch against the topic's settings: the table "Batch" of the module.

    Raises the error of the first row that applies; `details["row"]` names the row.
    """
    for case in BATCH_TABLE:
        if case.applies(header, config, now_ms):
            raise case.error(case.words(header, config, now_ms), row=case.label)


def check_producer(
    header: Header, known: ProducerStateEntry | None
) -> tuple[ValidationResult, Span | None]:
    """Check the producer epoch and the sequence of a batch: the table "Producer" of the module.

    `known`: the state of this producer, None if the partition has none.  Returns ASSIGN, or
    DUPLICATE with the stored batch that this batch repeats.  Raises the error of the row otherwise.
    """
    if header.producer_id == NONE:
        return ValidationResult.ASSIGN, None  # a
    sequence, epoch = header.base_sequence, header.producer_epoch
    if known is None:
        if sequence == 0:
            return ValidationResult.ASSIGN, None  # b
        raise errors.UnknownProducerId(
            f"producer {header.producer_id} is not known here and begins at sequence {sequence}",
            row="c",
        )
    if epoch < known.epoch:
        raise errors.InvalidProducerEpoch(
            f"producer {header.producer_id} has epoch {known.epoch} here, the batch has {epoch}",
            row="d",
        )
    if epoch > known.epoch:
        if known.transaction_start != NONE:
            raise errors.ConcurrentTransactions(
                f"producer {header.producer_id}: the transaction of epoch {known.epoch} has no "
                f"marker here yet, the batch has epoch {epoch}",
                row="j",
            )
        if sequence == 0:
            return ValidationResult.ASSIGN, None  # e
        raise errors.OutOfOrderSequence(
            f"producer {header.producer_id}: epoch {epoch} begins at sequence {sequence}, not 0",
            row="f",
        )
    for span in known.batches:
        if span.base_sequence == sequence and span.last_sequence == header.last_sequence:
            return ValidationResult.DUPLICATE, span  # g
    expected = (known.last_sequence + 1) & 0x7FFFFFFF
    if sequence == expected:
        return ValidationResult.ASSIGN, None  # h
    raise errors.OutOfOrderSequence(
        f"producer {header.producer_id}, epoch {epoch}: "
        f"sequence {sequence} after {known.last_sequence}",
        row="i",
        expected=str(expected),
    )


def check_marker(marker: Marker, known: ProducerStateEntry | None) -> MarkerResult:
    """Check a marker against the state of its producer: the table "Marker" of the module.

    Returns what the leader does, or raises the error of the row; `details["row"]` names the row.
    """
    if known is None:
        return MarkerResult.APPEND  # l
    if marker.coordinator_epoch < known.coordinator_epoch:
        raise errors.InvalidProducerEpoch(
            f"producer {marker.producer_id}: a marker of coordinator epoch "
            f"{marker.coordinator_epoch}; its last marker here is of coordinator epoch "
            f"{known.coordinator_epoch}",
            row="k",
        )
    if marker.producer_epoch > known.epoch:
        return MarkerResult.APPEND  # m
    return MarkerResult.DONE  # n


def check_markers(
    markers: Sequence[Marker], known: Callable[[int], ProducerStateEntry | None]
) -> list[MarkerResult | errors.PkError]:
    """Check markers that are appended together, in order, each after those before it.

    known: the state of a producer id in the log.  Returns, for each marker, the verdict of
    `check_marker` or the error that it raised.
    """
    appended: dict[int, ProducerStateEntry] = {}
    found: list[MarkerResult | errors.PkError] = []
    for marker in markers:
        entry = appended.get(marker.producer_id) or known(marker.producer_id)
        try:
            result = check_marker(marker, entry)
        except errors.PkError as refusal:
            found.append(refusal)
            continue
        if result is MarkerResult.APPEND:
            appended[marker.producer_id] = ProducerStateEntry(
                marker.producer_epoch, coordinator_epoch=marker.coordinator_epoch
            )
        found.append(result)
    return found
