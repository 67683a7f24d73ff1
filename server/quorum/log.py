"""`__cluster_metadata-0` on a disk: the partition log, the saved vote, and the quorum that commits
it.

World-generic.  The log is an ordinary partition log whose every write is SYNCED before it counts
(rule L1); what is committed is what the quorum machine says (rule Q4).  It is the `ReplayLog` of
the controller and the source of `fetch_metadata_log`.

Files, in the storage's root (`DIR/metadata`): `quorum-state` (the vote, JSON),
`__cluster_metadata-0/`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pk import errors, limits, settings
from pk.clock import Clock
from pk.effects import Level
from pk.log import batch as batches
from pk.log.partition_log import PartitionLog
from pk.log.plan import LogConfig
from pk.log.storage import Disk, Storage
from pk.server.controller.records import (
    METADATA_TOPIC_ID,
    MetadataRecord,
    decode_batches,
    encode_batch,
    record_of,
)
from pk.server.quorum.machine import (
    HIGH_WATERMARK,
    LEADERSHIP,
    BeginEpoch,
    Leadership,
    Quorum,
    SaveVote,
    Started,
    Synced,
    Vote,
    VoteGranted,
    Voter,
)
from pk.server.runtime import MachineHost
from pk.types import METADATA_TOPIC, NodeId, TopicPartition
from pk.wire import pk_pb2 as wire

QUORUM_STATE = "quorum-state"
LOG_DIR = f"{METADATA_TOPIC}-0"
READ_BYTES = 4 * limits.MIB

#: How the metadata log differs from a topic: kept for ever, synced always, large batches (rule M2).
_CONFIG = {
    "retention_ms": -1,
    "flush_on_ack": True,
    "segment_bytes": 64 * limits.MIB,
    "max_message_bytes": 64 * limits.MIB,
    "decoded_bytes_max": 64 * limits.MIB,
}


def read_state(storage: Storage) -> tuple[Vote, int]:
    """The saved vote and how far the log was SYNCED then; nothing saved yet = epoch 0.

    Raises `CorruptLog`: to guess a vote could be to vote twice.
    """
    try:
        raw = storage.read_file(QUORUM_STATE)
    except FileNotFoundError:
        return Vote(), 0
    try:
        known = json.loads(raw)
        vote = Vote(int(known["epoch"]), int(known["voted_for"]), str(known["voted_directory_id"]))
        return vote, int(known["synced_end"])
    except (ValueError, KeyError, TypeError) as cause:
        raise errors.CorruptLog(f"{storage.root}/{QUORUM_STATE} is damaged: {cause}") from cause


def _state_bytes(vote: Vote, synced_end: int) -> bytes:
    known: dict[str, Any] = {
        "format": 0,
        "epoch": vote.epoch,
        "voted_for": vote.voted_for,
        "voted_directory_id": vote.voted_directory_id,
        "synced_end": synced_end,
    }
    return json.dumps(known).encode()


class MetadataLog:
    """See the module.  One per controller process."""

    def __init__(
        self,
        clock: Clock,
        disk: Disk,
        *,
        node_id: NodeId,
        directory_id: str,
        address: str,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self._clock = clock
        self._disk = disk
        self._address = address
        self._on_fatal = on_fatal
        me = Voter(node_id, directory_id)
        self.quorum = Quorum(me, (me,))
        self._host: MachineHost[Any] | None = None
        self._log: PartitionLog | None = None
        self._leadership: asyncio.Future[Leadership] | None = None
        self._writing = asyncio.Lock()
        self._advanced: list[asyncio.Future[None]] = []
        self._failed: Exception | None = None

    # -- life ----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Recover the log, win the election, commit the first records of the new epoch.

        Raises `CorruptLog` if records that were SYNCED are gone or damaged: committed metadata is
        never cut away as if it were a torn tail.
        """
        vote, log = await self._disk.write(self._recover)
        self._log = log
        self._leadership = asyncio.get_running_loop().create_future()
        self._host = MachineHost(self.quorum, self, self._clock, on_fatal=self._fail)
        self._host.start()
        self._host.post(Started(vote, log.log_end, log.last_epoch))
        leadership = await self._leadership
        await self.wait_committed(leadership.start + 1)

    def _recover(self) -> tuple[Vote, PartitionLog]:
        storage = self._disk.storage
        vote, synced_end = read_state(storage)
        log = PartitionLog.open(
            storage,
            LOG_DIR,
            TopicPartition(METADATA_TOPIC, 0),
            METADATA_TOPIC_ID,
            LogConfig.of(settings.TOPIC.resolve(_CONFIG)),
            clean=False,  # always verified from the last point known to be SYNCED
            recovery_point=synced_end,
            now_ms=self._clock.wall_ms(),
        )
        if log.log_end < synced_end:
            raise errors.CorruptLog(
                f"{storage.root}/{LOG_DIR} ends at {log.log_end}, but had {synced_end} records"
            )
        return vote, log

    def _save(self, vote: Vote) -> None:
        synced_end = self._open_log.flush()
        self._disk.storage.replace_file(QUORUM_STATE, _state_bytes(vote, synced_end))

    async def close(self, clean: bool = True) -> None:
        if self._host is not None:
            await self._host.close()
        log = self._log
        if log is not None:
            async with self._writing:
                await self._disk.write(lambda: log.close(clean))

    def _fail(self, failure: BaseException) -> None:
        if isinstance(failure, Exception):
            self._failed = failure
        if self._leadership is not None and not self._leadership.done():
            self._leadership.set_exception(failure)
        waiting, self._advanced = self._advanced, []
        for future in waiting:
            if not future.done():
                future.set_exception(failure)
                future.exception()
        self._on_fatal(failure)

    @property
    def _open_log(self) -> PartitionLog:
        assert self._log is not None, "the metadata log is not open"
        return self._log

    # -- the quorum's doors (pk.server.runtime.Doors) ------------------------------------------

    async def write(self, ops: Sequence[Any], level: Level) -> None:
        """Perform what the quorum asks for; both are SYNCED."""
        for op in ops:
            if isinstance(op, SaveVote):
                await self._disk.write(partial(self._save, op.vote))
            elif isinstance(op, BeginEpoch):
                self._append(_first_records(op, self._address), op.epoch, self._clock.wall_ms())
                await self._write_out()
            else:
                raise AssertionError(f"the quorum may not ask for {op!r}")

    def send(self, peer: Any, message: Any) -> None:
        """No other voter can be reached in this build; a message to one is lost, as it may be."""

    def respond(self, request: Any, reply: Any) -> None:
        raise AssertionError("the quorum answers nobody in this build")

    def publish(self, name: str, value: Any) -> None:
        """What the quorum makes known."""
        if isinstance(value, VoteGranted):
            assert self._host is not None
            self._host.post(value)
        elif name == LEADERSHIP and self._leadership is not None:
            self._leadership.set_result(value)
        elif name == HIGH_WATERMARK:
            waiting, self._advanced = self._advanced, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    # -- the controller's log (pk.server.runtime.ReplayLog) ------------------------------------

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
    def failed(self) -> Exception | None:
        return self._failed or self._disk.storage.failed

    def append(self, records: Sequence[MetadataRecord], now_ms: int) -> int:
        """Decide one batch in the leader's epoch."""
        return self._append(records, self.epoch, now_ms)

    def _append(self, records: Sequence[MetadataRecord], epoch: int, now_ms: int) -> int:
        raw = encode_batch(records, now_ms)
        header = batches.check(raw)
        appended = self._open_log.decide(
            header, raw, leader_epoch=epoch, now_ms=now_ms, from_client=False
        )
        return appended.base_offset

    async def commit(self) -> None:
        """Write, sync, and wait until the quorum has committed it."""
        end = self.end
        await self._write_out()
        await self.wait_committed(end)

    async def _write_out(self) -> None:
        log = self._open_log
        async with self._writing:
            plan = log.take_writes()
            if plan is None:
                return
            failure: Exception | None = None
            try:
                await self._disk.write(lambda: log.perform(plan))
            except Exception as cause:
                failure = cause
            done = log.complete(plan, failure)
        if done.error is not None:
            raise done.error
        assert self._host is not None
        self._host.post(Synced(self.quorum.me, self.epoch, done.synced_end))

    async def wait_committed(self, end: int) -> None:
        """Return once everything below `end` is committed."""
        while self.committed < end:
            if self._failed is not None:
                raise self._failed
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._advanced.append(future)
            await future

    async def replay(self, apply: Callable[[int, MetadataRecord], None]) -> None:
        """Hand every record below the end to `apply`, in order."""
        log, offset = self._open_log, 0
        while offset < log.written_end:
            raw, following = await self._read(offset, log.written_end, READ_BYTES)
            for at, record in decode_batches(raw, offset):
                apply(at, record)
            offset = following

    # -- what others fetch ---------------------------------------------------------------------

    async def read(self, offset: int, max_bytes: int) -> tuple[bytes, int]:
        """Whole committed batches from `offset`, and where to go on."""
        return await self._read(offset, self.committed, max_bytes)

    async def _read(self, offset: int, bound: int, max_bytes: int) -> tuple[bytes, int]:
        log = self._open_log
        found = await self._disk.read(lambda: log.read(offset, bound=bound, max_bytes=max_bytes))
        return found.data, found.next_offset


def _first_records(begin: BeginEpoch, address: str) -> list[MetadataRecord]:
    leader = begin.leader
    change = wire.LeaderChangeRecord(
        leader_id=leader.node_id,
        epoch=begin.epoch,
        voters=[voter.node_id for voter in begin.voters],
    )
    voters = wire.VotersRecord(
        voters=[
            wire.Voter(node_id=voter.node_id, directory_id=voter.directory_id, address=address)
            for voter in begin.voters
        ]
    )
    return [record_of(change), record_of(voters)]
