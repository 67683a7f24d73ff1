"""Rule L17: the budget of inbound frames with any peers, driven by models of their sockets."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from pk.wire.inbound import (
    CONNECTION_BYTES,
    FLOOR_BYTES,
    STALL_MS,
    UNTAKEN_MS,
    Account,
    MemoryPool,
)

KIB = 1024
FRAME_MAX = 1024 * KIB
STREAMS = 12


class Peer:
    """One stream, which uses the budget as pk.wire.socket_stream does."""

    def __init__(self, budget: MemoryPool, rng: random.Random, kind: str) -> None:
        self.budget = budget
        self.rng = rng
        self.kind = kind  #: honest, announces, drips, floods, deaf (its handler takes nothing)
        self.account = Account(0)
        if kind == "known":
            budget.reserve(self.account)
        self.size = 0  #: of the frame that is being received; 0 = none
        self.whole: list[int] = []  #: frames that the handler has not freed
        self.sent = 0  #: bytes of it that the peer has sent
        self.closed = False
        self.done = 0

    def read(self, now_ms: int) -> None:
        budget, account = self.budget, self.account
        if self.closed or account.waiting:
            return
        if len(self.whole) >= 4:
            if not account.behind:
                budget.behind(account, True, now_ms)
            return
        if account.behind:
            budget.behind(account, False, now_ms)
        if not self.size:
            self.begin(now_ms)
            return
        wanted = min(self.size - account.assembled, self.speed())
        if not wanted:
            return
        room = budget.room(account, wanted)
        assert room <= wanted
        if not room:
            assert not account.reserved  # wire/inbound M3
            budget.wait(account)
            return
        if budget.grew(account, room):
            budget.mark(account, now_ms)
        if account.assembled == self.size:
            budget.finished(account, now_ms)
            self.whole.append(self.size)
            self.size = 0

    def begin(self, now_ms: int) -> None:
        size = self.rng.choice([100, 5 * KIB, 40 * KIB, 300 * KIB, FRAME_MAX])
        if self.kind in ("announces", "drips", "floods"):
            size = FRAME_MAX
        first = self.budget.room(self.account, min(size, 64 * KIB))
        if not first:
            assert not self.account.reserved  # wire/inbound M3
            self.budget.wait(self.account)
            return
        if size <= first:
            self.budget.arrived(self.account, size, now_ms)
            self.whole.append(size)
            return
        self.budget.begin(self.account, size, now_ms)
        self.budget.grew(self.account, first)
        self.size = size

    def speed(self) -> int:
        if self.kind == "announces":
            return 0 if self.account.assembled > FRAME_MAX // 2 else 100 * KIB
        return {"drips": 10}.get(self.kind, self.rng.choice([1_000, 64 * KIB, 400 * KIB]))

    def take(self, now_ms: int) -> None:
        """Take frames as the handler does."""
        if self.whole and self.kind != "deaf":
            size = self.whole.pop(0)
            if size > 64 * KIB or not self.budget.ebbed(self.account, size):
                self.budget.freed(self.account, size, now_ms)
            self.done += 1

    def close(self, now_ms: int) -> None:
        self.closed = True
        self.size = 0
        self.budget.close(self.account)
        while self.whole:
            self.budget.freed(self.account, self.whole.pop(), now_ms)


class World:
    def __init__(self, seed: int, kinds: list[str], pool: int) -> None:
        self.rng = random.Random(seed)
        self.budget = MemoryPool(STREAMS * CONNECTION_BYTES + pool, STREAMS, FRAME_MAX)
        self.peers = [Peer(self.budget, self.rng, kind) for kind in kinds]
        self.closed: list[Peer] = []
        self.now_ms = 0

    def check(self) -> None:
        """wire/inbound M1, with the bytes counted independently."""
        budget = self.budget
        mine = [each for each in self.peers + self.closed if not each.account.reserved]
        for each in mine:
            assert each.account.held == each.account.assembled + sum(each.whole)
        pooled = sum(max(0, each.account.held - FLOOR_BYTES) for each in mine)
        assert pooled == budget.pooled <= budget.pool_bytes
        known = [each.account.held for each in self.peers if each.account.reserved]
        assert budget.reserved == sum(known)

    def turn(self) -> None:
        self.now_ms += 50
        for peer in self.rng.sample(self.peers, len(self.peers)):
            peer.read(self.now_ms)
            self.check()
            if self.rng.random() < 0.5:
                peer.take(self.now_ms)
            self.ready()
        while (account := self.budget.victim(self.now_ms)) is not None:
            (victim,) = [each for each in self.peers if each.account is account]
            victim.close(self.now_ms)
            self.peers.remove(victim)
            self.closed.append(victim)
            self.peers.append(Peer(self.budget, self.rng, victim.kind))  # it comes again
            self.ready()
        self.check()

    def done(self, kind: str) -> int:
        """Return the finished frames of all peers of a kind, including closed ones."""
        return sum(each.done for each in self.peers + self.closed if each.kind == kind)

    def ready(self) -> None:
        for account in self.budget.ready(self.now_ms):
            assert not account.waiting


KINDS = st.lists(
    st.sampled_from(["honest", "announces", "drips", "floods", "deaf", "known"]),
    min_size=2,
    max_size=STREAMS - 1,
)
POOLS = st.sampled_from([0, FRAME_MAX, 2 * FRAME_MAX, 5 * FRAME_MAX])


@given(st.integers(0, 2**32), KINDS, POOLS)
def test_the_budget_is_kept_and_an_honest_peer_is_served(
    seed: int, kinds: list[str], pool: int
) -> None:
    """wire/inbound M1 to M5: beside any other peers, an honest peer and a known one finish frame
    after frame.  The honest one may be refused, and connects again.
    """
    world = World(seed, ["honest", "known", *kinds][:STREAMS], pool)
    known = world.peers[1]
    enough_ms = (UNTAKEN_MS + STALL_MS) * 2 * STREAMS
    while min(world.done("honest"), known.done) < 3 and world.now_ms < enough_ms:
        world.turn()
    assert world.done("honest") >= 3
    assert known.done >= 3
    assert not known.closed


@given(st.integers(0, 2**32), POOLS)
def test_half_received_frames_fill_the_pool_and_finish_nonetheless(seed: int, pool: int) -> None:
    """wire/inbound M2: all peers send large frames at once and none stalls, so all finish and no
    stream is closed.
    """
    world = World(seed, ["floods"] * STREAMS, pool)
    peers = list(world.peers)
    for _ in range(2_000):
        world.turn()
        if min(each.done for each in peers) >= 2:
            break
    assert min(each.done for each in peers) >= 2
    assert not world.closed
