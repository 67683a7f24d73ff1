"""The controller's decisions, rule by rule, on the machine without its surroundings."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pk import errors, limits
from pk.server.controller import commands as c
from pk.server.controller.machine import Controller
from pk.server.metadata import image as image_module
from pk.server.metadata.image import MetadataImage
from pk.server.metadata.records import (
    decode_batches,
    decode_record,
    encode_batch,
    encode_record,
    record_of,
)
from pk.types import NONE, PartitionKey
from pk.wire import pk_pb2 as wire
from tests.unit.server.controller.controller_bench import NOW, Bench, alter_isr, item, snapshot

# -- registration (L3) -----------------------------------------------------------------------------


def test_a_broker_epoch_is_the_offset_of_its_registration() -> None:
    bench = Bench()
    reply = bench.register()
    assert reply.broker_epoch == bench.image.offset == bench.image.brokers[1].broker_epoch
    assert reply.clean


def test_unfenced_only_when_the_image_has_reached_the_registration() -> None:
    # rule Q2
    bench = Bench()
    epoch = bench.register().broker_epoch
    reply = bench.beat(metadata_offset=epoch - 1)
    assert (reply.fenced, reply.caught_up) == (True, False)
    reply = bench.beat(metadata_offset=epoch)
    assert (reply.fenced, reply.caught_up) == (False, True)
    assert not bench.image.brokers[1].fenced


@pytest.mark.parametrize(
    ("more", "clean"),
    [
        ({}, True),  # the same boot: the page cache outlived the process
        ({"boot_id": "other"}, False),  # power loss
        ({"boot_id": "other", "clean_shutdown": True}, False),  # a file of another registration
        ({"boot_id": "other", "clean_shutdown": True, "previous_broker_epoch": "mine"}, True),
        ({"directory_ids": ["fresh"]}, False),  # the disk was replaced
        ({"directory_ids": ["dir1", "more"]}, True),
        (
            {"directory_ids": ["fresh"], "clean_shutdown": True, "previous_broker_epoch": "mine"},
            False,
        ),
    ],
)
def test_what_survived_a_restart(more: dict[str, Any], clean: bool) -> None:
    """L3: after a clean stop the replicas stay in ISR and ELR; after an unclean one they leave both
    before the broker is unfenced.
    """
    bench = Bench()
    bench.up(1)
    bench.topic("t")
    before = bench.state("t")
    if more.get("previous_broker_epoch") == "mine":
        more = {**more, "previous_broker_epoch": bench.image.brokers[1].broker_epoch}
    reply = bench.register(1, "again", **more)
    assert reply.clean is clean
    down = bench.state("t")
    assert (down.leader, down.isr) == (NONE, ())
    assert down.elr == ((1,) if clean else ())
    assert down.last_known == (() if clean else (1,))
    assert list(bench.machine.leaderless) == [PartitionKey("id0", 0)]
    bench.beat(1)
    after = bench.state("t")
    assert (after.leader, after.isr, after.elr, after.last_known) == (1, (1,), (), ())
    assert after.unclean is not clean  # R3: the only member is elected at once, and marked
    assert after.leader_epoch > before.leader_epoch
    assert not bench.machine.leaderless


def test_a_reconnection_of_the_same_process_resumes() -> None:
    bench = Bench()
    bench.up(1)
    epoch = bench.image.brokers[1].broker_epoch
    bench.fence(1)
    end = len(bench.log)
    reply = bench.register(1, live=True)
    assert (reply.broker_epoch, reply.clean, len(bench.log)) == (epoch, True, end)


def test_metadata_that_end_before_a_brokers_registration_are_refused() -> None:
    """Q2: they were restored from an older copy, and lack everything that was created since."""
    bench = Bench()
    bench.up(1)
    end = len(bench.log)
    bench.register(2, previous_broker_epoch=bench.image.offset)
    with pytest.raises(errors.MetadataBehind, match="older copy"):
        bench.register(1, "again", previous_broker_epoch=bench.image.offset + 1)
    assert len(bench.log) == end + 1, "the refusal left nothing behind"


def test_another_process_under_a_live_id_is_refused() -> None:
    bench = Bench()
    bench.up(1)
    with pytest.raises(errors.DuplicateBroker):
        bench.register(1, "thief", live=True)
    with pytest.raises(errors.ClusterIdMismatch):
        bench.register(2, cluster_id="another")


def test_stale_epochs_are_refused() -> None:
    bench = Bench()
    bench.up(1)
    old = bench.image.brokers[1].broker_epoch
    bench.register(1, "again")
    with pytest.raises(errors.StaleBrokerEpoch):
        bench.beat(1, broker_epoch=old)
    with pytest.raises(errors.StaleBrokerEpoch):
        bench.do(c.AllocateProducerIds(wire.AllocateProducerIdsRequest(broker_id=9)))
    assert not bench.do(c.Fence(1, old)), "an old session must not fence the new registration"


# -- fencing, ELR, elections (KIP-966, R1–R3) ------------------------------------------------------


def test_leadership_moves_to_the_next_in_sync() -> None:
    bench = Bench()
    bench.up(1, 2, 3)
    bench.topic("t", 1, 3)
    first, second, third = bench.state("t").replicas
    bench.fence(first)
    state = bench.state("t")
    assert (state.leader, state.isr, state.elr) == (second, (second, third), ())
    assert (state.leader_epoch, state.partition_epoch) == (1, 1)


def test_below_min_isr_the_leavers_stay_eligible() -> None:
    """KIP-966: with min ISR 2, the replica that left last may lead again without loss."""
    bench = Bench()
    bench.up(1, 2, 3)
    bench.topic("t", 1, 3, min_insync_replicas="2")
    a, b, d = bench.state("t").replicas
    for broker in (a, b, d):
        bench.fence(broker)
    state = bench.state("t")
    assert (state.leader, state.isr, set(state.elr)) == (NONE, (), {b, d})
    bench.beat(b)
    state = bench.state("t")
    assert (state.leader, state.isr, state.elr, state.unclean) == (b, (b,), (d,), False)


def test_recovery_waits_for_every_last_known_member() -> None:
    """R3: two members lost power; one of them alone may not know the end of the log."""
    bench = Bench()
    bench.up(1, 2)
    bench.topic("t", 1, 2, min_insync_replicas="2")
    bench.fence(1)
    bench.fence(2)
    bench.register(1, "again", boot_id="x")
    bench.beat(1)
    assert bench.state("t").leader == NONE
    assert bench.state("t").elr == (2,)
    bench.register(2, "again", boot_id="x")
    assert set(bench.state("t").last_known) == {1, 2}
    key = PartitionKey("id0", 0)
    assert bench.recover(key, waited=True) == 0, "not without unclean_leader_election_enable"
    bench.alter("topic", "t", unclean_leader_election_enable="true")
    assert bench.recover(key) == 0, "not before the wait is over"
    assert bench.recover(key, PartitionKey("gone", 0), waited=True) == 1
    state = bench.state("t")
    assert (state.leader, state.isr, state.unclean) == (1, (1,), True)


def test_a_change_of_min_isr_clears_the_elr_while_somebody_leads() -> None:
    # rule R1
    bench = Bench()
    bench.up(1, 2)
    bench.topic("t", 1, 2, min_insync_replicas="2")
    leader, other = bench.state("t").replicas
    bench.fence(other)
    assert bench.state("t").elr == (other,)
    bench.alter("topic", "t", min_insync_replicas="1")
    assert (bench.state("t").isr, bench.state("t").elr) == ((leader,), ())
    bench.alter("topic", "t", min_insync_replicas="2")
    bench.fence(leader)
    assert bench.state("t").elr == (leader,)
    bench.alter("broker", "", unset=(), min_insync_replicas="2")
    assert bench.state("t").elr == (leader,), "nobody moves the high watermark: the ELR stays true"


def test_controlled_shutdown_moves_leaders_and_says_when_it_may_go() -> None:
    bench = Bench()
    bench.up(1, 2)
    bench.topic("t", 2, 2)
    bench.topic("alone")
    seen = bench.image.offset
    assert not bench.beat(1, want_shutdown=True).may_shut_down
    assert bench.image.brokers[1].in_controlled_shutdown
    assert not bench.beat(1, want_shutdown=True, metadata_offset=seen).may_shut_down
    assert bench.beat(1, want_shutdown=True).may_shut_down
    assert [bench.state("t", n).leader for n in (0, 1)] == [2, 2]
    bench.fence(1)
    assert bench.beat(1, want_shutdown=True).may_shut_down
    bench.register(1, "again")
    assert not bench.image.brokers[1].in_controlled_shutdown


def test_isr_changes() -> None:
    # rules R2, KIP-497, KIP-903
    bench = Bench()
    bench.up(1, 2)
    bench.topic("t", 1, 2)
    leader, other = bench.state("t").replicas
    shrunk = alter_isr(bench, leader, item(bench, "t", [leader]))
    assert (list(shrunk.isr), shrunk.partition_epoch) == ([leader], 1)
    assert bench.state("t").isr == (leader,)
    cases = [
        (leader, item(bench, "t", [leader, other], partition_epoch=0), 95),
        (leader, item(bench, "t", [leader, other], leader_epoch=9), 6),
        (other, item(bench, "t", [leader, other]), 6),
        (leader, item(bench, "t", [other]), 42),
        (leader, item(bench, "t", [leader, other], isr_broker_epochs=[0, 0]), 107),
        (leader, item(bench, "t", [leader], topic_id="nope"), 100),
    ]
    for broker, wanted, code in cases:
        assert alter_isr(bench, broker, wanted).error.code == code
    grown = alter_isr(bench, leader, item(bench, "t", [leader, other]))
    assert list(grown.isr) == [leader, other]
    same = alter_isr(bench, leader, item(bench, "t", [leader, other]))
    assert same.partition_epoch == grown.partition_epoch == bench.state("t").partition_epoch
    bench.fence(other)
    assert alter_isr(bench, leader, item(bench, "t", [leader, other])).error.code == 107


def test_an_unclean_leader_says_when_it_has_recovered() -> None:
    """T4: the mark stays over clean changes of leadership, until the leader reports that it has
    recovered.
    """
    bench = Bench()
    bench.up(1)
    bench.topic("t")
    bench.register(1, "again", boot_id="x")
    bench.beat(1)
    assert bench.state("t").unclean
    bench.fence(1)
    bench.beat(1)
    assert bench.state("t").unclean
    epoch = bench.state("t").leader_epoch
    alter_isr(bench, 1, item(bench, "t", [1], recovered=True))
    state = bench.state("t")
    assert (state.unclean, state.leader, state.leader_epoch) == (False, 1, epoch)


# -- topics ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("flights", True), ("a.b_c-9", True), ("x" * 249, True), ("x" * 250, False), ("", False),
        (".", False), ("..", False), ("a b", False), ("ü", False), ("a/b", False), ("__own", False),
    ],
)  # fmt: skip
def test_topic_names(name: str, good: bool) -> None:
    bench = Bench()
    bench.up(1)
    (result,) = bench.create(wire.NewTopic(name=name, partitions=1))
    assert result.error.code == (0 if good else 17)


def test_each_topic_of_a_request_fails_by_itself() -> None:
    bench = Bench(default_num_partitions=4)
    bench.up(1)
    bench.topic("there")
    results = bench.create(
        wire.NewTopic(name="there"),
        wire.NewTopic(name="defaults"),
        wire.NewTopic(name="zero", partitions=-2),
        wire.NewTopic(name="huge", partitions=limits.PARTITIONS_PER_TOPIC_MAX + 1),
        wire.NewTopic(name="wide", replication_factor=2),
        wire.NewTopic(name="odd", configs={"retention.mss": "1"}),
        wire.NewTopic(name="contradiction", configs={"max_message_bytes": "999999999"}),
        wire.NewTopic(name="compacted", configs={"cleanup.policy": "compact"}),
        wire.NewTopic(name="defaults"),
        wire.NewTopic(name="most", partitions=limits.PARTITIONS_PER_TOPIC_MAX),
        wire.NewTopic(name="factor", replication_factor=-3),
    )
    assert [r.error.code for r in results] == [36, 0, 37, 37, 38, 40, 40, 0, 42, 37, 38]
    assert "retention_ms" in results[5].error.message
    assert set(bench.image.topic_ids) == {"there", "defaults", "compacted"}
    topic = bench.image.topic("defaults")
    assert topic is not None
    assert sorted(topic.partitions) == [0, 1, 2, 3]


def test_validate_only_writes_nothing() -> None:
    bench = Bench()
    bench.up(1)
    end = len(bench.log)
    (result,) = bench.create(wire.NewTopic(name="t", partitions=3), validate_only=True)
    assert not result.HasField("error")
    assert len(bench.log) == end


def test_partitions_are_added_and_the_reply_says_what_it_means() -> None:
    bench = Bench()
    bench.up(1)
    bench.topic("t", 2)
    wanted = [
        wire.NewPartitions(name="t", total_count=2),
        wire.NewPartitions(name="u", total_count=2),
        wire.NewPartitions(name="t", total_count=5),
    ]
    request = wire.CreatePartitionsRequest(topics=wanted[:2])
    assert [r.error.code for r in bench.do(c.CreatePartitions(request)).results] == [37, 3]
    request = wire.CreatePartitionsRequest(topics=wanted[2:])
    (result,) = bench.do(c.CreatePartitions(request)).results
    assert "keys" in result.note
    topic = bench.image.topic("t")
    assert topic is not None
    assert sorted(topic.partitions) == [0, 1, 2, 3, 4]


def test_a_topic_is_deleted_with_its_settings_and_may_come_back_as_another() -> None:
    # rule L8
    bench = Bench()
    bench.up(1)
    bench.topic("t", retention_ms="5")
    bench.topic("u")
    request = wire.DeleteTopicsRequest(names=["t", "t", "nope"], topic_ids=["id1", "gone"])
    results = bench.do(c.DeleteTopics(request)).results
    assert [r.error.code for r in results] == [0, 42, 3, 0, 100]
    assert results[3].name == "u"
    assert not bench.image.topics
    assert not bench.image.configs
    bench.topic("t")
    assert bench.image.topic_ids["t"] == "id2"
    assert bench.image.topic_config("t")["retention_ms"] != 5


def test_a_leaderless_partition_of_a_deleted_topic_is_forgotten() -> None:
    bench = Bench()
    bench.up(1)
    bench.topic("t")
    bench.fence(1)
    assert bench.machine.leaderless
    bench.do(c.DeleteTopics(wire.DeleteTopicsRequest(names=["t"])))
    assert not bench.machine.leaderless


def test_a_table_to_purge_is_marked_until_a_broker_reports_it_gone() -> None:
    """T7: the request to purge outlives the broker that was to do it."""
    bench = Bench()
    bench.up(1)
    for name in ("kept", "gone"):
        bench.topic(name)
        request = wire.DeleteTopicsRequest(names=[name], purge_tier=name == "gone")
        bench.do(c.DeleteTopics(request))
    (topic_id,) = bench.image.purges
    assert bench.image.purges[topic_id] == "gone"
    bench.topic("gone")
    assert bench.image.topic_ids["gone"] != topic_id
    epoch = bench.image.brokers[1].broker_epoch
    report = wire.TierPurgedRequest(broker_id=1, broker_epoch=epoch, topic_id=topic_id)
    stale = wire.TierPurgedRequest(broker_id=1, broker_epoch=epoch - 1, topic_id=topic_id)
    with pytest.raises(errors.StaleBrokerEpoch):
        bench.do(c.TierPurged(stale))
    assert bench.image.purges
    bench.do(c.TierPurged(report))
    assert not bench.image.purges
    end = len(bench.log)
    bench.do(c.TierPurged(report))
    assert len(bench.log) == end


def test_of_too_many_tables_to_purge_the_oldest_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # metadata/image I6
    monkeypatch.setattr(image_module, "PURGES_MAX", 2)
    bench = Bench()
    bench.up(1)
    for name in ("a", "b", "c"):
        bench.topic(name)
        bench.do(c.DeleteTopics(wire.DeleteTopicsRequest(names=[name], purge_tier=True)))
        bench.image.check()
    assert list(bench.image.purges.values()) == ["b", "c"]


def test_producer_ids_are_handed_out_once() -> None:
    bench = Bench()
    bench.up(1)
    blocks = [
        bench.do(
            c.AllocateProducerIds(
                wire.AllocateProducerIdsRequest(
                    broker_id=1, broker_epoch=bench.image.brokers[1].broker_epoch
                )
            )
        )
        for _ in range(3)
    ]
    assert [(b.first, b.count) for b in blocks] == [(0, 1000), (1000, 1000), (2000, 1000)]


# -- settings --------------------------------------------------------------------------------------


def entries(bench: Bench, kind: str, name: str) -> dict[str, tuple[str, str]]:
    resource = wire.ConfigResource(type=kind, name=name)
    request = wire.DescribeConfigsRequest(resources=[resource])
    (result,) = bench.do(c.DescribeConfigs(request)).results
    assert not result.HasField("error"), result.error
    return {e.name: (e.value, e.source) for e in result.entries}


def test_where_a_setting_comes_from() -> None:
    bench = Bench(tier_secret_access_key="geheim")
    bench.up(1)
    bench.topic("t", **{"retention.ms": "7"})
    bench.alter("broker", "", segment_bytes="99999", retention_ms="8")
    shown = entries(bench, "topic", "t")
    assert shown["retention_ms"] == ("7", "topic")
    assert shown["segment_bytes"] == ("99999", "cluster")
    assert shown["cleanup_policy"] == ("delete", "default")
    assert bench.image.topic_config("t")["segment_bytes"] == 99999
    bench.alter("topic", "t", unset=("retention.ms",))
    assert entries(bench, "topic", "t")["retention_ms"] == ("8", "cluster")
    own = entries(bench, "broker", "1")
    assert own["tier_secret_access_key"] == ("[hidden]", "file")
    assert "geheim" not in str(own)


def test_wrong_settings_are_refused_whole() -> None:
    bench = Bench()
    bench.up(1)
    bench.topic("t", retention_ms="100", local_retention_ms="50")
    assert bench.alter("topic", "nope", retention_ms="1").error.code == 3
    assert bench.alter("topic", "t", retention_ms="1", bogus="2").error.code == 40
    assert bench.alter("topic", "t", retention_ms="49").error.code == 40
    assert bench.alter("topic", "t", unset=("retention_ms",), retention_ms="9").error.code == 40
    assert bench.alter("planet", "t", retention_ms="1").error.code == 42
    assert bench.alter("broker", "1", retention_ms="1").error.code == 40
    assert bench.alter("broker", "", cleanup_policy="compact").error.code == 1011
    assert bench.image.topic_config("t")["retention_ms"] == 100


def test_a_compacted_topic_keeps_its_tier_enable() -> None:
    """C2: its table is compacted, or its logs; each may lack tombstones of keys in the other."""
    bench = Bench()
    bench.up(1)
    bench.topic("t")
    bench.topic("local", cleanup_policy="compact", tier_enable="false")
    bench.machine.rules = c.Rules(1, {**bench.rules.server, "tier_url": "file:///x"})
    (made,) = bench.create(wire.NewTopic(name="a", configs={"cleanup_policy": "compact"}))
    assert not made.error.code
    assert not bench.alter("topic", "t", cleanup_policy="compact").error.code
    for name, value in (("local", "true"), ("t", "false"), ("a", "false")):
        refused = bench.alter("topic", name, tier_enable=value).error
        assert (refused.code, "tier_enable" in refused.message) == (40, True), name
    assert bench.alter("topic", "local", unset=("tier_enable",)).error.code == 40
    refused = bench.alter("broker", "", tier_enable="false").error  # the default of t and a
    assert (refused.code, "topic" in refused.message) == (40, True)


def test_a_compacted_topic_stays_compacted() -> None:
    """Its log lacks offsets, which would count as damage in another log."""
    bench = Bench()
    bench.up(1)
    bench.topic("t", cleanup_policy="compact")
    refused = bench.alter("topic", "t", cleanup_policy="delete")
    assert (refused.error.code, "compact,delete" in refused.error.message) == (40, True)
    assert bench.alter("topic", "t", unset=("cleanup_policy",)).error.code == 40
    assert not bench.alter("topic", "t", cleanup_policy="compact,delete").error.code
    assert not bench.alter("topic", "t", cleanup_policy="compact").error.code


def test_a_cluster_default_must_not_contradict_a_topic() -> None:
    bench = Bench()
    bench.up(1)
    bench.topic("t", local_retention_ms="500")
    refused = bench.alter("broker", "", retention_ms="400").error
    assert refused.code == 40
    assert "topic t" in refused.message


# -- the log ---------------------------------------------------------------------------------------


def test_records_survive_their_bytes() -> None:
    records = [
        record_of(wire.NoOpRecord()),
        record_of(wire.TopicRecord(name="t", topic_id="x")),
        record_of(wire.ConfigRecord(resource_type="topic", name="a")),
    ]
    for record in records:
        assert decode_record(encode_record(record)) == record
    raw = encode_batch(records, 5)
    assert list(decode_batches(raw)) == list(enumerate(records))
    assert list(decode_batches(raw, 2)) == [(2, records[2])]
    damaged = raw[:-1] + bytes([raw[-1] ^ 1])
    with pytest.raises(errors.CorruptBatch):
        list(decode_batches(damaged))
    with pytest.raises(errors.CorruptLog):
        decode_record(b"\xff\xff")
    with pytest.raises(errors.NewerFormat):
        decode_record(b"")


def test_a_record_that_fits_nothing_is_named() -> None:
    image = MetadataImage()
    with pytest.raises(errors.CorruptLog, match="remove_topic at 7"):
        image.apply(7, record_of(wire.RemoveTopicRecord(topic_id="nope")))


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["up", "unclean", "fence", "beat", "create", "delete", "grow", "min"]),
        st.integers(1, 3),
        st.integers(0, 2),
    ),
    max_size=40,
)


@given(ACTIONS)
def test_replay_gives_the_same_image(actions: list[tuple[str, int, int]]) -> None:
    """controller/machine M1, metadata/image I1–I4: the invariants hold whatever happens, and a
    replay of the log gives the same image.
    """
    bench = Bench()
    for turn, (what, broker, n) in enumerate(actions):
        known = broker in bench.image.brokers
        name = f"t{n}"
        if what == "up":
            bench.register(broker, f"i{turn}-")
            bench.beat(broker)
        elif what == "unclean":
            bench.register(broker, f"i{turn}-", boot_id=f"boot{turn}")
        elif what == "fence" and known:
            bench.fence(broker)
        elif what == "beat" and known:
            bench.beat(broker, want_shutdown=bool(n == 2))
        elif what == "create":
            new = wire.NewTopic(name=name, partitions=2, replication_factor=broker)
            bench.create(new)
        elif what == "delete":
            bench.do(c.DeleteTopics(wire.DeleteTopicsRequest(names=[name])))
        elif what == "grow":
            wanted = wire.NewPartitions(name=name, total_count=n + 2)
            bench.do(c.CreatePartitions(wire.CreatePartitionsRequest(topics=[wanted])))
        elif what == "min":
            bench.alter("topic", name, min_insync_replicas=str(n + 1))
    replayed = Controller(bench.rules)
    if bench.log:
        for offset, record in decode_batches(encode_batch(bench.log, NOW)):
            replayed.apply(offset, record)
    assert snapshot(replayed.image) == snapshot(bench.image)
    assert list(replayed.leaderless) == list(bench.machine.leaderless)


def test_who_asks_again_to_create_a_topic_is_told_of_its_own() -> None:
    """The reply was lost.  The client sends the same request id again, and its own topic is no
    TOPIC_ALREADY_EXISTS for it.
    """
    bench = Bench()
    bench.up(1)

    def create(request_id: str, *names: str) -> list[wire.TopicResult]:
        request = wire.CreateTopicsRequest(request_id=request_id)
        for name in names:
            request.topics.add(name=name)
        bench.next_id += 1
        ids = tuple(f"{name}{bench.next_id}" for name in names)
        reply = bench.do(c.CreateTopics(request, ids))
        assert reply.metadata_offset == bench.image.offset
        return list(reply.results)

    taken = errors.TopicAlreadyExists.code
    assert [each.topic_id for each in create("r1", "a", "b")] == ["a1", "b1"]
    end = len(bench.log)
    assert [each.topic_id for each in create("r1", "a", "b")] == ["a1", "b1"]
    assert len(bench.log) == end
    for other in ("r2", ""):
        assert [each.error.code for each in create(other, "a")] == [taken]
    assert [each.topic_id for each in create("", "c")] == ["c5"]
    assert [each.error.code for each in create("", "c")] == [taken], "no id is no id of anybody's"
    bench.do(c.DeleteTopics(wire.DeleteTopicsRequest(names=["a"])))
    assert [each.topic_id for each in create("r1", "a", "b")] == ["a7", "b1"], "another one (L8)"
    with pytest.raises(errors.InvalidRequest):
        create("r" * 300, "d")
