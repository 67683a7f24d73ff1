"""Groups that show the progress of a streaming query (rule S1)."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pk import errors
from pk.server.groups import commands as c
from pk.types import PartitionKey
from pk.wire import pk_pb2 as wire
from tests.unit.server.groups.group_bench import ID, KEYS, Bench, asked


def publish(
    bench: Bench, run: str, offsets: Mapping[PartitionKey, int], *, first: bool = False
) -> None:
    request = wire.OffsetCommitRequest(
        member=asked(""), query=wire.QueryRun(run_id=run, first=first)
    )
    for key, offset in offsets.items():
        request.topics.add(topic_id=key.topic_id, partitions=[key.partition], offsets=[offset])
    bench.run(c.CommitOffsets(request, bench.image))


def test_a_query_commits_and_is_described_as_one() -> None:
    bench = Bench()
    publish(bench, "r1", {KEYS[0]: 5}, first=True)
    bench.now += 7
    publish(bench, "r1", {KEYS[0]: 8, KEYS[1]: 2})
    assert bench.fetched() == {KEYS[0]: 8, KEYS[1]: 2}
    found = bench.run(c.DescribeGroup(ID))
    assert (found.kind, found.query_run, found.committed_ms) == ("query", "r1", bench.now)
    (listed,) = bench.run(c.ListGroups(wire.ListGroupsRequest()))
    assert (listed.kind, listed.state) == ("query", "Empty")


def test_the_newest_run_has_the_group() -> None:
    """A restart goes on at once; a run that still lives is refused from then on."""
    bench = Bench()
    publish(bench, "r1", {KEYS[0]: 5}, first=True)
    publish(bench, "r2", {KEYS[0]: 4}, first=True)
    with pytest.raises(errors.FencedInstanceId):
        publish(bench, "r1", {KEYS[0]: 9})
    publish(bench, "r2", {KEYS[0]: 6})
    assert bench.fetched() == {KEYS[0]: 6}


def test_consumers_and_queries_do_not_share_a_group() -> None:
    bench = Bench()
    publish(bench, "r1", {KEYS[0]: 5}, first=True)
    with pytest.raises(errors.InconsistentGroupProtocol):
        bench.join("a")
    with pytest.raises(errors.InconsistentGroupProtocol):
        bench.commit({KEYS[0]: 1})
    bench.run(c.DeleteGroup(ID))
    bench.stable("a", a=KEYS[:1])
    with pytest.raises(errors.NonEmptyGroup):
        publish(bench, "r1", {KEYS[0]: 5}, first=True)
    bench.commit({KEYS[0]: 1}, "a", bench.group.generation)
    bench.leave("a")
    with pytest.raises(errors.InconsistentGroupProtocol):
        publish(bench, "r1", {KEYS[0]: 5}, first=True)
    assert bench.fetched() == {KEYS[0]: 1}


@pytest.mark.parametrize("run", ["", "r" * 65])
def test_a_run_has_an_id(run: str) -> None:
    with pytest.raises(errors.InvalidRequest):
        publish(Bench(), run, {KEYS[0]: 1}, first=True)


def test_a_progress_of_which_nothing_is_accepted_makes_no_group() -> None:
    bench = Bench()
    publish(bench, "r1", {PartitionKey("00000000-0000-0000-0000-0000000000ff", 0): 1}, first=True)
    assert ID not in bench.machine.groups
