"""Losses of identities, directories and first segments of logs while their broker is down (rules
L9, L15).

What may be lost
  identity file    partition.json is removed, or a bit of it flips; the broker restores it from the
                   second copy
  second copy      a bit of it flips while all first copies are whole; the broker writes it again
  log directory    the whole directory of a partition.  This costs a copy, as rot does
                   (corruption.py), so it happens only where the promise stands without that copy,
                   or permits the loss
  first segments   every file of the oldest segments of a log, under the same condition, and only
                   where the checkpoints on the disk say that records in them must be there

One copy of an identity is always left: without both, an operator would have to say which partition
the log belongs to.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from pk import errors
from pk.log import checkpoints, damage, identity
from pk.log.damage import Damage
from pk.log.directory import LOCAL_STARTS, LOG_STARTS
from pk.log.identity import IDENTITIES, PARTITION_FILE, Identities
from pk.log.segment import LOG, base_offset_of
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

    def lose_front(self) -> None:
        """Remove the first segments of one replica."""
        losses = self._observer.losses
        found = []
        for copy in self._copies():
            facts, machine, path = copy
            if losses.may_rot(facts, machine.node_id):
                storage = machine.storages[DISKS[BROKER]]
                found += [
                    (copy, first)
                    for first in _bases(storage, path)[1:]
                    if _missing_below(storage, facts.key, first) is not None
                ]
        if not found:
            return
        (facts, machine, path), first = self._rng.choice(found)
        storage = machine.storages[DISKS[BROKER]]
        self._stop(machine)
        for name in storage.names(path):
            base, _, kind = name.partition(".")
            if kind and base.isdigit() and int(base) < first:
                storage.lose(f"{path}/{name}")
        self._said(storage, f"{path} below {first}", "lost first segments")
        there = partial(_front_missing, machine, storage, path, facts.key)
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


def _bases(storage: KillableStorage, path: str) -> list[int]:
    """Return the base offsets of the segments, ascending, without the empty file of a range that
    is known to be missing.
    """
    found = {base_offset_of(name): name for name in storage.names(path) if name.endswith(LOG)}
    bases = sorted(base for base in found if base is not None)
    return [each for each in bases if each == bases[-1] or storage.peek(f"{path}/{found[each]}")]


def _missing_below(storage: KillableStorage, key: PartitionKey, first: int) -> Damage | None:
    """Return the range that is missing if the log begins at `first`; None = nothing is missing, or
    no checkpoint on the disk names the log.
    """
    starts = [_offset_of(storage, name, key) for name in (LOG_STARTS, LOCAL_STARTS)]
    known = [each for each in starts if each is not None]
    return damage.missing_in_front(max(known), first) if len(known) == len(starts) else None


def _offset_of(storage: KillableStorage, name: str, key: PartitionKey) -> int | None:
    """Return the offset of a log in a checkpoint that is on the disk."""
    try:
        lines = checkpoints.decode(name, storage.peek(name))
    except ValueError:
        return None
    found = (line.rsplit(" ", 1) for line in lines)
    return next((int(at) for of, at in found if of == f"{key.topic_id} {key.partition}"), None)


def _front_missing(
    machine: SimMachine, storage: KillableStorage, path: str, key: PartitionKey
) -> bool:
    """Return whether the machine still has that disk and first segments are missing on it."""
    if machine.storages[DISKS[BROKER]] is not storage:
        return False
    # Another fault may have taken the identity meanwhile: the broker restores it, and the first
    # segments stay missing.
    with suppress(errors.LogUnidentified):
        if identity.decode(storage.peek(f"{path}/{PARTITION_FILE}"), path).key != key:
            return False
    bases = _bases(storage, path)
    return bool(bases) and _missing_below(storage, key, bases[0]) is not None
