"""The answers to leaders' questions about participants (rules X3, X5, X6).

A join registers every partition of its topics, so the first question about a partition is answered
without a record.  Only a partition that the topic gained later is registered by its question.
"""

from __future__ import annotations

from collections.abc import Mapping

from pk import errors, limits
from pk.server.transactions.participants import state
from pk.server.transactions.participants.state import Job, Participant
from pk.server.transactions.state import Phase, ProducerPair
from pk.types import Epoch, Offset, PartitionKey


def registered(
    known: Job,
    participant: Participant,
    pair: ProducerPair,
    asked: Mapping[PartitionKey, Epoch],
    metadata_offset: Offset,
    now_ms: int,
) -> Job:
    """Return the job with the partitions of a question; the same job if it has them.

    Raises `InvalidProducerEpoch` for a pair that is not part of the open transaction.
    """
    part = known.joined(participant) and participant.epoch == pair.epoch
    if not part or not known.open:
        raise errors.InvalidProducerEpoch(
            f"{pair} is not part of an open transaction of {known.job!r}: its batch was ended"
        )
    added = {key: epoch for key, epoch in asked.items() if key not in known.partitions}
    if not added:
        return known
    if len(known.partitions) + len(added) > limits.TRANSACTION_PARTITIONS_MAX:
        raise errors.InvalidTxnState(
            f"{known.name} would have more than {limits.TRANSACTION_PARTITIONS_MAX} partitions: "
            "write to fewer of them"
        )
    return state.registered(known, added, metadata_offset, now_ms)


def outcome(known: Job, participant: Participant, pair: ProducerPair) -> Phase | bool | None:
    """Return whether the transaction of `pair` is open or prepared, or else whether it committed.

    None: the job does not know.  Its later transactions began once each partition had the marker of
    this one, so a leader that still asks lost records, or asked before the marker came.
    """
    if participant.epoch != pair.epoch or not known.joined(participant):
        return None
    if known.state.phase is not Phase.IDLE:
        return known.state.phase
    return known.state.committed and pair.producer_id in known.named
