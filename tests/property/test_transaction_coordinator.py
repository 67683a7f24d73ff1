"""The transaction coordinator's machine under any order of requests, compared with what it said.

Requests are put into a bag and delivered later, in any order, and any number of times.  Timeouts,
operators, unclean elections and replays come at any moment.  The model keeps only the answers and
records that were seen, and checks that later ones do not contradict them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pk import errors, limits
from pk.server.transactions import commands as c
from pk.server.transactions.records import TransactionLogRecord, metadata_of
from pk.server.transactions.state import NO_PAIR, Phase, ProducerPair, TransactionState
from pk.types import PartitionKey
from pk.wire import pk_pb2 as wire
from tests.unit.server.transactions.coordinator_bench import IDS, TOPIC_ID, Bench, question

NAMES = IDS[:2]
KEYS = [PartitionKey(TOPIC_ID, n) for n in range(3)]
#: A small last epoch, so that producer ids are used up.
EPOCH_LAST = 3
OPEN, PREPARED, ENDED = 1, 2, 3

NAME = st.sampled_from(NAMES)
#: How many pairs back: mostly the newest pair.
BACK = st.sampled_from([0, 0, 0, 1, 2])
MOSTLY = st.sampled_from([True, True, False])
#: A question: the name of an id, how many pairs back, and partitions.
ASKED = st.tuples(NAME, BACK, st.sets(st.sampled_from(KEYS), min_size=1))

S = TransactionState
Request = Callable[[], None]


class CoordinatorModel(RuleBasedStateMachine):
    """Producers, leaders, operators and a coordinator."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(limits, "PRODUCER_EPOCH_LAST", EPOCH_LAST)
        self.bench = Bench()
        self.bag: list[Request] = []
        self.held: dict[str, list[ProducerPair]] = {name: [] for name in NAMES}
        self.owners: dict[int, str] = {}
        self.pairs: dict[str, ProducerPair] = {}  #: the newest pair of each id's records
        self.decided: dict[ProducerPair, bool] = {}
        self.closed: set[ProducerPair] = set()  #: pairs that may not be open (again)
        self.open: dict[ProducerPair, set[PartitionKey]] = {}  #: what leaders may accept
        self.tainted: set[ProducerPair] = set()
        self.wanted: set[ProducerPair] = set()  #: pairs whose producer asked for a commit
        self.unclean: dict[PartitionKey, int] = {}

    def teardown(self) -> None:
        self.patch.undo()

    # -- one command, and what its records and effects may say -------------------------------------

    def run_command(self, command: c.Command) -> Any:
        """Return the reply, or the refusal."""
        known = len(self.bench.log)
        try:
            reply = self.bench.run(command)
        except errors.InternalError:
            raise
        except errors.PkError as refusal:
            reply = refusal
        for record in self.bench.log[known:]:
            self.check_record(record)
        for event in self.bench.effects.get(c.PREPARED, []):
            pair = ProducerPair(event.producer_id, event.marker_epoch - 1)
            assert self.decided[pair] == event.commit
            assert set(event.partitions) >= self.open.get(pair, set())
        return reply

    def check_record(self, record: TransactionLogRecord) -> None:
        known = metadata_of(record)
        if known is None:
            self.pairs.pop(record.key[2:].decode(), None)
            return
        name, pair = known.transactional_id, known.current
        for each in (known.current, known.next):
            if each != NO_PAIR:
                assert self.owners.setdefault(each.producer_id, name) == name
        before = self.pairs.get(name)
        if before is not None and before.producer_id == pair.producer_id:
            assert pair.epoch >= before.epoch
        if before is None or before.producer_id != pair.producer_id:
            assert pair.epoch == 0
        self.pairs[name] = pair
        assert pair.epoch <= EPOCH_LAST
        if known.state is S.ONGOING:
            assert pair not in self.closed
            assert pair not in self.decided
        elif known.state in (S.PREPARE_COMMIT, S.PREPARE_ABORT):
            commit = known.state is S.PREPARE_COMMIT
            assert pair not in self.decided
            assert not commit or (pair in self.wanted and pair not in self.tainted)
            self.decided[pair] = commit
            self.closed.add(pair)
        elif known.previous != NO_PAIR:
            self.closed.add(known.previous)
            assert pair not in self.closed
            if known.state is S.COMPLETE_COMMIT:
                assert self.decided[known.previous]
            elif known.state is S.COMPLETE_ABORT:
                assert not self.decided.get(known.previous, False)

    # -- requests ----------------------------------------------------------------------------------

    def pair_of(self, name: str, back: int) -> ProducerPair:
        """The newest pair that a producer of `name` got, or one of those before it."""
        pairs = self.held[name]
        return pairs[max(0, len(pairs) - 1 - back)] if pairs else NO_PAIR

    @initialize()
    def producers(self) -> None:
        for name in NAMES:
            self.send_init(name, 0, known_pair=False, now=True)

    def send(self, request: Request, now: bool) -> None:
        """Put a request into the bag; `now`: and deliver it for the first time."""
        self.bag.append(request)
        if now:
            request()

    @rule(name=NAME, back=BACK, known_pair=MOSTLY, now=MOSTLY, chance=st.integers(0, 3))
    def begin(self, name: str, back: int, known_pair: bool, now: bool, chance: int) -> None:
        """A producer begins now and then, and mostly goes on."""
        if chance:
            self.write(name, KEYS[chance - 1])
        else:
            self.send_init(name, back, known_pair, now)

    def send_init(self, name: str, back: int, known_pair: bool, now: bool) -> None:
        pair = self.pair_of(name, back) if known_pair else NO_PAIR
        request = wire.InitProducerIdRequest(
            transactional_id=name, producer_id=pair.producer_id, producer_epoch=pair.epoch,
            transaction_timeout_ms=1_000,
        )  # fmt: skip

        def deliver() -> None:
            reply = self.run_command(c.InitProducer(request, self.bench.fresh()))
            if not isinstance(reply, errors.PkError):
                found = ProducerPair(reply.producer_id, reply.producer_epoch)
                assert found not in self.closed
                assert found != pair
                self.held[name].append(found)

        self.send(deliver, now)

    @rule(name=NAME, back=BACK, commit=MOSTLY, now=MOSTLY)
    def send_end(self, name: str, back: int, commit: bool, now: bool) -> None:
        pair = self.pair_of(name, back)
        request = wire.EndTxnRequest(
            transactional_id=name, producer_id=pair.producer_id, producer_epoch=pair.epoch,
            commit=commit,
        )  # fmt: skip

        def deliver() -> None:
            if commit:
                self.wanted.add(pair)
            fresh = self.bench.id_after(pair)
            reply = self.run_command(c.EndTransaction(request, self.bench.image, fresh))
            if isinstance(reply, errors.PkError):
                if isinstance(reply, errors.TransactionAborted):
                    assert commit
                    assert not self.decided.get(pair, False)
                return
            assert self.decided.get(pair, False) == commit
            found = ProducerPair(reply.producer_id, reply.producer_epoch)
            assert found not in self.closed
            self.closed.add(pair)
            self.held[name].append(found)

        self.send(deliver, now)

    @rule(asked=st.lists(ASKED, min_size=1, max_size=3), now=MOSTLY)
    def send_questions(
        self, asked: Sequence[tuple[str, int, set[PartitionKey]]], now: bool
    ) -> None:
        named = [(self.pair_of(name, back), sorted(keys)) for name, back, keys in asked]
        named = [(pair, keys) for pair, keys in named if pair != NO_PAIR]
        questions = []
        for pair, keys in named:
            questions.append(question(pair, *keys))
            for part, key in zip(questions[-1].partitions, keys, strict=True):
                if key in self.unclean:
                    part.unclean_epoch = self.unclean[key]
        request = wire.AddPartitionsToTxnRequest(
            metadata_offset=self.bench.image.offset, questions=questions
        )

        def deliver() -> None:
            before = set(self.closed)
            answers = self.run_command(c.AddPartitions(request))
            assert len(answers) == len(named)
            for (pair, keys), answer in zip(named, answers, strict=True):
                if not answer.HasField("error"):
                    assert pair not in before
                    self.open.setdefault(pair, set()).update(keys)

        self.send(deliver, now)

    @rule(name=NAME, key=st.sampled_from(KEYS))
    def write(self, name: str, key: PartitionKey) -> None:
        """A producer that has the newest pair writes, so that many transactions begin."""
        if self.pair_of(name, 0) not in self.open:
            self.send_questions([(name, 0, {key})], now=True)

    @rule(name=NAME)
    def finish(self, name: str) -> None:
        """The markers of the newest transaction are written, so that many of them complete."""
        self.write_markers(name, 0)

    # -- the network, the clock, operators, leaders ------------------------------------------------

    @rule(at=st.integers(0, 10_000))
    def deliver(self, at: int) -> None:
        """Deliver a request, perhaps once more."""
        self.bag[at % len(self.bag)]()

    @rule(name=NAME, back=BACK)
    def time_out(self, name: str, back: int) -> None:
        pair = self.pair_of(name, back)
        fresh = self.bench.id_after(pair)
        count = self.run_command(c.ExpireTransactions((c.TimedOut(name, *pair, fresh),)))
        assert not count or self.decided[pair] is False

    @rule(name=NAME, back=st.integers(1, 3))
    def write_markers(self, name: str, back: int) -> None:
        """The markers of a transaction are written; of the newest one, or late news of another."""
        known = self.bench.machine.transactions.get(name)
        pair = self.pair_of(name, back) if back or known is None else known.current
        done = self.run_command(c.MarkersWritten(name, pair.producer_id, pair.epoch + 1))
        assert not done or pair in self.decided

    @rule(name=NAME, key=st.sampled_from(KEYS), kind=st.integers(0, 11))
    def disturb(self, name: str, key: PartitionKey, kind: int) -> None:
        """What happens now and then."""
        if kind < 3:
            self.abort_by_operator(name)
        elif kind < 6:
            self.elect_uncleanly(key)
        elif kind < 9:
            self.fail_over()
        elif kind < 11:
            self.bench.now += 400
        else:
            self.forget(name)

    def abort_by_operator(self, name: str) -> None:
        request = wire.AbortTransactionRequest(transactional_id=name)
        self.run_command(c.AbortTransaction(request, self.bench.fresh()))

    def forget(self, name: str) -> None:
        known = self.bench.machine.transactions.get(name)
        request = wire.ForgetTransactionRequest(transactional_id=name)
        reply = self.run_command(c.ForgetTransaction(request))
        if not isinstance(reply, errors.PkError):
            assert known is not None
            self.closed.add(known.current)

    def elect_uncleanly(self, key: PartitionKey) -> None:
        """A leader of the partition begins an epoch without all data."""
        epoch = self.unclean[key] = self.unclean.get(key, 0) + 1
        partitions = self.bench.image.topics[TOPIC_ID].partitions
        partitions[key.partition] = partitions[key.partition]._replace(unclean_epoch=epoch)
        self.bench.image.offset += 1
        lost = [p for p, keys in self.open.items() if key in keys and p not in self.decided]
        self.tainted.update(lost)

    def fail_over(self) -> None:
        """Another broker replays the log in another leader epoch."""
        self.bench.machine = self.bench.replayed()
        self.bench.leader_epoch += 1
        self.bench.numbers = 0
        found = {each.transactional_id: each for each in self.run_command(c.Resume())}
        for name, known in self.bench.machine.transactions.items():
            assert (name in found) == (known.state.phase is not Phase.IDLE)
            if known.state.phase is Phase.PREPARED:
                assert set(found[name].partitions) >= self.open.get(known.current, set())
                assert found[name].commit == self.decided[known.current]

    @invariant()
    def leaders_learn_how_a_transaction_ended(self) -> None:
        """A transaction that leaders accepted is open until its decision, which they learn."""
        newest = set(self.pairs.values())
        for pair in self.open:
            answer = self.run_command(
                c.AddPartitions(
                    wire.AddPartitionsToTxnRequest(
                        questions=[question(pair, KEYS[0], verify_only=True)]
                    )
                )
            )[0]
            if pair not in self.decided:
                assert answer.status == OPEN
            elif answer.status == ENDED:
                assert answer.producer_epoch == pair.epoch + 1
                previous = {k.previous for k in self.bench.machine.transactions.values()}
                assert answer.commit == (self.decided[pair] and pair in previous)
            else:
                assert (answer.status, pair in newest) == (PREPARED, True)


TestCoordinatorModel = CoordinatorModel.TestCase
