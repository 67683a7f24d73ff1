"""Random histories of one partition: brokers that die, lose data and return, and a model of what
their logs hold.

The model's brokers follow the metadata without delay and keep the leader's rules (R1, R2): a record
is committed when the whole ISR has it and the ISR is as large as required.  What must hold in every
history:

  - an election that is not marked unclean elects a log with all committed records
  - an unclean election elects the greatest log of the last known, if it waited for them
  - ISR, ELR and last-known are never all empty: some replica is known to hold the data
  - the leader is a member of the ISR; epochs never go back
  - a log that is replayed gives the same image
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pk.server.controller import commands as c
from pk.server.controller.machine import Controller
from pk.server.metadata.image import PartitionState
from pk.server.metadata.records import decode_batches, encode_batch
from pk.types import NONE, PartitionKey
from pk.wire import pk_pb2 as wire
from tests.unit.server.controller.controller_bench import NOW, Bench, alter_isr, item, snapshot

BROKERS = (1, 2, 3, 4)
KEY = PartitionKey("id0", 0)

Record = tuple[int, int]  # (leader epoch, number): unique to its writer


class History:
    """One partition with three replicas among four brokers."""

    def __init__(self, min_isr: int) -> None:
        self.bench = Bench()
        self.bench.up(*BROKERS)
        self.bench.topic("t", 1, 3, min_insync_replicas=str(min_isr))
        self.min_isr = min_isr
        self.logs: dict[int, list[Record]] = {broker: [] for broker in BROKERS}
        self.committed: list[Record] = []
        self.offline: dict[int, None] = {}
        self.boots = 0
        self.numbers = 0
        self.last = self.state
        self.unclean_elections = 0

    @property
    def state(self) -> PartitionState:
        return self.bench.state("t")

    # -- what brokers do -------------------------------------------------------------------------

    def produce(self) -> None:
        leader = self.state.leader
        if leader != NONE and leader not in self.offline:
            self.numbers += 1
            self.logs[leader].append((self.state.leader_epoch, self.numbers))
            self.commit()

    def copy(self, broker: int, count: int) -> None:
        """`broker` fetches: it truncates where the logs diverge, then copies `count` records."""
        leader = self.state.leader
        if leader in (NONE, broker) or broker not in self.state.replicas:
            return
        if broker in self.offline or leader in self.offline:
            return
        self.logs[broker] = self.logs[leader][: self.same(broker, leader) + count]
        self.commit()

    def same(self, one: int, other: int) -> int:
        """Return the records up to the point where two logs diverge: a fetch confirms these."""
        mine, its = self.logs[one], self.logs[other]
        found = 0
        while found < min(len(mine), len(its)) and mine[found] == its[found]:
            found += 1
        return found

    def commit(self) -> None:
        # rule R1
        state = self.state
        required = min(max(1, self.min_isr), len(state.original))
        if state.leader == NONE or len(state.isr) < required:
            return
        end = min(self.same(member, state.leader) for member in state.isr)
        if end > len(self.committed):
            self.committed = self.logs[state.leader][:end]

    def shrink(self, broker: int) -> None:
        state = self.state
        if state.leader not in (NONE, broker) and broker in state.isr:
            isr = [member for member in state.isr if member != broker]
            alter_isr(self.bench, state.leader, item(self.bench, "t", isr))

    def grow(self, broker: int) -> None:
        """R2: a follower may join that has every committed record and every record from before the
        leader's epoch.
        """
        state = self.state
        if state.leader == NONE or broker in state.isr or broker not in state.replicas:
            return
        if self.logs[broker] == self.logs[state.leader]:
            isr = [*state.isr, broker]
            alter_isr(self.bench, state.leader, item(self.bench, "t", isr))

    # -- what happens to them --------------------------------------------------------------------

    def restart(self, broker: int, kept: int | None) -> None:
        """`kept`: the records that survive a power loss; None: the process died, and no record is
        lost.
        """
        self.boots += 1
        more = {}
        if kept is not None:
            more["boot_id"] = f"boot{broker}-{self.boots}"
            self.logs[broker] = self.logs[broker][:kept]
        self.bench.register(broker, f"i{self.boots}-", **more)

    def beat(self, broker: int) -> None:
        offline = (KEY,) if broker in self.offline else ()
        reply = self.bench.beat(broker, offline=offline)
        for _ in reply.report_positions:
            log = self.logs[broker]
            at = (log[-1][0] if log else NONE, len(log))
            self.bench.beat(broker, offline=offline, positions={KEY: at})

    def disk(self, broker: int) -> None:
        """Let the replica fail, or rebuild it empty."""
        if broker in self.offline:
            del self.offline[broker]
        else:
            self.offline[broker] = None
            self.logs[broker] = []
        self.beat(broker)

    def reassign(self, broker: int) -> None:
        others = [each for each in BROKERS if each != broker]
        request = wire.AlterReassignmentsRequest()
        going = bool(self.state.adding or self.state.removing)
        request.reassignments.add(
            topic="t", topic_id="id0", partition=0, replicas=others, cancel=going
        )
        self.bench.do(c.AlterReassignments(request, dict(self.bench.reports)))

    def alter_min_isr(self, value: int) -> None:
        self.bench.alter("topic", "t", min_insync_replicas=str(value))
        self.min_isr = value
        self.commit()

    # -- what must hold --------------------------------------------------------------------------

    def check(self) -> None:
        now, last = self.state, self.last
        assert now.isr or now.elr or now.last_known
        assert now.leader == NONE or now.leader in now.isr
        assert now.leader_epoch >= last.leader_epoch
        assert now.partition_epoch >= last.partition_epoch
        required = min(max(1, self.min_isr), len(now.original))
        if set(last.replicas) - set(now.replicas):  # R8
            assert len(now.isr) >= min(required, len(last.isr)), (last, now)
        if len(now.isr) >= required:
            assert (now.elr, now.last_known) == ((), ())
        for member in (*now.isr, *now.elr):  # eligible = holds everything committed
            if not now.unclean:
                assert self.logs[member][: len(self.committed)] == self.committed, member
        if now.unclean and now.leader != NONE and now.leader_epoch > last.leader_epoch:
            self.lost(now, last)
        self.last = now

    def lost(self, now: PartitionState, last: PartitionState) -> None:
        """Give up the records that an unclean leader lacks; no last-known member had more."""
        if len(now.isr) == 1 and not last.isr and not last.elr:
            self.unclean_elections += 1
            mine = self.logs[now.leader]
            for member in last.last_known:
                log = self.logs[member]
                assert (log[-1:], len(log)) <= (mine[-1:], len(mine)), member
        self.committed = [
            record for record, own in zip(self.committed, self.logs[now.leader], strict=False)
            if record == own
        ]  # fmt: skip
        alter_isr(self.bench, now.leader, item(self.bench, "t", list(now.isr), recovered=True))


STEPS = st.lists(
    st.tuples(
        st.sampled_from([
            "produce", "produce", "copy", "copy", "copy", "shrink", "grow", "grow", "fence",
            "fence", "beat", "beat", "beat", "crash", "power", "disk", "reassign", "min",
        ]),
        st.sampled_from(BROKERS),
        st.integers(0, 4),
    ),
    max_size=60,
)  # fmt: skip


def run(history: History, steps: list[tuple[str, int, int]]) -> None:
    for what, broker, n in steps:
        if what == "produce":
            history.produce()
        elif what == "copy":
            history.copy(broker, n)
        elif what == "shrink":
            history.shrink(broker)
        elif what == "grow":
            history.grow(broker)
        elif what == "fence":
            history.bench.fence(broker)
        elif what == "beat":
            history.beat(broker)
        elif what == "crash":
            history.restart(broker, kept=None)
        elif what == "power":
            history.restart(broker, kept=n)
        elif what == "disk":
            history.disk(broker)
        elif what == "reassign":
            history.reassign(broker)
        elif what == "min":
            history.alter_min_isr(max(1, n))
        history.check()


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3), STEPS)
def test_what_is_committed_is_where_the_controller_says(
    min_isr: int, steps: list[tuple[str, int, int]]
) -> None:
    history = History(min_isr)
    run(history, steps)
    replayed = Controller(history.bench.rules)
    for offset, record in decode_batches(encode_batch(history.bench.log, NOW)):
        replayed.apply(offset, record)
    assert snapshot(replayed.image) == snapshot(history.bench.image)
    assert replayed.image.assigned == history.bench.image.assigned
    assert replayed.leaderless == history.bench.machine.leaderless


@pytest.mark.parametrize("min_isr", [1, 2, 3])
def test_everybody_loses_power_and_the_greatest_is_elected(min_isr: int) -> None:
    """R3: the election needs no permission, in whatever order the brokers return."""
    history = History(min_isr)
    replicas = history.state.replicas
    for _ in range(4):
        history.produce()
        for member in replicas:
            history.copy(member, 9)
    assert len(history.committed) == 4
    for member in replicas:
        history.bench.fence(member)
    kept = dict(zip(replicas, (1, 3, 2), strict=True))
    for member in replicas:
        history.restart(member, kept=kept[member])
        history.check()
    for member in replicas:
        history.beat(member)
        history.check()
    best = {1: replicas[2], 2: replicas[1], 3: replicas[1]}[min_isr]
    assert (history.state.leader, history.state.isr) == (best, (best,))
    assert history.unclean_elections == 1
