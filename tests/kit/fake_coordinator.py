"""A naive coordinator of transactions, for tests of the client: one dict, no log, no markers.

It follows the table of docs/design/0014-transactions.md.  A transaction is complete at once, unless
`busy` says that the previous one is still being ended.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from pk import errors, transactional_ids
from pk.types import NONE

COMMIT, ABORT = True, False


@dataclass
class FakeTransaction:
    """What the coordinator knows of one transactional id."""

    producer_id: int
    epoch: int
    ongoing: bool = False
    places: dict[Hashable, int] = field(default_factory=dict)  #: partition → first offset
    #: the pair that the last end named, its decision, and the error of the other decision
    previous: tuple[int, int] = (NONE, NONE)
    decision: bool | None = None
    fenced: bool = False
    timed_out: bool = False


@dataclass
class Outcome:
    """A transaction that has ended."""

    producer_id: int
    epoch: int
    commit: bool
    places: dict[Hashable, int]


class FakeCoordinator:
    """All transactional ids.  `ended` has every outcome, in order."""

    def __init__(self, *, epoch_max: int = 2**15 - 2) -> None:
        self.ids: dict[str, FakeTransaction] = {}
        self.ended: list[Outcome] = []
        self.busy = 0  #: so many requests are answered with ConcurrentTransactions
        self._epoch_max = epoch_max
        self._numbers = 0

    def _new_id(self) -> int:
        self._numbers += 1
        return transactional_ids.producer_id(0, 1, self._numbers)

    def _check_busy(self) -> None:
        if self.busy:
            self.busy -= 1
            raise errors.ConcurrentTransactions("the transaction before is being ended")

    # -- requests ----------------------------------------------------------------------------------

    def init(self, transactional_id: str) -> tuple[int, int]:
        """InitProducerId: a new epoch; an open transaction is aborted."""
        self._check_busy()
        found = self.ids.get(transactional_id)
        if found is None:
            found = self.ids[transactional_id] = FakeTransaction(self._new_id(), 0)
            return found.producer_id, found.epoch
        if found.ongoing:
            self._end(found, ABORT)
            raise errors.ConcurrentTransactions("the open transaction is being aborted")
        self._bump(found)
        found.fenced = True
        found.previous = (NONE, NONE)
        return found.producer_id, found.epoch

    def verify(self, producer_id: int, epoch: int, place: Hashable, offset: int) -> None:
        """Answer the question of a leader about a batch; begins the transaction."""
        self._check_busy()
        for found in self.ids.values():
            if (found.producer_id, found.epoch) == (producer_id, epoch):
                found.ongoing = True
                found.places.setdefault(place, offset)
                return
        raise errors.InvalidProducerEpoch(f"{producer_id}, {epoch} is not the current pair")

    def end(
        self, transactional_id: str, producer_id: int, epoch: int, commit: bool
    ) -> tuple[int, int]:
        """EndTxn: the pair of the next transaction."""
        self._check_busy()
        found = self.ids.get(transactional_id)
        if found is None:
            raise errors.TransactionalIdNotFound(transactional_id)
        pair = (producer_id, epoch)
        if pair == (found.producer_id, found.epoch):
            if not found.ongoing and commit:
                raise errors.InvalidTxnState("no transaction is open")
            self._end(found, commit)
            return found.producer_id, found.epoch
        if pair != found.previous:
            raise errors.ProducerFenced(f"{pair} is not the current pair")
        if commit is not found.decision:
            raise (errors.TransactionTimedOut if found.timed_out else errors.TransactionAborted)()
        return found.producer_id, found.epoch

    # -- faults ------------------------------------------------------------------------------------

    def time_out(self, transactional_id: str) -> None:
        """Abort the open transaction, as after transaction_timeout_ms."""
        found = self.ids[transactional_id]
        if found.ongoing:
            self._end(found, ABORT)
            found.timed_out = True

    # -- state -------------------------------------------------------------------------------------

    def _bump(self, found: FakeTransaction) -> None:
        found.epoch += 1
        if found.epoch > self._epoch_max:
            found.producer_id, found.epoch = self._new_id(), 0

    def _end(self, found: FakeTransaction, commit: bool) -> None:
        pair = (found.producer_id, found.epoch)
        self.ended.append(Outcome(*pair, commit, found.places))
        found.places, found.ongoing, found.timed_out = {}, False, False
        found.previous, found.decision = pair, commit
        self._bump(found)
