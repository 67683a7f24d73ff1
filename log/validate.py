"""Decides whether a batch may be appended.  Two tables, read from the top; the first row that
applies decides.

Batch: what the topic accepts (`header` passed `batch.check`, the body `columns.validate_body`)
  A  larger than max_message_bytes                          RecordTooLarge
  B  no records, or offsets with gaps                       InvalidRecord   only cleaning makes such
  C  a control batch, a delete horizon, LogAppendTime set   InvalidRecord   only brokers make such
  D  transactional, while transactions are off              UnsupportedFeature
  E  null keys on a compacted topic                         InvalidRecord   (rule L14)
  F  CreateTime later than now + after_max                  InvalidRecord   (KIP-937)
  G  CreateTime earlier than now − before_max               InvalidRecord
  H  a producer id without a sequence                       InvalidRecord

Producer: idempotence, KIP-98, KIP-360 (s = base sequence, window = the last five batches)
  a  no producer id                                         ASSIGN
  b  producer unknown, s = 0                                ASSIGN
  c  producer unknown, s > 0                                UnknownProducerId   its state expired
  d  epoch older than the known one                         InvalidProducerEpoch   fenced
  e  epoch newer, s = 0                                     ASSIGN
  f  epoch newer, s > 0                                     OutOfOrderSequence
  g  same first and last sequence as a batch in the window  DUPLICATE
  h  s follows the last sequence (it wraps after 2^31 − 1)  ASSIGN
  i  anything else: a gap, or older than the window         OutOfOrderSequence
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

from pk import errors
from pk.log.batch import DELETE_HORIZON, Header
from pk.log.plan import LogConfig
from pk.log.producers import ProducerStateEntry, Span
from pk.types import NONE


class ValidationResult(enum.Enum):
    ASSIGN = "assign"
    DUPLICATE = "duplicate"


class Case(NamedTuple):
    """A row of the first table: the batch is refused with `error` and `words` if `applies` returns
    true.
    """

    label: str
    applies: Callable[[Header, LogConfig, int, bool], bool]
    error: type[errors.PkError]
    words: Callable[[Header, LogConfig, int], str]


BATCH_TABLE: tuple[Case, ...] = (
    Case(
        "A",
        lambda h, c, now, txn: h.length > c.max_message_bytes,
        errors.RecordTooLarge,
        lambda h, c, now: (
            f"a batch of {h.length} bytes; max_message_bytes is {c.max_message_bytes}"
        ),
    ),
    Case(
        "B",
        lambda h, c, now, txn: (
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
        lambda h, c, now, txn: (
            h.control or h.log_append_time or bool(h.attributes & DELETE_HORIZON)
        ),
        errors.InvalidRecord,
        lambda h, c, now: f"attributes 0x{h.attributes:04x} are the broker's to set",
    ),
    Case(
        "D",
        lambda h, c, now, txn: h.transactional and not txn,
        errors.UnsupportedFeature,
        lambda h, c, now: "this build of pk has no transactions",
    ),
    Case(
        "E",
        lambda h, c, now, txn: c.compacted and h.has_null_keys,
        errors.InvalidRecord,
        lambda h, c, now: "a compacted topic refuses null keys",
    ),
    Case(
        "F",
        lambda h, c, now, txn: (
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
        lambda h, c, now, txn: (
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
        lambda h, c, now, txn: h.producer_id != NONE and h.base_sequence == NONE,
        errors.InvalidRecord,
        lambda h, c, now: f"producer id {h.producer_id} without a sequence number",
    ),
)


def check_batch(header: Header, config: LogConfig, now_ms: int, transactions: bool = False) -> None:
    """Check a batch against the topic's settings: the table "Batch" of the module.

    Raises the error of the first row that applies; `details["row"]` names the row.
    """
    for case in BATCH_TABLE:
        if case.applies(header, config, now_ms, transactions):
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
