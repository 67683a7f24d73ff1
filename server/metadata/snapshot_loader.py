"""Reads the cluster's metadata from the active controller (KIP-630, rule Q2).

World-generic.  A broker loads a snapshot if its image is too old for the controller's log.  A tier
process reads the whole image once, for the copy in the tier (rule T13).  A snapshot is fetched in
pieces over the link to the controller and decoded in slices, so that heartbeats continue.  It is
used only after the whole snapshot was checked.  After a failure the caller fetches the log again.
The reply names the newest snapshot of that time.
"""

from __future__ import annotations

from typing import Any, Protocol

from google.protobuf.message import Message

from pk import errors, limits
from pk.clock import Clock
from pk.server.metadata import snapshot
from pk.server.metadata.image import MetadataImage
from pk.server.metadata.records import decode_batches, level_in
from pk.server.raft.snapshot_files import PIECE_BYTES, SNAPSHOT_BYTES_MAX
from pk.server.raft.snapshot_framing import check
from pk.server.raft.snapshot_id import SnapshotId, id_of
from pk.types import NONE
from pk.wire import frames
from pk.wire import pk_pb2 as wire

PIECE_TIMEOUT_MS = 6_000
FETCH_BYTES = 1 * limits.MIB


class ControllerCalls(Protocol):
    """Calls the active controller."""

    async def call(self, request: Message, timeout_ms: int) -> frames.Frame:
        """Return the reply.  Raises its typed error, and `ControllerUnavailable`."""
        ...


async def read_log(
    controller: ControllerCalls, from_offset: int, max_bytes: int = FETCH_BYTES
) -> frames.Frame:
    """Fetch committed records of the metadata log; does not wait for new ones."""
    request = wire.FetchMetadataLogRequest(
        from_offset=from_offset, max_bytes=max_bytes, replica_id=NONE, last_fetched_epoch=NONE
    )
    return await controller.call(request, PIECE_TIMEOUT_MS)


async def read_image(controller: ControllerCalls, clock: Clock, level: int) -> MetadataImage:
    """Return the image of everything that was committed when the first reply was sent.

    Raises as `load_image`, and `CorruptLog` if records contradict each other.
    """
    image, end = MetadataImage(), NONE
    while end == NONE or image.offset + 1 < end:
        frame = await read_log(controller, image.offset + 1)
        reply = frame.head.fetch_metadata_log_reply
        end = reply.high_watermark if end == NONE else end
        before = image.offset
        if reply.snapshot:
            image = await load_image(controller, clock, level, reply.snapshot, before + 1)
            continue
        for offset, record in decode_batches(frame.payload, before + 1):
            level_in(record, level)
            image.apply(offset, record)
        if image.offset == before < end - 1:
            raise errors.ControllerUnavailable(f"the metadata log has nothing at {before + 1}")
        await clock.sleep_ms(0)
    return image


async def load_image(
    controller: ControllerCalls, clock: Clock, level: int, name: str, next_offset: int
) -> MetadataImage:
    """Return the image of the snapshot `name`, offered for a fetch at `next_offset`.

    level: the highest level of `pk.format` that this node knows.
    Raises `SnapshotNotFound`, `ControllerUnavailable`, and `NewerFormat` if this build is too old.
    """
    wanted = id_of(name)
    if wanted is None or wanted.end <= next_offset:
        raise errors.ControllerUnavailable(f"snapshot {name!r} does not end above {next_offset}")
    raw = await _fetch(controller, wanted)
    try:
        check(raw, wanted)
    except errors.CorruptLog as damage:  # damage at the controller, which will write another one
        raise errors.ControllerUnavailable(f"{name}: {damage.message}") from damage
    image = MetadataImage()
    for rows in snapshot.batches_of(raw):
        for offset, record in rows:
            level_in(record, level)  # Q6: refuses unknown levels
            image.apply(offset, record)
        await clock.sleep_ms(0)
    return image


async def _fetch(controller: ControllerCalls, wanted: SnapshotId) -> bytes:
    raw = bytearray()
    while True:
        request = wire.FetchSnapshotRequest(
            end=wanted.end, epoch=wanted.epoch, position=len(raw), max_bytes=PIECE_BYTES
        )
        frame = await controller.call(request, PIECE_TIMEOUT_MS)
        reply: Any = frame.head.fetch_snapshot_reply
        asked = (wanted.end, wanted.epoch, len(raw))
        if (reply.end, reply.epoch, reply.position) != asked or not frame.payload:
            raise errors.ControllerUnavailable(f"a snapshot piece that does not fit {asked}")
        if not len(raw) + len(frame.payload) <= reply.size <= SNAPSHOT_BYTES_MAX:
            raise errors.ControllerUnavailable(f"a snapshot of {reply.size} bytes is refused")
        raw += frame.payload
        if len(raw) == reply.size:
            return bytes(raw)
