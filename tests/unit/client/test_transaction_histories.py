"""Any history of a producer's transactions is all or nothing."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pk import errors
from tests.kit.fake_broker import APPEND, BREAK, LOSE_REPLY, SILENT
from tests.unit.client.test_transaction_engine import ABORT, COMMIT, ID, INIT, S, TransactionBench

TRANSACTIONS = 12
#: Of a batch: the answer is lost, the stream breaks, the leader or the coordinator is not ready.
BATCH_FAULTS: list[Any] = [
    LOSE_REPLY, BREAK, SILENT, errors.NotLeaderOrFollower("moving"),
    errors.ConcurrentTransactions("the one before"), errors.CoordinatorLoading("replays"),
]  # fmt: skip
#: Of an EndTxn.
END_FAULTS: list[Any] = [LOSE_REPLY, SILENT, errors.CoordinatorUnavailable()]


class History:
    """An application that follows docs/transactions.md, and faults; the last transaction has none.

    sent: transaction → number of its records.  decided: transaction → whether commit returned.
    """

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.calm = False
        self.sent: dict[int, int] = {}
        self.decided: dict[int, bool] = {}
        self.bench = TransactionBench(
            seed % 1000, nodes=2, linger_ms=rng.choice([0, 3]),
            batch_size=rng.choice([64, 1 << 20]), request_timeout_ms=400,
            delivery_timeout_ms=3 * S, max_in_flight=rng.randint(1, 5),
        )  # fmt: skip
        self.bench.cluster.create("t", 3)
        for broker in self.bench.brokers.values():
            broker.on_produce = self.verdict

    def verdict(self, log: Any, header: Any) -> Any:
        drawn = 1.0 if self.calm else self.rng.random()
        if drawn < 0.02:
            return errors.RecordTooLarge("drawn")
        return self.rng.choice(BATCH_FAULTS) if drawn < 0.12 else APPEND

    def disturb(self) -> None:
        drawn = 1.0 if self.calm else self.rng.random()
        cluster = self.bench.cluster
        if drawn < 0.15:
            log = cluster.log("t", self.rng.randrange(3))
            log.leader, log.epoch = 3 - log.leader, log.epoch + 1
        elif drawn < 0.25:
            cluster.coordinator_node = 3 - cluster.coordinator_node
        elif drawn < 0.32:
            cluster.coordinator.time_out(ID)
        elif drawn < 0.5:
            cluster.coordinator_faults.append(self.rng.choice(END_FAULTS))
        elif drawn < 0.6:
            cluster.coordinator.busy = self.rng.randint(1, 3)

    async def transaction(self, number: int) -> None:
        b, rng = self.bench, self.rng
        await b.begun()
        for _ in range(rng.randint(1, 6)):
            await b.send("t", b"%d" % number, partition=rng.randrange(3))
            self.sent[number] = self.sent.get(number, 0) + 1
            if rng.random() < 0.5:
                await b.world.clock.sleep_ms(rng.randint(0, 20))
            self.disturb()
        if not self.calm and rng.random() < 0.2:
            await b.call(ABORT)
            self.decided[number] = False
            return
        while True:
            try:
                await b.call(COMMIT, rng.choice([50, 10 * S]))
            except errors.RequestTimedOut:
                continue
            break
        self.decided[number] = True

    async def run(self) -> None:
        await self.bench.call(INIT)
        for number in range(TRANSACTIONS):
            self.calm = number == TRANSACTIONS - 1
            try:
                await self.transaction(number)
            except errors.TransactionAborted:
                self.decided[number] = False
                await self.bench.call(ABORT)


@given(seed=st.integers(0, 2**20))
@settings(max_examples=25, deadline=None)
def test_any_history_is_all_or_nothing(seed: int) -> None:
    """Lost replies, broken streams, refusals, time-outs; leaders and coordinators that move."""
    history = History(seed)
    b = history.bench
    try:
        b.run(history.run)
        found = Counter(int(value or b"") for value in b.cluster.committed("t"))
        committed = [number for number, commit in history.decided.items() if commit]
        assert found == {number: history.sent[number] for number in committed}
        assert TRANSACTIONS - 1 in committed, "without faults, a transaction commits"
        for log in b.cluster.logs_of("t"):
            ours = [int(value or b"") for _, _, value in log.rows()]
            assert ours == sorted(ours), "in order"
    finally:
        b.close()
