"""Decisions about tasks that join the transaction of their batch (X5, X7, X8, X9).

Invariants
  B2  A participant's pair was never used before.  A join takes a producer id that no participant of
      the open transaction has, with the epoch of the marker that ended its last transaction.
"""

from __future__ import annotations

from collections.abc import Mapping

from pk import errors, generations, limits, transactional_ids
from pk.effects import Decision, Publish
from pk.server.metadata.image import MetadataImage
from pk.server.transactions import commands
from pk.server.transactions.ids import Out, TransactionalIds
from pk.server.transactions.participants import records, state
from pk.server.transactions.participants.conditions import BatchCheck, awaits_table, checked
from pk.server.transactions.participants.events import began_event, changed
from pk.server.transactions.participants.state import Job, Participant
from pk.types import NONE, Epoch, PartitionKey, ProducerId
from pk.wire import pk_pb2 as wire


def join(ids: TransactionalIds, command: commands.JoinTransaction, now_ms: int) -> Out:
    """Make a task a participant of its batch, or say that the batch is committed."""
    request = command.request
    before = ids.jobs.items().get(request.batch.job)
    found = checked(ids, request.batch, now_ms)
    if isinstance(found, Decision):
        return found
    if found.sums is not None:
        reply = wire.JoinTransactionReply(
            producer_id=NONE,
            producer_epoch=NONE,
            committed=True,
            sums=records.sums_to_wire(found.sums),
        )
        return Decision(changed(before, found.known), reply)
    if before is None:
        _require_history(request.batch, command.fresh_id)
    if found.awaiting:
        raise errors.InvalidTxnState(f"no task joins any more: {awaits_table(found.known)}")
    added = _partitions_of_topics(request, command.image)
    known = _with_partitions(found, request, added, now_ms)
    pair = _free(ids, known, command.fresh_id)
    joined = records.participant_record(known.job, pair[0], Participant(pair[1], known.transaction))
    reply = wire.JoinTransactionReply(producer_id=pair[0], producer_epoch=pair[1])
    effects = [] if found.open else [Publish(commands.BATCH_BEGAN, began_event(known))]
    return Decision([*changed(before, known), joined], reply, effects)


def _require_history(asked: wire.JobBatch, fresh_id: ProducerId) -> None:
    """Raise `ReplayDiffers` if a restore may have lost that the batch is committed (rule T13).

    The rows of the batch may be in a table, and nothing in the store says so.  The coordinator of a
    restored cluster counts its leader epochs, which are in its producer ids, in the block of the
    restore.  A new query begins with batch 0, and a batch write is known for a day only.
    """
    epoch = transactional_ids.epoch_of_producer(fresh_id)
    restored = generations.generation_of_epoch(epoch) > 0
    if restored and asked.batch > 0 and not asked.batch_write and not asked.write_unknown:
        raise errors.ReplayDiffers(
            f"batch {asked.batch} of {asked.job!r} may be committed: this cluster was restored "
            "from its tier, and the batches that the lost one committed are not known. Look for "
            "the batch's last rows in the topic. If they are missing, onLostHistory=write writes "
            "the batch; if some are there, it writes them a second time"
        )


def _partitions_of_topics(
    request: wire.JoinTransactionRequest, image: MetadataImage
) -> dict[PartitionKey, Epoch]:
    """Return every partition of the topics, each with its unclean epoch.

    Raises `UnknownTopicOrPartition`.  The caller has waited until `image` is as new as the image of
    the broker that told the client the topic ids.
    """
    added: dict[PartitionKey, Epoch] = {}
    for topic_id in request.topic_ids:
        topic = image.topics.get(topic_id)
        if topic is None:
            raise errors.UnknownTopicOrPartition(
                f"{request.batch.job!r} writes to topic id {topic_id}, which was deleted"
            )
        for number, partition in topic.partitions.items():
            added[PartitionKey(topic_id, number)] = partition.unclean_epoch
    if not added:
        raise errors.InvalidRequest(f"a join of {request.batch.job!r} names no topic")
    return added


def _with_partitions(
    found: BatchCheck,
    request: wire.JoinTransactionRequest,
    added: Mapping[PartitionKey, Epoch],
    now_ms: int,
) -> Job:
    """Return the open job with these partitions; a job that is idle is opened."""
    known = found.known
    if len(known.partitions.keys() | added.keys()) > limits.TRANSACTION_PARTITIONS_MAX:
        raise errors.InvalidTxnState(
            f"batch {request.batch.batch} of {known.job!r} would have more than "
            f"{limits.TRANSACTION_PARTITIONS_MAX} partitions: write to fewer of them"
        )
    if not found.open:
        return state.begun(known, request.batch.batch, added, request.metadata_offset, now_ms)
    if added.keys() <= known.partitions.keys():
        return known
    return state.registered(known, added, request.metadata_offset, now_ms)


def _free(ids: TransactionalIds, known: Job, fresh_id: ProducerId) -> tuple[ProducerId, int]:
    """Return the pair of the next participant (B2)."""
    pool = ids.jobs.participants(known.job)
    for producer_id, each in pool.items():
        spent = ids.rules.needs_fresh_id(producer_id, each.epoch)
        if not known.joined(each) and not spent:
            return producer_id, each.epoch + 1
    if sum(known.joined(each) for each in pool.values()) >= limits.PARTICIPANTS_MAX:
        raise errors.InvalidTxnState(
            f"{known.name} has {limits.PARTICIPANTS_MAX} participants, and no transaction has "
            "more of them: write it with fewer tasks"
        )
    ids.check_fresh(fresh_id)
    return fresh_id, 0
