"""The answers to leaders' questions about producers (rules X3, X6).

A leader asks in two cases.  It asks about the first batch of a producer and epoch that is not open
in its log: the partition is registered, and the transaction thereby begins.  And it asks, with
`verify_only`, about a transaction that is open in its log: is it still open, and if not, how did it
end?

Invariants
  A1  A question sees what the questions before it in the same request registered.
  A2  A refused question changes nothing, and other questions do not fail with it.
  A3  The answer "ended" about a pair that the coordinator does not know is an abort.  After an
      unclean election of the coordinator's partition its records may be lost, so it answers nothing
      about older producer ids.
"""

from __future__ import annotations

from pk import errors, limits
from pk.server.transactions import state
from pk.server.transactions.commands import TransactionRules
from pk.server.transactions.ids import TransactionalIds
from pk.server.transactions.participants import questions as participants
from pk.server.transactions.participants.state import Job, Participant
from pk.server.transactions.state import (
    PairRelation,
    Phase,
    ProducerPair,
    TransactionMetadata,
)
from pk.transactional_ids import (
    TOPIC,
    is_transactional,
    partition_of_producer,
)
from pk.types import NONE, Epoch, Offset, PartitionKey, ProducerId
from pk.wire import frames
from pk.wire import pk_pb2 as wire

#: `TxnAnswer.status` of a question with `verify_only`.
OPEN, PREPARED, ENDED = 1, 2, 3
_STATUS = {Phase.ONGOING: OPEN, Phase.PREPARED: PREPARED}


class Questions:
    """The questions of one request, decided in order over a scratch copy of what they change.

    `ids`: the transactional ids, as the machine has them.
    """

    def __init__(
        self,
        rules: TransactionRules,
        ids: TransactionalIds,
        metadata_offset: Offset,
        now_ms: int,
    ) -> None:
        self._rules = rules
        self._ids = ids
        self._metadata_offset = metadata_offset
        self._now_ms = now_ms
        #: The ids that the answers so far change, each with its newest state (A1).
        self.changed: dict[str, TransactionMetadata] = {}
        self.changed_jobs: dict[str, Job] = {}  #: likewise
        self._began: dict[str, None] = {}

    @property
    def began(self) -> list[TransactionMetadata]:
        """The transactions that a question of this request began."""
        return [self.changed[each] for each in self._began]

    def answer(self, question: wire.TxnQuestion) -> wire.TxnAnswer:
        """Decide one question; a refusal is the error of its answer (A2)."""
        pair = ProducerPair(question.producer_id, question.producer_epoch)
        try:
            self._check_partition(pair.producer_id)
            member = self._ids.jobs.owner(pair.producer_id)
            if member is not None:
                return self._about_participant(*member, pair, question)
            known = self._find(pair.producer_id)
            if question.verify_only:
                return self._verified(known, pair)
            self._register(known, pair, question)
        except errors.PkError as refusal:
            return wire.TxnAnswer(error=frames.error_of(refusal))
        return wire.TxnAnswer()

    def _check_partition(self, producer_id: ProducerId) -> None:
        if not is_transactional(producer_id):
            raise errors.InvalidRequest(f"{producer_id} is no producer id of transactions")
        partition = partition_of_producer(producer_id)
        if partition != self._rules.partition:
            raise errors.NotCoordinator(
                f"{TOPIC}-{partition} allocated producer id {producer_id}, not "
                f"{TOPIC}-{self._rules.partition}"
            )

    def _find(self, producer_id: ProducerId) -> TransactionMetadata | None:
        known = self._ids.owner(producer_id)
        return None if known is None else self.changed.get(known.transactional_id, known)

    # -- the first batch of a transaction in a partition -------------------------------------------

    def _register(
        self,
        known: TransactionMetadata | None,
        pair: ProducerPair,
        question: wire.TxnQuestion,
    ) -> None:
        """Add the partitions to the transaction of the current pair, which they may begin."""
        relation = PairRelation.OTHER if known is None else known.relation(pair)
        if known is None or relation not in (PairRelation.CURRENT, PairRelation.NEXT):
            raise _superseded(known, pair)
        if relation is PairRelation.NEXT:
            raise errors.ConcurrentTransactions(
                f"the transaction before {pair} of {known.transactional_id!r} is still being "
                "ended: ask again"
            )
        if known.state.phase is Phase.PREPARED:  # with the pair that is being ended
            raise _superseded(known, pair)
        asked = _asked(pair, question)
        added = {key: epoch for key, epoch in asked.items() if key not in known.partitions}
        if not added:
            return
        if len(known.partitions) + len(added) > limits.TRANSACTION_PARTITIONS_MAX:
            raise errors.InvalidTxnState(
                f"the transaction {pair} of {known.transactional_id!r} would have more than "
                f"{limits.TRANSACTION_PARTITIONS_MAX} partitions: write to fewer of them"
            )
        if known.state.phase is Phase.IDLE:
            self._began[known.transactional_id] = None
        self.changed[known.transactional_id] = state.registered(
            known, added, self._metadata_offset, self._now_ms
        )

    # -- a transaction that is open in a leader's log ----------------------------------------------

    def _verified(self, known: TransactionMetadata | None, pair: ProducerPair) -> wire.TxnAnswer:
        """Say whether the transaction of `pair` is open or prepared, or how it ended."""
        relation = PairRelation.OTHER if known is None else known.relation(pair)
        phase = Phase.IDLE if known is None else known.state.phase
        if relation is PairRelation.CURRENT and phase is not Phase.IDLE:
            return wire.TxnAnswer(status=_STATUS[phase])
        if known is not None and relation is PairRelation.PREVIOUS:
            return _ended(pair, commit=known.state.committed)
        return self._unknown(pair)

    def _unknown(self, pair: ProducerPair) -> wire.TxnAnswer:
        """Answer for a pair whose end is not known (A3)."""
        if self._rules.may_have_lost(pair.producer_id):
            raise errors.CoordinatorUnavailable(
                f"the end of {pair} is not known: {TOPIC}-{self._rules.partition} lost records in "
                f"the unclean election of leader epoch {self._rules.unclean_epoch}.  An operator "
                "must decide how this transaction ends"
            )
        return _ended(pair, commit=False)

    # -- participants of a job ---------------------------------------------------------------------

    def _about_participant(
        self, job: Job, participant: Participant, pair: ProducerPair, question: wire.TxnQuestion
    ) -> wire.TxnAnswer:
        known = self.changed_jobs.get(job.job, job)
        if not question.verify_only:
            asked = _asked(pair, question)
            after = participants.registered(
                known, participant, pair, asked, self._metadata_offset, self._now_ms
            )
            if after is not known:
                self.changed_jobs[job.job] = after
            return wire.TxnAnswer()
        found = participants.outcome(known, participant, pair)
        if isinstance(found, Phase):
            return wire.TxnAnswer(status=_STATUS[found])
        return self._unknown(pair) if found is None else _ended(pair, commit=found)


def _asked(pair: ProducerPair, question: wire.TxnQuestion) -> dict[PartitionKey, Epoch]:
    """Return the partitions of a question with their unclean epochs."""
    if not question.partitions:
        raise errors.InvalidRequest(f"a question about {pair} names no partition")
    return {
        PartitionKey(each.topic_id, each.partition): _unclean_epoch(each)
        for each in question.partitions
    }


def _ended(pair: ProducerPair, *, commit: bool) -> wire.TxnAnswer:
    return wire.TxnAnswer(status=ENDED, commit=commit, producer_epoch=pair.epoch + 1)


def _unclean_epoch(partition: wire.TxnPartition) -> Epoch:
    return partition.unclean_epoch if partition.HasField("unclean_epoch") else NONE


def _superseded(
    known: TransactionMetadata | None, pair: ProducerPair
) -> errors.InvalidProducerEpoch:
    if known is None:
        return errors.InvalidProducerEpoch(
            f"no transactional id has producer id {pair.producer_id}: it was forgotten, or has "
            "another producer id now.  The producer calls init_transactions again"
        )
    return errors.InvalidProducerEpoch(
        f"the transaction {pair} of {known.transactional_id!r} was ended, or a newer producer took "
        f"over: its pair is {known.after_end} now"
    )
