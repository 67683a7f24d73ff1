"""The transactional ids of one coordinator partition, by id and by producer id.

Invariants
  I1  `apply` is called in the order of the log, and is the only mutator.
  I2  A producer id belongs to one transactional id.  The index has the current, the next and the
      previous producer id of every id.
  I3  A transactional id has one kind: it is that of a producer, or a job (participants/jobs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pk import errors
from pk.effects import Decision, Effect, Publish
from pk.server.transactions import commands
from pk.server.transactions.commands import TransactionRules
from pk.server.transactions.participants.jobs import Jobs
from pk.server.transactions.participants.state import Job
from pk.server.transactions.records import (
    TRANSACTIONAL_ID,
    TransactionLogRecord,
    decode_key,
    kind_of,
    metadata_of,
    record_of,
)
from pk.server.transactions.state import NO_PAIR, ProducerPair, TransactionMetadata
from pk.transactional_ids import TOPIC, partition_of_id
from pk.types import NONE, ProducerId

Out = Decision[TransactionLogRecord]


def decision(reply: Any, changed: Sequence[TransactionMetadata] = (), *effects: Effect) -> Out:
    """Return a `Decision` that writes these ids and answers `reply`."""
    return Decision([record_of(known) for known in changed], reply, effects)


def began_event(known: TransactionMetadata) -> commands.TransactionBegan:
    """Return the event of an ongoing transaction."""
    return commands.TransactionBegan(
        known.transactional_id, *known.current, known.started_ms, known.timeout_ms
    )


def prepared_event(known: TransactionMetadata) -> commands.TransactionPrepared:
    """Return the event of a prepared transaction; its markers go to every registered partition."""
    return commands.TransactionPrepared(
        known.transactional_id,
        known.current.producer_id,
        known.marker_epoch,
        known.state.committed,
        tuple(known.partitions),
        known.metadata_offset,
    )


def preparation(reply: Any, *ending: TransactionMetadata) -> Out:
    """Return a `Decision` that writes prepared transactions, and publishes them."""
    events = [Publish(commands.PREPARED, prepared_event(known)) for known in ending]
    return decision(reply, ending, *events)


def still_ending(known: TransactionMetadata) -> errors.ConcurrentTransactions:
    """Return the refusal of a request that has to wait for the markers."""
    return errors.ConcurrentTransactions(
        f"the transaction {known.current} of {known.transactional_id!r} is still being ended: "
        "ask again"
    )


class TransactionalIds:
    """The ids, as far as their records are decided."""

    def __init__(self, rules: TransactionRules) -> None:
        self.rules = rules
        self.jobs = Jobs()
        self._by_id: dict[str, TransactionMetadata] = {}
        self._owners: dict[ProducerId, str] = {}

    def items(self) -> Mapping[str, TransactionMetadata]:
        """Return every id with its state."""
        return self._by_id

    def apply(self, offset: int, record: TransactionLogRecord) -> None:
        """Apply one record of the log.  Raises `CorruptLog` and `NewerFormat` for its bytes."""
        plain = kind_of(record.key) == TRANSACTIONAL_ID
        if plain and (record.value is None or record.value.HasField("transaction")):
            self._apply(offset, record)
        if not plain or record.value is None or record.value.HasField("job"):
            self.jobs.apply(offset, record)

    def _apply(self, offset: int, record: TransactionLogRecord) -> None:
        transactional_id = decode_key(record.key)
        known = metadata_of(record)
        for producer_id in _producer_ids(self._by_id.pop(transactional_id, None)):
            del self._owners[producer_id]
        if known is None:
            return
        for producer_id in _producer_ids(known):
            owner = self._owners.setdefault(producer_id, transactional_id)
            if owner != transactional_id:  # I2
                raise errors.CorruptLog(
                    f"{TOPIC}-{self.rules.partition} gives producer id {producer_id} to {owner!r} "
                    f"and, at offset {offset}, to {transactional_id!r}"
                )
        self._by_id[transactional_id] = known

    def find(self, transactional_id: str) -> TransactionMetadata | None:
        """Return an id of this coordinator; None if it is not known.

        Raises `NotCoordinator`, and `InvalidTxnState` for a job (I3).
        """
        self._check_owned(transactional_id)
        if transactional_id in self.jobs.items():
            raise errors.InvalidTxnState(
                f"{transactional_id!r} is the transactional id of a job with many participants: "
                "a producer needs another one"
            )
        return self._by_id.get(transactional_id)

    def find_job(self, job: str) -> Job | None:
        """Return a job of this coordinator; None if it is not known.

        Raises `NotCoordinator`, and `InvalidTxnState` for the id of a producer (I3).
        """
        self._check_owned(job)
        if job in self._by_id:
            raise errors.InvalidTxnState(
                f"{job!r} is the transactional id of a producer: a job needs another one"
            )
        return self.jobs.items().get(job)

    def _check_owned(self, transactional_id: str) -> None:
        partition = partition_of_id(transactional_id)
        if partition != self.rules.partition:
            raise errors.NotCoordinator(
                f"{TOPIC}-{partition} coordinates {transactional_id!r}, not "
                f"{TOPIC}-{self.rules.partition}"
            )

    def known(self, transactional_id: str) -> TransactionMetadata:
        """Return an id of this coordinator.  Raises `TransactionalIdNotFound`."""
        found = self.find(transactional_id)
        if found is None:
            raise errors.TransactionalIdNotFound(
                f"the coordinator does not know the transactional id {transactional_id!r}: it was "
                "never used, or was forgotten.  A producer calls init_transactions first"
            )
        return found

    def owner(self, producer_id: ProducerId) -> TransactionMetadata | None:
        """Return the transactional id that has a producer id; None if none has it."""
        transactional_id = self._owners.get(producer_id)
        return None if transactional_id is None else self._by_id[transactional_id]

    def check_fresh(self, producer_id: ProducerId) -> None:
        """Raise `InternalError` if a transactional id has this producer id already (I2)."""
        owner = self._owners.get(producer_id)
        if owner is None and (found := self.jobs.owner(producer_id)) is not None:
            owner = found[0].job
        if owner is not None:
            raise errors.InternalError(f"producer id {producer_id} is not fresh: {owner!r} has it")

    def next_pair(self, known: TransactionMetadata, fresh_id: ProducerId) -> ProducerPair:
        """Return the pair after the current one: the next epoch, or epoch 0 of `fresh_id` where
        `TransactionRules.needs_fresh_id` says so.

        Raises `InternalError` if a fresh id is needed, and there is none.
        """
        producer_id, epoch = known.current
        if not self.rules.needs_fresh_id(producer_id, epoch):
            return ProducerPair(producer_id, epoch + 1)
        if fresh_id == NONE:
            raise errors.InternalError(
                f"the pair after {known.current} needs another producer id, and no fresh producer "
                "id was given"
            )
        return ProducerPair(fresh_id, 0)


def _producer_ids(known: TransactionMetadata | None) -> tuple[ProducerId, ...]:
    """Return the producer ids of an id, each once (I2)."""
    if known is None:
        return ()
    pairs = (known.current, known.next, known.previous)
    return tuple(dict.fromkeys(pair.producer_id for pair in pairs if pair != NO_PAIR))
