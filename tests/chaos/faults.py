"""The faults of a cluster run, by name.  Each fault is begun and ended by its function, under load.
Broken demands of its own go to `campaign.violations`, its figures to `plan.notes`.

Scopes: `node` = all processes of the node; `broker` = that process alone, which its supervisor
restarts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from witness import Witness

from pk import AdminClient, Producer, errors
from pk.clock import block_s, monotonic_s

if TYPE_CHECKING:
    from cluster_run import Campaign, Round
    from load import Load

Fault = Callable[["Campaign", "Round", "Load"], None]

ASK_S = 3.0
#: How long after its session's end an isolated leader may accept requests: the cut itself takes
#: time, and a broker counts contact from the heartbeat it sent last.
R6_SLACK_S = 1.0
#: An active controller without a majority answers no heartbeat after this (Timing.lease_ms).
LEASE_S = 1.0
#: Clients write to the new leader within broker_session_timeout_ms + this.
NEW_LEADER_S = 2.0
#: Parked requests are answered so soon after healing.
HEALED_S = 30.0


def leader_kill(campaign: Campaign, plan: Round, load: Load) -> None:
    """kill -9 of a partition's leader."""
    cluster, victim = campaign.cluster, campaign.some_leader(plan)
    if plan.scope == "broker":
        cluster.nodes[victim].kill("broker")
        campaign.served(plan, load)
        return
    cluster.kill(victim)
    campaign.served(plan, load)
    cluster.start_nodes([victim])


def controller_kill(campaign: Campaign, plan: Round, load: Load) -> None:
    """kill -9 of the active controller."""
    cluster = campaign.cluster
    plan.victims = (cluster.active_controller(),)
    if plan.scope == "broker":  # the controller's process alone
        cluster.nodes[plan.victims[0]].kill("controller")
    else:
        cluster.kill(plan.victims[0])
    begin = monotonic_s()
    while cluster.active_controller() == plan.victims[0] and monotonic_s() - begin < 30:
        block_s(0.02)
    plan.notes["another_controller_ms"] = round(1000 * (monotonic_s() - begin))
    campaign.served(plan, load)
    if plan.scope == "node":
        cluster.start_nodes(plan.victims)


def freeze(campaign: Campaign, plan: Round, load: Load) -> None:
    """Stop a leader for a while; then it continues."""
    cluster, victim = campaign.cluster, campaign.some_leader(plan)
    pids = [cluster.nodes[victim].pids()["broker"]] if plan.scope == "broker" else None
    begin = monotonic_s()
    cluster.freeze(victim, pids)
    campaign.served(plan, load)
    block_s(max(0.0, plan.lasts_s - (monotonic_s() - begin)))
    cluster.thaw(victim, pids)


def bounce(campaign: Campaign, plan: Round, load: Load) -> None:
    """Stop and start a leader cleanly."""
    cluster, victim = campaign.cluster, campaign.some_leader(plan)
    campaign.stop_cleanly(victim)
    cluster.start_nodes([victim])


def rolling(campaign: Campaign, plan: Round, load: Load) -> None:
    """Restart all nodes, one after the other; clients must not notice."""
    for node in campaign.cluster.nodes:
        campaign.stop_cleanly(node)
        campaign.cluster.start_nodes([node])
        campaign.whole()
    block_s(1.0)
    told = {**load.errors, **campaign.reader_errors()}
    if told:
        campaign.violations.append(f"a rolling restart was seen by clients: {told}")


def kill_all(campaign: Campaign, plan: Round, load: Load) -> None:
    """Kill all nodes at once (kill -9, so the page caches stay)."""
    cluster = campaign.cluster
    plan.victims = tuple(cluster.nodes)
    cluster.kill(*cluster.nodes)
    cluster.start_nodes(cluster.nodes)


def last_one_dies(campaign: Campaign, plan: Round, load: Load) -> None:
    """Two replicas leave cleanly, and the last one is killed: the second to leave is eligible
    (ELR).
    """
    cluster = campaign.cluster
    leader = campaign.some_leader(plan)
    first, second = campaign.cluster.others(leader)
    for node in (first, second):
        campaign.stop_cleanly(node)
    cluster.kill(leader)
    plan.victims = (first, second, leader)
    begin = monotonic_s()
    cluster.start_nodes([first, second])
    campaign.served(plan, load)
    plan.notes["served_after_start_ms"] = round(1000 * (monotonic_s() - begin))
    cluster.start_nodes([leader])


def empty_disk(campaign: Campaign, plan: Round, load: Load) -> None:
    """Replace a node: a new disk, a new identity of its controller, the same id."""
    cluster, victim = campaign.cluster, campaign.some_leader(plan)
    with cluster.admin(victim) as admin:
        quorum = admin.describe_metadata_quorum()
    (old,) = [each for each in quorum.voters if each.node_id == victim]
    cluster.kill(victim)
    campaign.served(plan, load)
    cluster.wipe(victim)
    made = cluster.format(victim, first=False)
    with cluster.admin(victim) as admin:
        admin.remove_raft_voter(victim, old.directory_id)
    begin = monotonic_s()
    cluster.start_nodes([victim])
    campaign.patiently(
        lambda admin: admin.add_raft_voter(
            victim, made.metadata_directory_id, cluster.controllers[victim]
        )
    )
    campaign.whole()
    plan.notes["rebuilt_ms"] = round(1000 * (monotonic_s() - begin))


def isolate_leader(campaign: Campaign, plan: Round, load: Load) -> None:
    """Cut a leader off from peers and controllers; clients still reach it."""
    cluster, session_s = campaign.cluster, campaign.session_s
    victim = campaign.some_leader(plan)
    # A controller that is cut off notices later than a broker: until then the broker beside it
    # is in contact.
    grace_s = LEASE_S if cluster.active_controller() == victim else 0.0
    plan.notes["active_controller"] = bool(grace_s)
    topic = f"witness-{plan.number}"
    (mine,) = campaign.make_topic(topic, {victim})
    witness = Witness(cluster.brokers[victim], mine.topic_id, mine.partition)
    witness.start()
    begin = monotonic_s()
    cluster.network.isolate(victim, cluster.others(victim))
    witness.park()
    elected_s = _new_client_is_served(campaign, topic, mine.partition, victim, begin)
    plan.notes["fresh_client_ms"] = round(1000 * elected_s)
    if elected_s > session_s + NEW_LEADER_S:  # of any victim: the goal is one
        campaign.goals.append(f"round {plan.number}: a new leader served after {elected_s:.1f} s")
    block_s(max(0.0, begin + session_s + grace_s + plan.lasts_s - monotonic_s()))
    refused = witness.refused_session()
    plan.notes["outage_before_heal_ms"] = campaign.stall_ms(load)
    healed_at = monotonic_s()
    cluster.network.heal()
    _judge(campaign, plan, witness, begin + grace_s, healed_at, refused)
    campaign.served(plan, load)


def _new_client_is_served(
    campaign: Campaign, topic: str, partition: int, victim: int, begin: float
) -> float:
    """Return the seconds from `begin` to the first acknowledged record of a client of the other
    brokers.
    """
    cluster = campaign.cluster
    addresses = ",".join(cluster.brokers[node] for node in cluster.others(victim))
    with cluster.admin(victim) as admin:  # to make one for every look would be counted, too
        while (leader := _leader(admin, topic, partition)) in (victim, -1):
            if monotonic_s() - begin > campaign.session_s + 60:
                campaign.violations.append(f"{topic}-{partition} is led by {leader} after a minute")
                return monotonic_s() - begin
            block_s(0.02)
    with Producer(addresses, linger_ms=0) as producer:
        producer.send(topic, b"served", partition=partition).result(timeout=60)
    return monotonic_s() - begin


def _leader(admin: AdminClient, topic: str, partition: int) -> int:
    """Return the leader; -1 = the partition has no leader, or no broker answers."""
    try:
        return admin.describe_topics([topic], timeout_s=ASK_S)[partition].leader
    except errors.PkError:
        return -1


def _judge(
    campaign: Campaign, plan: Round, witness: Witness, begin: float, healed: float, refused: str
) -> None:
    """Check rule R6, and the outcome of parked requests."""
    witness.end()
    last_s = witness.served_at - begin
    plan.notes["last_acks1_ms"] = round(1000 * last_s)  # since contact may have been lost
    plan.notes["parked"] = witness.parked
    plan.notes["parked_answer_ms"] = round(1000 * (witness.parked_at - healed))
    plan.notes["new_session"] = refused or "let in"
    if last_s > campaign.session_s + R6_SLACK_S:
        campaign.violations.append(f"R6: an isolated leader accepted acks=1 after {last_s:.1f} s")
    if not refused:
        campaign.violations.append("R6: an isolated leader let a new session in")
    if witness.parked not in ("NotLeaderOrFollower", "FencedLeaderEpoch"):
        campaign.violations.append(f"a parked request of a deposed leader: {witness.parked}")
    elif witness.parked_at - healed > HEALED_S:
        campaign.goals.append(
            f"a parked request was answered {witness.parked_at - healed:.1f} s late"
        )


def mute_leader(campaign: Campaign, plan: Round, load: Load) -> None:
    """Cut what a leader sends: its messages reach no node, and it receives those of all nodes."""
    _one_way(campaign, plan, load, speaks=False)


def deaf_leader(campaign: Campaign, plan: Round, load: Load) -> None:
    """Cut what a leader receives: no message reaches it, and its own messages arrive."""
    _one_way(campaign, plan, load, speaks=True)


def _one_way(campaign: Campaign, plan: Round, load: Load, *, speaks: bool) -> None:
    cluster, victim = campaign.cluster, campaign.some_leader(plan)
    for other in cluster.others(victim):
        cluster.network.cut(*((other, victim) if speaks else (victim, other)))
    block_s(campaign.session_s + plan.lasts_s)
    plan.notes["outage_before_heal_ms"] = campaign.stall_ms(load)
    cluster.network.heal()
    campaign.served(plan, load)


def cut_follower(campaign: Campaign, plan: Round, load: Load) -> None:
    """Cut one link in both directions: leader and one follower; the controllers see both."""
    cluster, victim = campaign.cluster, campaign.some_leader(plan)
    cluster.network.isolate(victim, cluster.others(victim)[:1])
    block_s(plan.lasts_s)
    plan.notes["outage_before_heal_ms"] = campaign.stall_ms(load)
    cluster.network.heal()
    campaign.served(plan, load)


BY_NAME: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        leader_kill, controller_kill, freeze, bounce, rolling, kill_all, last_one_dies, empty_disk,
        isolate_leader, mute_leader, deaf_leader, cut_follower,
    )
}  # fmt: skip
