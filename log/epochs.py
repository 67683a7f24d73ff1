"""Leader epoch → start offset: where each leader's records begin (KIP-101, KIP-320).

Two replicas that agree on (epoch, offset) agree on every record before it.  Divergence is found by
asking where an epoch ended.  The cache is small and sorted, and is written to disk before the first
batch of a new epoch.

Invariants
  E1  Epochs and start offsets both grow strictly.
  E2  The entries are one immutable tuple: other threads may read it while the loop replaces it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise

from pk.log import checkpoints
from pk.types import NONE, EpochStart

FILE = "leader-epoch-checkpoint"


class LeaderEpochs:
    """The epochs of one partition's log."""

    def __init__(self, entries: list[EpochStart] | None = None) -> None:
        self._entries: tuple[EpochStart, ...] = tuple(entries or ())

    @property
    def entries(self) -> tuple[EpochStart, ...]:
        return self._entries

    @property
    def latest(self) -> int:
        return self._entries[-1].epoch if self._entries else NONE

    def assign(self, epoch: int, start_offset: int) -> bool:
        """Note that `epoch` starts at `start_offset`; returns False if it is known.  An epoch that
        never got a record is removed.
        """
        assert epoch >= self.latest, (epoch, self.latest)
        if epoch == self.latest:
            return False
        kept = (entry for entry in self._entries if entry.start_offset < start_offset)
        self._entries = (*kept, EpochStart(epoch, start_offset))
        return True

    def epoch_of(self, offset: int) -> int:
        """Return the epoch that `offset` belongs to; -1 below the first entry."""
        entries = self._entries
        at = bisect_right(entries, offset, key=lambda entry: entry.start_offset)
        return entries[at - 1].epoch if at else NONE

    def end_offset_for(self, epoch: int, log_end: int) -> EpochStart:
        """Return (the largest known epoch <= `epoch`, where it ended); (-1, -1) if `epoch` is newer
        than all (KIP-320).

        An epoch older than all known ones ended where the first known one starts.
        """
        if not self._entries or epoch > self.latest or epoch == NONE:
            return EpochStart(NONE, NONE)
        if epoch == self.latest:
            return EpochStart(epoch, log_end)
        at = bisect_right(self._entries, epoch, key=lambda entry: entry.epoch)
        end = self._entries[at].start_offset
        return EpochStart(self._entries[at - 1].epoch if at else epoch, end)

    def truncate_end(self, offset: int) -> bool:
        """Forget the epochs that start at or above `offset`; returns True if there were any."""
        kept = tuple(entry for entry in self._entries if entry.start_offset < offset)
        changed = len(kept) != len(self._entries)
        self._entries = kept
        return changed

    def truncate_start(self, log_start: int) -> bool:
        """Forget the epochs that ended at or below `log_start`; the epoch that covers `log_start`
        then starts there.
        """
        at = bisect_right(self._entries, log_start, key=lambda entry: entry.start_offset)
        if at == 0 or (at == 1 and self._entries[0].start_offset == log_start):
            return False
        self._entries = (EpochStart(self._entries[at - 1].epoch, log_start), *self._entries[at:])
        return True

    def replace(self, entries: Iterable[EpochStart]) -> None:
        """Replace the entries after the log was opened again."""
        self._entries = tuple(entries)

    def clear(self) -> None:
        """Forget every epoch."""
        self._entries = ()

    def encode(self) -> bytes:
        return checkpoints.encode(FILE, (f"{e.epoch} {e.start_offset}" for e in self._entries))

    @classmethod
    def decode(cls, raw: bytes) -> LeaderEpochs:
        """Decode the file's content.  Raises `checkpoints.CorruptCheckpoint`."""
        entries: list[EpochStart] = []
        try:
            for line in checkpoints.decode(FILE, raw):
                epoch, start = line.split()
                entries.append(EpochStart(int(epoch), int(start)))
        except ValueError as cause:
            raise checkpoints.CorruptCheckpoint(str(cause)) from cause
        if any(
            a.epoch >= b.epoch or a.start_offset >= b.start_offset for a, b in pairwise(entries)
        ):
            raise checkpoints.CorruptCheckpoint(f"{FILE}: epochs do not grow")
        return cls(entries)
