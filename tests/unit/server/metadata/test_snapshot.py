"""The content of a snapshot and its file format: it gives the image of the log, or an error."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pk import errors
from pk.server.metadata import snapshot
from pk.server.metadata.image import (
    TERMS_MAX,
    BrokerState,
    MetadataImage,
    PartitionState,
    TopicState,
)
from pk.server.metadata.record_serde import MetadataRecordSerde
from pk.server.raft.snapshot_framing import check
from pk.server.raft.snapshot_id import SnapshotId, file_name, id_of
from pk.server.raft.voters import voters_of
from pk.wire import pk_pb2 as wire
from tests.unit.server.metadata.metadata_records import VOTERS, Historian, history, order


def encoded(image: MetadataImage) -> bytes:
    made = SnapshotId(image.offset + 1, image.leader_epoch)
    return b"".join(snapshot.encode(made, snapshot.rows_of(image)))


def loaded(raw: bytes) -> MetadataImage:
    image = MetadataImage()
    check(raw)
    for rows in snapshot.batches_of(raw):
        for offset, record in rows:
            image.apply(offset, record)
    return image


def the_same(story: Historian, at: int) -> None:
    """Check that an image from the snapshot at `at` and the rest of the log is the image of the
    log.
    """
    direct = MetadataImage()
    for offset, record in enumerate(story.records[:at]):
        direct.apply(offset, record)
    raw = encoded(direct)
    image = loaded(raw)
    assert image == direct
    assert order(image) == order(direct)
    assert encoded(image) == raw, "N1: a snapshot of a snapshot has the same bytes"
    for offset, record in enumerate(story.records[at:], at):
        image.apply(offset, record)
        direct.apply(offset, record)
    assert image == direct == story.image
    assert order(image) == order(story.image)


@pytest.mark.parametrize("seed", range(40))
def test_snapshot_and_log_are_the_image(seed: int) -> None:
    rng = random.Random(seed)
    story = history(seed, rng.choice([0, 5, 60, 700]))
    for _ in range(3):
        the_same(story, rng.randint(3, len(story.records)))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_snapshot_and_log_are_the_image_of_any_history(data: Any) -> None:
    story = Historian(lambda n: data.draw(st.integers(0, n - 1))).begin()
    story.go_on(data.draw(st.integers(0, 25)))
    the_same(story, data.draw(st.integers(3, len(story.records))))


def test_a_field_that_is_added_to_the_image_is_added_to_the_snapshot() -> None:
    """The rows are written by hand: `rows_of` must know every field, and the histories must draw
    it.
    """
    assert [each.name for each in fields(MetadataImage)] == [
        "offset", "cluster_id", "genesis", "brokers", "topics", "topic_ids", "configs",
        "next_producer_id", "features", "leader_id", "leader_epoch", "terms", "voters", "purges",
        "assigned", "leaderless", "_ids",
    ]  # fmt: skip
    topic = ["name", "topic_id", "partitions", "request_id"]
    assert [each.name for each in fields(TopicState)] == topic
    broker = snapshot.register_record(_broker())
    names = {each.name for each in fields(BrokerState)} - {"changed_offset"}
    assert names <= {each.name for each in broker.DESCRIPTOR.fields}
    partition = snapshot.partition_record("t", 0, PartitionState((), (), 1, 1, 1))
    assert {*PartitionState._fields} <= {each.name for each in partition.DESCRIPTOR.fields}


def test_an_offset_of_another_branch_of_the_log_is_not_reached() -> None:
    """Rule L15: a restored metadata log goes on in a later term, and soon ends behind the offsets
    that its lost part had.
    """
    story = history(3, 20)
    before, offset = story.image.origin, story.image.offset
    assert story.image.has_reached(before, offset)
    assert not story.image.has_reached(before, offset + 5), "the image is older"
    assert not story.image.has_reached("other" + before, offset)
    epoch = story.image.leader_epoch
    for _ in range(3):
        epoch += 1
        story.say(wire.LeaderChangeRecord(leader_id=1, epoch=epoch, voters=[1]))
        story.go_on(5)
    again = loaded(encoded(story.image))
    for image in (story.image, again):
        assert image.has_reached(before, offset)
        assert not image.has_reached(before, offset + 5), "another term stands there"
        assert image.has_reached("genesis", offset), "an older build kept no term"
        assert image.has_reached(image.origin, image.offset)
    for _ in range(TERMS_MAX):
        epoch += 1
        story.say(wire.LeaderChangeRecord(leader_id=1, epoch=epoch, voters=[1]))
    assert len(story.image.terms) == TERMS_MAX
    assert not story.image.has_reached(before, offset), "it is not known any more"


def _broker() -> BrokerState:
    return BrokerState(1, 1, "i", "b", (), "a", "r")


def test_a_registration_that_is_not_at_its_offset_is_refused_in_a_snapshot_too() -> None:
    """metadata/image I3 holds for every row: an offset in the snapshot is checked, not trusted."""
    story = history(3, 0)
    story._register()
    rows = list(snapshot.rows_of(story.image))
    moved = [(offset - 1 if n == 3 else offset, record) for n, (offset, record) in enumerate(rows)]
    assert rows[3][1].WhichOneof("record") == "register_broker"
    made = SnapshotId(story.image.offset + 1, 1)
    with pytest.raises(errors.CorruptLog, match="broker epoch"):
        loaded(b"".join(snapshot.encode(made, moved)))


def test_the_voters_are_found_in_it() -> None:
    raw = encoded(history(1, 0).image)
    voters, addresses = voters_of(MetadataRecordSerde(), raw)
    assert [(v.node_id, v.directory_id) for v in voters] == [(1, "d1"), (2, "d2"), (3, "d3")]
    assert addresses == {v.node_id: v.address for v in VOTERS}
    with pytest.raises(errors.CorruptLog, match="no voters"):
        voters_of(MetadataRecordSerde(), encoded(MetadataImage(offset=4)))


def test_every_damage_is_seen() -> None:
    """raft/snapshot_framing N2: each byte counts, and each length."""
    image = history(5, 60).image
    raw = encoded(image)
    whole = SnapshotId(image.offset + 1, image.leader_epoch)
    assert check(raw, whole) == (whole, len(list(snapshot.rows_of(image))))
    rng = random.Random(1)
    for length in [0, 1, 40, *(rng.randrange(len(raw)) for _ in range(200)), len(raw) - 1]:
        with pytest.raises(errors.CorruptLog):
            check(raw[:length])
        torn = raw[:length] + bytes(len(raw) - length)  # the size got there, the data did not
        if torn != raw:
            with pytest.raises(errors.CorruptLog):
                check(torn)
    for position in range(len(raw)):
        bad = bytearray(raw)
        bad[position] ^= 1 << rng.randrange(8)
        with pytest.raises((errors.CorruptLog, errors.NewerFormat)):
            check(bad)
    with pytest.raises(errors.CorruptLog):
        check(raw + b"x")
    with pytest.raises(errors.CorruptLog, match="not"):
        check(raw, SnapshotId(whole.end, whole.epoch + 1))


def test_names_sort_by_age_and_say_what_they_are() -> None:
    ids = [SnapshotId(9, 12), SnapshotId(10, 2), SnapshotId(10_000, 1)]
    names = [file_name(each) for each in ids]
    assert names == sorted(names)
    assert [id_of(name) for name in names] == ids
    for name in ("quorum-state", names[0] + ".part", "1-1.checkpoint", "x".join(names)):
        assert id_of(name) is None
