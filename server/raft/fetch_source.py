"""What a controller hands out of its metadata: batches of the log, and pieces of snapshots.

World-generic.  Brokers and the quorum's other voters check what they are given, but they can only
refuse it and ask again; the controller would never hear of it, and a single bit that rotted on its
disk would keep every broker that starts from its metadata.  So it looks itself.

Invariants
  H1  a damaged batch is not handed out (log_reader.py): the controller that has it ends and
      leads no more (rule L9, controller/node.py); the other voters have the same records
  H2  a damaged snapshot is not begun to be handed out, nor kept: the one before it and the log are
      as good (log_reader.py)
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
    """See the module."""

    def __init__(self, reader: LogReader[Any], files: SnapshotFiles, say: Say) -> None:
        self._reader = reader
        self._files = files
        self._say = say

    async def filled(self, reply: FetchReply) -> tuple[FetchReply, bytes]:
        """The batches of the range that a reply to a voter promises.  Raises `CorruptLog`."""
        if reply.end <= reply.offset:
            return reply, b""
        payload, end = await self._reader.read(reply.offset, reply.end, READ_BYTES)
        return replace(reply, end=end), payload

    async def piece(self, request: Any) -> tuple[wire.FetchSnapshotReply, bytes]:
        """A piece of a snapshot; it is committed, so that anybody may have it from anybody.

        Raises `SnapshotNotFound`, and `CorruptLog` if no whole one is left.
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
        """H2."""
        try:
            await self._files.read(wanted)
        except errors.CorruptLog as damage:
            self._say("metadata_snapshot_damaged", why=damage.message)
            self._files.forget(wanted)
            self._reader.rebase()
            raise errors.SnapshotNotFound(damage.message) from damage
