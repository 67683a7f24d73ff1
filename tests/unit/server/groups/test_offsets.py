"""Committed offsets: who may commit, what a fetch returns, what expires (rules X12, L8)."""

from __future__ import annotations

import pytest

from pk import errors, limits
from pk.server.groups import commands as c
from pk.server.groups.state import GroupState
from pk.types import NONE, PartitionKey
from pk.wire import pk_pb2 as wire
from tests.unit.server.groups.group_bench import (
    DAY_MS,
    ID,
    KEYS,
    OTHER_ID,
    RULES,
    Bench,
    asked,
    image_of,
)

GONE = PartitionKey("00000000-0000-0000-0000-0000000000ff", 0)


def test_a_member_commits_what_it_owns() -> None:
    bench = Bench()
    generation = bench.stable("a", a=KEYS[:2])
    assert bench.commit({KEYS[0]: 5, KEYS[1]: 7}, "a", generation) == {}
    assert bench.fetched() == {KEYS[0]: 5, KEYS[1]: 7}
    assert bench.fetched(KEYS[1], KEYS[2]) == {KEYS[1]: 7}


def test_a_member_may_commit_a_lower_offset() -> None:
    bench = Bench()
    generation = bench.stable("a", a=KEYS[:1])
    bench.commit({KEYS[0]: 5}, "a", generation)
    bench.commit({KEYS[0]: 3}, "a", generation)
    assert bench.fetched() == {KEYS[0]: 3}


def test_a_partition_of_another_member_is_refused_and_the_others_are_committed() -> None:
    bench = Bench()
    generation = bench.stable("a", "b", a=[KEYS[0]], b=[KEYS[1]])
    refused = bench.commit({KEYS[0]: 5, KEYS[1]: 9, KEYS[2]: 9}, "a", generation)
    assert refused == dict.fromkeys(KEYS[1:3], errors.NotPartitionOwner.code)
    assert bench.fetched() == {KEYS[0]: 5}


def test_a_zombie_does_not_commit_after_the_rebalance() -> None:
    """Its session ended, or it missed a generation; the new owner's commit stays."""
    bench = Bench()
    generation = bench.stable("a", "b", a=[KEYS[0]], b=[KEYS[1]])
    bench.expire("a")
    bench.stable("b", b=KEYS[:2])
    assert bench.commit({KEYS[0]: 9}, "b", bench.group.generation) == {}
    with pytest.raises(errors.UnknownMemberId):
        bench.commit({KEYS[0]: 4}, "a", generation)
    with pytest.raises(errors.IllegalGeneration):
        bench.commit({KEYS[0]: 4}, "b", generation)
    assert bench.fetched() == {KEYS[0]: 9}


def test_a_partition_stays_its_former_owners_until_another_member_gets_it() -> None:
    """KIP-1251: a cooperative member commits what it gives up after it has learnt so."""
    bench = Bench()
    bench.stable("a", "b", a=KEYS[:2], b=KEYS[2:])
    generation = bench.stable("a", "b", a=KEYS[:1], b=KEYS[2:])
    assert bench.commit({KEYS[1]: 6}, "a", generation) == {}
    assert bench.commit({KEYS[1]: 7}, "b", generation) == {KEYS[1]: errors.NotPartitionOwner.code}
    generation = bench.stable("a", "b", a=KEYS[:1], b=KEYS[2:])
    assert bench.commit({KEYS[1]: 7}, "a", generation) == {}, "no member owns the partition"
    generation = bench.stable("a", "b", a=KEYS[:1], b=KEYS[1:])
    assert bench.commit({KEYS[1]: 8}, "a", generation) == {KEYS[1]: errors.NotPartitionOwner.code}
    assert bench.fetched(KEYS[1]) == {KEYS[1]: 7}


def test_members_commit_while_others_join_and_not_while_the_leader_assigns() -> None:
    bench = Bench()
    generation = bench.stable("a", "b")
    bench.join("b", generation)
    assert bench.commit({KEYS[0]: 5}, "a", generation) == {}
    bench.join("a", generation)
    assert bench.group.state is GroupState.COMPLETING_REBALANCE
    with pytest.raises(errors.RebalanceInProgress):
        bench.commit({KEYS[0]: 6}, "a", generation + 1)


def test_a_client_without_a_member_commits_only_to_a_group_without_members() -> None:
    bench = Bench()
    assert bench.commit({KEYS[0]: 5}) == {}
    assert bench.group.state is GroupState.EMPTY
    bench.stable("a")
    with pytest.raises(errors.NonEmptyGroup, match="1 members"):
        bench.commit({KEYS[0]: 0})
    assert bench.fetched() == {KEYS[0]: 5}


def test_a_commit_that_names_a_generation_and_no_member_is_no_tool() -> None:
    """A consumer that has lost its member id: the group is empty, the offset stays."""
    bench = Bench()
    generation = bench.stable("a", a=KEYS[:1])
    bench.commit({KEYS[0]: 9}, "a", generation)
    bench.leave("a")
    for named, instance in ((generation, ""), (generation + 1, ""), (NONE, "i")):
        with pytest.raises(errors.UnknownMemberId):
            bench.commit({KEYS[0]: 4}, "", named, instance=instance)
    assert bench.fetched() == {KEYS[0]: 9}
    assert bench.commit({KEYS[0]: 4}) == {}, "a tool"


@pytest.mark.parametrize("member", ["a", ""])
def test_a_delayed_commit_does_not_move_an_offset_back(member: str) -> None:
    """groups/offsets O5: its request waited in a broken connection meanwhile."""
    bench = Bench()
    generation = bench.stable("a", a=KEYS[:2]) if member else NONE
    assert bench.commit({KEYS[0]: 9}, member, generation, sequence=(7, 2)) == {}
    refused = bench.commit({KEYS[0]: 5, KEYS[1]: 5}, member, generation, sequence=(7, 1))
    assert refused == {KEYS[0]: errors.StaleOffsetCommit.code}
    assert bench.fetched() == {KEYS[0]: 9, KEYS[1]: 5}
    assert bench.commit({KEYS[0]: 9}, member, generation, sequence=(7, 2)) == {}, "it is repeated"
    assert bench.commit({KEYS[0]: 5}, member, generation, sequence=(8, 1)) == {}, "of another one"
    assert bench.commit({KEYS[0]: 3}, member, generation, sequence=(8, 2)) == {}, "a seek"


def test_what_is_wrong_in_a_commit() -> None:
    bench = Bench()
    refused = bench.commit({KEYS[0]: -1, GONE: 1, PartitionKey(OTHER_ID, 1): 1})
    assert refused == {
        KEYS[0]: errors.InvalidRequest.code,
        GONE: errors.UnknownTopicId.code,
        PartitionKey(OTHER_ID, 1): errors.UnknownTopicOrPartition.code,
    }
    assert ID not in bench.machine.groups
    assert bench.commit({KEYS[0]: 1}, metadata="é" * 10) == {}
    assert bench.commit({KEYS[0]: 1}, metadata="é" * 11) == {
        KEYS[0]: errors.OffsetMetadataTooLarge.code
    }
    request = wire.OffsetCommitRequest(member=asked(""))
    request.topics.add(topic_id=KEYS[0].topic_id, partitions=[0, 1], offsets=[1])
    with pytest.raises(errors.InvalidRequest, match="differ in length"):
        bench.run(c.CommitOffsets(request, bench.image))
    size = limits.OFFSETS_PER_REQUEST_MAX + 1
    request.topics[0].partitions[:] = range(size)
    with pytest.raises(errors.InvalidRequest, match="in parts"):
        bench.run(c.CommitOffsets(request, bench.image))


def test_the_last_of_two_offsets_of_a_partition_in_one_commit_counts() -> None:
    bench = Bench()
    request = wire.OffsetCommitRequest(member=asked(""))
    request.topics.add(topic_id=KEYS[0].topic_id, partitions=[0, 0], offsets=[1, 2])
    bench.run(c.CommitOffsets(request, bench.image))
    assert bench.fetched() == {KEYS[0]: 2}


def test_an_unknown_group_has_no_offsets() -> None:
    bench = Bench()
    assert bench.fetched() == {}
    with pytest.raises(errors.NotCoordinator):
        bench.fetched(group="another")


def test_offsets_expire_after_the_retention_of_an_empty_group() -> None:
    bench = Bench()
    generation = bench.stable("a", a=KEYS[:1])
    bench.commit({KEYS[0]: 5}, "a", generation)
    bench.now += 30 * DAY_MS
    assert bench.expire_offsets().written == 0, "a member subscribes to the topic"
    bench.leave("a")
    bench.now += 7 * DAY_MS - 1
    assert bench.expire_offsets().written == 0
    bench.now += 1
    assert bench.expire_offsets().written == 2
    assert dict(bench.machine.groups) == {}


def test_a_late_commit_keeps_an_offset_and_its_group() -> None:
    bench = Bench()
    bench.commit({KEYS[0]: 5})
    bench.now += 6 * DAY_MS
    bench.commit({KEYS[1]: 5})
    bench.now += DAY_MS
    assert bench.expire_offsets().written == 1
    assert bench.fetched() == {KEYS[1]: 5}


def test_offsets_of_topics_without_subscribers_expire_in_a_group_with_members() -> None:
    """KIP-496."""
    bench = Bench()
    other = PartitionKey(OTHER_ID, 0)
    bench.commit({KEYS[0]: 5, other: 6})
    bench.stable("a")
    bench.now += 7 * DAY_MS
    assert bench.expire_offsets().written == 1
    assert bench.fetched() == {KEYS[0]: 5}


def test_offsets_of_a_deleted_topic_go_at_the_second_look() -> None:
    bench = Bench()
    bench.commit({KEYS[0]: 5, PartitionKey(OTHER_ID, 0): 6})
    bench.image = image_of(u=(OTHER_ID, 1))
    first = bench.expire_offsets()
    assert (first.written, first.absent) == (0, {KEYS[0].topic_id})
    assert bench.expire_offsets(OTHER_ID, *first.absent).written == 1
    assert bench.fetched() == {PartitionKey(OTHER_ID, 0): 6}


def test_a_group_with_members_is_not_deleted() -> None:
    bench = Bench()
    bench.commit({KEYS[0]: 5})
    bench.stable("a")
    with pytest.raises(errors.NonEmptyGroup):
        bench.run(c.DeleteGroup(ID))
    bench.leave("a")
    assert bench.run(c.DeleteGroup(ID))
    assert dict(bench.machine.groups) == {}
    with pytest.raises(errors.GroupIdNotFound):
        bench.run(c.DeleteGroup(ID))


def test_a_large_group_is_deleted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.commit(dict.fromkeys(KEYS, 1))
    monkeypatch.setattr(c, "EXPIRE_MAX", 3)
    assert not bench.run(c.DeleteGroup(ID))
    assert bench.run(c.DeleteGroup(ID))
    assert dict(bench.machine.groups) == {}


def test_offsets_are_deleted_unless_a_member_subscribes() -> None:
    bench = Bench()
    other = PartitionKey(OTHER_ID, 0)
    bench.commit({KEYS[0]: 5, other: 6})
    bench.stable("a")
    request = wire.DeleteOffsetsRequest(group_id=ID)
    for key in (KEYS[0], other):
        request.topics.add(topic_id=key.topic_id, partitions=[key.partition])
    reply = bench.run(c.DeleteOffsets(request, bench.image))
    assert [each.error.code for each in reply.refused] == [errors.GroupSubscribedToTopic.code]
    assert bench.fetched() == {KEYS[0]: 5}


def test_a_deletion_of_too_many_offsets_is_refused_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.commit({KEYS[0]: 5, KEYS[1]: 6})
    monkeypatch.setattr(limits, "OFFSETS_PER_REQUEST_MAX", 1)
    request = wire.DeleteOffsetsRequest(group_id=ID)
    request.topics.add(topic_id=KEYS[0].topic_id, partitions=[0, 1])
    with pytest.raises(errors.InvalidRequest, match="in parts"):
        bench.run(c.DeleteOffsets(request, bench.image))
    monkeypatch.undo()
    assert bench.fetched() == {KEYS[0]: 5, KEYS[1]: 6}


def test_groups_are_listed_and_described() -> None:
    bench = Bench(RULES)
    bench.stable("a", a=KEYS[:2])
    (listed,) = bench.run(c.ListGroups(wire.ListGroupsRequest(states=["Stable"])))
    assert (listed.group_id, listed.state, listed.members) == (ID, "Stable", 1)
    assert bench.run(c.ListGroups(wire.ListGroupsRequest(states=["Empty"]))) == ()
    with pytest.raises(errors.InvalidRequest, match="no state Dead"):
        bench.run(c.ListGroups(wire.ListGroupsRequest(states=["Dead"])))
    found = bench.run(c.DescribeGroup(ID))
    (member,) = found.members
    assert (found.state, found.assignor, found.leader) == ("Stable", "range", "a")
    assert (member.client_id, list(member.topics)) == ("client-a", ["t"])
    assert [list(each.partitions) for each in member.partitions] == [[0, 1]]
