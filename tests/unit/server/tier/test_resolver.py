"""What the resolver decides about prepared batches, and what it leaves to an operator (X11)."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from pk import errors
from pk.server.tier.resolver import LOOK_AGAIN_MS, BatchResolver
from pk.sim.world import SimWorld
from pk.tiering.table_decision import has_batch
from pk.tiering.table_urls import is_listed, normal_url, prefixes_of
from pk.wire import frames
from pk.wire import pk_pb2 as wire

URL = "file:///lake/t"
MAX_MS = 10_000
TABLE = wire.PreparedTable(url=URL, table_id="d", app="app", version=4)


class State(NamedTuple):
    table_id: str = "d"
    version: int | None = None
    retention: str = ""


class Rig:
    """A broker with one prepared batch, and its table."""

    def __init__(self, urls: str = "file:///lake") -> None:
        self.sim = SimWorld(1)
        self.clock = self.sim.world_of("tier").clock
        self.table: State | errors.PkError = State()
        self.reads = 0
        self.ended: list[Any] = []
        self.refusal: errors.PkError | None = None
        self.lines: list[tuple[str, dict[str, Any]]] = []
        self.job = wire.JobDescription(
            query="q", run="r", batch=4, last_committed=3,
            awaited=wire.AwaitedTable(table=TABLE, transaction=9),
        )  # fmt: skip
        self.resolver = BatchResolver(
            self.clock,
            self._ask,
            self,
            prefixes_of(urls),
            MAX_MS,
            log=self,  # type: ignore[arg-type]
        )

    def error(self, event: str, **facts: Any) -> None:
        self.lines.append((event, facts))

    async def read(self, url: str, app: str) -> State:
        assert (url, app) == (URL, "app")
        self.reads += 1
        if isinstance(self.table, errors.PkError):
            raise self.table
        return self.table

    async def _ask(self, request: Any) -> Any:
        if isinstance(request, wire.ListTransactionsRequest):
            assert request.states == ["AwaitingTable"]
            names = ["j"] if self.job.HasField("awaited") else []
            found = [wire.TransactionListing(transactional_id=each) for each in names]
            return wire.ListTransactionsReply(transactions=found)
        if isinstance(request, wire.DescribeTransactionsRequest):
            reply = wire.DescribeTransactionsReply()
            for name in request.transactional_ids:
                reply.transactions.add(transactional_id=name, job=self.job)
            return reply
        if self.refusal is not None:
            raise self.refusal
        self.ended.append(request)
        self.job.ClearField("awaited")
        if isinstance(request, wire.CommitParticipantsRequest):
            self.job.last_committed = 4
            return wire.CommitParticipantsReply()
        return wire.AbortParticipantsReply()

    def after(self, ms: int) -> None:
        """Look once, `ms` later."""

        async def look() -> None:
            await self.clock.sleep_ms(ms)
            await self.resolver.look()

        task = self.sim.spawn("tier", look())
        self.sim.run_until(task.done)
        task.result()

    def late(self) -> None:
        """Look when the batch has waited for prepared_max_ms."""
        self.after(0)
        self.after(MAX_MS)


@pytest.fixture
def rig() -> Any:
    made = Rig()
    yield made
    made.sim.close()


def test_a_batch_that_the_table_has_is_committed(rig: Rig) -> None:
    rig.table = State(version=4, retention="interval 1 day")
    rig.late()
    [request] = rig.ended
    assert isinstance(request, wire.CommitParticipantsRequest)
    assert request.batch == wire.JobBatch(job="j", query="q", run="r", batch=4)
    assert request.evidence == wire.TableEvidence(table=TABLE, transaction=9, found_by=2)
    assert not rig.resolver.unresolved


@pytest.mark.parametrize("version", [None, 3])
def test_a_batch_that_the_table_does_not_have_is_aborted(rig: Rig, version: int | None) -> None:
    rig.table = State(version=version)
    rig.late()
    [request] = rig.ended
    assert isinstance(request, wire.AbortParticipantsRequest)
    assert request.evidence.transaction == 9


def test_a_batch_is_not_decided_before_its_time(rig: Rig) -> None:
    rig.after(0)
    rig.after(MAX_MS - 1)
    assert (rig.reads, rig.ended) == (0, [])
    rig.job.awaited.transaction = 11  # it was aborted and prepared again meanwhile
    rig.after(1)
    assert (rig.reads, rig.ended) == (0, [])
    rig.after(MAX_MS)
    assert rig.ended[0].evidence.transaction == 11


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (errors.TierUnavailable("the store is away"), "the store is away"),
        (errors.TierTableChanged("catalog-managed"), "catalog-managed"),
        (State(table_id="d2"), "created again"),
        (State(table_id="d2", version=9), "created again"),
        (State(retention="interval 1 day"), "proves nothing"),
    ],
)
def test_a_table_that_does_not_tell_leaves_the_batch_prepared(
    rig: Rig, table: Any, words: str
) -> None:
    rig.table = table
    rig.late()
    assert rig.ended == []
    [problem] = rig.resolver.unresolved.values()
    assert words in problem.message
    [(event, facts)] = rig.lines
    assert event == "batch_unresolved"
    assert (facts["job"], facts["batch"], facts["table"]) == ("j", 4, URL)
    rig.after(1_000)
    assert len(rig.lines) == 1, "one line a minute"
    rig.table = State(version=4)
    rig.after(1_000)
    assert rig.ended
    assert not rig.resolver.unresolved


def test_a_batch_that_an_operator_resolved_is_not_reported_any_more(rig: Rig) -> None:
    rig.table = errors.TierUnavailable("away")
    rig.late()
    rig.job.ClearField("awaited")
    rig.after(1_000)
    assert not rig.resolver.unresolved
    assert rig.ended == []


@pytest.mark.parametrize(
    "urls", ["file:///lake/other", "file:///lake/t2,s3://lake/t", "file:///la"]
)
def test_a_table_that_is_not_listed_is_not_read(urls: str) -> None:
    rig = Rig(urls)
    rig.late()
    assert (rig.reads, rig.ended) == (0, [])
    [problem] = rig.resolver.unresolved.values()
    assert "resolver_table_urls" in problem.message
    rig.sim.close()


def test_a_refusal_of_the_coordinator_is_reported(rig: Rig) -> None:
    rig.refusal = errors.CoordinatorLoading("later")
    rig.late()
    assert len(rig.resolver.unresolved) == 1
    rig.refusal = None
    rig.after(0)
    assert rig.ended


def test_after_an_abort_a_late_commit_of_the_driver_is_reported(rig: Rig) -> None:
    rig.late()
    assert len(rig.ended) == 1
    rig.table = State(version=4)
    rig.after(LOOK_AGAIN_MS[0] - 1)
    assert rig.resolver.differing == 0
    rig.after(1)
    assert rig.resolver.differing == 1
    [(event, _)] = rig.lines
    assert event == "table_has_aborted_batch"
    for _ in range(4):  # for as long as the log does not have it
        rig.after(LOOK_AGAIN_MS[-1])
    assert rig.resolver.differing == 1
    assert len(rig.lines) == 5
    rig.job.last_committed = 4
    rig.after(LOOK_AGAIN_MS[-1])
    assert rig.resolver.differing == 0
    reads = rig.reads
    rig.after(LOOK_AGAIN_MS[-1])
    assert rig.reads == reads


def test_an_abort_that_was_right_is_looked_at_a_bounded_number_of_times(rig: Rig) -> None:
    rig.late()
    for _ in range(9):
        rig.after(LOOK_AGAIN_MS[-1])
    assert rig.reads == 1 + len(LOOK_AGAIN_MS)
    assert rig.lines == []


def test_presence_in_another_table_is_no_evidence() -> None:
    with pytest.raises(errors.InvalidTxnState):
        has_batch(TABLE, State(table_id="d2", version=4))
    assert has_batch(TABLE, State(version=5))


# -- URLs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("/lake/t", "file:///lake/t"),
        ("file:/lake/t/", "file:///lake/t"),
        ("file:///lake/a%20b", "file:///lake/a%20b"),
        ("s3a://bucket/t", "s3://bucket/t"),
        ("s3://bucket/t", "s3://bucket/t"),
    ],
)
def test_a_url_has_one_spelling(given: str, expected: str) -> None:
    assert normal_url(given) == expected


@pytest.mark.parametrize(
    "given", ["gs://b/t", "t", "file:///lake/../etc", "file:///lake/%2e%2e/etc", "s3://b//t"]
)
def test_a_url_that_cannot_be_compared_is_refused(given: str) -> None:
    with pytest.raises(errors.StoreRefused):
        normal_url(given)


def test_prefixes_end_at_a_slash() -> None:
    prefixes = prefixes_of(" /lake , s3a://b/t ")
    assert prefixes == ("file:///lake", "s3://b/t")
    assert is_listed("file:///lake", prefixes)
    assert is_listed("s3://b/t/u", prefixes)
    assert not is_listed("s3://b/tu", prefixes)
    assert prefixes_of("") == ()
    with pytest.raises(errors.InvalidConfig, match="resolver_table_urls"):
        prefixes_of("gs://b")


def test_a_job_that_was_forgotten_ends_no_alert(rig: Rig) -> None:
    rig.late()
    rig.table = State(version=4)
    ask = rig.resolver._ask

    async def forgotten(request: Any) -> Any:
        reply = await ask(request)
        if isinstance(request, wire.DescribeTransactionsRequest):
            for each in reply.transactions:
                each.ClearField("job")
                each.error.CopyFrom(frames.error_of(errors.TransactionalIdNotFound("j")))
        return reply

    rig.resolver._ask = forgotten
    rig.after(LOOK_AGAIN_MS[0])
    assert rig.resolver.differing == 1
