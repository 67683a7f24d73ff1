"""Wrong clocks: a node whose wall clock is off at its start, or is set while it runs (rule L10).

Real nodes under libfaketime.  Cases
  - A single node that starts a day ahead keeps every record, and trusts its clock again when an
    operator says so.  A node that starts a day behind refuses timestamps and names its own clock.
  - A node of three that starts a day ahead and leads keeps every record.  A node that is set a day
    back hands its leadership over, and the other nodes accept records.
  - The node of the active controller is set a day ahead.  It keeps every record, and the clocks of
    the other nodes stay trusted.
  - (long) Three nodes that all start a day ahead keep every record.  A single node trusts its clock
    again after the grace period.  A node runs for 20 s under a clock that is a day ahead.

Retention runs ten times a second in these nodes.  A topic that is bounded by size shows that it
ran: the topic's log start moves whatever the time is.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))

from real_cluster import PATIENCE_S, run as pk, until  # noqa: I001
from verdicts import Verdict
from wrong_clock import LIBRARY, WrongClock

from pk import AdminClient, Producer, TopicPartition, errors
from pk.cli.embedded import EmbeddedCluster, EmbeddedServer

HOUR_MS = 3_600_000
#: A record of the topics, and how many make a segment.
VALUE = bytes(1_500)
RECORDS = 40
SEGMENT = {"segment_bytes": "14336", "file_delete_delay_ms": "0"}
AGED = {**SEGMENT, "retention_ms": str(HOUR_MS)}
STAMPED = {**AGED, "message_timestamp_type": "LogAppendTime"}
SIZED = {**SEGMENT, "retention_ms": "-1", "retention_bytes": "20000"}
SERVER = {
    "log_retention_check_interval_ms": 100,
    "log_flush_offset_checkpoint_interval_ms": 1_000,
    "auto_leader_rebalance_enable": False,
    "shutdown_timeout_ms": 60_000,
}
AHEAD, BEHIND = "+1d", "-1d"


class Nodes:
    """A cluster whose nodes have clocks of their own."""

    def __init__(self, home: Path, size: int, **given: Any) -> None:
        self.cluster = EmbeddedCluster(home, nodes=size, settings={**SERVER, **given})
        self.nodes = list(self.cluster.nodes.values())
        self.clocks = {}
        for node in self.nodes:
            clock = self.clocks[node.node_id] = WrongClock(home / f"clock{node.node_id}")
            node.environment.update(clock.env)
        self.cluster.start()
        self.admin = AdminClient(self.cluster.address)

    def close(self) -> None:
        """Kill the processes: a drain may time out if its waits see the clock jump."""
        self.admin.close()
        for node in self.nodes:
            if node.running:
                node.kill()

    # -- topics ------------------------------------------------------------------------------------

    def create(self, name: str, configs: dict[str, str], *replicas: int) -> None:
        """Create a topic of one partition on these nodes; the first leads."""
        self.admin.create_topic(name, 1, configs, replication_factor=1)
        place = TopicPartition(name, 0)
        moved = self.admin.alter_partition_reassignments({place: replicas})
        assert moved[place] is None, moved
        until(lambda: self.state(name).replicas == replicas, f"{name} is moved")
        until(lambda: set(self.state(name).isr) == set(replicas), f"{name} is in sync")
        self.admin.elect_leaders([place])
        until(lambda: self.state(name).leader == replicas[0], f"{replicas[0]} leads {name}")

    def state(self, name: str) -> Any:
        (found,) = self.admin.describe_topics([name])
        return found

    def elected(self, name: str, replica: int) -> bool:
        """Elect the preferred leader, which is `replica`; return whether it leads.

        After a lost reply, or a rebalance of the controller's own, no election is needed.
        """
        place = TopicPartition(name, 0)
        if (error := self.admin.elect_leaders([place])[place]) is not None:
            print(error)
        return bool(self.state(name).leader == replica)

    def fill(self, name: str, records: int = RECORDS, **options: Any) -> None:
        """Produce records with the time of this machine's clock, which is right."""
        with Producer(self.cluster.address, linger_ms=0, **options) as producer:
            for _ in range(records):
                producer.send(name, value=VALUE).result(timeout=60)

    # -- clocks ------------------------------------------------------------------------------------

    def restart(self, *ids: int, off: str) -> None:
        """Stop these nodes and start them with another clock."""
        stopped = [node for node in self.nodes if node.node_id in ids]
        for node in stopped:
            node.ask_to_stop()
        for node in stopped:
            code = node.wait(PATIENCE_S)
            assert code == 0, node.tail()
        for node in stopped:
            self.clocks[node.node_id].set(off)
            node.spawn()
        for node in stopped:
            node.wait_ready(PATIENCE_S)

    def brokers(self) -> dict[int, dict[str, Any]]:
        """Return the output of `pk brokers list`."""
        told = json.loads(pk(["brokers", "list", "--json", "--bootstrap", self.bootstrap]))
        return {each["broker_id"]: each for each in told["brokers"]}

    def lines(self, event: str, *facts: str) -> dict[int, int]:
        """How often each node said `event` with these facts."""
        return {node.node_id: _lines(node, event, *facts) for node in self.nodes}

    def active(self) -> int:
        """The node whose controller is active."""
        told = json.loads(pk(["quorum", "describe", "--json", "--bootstrap", self.bootstrap]))
        return int(told["leader_id"])

    @property
    def bootstrap(self) -> str:
        return self.cluster.address

    def doubts(self, expected: dict[int, str]) -> None:
        """Wait until the brokers report this doubt about their clocks."""

        def holds() -> bool:
            listed = {each.broker_id: each for each in self.admin.list_brokers()}
            found = {n: listed[n].clock_doubt for n in expected if n in listed}
            return found == expected and all(
                listed[n].clock_trusted == (not doubt) for n, doubt in expected.items()
            )

        until(holds, f"the clocks of brokers are {expected}")

    # -- retention ---------------------------------------------------------------------------------

    def retention_runs(self, *names: str) -> None:
        """Wait until each of these topics, which are bounded by size, has deleted further
        records.
        """
        for name in names:
            before = self.state(name).log_start
            self.fill(name)
            until(lambda name=name, before=before: self.state(name).log_start > before, name)

    def expired(self, *names: str) -> int:
        """Return how many records retention by age deleted from these topics; no record is old."""
        return sum(self.state(name).log_start for name in names)


@contextmanager
def nodes_of(home: Path, size: int, **given: Any) -> Iterator[Nodes]:
    home.mkdir(parents=True, exist_ok=True)
    nodes = Nodes(home, size, **given)
    try:
        yield nodes
    finally:
        nodes.close()


def a_single_node(home: Path) -> list[Verdict]:
    """It starts a day ahead, then a day behind; then an operator confirms the clock a day ahead."""
    with nodes_of(home, 1) as nodes:
        for name, configs in (("aged", AGED), ("stamped", STAMPED), ("sized", SIZED)):
            nodes.create(name, configs, 1)
            nodes.fill(name)
        nodes.restart(1, off=AHEAD)
        nodes.doubts({1: "start"})
        nodes.retention_runs("sized", "sized")
        gone, said = nodes.expired("aged", "stamped"), _lines(nodes.nodes[0], "clock_not_trusted")
        ahead = Verdict(
            "a single node starts a day ahead", gone == 0 and said == 1, f"{gone} lost, {said} line"
        )
        nodes.restart(1, off=BEHIND)
        nodes.doubts({1: "start"})
        words = str(_refusal(nodes, "aged"))
        named = "the clock of broker 1 is off" in words and "behind its own last run" in words
        behind = Verdict("a single node starts a day behind", named, words)
        nodes.clocks[1].set("+0d")
        nodes.doubts({1: ""})
        nodes.fill("aged", 1)
        nodes.clocks[1].set(AHEAD)
        nodes.doubts({1: "step"})
        nodes.retention_runs("sized", "sized")
        gone = nodes.expired("aged", "stamped")
        pk(["brokers", "confirm-clock", "1", "--bootstrap", nodes.bootstrap])
        until(lambda: nodes.expired("aged") and nodes.expired("stamped"), "records expire again")
        confirmed = Verdict("nothing goes before the clock is confirmed", gone == 0, f"{gone} lost")
        return [ahead, behind, confirmed]


def one_of_three(home: Path) -> list[Verdict]:
    """A node starts a day ahead and leads records that no other node has; then it is set a day
    back.
    """
    with nodes_of(home, 3) as nodes:
        for name, configs in (("aged", STAMPED), ("sized", SIZED)):
            nodes.create(name, configs, 1)
            nodes.fill(name)
        nodes.create("shared", {**AGED, "min_insync_replicas": "2"}, 1, 2, 3)
        nodes.fill("shared")
        nodes.restart(1, off=AHEAD)
        nodes.doubts({1: "start", 2: "", 3: ""})
        skew_ms = nodes.brokers()[1]["clock_skew_ms"]
        nodes.retention_runs("sized", "sized")
        gone = nodes.expired("aged", "shared")
        led = {nodes.state(name).leader for name in ("aged", "sized")}
        nodes.clocks[1].set("+0d")
        nodes.doubts({1: "", 2: "", 3: ""})
        right = gone == 0 and led == {1} and abs(skew_ms - 24 * HOUR_MS) < 60_000
        ahead = Verdict("one of three starts a day ahead", right, f"{gone} lost, {skew_ms} ms")
        until(lambda: nodes.elected("shared", 1), "broker 1 is elected")
        nodes.clocks[1].set(BEHIND)
        nodes.doubts({1: "step", 2: "", 3: ""})
        until(lambda: nodes.state("shared").leader in (2, 3), "another node leads")
        nodes.fill("shared", 5)
        words = str(_refusal(nodes, "sized"))
        named = "the clock of broker 1 is off" in words and "behind the median of 3 nodes" in words
        return [ahead, Verdict("a leader is set a day back", named, words)]


def the_active_controller(home: Path) -> list[Verdict]:
    """Its node is set a day ahead while it runs.

    The readings of the other clocks are as old as a heartbeat.  If they followed the controller's
    wall clock, its own broker would find its clock confirmed, and the other brokers would find
    theirs a day behind and give up their leaderships.
    """
    with nodes_of(home, 3, broker_heartbeat_interval_ms=2_000) as nodes:
        active = nodes.active()
        other, third = sorted({1, 2, 3} - {active})
        for name, configs in (("aged", STAMPED), ("sized", SIZED)):
            nodes.create(name, configs, active)
            nodes.fill(name)
        until(lambda: all(each.clock_trusted for each in nodes.admin.list_brokers()), "trust")
        nodes.clocks[active].set(AHEAD)
        until(lambda: any(nodes.lines("clock_not_trusted").values()), "a broker notices a step")
        nodes.retention_runs("sized", "sized")
        off = "clock_off"
        until(lambda: any(nodes.lines("broker_fitness", off).values()), "a broker is unfit")
        nodes.doubts({active: "step", other: "", third: ""})
        gone = nodes.expired("aged")
        doubts = nodes.lines("clock_not_trusted")
        unfit = {n: nodes.lines("broker_fitness", f"broker={n} ", off) for n in (1, 2, 3)}
        kept = gone == 0 and doubts == {active: 1, other: 0, third: 0}
        lead = not any(unfit[other].values()) and not any(unfit[third].values())
        return [
            Verdict("the active controller is set a day ahead", kept, f"{gone} lost, {doubts}"),
            Verdict("the other brokers stay fit to lead", lead, f"clock_off lines {unfit}"),
        ]


def three_ahead(home: Path) -> list[Verdict]:
    """The clocks of a cluster that was restarted as a whole agree with each other."""
    with nodes_of(home, 3) as nodes:
        nodes.create("aged", AGED, 1, 2, 3)
        nodes.create("sized", SIZED, 2, 3, 1)
        for name in ("aged", "sized"):
            nodes.fill(name)
        nodes.restart(1, 2, 3, off=AHEAD)
        nodes.doubts({1: "start", 2: "start", 3: "start"})
        nodes.retention_runs("sized", "sized", "sized")
        gone = nodes.expired("aged")
        return [Verdict("three nodes start a day ahead", gone == 0, f"{gone} lost")]


def goes_on_after_the_grace(home: Path) -> list[Verdict]:
    """The node may have been switched off: after clock_grace_ms a single node trusts its clock
    again.
    """
    with nodes_of(home, 1, clock_grace_ms=15_000) as nodes:
        nodes.create("aged", AGED, 1)
        nodes.fill("aged")
        nodes.restart(1, off=AHEAD)
        nodes.doubts({1: "start"})
        first = nodes.expired("aged")
        until(lambda: nodes.expired("aged") > 0, "records expire after the grace")
        nodes.doubts({1: ""})
        return [Verdict("a single node goes on after the grace", first == 0, f"{first} lost")]


def _refusal(nodes: Nodes, name: str) -> errors.PkError:
    """Return the error that a producer with the right time gets at once."""
    with Producer(nodes.cluster.address, linger_ms=0) as producer:
        refusal = producer.send(name, value=VALUE).exception(timeout=60)
    assert isinstance(refusal, errors.InvalidRecord), refusal
    assert not refusal.retriable
    return refusal


def _lines(node: EmbeddedServer, event: str, *facts: str) -> int:
    """Return how often the broker logged `event`."""
    words = (f" {event} ", *facts)
    return sum(all(each in line for each in words) for line in node.log.read_text().splitlines())


def twenty_seconds(home: Path) -> list[Verdict]:
    """The long form: no record expires within 20 s either."""
    with nodes_of(home, 3) as nodes:
        nodes.create("aged", AGED, 1)
        nodes.fill("aged")
        nodes.restart(1, off=AHEAD)
        nodes.doubts({1: "start", 2: "", 3: ""})
        end = time.monotonic() + 20
        while time.monotonic() < end:
            time.sleep(0.5)
        gone = nodes.expired("aged")
        return [Verdict("20 s under a clock a day ahead", gone == 0, f"{gone} lost")]


Case = Callable[[Path], list[Verdict]]
SHORT: tuple[Case, ...] = (a_single_node, one_of_three, the_active_controller)
LONG: tuple[Case, ...] = (*SHORT, three_ahead, goes_on_after_the_grace, twenty_seconds)


def run(seed: int, work: Path, short: bool) -> list[Verdict]:
    """Run every case, in an order drawn from the seed."""
    if LIBRARY is None:
        return [Verdict("wrong clocks", False, "libfaketime is not installed")]
    cases = list(SHORT if short else LONG)
    random.Random(seed).shuffle(cases)
    return [verdict for case in cases for verdict in case(work / case.__name__)]
