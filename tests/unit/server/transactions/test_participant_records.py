"""Records of jobs that a log must not have, and those of a newer build (participants/records)."""

from __future__ import annotations

import pytest

from pk import errors
from pk.server.transactions.participants import records, state
from pk.server.transactions.records import PARTICIPANT, TransactionLogRecord, from_row
from pk.wire import pk_pb2 as wire
from tests.unit.server.transactions.test_participants import JOB, JobBench


@pytest.mark.parametrize(
    "key",
    [b"\x00\x02", b"\x00\x02\x00\x00\x00\x09x", b"\x00\x03\x00\x00\x00\x01\xff" + b"\x00" * 8],
)
def test_a_key_that_is_cut_or_no_text_is_corrupt(key: bytes) -> None:
    with pytest.raises(errors.CorruptLog):
        records.decode_member_key(key)


def test_a_producer_id_of_two_jobs_is_corrupt() -> None:
    bench = JobBench()
    pair = bench.join(0)
    record = records.participant_record("b", pair.producer_id, state.Participant(0, 1))
    with pytest.raises(errors.CorruptLog, match=str(pair.producer_id)):
        bench.machine.apply(9, record)


def test_a_record_under_the_key_of_another_kind_is_refused() -> None:
    value = wire.TransactionRecord(job=wire.JobRecord(job="a", state=1)).SerializeToString()
    with pytest.raises(errors.NewerFormat):
        from_row(records.member_key(PARTICIPANT, "a", 1), value)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (wire.JobRecord(job="b", state=1), errors.CorruptLog),
        (wire.JobRecord(job=JOB, state=9), errors.NewerFormat),
    ],
)
def test_a_job_of_another_name_or_state_is_refused(
    body: wire.JobRecord, error: type[errors.PkError]
) -> None:
    bench = JobBench()
    bench.join(0)
    with pytest.raises(error):
        bench.machine.apply(
            9, TransactionLogRecord(bench.log[0].key, wire.TransactionRecord(job=body))
        )
