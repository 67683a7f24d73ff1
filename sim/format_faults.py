"""Files of another build on the disk of a node that was stopped (rules L21, Q7).

A newer build ran on the directory for a moment: one file has another version, or a field that this
build does not know.  The process of this build must not start with it.  Then an operator brings the
file back that this build wrote, and the process goes on.

What another build may leave
  other version    a checkpoint of offsets or of identities of a broker
  unknown field    the newest snapshot of a controller: a field of its first record
"""

from __future__ import annotations

import random
from collections.abc import Callable

from crc32c import crc32c

from pk.log import checkpoints
from pk.log.directory import LOG_STARTS, RECOVERY_POINTS
from pk.log.identity import IDENTITIES
from pk.server.metadata import snapshot
from pk.server.raft.snapshot_framing import check
from pk.server.raft.snapshot_id import id_of
from pk.sim.cluster import SimCluster
from pk.sim.machine import DISKS, RESTART_MS, KillableStorage, SimMachine
from pk.sim.options import BROKER, CONTROLLER, TIER

BACK_MS = (1_500.0, 4_000.0)
#: Field 900, a varint, which no message of pk has.
UNKNOWN_FIELD = b"\xa0\x38\x01"


class FormatFaults:
    """Writes files of another build.  `after`: runs a call after a delay; `count`: counts."""

    def __init__(
        self,
        cluster: SimCluster,
        rng: random.Random,
        after: Callable[[float, Callable[[], None]], None],
        count: Callable[[str], None],
    ) -> None:
        self._cluster = cluster
        self._rng = rng
        self._after = after
        self._count = count

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
