"""Fetching a leader's snapshot piece by piece: raft/snapshot_fetcher D1 to D3, with a scripted
leader.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pk import errors
from pk.server.metadata import snapshot
from pk.server.raft.messages import LoadSnapshot, Voter
from pk.server.raft.snapshot_fetcher import SnapshotFetcher
from pk.server.raft.snapshot_files import SNAPSHOT_BYTES_MAX, SnapshotFiles
from pk.server.raft.snapshot_id import SnapshotId
from pk.sim.disk import SimDisk, SimStorage
from pk.sim.world import SimWorld
from pk.wire import pk_pb2 as wire
from tests.unit.server.metadata.metadata_records import history

LEADER = Voter(1, "d1")


def made(seed: int) -> tuple[SnapshotId, bytes]:
    image = history(seed, 80).image
    known = SnapshotId(image.offset + 1, image.leader_epoch)
    return known, b"".join(snapshot.encode(known, snapshot.rows_of(image)))


class Scene:
    """A fetcher, and the leader's snapshots; `spoil` changes an answer."""

    def __init__(self, visit_ms: int = 10_000) -> None:
        self.sim = SimWorld(1)
        self.world = self.sim.world_of("n")
        self.storage = SimStorage("m", self.world.rng)
        disk = SimDisk(self.storage, self.world.clock, self.world.rng)
        self.has: dict[SnapshotId, bytes] = {}
        self.asked: list[tuple[SnapshotId, int]] = []
        self.spoil: Callable[[Any, bytes], bytes] = lambda reply, piece: piece
        self.before: Callable[[], None] = lambda: None
        self.piece = 100
        self.files = SnapshotFiles(disk, self.world.clock)
        peers: Any = SimpleNamespace(ask=self.ask)
        self.loader = SnapshotFetcher(
            self.files, peers, self.world.clock, visit_ms=visit_ms, piece_ms=100
        )

    async def ask(self, peer: Voter, request: wire.FetchSnapshotRequest, _ms: int) -> Any:
        assert peer == LEADER
        known = SnapshotId(request.end, request.epoch)
        self.asked.append((known, request.position))
        await self.world.clock.sleep_ms(10)
        self.before()
        raw = self.has.get(known)
        if raw is None:
            raise errors.SnapshotNotFound("gone")
        reply = wire.FetchSnapshotReply(
            end=known.end, epoch=known.epoch, size=len(raw), position=request.position
        )
        piece = self.spoil(reply, raw[request.position : request.position + self.piece])
        head = SimpleNamespace(fetch_snapshot_reply=reply)
        return SimpleNamespace(head=head, payload=piece)

    def visit(
        self, offered: SnapshotId, least: int = 0, follows: Callable[[], bool] = lambda: True
    ) -> tuple[SnapshotId, bytes] | None:
        op = LoadSnapshot(1, LEADER, offered)
        return self.sim.run(self.loader.visit(op, least, follows))

    def parts(self) -> list[str]:
        return [name for name in self.storage.list("") if name.endswith(".part")]


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_visit_is_bounded_and_the_next_goes_on_where_it_stopped() -> None:
    scene = Scene(visit_ms=15)
    known, raw = made(1)
    scene.has[known] = raw
    visits = 1
    while (found := scene.visit(known)) is None:
        visits += 1
    assert found == (known, raw)
    positions = [at for _, at in scene.asked]
    assert positions == list(range(0, len(raw), scene.piece))
    assert visits > 1
    assert scene.storage.read_file(scene.parts()[0]) == raw


def test_it_goes_on_with_what_was_begun_though_a_newer_one_is_offered(scene: Scene) -> None:
    """Otherwise a follower would never catch up with a leader that makes snapshots faster than they
    are fetched.
    """
    (old, raw), (new, _) = made(1), made(2)
    scene.has[old] = raw
    assert scene.visit(old, follows=lambda: len(scene.asked) < 2) is None
    assert scene.visit(SnapshotId(new.end + 1_000, new.epoch)) == (old, raw)


def test_what_nobody_has_any_more_is_begun_again(scene: Scene) -> None:
    (old, raw), (new, other) = made(1), made(2)
    scene.has[old] = raw
    assert scene.visit(old, follows=lambda: len(scene.asked) < 2) is None
    scene.has = {new: other}
    assert scene.visit(new) is None
    assert not scene.parts()
    assert scene.visit(new) == (new, other)


def test_what_the_log_has_passed_is_not_gone_on_with(scene: Scene) -> None:
    (old, raw), (_, other) = made(1), made(2)
    later = SnapshotId(old.end + 5, old.epoch + 1)
    scene.has = {old: raw, later: other}
    assert scene.visit(old, follows=lambda: len(scene.asked) < 2) is None
    scene.visit(later, least=old.end + 1)
    assert scene.asked[-1][0] == later


def test_a_visit_ends_with_its_leader(scene: Scene) -> None:
    """raft/snapshot_fetcher D2: even if the last piece has arrived."""
    known, raw = made(1)
    scene.has[known] = raw
    assert scene.visit(known, follows=lambda: len(scene.asked) < 3) is None
    assert len(scene.asked) == 3
    assert scene.visit(known, follows=lambda: len(scene.asked) * scene.piece < len(raw)) is None
    assert scene.visit(known) == (known, raw)


def test_damage_is_found_and_it_is_begun_again(scene: Scene) -> None:
    # raft/snapshot_fetcher D1
    known, raw = made(1)
    scene.has[known] = raw
    scene.spoil = lambda reply, piece: bytes(len(piece)) if reply.position == 300 else piece
    assert scene.visit(known) is None
    assert not scene.parts()
    scene.spoil = lambda reply, piece: piece
    assert scene.visit(known) == (known, raw)


def _moved(reply: Any, piece: bytes) -> bytes:
    reply.position += 1
    return piece


def _another(reply: Any, piece: bytes) -> bytes:
    reply.epoch += 1
    return piece


def _grown(reply: Any, piece: bytes) -> bytes:
    reply.size += reply.position
    return piece


def _huge(reply: Any, piece: bytes) -> bytes:
    reply.size = SNAPSHOT_BYTES_MAX + 1
    return piece


def _too_long(reply: Any, piece: bytes) -> bytes:
    return piece + bytes(reply.size)


@pytest.mark.parametrize("spoil", [_moved, _another, _grown, _huge, _too_long, lambda r, p: b""])
def test_a_piece_that_does_not_fit_is_refused(
    scene: Scene, spoil: Callable[[Any, bytes], bytes]
) -> None:
    known, raw = made(1)
    scene.has[known] = raw
    scene.spoil = spoil
    assert scene.visit(known) is None
    assert len(scene.asked) <= 2
    assert not scene.parts()


def test_a_leader_that_fails_is_asked_again_later(scene: Scene) -> None:
    known, raw = made(1)
    scene.has[known] = raw

    def fail() -> None:
        if len(scene.asked) == 2:
            raise errors.InternalError("its bug, not ours")

    scene.before = fail
    assert scene.visit(known) is None
    assert len(scene.asked) == 2
    assert scene.visit(known) == (known, raw)
    assert scene.asked[2] == (known, 100), "nothing is fetched twice"


def test_a_full_disk_is_said_and_nothing_is_left(scene: Scene) -> None:
    known, raw = made(1)
    scene.has[known] = raw
    scene.storage.capacity = len(raw) // 2
    with pytest.raises(errors.StorageFull):
        scene.visit(known)
    assert not scene.parts()
    scene.storage.capacity = None
    assert scene.visit(known) == (known, raw)
