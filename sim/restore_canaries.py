"""The canaries of restores: rule T13 broken, and what notices it (restore_run.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

from pk import generations
from pk.server.controller import topics
from pk.server.tier.restored_metadata import RestorePlan
from pk.sim.restore_run import RestoreRun
from pk.tiering import restore_fence, table
from pk.tiering.layout import PartitionCounters
from pk.types import NONE


@dataclass(frozen=True)
class RestoreCanary:
    """One broken rule; as `canary.Canary`, for a world with restores."""

    rule: str
    patches: Callable[[ExitStack], None]
    caught_as: str = "V38 V40"

    @contextmanager
    def broken(self) -> Iterator[None]:
        """Break the rule while this context is open."""
        with ExitStack() as stack:
            self.patches(stack)
            yield

    def notices(self, seed: int) -> str:
        """Run a seed with the broken rule; return the violation, '' = none."""
        with self.broken():
            return self.passes(seed)

    def passes(self, seed: int) -> str:
        """Run a seed as it is; return the violation, '' = none."""
        return RestoreRun(seed).execute().violation

    def caught(self, violation: str) -> bool:
        return violation.split(":")[0] in self.caught_as.split()


def _generation_ignored(stack: ExitStack) -> None:
    """Take a table over as it is: its next leader epochs follow those of the lost cluster."""

    def as_it_is(before: PartitionCounters, _generation: int) -> PartitionCounters:
        return before

    stack.enter_context(patch.object(restore_fence, "claimed", as_it_is))
    stack.enter_context(patch.object(RestorePlan, "first_epoch", 0))


def _begun_at_the_end(stack: ExitStack) -> None:
    """Claim the table, and go on where it ends."""

    def only_claimed(before: PartitionCounters, generation: int) -> PartitionCounters:
        claim = generation * generations.EPOCHS
        return before._replace(claim=max(before.claim, claim))

    stack.enter_context(patch.object(restore_fence, "claimed", only_claimed))


def _new_partitions_begin_at_zero(stack: ExitStack) -> None:
    """Create partitions as in any other cluster, and compare only their own claims."""
    stack.enter_context(patch.object(topics, "_first_epoch", lambda *_: 0))
    stack.enter_context(patch.object(table, "first_epoch", lambda _: NONE))


RESTORE_CANARIES = {
    "a restore that ignores the generation": RestoreCanary("T13", _generation_ignored),
    "a restore that begins at the table's end": RestoreCanary("T13", _begun_at_the_end),
    "a partition that two clusters create": RestoreCanary("T13", _new_partitions_begin_at_zero),
}
