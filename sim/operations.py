"""The operator of a simulated cluster: makes the decisions that only a person may make.

Unclean elections (rules R3, L9).  A partition whose last-known copies were hit, one of them rotten,
waits until an operator accepts the loss of records.  This operator asks for an unclean election
where the promise (loss_model.py) allows it, and only while no member of ISR or ELR can come back.

Clocks (rule L10).  After all faults have ended, a broker may still not trust its clock, because the
run set the clocks of the machines apart.  The operator confirms that the clock is right.

Damaged brokers (rule L9).  If the only copy that ISR and ELR name is rotten, its broker leads and
serves the log around the damage, and no other replica can copy the damaged range.  If this is still
so after all faults have ended, the broker gets an empty disk.  Its log is then missing, and the
controller elects another replica.  The promise (loss_model.py) already counts a rotten copy as a
lost disk, so the empty disk costs no further record.

Damaged controllers (rule Q1, KIP-853).  A controller whose metadata is damaged gets an empty disk.
A controller with an empty disk must become a voter again: the operator removes the voter of the old
directory, and adds the voter of the new directory when it has caught up.  Only one controller is
replaced at a time: `free` returns the controllers that may lose their metadata disk now.
"""

from __future__ import annotations

import contextlib
import random
from typing import Any

from pk import errors
from pk.server.broker.clock_trust import Doubt
from pk.sim.cluster import BROKER_PORT, CONTROLLER_PORT
from pk.sim.loss_model import PartitionFacts
from pk.sim.machine import SimMachine
from pk.sim.options import BROKER, CONTROLLER
from pk.sim.samples import Observer
from pk.sim.workload import ADMIN_TIMEOUT_MS, cluster_of
from pk.types import NONE, NodeId, PartitionKey
from pk.wire import pk_pb2 as wire
from pk.world import World

#: Pause between two rounds, in ms.
LOOK_MS = (300.0, 900.0)
#: This long after the end of all faults, the grace of every start is over (campaign.GRACE_MS).
GRACE_OVER_MS = 40_000


class Operator:
    """The operator's task; the module says what it does.  `counts`: completed actions by name."""

    def __init__(
        self,
        world: World,
        bootstrap: str,
        observer: Observer,
        rng: random.Random,
        counts: dict[str, int],
    ) -> None:
        self._world = world
        self._cluster = cluster_of(world, bootstrap, "operator")
        self._observer = observer
        self._rng = rng
        self._counts = counts
        self._begun = False
        self._right_since_ms: int | None = None
        self._disks: dict[NodeId, str] = {}  # node whose disk was replaced → its old directory id
        observer.cluster.on_damage = self._damaged

    # -- clocks ------------------------------------------------------------------------------------

    def clocks_are_right(self) -> None:
        """Note that all clocks are right, so that the operator may confirm a broker's clock."""
        self._right_since_ms = self._world.clock.monotonic_ms()

    def _doubting(self) -> list[SimMachine]:
        """Return the brokers whose doubt about their clock only an operator can end (rule L10).

        The doubt of a start normally ends after the grace, or when the clocks agree, unless the run
        set the clocks apart.
        """
        since_ms = self._right_since_ms
        if since_ms is None:
            return []
        late = self._world.clock.monotonic_ms() - since_ms >= GRACE_OVER_MS
        found = []
        for machine in self._observer.cluster.with_role(BROKER):
            broker = machine.broker
            trust = None if broker is None else broker.core.clocks.trust
            if not machine.serving or trust is None or not trust.alert:
                continue
            if late or trust.doubt is not Doubt.START:
                found.append(machine)
        return found

    async def _confirm(self, machine: SimMachine) -> None:
        await self._ask(wire.DescribePartitionsRequest())  # opens the operator's first stream
        request = wire.ConfirmClockRequest(broker_id=machine.node_id)
        address = f"{machine.name}:{BROKER_PORT}"
        await self._cluster.call_at(address, request, timeout_ms=ADMIN_TIMEOUT_MS)
        self._count("clocks confirmed")

    # -- disks of brokers --------------------------------------------------------------------------

    def _damaged_alone(self) -> list[SimMachine]:
        """Return a broker that alone is in the ISR of a partition and leads it with a rotten copy.

        The other replicas cannot copy the damaged range.  The list has at most one broker.
        """
        since_ms = self._right_since_ms
        if since_ms is None or self._world.clock.monotonic_ms() - since_ms < GRACE_OVER_MS:
            return []
        found = []
        for facts in self._observer.facts():
            machine = self._observer.cluster.by_id.get(facts.leader)
            if machine is None or machine.broker is None or len(facts.replicas) == 1:
                continue
            partition = machine.broker.core.partitions.get(facts.key)
            damaged = partition is not None and bool(partition.log.damage)
            rotten = self._observer.losses.is_rotten(facts.key, facts.leader)
            if damaged and rotten and facts.isr == (facts.leader,):
                found.append(machine)
        return found[:1]

    def _replace_disk(self, machine: SimMachine) -> None:
        self._observer.hit(machine, disk=True)
        machine.replace_disk(BROKER, self._rng.uniform(*LOOK_MS))
        self._count("damaged disks replaced")

    # -- metadata disks ----------------------------------------------------------------------------

    def free(self) -> list[SimMachine]:
        """Return the controllers whose metadata may be lost or damaged now."""
        cluster = self._observer.cluster
        machines = cluster.with_role(CONTROLLER)
        rotten = [each for each in self._observer.metadata_rot.values() if each()]
        if len(machines) < 3 or self._disks or rotten:
            return []
        return machines if cluster.active() is not None else []

    def replace_metadata(self, machine: SimMachine, restart_ms: float) -> None:
        """Give a controller an empty metadata disk; call this only for a controller of `free`."""
        self._disks[machine.node_id] = machine.run.metadata_directory_id
        self._observer.metadata_hit(machine)
        machine.replace_disk(CONTROLLER, restart_ms)
        self._count("controller disks replaced")

    def _damaged(self, machine: SimMachine) -> bool:
        """Replace the disk of a controller that ended because its metadata is damaged (rule L9)."""
        there = self._observer.metadata_rot.get(machine.node_id)
        if there is None or not there() or self._disks:
            return False
        self._count("metadata damage met")
        self.replace_metadata(machine, self._rng.uniform(*LOOK_MS))
        return True

    def waits(self) -> str:
        """Return what the operator still has to repair; '' = nothing."""
        return f"the controllers {list(self._disks)} have yet to vote again" if self._disks else ""

    async def _vote_again(self, node_id: NodeId, old: str) -> None:
        with contextlib.suppress(errors.InvalidRequest):  # removed before, or cannot be removed yet
            await self._ask(wire.RemoveVoterRequest(node_id=node_id, directory_id=old))
        machine = self._observer.cluster.by_id[node_id]
        added = wire.AddVoterRequest(
            node_id=node_id,
            directory_id=machine.run.metadata_directory_id,
            address=f"{machine.name}:{CONTROLLER_PORT}",
        )
        await self._ask(added)
        del self._disks[node_id]
        self._count("controllers voting again")

    # -- partitions --------------------------------------------------------------------------------

    def _count(self, name: str) -> None:
        self._counts[name] = self._counts.get(name, 0) + 1

    async def run(self) -> None:
        while True:
            await self._world.clock.sleep_ms(self._rng.uniform(*LOOK_MS))
            stranded = self._stranded()
            for machine in self._damaged_alone():
                self._replace_disk(machine)
            try:
                for machine in self._doubting():
                    await self._confirm(machine)
                if stranded:
                    await self._elect(stranded)
                for node_id, old in list(self._disks.items()):
                    await self._vote_again(node_id, old)
            except errors.PkError:
                continue  # no broker answers: try again in the next round

    async def _ask(self, request: Any) -> Any:
        if not self._begun:  # no streams in a run without work for the operator
            self._begun = True
            self._cluster.start()
        return await self._cluster.call_any(request, timeout_ms=ADMIN_TIMEOUT_MS)

    def _stranded(self) -> list[PartitionFacts]:
        allowed = self._observer.losses.stranded
        if not allowed:
            return []
        facts = list(self._observer.facts())
        return [each for each in facts if each.key in allowed and self._given_up(each.key)]

    def _given_up(self, key: PartitionKey) -> bool:
        """Return whether the partition has no leader and ISR and ELR are empty."""
        state = self._observer.image.partition(key)
        return state is not None and not (state.leader != NONE or state.isr or state.elr)

    async def _elect(self, stranded: list[PartitionFacts]) -> None:
        request = wire.ElectLeadersRequest(unclean=True)
        for facts in stranded:
            request.partitions.add(topic_id=facts.key.topic_id, partition=facts.key.partition)
        reply = await self._ask(request)
        for result in reply.results:
            if not result.HasField("error"):
                self._count("elections asked for")
