"""Loads a snapshot if the broker's image is too old for the controller's log (KIP-630, rule Q2).

World-generic.  The snapshot is fetched in pieces over the link to the controller and decoded in
slices, so that heartbeats continue.  The broker uses a snapshot only after it has checked the whole
snapshot.  After a failure the publisher fetches the log again.  The reply names the newest snapshot
of that time.
"""

from __future__ import annotations

from typing import Any

from pk import errors
from pk.clock import Clock
from pk.server.metadata import snapshot
from pk.server.metadata.image import MetadataImage
from pk.server.metadata.records import level_in
from pk.server.raft.snapshot_files import PIECE_BYTES, SNAPSHOT_BYTES_MAX
from pk.server.raft.snapshot_framing import check
from pk.server.raft.snapshot_id import SnapshotId, id_of
from pk.server.replica.context import ControllerChannel
from pk.wire import pk_pb2 as wire

PIECE_TIMEOUT_MS = 6_000


async def load_image(
    controller: ControllerChannel, clock: Clock, level: int, name: str, next_offset: int
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


async def _fetch(controller: ControllerChannel, wanted: SnapshotId) -> bytes:
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
