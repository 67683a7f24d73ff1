"""The resolver: it decides prepared batches whose drivers do not return (rule X11).

World-generic.  A prepared batch of log and table holds back the last stable offset of its
partitions.  Its driver decides it when it returns.  After `prepared_max_ms` the resolver of the
broker that coordinates the job reads the table, and commits or aborts the batch there.

Invariants
  Y1  The resolver reads only tables that the operator listed (resolver_table_urls).
  Y2  Presence commits.  Absence aborts only if the table is the same one, and keeps its txns for
      ever.  Anything else decides nothing: the batch waits for an operator, and the log and a
      metric say so.
  Y3  The wait counts by the monotonic clock since this process saw the batch, so a clock that was
      set ends none too early.
  Y4  A driver may be late, and commit to the table after an abort on absence.  So the resolver
      looks at the table again, a bounded number of times.  It reports a batch that the table has
      and the log has not, until the log has it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from google.protobuf.message import Message

from pk import errors, limits, tracing
from pk.clock import Clock
from pk.tiering.table_decision import TableState, has_batch
from pk.tiering.table_urls import is_listed, normal_url
from pk.transactional_ids import FoundBy
from pk.wire import frames
from pk.wire import pk_pb2 as wire

AWAITING_TABLE = "AwaitingTable"
#: The interval of looks at the coordinator: a quarter of prepared_max_ms within these bounds.
LOOK_MS = (250, 60_000)
#: When the table is read again after an abort on its absence.
LOOK_AGAIN_MS = (60_000, 600_000, 3_600_000)
#: The most aborted batches that are looked at again.
ABORTED_MAX = 1_000
#: How often one problem is logged.
REPEAT_MS = 60_000


class TableReader(Protocol):
    """Reads the newest version of a table, at a normal URL."""

    async def read(self, url: str, app: str) -> TableState: ...


#: Asks the broker; raises its refusal.
Ask = Callable[[Message], Awaitable[Any]]


class _Prepared(NamedTuple):
    """A prepared batch of a job, with its description."""

    job: str
    described: wire.JobDescription

    @property
    def key(self) -> tuple[str, int]:
        return self.job, self.described.awaited.transaction

    @property
    def table(self) -> wire.PreparedTable:
        return self.described.awaited.table


@dataclass(slots=True)
class _Aborted:
    """A batch that was aborted because its table did not have it (Y4)."""

    prepared: _Prepared
    due_ms: int
    looks: int = 0
    in_table: bool = False


class BatchResolver:
    """Decides the prepared batches of one broker's jobs.

    urls: normal URLs, as `prefixes_of` returns them.
    """

    def __init__(
        self,
        clock: Clock,
        ask: Ask,
        tables: TableReader,
        urls: tuple[str, ...],
        prepared_max_ms: int,
        log: tracing.Log | None = None,
        metrics: tracing.Metrics | None = None,
    ) -> None:
        self._clock = clock
        self._ask = ask
        self._tables = tables
        self._urls = urls
        self._prepared_max_ms = prepared_max_ms
        self._log = log
        self._seen_ms: dict[tuple[str, int], int] = {}  #: by job and transaction (Y3)
        self._aborted: dict[tuple[str, int], _Aborted] = {}
        self._said_ms: dict[tuple[str, int], int] = {}
        self.unresolved: dict[tuple[str, int], errors.PkError] = {}  #: late, and not decided (Y2)
        self._gauges = (
            None
            if metrics is None
            else (
                metrics.gauge(
                    "tier_unresolved_batches", "prepared batches whose table does not decide them"
                ),
                metrics.gauge(
                    "tier_aborted_batches_in_table", "aborted batches that a Delta table has (X11)"
                ),
            )
        )

    @property
    def differing(self) -> int:
        """The number of batches that their table has and the log has not."""
        return sum(each.in_table for each in self._aborted.values())

    async def run(self) -> None:
        """Look for prepared batches, for ever."""
        least, most = LOOK_MS
        pause_ms = min(max(self._prepared_max_ms // 4, least), most)
        while True:
            await self._clock.sleep_ms(pause_ms)
            await self.look()

    async def look(self) -> None:
        """Decide the batches that are due, and look at aborted ones again."""
        try:
            prepared = await self._prepared()
        except errors.PkError:
            return  # the broker is away, or coordinates nothing at the moment
        now_ms = self._clock.monotonic_ms()
        keys = {each.key for each in prepared}
        self._seen_ms = {key: self._seen_ms.get(key, now_ms) for key in keys}
        for key in self.unresolved.keys() - keys:
            del self.unresolved[key]
        for each in prepared:
            if now_ms - self._seen_ms[each.key] >= self._prepared_max_ms:
                await self._resolve(each)
        for key, aborted in list(self._aborted.items()):
            if self._clock.monotonic_ms() >= aborted.due_ms:
                await self._look_again(key, aborted)
        known = self._aborted.keys() | keys
        self._said_ms = {key: said for key, said in self._said_ms.items() if key in known}
        if self._gauges is not None:
            self._gauges[0].set(len(self.unresolved))
            self._gauges[1].set(self.differing)

    async def _prepared(self) -> list[_Prepared]:
        reply = await self._ask(wire.ListTransactionsRequest(states=[AWAITING_TABLE]))
        names = [each.transactional_id for each in reply.transactions]
        return [
            _Prepared(each.transactional_id, each.job)
            for each in await self._described(names)
            if each.job.HasField("awaited")
        ]

    async def _described(self, names: list[str]) -> list[wire.TransactionDescription]:
        found: list[wire.TransactionDescription] = []
        most = limits.TRANSACTIONS_DESCRIBED_MAX
        for start in range(0, len(names), most):
            request = wire.DescribeTransactionsRequest(
                transactional_ids=names[start : start + most]
            )
            found += (await self._ask(request)).transactions
        return found

    async def _resolve(self, prepared: _Prepared) -> None:
        """Decide one batch by its table, or report why the table does not tell (Y2)."""
        try:
            commit = await self._read(prepared)
            reply = await self._ask(_request(prepared, commit=commit))
        except errors.PkError as problem:
            self.unresolved[prepared.key] = problem
            self._say("batch_unresolved", prepared, f"{type(problem).__name__}: {problem.message}")
            return
        self.unresolved.pop(prepared.key, None)
        if not commit and not reply.committed:
            while len(self._aborted) >= ABORTED_MAX:
                del self._aborted[next(iter(self._aborted))]
            due_ms = self._clock.monotonic_ms() + LOOK_AGAIN_MS[0]
            self._aborted[prepared.key] = _Aborted(prepared, due_ms)

    async def _read(self, prepared: _Prepared) -> bool:
        """Return whether the table has the batch.  Raises why that is not known (Y1, Y2)."""
        url = normal_url(prepared.table.url)
        if not is_listed(url, self._urls):
            raise errors.InvalidTxnState(
                f"{prepared.table.url} is not below a URL of resolver_table_urls"
            )
        return has_batch(prepared.table, await self._tables.read(url, prepared.table.app))

    async def _look_again(self, key: tuple[str, int], aborted: _Aborted) -> None:
        """Compare table and log after an abort on absence (Y4)."""
        aborted.looks += 1
        at = min(aborted.looks, len(LOOK_AGAIN_MS) - 1)
        aborted.due_ms = self._clock.monotonic_ms() + LOOK_AGAIN_MS[at]
        try:
            aborted.in_table = await self._read(aborted.prepared)
            if aborted.in_table and await self._in_log(aborted.prepared):
                aborted.in_table = False
                aborted.looks = len(LOOK_AGAIN_MS)
        except errors.PkError:
            pass  # the table or the broker is away
        if aborted.in_table:
            self._say(
                "table_has_aborted_batch",
                aborted.prepared,
                "its driver committed to the table after the resolver had found nothing there: "
                "start the query again, which writes the batch to the log",
            )
        elif aborted.looks >= len(LOOK_AGAIN_MS):
            del self._aborted[key]

    async def _in_log(self, prepared: _Prepared) -> bool:
        """Return whether the batch was written again, and is committed."""
        (found,) = await self._described([prepared.job])
        if found.HasField("error"):
            raise frames.raise_error(found.error)
        return found.job.last_committed >= prepared.described.batch

    def _say(self, event: str, prepared: _Prepared, why: str) -> None:
        now_ms = self._clock.monotonic_ms()
        said_ms = self._said_ms.get(prepared.key)
        if self._log is None or (said_ms is not None and now_ms - said_ms < REPEAT_MS):
            return
        self._said_ms[prepared.key] = now_ms
        self._log.error(
            event,
            job=prepared.job,
            batch=prepared.described.batch,
            table=prepared.table.url,
            message=why,
            advice=f"pk transactions describe {prepared.job}",
        )


def _request(prepared: _Prepared, *, commit: bool) -> Message:
    """Return the request that ends a prepared batch by what the table has."""
    said = prepared.described
    batch = wire.JobBatch(job=prepared.job, query=said.query, run=said.run, batch=said.batch)
    evidence = wire.TableEvidence(
        table=prepared.table, transaction=said.awaited.transaction, found_by=FoundBy.RESOLVER
    )
    if commit:
        return wire.CommitParticipantsRequest(batch=batch, evidence=evidence)
    return wire.AbortParticipantsRequest(batch=batch, evidence=evidence)
