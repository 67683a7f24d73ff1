"""Losses of identities and directories of logs while their broker is down (rule L15).

What may be lost
  identity file    partition.json is removed, or a bit of it flips; the broker restores it from the
                   second copy
  second copy      a bit of it flips while all first copies are whole; the broker writes it again
  log directory    the whole directory of a partition.  This costs a copy, as rot does
                   (corruption.py), so it happens only where the promise stands without that copy,
                   or permits the loss

One copy of an identity is always left: without both, an operator would have to say which partition
the log belongs to.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from pk import errors
from pk.log import checkpoints, identity
from pk.log.identity import IDENTITIES, PARTITION_FILE, Identities
from pk.sim.cluster import SimCluster
from pk.sim.loss_model import PartitionFacts
from pk.sim.machine import DISKS, RESTART_MS, KillableStorage, SimMachine
from pk.sim.options import BROKER, TIER
from pk.sim.samples import Observer
from pk.types import PartitionKey

_Copy = tuple[PartitionFacts, SimMachine, str]


class IdentityFaults:
    """Removes or damages identities of logs.  `copies`: every replica on a disk."""

    def __init__(
        self,
        cluster: SimCluster,
        observer: Observer,
        rng: random.Random,
        copies: Callable[[], list[_Copy]],
        count: Callable[[str], None],
    ) -> None:
        self._cluster = cluster
        self._observer = observer
        self._rng = rng
        self._copies = copies
        self._count = count

    def lose_file(self) -> None:
        """Remove or damage partition.json of one replica."""
        found = [each for each in self._copies() if self._known(each)]
        if not found:
            return
        _, machine, path = self._rng.choice(found)
        where, storage = f"{path}/{PARTITION_FILE}", machine.storages[DISKS[BROKER]]
        self._stop(machine)
        if self._rng.random() < 0.5:
            storage.lose(where)
            self._said(storage, where, "lost files")
        else:
            self._flip(storage, where)

    def rot_second(self) -> None:
        """Damage the file with the second copies of a broker."""
        machine = self._rng.choice(self._cluster.with_role(BROKER))
        storage = machine.storages[DISKS[BROKER]]
        if not storage.peek(IDENTITIES) or not self._all_whole(storage):
            return
        self._stop(machine)
        self._flip(storage, IDENTITIES)

    def lose_directory(self) -> None:
        """Remove the directory of one replica."""
        losses = self._observer.losses
        found = [
            each
            for each in self._copies()
            if losses.may_rot(each[0], each[1].node_id) and self._known(each)
        ]
        if not found:
            return
        facts, machine, path = self._rng.choice(found)
        storage = machine.storages[DISKS[BROKER]]
        self._stop(machine)
        storage.lose(path)
        self._said(storage, path, "lost logs")
        there = partial(_missing, machine, storage, path, facts.key)
        now_ms = self._cluster.world.loop.now_us / 1000
        losses.rotted(facts, machine.node_id, there, now_ms)

    # -- how ---------------------------------------------------------------------------------------

    def _stop(self, machine: SimMachine) -> None:
        """Kill the processes that use the broker's disk; the supervisor restarts them."""
        for role in (BROKER, TIER):
            machine.kill(role, self._rng.uniform(*RESTART_MS))

    def _flip(self, storage: KillableStorage, path: str) -> None:
        position = self._rng.randrange(len(storage.peek(path)))
        storage.rot(path, position, self._rng.randrange(8))
        self._said(storage, f"{path} at {position}", "rotten identities")

    def _said(self, storage: KillableStorage, where: str, what: str) -> None:
        self._count(what)
        self._cluster.world.record(f"{what}: {storage.root}/{where}")

    def _known(self, copy: _Copy) -> bool:
        """Return whether the second copy holds the identity of this replica."""
        facts, machine, path = copy
        known = second_of(machine.storages[DISKS[BROKER]]).get(path.rpartition("/")[2])
        return known is not None and known.identity.key == facts.key

    def _all_whole(self, storage: KillableStorage) -> bool:
        """Return whether no directory of the disk needs its second copy."""
        for name in storage.names("topics"):
            raw = storage.peek(f"topics/{name}/{PARTITION_FILE}")
            try:
                identity.decode(raw, name)
            except errors.LogUnidentified:
                return False
        return True


def second_of(storage: KillableStorage) -> Identities:
    """Return the second copies that are on the disk; {} if the file is damaged."""
    try:
        return identity.parse(checkpoints.decode(IDENTITIES, storage.peek(IDENTITIES)))
    except ValueError:
        return {}


def _missing(machine: SimMachine, storage: KillableStorage, path: str, key: PartitionKey) -> bool:
    """Return whether the machine still has that disk and the log is missing on it."""
    if machine.storages[DISKS[BROKER]] is not storage:
        return False
    try:
        return identity.decode(storage.peek(f"{path}/{PARTITION_FILE}"), path).key != key
    except errors.LogUnidentified:
        return not storage.names(path)
