"""Serves the metadata of a controller: batches of the log, and pieces of snapshots.

World-generic.  Brokers and other voters verify the bytes that they receive.  On damage they can
only fetch again, and the controller would not notice: one flipped bit on its disk would keep every
starting broker from its metadata.  So the controller verifies the bytes before it sends them.

Invariants
  H1  A damaged batch is not sent (log_reader.py).  The controller that has it stops, and so leads
      no longer (rule L9, controller/node.py).  The other voters have the same records.
  H2  A damaged snapshot is neither sent nor kept.  The snapshot before it and the log contain the
      same records (log_reader.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pk import errors
from pk.server.raft.log_reader import READ_BYTES, LogReader, Say
from pk.server.raft.messages import FetchReply
from pk.server.raft.snapshot_files import SnapshotFiles
from pk.server.raft.snapshot_id import SnapshotId
from pk.types import NONE
from pk.wire import pk_pb2 as wire


class FetchSource:
    """Reads verified batches and snapshot pieces for fetch replies."""

    def __init__(self, reader: LogReader[Any], files: SnapshotFiles, say: Say) -> None:
        self._reader = reader
        self._files = files
        self._say = say

    async def filled(self, reply: FetchReply) -> tuple[FetchReply, bytes]:
        """Return a reply to a voter with the batches of its range.  Raises `CorruptLog`."""
        if reply.end <= reply.offset:
            return reply, b""
        payload, end = await self._reader.read(reply.offset, reply.end, READ_BYTES)
        return replace(reply, end=end), payload

    async def piece(self, request: Any) -> tuple[wire.FetchSnapshotReply, bytes]:
        """Return a piece of a snapshot.  Its records are committed, so any node may send it.

        Raises `SnapshotNotFound`, and `CorruptLog` if no undamaged snapshot is left.
        """
        wanted = SnapshotId(request.end, request.epoch)
        if request.end == NONE:
            newest = self._files.newest
            if newest is None:
                raise errors.SnapshotNotFound("no snapshot was made yet")
            wanted = newest
        position = request.position
        if position == 0:
            await self._look_at(wanted)
        piece, size = await self._files.piece(wanted, position, request.max_bytes)
        reply = wire.FetchSnapshotReply(
            end=wanted.end, epoch=wanted.epoch, size=size, position=position
        )
        return reply, piece

    async def _look_at(self, wanted: SnapshotId) -> None:
        """Verify a snapshot before its first piece is sent (H2)."""
        try:
            await self._files.read(wanted)
        except errors.CorruptLog as damage:
            self._say("metadata_snapshot_damaged", why=damage.message)
            self._files.forget(wanted)
            self._reader.rebase()
            raise errors.SnapshotNotFound(damage.message) from damage
