"""Leases of the open transactions of jobs: soft state of a coordinator (X4).

Times: `now_ms` is monotonic; `started_ms` and `wall_ms` are of the wall clock.

Invariants
  H1  The lease of a transaction is renewed by each join and heartbeat.  It counts while no
      participant has finished; finished tasks no longer beat, and a stage may be computed again.
  H2  The longest time of a transaction counts from its begin, by the wall clock, or by the
      monotonic clock since this coordinator has it.
  H3  A coordinator that takes over gives each open transaction a whole lease.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from pk.server.transactions.commands import BatchBegan
from pk.server.transactions.state import ProducerPair


class Heard(NamedTuple):
    """The last join or heartbeat of a participant."""

    at_ms: int
    finished: bool


@dataclass(slots=True)
class _Lease:
    transaction: int
    started_ms: int
    since_ms: int
    heard_ms: int
    finished: bool = False
    #: by pair; a transaction has at most PARTICIPANTS_MAX of them
    participants: dict[ProducerPair, Heard] = field(default_factory=dict)


class Leases:
    """The leases of one coordinator partition.

    lease_ms: participant_lease_ms.  longest_ms: participant_transaction_max_ms
    """

    def __init__(self, lease_ms: int, longest_ms: int) -> None:
        self.lease_ms = lease_ms
        self._longest_ms = longest_ms
        self._leases: dict[str, _Lease] = {}

    def clear(self) -> None:
        """Forget every lease, before the open transactions are taken up again."""
        self._leases.clear()

    def began(self, event: BatchBegan, now_ms: int) -> None:
        """Begin the lease of an open transaction; one that is known goes on."""
        known = self._leases.get(event.job)
        if known is None or known.transaction != event.transaction:
            self._leases[event.job] = _Lease(event.transaction, event.started_ms, now_ms, now_ms)

    def heard(
        self,
        job: str,
        transaction: int,
        pair: ProducerPair,
        now_ms: int,
        *,
        finished: bool = False,
    ) -> None:
        """Renew the lease of a transaction for one of its participants (H1)."""
        known = self._leases.get(job)
        if known is not None and known.transaction == transaction:
            known.heard_ms = now_ms
            known.finished = known.finished or finished
            before = known.participants.get(pair)
            finished = finished or (before is not None and before.finished)
            known.participants[pair] = Heard(now_ms, finished)

    def last_heard(self, job: str, pair: ProducerPair) -> Heard | None:
        """Return the last join or heartbeat of a participant of the open transaction.

        None: it sent none to this coordinator.
        """
        known = self._leases.get(job)
        return None if known is None else known.participants.get(pair)

    def ended(self, job: str, transaction: int) -> None:
        """Drop the lease of a transaction that was decided."""
        known = self._leases.get(job)
        if known is not None and known.transaction == transaction:
            del self._leases[job]

    def late(self, wall_ms: int, now_ms: int) -> list[tuple[str, int]]:
        """Return the transactions that must be aborted, by job and number."""
        return [
            (job, each.transaction)
            for job, each in self._leases.items()
            if (not each.finished and now_ms - each.heard_ms > self.lease_ms)
            or max(wall_ms - each.started_ms, now_ms - each.since_ms) > self._longest_ms
        ]
