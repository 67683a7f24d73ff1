"""The driver of log and table over a real Delta table and the real machine of a coordinator (X11).

The client lives in a simulated world; only the network and the leaders' markers are made up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from pk import errors
from pk.client import table_driver
from pk.client.participant import BatchOfRun
from pk.client.table_committer import TableBatchCommitter
from pk.client.table_driver import AwaitedBatch, DecidingTable, JobState, WrittenLog
from pk.server.transactions import commands as c
from pk.sim.world import SimWorld
from pk.tiering.table_evidence import RETENTION_PROPERTY, state_of
from pk.types import NONE, RowSums
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from tests.kit.fake_broker import FakeBroker, FakeCluster
from tests.unit.server.transactions.coordinator_bench import TOPIC_ID, image_of
from tests.unit.server.transactions.test_participants import JOB
from tests.unit.server.transactions.test_preparations import TableBench

APP, ROWS = "app", pa.table({"x": [1, 2]})
SUMS = {TOPIC_ID: RowSums(10, 100, 7)}
LOST = "lost"


class Coordinator(FakeBroker):
    """A broker with the coordinator of one job, whose markers are written at once.

    faults: what happens to the next requests: a refusal, or LOST (the answer is)
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.bench = TableBench()
        self.faults: list[errors.PkError | str] = []
        self.item_faults: list[errors.PkError] = []
        self.asked: list[str] = []

    def _handlers(self) -> dict[str, Any]:
        def handler(answer: Callable[[Any], Any]) -> Any:
            async def handle(request: Any, _: Any) -> Any:
                self.asked.append(type(request).__name__)
                fault = self.faults.pop(0) if self.faults else None
                if isinstance(fault, errors.PkError):
                    raise fault
                reply = answer(request)
                if fault == LOST:
                    await self.world.clock.sleep_ms(60_000)
                return reply

            return handle

        more = {
            "describe_transactions": self._describe,
            "prepare_participants": self._prepare,
            "commit_participants": self._commit,
            "abort_participants": self._abort,
        }
        return super()._handlers() | {name: handler(answer) for name, answer in more.items()}

    def _describe(self, request: Any) -> wire.DescribeTransactionsReply:
        found = self.bench.run(c.DescribeTransactions(tuple(request.transactional_ids)))
        reply = wire.DescribeTransactionsReply(transactions=found)
        if self.item_faults:
            reply.transactions[0].error.CopyFrom(frames.error_of(self.item_faults.pop(0)))
        return reply

    def _prepare(self, request: Any) -> Any:
        return self._ended(c.PrepareParticipants(request, self.bench.image))

    def _commit(self, request: Any) -> Any:
        return self._ended(c.CommitParticipants(request, self.bench.image))

    def _abort(self, request: Any) -> Any:
        return self._ended(c.AbortParticipants(request))

    def _ended(self, command: Any) -> Any:
        try:
            return self.bench.run(command)
        finally:
            if self.bench.effects.get(c.PREPARED):
                self.bench.marked()


class Lake:
    """A coordinator, a real table, and the drivers of one query."""

    def __init__(self, sim_thread: Any, path: Path) -> None:
        self.sim = SimWorld(1)
        self.cluster = FakeCluster()
        self.broker = Coordinator(self.cluster, self.sim.world_of("b1"), 1)
        self.sim.spawn("b1", self.broker.listen("b1:9292"))
        self.sim.loop.run_for_ms(10)
        sim_thread(self.sim)
        self.path, self.url = path, path.as_uri()
        self.append("setup", 0)
        self.open: list[TableBatchCommitter] = []

    @property
    def bench(self) -> TableBench:
        return self.broker.bench

    @property
    def state(self) -> str:
        [found] = self.bench.run(c.DescribeTransactions((JOB,)))
        return str(found.state)

    def append(self, app: str, version: int) -> None:
        """Commit to the table as Delta does: a version that it has is skipped."""
        has = state_of(self.url, app).version if self.path.exists() else None
        if has is not None and has >= version:
            return
        properties = CommitProperties(app_transactions=[Transaction(app, version)])
        write_deltalake(self.path, ROWS, mode="append", commit_properties=properties)

    def table(self, batch: int = 0) -> DecidingTable:
        return DecidingTable(self.url, str(DeltaTable(self.path).metadata().id), APP, batch)

    def committer(self, batch: int = 0, run: str = "r1", **options: Any) -> TableBatchCommitter:
        made = TableBatchCommitter("b1:9292", BatchOfRun(JOB, "q", run, batch), **options)
        self.open.append(made)
        return made

    def prepared(self, batch: int = 0, run: str = "r1") -> AwaitedBatch:
        pair = self.bench.join(batch, run)
        found = self.committer(batch, run).prepare([tuple(pair)], SUMS, self.table(batch))
        assert found is not None
        return found

    def drive(
        self,
        batch: int,
        run: str,
        *,
        dies_at: type | None = None,
        table: DecidingTable | None = None,
    ) -> bool:
        """Be the driver of a run; False: it died before a step."""
        driver, table = self.committer(batch, run), table or self.table(batch)

        class Died(Exception):
            pass

        def perform(step: table_driver.Step) -> Any:
            if dies_at is not None and isinstance(step, dies_at):
                raise Died
            match step:
                case table_driver.AskJob():
                    return driver.job()
                case table_driver.ReadTable(url, app):
                    return state_of(url, app)
                case table_driver.WriteLog():
                    reply = self.bench.join_reply(batch, run)
                    pair = reply.producer_id, reply.producer_epoch
                    return WrittenLog([] if reply.committed else [pair], SUMS)
                case table_driver.Prepare(written, decides):
                    return driver.prepare(*written, decides)
                case table_driver.WriteTable(app, version):
                    return self.append(app, version)
                case table_driver.Decide(awaited, commit):
                    return driver.decide(awaited, commit=commit)
                case table_driver.CommitSums(sums):
                    return driver.commit((), sums)

        try:
            table_driver.driven(table_driver.steps(table), perform)
        except Died:
            return False
        return True

    @property
    def rows(self) -> int:
        """The rows of the table beside those of its first commit."""
        return len(DeltaTable(self.path).to_pyarrow_table()) - len(ROWS)

    def close(self) -> None:
        for each in self.open:
            each.close()
        self.sim.close()


@pytest.fixture
def lake(sim_thread: Any, tmp_path: Path) -> Iterator[Lake]:
    made = Lake(sim_thread, tmp_path / "table")
    yield made
    made.close()


# -- the calls -------------------------------------------------------------------------------------


def test_a_job_that_the_coordinator_does_not_know_has_no_batch(lake: Lake) -> None:
    assert lake.committer().job() == JobState(NONE, None)


def test_a_job_tells_its_last_batch_and_the_prepared_one(lake: Lake) -> None:
    lake.bench.committed(0)
    assert lake.committer(1).job() == JobState(0, None)
    lake.bench.join(1)
    assert lake.committer(1).job() == JobState(0, None)  # open, and not prepared
    awaited = lake.committer(1).prepare([tuple(lake.bench.join(1))], SUMS, lake.table(1))
    assert awaited == AwaitedBatch(1, lake.table(1), 2)
    assert lake.committer(1, "r2").job() == JobState(0, awaited)


def test_a_description_that_comes_too_early_is_asked_for_again(lake: Lake) -> None:
    lake.bench.committed(0)
    lake.broker.item_faults = [errors.CoordinatorLoading("replays"), errors.NotCoordinator("moved")]
    assert lake.committer(1).job().last == 0
    assert lake.broker.asked.count("DescribeTransactionsRequest") == 3


def test_a_repeated_preparation_has_the_same_transaction(lake: Lake) -> None:
    """The first answer is lost, and the call is repeated by the client."""
    pair = tuple(lake.bench.join(0))
    lake.broker.faults = [LOST]
    driver = lake.committer(request_timeout_ms=500)
    assert driver.prepare([pair], SUMS, lake.table()) == AwaitedBatch(0, lake.table(), 1)
    assert lake.broker.asked.count("PrepareParticipantsRequest") == 2


def test_a_committed_batch_is_compared_and_not_prepared(lake: Lake) -> None:
    pair = lake.bench.committed(0)
    driver = lake.committer()
    assert driver.prepare([tuple(pair)], SUMS, lake.table()) is None
    others = {TOPIC_ID: RowSums(11, 110, 8)}
    with pytest.raises(errors.ReplayDiffers, match="onReplayMismatch=accept"):
        driver.prepare([tuple(pair)], others, lake.table())
    assert driver.prepare([tuple(pair)], others, lake.table(), accept_mismatch=True) is None
    assert lake.state == "CompleteCommit"


def test_a_participant_that_is_not_of_the_batch_is_not_prepared(lake: Lake) -> None:
    producer_id, epoch = lake.bench.join(0)
    with pytest.raises(errors.InvalidTxnState):
        lake.committer().prepare([(producer_id, epoch + 1)], SUMS, lake.table())
    assert lake.state == "Ongoing"


def test_decisions_end_the_batch(lake: Lake) -> None:
    assert lake.committer().decide(lake.prepared(0), commit=False) == ""
    assert lake.state == "CompleteAbort"
    assert lake.committer().decide(lake.prepared(0, "r2"), commit=True) == ""
    assert lake.state == "CompleteCommit"


def test_an_unclean_election_since_the_preparation_is_told(lake: Lake) -> None:
    awaited = lake.prepared()
    lake.bench.image = image_of(p1=4)
    assert "unclean leader election" in lake.committer().decide(awaited, commit=True)


@pytest.mark.parametrize("commit", [True, False])
def test_a_decision_about_an_earlier_transaction_is_refused(lake: Lake, commit: bool) -> None:
    earlier = lake.prepared()
    lake.committer().decide(earlier, commit=False)
    lake.prepared(0, "r2")
    with pytest.raises(errors.InvalidTxnState, match="Read the table again"):
        lake.committer().decide(earlier, commit=commit)
    assert lake.state == "AwaitingTable"


@pytest.mark.parametrize("commit", [True, False])
def test_a_decision_whose_answer_is_lost_is_made_once(lake: Lake, commit: bool) -> None:
    awaited = lake.prepared()
    lake.broker.faults = [LOST]
    lake.committer(request_timeout_ms=500).decide(awaited, commit=commit)
    assert lake.state == ("CompleteCommit" if commit else "CompleteAbort")
    assert lake.bench.job.transaction == 1


def test_no_outcome_in_time_says_what_it_waits_for(lake: Lake) -> None:
    lake.broker.faults = [errors.CoordinatorLoading("replays")] * 1_000
    driver = lake.committer(max_block_ms=2_000)
    for call in (driver.job, lambda: driver.decide(AwaitedBatch(0, lake.table(), 1), commit=True)):
        with pytest.raises(errors.RequestTimedOut, match="CoordinatorLoading"):
            call()


def test_a_closed_committer_asks_nothing(lake: Lake) -> None:
    driver, table = lake.committer(), lake.table()
    driver.close()
    awaited = AwaitedBatch(0, table, 1)
    for call in (
        driver.job,
        lambda: driver.prepare([], {}, table),
        lambda: driver.decide(awaited, commit=True),
    ):
        with pytest.raises(errors.ClosedError):
            call()
    assert not lake.broker.asked


# -- drivers and the table -------------------------------------------------------------------------


def test_a_batch_is_in_both_once(lake: Lake) -> None:
    assert lake.drive(0, "r1")
    assert lake.drive(1, "r1")
    assert lake.drive(1, "r2")  # it died before Spark noted the batch
    assert (lake.bench.job.last_committed, lake.rows) == (1, 4)


@pytest.mark.parametrize(
    "dies_at",
    [
        table_driver.AskJob,
        table_driver.WriteLog,
        table_driver.Prepare,
        table_driver.WriteTable,
        table_driver.Decide,
    ],
)
def test_the_next_driver_completes_what_one_left(lake: Lake, dies_at: type) -> None:
    assert not lake.drive(0, "r1", dies_at=dies_at)
    held = dies_at in (table_driver.WriteTable, table_driver.Decide)
    assert (lake.bench.machine.jobs.items().get(JOB) is not None) >= held
    assert not held or lake.state == "AwaitingTable"
    for run in ("r2", "r2"):  # a new run aborts what is open, and waits for the markers
        try:
            assert lake.drive(0, run)
        except errors.ConcurrentTransactions:
            lake.bench.marked()
    assert (lake.state, lake.rows) == ("CompleteCommit", 2)


def test_a_driver_that_commits_to_the_table_late_is_skipped(lake: Lake) -> None:
    """The first driver stops before its commit; the second one writes both; then it goes on."""
    lake.drive(0, "r1", dies_at=table_driver.WriteTable)
    late = lake.bench.job.transaction
    lake.drive(0, "r2")
    lake.append(APP, 0)
    awaited = AwaitedBatch(0, lake.table(), late)
    assert lake.committer(0, "r1").decide(awaited, commit=True) == ""  # it is committed already
    assert (lake.state, lake.rows) == ("CompleteCommit", 2)


def test_a_commit_that_comes_after_the_abort_is_not_repeated(lake: Lake) -> None:
    lake.drive(0, "r1", dies_at=table_driver.WriteTable)
    lake.drive(0, "r2", dies_at=table_driver.WriteLog)
    assert lake.state == "CompleteAbort"
    lake.append(APP, 0)
    assert lake.drive(0, "r3")
    assert (lake.state, lake.rows) == ("CompleteCommit", 2)


def _recreated(lake: Lake) -> None:
    for each in sorted(lake.path.rglob("*"), reverse=True):
        each.rmdir() if each.is_dir() else each.unlink()
    lake.path.rmdir()
    lake.append("setup", 0)


def _forgets(lake: Lake) -> None:
    DeltaTable(lake.path).alter.set_table_properties({RETENTION_PROPERTY: "interval 1 day"})


def _other_protocol(lake: Lake) -> None:
    properties = {"delta.enableDeletionVectors": "true"}
    DeltaTable(lake.path).alter.set_table_properties(properties)


def _away(lake: Lake) -> None:
    lake.path.rename(lake.path.with_name("elsewhere"))


@pytest.mark.parametrize(
    ("spoil", "error", "words"),
    [
        (_recreated, errors.InvalidTxnState, "pk transactions resolve"),
        (_forgets, errors.InvalidTxnState, "setTransactionRetentionDuration"),
        (_other_protocol, errors.TierTableChanged, "T8"),
    ],
)
def test_a_table_that_cannot_tell_leaves_the_batch_prepared(
    lake: Lake, spoil: Callable[[Lake], None], error: type[errors.PkError], words: str
) -> None:
    lake.drive(0, "r1", dies_at=table_driver.WriteTable)
    spoil(lake)
    with pytest.raises(error, match=words):
        lake.drive(0, "r2")
    assert (lake.state, lake.bench.job.transaction) == ("AwaitingTable", 1)


def test_a_table_that_is_away_leaves_the_batch_prepared(lake: Lake) -> None:
    lake.drive(0, "r1", dies_at=table_driver.Decide)
    known = lake.table()
    _away(lake)
    with pytest.raises(errors.TierUnavailable):
        lake.drive(0, "r2", table=known)
    lake.path.with_name("elsewhere").rename(lake.path)
    assert lake.state == "AwaitingTable"
    assert lake.drive(0, "r2")
    assert (lake.state, lake.rows) == ("CompleteCommit", 2)


def test_a_batch_without_rows_is_recorded_in_both(lake: Lake) -> None:
    driver, table = lake.committer(), lake.table()
    answers = iter([driver.job(), WrittenLog([], {}), None])

    def perform(step: table_driver.Step) -> Any:
        if isinstance(step, table_driver.WriteTable):
            lake.append(step.app, step.version)
        if isinstance(step, table_driver.CommitSums):
            return driver.commit((), step.sums)
        return next(answers)

    assert not table_driver.driven(table_driver.steps(table), perform)
    assert (lake.bench.job.last_committed, state_of(lake.url, APP).version) == (0, 0)
