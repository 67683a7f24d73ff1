"""The tier process: copies stable data of led partitions to their tables, and serves cold reads.

`TierNode` is world-generic; `main` gives it threads, the real store and deltalake.  It asks the
broker which partitions changed (long poll with generations, rule P6) and reports what the tables
cover.  On its own socket it answers the broker's calls: cold fetches, look-ups by time, claims,
confirmations, purges.

The process probes the store before it copies anything (rule T14).  After a failed probe it probes
again with back-off.  Meanwhile it reports the problem for every partition and answers every writing
call with it, and the broker goes on without the tier.  Cold reads do not write, so they do not wait
for a probe.

Invariants
  Y1  The process writes only to a store whose put-if-absent has passed the probe.
  Y2  After a lost broker session it reports everything again.  It copies nothing for partitions
      that the broker does not name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

import pk
from pk import errors, limits, tracing
from pk.backoff import Backoff, equal_jitter
from pk.server.tier.cluster_copies import ClusterCopies
from pk.server.tier.resolver import BatchResolver, TableReader
from pk.tasks import TaskRegistry
from pk.tiering.damage import range_of
from pk.tiering.file_merger import FileMerger
from pk.tiering.objects import ObjectStore
from pk.tiering.owner import OwnerSettings
from pk.tiering.plan import partition_state
from pk.tiering.reader import TimeFound
from pk.tiering.store_calls import StoreCalls
from pk.tiering.table import TableFactory
from pk.tiering.table_urls import prefixes_of
from pk.tiering.topic_tier import TopicTier
from pk.tiering.worker import Executors, StorageViews, TierWorker
from pk.types import NONE, NodeId
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import PROTOCOL, Caller, Handler, accept_stream, error_head, serve_control
from pk.world import Disconnected, Listener, Stream, StreamKind, World

if TYPE_CHECKING:
    from pk.server.node.run_config import RoleContext, RunConfig

POLL_WAIT_MS = 10_000
CALL_TIMEOUT_MS = 10_000
BACKOFF_MS = (200, 10_000)
#: Interval at which the log repeats that the store fails its probe.
REPEAT_MS = 60_000
PROGRESS_GATHER_MS = 50
METRICS_TICK_MS = 1_000
GRACE_MS = 500
FETCH_BYTES_MAX = 32 * limits.MIB
#: Most concurrent cold fetches; others wait, and the wait counts against their deadlines.
FETCHES_MAX = 32


class TierNode:
    """The tier of one node over a World."""

    def __init__(
        self,
        world: World,
        store: ObjectStore,
        tables: TableFactory,
        views: StorageViews,
        executors: Executors,
        run: RunConfig,
        *,
        broker_address: str | Callable[[], str],
        metrics: tracing.Metrics | None = None,
        log: tracing.Log | None = None,
        evidence: TableReader | None = None,
        calls: StoreCalls | None = None,
    ) -> None:
        self.world = world
        self._calls = calls or StoreCalls()
        self.run = run
        self.problem: errors.PkError | None = errors.TierUnavailable("the store is being probed")
        self._tables = tables
        self._log = log
        self._metrics = metrics
        self._listener: Listener | None = None
        self._tasks = TaskRegistry(partial(self._bug, "tier node"))
        self._reports = asyncio.Event()
        self._fetches = asyncio.Semaphore(FETCHES_MAX)
        self.worker = TierWorker(
            world,
            store,
            tables,
            views,
            executors,
            cold_bytes=(
                int(run.server["cold_cache_bytes"]),
                int(run.server["cold_read_ahead_bytes"]),
            ),
            owner_settings=owner_settings(run.server, run.node_id),
            on_report=self._reports.set,
            on_bug=self._bug,
            on_rows_missing=self._log_rows_missing,
            clock_trusted=self._ask_clock,
        )
        hello = wire.Hello(
            client_id=f"tier-{run.node_id}",
            build=pk.__version__,
            protocol=PROTOCOL,
            cluster_id=run.cluster_id,
            node_id=run.node_id,
        )
        self._broker = Caller(world.network, world.clock, broker_address, hello)
        self._session = ("", 0)
        self._resolver = self._resolver_of(evidence)
        self.merger = FileMerger(
            world,
            store,
            executors.upload,
            self.worker,
            int(run.server["tier_merge_interval_ms"]),
            self._bug,
        )
        self.copies = ClusterCopies(world, store, run, hello, self._ask_broker, log, metrics)

    @property
    def address(self) -> str:
        assert self._listener is not None
        return self._listener.address

    # -- life --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start; return when the socket serves.  Probing and copying begin afterwards."""
        try:
            self._listener = await self.world.network.listen(self.run.tier_address, self._accept)
        except OSError as cause:
            raise errors.AddressInUse(f"{self.run.tier_address}: {cause}") from cause
        self._tasks.spawn(self._run())
        if self._resolver is not None:
            self._tasks.spawn(self._resolver.run())

    def _resolver_of(self, evidence: TableReader | None) -> BatchResolver | None:
        """Return the resolver of prepared batches, if the operator listed tables (rule X11)."""
        urls = prefixes_of(str(self.run.server["resolver_table_urls"]))
        if evidence is None or not urls:
            return None
        return BatchResolver(
            self.world.clock,
            self._ask_broker,
            evidence,
            urls,
            int(self.run.server["prepared_max_ms"]),
            self._log,
            self._metrics,
        )

    async def _ask_broker(self, request: Message) -> Any:
        """Return the broker's reply to a request of a client."""
        head = (await self._broker.call(request, timeout_ms=CALL_TIMEOUT_MS)).head
        name = head.WhichOneof("body")
        assert name is not None, head
        return getattr(head, name)

    async def close(self) -> None:
        """Stop.  A commit under way may land or not; the next start reads the table (rule T5)."""
        if self._listener is not None:
            await self._listener.close(GRACE_MS)
        await self._tasks.close()
        await self.worker.close()
        await self._broker.close()
        await self.copies.close()

    def _bug(self, where: str, bug: BaseException) -> None:
        if self._log is not None:
            self._log.bug(where, bug)

    def _log_rows_missing(self, topic: TopicTier) -> None:
        """Log one line for each change of missing rows (rule T17)."""
        if self._log is None:
            return
        if not topic.missing:
            self._log.info("tier_rows_complete", topic=topic.topic, uri=topic.table.uri)
        for partition, each in sorted(topic.missing.items()):
            self._log.warning(
                "tier_rows_missing",
                topic=topic.topic,
                partition=partition,
                rows=each.rows,
                ranges=" ".join(f"[{start}, {end})" for start, end in each.ranges),
                uri=topic.table.uri,
            )

    async def _run(self) -> None:
        await self._probe()
        self._tasks.spawn(self._report())
        self._tasks.spawn(self.merger.run())
        self.copies.start(self._tasks.spawn)
        if self._metrics is not None:
            self._tasks.spawn(self._count(self._metrics))
        await self._poll()

    async def _probe(self) -> None:
        """Probe the store until it passes; report its problem meanwhile (rule T14, Y1)."""
        backoff = Backoff(BACKOFF_MS, equal_jitter(self.world.rng))
        said_ms: int | None = None
        while True:
            try:
                await self._tables.probe(self.world.new_id())
            except errors.PkError as error:
                self.problem = error
            else:
                self.problem = None
                if self._log is not None:
                    self._log.info("store_probed", url=self.run.tier_url)
                return
            now_ms = self.world.clock.monotonic_ms()
            if self._log is not None and (said_ms is None or now_ms - said_ms >= REPEAT_MS):
                said_ms = now_ms
                self._log.error("store_probe_failed", message=self.problem.message)
            await self._report_problem(self.problem)
            await self.world.clock.sleep_ms(backoff.next_ms())

    async def _report_problem(self, problem: errors.PkError) -> None:
        request = wire.TierPartitionsRequest(session_id="", generation=0, max_wait_ms=0)
        try:
            frame = await self._broker.call(request, timeout_ms=CALL_TIMEOUT_MS)
            told = frame.head.tier_partitions_reply.partitions
            reports = [
                wire.TierProgress(
                    topic_id=each.topic_id,
                    partition=each.partition,
                    leader_epoch=each.leader_epoch,
                    tiered_end=NONE,
                    droppable_end=NONE,
                    problem=frames.error_of(problem),
                )
                for each in told
            ]
            if reports:
                progress = wire.TierProgressRequest(partitions=reports)
                await self._broker.call(progress, timeout_ms=CALL_TIMEOUT_MS)
        except errors.PkError:
            pass  # the broker is away too; it gets the report after its start

    # -- the broker's partitions -------------------------------------------------------------------

    async def _poll(self) -> None:
        backoff = Backoff(BACKOFF_MS, equal_jitter(self.world.rng))
        while True:
            session_id, generation = self._session
            request = wire.TierPartitionsRequest(
                session_id=session_id, generation=generation, max_wait_ms=POLL_WAIT_MS
            )
            try:
                frame = await self._broker.call(request, timeout_ms=POLL_WAIT_MS + CALL_TIMEOUT_MS)
            except errors.PkError:
                self.worker.out_of_contact()
                await self.world.clock.sleep_ms(backoff.next_ms())
                continue
            backoff.reset()
            reply = frame.head.tier_partitions_reply
            self._session = (reply.session_id, reply.generation)
            self.worker.partitions(reply)

    async def _ask_clock(self) -> bool:
        """Ask the broker whether it trusts its wall clock.  The broker checks its clock now
        (rule L10).
        """
        session_id, generation = self._session
        request = wire.TierPartitionsRequest(
            session_id=session_id, generation=generation, max_wait_ms=0
        )
        try:
            frame = await self._broker.call(request, timeout_ms=CALL_TIMEOUT_MS)
        except errors.PkError:
            return False
        return not frame.head.tier_partitions_reply.clock_doubted

    async def _report(self) -> None:
        """Send the gathered reports; a lost report is sent again unless a newer one replaced it."""
        backoff = Backoff(BACKOFF_MS, equal_jitter(self.world.rng))
        outbox = self.worker.outbox
        while True:
            await self._reports.wait()
            await self.world.clock.sleep_ms(PROGRESS_GATHER_MS)
            self._reports.clear()
            sent = dict(outbox)
            if not sent:
                continue
            outbox.clear()
            try:
                await self._broker.call(
                    wire.TierProgressRequest(partitions=list(sent.values())),
                    timeout_ms=CALL_TIMEOUT_MS,
                )
                backoff.reset()
            except errors.PkError:
                for key, progress in sent.items():
                    outbox.setdefault(key, progress)
                self._reports.set()
                await self.world.clock.sleep_ms(backoff.next_ms())

    # -- requests ----------------------------------------------------------------------------------

    async def _accept(self, kind: StreamKind, stream: Stream) -> None:
        reply = wire.HelloReply(
            cluster_id=self.run.cluster_id,
            node_id=self.run.node_id,
            build=pk.__version__,
            protocol=PROTOCOL,
            role="tier",
        )
        try:
            if kind is not StreamKind.CONTROL:
                refusal = errors.UnsupportedFeature("the tier has control streams only")
                await stream.send(frames.encode(error_head(0, refusal)))
                return
            if await accept_stream(stream, reply) is None:
                return
        except Disconnected:
            return
        await serve_control(stream, self._handlers(), on_error=self._bug)

    def _handlers(self) -> Mapping[str, Handler]:
        def ready(handler: Callable[[Any], Awaitable[Any]]) -> Handler:
            async def handle(request: Any, _: frames.Frame) -> Any:
                self._check_probed()
                return await handler(request)

            return handle

        return {
            "tier_fetch": self._fetch,
            "tier_offset_for_time": self._offset_for_time,
            "tier_claim": ready(self._claim),
            "tier_confirm": ready(self._confirm),
            "tier_purge": ready(self._purge),
            "tier_rows": ready(self.worker.rows_missing),
            "tier_now": ready(self._vacuum),
            "commit_to_table": ready(self.worker.commit_to_table),
            "describe_tier": self._describe,
        }

    def _check_probed(self) -> None:
        if self.problem is not None:
            raise self.problem.with_traceback(None)  # Y1; drop the traceback, which would grow

    async def _vacuum(self, request: wire.TierNowRequest) -> wire.TierNowReply:
        """Vacuum a table now; the table takes turns with the owner's commits."""
        table = self.worker.topic(request.topic_id, request.topic).table
        retention_ms = int(self.run.server["tier_vacuum_retention_ms"])
        removed = await table.vacuum(retention_ms, self._ask_clock)
        self.worker.counts.vacuumed_files += removed or 0
        return wire.TierNowReply(files=removed or 0, put_off=removed is None)

    async def _fetch(self, request: wire.TierFetchRequest, frame: frames.Frame) -> Any:
        clock = self.world.clock
        late_ms = (
            clock.monotonic_ms() + frame.head.timeout_ms // 2
        )  # the rest of the time is for the answer
        wanted = min(max(1, request.max_bytes), FETCH_BYTES_MAX)
        async with self._fetches:
            fetched = await self.worker.fetch(
                request.topic_id,
                request.topic,
                request.partition,
                request.offset,
                request.end_offset,
                wanted,
                late=lambda: clock.monotonic_ms() >= late_ms,
                reader=request.reader,
            )
        return wire.TierFetchReply(next_offset=fetched.next_offset), fetched.batches

    async def _offset_for_time(
        self, request: wire.TierOffsetForTimeRequest, _: frames.Frame
    ) -> Any:
        async with self._fetches:
            found, missing_from = await self.worker.offset_for_time(
                request.topic_id,
                request.topic,
                request.partition,
                request.timestamp_ms,
                request.from_offset,
                request.end_offset,
                known=request.known,
            )
        found = found or TimeFound(NONE, NONE, NONE)
        reply = wire.TierOffsetForTimeReply(
            offset=found.offset, timestamp_ms=found.timestamp_ms, leader_epoch=found.leader_epoch
        )
        if missing_from != NONE:
            reply.missing_from = missing_from
        return reply

    async def _claim(self, request: wire.TierClaimRequest) -> Any:
        return await self.worker.claim(
            request.topic_id,
            request.topic,
            request.partition,
            request.leader_epoch,
            commit=request.commit,
        )

    async def _confirm(self, request: wire.TierConfirmRequest) -> Any:
        missing = await self.worker.confirm(
            request.topic_id, request.topic, request.partition, request.start, request.end
        )
        return wire.TierConfirmReply(missing=[file.path for file in missing])

    async def _purge(self, request: wire.TierPurgeRequest) -> Any:
        uri, objects = await self.worker.purge(request.topic_id, request.topic)
        if self._log is not None:
            self._log.info("tier_purged", topic=request.topic, uri=uri, objects=objects)
        return wire.TierPurgeReply(uri=uri, objects=objects)

    async def _describe(self, request: wire.DescribeTierRequest, _: frames.Frame) -> Any:
        reply = wire.DescribeTierReply(
            topic=request.topic, version=NONE, storage_options=self._tables.describe()
        )
        known = [each for each in self.worker.topics.values() if each.topic == request.topic]
        known.sort(key=lambda each: not each.led)  # of a re-created topic: the live one
        problem = self.problem
        if known:
            await self.worker.look(known[0])
            self.worker.verify_files(known[0], request.suspects)
            problem = problem or _topic_problem(known[0])
            _fill(reply, known[0])
        looked = bool(self._session[0]) and all(e.owner.looked or not e.led for e in known[:1])
        if problem is None and reply.version == NONE and not looked:
            problem = errors.TierUnavailable("the tier process has not read the table yet")
        reply.status = "ok" if problem is None else "problem"
        if isinstance(problem, errors.DamagedTierFile):
            reply.status = "damaged"
        if problem is None and reply.rows_missing:
            reply.status = "rows_missing"
        if problem is None and reply.version == NONE:
            reply.status = "nothing tiered yet"
        if problem is not None:
            reply.problem.CopyFrom(frames.error_of(problem))
        return reply

    # -- metrics -----------------------------------------------------------------------------------

    async def _count(self, metrics: tracing.Metrics) -> None:
        """Copy the totals of the worker into the metrics registry, once a second."""
        worker = self.worker
        cached = metrics.gauge("tier_cache_bytes", "bytes of the cold-read cache")
        ahead = worker.reader.ahead
        read_ahead = metrics.gauge(
            "tier_read_ahead_bytes", "bytes read from the store before a client requested them"
        )
        wasted = metrics.gauge(
            "tier_read_ahead_wasted_bytes", "of these, bytes that no client was going to read"
        )
        totals = {
            name: metrics.gauge(f"tier_{name}", f"{name.replace('_', ' ')} since the start")
            for name in worker.counts.__slots__
        }
        damaged = metrics.gauge("tier_damaged_files", "data files that are missing or damaged now")
        missing = metrics.gauge("tier_rows_missing", "rows that other engines took from tables")
        calls = metrics.counter(
            "tier_store_calls", "requests to the object store since the start", ("operation",)
        )
        counted: dict[str, int] = {}
        for operation in self._calls.made:
            calls.labels(operation)  # an operation without requests shows 0
        while True:
            await self.world.clock.sleep_ms(METRICS_TICK_MS)
            for operation, made in self._calls.made.items():
                calls.labels(operation).inc(made - counted.get(operation, 0))
                counted[operation] = made
            lacking = [each for topic in worker.topics.values() for each in topic.missing.values()]
            missing.set(sum(each.rows for each in lacking))
            cached.set(worker.reader.cached_bytes)
            read_ahead.set(ahead.read_bytes)
            wasted.set(ahead.wasted_bytes)
            damaged.set(sum(len(topic.damaged) for topic in worker.topics.values()))
            for name, gauge in totals.items():
                gauge.set(getattr(worker.counts, name))


def owner_settings(server: Mapping[str, Any], node_id: NodeId) -> OwnerSettings:
    """Return the server's options for the tables' owners of a node."""
    return OwnerSettings(
        name=str(node_id),
        refresh_max_ms=int(server["tier_refresh_max_ms"]),
        retry_backoff_ms=int(server["tier_retry_backoff_ms"]),
        vacuum_interval_ms=int(server["tier_vacuum_interval_ms"]),
        vacuum_retention_ms=int(server["tier_vacuum_retention_ms"]),
    )


def _topic_problem(topic: TopicTier) -> errors.PkError | None:
    if topic.owner.problem is not None:
        return topic.owner.problem
    for led in topic.led.values():
        if led.copier.status is not None:
            return led.copier.status
    return next((each.error for each in topic.damaged.all()), None)


def _fill(reply: wire.DescribeTierReply, topic: TopicTier) -> None:
    reply.topic_id, reply.uri = topic.topic_id, topic.table.uri
    snapshot = topic.owner.snapshot
    if snapshot is None:
        return
    reply.version = snapshot.version
    for partition in sorted({*snapshot.counters, *topic.led}):
        state = partition_state(snapshot, partition)
        led = topic.led.get(partition)
        if led is not None:
            log = led.description
            state.lag = max(0, log.last_stable_offset - max(state.end, log.log_start))
        reply.partitions.append(state)
    for partition, missing in sorted(topic.missing.items()):
        told = reply.rows_missing.add(partition=partition, rows=missing.rows)
        for start, end in missing.ranges:
            told.ranges.add(start=start, end=end)
    for file, error in topic.damaged.all():
        start, end = range_of(file)
        reply.damaged.add(
            partition=file.partition,
            start=start,
            end=end,
            path=file.path,
            problem=frames.error_of(error),
        )


# -- the shell (◦) -------------------------------------------------------------------------------


def main(run: RunConfig) -> int:
    """`python -m pk.server tier`."""
    from pk.server.node.run_config import process_main
    from pk.tiering import resources

    resources.configure()
    return process_main("tier", run, _serve_process)


async def _serve_process(process: RoleContext) -> None:
    from pk.server.node.metrics_endpoint import serve_metrics
    from pk.server.node.run_config import RunConfig
    from pk.tiering.shell import RealTier

    run, world = process.run, process.world
    real = RealTier(run.server, world.clock)
    node = TierNode(
        world,
        real.store,
        real.tables,
        real.view,
        real.executors,
        run,
        # read again: with port 0 the broker's address is known only after its start
        broker_address=lambda: RunConfig.load(run.run_dir).broker_address,
        metrics=process.metrics,
        log=process.log,
        evidence=real.evidence,
        calls=real.calls,
    )
    await node.start()
    http = await serve_metrics(process)
    process.ready(node.address)
    await process.stopping.wait()
    process.health.not_ready = "shutting down"
    await node.close()
    if http is not None:
        http.close()
    await real.close()
