"""Elections, and the changes of ISR, ELR and last-known members: KIP-966 case by case, and
rule R3.
"""

from __future__ import annotations

from typing import Any

import pytest

from pk.effects import Publish
from pk.server.controller import commands as c
from pk.server.controller.batched_decision import UNCLEAN_ELECTION, BatchedDecision
from pk.types import NONE, PartitionKey
from pk.wire import pk_pb2 as wire
from tests.unit.server.controller.controller_bench import Bench, alter_isr, item

KEY = PartitionKey("id0", 0)


def three(min_isr: int = 2, **configs: str) -> Bench:
    """One partition on brokers 1, 2 and 3, led by 1."""
    bench = Bench()
    bench.up(1, 2, 3)
    bench.topic("t", 1, 3, min_insync_replicas=str(min_isr), **configs)
    assert bench.state("t").replicas == (1, 2, 3)
    return bench


def unclean(bench: Bench, broker: int, **more: Any) -> None:
    """The broker lost power and registers again; it is not unfenced yet."""
    bench.register(broker, "again", **{"boot_id": f"later{broker}", **more})


#: min ISR; what happens, F = fenced, L = lost power, B = beats, S = shrunk by the leader, G = grown
#: by the leader, D = clean stop and start; then leader, ISR, ELR, last-known, whether unclean.
HISTORIES = [
    (2, "F1", 2, (2, 3), (), (), False),
    (2, "F1 F2", 3, (3,), (2,), (), False),
    (2, "F1 F2 F3", NONE, (), (2, 3), (), False),
    (2, "F1 F2 F3 B2", 2, (2,), (3,), (), False),
    (2, "F1 F2 F3 B1", NONE, (), (2, 3), (), False),  # 1 left before the last commits
    (2, "F1 F2 F3 B1 B3", 3, (3,), (2,), (), False),
    (2, "F1 F2 F3 B2 B1 G1", 2, (2, 1), (), (), False),  # large enough: 3 is forgotten
    (2, "S3", 1, (1, 2), (), (), False),
    # a slow member that leaves an ISR below min ISR stays eligible
    (2, "S3 S2", 1, (1,), (2,), (), False),
    (2, "S3 S2 F1 B1", 2, (2,), (1,), (), False),
    (2, "S3 S2 G2", 1, (1, 2), (), (), False),
    (2, "S3 S2 L1 B1", 2, (2,), (), (1,), False),
    (2, "S3 S2 L2 B2", 1, (1,), (), (2,), False),
    (2, "S3 S2 L2 B2 G2", 1, (1, 2), (), (), False),
    # 3 has every record: no other replica may lead
    (2, "F1 F2 F3 L2 B2", NONE, (), (3,), (2,), False),
    (2, "F1 F2 F3 L2 B2 B3", 3, (3,), (), (2,), False),
    (2, "D1 D2 L3 B3 B1 B2", 2, (2,), (), (3,), False),  # two clean stops and an unclean one
    (2, "F3 F1 F2 D1 D2 L3 B3", NONE, (), (1, 2), (), False),
    (2, "F3 F1 F2 D1 D2 L3 B3 B2", 2, (2,), (1,), (), False),
    (1, "F1 F2 F3", NONE, (), (3,), (), False),
    (1, "F1 F2 F3 B1 B2", NONE, (), (3,), (), False),
    (1, "F1 F2 L3 B1 B2", NONE, (), (), (3,), False),  # the last member lost power
    (1, "F1 F2 L3 B1 B2 B3", 3, (3,), (), (), True),  # alone: at once, and marked
    (3, "F1", 2, (2, 3), (1,), (), False),
    (3, "F1 L2 B2 B1", 3, (3,), (1,), (2,), False),
    (3, "F1 L2 L3 B1 B2 B3", 1, (1,), (), (2, 3), False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("min_isr", "steps", "leader", "isr", "elr", "last_known", "is_unclean"), HISTORIES
)
def test_the_table_of_histories(
    min_isr: int,
    steps: str,
    leader: int,
    isr: tuple[int, ...],
    elr: tuple[int, ...],
    last_known: tuple[int, ...],
    is_unclean: bool,
) -> None:
    bench = three(min_isr)
    for step in steps.split():
        what, broker = step[0], int(step[1])
        state = bench.state("t")
        if what == "F":
            bench.fence(broker)
        elif what == "L":
            unclean(bench, broker)
        elif what == "B":
            bench.beat(broker)
        elif what == "D":
            bench.register(broker, "restarted")
        else:
            members = [member for member in state.isr if member != broker]
            wanted = [*members, broker] if what == "G" else members
            result = alter_isr(bench, state.leader, item(bench, "t", wanted))
            assert not result.HasField("error"), result
    state = bench.state("t")
    assert (state.leader, state.isr, state.unclean) == (leader, isr, is_unclean)
    assert (set(state.elr), set(state.last_known)) == (set(elr), set(last_known))


# -- recovery elections with several members (R3) --------------------------------------------------


def all_lost(min_isr: int = 2, **configs: str) -> Bench:
    """All brokers lost power and register again; 2 and 3 are the last known."""
    bench = three(min_isr, **configs)
    for broker in (1, 2, 3):
        bench.fence(broker)
    for broker in (1, 2, 3):
        unclean(bench, broker)
    assert set(bench.state("t").last_known) == {2, 3}
    return bench


def asked(reply: wire.BrokerHeartbeatReply) -> list[PartitionKey]:
    return [PartitionKey(each.topic_id, each.partition) for each in reply.report_positions]


@pytest.mark.parametrize(
    ("two", "three", "elected"),
    [
        ((4, 100), (4, 99), 2), ((4, 99), (4, 100), 3), ((3, 200), (4, 1), 3),
        ((4, 1), (3, 200), 2), ((4, 5), (4, 5), 2), ((-1, 0), (0, 1), 3),
        # An empty log that ends above all others: its records were deleted, and their offsets are
        # used.
        ((5, 500), (-1, 1000), 3), ((-1, 1000), (5, 500), 2), ((-1, 1000), (5, 1000), 3),
        ((4, 1001), (-1, 1000), 2), ((-1, 900), (-1, 1000), 3), ((-1, 1000), (-1, 1000), 2),
    ],
)  # fmt: skip
def test_the_greatest_of_all_last_known_members_is_elected(
    two: tuple[int, int], three: tuple[int, int], elected: int
) -> None:
    bench = all_lost()
    assert asked(bench.beat(1)) == [], "1 is not among the last known"
    assert asked(bench.beat(2)) == [KEY]
    assert asked(bench.beat(2, positions={KEY: two})) == [], "it is known"
    assert bench.state("t").leader == NONE, "3 has not said how far it is"
    assert asked(bench.beat(3)) == [KEY]
    bench.beat(3, positions={KEY: three})
    state = bench.state("t")
    assert (state.leader, state.isr, state.unclean) == (elected, (elected,), True)
    published = [e for e in bench.effects if isinstance(e, Publish) and e.name == UNCLEAN_ELECTION]
    (loss,) = published
    assert loss.value["positions"] == {"2": two, "3": three}
    assert (loss.value["leader"], loss.value["topic"]) == (elected, "t")


def test_one_of_three_that_was_begun_anew_above_the_greatest_is_elected() -> None:
    """Its end need not be above every log: records beyond it that an older epoch has do not belong
    to the newest history.
    """
    bench = three(3)
    for broker in (1, 2, 3):
        unclean(bench, broker)
        bench.beat(broker)
    assert set(bench.state("t").last_known) == {1, 2, 3}
    for broker, position in ((1, (4, 1200)), (2, (5, 500)), (3, (-1, 1000))):
        bench.beat(broker, positions={KEY: position})
    assert bench.state("t").leader == 3


def test_who_is_not_last_known_may_have_been_begun_anew_in_a_history_given_up() -> None:
    bench = three(1, unclean_leader_election_enable="true")
    for broker in (1, 2, 3):
        bench.fence(broker)
    unclean(bench, 3)
    assert bench.state("t").last_known == (3,)
    for broker, position in ((1, (-1, 1000)), (2, (6, 900))):
        unclean(bench, broker)
        bench.beat(broker, unclean=frozenset([KEY]))
        bench.beat(broker, positions={KEY: position})
    assert bench.recover(KEY, waited=True) == 1
    assert bench.state("t").leader == 2


def test_a_position_ends_with_the_registration_that_gave_it() -> None:
    bench = all_lost()
    bench.beat(2)
    bench.beat(2, positions={KEY: (4, 40)})
    unclean(bench, 2, incarnation_id="third", directory_ids=["dir2", "dir2b"])
    bench.beat(3)
    bench.beat(3, positions={KEY: (4, 50)})
    assert bench.state("t").leader == NONE, "2 may have less by now"
    assert asked(bench.beat(2)) == [KEY]
    bench.beat(2, positions={KEY: (4, 10)})
    assert bench.state("t").leader == 3


def test_a_position_from_before_the_leader_went_counts_for_nothing() -> None:
    """The broker's image still had the old leader, so it may have been fetching from it."""
    bench = all_lost()
    since = bench.machine.leaderless[KEY]
    bench.beat(2)
    bench.beat(3)
    bench.beat(2, positions={KEY: (4, 9)}, metadata_offset=since - 1)
    bench.beat(3, positions={KEY: (4, 5)})
    assert bench.state("t").leader == NONE
    bench.beat(2, positions={KEY: (4, 9)}, metadata_offset=since)
    assert bench.state("t").leader == 2


def test_positions_of_an_earlier_loss_are_not_used_for_a_later_one() -> None:
    bench = all_lost()
    for broker, end in ((2, 7), (3, 5)):
        bench.beat(broker)
        bench.beat(broker, positions={KEY: (4, end)})
    assert bench.state("t").leader == 2
    unclean(bench, 2, incarnation_id="third", boot_id="third")
    assert bench.state("t").leader == NONE
    assert set(bench.state("t").last_known) == {2, 3}, "3 was never in sync with 2's epoch"
    bench.beat(2)
    bench.beat(2, positions={KEY: (5, 8)})
    assert bench.state("t").leader == NONE, "3's word is from before 2 led"
    bench.beat(3, positions={KEY: (4, 5)})
    assert bench.state("t").leader == 2


def test_missing_members_are_waited_for_unless_loss_is_allowed() -> None:
    bench = three()
    for broker in (1, 2, 3):
        bench.fence(broker)
    unclean(bench, 2)
    unclean(bench, 3)
    bench.beat(2)
    bench.beat(2, positions={KEY: (4, 1)})
    assert bench.recover(KEY, waited=True) == 0
    bench.alter("topic", "t", unclean_leader_election_enable="true")
    assert bench.recover(KEY) == 0
    assert bench.recover(KEY, waited=True) == 1
    assert (bench.state("t").leader, bench.state("t").unclean) == (2, True)


def test_nobody_but_an_allowed_loss_passes_over_the_elr() -> None:
    """The ELR has every record: while its members are away, others may lead only if loss is
    allowed.
    """
    bench = three()
    for broker in (1, 2, 3):
        bench.fence(broker)
    bench.beat(1)
    assert asked(bench.beat(1)) == []
    assert bench.recover(KEY, waited=True) == 0
    bench.alter("broker", "", unclean_leader_election_enable="true")
    assert bench.recover(KEY) == 0
    assert asked(bench.beat(1, unclean=frozenset([KEY]))) == [KEY]
    assert bench.recover(KEY, waited=True) == 1, "alone: nobody to compare with"
    state = bench.state("t")
    assert (state.leader, state.isr, state.elr, set(state.last_known)) == (1, (1,), (), {2, 3})


def test_a_broker_not_heard_in_this_term_is_not_chosen_to_recover() -> None:
    """Its replica may be offline: the last term knew it, this term does not yet."""
    bench = three(1)
    for broker in (1, 2):
        bench.fence(broker)
    unclean(bench, 3)
    bench.reports.clear()
    request = wire.BrokerHeartbeatRequest(
        broker_id=3,
        broker_epoch=bench.image.brokers[3].broker_epoch,
        metadata_offset=bench.image.offset,
    )
    bench.do(c.Heartbeat(request))
    assert bench.recover(KEY) == 0
    bench.beat(3)
    assert bench.recover(KEY) == 1


# -- replicas that are offline (L2, L9) ------------------------------------------------------------


def test_an_offline_replica_leaves_isr_and_elr_and_leads_no_more() -> None:
    bench = three()
    bench.beat(1, offline=(KEY,))
    state = bench.state("t")
    assert (state.leader, state.isr, state.elr, state.last_known) == (2, (2, 3), (), ())
    refused = alter_isr(bench, 2, item(bench, "t", [2, 3, 1]))
    assert refused.error.code == 107
    end = len(bench.log)
    bench.beat(1, offline=(KEY,))
    assert len(bench.log) == end, "the list is repeated, the change is not"
    bench.beat(1)
    assert not alter_isr(bench, 2, item(bench, "t", [2, 3, 1])).HasField("error")


def test_a_replica_that_was_offline_does_not_join_before_its_broker_is_heard_in_this_term() -> None:
    """R2: the leader's request is based on fetches from before the damage; the last term would have
    refused it.

    With min_insync_replicas = 1 the replica could otherwise be the last ISR member when its leader
    dies.
    """
    bench = three()
    bench.beat(1, offline=(KEY,))
    bench.reports.clear()
    refused = alter_isr(bench, 2, item(bench, "t", [2, 3, 1]))
    assert refused.error.code == 107
    bench.beat(1, offline=(KEY,))
    assert alter_isr(bench, 2, item(bench, "t", [2, 3, 1])).error.code == 107
    bench.beat(1)
    assert not alter_isr(bench, 2, item(bench, "t", [2, 3, 1])).HasField("error")


def test_the_last_copy_that_goes_offline_is_last_known_and_comes_back() -> None:
    bench = Bench()
    bench.up(1)
    bench.topic("t")
    bench.beat(1, offline=(KEY,))
    state = bench.state("t")
    assert (state.leader, state.isr, state.elr, state.last_known) == (NONE, (), (), (1,))
    bench.fence(1)
    bench.beat(1, offline=(KEY,))
    assert asked(bench.beat(1, offline=(KEY,))) == [], "it cannot say"
    assert bench.recover(KEY, waited=True) == 0
    bench.alter("topic", "t", unclean_leader_election_enable="true")
    assert bench.recover(KEY, waited=True) == 0, "there is nothing to lead with"
    bench.beat(1)
    assert (bench.state("t").leader, bench.state("t").unclean) == (1, True)


def test_an_offline_replica_of_a_fenced_broker_never_stays_eligible() -> None:
    """The controller fails over between report and fence: the next heartbeat repeats the report,
    before the broker is unfenced.
    """
    bench = three()
    bench.fence(1)
    bench.fence(2)
    bench.fence(3)
    assert set(bench.state("t").elr) == {2, 3}
    bench.beat(2, offline=(KEY,))
    state = bench.state("t")
    assert (state.leader, state.elr, state.last_known) == (NONE, (3,), (2,))
    assert not bench.image.brokers[2].fenced


@pytest.mark.parametrize("factor", [1, 3])
def test_lost_replicas_leave_before_their_broker_is_unfenced(
    factor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule L15, whatever the replication factor: a decision that has no room for all changes takes
    more steps, and only the last step unfences.
    """
    monkeypatch.setattr(BatchedDecision.__init__, "__defaults__", (2,))
    bench = Bench()
    bench.up(1, 2, 3)
    bench.topic("t", 5, factor)
    lost = tuple(PartitionKey("id0", number) for number in range(5))
    for broker in (2, 3, 1):
        bench.fence(broker)
    end = len(bench.log)
    states = [state for _, _, state in bench.image.partitions_of(1)]
    held = [state for state in states if 1 in (*state.isr, *state.elr)]
    bench.beat(1, offline=lost)
    kinds = [record.WhichOneof("record") for record in bench.log[end:]]
    assert len(held) > 1
    assert kinds == ["partition_change"] * len(held) + ["broker_change"]
    for key in lost:
        state = bench.image.partition(key)
        assert state is not None
        assert (state.leader, 1 in (*state.isr, *state.elr)) == (NONE, False)


def test_an_offline_replica_of_a_draining_broker_is_not_kept_eligible() -> None:
    bench = three(3)
    bench.beat(1, offline=(KEY,), want_shutdown=True)
    state = bench.state("t")
    assert (state.leader, state.isr, state.elr, state.last_known) == (2, (2, 3), (), (1,))


# -- the minimum changes (R1) ----------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), [("topic", "t"), ("broker", "")])
def test_a_new_minimum_forgets_elr_and_last_known_in_the_same_batch(kind: str, name: str) -> None:
    bench = Bench()
    bench.up(1, 2, 3)
    bench.alter("broker", "", min_insync_replicas="3")
    bench.topic("t", 1, 3)
    bench.fence(2)
    unclean(bench, 3)
    assert (bench.state("t").elr, bench.state("t").last_known) == ((2,), (3,))
    resource = wire.ConfigResource(type=kind, name=name)
    change = wire.ConfigChange(resource=resource, set={"min_insync_replicas": "1"})
    command = c.AlterConfigs(wire.AlterConfigsRequest(changes=[change]))
    records = bench.machine.decide(command, 0).records
    assert [r.WhichOneof("record") for r in records] == ["config", "partition_change"]
    bench.do(command)
    assert (bench.state("t").elr, bench.state("t").last_known) == ((), ())


def test_a_files_minimum_becomes_the_clusters_and_is_never_followed_again() -> None:
    """R1: two nodes with different files use the same value, and a change always clears the ELR."""
    bench = Bench()
    bench.machine.rules = c.Rules(1, bench.rules.server, {"min_insync_replicas": 2})
    bench.up(1, 2)
    bench.topic("t", 1, 2)
    bench.fence(2)
    assert bench.state("t").elr == (), "not on record yet"
    bench.do(c.Bootstrap("cluster"))
    bench.beat(2)
    alter_isr(bench, 1, item(bench, "t", [1, 2]))
    bench.fence(2)
    assert bench.state("t").elr == (2,)
    bench.machine.rules = c.Rules(2, bench.rules.server, {"min_insync_replicas": 1})
    end = len(bench.log)
    bench.do(c.Bootstrap("cluster"))
    assert len(bench.log) == end
    assert bench.state("t").elr == (2,)
