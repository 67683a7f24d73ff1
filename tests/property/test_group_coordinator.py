"""The group coordinator's machine under any order of requests, compared with what it said.

Requests are put into a bag and delivered later, in any order, and any number of times.  Sessions
end, join phases time out, and members restart at any moment.  At the end the log is replayed.  The
model keeps only the answers that were seen, and checks that later ones do not contradict them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pk import errors
from pk.server.groups.state import GroupState, keys_of
from pk.types import NONE, PartitionKey
from pk.wire import pk_pb2 as wire
from tests.unit.server.groups.group_bench import ID, KEYS, RULES, Bench

PROCESSES = 4
PROCESS = st.integers(0, PROCESSES - 1)
OFFSET = st.integers(0, 50)
CUTS = st.lists(PROCESS, min_size=4, max_size=4)
NOW = st.sampled_from([True, True, False])


@dataclass
class Process:
    """A consumer's process: its life has one member id.  The last two are static members."""

    number: int
    life: int = 0
    generation: int = NONE  #: the last one it has completed
    joined: int = NONE  #: the one it has to sync
    members: list[str] = field(default_factory=list)  #: as the leader got them
    owned: tuple[PartitionKey, ...] = ()

    @property
    def member_id(self) -> str:
        return f"m{self.number}-{self.life}"

    @property
    def instance(self) -> str:
        return f"i{self.number}" if self.number >= PROCESSES - 2 else ""

    def begin_again(self) -> None:
        self.life += 1
        self.generation = self.joined = NONE
        self.members, self.owned = [], ()


class GroupModel(RuleBasedStateMachine):
    """Members of one group, their network, and a coordinator."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(RULES._replace(initial_rebalance_delay_ms=1))
        self.bench.whole = False
        self.processes = [Process(number) for number in range(PROCESSES)]
        self.bag: list[Callable[[], None]] = []
        self.generation = 0
        #: generation → partition → the instance or member to which a reply gave it
        self.told: dict[int, dict[PartitionKey, str]] = {}
        self.offsets: dict[PartitionKey, int] = {}

    def teardown(self) -> None:
        self.bench.check_replay()

    def ask(self, process: Process, life: int, work: Callable[[], Any]) -> Any:
        """Return the reply; None if it was refused, or if the process has another life by now."""
        try:
            reply = work()
        except (errors.IllegalGeneration, errors.RebalanceInProgress):
            return None
        except (errors.UnknownMemberId, errors.FencedInstanceId):
            if process.life == life:
                process.begin_again()
            return None
        return reply if process.life == life else None

    def send(self, request: Callable[[], None], now: bool) -> None:
        self.bag.append(request)
        if now:
            request()

    @rule(at=st.integers(0, 10_000))
    def deliver(self, at: int) -> None:
        """A delayed or a repeated request arrives."""
        if self.bag:
            self.bag[at % len(self.bag)]()

    @rule(number=PROCESS, now=NOW, wide=st.booleans())
    def join(self, number: int, now: bool, wide: bool) -> None:
        process = self.processes[number]
        life, member_id = process.life, process.member_id
        generation, topics = process.generation, ("t", "u") if wide else ("t",)

        def request() -> None:
            reply = self.ask(process, life, lambda: self.bench.join(
                member_id, generation, instance=process.instance, topics=topics,
            ))  # fmt: skip
            if reply is not None and not reply.pending and reply.generation >= process.joined:
                process.joined = reply.generation
                process.members = [each.member_id for each in reply.members]

        self.send(request, now)

    @rule(number=PROCESS, now=NOW, cuts=CUTS)
    def sync(self, number: int, now: bool, cuts: list[int]) -> None:
        """A member asks for its assignment; the leader gives each partition to any member."""
        process = self.processes[number]
        life, member_id, generation = process.life, process.member_id, process.joined
        given: dict[str, list[PartitionKey]] | None = None
        if process.members:
            given = {name: [] for name in process.members}
            for key, cut in zip(KEYS, cuts, strict=True):
                if cut < len(process.members):
                    given[process.members[cut]].append(key)

        def request() -> None:
            reply = self.ask(process, life, lambda: self.bench.sync(
                member_id, generation, given, instance=process.instance
            ))  # fmt: skip
            if reply is not None and not reply.pending:
                self.assigned(process, member_id, generation, reply)

        self.send(request, now)

    def assigned(
        self, process: Process, member_id: str, generation: int, reply: wire.SyncGroupReply
    ) -> None:
        """Check that no partition has two owners in a generation."""
        told = self.told.setdefault(generation, {})
        name = process.instance or member_id
        owned = keys_of(reply.partitions)
        for key in owned:
            assert told.setdefault(key, name) == name
        if generation >= process.generation:
            process.generation, process.owned = generation, owned

    @rule(number=PROCESS, offset=OFFSET, now=NOW, key=st.sampled_from(KEYS), own=NOW)
    def commit(self, number: int, offset: int, now: bool, key: PartitionKey, own: bool) -> None:
        process = self.processes[number]
        if own and process.owned:
            key = process.owned[offset % len(process.owned)]
        life, member_id, generation = process.life, process.member_id, process.generation

        def request() -> None:
            before = self.told.get(generation, {}).get(key)
            reply = self.ask(process, life, lambda: self.bench.commit(
                {key: offset}, member_id, generation, instance=process.instance
            ))  # fmt: skip
            if reply is None:  # refused, or of an older life: whether it counted is in the log
                self.offsets = self.bench.fetched()
            elif not reply:
                self.offsets[key] = offset
                assert before in (None, process.instance or member_id), "another member owns it"
                assert generation == self.bench.group.generation

        self.send(request, now)

    @rule(numbers=st.sets(PROCESS, min_size=1), cuts=CUTS)
    def settle(self, numbers: set[int], cuts: list[int]) -> None:
        """Some processes make a whole rebalance without faults."""
        for _ in range(2):  # the second round gets the generation that the first one has begun
            for number in sorted(numbers):
                self.join(number, now=True, wide=False)
            self.end_join()
        for number in sorted(numbers, key=lambda each: not self.processes[each].members):
            self.sync(number, now=True, cuts=cuts)

    @rule(number=PROCESS)
    def restart(self, number: int) -> None:
        """The process dies and starts again; its session runs on."""
        self.processes[number].begin_again()

    @rule(number=PROCESS)
    def leave(self, number: int) -> None:
        process = self.processes[number]
        self.bench.leave(process.member_id)
        process.begin_again()

    @rule(at=st.integers(0, 10))
    def expire(self, at: int) -> None:
        """The session of a member ends."""
        if ID in self.bench.machine.groups and self.bench.group.members:
            members = sorted(self.bench.group.members)
            self.bench.expire(members[at % len(members)])

    @rule()
    def end_join(self) -> None:
        if ID in self.bench.machine.groups:
            self.bench.end_join()

    @invariant()
    def generations_grow(self) -> None:
        """The generation never goes back; states have the members that they must have."""
        if ID not in self.bench.machine.groups:
            return
        group = self.bench.group
        assert group.generation >= self.generation
        self.generation = group.generation
        assert (group.state is GroupState.EMPTY) == (not group.members)
        owned = [key for each in group.assignment.values() for key in each.partitions]
        assert len(owned) == len(set(owned))
        if group.state is GroupState.STABLE:
            assert set(group.assignment) == set(group.members)
            assert group.metadata.leader in group.members
        assert sorted(group.instances) == sorted(
            each.instance_id for each in group.members.values() if each.instance_id
        )

    @invariant()
    def offsets_change_by_commits_only(self) -> None:
        assert self.bench.fetched() == self.offsets


TestGroupCoordinator = GroupModel.TestCase
