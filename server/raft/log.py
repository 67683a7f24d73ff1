"""`__cluster_metadata-0` on a disk: the partition log, the saved vote and the quorum over it.

World-generic.  The log is an ordinary partition log whose every write is SYNCED before it counts
(rule L1); what is committed is what the quorum machine says (rule Q4).  It is the `ReplayLog` of
the controller, the source of `fetch_metadata_log`, and where other voters fetch from.

Files, in the storage's root (`DIR/metadata`): `quorum-state` (the vote, JSON),
`__cluster_metadata-0/`, `<end>-<epoch>.checkpoint` (snapshots; the log begins at the older of two).

Invariants
  L1  the machine hears of the log's state only as it is SYNCED, and of every write it asked for
  L2  what a former leader had decided and not written is undone before anything is fetched
  L3  a snapshot is loaded beside the row of writes, so that votes do not wait for it (rule P1);
      meanwhile nobody else writes to the log (raft/machine.py, U6)
  L4  the log is made shorter, and snapshots are changed for others, under the lock of the writes
  L5  `quorum-state` never says that more was SYNCED than the log still has: what a new leader's log
      does not have is no damage when it is gone
  L6  what was SYNCED is said there soon, not only with the next vote: damage above it is taken for
      a torn tail when the log is opened (recovery.py, O2)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from pk import errors
from pk.effects import Level
from pk.log import batch as batches
from pk.log.partition_log import PartitionLog
from pk.log.storage import Disk
from pk.server.metadata.loader import READ_BYTES, Apply, MetadataLoader
from pk.server.metadata.records import MetadataRecord, encode_batch
from pk.server.metadata.snapshot_generator import SnapshotGenerator
from pk.server.node.runtime import MachineHost, Timers
from pk.server.raft import messages, recovery
from pk.server.raft.fetch_source import FetchSource
from pk.server.raft.machine import Quorum, Role
from pk.server.raft.messages import (
    HIGH_WATERMARK,
    LEADERSHIP,
    SELF,
    Leadership,
    LogState,
    Resign,
    SnapshotId,
    Started,
    Synced,
    TimerFired,
    Vote,
    Voter,
)
from pk.server.raft.peers import Peers
from pk.server.raft.recovery import QUORUM_STATE, SnapshotRules, recover, state_bytes
from pk.server.raft.request_handler import RaftRequestHandler
from pk.server.raft.reserve import RESERVE_BYTES, ReserveDisk
from pk.server.raft.snapshot_fetcher import SnapshotFetcher
from pk.server.raft.snapshot_files import SnapshotFiles
from pk.server.raft.timing import Timing
from pk.server.raft.voters import Voters
from pk.types import NONE, NodeId
from pk.wire import pk_pb2 as wire
from pk.wire.calls import PROTOCOL, Handler
from pk.world import World

#: How long a farewell may take.
RESIGN_MS = 1_000
#: A follower whose disk is full looks again after this.
FULL_WAIT_MS = 1_000


class MetadataLog:
    """See the module.  One per controller process.

    `voters`: the first voters of a new quorum with their addresses; none but this node by default.
    What is given of a node's address here counts more than what the log says.  `peers`: by node id,
    what this node connects to instead.
    """

    def __init__(
        self,
        world: World,
        disk: Disk,
        *,
        me: Voter,
        address: str,
        on_fatal: Callable[[BaseException], None],
        voters: Mapping[Voter, str] | None = None,
        timing: Timing | None = None,
        cluster_id: str = "",
        rules: SnapshotRules | None = None,
        say: Callable[..., None] = lambda event, **facts: None,
        peers: Mapping[NodeId, str] | None = None,
        reserve_bytes: int = RESERVE_BYTES,
    ) -> None:
        first = {me: address} if voters is None else voters
        self._clock = world.clock
        self._disk = ReserveDisk(disk, reserve_bytes)
        self._on_fatal = on_fatal
        self.voters = Voters(me, address, first)
        self.quorum = Quorum(me, timing or Timing(), world.rng)
        self._timers = Timers(world.clock, lambda _owner, key: self._post(TimerFired(key)))
        self._host: MachineHost[Any] = MachineHost(
            self.quorum, self, world.clock, timers=self._timers, on_fatal=self._fail
        )
        hello = wire.Hello(
            client_id=f"controller-{me.node_id}", protocol=PROTOCOL, cluster_id=cluster_id,
            node_id=me.node_id,
        )  # fmt: skip
        self._peers = Peers(
            world, hello, lambda: {**self.voters.addresses, **(peers or {})}, self._post,
            self.voters, timeout_ms=self.quorum.timing.fetch_ms,
        )  # fmt: skip
        self._rules = rules or SnapshotRules()
        self._say = say
        self._files = SnapshotFiles(self._disk, world.clock)
        self._fetcher = SnapshotFetcher(
            self._files, self._peers, world.clock,
            visit_ms=self.quorum.timing.fetch_ms // 2, piece_ms=self.quorum.timing.fetch_ms,
        )  # fmt: skip
        self._tasks: list[asyncio.Task[None]] = []
        self._foreign: list[tuple[int, MetadataRecord]] = []  #: the quorum's own, for the term
        self._unfinished: dict[asyncio.Task[None], None] = {}  #: writes, with a caller or without
        self._vote = Vote()  #: as it is saved
        self._noted = 0  #: what is saved beside it of how far the log is SYNCED
        self._log: PartitionLog | None = None
        self._history: MetadataLoader | None = None
        self._request_handler: RaftRequestHandler
        self._writing = asyncio.Lock()
        self._news: list[asyncio.Future[None]] = []  #: who waits for any change of state
        self._failed: Exception | None = None
        self.leadership = Leadership(0, None)

    # -- life ----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Recover the log and join the quorum.

        Raises `CorruptLog` if records that were SYNCED are gone or damaged: committed metadata is
        never cut away as if it were a torn tail.
        """
        await self._disk.prepare()
        opened = await self._disk.write(
            partial(recover, self._disk.storage, self._rules, self._clock.wall_ms())
        )
        log, self._vote = opened.log, opened.vote
        self._log = log
        self._files.kept = opened.kept
        self._history = MetadataLoader(self._disk, self._clock, self._files, log, self._say)
        self._request_handler = RaftRequestHandler(
            self.quorum, FetchSource(self._history, self._files, self._say), self.voters,
            ask=self._post, renew=lambda: self._post(Synced(self._state())),
        )  # fmt: skip
        opened.report(self._say)
        offset = 0
        if self._files.newest is not None:
            self.voters.begin_with(self._files.newest, await self._files.read(self._files.newest))
            offset = self._files.newest.end
        while offset < log.written_end:
            raw, following = await self._told.read(offset, log.written_end, READ_BYTES)
            self.voters.find(raw, offset)
            offset = following
        voters = self.voters.now
        mine = [voter for voter in voters if voter.node_id == self.quorum.me.node_id]
        if len(voters) == 1 and mine and not self.alone:  # it could only wait, for ever
            raise errors.DirectoryOfAnotherCluster(
                f"{self._disk.storage.root} holds the metadata of node {voters[0].node_id} with "
                f"directory {voters[0].directory_id}, this is node {self.quorum.me.node_id} with "
                f"directory {self.quorum.me.directory_id}"
            )
        self._host.start()
        for work in (self._timers.run(), self._make_snapshots()):
            self._tasks.append(asyncio.get_running_loop().create_task(work))
        self._post(Started(opened.vote, self._state()))

    async def lead(self) -> Leadership:
        """Return once this node leads and has committed the first records of its epoch."""
        while True:
            found = self.leadership
            if found.start != NONE and self.committed > found.start:
                return found
            await self._next_news()

    def _save(self, vote: Vote) -> None:
        synced_end = self._open_log.flush()
        self._disk.storage.replace_file(QUORUM_STATE, state_bytes(vote, synced_end))
        self._vote, self._noted = vote, synced_end

    def _cut(self, end: int) -> None:
        """L5: first nobody promises any more what is cut, then it is cut."""
        log = self._open_log
        if end < log.synced_end:
            self._disk.storage.replace_file(QUORUM_STATE, state_bytes(self._vote, end))
            self._noted = end
        log.truncate_to(end)

    async def note_synced(self) -> None:
        """L6.  Raises `StorageFull`: then it is only known later."""
        if not self._disk.held:
            await self._disk.prepare()
        if self._noted < self._open_log.synced_end:
            async with self._writing:
                await self._disk.write(lambda: self._save(self._vote))

    async def resign(self) -> None:
        """Say farewell if this node leads: the others need not wait for a timeout."""
        self._post(Resign())
        try:
            async with asyncio.timeout(RESIGN_MS / 1000):
                while self.leadership.start != NONE and self._failed is None:
                    await self._next_news()
                await self._peers.idle()
        except TimeoutError:
            pass

    async def close(self, clean: bool = True) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._host.close()
        await self._peers.close()
        await asyncio.gather(*self._unfinished, return_exceptions=True)
        log = self._log
        if log is not None:
            async with self._writing:
                args = self._disk.storage, log, self._vote, clean
                await self._disk.write(partial(recovery.close_log, *args))

    def _fail(self, failure: BaseException) -> None:
        if isinstance(failure, Exception):
            self._failed = failure
        self._tell(failure)
        self._on_fatal(failure)

    def _post(self, event: messages.Event) -> None:
        try:
            self._host.post(event)
        except errors.ThrottledError as full:
            self._fail(full)

    def _tell(self, failure: BaseException | None = None) -> None:
        """Wake whoever waits for a change."""
        waiting, self._news = self._news, []
        for future in waiting:
            if future.done():
                continue
            if failure is None:
                future.set_result(None)
            else:
                future.set_exception(failure)
                future.exception()

    async def _next_news(self) -> None:
        if self._failed is not None:
            raise self._failed
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._news.append(future)
        await future

    @property
    def alone(self) -> bool:
        """This node is the only voter: it leads as soon as it has started."""
        return self.voters.now == (self.quorum.me,)

    def in_touch(self) -> bool:
        """This node leads, and so lately heard of a majority that nobody else can have been elected
        for long: an election begins `fetch_ms` after a follower last heard of its leader.
        """
        state = self.quorum.leader_state
        since_ms = self._clock.monotonic_ms() - self.quorum.timing.lease_ms
        return state is not None and state.in_touch(self.quorum.voters, since_ms)

    def address_of(self, node_id: NodeId) -> str:
        """HOST:PORT of a controller; '' if it is not known."""
        return self.voters.addresses.get(node_id, "")

    @property
    def _told(self) -> MetadataLoader:
        assert self._history is not None, "the metadata log is not open"
        return self._history

    @property
    def _open_log(self) -> PartitionLog:
        assert self._log is not None, "the metadata log is not open"
        return self._log

    def _state(self) -> LogState:
        log = self._open_log
        base, newest = self._told.base, self._files.newest
        return LogState(log.synced_end, log.epochs.entries, tuple(self.voters.at), base, newest)

    # -- the quorum's doors (pk.server.node.runtime.Doors) -----------------------------------------

    async def write(self, ops: Sequence[Any], level: Level) -> None:
        """Perform what the quorum asks for; all of it is SYNCED."""
        for op in ops:
            await self._perform(op)

    async def _perform(self, op: Any) -> None:
        if isinstance(op, messages.SaveVote):
            await self._save_vote(op.vote)
        elif isinstance(op, messages.BeginEpoch | messages.AppendVoters):
            if self.quorum.role is Role.LEADER and op.epoch == self.epoch:
                records = self.voters.records(op)
                base = self._append(records, op.epoch, self._clock.wall_ms())
                self._foreign += enumerate(records, base)
                try:
                    await self._write_out()
                except errors.StorageFull:
                    if isinstance(op, messages.BeginEpoch):  # the epoch is for another node
                        raise
                if self.voters.now != op.voters:  # undone, alone or with others: no room on disk
                    self._post(Resign())
        elif isinstance(op, messages.StopLeading):
            await self._undo(op.job)
        elif isinstance(op, messages.AppendFetched):
            await self._append_fetched(op)
        elif isinstance(op, messages.TruncateTo):
            await self._truncate(op)
        elif isinstance(op, messages.LoadSnapshot):
            task = asyncio.get_running_loop().create_task(self._load(op))  # L3
            self._tasks = [each for each in self._tasks if not each.done()] + [task]
        else:
            raise AssertionError(f"the quorum may not ask for {op!r}")

    async def _save_vote(self, vote: Vote) -> None:
        """Nothing is voted, or sent, before; so on a full disk this waits for room."""
        while True:
            try:
                async with self._writing:
                    await self._disk.write(partial(self._save, vote))
                return
            except errors.StorageFull as full:
                self._say("vote_waits_for_room", why=full.message)
                await self._clock.sleep_ms(FULL_WAIT_MS)

    async def _undo(self, job: int) -> None:
        """L2."""
        log = self._open_log
        async with self._writing:
            plan = log.take_writes()
            if plan is not None:
                log.complete(plan, errors.ControllerUnavailable("another controller leads"))
        self._foreign = []
        self.voters.forget(log.log_end)
        self._post(Synced(self._state(), job))

    async def _append_fetched(self, op: messages.AppendFetched) -> None:
        log, now_ms = self._open_log, self._clock.wall_ms()
        try:
            for header, view in batches.iter_batches(op.reply.payload):
                if header.leader_epoch > op.reply.epoch:
                    break  # read from a log that had gone on: not this leader's word
                batches.check(view)
                log.append_as_follower(header, view, now_ms=now_ms)
                self.voters.find(view, header.base_offset)
            await self._write_out(op.job)
        except (errors.CorruptBatch, errors.FencedLeaderEpoch, errors.StorageFull):
            await self._undo(0)
            await self._clock.sleep_ms(FULL_WAIT_MS)
            self._post(Synced(self._state(), op.job))

    async def _truncate(self, op: messages.TruncateTo) -> None:
        log = self._open_log
        async with self._writing:
            what = f"offsets [{op.end}, {log.log_end}): the leader's log parts from this one there"
            await self._disk.write(partial(self._cut, op.end))
        self._say("metadata_log_cut", what=what)
        self.voters.forget(log.log_end)
        self._post(Synced(self._state(), op.job))

    async def _load(self, op: messages.LoadSnapshot) -> None:
        """One visit; the machine hears of it in any case (L1)."""
        quorum, log, epoch = self.quorum, self._open_log, self.epoch

        def follows() -> bool:
            return quorum.leader == op.leader and self.epoch == epoch

        try:
            found = await self._fetcher.visit(op, max(log.log_end, self.committed), follows)
            if found is None:
                await self._clock.sleep_ms(quorum.timing.again_ms)
            else:
                await self._install(*found)
        except errors.StorageFull:
            await self._clock.sleep_ms(FULL_WAIT_MS)
        except Exception as failure:
            self._fail(failure)
            return
        self._post(Synced(self._state(), op.job))
        self._tell()

    async def _install(self, loaded: SnapshotId, raw: bytes) -> None:
        """The log begins anew behind `loaded`: nothing of it is needed that is below."""
        log = self._open_log
        await self._files.begin_load(loaded)
        self._fetcher.done()
        async with self._writing:
            await self._files.finish_load(loaded, log)
            self._told.rebase()
        self.voters.begin_with(loaded, raw)
        self._say("metadata_snapshot_loaded", end=loaded.end, epoch=loaded.epoch, bytes=len(raw))

    def send(self, peer: Any, message: Any) -> None:
        self._peers.send(peer, message)

    def respond(self, request: Any, reply: Any) -> None:
        if request.done():
            return  # the caller is gone
        if isinstance(reply, errors.PkError):
            request.set_exception(reply)
        else:
            request.set_result(reply)

    def publish(self, name: str, value: Any) -> None:
        """What the quorum makes known."""
        if name == SELF:
            self._post(value)
        elif name in (LEADERSHIP, HIGH_WATERMARK):
            if name == LEADERSHIP:
                self.leadership = value
            else:
                self.voters.committed(value)
            self._tell()

    # -- what other nodes ask ------------------------------------------------------------------

    def handlers(self) -> dict[str, Handler]:
        """For the control streams of the quorum's other nodes."""
        return self._request_handler.handlers()

    # -- the controller's log (pk.server.node.runtime.ReplayLog) -----------------------------------

    @property
    def end(self) -> int:
        return self._open_log.log_end

    @property
    def committed(self) -> int:
        return self.quorum.high_watermark

    @property
    def epoch(self) -> int:
        return self.quorum.epoch

    @property
    def leads(self) -> bool:
        return self.leadership.start != NONE and self.quorum.role is Role.LEADER

    @property
    def failed(self) -> Exception | None:
        return self._failed or self._disk.storage.failed

    def append(self, records: Sequence[MetadataRecord], now_ms: int) -> int:
        """Decide one batch in the leader's epoch.  Raises `ControllerUnavailable`."""
        if not self.leads:
            raise errors.ControllerUnavailable("this controller does not lead")
        return self._append(records, self.epoch, now_ms)

    def _append(self, records: Sequence[MetadataRecord], epoch: int, now_ms: int) -> int:
        raw = encode_batch(records, now_ms)
        header = batches.check(raw)
        appended = self._open_log.decide(
            header, raw, leader_epoch=epoch, now_ms=now_ms, from_client=False
        )
        for at, record in enumerate(records, appended.base_offset):
            if record.WhichOneof("record") == "voters":
                self.voters.note(at, record.voters)
        return appended.base_offset

    async def commit(self) -> None:
        """Write, sync, and wait until the quorum has committed it.

        Raises `ControllerUnavailable` if another node leads before that: then its outcome is open.
        """
        end, epoch = self.end, self.epoch
        await self._write_out()
        while self.committed < end:
            if self.leadership.start == NONE or self.epoch != epoch:
                raise errors.ControllerUnavailable("another controller leads now")
            await self._next_news()

    async def _write_out(self, job: int = 0) -> None:
        """Who waits may be cancelled (a term that ends); the write goes on: a plan that was taken
        is completed, or nothing is ever written again.
        """
        write = asyncio.get_running_loop().create_task(self._write_plan(job))
        self._unfinished[write] = None
        write.add_done_callback(self._ended)
        await asyncio.shield(write)

    def _ended(self, write: asyncio.Task[None]) -> None:
        del self._unfinished[write]
        if not write.cancelled():
            write.exception()  # told to the caller, if there still is one

    async def _write_plan(self, job: int) -> None:
        log = self._open_log
        async with self._writing:
            plan = log.take_writes()
            if plan is None:
                if job:
                    self._post(Synced(self._state(), job))
                return
            failure: Exception | None = None
            try:
                await self._disk.write(lambda: log.perform(plan))
            except Exception as cause:
                failure = cause
            done = log.complete(plan, failure)
        if done.error is not None:
            self._foreign = []
            self.voters.forget(log.log_end)
            raise done.error
        self._post(Synced(self._state(), job))

    async def change_voters(self, voters: Sequence[Voter], addresses: Mapping[NodeId, str]) -> None:
        """Let `voters` be the voters; returns when that is committed (KIP-853).

        Raises `ControllerUnavailable`: its outcome is open then; `InvalidRequest`.
        """
        self.voters.addresses.update(addresses)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._post(messages.VotersChange(future, tuple(voters)))
        await future

    async def term_over(self, epoch: int) -> None:
        """Return once this node does not lead `epoch` any more."""
        while self.leads and self.epoch == epoch:
            await self._next_news()

    async def wait_committed(self, end: int) -> None:
        """Return once everything below `end` is committed."""
        while self.committed < end:
            await self._next_news()

    async def replay(self, apply: Apply) -> None:
        """Hand every record below the end to `apply`, in order; those below a snapshot by what they
        came to.
        """
        await self._told.replay(apply)
        end = self._open_log.written_end
        self._foreign = [each for each in self._foreign if each[0] >= end]

    def take_foreign(self) -> list[tuple[int, MetadataRecord]]:
        """What the quorum itself appended: the term's machine has to know every record (M3)."""
        found, self._foreign = self._foreign, []
        return found

    @property
    def log_start(self) -> int:
        """What is below is only in a snapshot."""
        return self._told.base.end

    @property
    def newest_snapshot(self) -> SnapshotId | None:
        return self._files.newest

    def epoch_at(self, offset: int) -> int:
        """The leader epoch of a record of the log."""
        return self._open_log.epochs.epoch_of(offset)

    async def begin_at(self, made: SnapshotId) -> None:
        """Keep `made`, and drop whole segments below the older of those that are kept (L4)."""
        log = self._open_log
        async with self._writing:
            newest = self._files.newest
            if newest is not None and newest.end >= made.end:
                raise errors.SnapshotNotFound("a later one was loaded meanwhile")
            await self._files.keep(made)
            self._told.rebase()
            log.advance_log_start(self._told.base.end)
            plan = log.retention_plan(self._clock.wall_ms(), self.committed)
            rename, remove = log.drop_segments(plan)

            def drop() -> None:
                rename()
                log.flush()
                remove()

            if plan.drop:
                await self._disk.write(drop)
        self._post(Synced(self._state()))

    async def _make_snapshots(self) -> None:
        maker = SnapshotGenerator(
            self, self._told, self._files, self._clock, self._rules, self._say
        )
        try:
            await maker.run()
        except Exception as failure:
            self._fail(failure)

    # -- what others fetch ---------------------------------------------------------------------

    async def read(self, offset: int, max_bytes: int) -> tuple[bytes, int]:
        """Whole committed batches from `offset`, and where to go on."""
        return await self._told.read(offset, self.committed, max_bytes)
