"""Partitions that move to other brokers (KIP-455), and brokers that are unregistered."""

from __future__ import annotations

import pytest

from pk import errors, limits
from pk.server.controller import commands as c
from pk.server.metadata.image import PartitionState
from pk.server.replica.leader import Leader
from pk.types import NONE, PartitionKey
from pk.wire import pk_pb2 as wire
from tests.unit.server.controller.controller_bench import Bench, alter_isr, item


def cluster(factor: int = 3, **configs: str) -> Bench:
    """Return six brokers, with topic t on brokers 1 and following, led by 1."""
    bench = Bench()
    bench.up(1, 2, 3, 4, 5, 6)
    bench.topic("t", 1, factor, **configs)
    assert bench.state("t").replicas == tuple(range(1, factor + 1))
    return bench


def reassign(
    bench: Bench,
    *replicas: int,
    cancel: bool = False,
    topic: str = "t",
    topic_id: str | None = None,
    expected: tuple[int, ...] = (),
    force: bool = False,
) -> int:
    """Ask for a reassignment; return the error's code, 0 = none."""
    request = wire.AlterReassignmentsRequest(force=force)
    request.reassignments.add(
        topic=topic, partition=0, replicas=replicas, cancel=cancel, expected=expected,
        topic_id=bench.image.topic_ids.get(topic, "") if topic_id is None else topic_id,
    )  # fmt: skip
    reply = bench.do(c.AlterReassignments(request, dict(bench.reports)))
    assert reply.metadata_offset == bench.image.offset
    code: int = reply.results[0].error.code
    return code


def joins(bench: Bench, broker: int) -> wire.AlterPartitionResult:
    state = bench.state("t")
    isr = [*state.isr, broker]
    result = alter_isr(bench, state.leader, item(bench, "t", isr))
    assert not result.HasField("error"), result
    return result


def under_way(bench: Bench) -> list[tuple[str, list[int], list[int], list[int]]]:
    reply = bench.do(c.ListReassignments(wire.ListReassignmentsRequest()))
    return [
        (r.topic, list(r.replicas), list(r.adding), list(r.removing)) for r in reply.reassignments
    ]


def test_a_partition_moves_when_all_new_replicas_are_in_sync() -> None:
    bench = cluster()
    assert reassign(bench, 4, 5, 1) == 0
    state = bench.state("t")
    assert (state.replicas, state.adding, state.removing) == ((4, 5, 1, 2, 3), (4, 5), (2, 3))
    assert (state.leader, state.isr, state.leader_epoch) == (1, (1, 2, 3), 0)
    assert under_way(bench) == [("t", [4, 5, 1, 2, 3], [4, 5], [2, 3])]
    joins(bench, 5)
    assert bench.state("t").removing == (2, 3)
    result = joins(bench, 4)
    state = bench.state("t")
    assert (state.replicas, state.adding, state.removing) == ((4, 5, 1), (), ())
    assert (state.leader, set(state.isr), state.leader_epoch) == (1, {1, 4, 5}, 1)
    assert (set(result.isr), result.leader, result.leader_epoch) == ({1, 4, 5}, 1, 1)
    assert under_way(bench) == []
    assert "t" not in {t.name for t, _, _ in bench.image.partitions_of(2)}
    assert [t.name for t, _, _ in bench.image.partitions_of(4)] == ["t"]


def test_a_leader_that_goes_hands_over_in_the_record_that_ends_it() -> None:
    bench = cluster(1)
    assert reassign(bench, 5, 6) == 0
    joins(bench, 6)
    end = len(bench.log)
    result = joins(bench, 5)
    assert len(bench.log) == end + 1
    state = bench.state("t")
    assert (state.replicas, state.leader, set(state.isr)) == ((5, 6), 5, {5, 6})
    assert (result.leader, result.leader_epoch) == (5, 1)
    assert result.leader_epoch == state.leader_epoch


def test_fewer_replicas_and_another_order_need_no_copying() -> None:
    bench = cluster()
    assert reassign(bench, 2, 3, 1) == 0
    assert (bench.state("t").replicas, bench.state("t").leader) == ((2, 3, 1), 1)
    assert reassign(bench, 2) == 0
    state = bench.state("t")
    assert (state.replicas, state.isr, state.leader, state.removing) == ((2,), (2,), 2, ())
    end = len(bench.log)
    assert reassign(bench, 2) == 0
    assert len(bench.log) == end, "it is so already"


def test_what_is_removed_stays_until_the_target_is_as_safe() -> None:
    """The target's in-sync replicas must reach min_insync_replicas before the old replicas
    leave.
    """
    bench = cluster(min_insync_replicas="2")
    alter_isr(bench, 1, item(bench, "t", [1, 3]))  # 2 is too slow
    assert reassign(bench, 1, 2) == 0
    assert (bench.state("t").replicas, bench.state("t").removing) == ((1, 2, 3), (3,))
    joins(bench, 2)
    state = bench.state("t")
    assert (state.replicas, set(state.isr), state.removing) == ((1, 2), {1, 2}, ())


def test_cancel_goes_back_to_the_original_replicas() -> None:
    bench = cluster()
    assert reassign(bench, cancel=True) == 85
    reassign(bench, 4, 5)
    joins(bench, 4)
    assert reassign(bench, cancel=True) == 0
    state = bench.state("t")
    assert (state.replicas, state.adding, state.removing) == ((1, 2, 3), (), ())
    assert (state.leader, state.isr, state.leader_epoch) == (1, (1, 2, 3), 1)


def test_only_who_goes_ends_the_leaders_epoch() -> None:
    """R2: the record that removes a replica ends the epoch, once; also when a target is given up
    for another one.
    """
    bench = cluster()
    epochs = []
    for target in ((1, 2, 3, 4), (1, 2, 3, 5), (1, 3, 2, 5), (1, 3, 2)):
        assert reassign(bench, *target) == 0
        assert bench.state("t").leader == 1
        epochs.append(bench.state("t").leader_epoch)
    assert epochs == [0, 1, 1, 2]


def test_what_a_replica_said_of_the_log_it_deleted_counts_for_nothing() -> None:
    """4 reports that it has everything.  Before the report arrives, 4 is removed, deletes its log,
    and is added again, under the same registration.  Its leader learns of both changes at once, and
    then gets the old report.
    """
    bench = cluster()
    assert reassign(bench, 1, 2, 3, 4) == 0
    said = bench.state("t").leader_epoch
    leader = _led(bench.state("t"))
    assert reassign(bench, cancel=True) == 0
    assert reassign(bench, 1, 2, 3, 4) == 0
    state = bench.state("t")
    if state.leader_epoch == leader.leader_epoch:
        leader.on_isr_committed(state.isr, state.replicas, state.partition_epoch)
    else:
        leader = _led(state)
    with pytest.raises(errors.FencedLeaderEpoch):
        leader.check_epoch(said)


def _led(state: PartitionState) -> Leader:
    """Return the leader of `state`, with ten records."""
    return Leader(
        node_id=state.leader,
        leader_epoch=state.leader_epoch,
        partition_epoch=state.partition_epoch,
        replicas=state.replicas,
        isr=state.isr,
        log_end=10,
        synced_end=10,
        high_watermark=10,
        min_insync_replicas=2,
        flush_on_ack=False,
        adding=state.adding,
    )


def test_a_new_target_is_compared_with_the_original_replicas() -> None:
    """Replicas that were being added for the old target leave; cancel still returns to the original
    three.
    """
    bench = cluster()
    reassign(bench, 4, 5, 6)
    joins(bench, 4)
    assert reassign(bench, 1, 2, 5) == 0
    state = bench.state("t")
    assert (state.replicas, state.adding, state.removing) == ((1, 2, 5, 3), (5,), (3,))
    assert set(state.isr) == {1, 2, 3}
    assert reassign(bench, cancel=True) == 0
    assert set(bench.state("t").replicas) == {1, 2, 3}


def test_nothing_may_leave_a_partition_without_a_leader_to_be() -> None:
    bench = cluster(1)
    reassign(bench, 4)
    joins(bench, 4)  # done: 4 alone
    assert bench.state("t").replicas == (4,)
    reassign(bench, 5, 6)
    joins(bench, 5)
    bench.fence(4)
    assert (bench.state("t").leader, bench.state("t").elr) == (5, ())
    assert reassign(bench, cancel=True) == 39, "5 holds what 4 may not"
    assert reassign(bench, 1) == 39
    bench.beat(4)
    joins(bench, 4)
    assert reassign(bench, cancel=True) == 0
    assert (bench.state("t").replicas, bench.state("t").leader) == ((4,), 4)


@pytest.mark.parametrize(("replicas", "code"), [((), 39), ((1, 1), 39), ((1, 9), 39), ((1, 4), 0)])
def test_targets(replicas: tuple[int, ...], code: int) -> None:
    bench = cluster()
    assert reassign(bench, *replicas) == code
    assert reassign(bench, 1, topic="nope", topic_id="x") == 3


def test_a_request_has_a_bound_and_names_each_partition_once() -> None:
    bench = cluster()
    request = wire.AlterReassignmentsRequest()
    for replicas in ((4, 1), (5, 1)):
        request.reassignments.add(topic="t", topic_id="id0", partition=0, replicas=replicas)
    reply = bench.do(c.AlterReassignments(request))
    assert [r.error.code for r in reply.results] == [0, 42]
    assert bench.state("t").adding == (4,)
    for _ in range(limits.METADATA_RECORDS_PER_APPEND_MAX):
        request.reassignments.add(topic="t", partition=0, replicas=[1])
    with pytest.raises(errors.InvalidRequest):
        bench.do(c.AlterReassignments(request))


def test_fencing_during_a_move_keeps_what_is_eligible() -> None:
    """Old and new replicas count together; after a failover of the leader the move continues."""
    bench = cluster(2, min_insync_replicas="2")
    reassign(bench, 3, 4)
    joins(bench, 3)
    bench.fence(1)
    state = bench.state("t")
    assert (state.leader, set(state.isr), state.elr) == (3, {2, 3}, ())
    bench.fence(2)
    assert (bench.state("t").isr, bench.state("t").elr) == ((3,), (2,))
    joins(bench, 4)
    state = bench.state("t")
    assert (state.replicas, set(state.isr), state.elr, state.leader) == ((3, 4), {3, 4}, (), 3)


def test_who_is_added_no_more_is_not_eligible_either() -> None:
    bench = cluster(2, min_insync_replicas="2")
    reassign(bench, 3, 4)
    joins(bench, 3)
    bench.fence(2)
    bench.fence(3)
    assert (bench.state("t").isr, bench.state("t").elr) == ((1,), (3,))
    assert reassign(bench, cancel=True, force=True) == 0
    state = bench.state("t")
    assert (state.replicas, state.isr, state.elr) == ((1, 2), (1,), ())


def test_a_move_waits_while_nobody_leads_and_ends_after() -> None:
    bench = cluster(1)
    reassign(bench, 2)
    bench.fence(1)
    assert (bench.state("t").leader, bench.state("t").elr) == (NONE, (1,))
    assert reassign(bench, cancel=True) == 0
    assert bench.state("t").replicas == (1,)
    reassign(bench, 2)
    bench.beat(1)
    joins(bench, 2)
    assert (bench.state("t").replicas, bench.state("t").leader) == ((2,), 2)


def test_an_election_that_brings_what_a_move_waits_for_ends_it() -> None:
    """The removed replicas do not return: the new leader never has another ISR to ask for, and
    would refuse acks=all because of replicas that are not wanted any more.
    """
    bench = cluster(3, min_insync_replicas="2")
    bench.fence(3)
    bench.fence(1)
    assert (bench.state("t").leader, bench.state("t").elr) == (2, (1,))
    assert reassign(bench, 1) == 0
    assert (bench.state("t").leader, bench.state("t").removing) == (2, (2, 3))
    bench.fence(2)
    bench.beat(1)
    state = bench.state("t")
    assert (state.leader, state.replicas, state.removing, state.leader_epoch) == (1, (1,), (), 3)


def test_no_cancel_drops_the_last_replica_that_has_everything() -> None:
    """No broker leads: 1 lost power and is only known to have been a member, 3 has it all."""
    bench = cluster(2, min_insync_replicas="2")
    reassign(bench, 3, 4)
    joins(bench, 3)
    bench.fence(2)
    bench.fence(3)
    bench.register(1, "again", boot_id="later")
    state = bench.state("t")
    assert (state.leader, state.isr, state.elr, state.last_known) == (NONE, (), (3,), (1,))
    assert reassign(bench, cancel=True, force=True) == 39
    assert bench.state("t") == state
    bench.beat(3)
    assert bench.state("t").leader == 3


def test_no_cancel_drops_whom_a_recovery_election_waits_for() -> None:
    """R3: the election compares the logs of all last-known members, so all of them are needed."""
    bench = cluster(2, min_insync_replicas="2")
    reassign(bench, 3, 4)
    joins(bench, 3)
    bench.fence(2)
    for broker in (3, 1):
        bench.register(broker, "again", boot_id="later")
    state = bench.state("t")
    assert (state.leader, state.isr, state.elr) == (NONE, (), ())
    assert set(state.last_known) == {1, 3}
    assert reassign(bench, cancel=True, force=True) == 39
    assert bench.state("t") == state


def test_partitions_added_during_a_move_get_the_targets_count() -> None:
    bench = cluster(2)
    reassign(bench, 4, 5)
    wanted = wire.NewPartitions(name="t", total_count=2)
    bench.do(c.CreatePartitions(wire.CreatePartitionsRequest(topics=[wanted])))
    assert len(bench.state("t", 1).replicas) == 2
    bench.do(c.DeleteTopics(wire.DeleteTopicsRequest(names=["t"])))
    assert under_way(bench) == []
    assert not list(bench.image.partitions_of(4))


# -- brokers that are gone for good ----------------------------------------------------------------


def unregister(bench: Bench, broker: int) -> None:
    bench.do(c.UnregisterBroker(wire.UnregisterBrokerRequest(broker_id=broker)))


def test_a_broker_is_forgotten_when_it_is_stopped_and_holds_nothing() -> None:
    bench = cluster(1)
    with pytest.raises(errors.BrokerNotRegistered):
        unregister(bench, 9)
    with pytest.raises(errors.InvalidRequest, match="alive"):
        unregister(bench, 6)
    bench.fence(6)
    unregister(bench, 6)
    assert 6 not in bench.image.brokers
    reassign(bench, 2)
    bench.fence(2)
    with pytest.raises(errors.InvalidRequest, match="t-0"):
        unregister(bench, 2)
    reassign(bench, cancel=True)
    unregister(bench, 2)
    assert bench.register(2, "new", boot_id="new").clean


# -- no move costs a copy (rule R8) ----------------------------------------------------------------


def leaves(bench: Bench, *brokers: int) -> None:
    state = bench.state("t")
    isr = [each for each in state.isr if each not in brokers]
    result = alter_isr(bench, state.leader, item(bench, "t", isr))
    assert not result.HasField("error"), result


def test_a_cancel_below_min_isr_is_refused_until_an_original_replica_is_in_sync() -> None:
    """2 and 3 lag, 4 joins, and acks=all continues with {1, 4}: only 1 and 4 have the newest
    records.
    """
    bench = cluster(3, min_insync_replicas="2")
    assert reassign(bench, 1, 4, 5) == 0
    leaves(bench, 2, 3)
    joins(bench, 4)
    state = bench.state("t")
    assert (set(state.isr), state.elr) == ({1, 4}, ())
    assert reassign(bench, cancel=True) == 19
    assert reassign(bench, 1, 2, 6) == 19, "another target takes 4 away, too"
    assert bench.state("t") == state
    joins(bench, 2)
    assert reassign(bench, cancel=True) == 0
    state = bench.state("t")
    assert (state.replicas, set(state.isr)) == ((1, 2, 3), {1, 2})


def test_a_replica_of_the_elr_is_a_copy_that_a_cancel_may_not_take_away() -> None:
    bench = cluster(3, min_insync_replicas="2")
    reassign(bench, 1, 4, 5)
    leaves(bench, 2, 3)
    joins(bench, 4)
    bench.fence(4)
    state = bench.state("t")
    assert (state.isr, state.elr) == ((1,), (4,))
    assert reassign(bench, cancel=True) == 19
    joins(bench, 3)
    assert reassign(bench, cancel=True) == 0
    assert set(bench.state("t").isr) == {1, 3}


def test_an_operator_may_force_a_cancel() -> None:
    bench = cluster(3, min_insync_replicas="2")
    reassign(bench, 1, 4, 5)
    leaves(bench, 2, 3)
    joins(bench, 4)
    assert reassign(bench, cancel=True, force=True) == 0
    state = bench.state("t")
    assert (state.replicas, state.isr) == ((1, 2, 3), (1,))


def test_a_smaller_target_ends_when_all_of_it_is_in_sync() -> None:
    """KAFKA-19975: {1, 2, 3} becomes {1, 2}, and 2 lags, although one in-sync replica would satisfy
    min ISR 1.
    """
    bench = cluster(3)
    leaves(bench, 2)
    assert reassign(bench, 1, 2) == 0
    state = bench.state("t")
    assert (state.replicas, state.removing, set(state.isr)) == ((1, 2, 3), (3,), {1, 3})
    joins(bench, 2)
    assert (bench.state("t").replicas, set(bench.state("t").isr)) == ((1, 2), {1, 2})


def test_an_operator_may_force_a_smaller_target() -> None:
    bench = cluster(3)
    leaves(bench, 2)
    assert reassign(bench, 1, 2, force=True) == 0
    assert (bench.state("t").replicas, bench.state("t").isr) == ((1, 2), (1,))


def test_replicas_that_are_added_are_not_required_before_they_are_in_sync() -> None:
    """1 -> 3 replicas with min ISR 2: acks=all continues while 2 and 3 copy, and needs two replicas
    afterwards.
    """
    bench = cluster(1, min_insync_replicas="2")
    assert reassign(bench, 1, 2, 3) == 0
    state = bench.state("t")
    leader = Leader(
        node_id=1, leader_epoch=0, partition_epoch=0, replicas=(1,), isr=(1,), log_end=10,
        synced_end=10, high_watermark=10, min_insync_replicas=2, flush_on_ack=False,
    )  # fmt: skip
    leader.on_isr_committed(state.isr, state.replicas, state.partition_epoch, 0, state.adding)
    assert leader.in_sync_required == 1
    leader.check_acks(-1)
    led = _led(state)
    assert led.in_sync_required == 1
    joins(bench, 2)
    bench.fence(2)
    state = bench.state("t")
    assert (state.isr, state.elr) == ((1,), ()), "the controller requires one, too"
    bench.beat(2)
    joins(bench, 2)
    joins(bench, 3)
    state = bench.state("t")
    assert (set(state.isr), state.adding) == ({1, 2, 3}, ())
    assert _led(state).in_sync_required == 2


# -- elections during a move (rule R9) -------------------------------------------------------------


def test_a_replica_that_only_copies_yet_is_not_elected() -> None:
    """Loss is allowed, and all former members are down: 4 has 1 % of the log."""
    bench = cluster(3, unclean_leader_election_enable="true")
    reassign(bench, 4, 5, 6)
    key = PartitionKey("id0", 0)
    for broker in (2, 3, 1):
        bench.fence(broker)
    assert bench.state("t").leader == NONE
    for broker in (4, 5, 6):
        bench.beat(broker, positions={key: (0, 10)})
    bench.recover(key, waited=True)
    assert bench.state("t").leader == NONE
    request = wire.ElectLeadersRequest(unclean=True)
    request.partitions.add(topic_id="id0", partition=0)
    reply = bench.do(c.ElectLeaders(request, dict(bench.reports)))
    assert reply.results[0].error.code == errors.EligibleLeadersNotAvailable.code
    bench.beat(2, positions={key: (0, 1_000)})
    bench.recover(key, waited=True)
    assert bench.state("t").leader == 2


def test_a_replica_that_was_in_the_isr_may_be_elected_while_it_is_being_added() -> None:
    bench = cluster(1, min_insync_replicas="2", unclean_leader_election_enable="true")
    reassign(bench, 2, 3)
    joins(bench, 2)
    bench.fence(1)
    assert (bench.state("t").leader, bench.state("t").isr) == (2, (2,))
    bench.register(2, "again", boot_id="later")
    assert bench.state("t").last_known == (2,)
    bench.beat(2)
    bench.recover(PartitionKey("id0", 0), waited=True)
    assert bench.state("t").leader == 2


# -- a move names what it moves (rule R10) ---------------------------------------------------------


def test_a_topic_that_was_created_again_is_not_moved_by_an_older_plan() -> None:
    bench = cluster()
    planned = bench.image.topic_ids["t"]
    bench.do(c.DeleteTopics(wire.DeleteTopicsRequest(names=["t"])))
    bench.topic("t", 1, 3)
    state = bench.state("t")
    assert reassign(bench, 4, 5, 6, topic_id=planned) == errors.UnknownTopicId.code
    assert reassign(bench, 4, 5, 6, topic_id="") == errors.InvalidRequest.code
    assert bench.state("t") == state
    bench.topic("u", 1, 3)
    other = bench.image.topic_ids["u"]
    assert reassign(bench, 4, 5, 6, topic_id=other) == errors.UnknownTopicId.code
    assert reassign(bench, 4, 5, 6) == 0
    assert reassign(bench, cancel=True, topic_id=planned) == errors.UnknownTopicId.code


def test_a_plan_that_expects_other_replicas_is_refused() -> None:
    """Two plans would undo each other: the later one was made for replicas that have changed
    since.
    """
    bench = cluster()
    assert reassign(bench, 4, 2, 3, expected=(1, 2, 3)) == 0
    state = bench.state("t")
    assert reassign(bench, 5, 2, 3, expected=(1, 2, 3)) == 39
    assert bench.state("t") == state
    assert reassign(bench, 5, 2, 3, expected=(4, 2, 3, 1)) == 0
