"""The directories of replicas in partition records (rule R11), and what a missing one costs."""

from __future__ import annotations

from typing import Any

from pk import errors
from pk.server.controller import commands as c
from pk.server.metadata.image import MetadataImage
from pk.server.metadata.snapshot import rows_of
from pk.types import NONE, PartitionKey
from pk.wire import pk_pb2 as wire
from tests.unit.server.controller.controller_bench import Bench, alter_isr, item

A, B = "dir-a", "dir-b"
ALL = [PartitionKey("id0", number) for number in range(3)]


def names(bench: Bench, broker: int, *found: tuple[int, str]) -> None:
    """A heartbeat says in which directories replicas of topic t lie."""
    said = [
        wire.ReplicaDirectory(topic_id="id0", partition=number, directory_id=directory)
        for number, directory in found
    ]
    bench.beat(broker, directories=said)


def cluster(*, named: bool = True) -> Bench:
    """Broker 1 with two directories; t-0 lies in A, t-1 in B, and t-2 is not named yet."""
    bench = Bench()
    bench.register(1, directory_ids=[A, B])
    bench.beat(1)
    bench.up(2, 3)
    bench.topic("t", 3, 3, min_insync_replicas="2")
    if named:
        names(bench, 1, (0, A), (1, B))
    return bench


def test_a_broker_with_one_directory_has_it_named_at_once() -> None:
    bench = cluster(named=False)
    state = bench.state("t")
    assert [state.directory_of(member) for member in (1, 2, 3)] == ["", "dir2", "dir3"]
    assert state.directory_of(9) == ""


def test_the_directory_that_a_broker_chose_is_recorded_once() -> None:
    bench = cluster()
    assert [bench.state("t", n).directory_of(1) for n in range(3)] == [A, B, ""]
    assert [bench.state("t", n).directory_of(2) for n in range(3)] == ["dir2"] * 3
    end = len(bench.log)
    names(bench, 1, (0, A), (1, B))
    names(bench, 1, (0, "elsewhere"), (7, A))
    names(bench, 2, (0, A))
    assert len(bench.log) == end, "it is so already, or no such directory is registered"
    replayed = MetadataImage()
    for offset, record in rows_of(bench.image):
        replayed.apply(offset, record)
    assert replayed == bench.image


def test_a_missing_directory_costs_the_replicas_that_lay_there() -> None:
    """Its disk died, and the process was started again in the same boot.  2 leads and 3 lags."""
    bench = cluster()
    for number in range(3):
        state = bench.state("t", number)
        isr = [each for each in state.isr if each != 3 or state.leader == 3]
        if state.leader == 3:
            isr = [1, 3]
        alter_isr(bench, state.leader, item(bench, "t", isr, number))
    assert not bench.register(1, "again", directory_ids=[B]).clean
    found = [bench.state("t", number) for number in range(3)]
    assert [state.elr for state in found] == [(), (1,), ()]
    assert [state.last_known for state in found] == [(1,), (), (1,)]


def test_the_other_replicas_lead_again_without_an_unclean_election() -> None:
    """RF 1: what lies in B leads again when its broker is back; what lay in A waits for it."""
    bench = Bench()
    bench.register(1, directory_ids=[A, B])
    bench.beat(1)
    bench.topic("t", 3, 1)
    names(bench, 1, (0, A), (1, B))
    bench.register(1, "again", directory_ids=[B])
    found = [bench.state("t", number) for number in range(3)]
    assert [state.elr for state in found] == [(), (1,), ()]
    assert [state.last_known for state in found] == [(1,), (), (1,)]
    bench.beat(1, offline=(ALL[0],))
    state = bench.state("t", 1)
    assert (state.leader, state.isr, state.unclean) == (1, (1,), False)
    assert bench.state("t", 0).leader == NONE


def test_no_directory_survives_an_unclean_start() -> None:
    bench = Bench()
    bench.register(1, directory_ids=[A, B])
    bench.beat(1)
    bench.topic("t", 3, 1)
    names(bench, 1, (0, A), (1, B), (2, B))
    bench.register(1, "again", directory_ids=[B], boot_id="later")
    assert [bench.state("t", number).elr for number in range(3)] == [(), (), ()]


def test_a_clean_shutdown_counts_for_the_directories_that_are_there() -> None:
    bench = Bench()
    bench.register(1, directory_ids=[A, B])
    bench.beat(1)
    bench.topic("t", 3, 1)
    names(bench, 1, (0, A), (1, B), (2, B))
    epoch = bench.image.brokers[1].broker_epoch
    given: dict[str, Any] = {"clean_shutdown": True, "previous_broker_epoch": epoch}
    bench.register(1, "again", directory_ids=[B], boot_id="later", **given)
    assert [bench.state("t", number).elr for number in range(3)] == [(), (1,), (1,)]


def test_a_replica_in_an_unknown_directory_joins_once_its_new_one_is_named() -> None:
    """The record says A, which is gone; the log was begun again in B.  Were B lost before it is
    named, the replica would count as in A."""
    bench = cluster()
    bench.register(1, "again", directory_ids=[B])
    bench.beat(1)
    state = bench.state("t", 0)
    assert state.directory_of(1) == A
    result = alter_isr(bench, state.leader, item(bench, "t", [*state.isr, 1]))
    assert result.error.code == errors.IneligibleReplica.code
    names(bench, 1, (0, B))
    state = bench.state("t", 0)
    assert state.directory_of(1) == B
    result = alter_isr(bench, state.leader, item(bench, "t", [*state.isr, 1]))
    assert not result.HasField("error"), result
    bench.register(1, "third", directory_ids=["dir-c"])
    assert 1 not in bench.state("t", 0).isr


def test_a_reassignment_keeps_the_names_beside_their_replicas() -> None:
    bench = cluster()
    bench.up(4)
    request = wire.AlterReassignmentsRequest()
    request.reassignments.add(topic="t", topic_id="id0", partition=0, replicas=[4, 1, 2])
    bench.do(c.AlterReassignments(request, dict(bench.reports)))
    state = bench.state("t")
    assert [state.directory_of(each) for each in (4, 1, 2, 3)] == ["dir4", A, "dir2", "dir3"]
    request.reassignments[0].replicas[:] = [2, 1, 3]
    bench.do(c.AlterReassignments(request, dict(bench.reports)))
    state = bench.state("t")
    assert (state.replicas, state.directories) == ((2, 1, 3), ("dir2", A, "dir3"))
