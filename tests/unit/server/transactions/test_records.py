"""The records of `__transaction_state` (server/transactions/records)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pk import errors
from pk.server.transactions import records
from pk.server.transactions.machine import TransactionCoordinator
from pk.server.transactions.state import (
    NO_PAIR,
    ProducerPair,
    TransactionMetadata,
    TransactionState,
)
from pk.types import PartitionKey
from pk.wire import pk_pb2 as wire
from tests.unit.server.transactions.coordinator_bench import ID, RULES, T0, Bench

PAIRS = st.one_of(
    st.just(NO_PAIR),
    st.builds(ProducerPair, st.integers(1 << 62, 2**63 - 1), st.integers(0, 32_767)),
)
KEYS = st.builds(PartitionKey, st.sampled_from(["a", "b"]), st.integers(0, 9_999))
MS = st.integers(0, 2**53)
METADATA = st.builds(
    TransactionMetadata,
    st.text(max_size=40),
    PAIRS,
    st.integers(1, 2**31 - 1),
    st.sampled_from(TransactionState),
    st.dictionaries(KEYS, st.integers(-1, 9), max_size=8),
    MS,
    MS,
    st.text(max_size=10),
    PAIRS,
    PAIRS,
    MS,
    st.booleans(),
)


@given(METADATA)
def test_a_state_survives_its_record(known: TransactionMetadata) -> None:
    record = records.record_of(known)
    assert records.metadata_of(records.from_row(*records.to_row(record))) == known
    assert records.decode_key(record.key) == known.transactional_id


@given(METADATA)
def test_equal_states_have_equal_bytes(known: TransactionMetadata) -> None:
    reversed_items = dict(reversed(known.partitions.items()))
    same = TransactionMetadata(
        known.transactional_id, known.current, known.timeout_ms, known.state, reversed_items,
        known.started_ms, known.updated_ms, known.reason, known.previous, known.next,
        known.metadata_offset, known.fenced,
    )  # fmt: skip
    assert records.to_row(records.record_of(same)) == records.to_row(records.record_of(known))


def test_the_key_is_version_kind_and_id() -> None:
    assert records.encode_key("é") == b"\x00\x01\xc3\xa9"
    assert records.to_row(records.forgotten("é")) == (b"\x00\x01\xc3\xa9", None)
    assert records.metadata_of(records.from_row(b"\x00\x01x", None)) is None


def test_topics_without_unclean_epochs_name_none() -> None:
    known = TransactionMetadata(ID, ProducerPair(1, 0), 1, partitions={T0: -1})
    value = records.record_of(known).value
    assert value is not None
    assert list(value.transaction.topics[0].unclean_epochs) == []


@pytest.mark.parametrize(
    ("key", "error", "words"),
    [
        (None, errors.CorruptLog, "None"),
        (b"", errors.CorruptLog, "the key b''"),
        (b"\x00", errors.CorruptLog, "the key"),
        (b"\x00\x01\xff", errors.CorruptLog, "utf-8"),
        (b"\x01\x01x", errors.NewerFormat, "version 1"),
        (b"\x00\x04x", errors.NewerFormat, "the kind 4"),
    ],
)
def test_a_key_that_is_not_known_is_refused(
    key: bytes | None, error: type[errors.PkError], words: str
) -> None:
    with pytest.raises(error, match=words):
        records.from_row(key, None)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (b"\x0a", errors.CorruptLog),  # cut short
        (b"", errors.NewerFormat),  # no kind
        (b"\x1a\x00", errors.NewerFormat),  # the record of a participant under the key of an id
        (b"\x2a\x00", errors.NewerFormat),  # a kind with field number 5
        (b"\x0a\x04\xb8\x01\x01" + b"\x00", errors.CorruptLog),
        (b"\x0a\x03\xb8\x06\x01", errors.NewerFormat),  # field 103 of the transaction
    ],
)
def test_a_value_that_is_not_known_is_refused(value: bytes, error: type[errors.PkError]) -> None:
    with pytest.raises(error):
        records.from_row(records.encode_key(ID), value)


def altered(**changes: object) -> records.TransactionLogRecord:
    bench = Bench()
    bench.begun()
    row = bench.log[-1].value
    assert row is not None
    for name, value in changes.items():
        setattr(row.transaction, name, value)
    return bench.log[-1]


@pytest.mark.parametrize("state", [0, 7])
def test_an_unknown_state_is_refused(state: int) -> None:
    with pytest.raises(errors.NewerFormat, match=f"the state {state}"):
        records.metadata_of(altered(state=state))


def test_a_value_under_the_key_of_another_id_is_refused() -> None:
    with pytest.raises(errors.CorruptLog, match="'other'"):
        records.metadata_of(altered(transactional_id="other"))


def test_unclean_epochs_of_other_partitions_are_refused() -> None:
    record = altered()
    assert record.value is not None
    record.value.transaction.topics[0].unclean_epochs.extend([1, 2])
    with pytest.raises(errors.CorruptLog, match="epochs of other partitions"):
        records.metadata_of(record)


def test_a_producer_id_of_two_ids_is_refused() -> None:
    bench = Bench()
    pair = bench.init("app")
    machine = TransactionCoordinator(RULES)
    machine.apply(0, records.record_of(TransactionMetadata("a", pair, 1)))
    machine.apply(1, records.record_of(TransactionMetadata("a", pair, 2)))
    with pytest.raises(errors.CorruptLog, match="'a' and, at offset 2, to 'b'"):
        machine.apply(2, records.record_of(TransactionMetadata("b", pair, 1)))
    machine.apply(3, records.forgotten("a"))
    machine.apply(4, records.record_of(TransactionMetadata("b", pair, 1)))
    assert isinstance(
        records.record_of(TransactionMetadata("b", pair, 1)).value, wire.TransactionRecord
    )
