"""Bit rot: one bit of what was SYNCED reads as another one (rule L9).

What may rot
  log         a batch of a segment.  This costs a copy, so it happens only where the promise stands
              without that copy, or permits the loss (loss_model.py).  An only copy is left alone,
              because its partition would stay offline without end
  index       .index, .timeindex, .txnindex: the broker builds them again from the segment
  producers   a snapshot of producers, or the leader epochs: the broker uses an older one and the
              segments
  offsets     the checkpoints of recovery points and high watermarks: each has a safe default
  metadata    of one controller of several: its log where it is committed, or a snapshot of it.  The
              controller that finds the damage ends, and an operator gives it an empty disk
              (operations.py)

A batch's base offset and leader epoch never rot, because no checksum covers them (log/batch.py), as
in Kafka's format.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

from pk import errors
from pk.log import batch as batches
from pk.log import identity
from pk.log.directory import HIGH_WATERMARKS, RECOVERY_POINTS
from pk.log.epochs import FILE as EPOCHS
from pk.log.segment import INDEX, LOG, SNAPSHOT, TIMEINDEX, TXNINDEX
from pk.server.raft.recovery import LOG_DIR
from pk.server.raft.snapshot_id import SUFFIX
from pk.sim.cluster import SimCluster
from pk.sim.loss_model import PartitionFacts
from pk.sim.machine import DISKS, KillableStorage, SimMachine
from pk.sim.operations import Operator
from pk.sim.options import BROKER, CONTROLLER
from pk.sim.samples import Observer

KINDS = ("log", "log", "log", "index", "producers", "offsets", "metadata")
DERIVED = {"index": (INDEX, TIMEINDEX, TXNINDEX), "producers": (SNAPSHOT, EPOCHS)}
#: Chance that a leader's copy rots if it may: readers read from leaders and so find the damage.
LED_CHANCE = 0.7
#: Bytes of a batch's header without a checksum: base offset and leader epoch.
UNCHECKED = (*range(8), *range(12, 16))
_Copy = tuple[PartitionFacts, SimMachine, str]


class Corruption:
    """Flips bits of files on simulated disks.  `counts`: flipped bits by kind of file."""

    def __init__(
        self,
        cluster: SimCluster,
        observer: Observer,
        operator: Operator,
        rng: random.Random,
        counts: dict[str, int],
    ) -> None:
        self._operator = operator
        self._cluster = cluster
        self._observer = observer
        self._rng = rng
        self._counts = counts

    def strike(self) -> None:
        """Draw a kind of file and damage one such file, if there is any."""
        kind = self._rng.choice(KINDS)
        one_of = {
            "log": lambda: self._log() is not None,
            "offsets": self._offsets,
            "metadata": self._metadata,
        }
        struck = one_of.get(kind)
        if struck() if struck is not None else self._derived(DERIVED[kind]):
            self._count(kind)

    def strike_log(self) -> SimMachine | None:
        """Damage a segment; return its machine, or None if no segment may rot."""
        machine = self._log()
        if machine is not None:
            self._count("log")
        return machine

    def _count(self, kind: str) -> None:
        self._counts[f"rot of {kind}"] = self._counts.get(f"rot of {kind}", 0) + 1

    def copies(self) -> Iterator[_Copy]:
        """Return every replica that exists on a disk, with its machine and directory."""
        for facts in self._observer.facts():
            path = f"topics/{facts.topic}-{facts.key.partition}"
            for broker in facts.replicas:
                machine = self._cluster.by_id[broker]
                storage = machine.storages[DISKS[BROKER]]
                with suppress(errors.LogUnidentified):
                    raw = storage.peek(f"{path}/{identity.PARTITION_FILE}")
                    if raw and identity.decode(raw, path).key == facts.key:
                        yield facts, machine, path

    def _flip(self, storage: KillableStorage, path: str, position: int) -> Callable[[], bool]:
        return storage.rot(path, position, self._rng.randrange(8))

    # -- what rots ---------------------------------------------------------------------------------

    def _log(self) -> SimMachine | None:
        losses = self._observer.losses
        found: list[tuple[_Copy, str]] = []
        for copy in self.copies():
            facts, machine, path = copy
            storage = machine.storages[DISKS[BROKER]]
            if losses.may_rot(facts, machine.node_id):
                names = [name for name in storage.names(path) if name.endswith(LOG)]
                found += [(copy, f"{path}/{each}") for each in names]
        found = [each for each in found if self._batches(each)]
        led = [each for each in found if each[0][0].leader == each[0][1].node_id]
        if led and self._rng.random() < LED_CHANCE:
            found = led
        if not found:
            return None
        (facts, machine, _), path = chosen = self._rng.choice(found)
        begin, size = self._rng.choice(self._batches(chosen))
        at = self._rng.randrange(size)
        while at in UNCHECKED:
            at = self._rng.randrange(size)
        self._rotted(facts, machine, path, begin + at)
        return machine

    def _rotted(self, facts: PartitionFacts, machine: SimMachine, path: str, position: int) -> None:
        world, storage = self._cluster.world, machine.storages[DISKS[BROKER]]
        world.record(f"rot of {storage.root}/{path} at {position}")
        still = self._flip(storage, path, position)
        there = partial(_on, machine, storage, still)
        now_ms = world.loop.now_us / 1000
        self._observer.losses.rotted(facts, machine.node_id, there, now_ms)

    @staticmethod
    def _batches(chosen: tuple[_Copy, str]) -> list[tuple[int, int]]:
        """Return position and size of each SYNCED batch of a segment."""
        (_, machine, _), path = chosen
        return _synced(machine.storages[DISKS[BROKER]], path, 2**62)

    def _metadata(self) -> bool:
        found: list[tuple[SimMachine, str, int, int]] = []
        for machine in self._operator.free():
            storage = machine.storages[DISKS[CONTROLLER]]
            end = self._observer.committed_by(machine.node_id)
            for name in storage.names(LOG_DIR):
                if name.endswith(LOG):
                    path = f"{LOG_DIR}/{name}"
                    found += [(machine, path, *each) for each in _synced(storage, path, end)]
            snapshots = [each for each in storage.names("") if each.endswith(SUFFIX)]
            found += [(machine, each, 0, storage.synced_bytes(each)) for each in snapshots]
        found = [each for each in found if each[3]]
        if not found:
            return False
        machine, path, begin, size = self._rng.choice(found)
        storage = machine.storages[DISKS[CONTROLLER]]
        position = (
            self._rng.randrange(24, size) if path.endswith(LOG) else self._rng.randrange(size)
        )
        self._cluster.world.record(f"rot of {storage.root}/{path} at {begin + position}")
        self._observer.metadata_rot[machine.node_id] = self._flip(storage, path, begin + position)
        return True

    def _derived(self, suffixes: tuple[str, ...]) -> bool:
        found = [
            (machine.storages[DISKS[BROKER]], f"{path}/{name}")
            for _, machine, path in self.copies()
            for name in machine.storages[DISKS[BROKER]].names(path)
            if name.endswith(suffixes)
        ]
        return self._anywhere(found)

    def _offsets(self) -> bool:
        storages = [machine.storages[DISKS[BROKER]] for machine in self._cluster.with_role(BROKER)]
        names = (RECOVERY_POINTS, HIGH_WATERMARKS)
        return self._anywhere([(storage, name) for storage in storages for name in names])

    def _anywhere(self, found: list[tuple[KillableStorage, str]]) -> bool:
        found = [each for each in found if each[0].peek(each[1])]
        if not found:
            return False
        storage, path = self._rng.choice(found)
        position = self._rng.randrange(len(storage.peek(path)))
        self._cluster.world.record(f"rot of {storage.root}/{path} at {position}")
        self._flip(storage, path, position)
        return True


def _on(machine: SimMachine, storage: KillableStorage, still: Callable[[], bool]) -> bool:
    """Return whether the damage is still there, on the disk that the machine has now."""
    return machine.storages[DISKS[BROKER]] is storage and still()


def _synced(storage: KillableStorage, path: str, end: int) -> list[tuple[int, int]]:
    """Return position and size of each SYNCED batch of a segment below offset `end`."""
    raw = storage.peek(path)[: storage.synced_bytes(path)]
    found = []
    try:
        for position, header in batches.iter_headers(raw):
            if header.next_offset <= end:
                found.append((position, header.length))
    except errors.CorruptBatch:
        pass  # the segment ends within a batch, or is damaged already
    return found
