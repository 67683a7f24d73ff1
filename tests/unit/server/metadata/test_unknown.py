"""Nothing of another build is dropped in silence (rule Q7): record fields, stored settings."""

from __future__ import annotations

import pytest
from google.protobuf.message import Message

from pk import errors
from pk.server.controller import commands as c
from pk.server.metadata import snapshot
from pk.server.metadata.image import BROKER_RESOURCE, TOPIC_RESOURCE, MetadataImage
from pk.server.metadata.records import decode_record, encode_record, record_of
from pk.server.raft.snapshot_id import SnapshotId
from pk.wire import pk_pb2 as wire
from tests.unit.server.controller.controller_bench import Bench

#: Field 900, a varint, which no message of pk has.
UNKNOWN_FIELD = b"\xa0\x38\x01"
BODIES: list[Message] = [
    wire.TopicRecord(name="t", topic_id="x"),
    wire.ConfigRecord(resource_type="topic", name="a", value=""),
    wire.FeatureLevelRecord(name="pk.format"),
    wire.NoOpRecord(),
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.DESCRIPTOR.name)
def test_a_record_with_an_unknown_field_is_refused(body: Message) -> None:
    """An ignored field would be missing in this node's next snapshot."""
    assert decode_record(encode_record(record_of(body))) == record_of(body)
    newer = type(body).FromString(body.SerializeToString() + UNKNOWN_FIELD)
    with pytest.raises(errors.NewerFormat, match="has a field"):
        decode_record(encode_record(record_of(newer)))


def test_an_unknown_field_inside_a_list_or_beside_the_record_is_refused() -> None:
    voter = wire.Voter.FromString(wire.Voter(node_id=1).SerializeToString() + UNKNOWN_FIELD)
    with pytest.raises(errors.NewerFormat):
        decode_record(encode_record(record_of(wire.VotersRecord(voters=[voter]))))
    with pytest.raises(errors.NewerFormat):
        decode_record(encode_record(record_of(wire.NoOpRecord())) + UNKNOWN_FIELD)


def test_a_snapshot_with_an_unknown_field_is_refused() -> None:
    body = wire.TopicRecord(name="t", topic_id="x")
    newer = wire.TopicRecord.FromString(body.SerializeToString() + UNKNOWN_FIELD)
    raw = b"".join(snapshot.encode(SnapshotId(7, 3), [(6, record_of(newer))]))
    with pytest.raises(errors.NewerFormat):
        list(snapshot.batches_of(raw))


def of_a_newer_build(bench: Bench) -> None:
    for kind, name in ((TOPIC_RESOURCE, "t"), (BROKER_RESOURCE, "")):
        record = wire.ConfigRecord(
            resource_type=kind, resource_name=name, name="balance_weight", value="7"
        )
        bench.machine.apply(len(bench.log), record_of(record))
        bench.log.append(record_of(record))


def test_a_stored_setting_that_is_not_known_is_kept_and_skipped() -> None:
    bench = Bench()
    bench.up(1)
    bench.topic("t", retention_ms="5000")
    of_a_newer_build(bench)
    image = bench.image
    assert image.unknown_settings() == ["balance_weight"]
    assert image.topic_config("t")["retention_ms"] == 5000
    assert "balance_weight" not in image.topic_config("t")
    copy = MetadataImage()
    for offset, record in snapshot.rows_of(image):
        copy.apply(offset, record)
    assert copy.configs == image.configs
    assert copy.configs[TOPIC_RESOURCE, "t"]["balance_weight"] == "7"


def test_other_settings_beside_an_unknown_one_can_be_altered() -> None:
    bench = Bench()
    bench.up(1)
    bench.topic("t")
    of_a_newer_build(bench)
    assert not bench.alter(TOPIC_RESOURCE, "t", retention_ms="9").HasField("error")
    assert not bench.alter(BROKER_RESOURCE, "", retention_ms="8").HasField("error")
    bench.topic("u", segment_bytes="20000")
    refused = bench.alter(TOPIC_RESOURCE, "t", balance_weight="8")
    assert refused.error.code == errors.InvalidConfig.code
    request = wire.DescribeConfigsRequest(
        resources=[wire.ConfigResource(type=TOPIC_RESOURCE, name="t")]
    )
    entries = bench.do(c.DescribeConfigs(request)).results[0].entries
    shown = [(each.value, each.source) for each in entries if each.name == "balance_weight"]
    assert shown == [("7", "topic"), ("7", "cluster")]
    assert not bench.alter(TOPIC_RESOURCE, "t", unset=("balance_weight",)).HasField("error")
    assert bench.image.configs[TOPIC_RESOURCE, "t"] == {"retention_ms": "9"}
