"""The records of `__consumer_offsets` (server/groups/records)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pk import errors
from pk.server.groups import records
from pk.server.groups.state import Assigned, CommittedOffset, GroupMetadata, GroupState, Member
from pk.types import PartitionKey
from pk.wire import pk_pb2 as wire

NAME = st.text(min_size=1, max_size=20)
KEY = st.builds(PartitionKey, st.sampled_from(["a", "b"]), st.integers(0, 9_999))
KEYS = st.sets(KEY, max_size=5).map(lambda keys: tuple(sorted(keys)))
MS = st.integers(0, 2**53)
I32 = st.integers(-1, 2**31 - 1)


def survived(record: records.GroupLogRecord) -> tuple[records.GroupKey, wire.GroupRecord]:
    again = records.from_row(*records.to_row(record))
    assert again == record
    assert again.value is not None
    return records.decode_key(again.key), again.value


@given(
    st.builds(GroupMetadata, NAME, st.sampled_from(GroupState), I32, NAME, NAME, st.booleans(), MS)
)
def test_a_group_survives_its_record(known: GroupMetadata) -> None:
    key, value = survived(records.group_record(known))
    assert key == records.GroupKey(records.GROUP, known.group_id)
    assert records.group_of(key.group_id, value.group) == known


@given(
    NAME,
    st.builds(
        Member, NAME, NAME, NAME, I32, I32, st.lists(NAME, max_size=3).map(tuple),
        st.builds(wire.GroupSubscription, topics=st.lists(NAME, max_size=3), user_data=st.binary()),
        I32,
    ),
)  # fmt: skip
def test_a_member_survives_its_record(group_id: str, member: Member) -> None:
    key, value = survived(records.member_record(group_id, member))
    assert key == records.GroupKey(records.MEMBER, group_id, member.member_id)
    assert records.member_of(key.member_id, value.member) == member


@given(NAME, st.dictionaries(NAME, st.builds(Assigned, KEYS, KEYS), max_size=3))
def test_an_assignment_survives_its_record(group_id: str, members: dict[str, Assigned]) -> None:
    record = records.assignment_record(group_id, 7, members)
    assert records.assignment_of(survived(record)[1].assignment) == members
    other = records.assignment_record(group_id, 7, dict(reversed(members.items())))
    assert records.to_row(other) == records.to_row(record), "equal states have equal bytes"


@given(NAME, KEY, st.builds(CommittedOffset, MS, I32, NAME, MS, MS, MS, MS))
def test_an_offset_survives_its_record(
    group_id: str, partition: PartitionKey, committed: CommittedOffset
) -> None:
    key, value = survived(records.offset_record(group_id, partition, committed))
    assert key == records.GroupKey(records.OFFSET, group_id, "", partition)
    assert records.offset_of(value.offset, committed.at) == committed


def test_the_bytes_of_keys() -> None:
    assert records.encode_key(records.GROUP, "é") == b"\x00\x01\x02\x00\xc3\xa9"
    assert records.offset_key("g", PartitionKey("t", 258)) == b"\x00\x04\x01\x00g\x02\x01\x00\x00t"
    assert records.to_row(records.removed(records.MEMBER, "g", b"m")) == (
        b"\x00\x02\x01\x00gm",
        None,
    )


@pytest.mark.parametrize(
    ("key", "error", "words"),
    [
        (None, errors.CorruptLog, "None"),
        (b"\x00\x01", errors.CorruptLog, "the key"),
        (b"\x01\x01\x01\x00g", errors.NewerFormat, "version 1"),
        (b"\x00\x09\x01\x00g", errors.NewerFormat, "the kind 9"),
        (b"\x00\x01\x05\x00g", errors.CorruptLog, "length"),
        (b"\x00\x01\x01\x00gx", errors.CorruptLog, "length"),
        (b"\x00\x02\x01\x00g", errors.CorruptLog, "length"),
        (b"\x00\x04\x01\x00g\x01", errors.CorruptLog, "unpack"),
        (b"\x00\x02\x01\x00g\xff", errors.CorruptLog, "decode"),
    ],
)
def test_other_keys_are_refused(key: bytes | None, error: type[errors.PkError], words: str) -> None:
    with pytest.raises(error, match=words):
        records.decode_key(key)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (b"\x0a\xff", errors.CorruptLog),
        (b"", errors.NewerFormat),
        (b"\x0a\x02\x08\x09", errors.NewerFormat),  # a state that does not exist
        (b"\x0a\x05\x08\x01\xc0\x3e\x01", errors.NewerFormat),  # an unknown field
        (b"\x22\x02\x08\x01", errors.NewerFormat),  # an offset under the key of a group
    ],
)
def test_other_values_are_refused(value: bytes, error: type[errors.PkError]) -> None:
    key = records.encode_key(records.GROUP, "g")
    records.from_row(key, b"\x0a\x02\x08\x01")
    with pytest.raises(error):
        records.from_row(key, value)
