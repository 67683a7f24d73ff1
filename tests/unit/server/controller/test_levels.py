"""The level of `pk.format`: who knows it, who may raise it (rule Q6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from pk import errors, formats
from pk.server.controller import commands as c
from pk.server.metadata import snapshot
from pk.server.metadata.image import MetadataImage
from pk.server.metadata.records import record_of
from pk.wire import pk_pb2 as wire
from tests.unit.server.controller.controller_bench import Bench

ALL_KNOW_2 = {2: 2, 3: 2}


def bench_of(knows: int = 2) -> Bench:
    """Controllers 1, 2, 3 vote; controller 1 leads and knows level `knows`."""
    bench = Bench()
    bench.machine.rules = replace(bench.rules, format_level=knows)
    voters = [wire.Voter(node_id=n, directory_id=f"v{n}", address=f"c{n}:1") for n in (1, 2, 3)]
    bench.machine.apply(len(bench.log), record_of(wire.VotersRecord(voters=voters)))
    bench.log.append(record_of(wire.VotersRecord(voters=voters)))
    return bench


def upgrade(
    bench: Bench, to: int = 0, voters: Mapping[int, int] = ALL_KNOW_2, *, dry: bool = False
) -> wire.UpgradeClusterReply:
    request = wire.UpgradeClusterRequest(to=to, validate_only=dry)
    reply: wire.UpgradeClusterReply = bench.do(c.UpgradeCluster(request, voters))
    return reply


def test_a_cluster_begins_at_level_1_and_a_node_that_says_nothing_knows_1() -> None:
    bench = bench_of()
    bench.register()
    assert (formats.LEVEL, bench.image.format_level) == (1, 1)
    assert bench.image.brokers[1].format_level == 1
    assert bench.log[-1].register_broker.format_level == 0


def test_the_level_rises_by_command_once_everybody_knows_it() -> None:
    bench = bench_of()
    bench.register(format_level=2)
    assert upgrade(bench, dry=True).level == 2
    assert bench.image.format_level == 1
    reply = upgrade(bench)
    assert (reply.before, reply.level) == (1, 2)
    assert reply.metadata_offset == bench.image.offset
    assert bench.image.format_level == 2
    end = len(bench.log)
    again = upgrade(bench, 2, {})  # raised twice, also while voters are away
    assert (again.before, again.level, len(bench.log)) == (2, 2, end)


@pytest.mark.parametrize(
    ("broker", "voters", "named"),
    [
        (1, ALL_KNOW_2, "broker 1 .knows 1"),
        (2, {2: 2, 3: 1}, "controller 3 .knows 1"),
        (2, {2: 2}, "controller 3 .has not fetched"),
    ],
)
def test_a_level_that_a_node_does_not_know_is_refused(
    broker: int, voters: Mapping[int, int], named: str
) -> None:
    """Also a broker that is away: it is registered, and comes back."""
    bench = bench_of()
    bench.register(format_level=broker)
    assert bench.image.brokers[1].fenced
    with pytest.raises(errors.UnsupportedFeature, match=named):
        upgrade(bench, 2, voters)
    assert bench.image.format_level == 1


def test_a_level_that_the_controller_does_not_know_and_a_lower_one_are_refused() -> None:
    bench = bench_of()
    with pytest.raises(errors.UnsupportedFeature, match="knows level 2"):
        upgrade(bench, 3, {2: 3, 3: 3})
    upgrade(bench)
    with pytest.raises(errors.InvalidRequest, match="never lowered"):
        upgrade(bench, 1)
    with pytest.raises(errors.InvalidRequest, match="never lowered"):
        upgrade(bench, -1)


def test_a_broker_of_an_older_build_cannot_join() -> None:
    bench = bench_of()
    bench.register(1, format_level=2)
    upgrade(bench)
    with pytest.raises(errors.NewerFormat, match="broker 2 knows 1"):
        bench.register(2)
    bench.register(3, format_level=3)
    with pytest.raises(errors.NewerFormat, match="broker 1 knows 1"):
        bench.register(1, "older")  # it was there, and was started with an older build


def test_a_registration_of_another_level_is_another_registration() -> None:
    """The stored level is that of the build that runs now."""
    bench = bench_of()
    first = bench.register(1).broker_epoch
    assert bench.register(1).broker_epoch == first
    assert bench.register(1, format_level=2).broker_epoch > first


def test_levels_are_in_snapshots() -> None:
    bench = bench_of()
    bench.register(1, format_level=2)
    upgrade(bench)
    copy = MetadataImage()
    for offset, record in snapshot.rows_of(bench.image):
        copy.apply(offset, record)
    assert copy == bench.image
    assert (copy.format_level, copy.brokers[1].format_level) == (2, 2)


def test_describe_names_every_node() -> None:
    bench = bench_of()
    bench.register(1, format_level=2)
    bench.register(5)
    reply = bench.do(c.DescribeCluster(wire.DescribeClusterRequest(), {3: 1}))
    assert (reply.level, reply.known, reply.controller_id) == (1, 2, 1)
    found = [(each.role, each.node_id, each.level) for each in reply.nodes]
    assert found == [
        ("broker", 1, 2),
        ("broker", 5, 1),
        ("controller", 1, 2),
        ("controller", 2, 0),
        ("controller", 3, 1),
    ]
