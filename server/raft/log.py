"""The replicated metadata log of one node: the partition log, the saved vote and the quorum
machine.

World-generic.  The log is an ordinary partition log; each write counts only once it is SYNCED (rule
L1).  The quorum machine decides what is committed (rule Q4).  This class is the `ReplayLog` of the
controller and the source of `fetch_metadata_log`, and other voters fetch from it.  It does not know
the meaning of records: `serde` encodes and decodes them, and `make_generator` returns the generator
of snapshots.

Files in the storage's root (`DIR/metadata`): `quorum-state` (the vote), `__cluster_metadata-0/`,
and `<end>-<epoch>.checkpoint` (snapshots; the log begins at the older of two).

Invariants
  W1  The machine learns only the SYNCED state of the log.  It also learns when each write that it
      requested has ended.
  W2  Records that this node decided as a leader and did not write are undone before it fetches.
  W3  A snapshot is loaded beside the queue of writes, so that votes do not wait for it (rule P1).
      Meanwhile nothing else writes to the log (raft/machine U6).
  W7  A log that has records, and whose vote is lost, is opened only if this node is the only voter
      and the settings name no voters.  Otherwise another node could have received the lost vote
      (rule Q5).
  W9  A leader that finds no space for records that it decided resigns, unless it is the only voter
      (rule L16).  Its log is undone to what is written, and a voter with space can be elected.
(the others: raft/log_writer W4 to W6, W8)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from pk import errors, formats
from pk.effects import Level
from pk.log.partition_log import PartitionLog
from pk.log.storage import Disk
from pk.server.raft import messages
from pk.server.raft.fetch_source import FetchSource
from pk.server.raft.log_reader import READ_BYTES, Apply, LogReader, Say
from pk.server.raft.log_writer import FULL_WAIT_MS, LogWriter
from pk.server.raft.machine import Quorum, Role
from pk.server.raft.messages import (
    HIGH_WATERMARK,
    LEADERSHIP,
    SELF,
    Leadership,
    LogState,
    Resign,
    Started,
    Synced,
    TimerFired,
    Vote,
    Voter,
)
from pk.server.raft.peers import Peers
from pk.server.raft.quorum_state_store import vote_lost
from pk.server.raft.record_serde import RecordSerde
from pk.server.raft.recovery import SnapshotRules, recover
from pk.server.raft.request_handler import RaftRequestHandler
from pk.server.raft.reserve import RESERVE_BYTES, ReserveDisk
from pk.server.raft.snapshot_fetcher import SnapshotFetcher
from pk.server.raft.snapshot_files import SnapshotFiles
from pk.server.raft.snapshot_generator import MakeGenerator
from pk.server.raft.snapshot_id import SnapshotId
from pk.server.raft.timing import Timing
from pk.server.raft.voters import Voters, level_of
from pk.server.runtime.machine_host import MachineHost
from pk.server.runtime.timers import Timers
from pk.tasks import TaskRegistry
from pk.types import NONE, NodeId
from pk.wire import pk_pb2 as wire
from pk.wire.calls import PROTOCOL, Handler
from pk.world import World

#: Timeout of EndQuorumEpoch when the process stops.
RESIGN_MS = 1_000


R = TypeVar("R")


class RaftLog(Generic[R]):
    """The metadata log of a controller process; see the module.

    `voters`: the first voters of a new quorum with their addresses; default: only this node.  These
    addresses have precedence over those in the log.  `peers`: addresses by node id to which this
    node connects instead.
    """

    def __init__(
        self,
        world: World,
        disk: Disk,
        serde: RecordSerde[R],
        make_generator: MakeGenerator[R],
        *,
        me: Voter,
        address: str,
        on_fatal: Callable[[BaseException], None],
        voters: Mapping[Voter, str] | None = None,
        timing: Timing | None = None,
        cluster_id: str = "",
        rules: SnapshotRules | None = None,
        say: Say = lambda event, **facts: None,
        peers: Mapping[NodeId, str] | None = None,
        reserve_bytes: int = RESERVE_BYTES,
        format_level: int = formats.LEVEL,
    ) -> None:
        first = {me: address} if voters is None else voters
        self._given_alone = voters is None
        self._clock = world.clock
        self._disk = ReserveDisk(disk, reserve_bytes)
        self._on_fatal = on_fatal
        self.voters = Voters(serde, me, address, first)
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
            self.voters, timeout_ms=self.quorum.timing.fetch_ms, format_level=format_level,
        )  # fmt: skip
        self._rules = rules or SnapshotRules()
        self._say = say
        self._files = SnapshotFiles(self._disk, world.clock)
        self._fetcher = SnapshotFetcher(
            self._files, self._peers, world.clock,
            visit_ms=self.quorum.timing.fetch_ms // 2, piece_ms=self.quorum.timing.fetch_ms,
        )  # fmt: skip
        self._tasks = TaskRegistry()
        self._serde = serde
        self._format_level = format_level
        self._make_generator = make_generator
        self._log: PartitionLog | None = None
        self._reader: LogReader[R] | None = None
        self._writer: LogWriter[R]
        self._request_handler: RaftRequestHandler
        self._news: list[asyncio.Future[None]] = []  #: waiters for any change of state
        self._failed: Exception | None = None
        self.leadership = Leadership(0, None)

    # -- life ----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Recover the log and join the quorum.

        Raises `CorruptLog` if SYNCED records are missing or damaged: committed metadata is never
        cut as a torn tail.
        """
        await self._disk.prepare()
        opened = await self._disk.write(
            partial(
                recover, self._disk.storage, self._rules, self._clock.wall_ms(), self._format_level
            )
        )
        log = self._log = opened.log
        self._files.kept = opened.kept
        self._reader = LogReader(self._disk, self._clock, self._serde, self._files, log, self._say)
        self._writer = LogWriter(
            self._disk, self._clock, self._serde, log, self.voters, opened.vote,
            lambda job: self._post(Synced(self._state(), job)),
        )  # fmt: skip
        self._request_handler = RaftRequestHandler(
            self.quorum, FetchSource(self._reader, self._files, self._say), self.voters,
            ask=self._post, renew=lambda: self._post(Synced(self._state())),
        )  # fmt: skip
        opened.report(self._say)
        offset = 0
        if self._files.newest is not None:
            self.voters.begin_with(self._files.newest, await self._files.read(self._files.newest))
            offset = self._files.newest.end
        while offset < log.written_end:
            raw, following = await self._open_reader.read(offset, log.written_end, READ_BYTES)
            self.voters.find(raw, offset)
            offset = following
        voters = self.voters.now
        mine = [voter for voter in voters if voter.node_id == self.quorum.me.node_id]
        # without an address, such a node would wait without end
        if len(voters) == 1 and mine and not self.alone:
            raise errors.DirectoryOfAnotherCluster(
                f"{self._disk.storage.root} holds the metadata of node {voters[0].node_id} with "
                f"directory {voters[0].directory_id}, this is node {self.quorum.me.node_id} with "
                f"directory {self.quorum.me.directory_id}"
            )
        if opened.vote_lost:
            self._go_on_without_vote()
        self._host.start()
        for work in (self._timers.run(), self._make_snapshots()):
            self._tasks.spawn(work)
        self._post(Started(opened.vote, self._state()))

    def _go_on_without_vote(self) -> None:
        """Start without a saved vote (W7).

        Raises `CorruptLog` if another node votes or the settings name voters.
        """
        log = self._open_log
        if not self.alone or not self._given_alone:
            raise vote_lost(self._disk.storage)
        self._say(
            "quorum_state_missing",
            epoch=self._state().last_epoch,
            log_end=log.written_end,
            why="the saved vote is gone; this node is the only voter and goes on from the epoch of "
            "its log. Every batch matches its checksum. Whole batches that are missing behind "
            "log_end would not be noticed: how far the log was SYNCED is not known",
        )

    async def lead(self) -> Leadership:
        """Return once this node leads and has committed the first records of its epoch."""
        while True:
            found = self.leadership
            if found.start != NONE and self.committed > found.start:
                return found
            await self._next_news()

    async def note_synced(self) -> None:
        """Note the synced end for the next start.  Raises `StorageFull`."""
        await self._writer.note_synced()

    async def resign(self) -> None:
        """Send EndQuorumEpoch if this node leads, so that others need not wait for a timeout."""
        self._post(Resign())
        try:
            async with asyncio.timeout(RESIGN_MS / 1000):
                while self.leadership.start != NONE and self._failed is None:
                    await self._next_news()
                await self._peers.idle()
        except TimeoutError:
            pass

    async def close(self, clean: bool = True) -> None:
        await self._tasks.close()
        await self._host.close()
        await self._peers.close()
        if self._log is not None:
            await self._writer.close(clean)

    def _fail(self, failure: BaseException) -> None:
        if isinstance(failure, Exception):
            self._failed = failure
        self._tell(failure)
        self._on_fatal(failure)

    def _post(self, event: messages.RaftEvent) -> None:
        try:
            self._host.post(event)
        except errors.ThrottledError as full:
            self._fail(full)

    def _tell(self, failure: BaseException | None = None) -> None:
        """Wake the tasks that wait for a change of state."""
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
        """Whether this node is the only voter; then it leads as soon as it has started."""
        return self.voters.now == (self.quorum.me,)

    def in_touch(self) -> bool:
        """Whether this node leads and its contact with a majority is recent enough (rule R6).

        An election begins `fetch_ms` after the last contact of a follower with its leader, so no
        other node can have been elected for long.
        """
        state = self.quorum.leader_state
        since_ms = self._clock.monotonic_ms() - self.quorum.timing.lease_ms
        return state is not None and state.in_touch(self.quorum.voters, since_ms)

    def address_of(self, node_id: NodeId) -> str:
        """HOST:PORT of a controller; '' if unknown."""
        return self.voters.addresses.get(node_id, "")

    @property
    def _open_reader(self) -> LogReader[R]:
        assert self._reader is not None, "the log is not open"
        return self._reader

    @property
    def _open_log(self) -> PartitionLog:
        assert self._log is not None, "the log is not open"
        return self._log

    def _state(self) -> LogState:
        log = self._open_log
        base, newest = self._open_reader.base, self._files.newest
        return LogState(log.synced_end, log.epochs.entries, tuple(self.voters.at), base, newest)

    # -- the effects of the quorum (runtime/machine_host.py) ---------------------------------------

    async def write(self, ops: Sequence[Any], level: Level) -> None:
        """Perform the writes that the quorum machine requests; all of them are SYNCED."""
        for op in ops:
            await self._perform(op)

    async def _perform(self, op: Any) -> None:
        if isinstance(op, messages.SaveVote):
            await self._save_vote(op.vote)
        elif isinstance(op, messages.BeginEpoch | messages.AppendVoters):
            if self.quorum.role is Role.LEADER and op.epoch == self.epoch:
                records = self.voters.records(op)
                self._writer.append_own(records, op.epoch)
                try:
                    await self._writer.write_out()
                except errors.StorageFull:
                    if isinstance(op, messages.BeginEpoch):  # another node leads this epoch
                        raise
                if self.voters.now != op.voters:  # undone because the disk is full
                    self._post(Resign())
        elif isinstance(op, messages.StopLeading):
            await self._writer.undo(op.job)  # W2
        elif isinstance(op, messages.AppendFetched):
            await self._writer.append_fetched(op.reply, op.job)
        elif isinstance(op, messages.TruncateTo):
            await self._truncate(op)
        elif isinstance(op, messages.LoadSnapshot):
            self._tasks.spawn(self._load(op))  # W3
        else:
            raise AssertionError(f"the quorum may not ask for {op!r}")

    async def _save_vote(self, vote: Vote) -> None:
        """Save the vote.  No message leaves before; on a full disk this waits for space."""
        while True:
            try:
                await self._writer.save_vote(vote)
                return
            except errors.StorageFull as full:
                self._say("vote_waits_for_room", why=full.message)
                await self._clock.sleep_ms(FULL_WAIT_MS)

    async def _truncate(self, op: messages.TruncateTo) -> None:
        self._say("metadata_log_cut", what=await self._writer.truncate(op.end))
        self.voters.forget(self._open_log.log_end)
        self._post(Synced(self._state(), op.job))

    async def _load(self, op: messages.LoadSnapshot) -> None:
        """Make one visit of the snapshot fetch; report its end to the machine (W1)."""
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
        """Replace the log by an empty one that begins at the end of snapshot `loaded`."""
        log = self._open_log
        await self._writer.raise_level(level_of(self._serde, raw))
        await self._files.begin_load(loaded)
        self._fetcher.done()
        async with self._writer.lock:
            await self._files.finish_load(loaded, log)
            self._open_reader.rebase()
        self.voters.begin_with(loaded, raw)
        self._say("metadata_snapshot_loaded", end=loaded.end, epoch=loaded.epoch, bytes=len(raw))

    def send(self, peer: Any, message: Any) -> None:
        self._peers.send(peer, message)

    def respond(self, request: Any, reply: Any) -> None:
        if request.done():
            return  # the caller was cancelled
        if isinstance(reply, errors.PkError):
            request.set_exception(reply)
        else:
            request.set_result(reply)

    def publish(self, name: str, value: Any) -> None:
        """Handle a value that the quorum machine publishes."""
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
        """Return the request handlers for control streams of the other quorum nodes."""
        return self._request_handler.handlers()

    # -- the controller's log (runtime/replayed_host.py) -------------------------------------------

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

    def append(self, records: Sequence[R], now_ms: int) -> int:
        """Decide one batch in the leader's epoch.  Raises `ControllerUnavailable`."""
        if not self.leads:
            raise errors.ControllerUnavailable("this controller does not lead")
        return self._writer.append(records, self.epoch, now_ms)

    async def commit(self) -> None:
        """Write, sync, and wait until the quorum has committed it.

        Raises `StorageFull`, after which nothing is written, and `ControllerUnavailable` if
        another node leads before the commit; the outcome is then open.
        """
        end, epoch = self.end, self.epoch
        try:
            await self._writer.write_out()
        except errors.StorageFull:
            self._resign_unless_alone()
            raise
        while self.committed < end:
            if self.leadership.start == NONE or self.epoch != epoch:
                raise errors.ControllerUnavailable("another controller leads now")
            await self._next_news()

    def _resign_unless_alone(self) -> None:
        """Let a voter with space lead (W9)."""
        if not self.alone:
            self._say("metadata_leader_full", epoch=self.epoch)
            self._post(Resign())

    async def change_voters(self, voters: Sequence[Voter], addresses: Mapping[NodeId, str]) -> None:
        """Change the voters to `voters`; return when the change is committed (KIP-853).

        Raises `InvalidRequest`, and `ControllerUnavailable`, after which the outcome is open.
        """
        self.voters.addresses.update(addresses)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._post(messages.VotersChange(future, tuple(voters)))
        await future

    async def leadership_over(self, epoch: int) -> None:
        """Return once this node no longer leads `epoch`."""
        while self.leads and self.epoch == epoch:
            await self._next_news()

    async def wait_committed(self, end: int) -> None:
        """Return once everything below `end` is committed."""
        while self.committed < end:
            await self._next_news()

    async def replay(self, apply: Apply[R]) -> None:
        """Call `apply` with every record below the end, in order; the newest snapshot comes
        first.
        """
        await self._open_reader.replay(apply)
        self._writer.forget_foreign(self._open_log.written_end)

    def take_foreign(self) -> list[tuple[int, R]]:
        """Return the records that the quorum itself appended since the last call.

        The controller machine must apply every record (controller/machine M3).
        """
        return self._writer.take_foreign()

    @property
    def log_start(self) -> int:
        """The first offset of the log; records below it are only in a snapshot."""
        return self._open_reader.base.end

    @property
    def newest_snapshot(self) -> SnapshotId | None:
        return self._files.newest

    def epoch_at(self, offset: int) -> int:
        """The leader epoch of a record of the log."""
        return self._open_log.epochs.epoch_of(offset)

    async def begin_at(self, made: SnapshotId) -> None:
        """Keep snapshot `made`; drop segments below the older kept snapshot (raft/log_writer
        W4)."""
        log = self._open_log
        async with self._writer.lock:
            newest = self._files.newest
            if newest is not None and newest.end >= made.end:
                raise errors.SnapshotNotFound("a later snapshot was loaded meanwhile")
            await self._files.keep(made)
            self._open_reader.rebase()
            log.advance_log_start(self._open_reader.base.end)
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
        generator = self._make_generator(
            self, self._open_reader, self._files, self._clock, self._rules, self._say
        )
        try:
            await generator.run()
        except Exception as failure:
            self._fail(failure)

    # -- what others fetch ---------------------------------------------------------------------

    async def read(self, offset: int, max_bytes: int) -> tuple[bytes, int]:
        """Return whole committed batches from `offset`, and the next offset."""
        return await self._open_reader.read(offset, self.committed, max_bytes)
