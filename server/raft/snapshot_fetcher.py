"""Fetches the leader's snapshot piece by piece, for a voter that is behind the log (KIP-630).

World-generic.  One visit fetches for a bounded time.  Then the machine sends its next fetch, so
that leader and follower stay in contact and learn of changes (rule P1: nothing waits for a
snapshot). The next visit continues where the last one stopped.

Invariants
  D1  Only bytes of one snapshot are combined.  Equal ids have equal bytes (metadata/snapshot N1),
      and the whole file is verified before it counts.
  D2  A visit ends when this node no longer follows its leader.
  D3  A partial snapshot is dropped when no node has that snapshot any more, or when it is damaged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pk import errors
from pk.clock import Clock
from pk.log.storage import File
from pk.server.raft.messages import LoadSnapshot
from pk.server.raft.peers import Peers
from pk.server.raft.snapshot_files import PIECE_BYTES, SNAPSHOT_BYTES_MAX, SnapshotFiles
from pk.server.raft.snapshot_id import SnapshotId
from pk.wire import pk_pb2 as wire


@dataclass(slots=True)
class _Part:
    """The pieces that were fetched so far."""

    id: SnapshotId
    file: File
    position: int = 0
    size: int | None = None  #: the size that the leader reports; None = nothing fetched yet


class SnapshotFetcher:
    """Fetches one snapshot at a time into the `.part` file."""

    def __init__(
        self, files: SnapshotFiles, peers: Peers, clock: Clock, *, visit_ms: int, piece_ms: int
    ) -> None:
        self._files = files
        self._peers = peers
        self._clock = clock
        self._visit_ms = visit_ms
        self._piece_ms = piece_ms  #: timeout of one piece
        self._part: _Part | None = None

    async def visit(
        self, op: LoadSnapshot, least: int, follows: Callable[[], bool]
    ) -> tuple[SnapshotId, bytes] | None:
        """Continue the fetch.  Returns the snapshot once the `.part` file is complete, else None.

        `least`: a snapshot that ends below it is of no use.  Raises errors of the storage.
        """
        until_ms = self._clock.monotonic_ms() + self._visit_ms
        if self._part is not None and self._part.id.end < least:
            await self.drop()  # the log has passed the end of the partial snapshot
        part = await self._begin(op.snapshot)
        try:
            while part.position != part.size:
                if not follows() or self._clock.monotonic_ms() >= until_ms:
                    return None  # D2
                await self._fetch(op, part)
            raw = await self._files.read_part(part.id)
        except (errors.SnapshotNotFound, errors.InvalidRequest, errors.CorruptLog):
            await self.drop()  # D3
            return None
        except errors.StorageFull:
            await self.drop()
            raise
        except errors.RetriableError:
            return None
        return (part.id, raw) if follows() else None

    async def drop(self) -> None:
        """Drop the partial snapshot."""
        part, self._part = self._part, None
        if part is not None:
            part.file.close()
            await self._files.drop_part(part.id)

    def done(self) -> None:
        """Note that the `.part` file was renamed."""
        part, self._part = self._part, None
        if part is not None:
            part.file.close()

    async def _begin(self, offered: SnapshotId) -> _Part:
        """Continue the partial snapshot while the leader still has it; a leader keeps two."""
        if self._part is None:
            self._part = _Part(offered, await self._files.begin_part(offered))
        return self._part

    async def _fetch(self, op: LoadSnapshot, part: _Part) -> None:
        request = wire.FetchSnapshotRequest(
            end=part.id.end, epoch=part.id.epoch, position=part.position, max_bytes=PIECE_BYTES
        )
        try:
            frame = await self._peers.ask(op.leader, request, self._piece_ms)
        except (errors.SnapshotNotFound, errors.InvalidRequest):
            raise
        except errors.PkError as failure:  # a failure of the leader, whatever its kind
            raise errors.BrokerUnavailable(failure.message) from failure
        reply: Any = frame.head.fetch_snapshot_reply
        piece = bytes(frame.payload)
        same = (reply.end, reply.epoch, reply.position) == (*_pair(part.id), part.position)
        fits = 0 < len(piece) <= reply.size - part.position and reply.size <= SNAPSHOT_BYTES_MAX
        if not same or not fits or part.size not in (None, reply.size):
            raise errors.InvalidRequest(f"no piece of snapshot {part.id} at {part.position}")
        part.size = reply.size
        await self._files.append_part(part.file, piece)
        part.position += len(piece)


def _pair(snapshot: SnapshotId) -> tuple[int, int]:
    return snapshot.end, snapshot.epoch
