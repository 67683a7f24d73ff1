"""A coordinator's machine over a list of records, for tests.

Every decision is made twice and must be the same.  After each decision a machine that replays the
records must equal the machine that decided them.
"""

from __future__ import annotations

from typing import Any

from pk import errors
from pk.effects import Publish
from pk.server.metadata.image import MetadataImage
from pk.server.metadata.records import record_of
from pk.server.transactions import commands as c
from pk.server.transactions import records
from pk.server.transactions.machine import TransactionCoordinator
from pk.server.transactions.state import NO_PAIR, ProducerPair, TransactionMetadata
from pk.transactional_ids import partition_of_id
from pk.transactional_ids import producer_id as allocated
from pk.types import NONE, PartitionKey
from pk.wire import frames
from pk.wire import pk_pb2 as wire

NOW = 1_700_000_000_000
ID = "app"
PARTITION = partition_of_id(ID)
#: Transactional ids of the same coordinator partition.
IDS = [name for n in range(300) if partition_of_id(name := f"app-{n}") == PARTITION]
TOPIC_ID = "00000000-0000-0000-0000-00000000000a"
T0, T1, T2 = (PartitionKey(TOPIC_ID, n) for n in range(3))
RULES = c.TransactionRules(PARTITION, 900_000, 7 * 86_400_000)


def image_of(**unclean: int) -> MetadataImage:
    """An image with topic t and three partitions; `p1=5`: partition 1 has that unclean epoch."""
    image = MetadataImage()
    image.apply(0, record_of(wire.TopicRecord(name="t", topic_id=TOPIC_ID)))
    for number in range(3):
        body = wire.PartitionRecord(
            topic_id=TOPIC_ID, partition=number, replicas=[1], isr=[1], leader=1
        )
        if f"p{number}" in unclean:
            body.unclean_epoch = unclean[f"p{number}"]
        image.apply(number + 1, record_of(body))
    return image


class Bench:
    """One machine."""

    def __init__(self, rules: c.TransactionRules = RULES, leader_epoch: int = 3) -> None:
        self.rules = rules
        self.leader_epoch = leader_epoch
        self.numbers = 0
        self.machine = TransactionCoordinator(rules)
        self.log: list[records.TransactionLogRecord] = []
        self.image = image_of()
        self.now = NOW
        self.effects: dict[str, list[Any]] = {}

    def fresh(self) -> int:
        self.numbers += 1
        return allocated(self.rules.partition, self.leader_epoch, self.numbers)

    def id_after(self, pair: ProducerPair) -> int:
        """The producer id of the pair after this one, if it needs another; else NONE."""
        return self.fresh() if self.rules.needs_fresh_id(*pair) else NONE

    def run(self, command: c.Command) -> Any:
        """Decide, append, apply; return the reply or raise it."""
        self.effects = {}
        before = dict(self.machine.transactions)
        try:
            decision = self.machine.decide(command, self.now)
        finally:
            assert self.machine.transactions == before  # `decide` never mutates
        again = self.machine.decide(command, self.now)
        assert again.records == decision.records
        assert again.effects == decision.effects
        keys = [record.key for record in decision.records]
        assert len(keys) == len(set(keys)), "one record per id"
        for record in decision.records:
            stored = records.from_row(*records.to_row(record))
            assert stored == record
            self.machine.apply(len(self.log), stored)
            self.log.append(stored)
        self.check_replay()
        for effect in decision.effects:
            assert isinstance(effect, Publish)
            self.effects.setdefault(effect.name, []).append(effect.value)
        if isinstance(decision.reply, errors.PkError):
            raise decision.reply
        return decision.reply

    def replayed(self) -> TransactionCoordinator:
        machine = TransactionCoordinator(self.rules)
        for offset, record in enumerate(self.log):
            machine.apply(offset, record)
        return machine

    def elected_uncleanly(self, *, lost: int = 0) -> Bench:
        """The next leader's machine, whose log lacks the last `lost` records."""
        epoch = self.leader_epoch + 1
        found = type(self)(self.rules._replace(unclean_epoch=epoch), epoch)
        found.log = self.log[: len(self.log) - lost]
        found.machine = found.replayed()
        return found

    def check_replay(self) -> None:
        """A replay gives an equal machine; so does a replay of the compacted log."""
        compacted = TransactionCoordinator(self.rules)
        newest = {record.key: (at, record) for at, record in enumerate(self.log)}
        for at, record in sorted(newest.values(), key=lambda each: each[0]):
            compacted.apply(at, record)
        for again in (self.replayed(), compacted):
            assert again.transactions == self.machine.transactions
            assert again.jobs == self.machine.jobs

    def known(self, transactional_id: str = ID) -> TransactionMetadata:
        return self.machine.transactions[transactional_id]

    # -- commands ----------------------------------------------------------------------------------

    def init(
        self, transactional_id: str = ID, pair: ProducerPair = NO_PAIR, timeout_ms: int = 60_000
    ) -> ProducerPair:
        request = wire.InitProducerIdRequest(
            transactional_id=transactional_id, producer_id=pair.producer_id,
            producer_epoch=pair.epoch, transaction_timeout_ms=timeout_ms,
        )  # fmt: skip
        reply = self.run(c.InitProducer(request, self.fresh()))
        return ProducerPair(reply.producer_id, reply.producer_epoch)

    def ask_all(
        self, questions: list[wire.TxnQuestion], metadata_offset: int = 2
    ) -> tuple[wire.TxnAnswer, ...]:
        request = wire.AddPartitionsToTxnRequest(
            coordinator_partition=PARTITION, metadata_offset=metadata_offset, questions=questions
        )
        answers: tuple[wire.TxnAnswer, ...] = self.run(c.AddPartitions(request))
        return answers

    def ask(
        self, pair: ProducerPair, *keys: PartitionKey, metadata_offset: int = 2
    ) -> wire.TxnAnswer:
        """Register partitions; raise the refusal."""
        return answered(*self.ask_all([question(pair, *keys)], metadata_offset))

    def verify(self, pair: ProducerPair, key: PartitionKey = T0) -> wire.TxnAnswer:
        return answered(*self.ask_all([question(pair, key, verify_only=True)]))

    def end(self, pair: ProducerPair, *, commit: bool, transactional_id: str = ID) -> ProducerPair:
        request = wire.EndTxnRequest(
            transactional_id=transactional_id, producer_id=pair.producer_id,
            producer_epoch=pair.epoch, commit=commit,
        )  # fmt: skip
        reply = self.run(c.EndTransaction(request, self.image, self.id_after(pair)))
        return ProducerPair(reply.producer_id, reply.producer_epoch)

    def time_out(self, pair: ProducerPair, transactional_id: str = ID) -> int:
        item = c.TimedOut(transactional_id, *pair, self.id_after(pair))
        count: int = self.run(c.ExpireTransactions((item,)))
        return count

    def markers(self, pair: ProducerPair, transactional_id: str = ID) -> bool:
        """The markers of the transaction `pair` are written."""
        marker = c.MarkersWritten(transactional_id, pair.producer_id, pair.epoch + 1)
        done: bool = self.run(marker)
        return done

    def abort(self, transactional_id: str = ID) -> None:
        request = wire.AbortTransactionRequest(transactional_id=transactional_id)
        self.run(c.AbortTransaction(request, self.fresh()))

    def forget(self, transactional_id: str = ID) -> None:
        request = wire.ForgetTransactionRequest(transactional_id=transactional_id)
        self.run(c.ForgetTransaction(request))

    # -- histories ---------------------------------------------------------------------------------

    def begun(self, transactional_id: str = ID, *keys: PartitionKey) -> ProducerPair:
        """A producer with an ongoing transaction; returns its pair."""
        pair = self.init(transactional_id)
        self.ask(pair, *(keys or (T0,)))
        return pair

    def at_epoch(self, epoch: int, transactional_id: str = ID) -> ProducerPair:
        """An idle id whose producer has reached `epoch`."""
        pair = ProducerPair(self.init(transactional_id).producer_id, epoch)
        row = self.log[-1].value
        assert row is not None
        changed = wire.TransactionRecord.FromString(row.SerializeToString())
        changed.transaction.producer_epoch = epoch
        record = records.TransactionLogRecord(self.log[-1].key, changed)
        self.machine.apply(len(self.log), record)
        self.log.append(record)
        return pair


def question(
    pair: ProducerPair, *keys: PartitionKey, verify_only: bool = False, unclean_epoch: int = NONE
) -> wire.TxnQuestion:
    found = wire.TxnQuestion(
        producer_id=pair.producer_id, producer_epoch=pair.epoch, verify_only=verify_only
    )
    for key in keys:
        part = found.partitions.add(topic_id=key.topic_id, partition=key.partition, leader_epoch=1)
        if unclean_epoch != NONE:
            part.unclean_epoch = unclean_epoch
    return found


def answered(answer: wire.TxnAnswer) -> wire.TxnAnswer:
    if answer.HasField("error"):
        raise frames.raise_error(answer.error)
    return answer


def after(pair: ProducerPair, epochs: int = 1) -> ProducerPair:
    return ProducerPair(pair.producer_id, pair.epoch + epochs)
