"""Other builds on a node that was stopped: their files (rules L21, Q7), their levels (rule Q6).

A newer build ran on the directory for a moment: one file has another version, or a field that this
build does not know.  The process of this build must not start with it.  Then an operator brings the
file back that this build wrote, and the process goes on.

What another build may leave
  other version    a checkpoint of offsets or of identities of a broker
  unknown field    the newest snapshot of a controller: a field of its first record

In a run with older builds every node knows level NEWER_LEVEL of `pk.format`, and the chore
"upgrade" raises the cluster to it.  An older build that knows only the first level may start on a
node, also with an empty disk.  It joins a cluster of the first level, and the level is not raised
then.  In a cluster of a newer level its processes stop before they apply anything of that level.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

from crc32c import crc32c

from pk import formats
from pk.log import checkpoints
from pk.log.directory import LOG_STARTS, RECOVERY_POINTS
from pk.log.identity import IDENTITIES
from pk.server.metadata import snapshot
from pk.server.raft.snapshot_framing import check
from pk.server.raft.snapshot_id import id_of
from pk.sim.cluster import SimCluster
from pk.sim.machine import DISKS, RESTART_MS, KillableStorage, SimMachine
from pk.sim.options import BROKER, CONTROLLER, NEWER_LEVEL, TIER
from pk.sim.samples import Observer

BACK_MS = (1_500.0, 4_000.0)
#: How long the start of an older build takes; the level may be raised meanwhile.
OLDER_START_MS = (20, 1_500)
#: How often an older build starts with an empty data directory.
EMPTY_DISK = 0.3
#: Field 900, a varint, which no message of pk has.
UNKNOWN_FIELD = b"\xa0\x38\x01"


class FormatFaults:
    """Writes files of another build.  `after`: runs a call after a delay; `count`: counts."""

    def __init__(
        self,
        cluster: SimCluster,
        observer: Observer,
        rng: random.Random,
        after: Callable[[float, Callable[[], None]], None],
        count: Callable[[str], None],
    ) -> None:
        self._cluster = cluster
        self._rng = rng
        self._after = after
        self._count = count
        self._observer = observer

    def other_version(self) -> None:
        """Write a checkpoint of a broker in another version."""
        machine = self._machine(BROKER)
        if machine is None:
            return
        storage = machine.storages[DISKS[BROKER]]
        name = self._rng.choice((LOG_STARTS, RECOVERY_POINTS, IDENTITIES))
        known = storage.peek(name)
        try:
            lines = checkpoints.decode(name, known)
        except ValueError:
            return
        text = "\n".join((f"pk {name} {checkpoints.VERSION + 1}", *lines, ""))
        written = text.encode() + b"crc32c %08x\n" % crc32c(text.encode())
        self._exchange(machine, BROKER, storage, name, known, written)

    def unknown_field(self) -> None:
        """Write the newest snapshot of a controller with a field that no message of pk has."""
        machine = self._machine(CONTROLLER)
        if machine is None:
            return
        storage = machine.storages[DISKS[CONTROLLER]]
        found = [name for name in storage.names("") if id_of(name) is not None]
        if not found:
            return
        known = storage.peek(found[-1])
        rows = [row for part in snapshot.batches_of(known) for row in part]
        offset, first = rows[0]
        newer = type(first).FromString(first.SerializeToString() + UNKNOWN_FIELD)
        made = snapshot.encode(check(known).id, [(offset, newer), *rows[1:]])
        self._exchange(machine, CONTROLLER, storage, found[-1], known, b"".join(made))

    def older_build(self) -> None:
        """Start the build of the first level on a machine, on its disks or on an empty one."""
        cluster, rng = self._cluster, self._rng
        found = [each for each in cluster.machines if each.node_id not in cluster.older_builds]
        if not found:
            return
        machine = rng.choice(found)
        if BROKER in machine.processes and rng.random() < EMPTY_DISK:
            self._observer.hit(machine, disk=True)
            machine.replace_disk(BROKER, rng.uniform(*RESTART_MS))
        machine.kill_all(rng.uniform(*OLDER_START_MS))
        machine.run = replace(machine.run, format_level=formats.LEVEL)
        cluster.older_builds[machine.node_id] = None
        self._count("starts of an older build")

        def back() -> None:
            level = self._observer.image.format_level
            self._count(f"older builds in a cluster of level {level}")
            for what, known in _levels_on(machine):
                if known > formats.LEVEL:
                    words = f"{what} of an older build applied level {known}"
                    cluster.problems.append(f"format: {machine.name}: {words}")
            machine.kill_all(rng.uniform(*RESTART_MS))
            machine.run = replace(machine.run, format_level=NEWER_LEVEL)
            del cluster.older_builds[machine.node_id]

        self._after(rng.uniform(*BACK_MS), back)

    def _machine(self, role: str) -> SimMachine | None:
        """Return a machine on which no file is of another build."""
        others = self._cluster.other_builds
        found = [each for each in self._cluster.with_role(role) if each.node_id not in others]
        return self._rng.choice(found) if found else None

    def _exchange(
        self,
        machine: SimMachine,
        role: str,
        storage: KillableStorage,
        name: str,
        known: bytes,
        written: bytes,
    ) -> None:
        """Stop the process, replace the file, and bring it back later."""
        for each in (role, *((TIER,) if role == BROKER else ())):
            machine.kill(each, self._rng.uniform(*RESTART_MS))
        storage.exchange(name, written)
        self._cluster.other_builds[machine.node_id] = role
        self._count("files of another build")
        self._cluster.world.record(f"file of another build: {storage.root}/{name}")

        def back() -> None:
            del self._cluster.other_builds[machine.node_id]
            if machine.storages[DISKS[role]] is not storage:
                return
            if machine.started(role) or storage.peek(name) != written:
                what = f"{machine.name}/{role} runs on {name} of another build"
                self._cluster.problems.append(f"format: {what}")
            machine.kill(role, self._rng.uniform(*RESTART_MS))
            if storage.peek(name):
                storage.exchange(name, known)

        self._after(self._rng.uniform(*BACK_MS), back)


def _levels_on(machine: SimMachine) -> Iterator[tuple[str, int]]:
    """Return the level that each running process of a machine has read from the metadata."""
    controller, broker = machine.controller, machine.broker
    if controller is not None:
        yield CONTROLLER, controller.metadata.voters.level
    if broker is not None:
        yield BROKER, broker.core.metadata.image.format_level
