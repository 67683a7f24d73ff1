"""Identities and directories of logs that go while their broker is down (rule L15).

What may go
  identity file    partition.json is removed, or a bit of it flips: restored from the second copy
  second copy      a bit of it flips, while all first copies are whole: made again
  log directory    the whole directory of a partition: it costs a copy, as rot does (corruption.py),
                   so it strikes only where the promise stands without that copy, or permits the
                   loss

One copy of an identity is always left: where both are gone an operator has to say whose log it is.
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
from pk.sim.machine import DISKS, RESTART_MS, KillableStorage, Machine
from pk.sim.options import BROKER, TIER
from pk.sim.samples import Observer
from pk.types import PartitionKey

_Copy = tuple[PartitionFacts, Machine, str]


class IdentityFaults:
    """See the module.  `copies`: every replica on a disk, with its directory."""

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
        """partition.json of one replica is removed, or rots."""
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
        """The second copies of a broker rot."""
        machine = self._rng.choice(self._cluster.with_role(BROKER))
        storage = machine.storages[DISKS[BROKER]]
        if not storage.peek(IDENTITIES) or not self._all_whole(storage):
            return
        self._stop(machine)
        self._flip(storage, IDENTITIES)

    def lose_directory(self) -> None:
        """The directory of one replica is gone."""
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

    def _stop(self, machine: Machine) -> None:
        """The processes that have the disk open; the supervisor starts them again."""
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
        """The second copy has it."""
        facts, machine, path = copy
        known = second_of(machine.storages[DISKS[BROKER]]).get(path.rpartition("/")[2])
        return known is not None and known.identity.key == facts.key

    def _all_whole(self, storage: KillableStorage) -> bool:
        """No directory of the disk needs its second copy."""
        for name in storage.names("topics"):
            raw = storage.peek(f"topics/{name}/{PARTITION_FILE}")
            try:
                identity.decode(raw, name)
            except errors.LogUnidentified:
                return False
        return True


def second_of(storage: KillableStorage) -> Identities:
    """The second copies as they are on the disk; {} if they are damaged."""
    try:
        return identity.parse(checkpoints.decode(IDENTITIES, storage.peek(IDENTITIES)))
    except ValueError:
        return {}


def _missing(machine: Machine, storage: KillableStorage, path: str, key: PartitionKey) -> bool:
    """The machine has that disk, and the log is not there."""
    if machine.storages[DISKS[BROKER]] is not storage:
        return False
    try:
        return identity.decode(storage.peek(f"{path}/{PARTITION_FILE}"), path).key != key
    except errors.LogUnidentified:
        return not storage.names(path)
