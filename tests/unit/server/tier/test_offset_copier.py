"""The copies of committed offsets that a tier process makes (rule T13)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pk import errors
from pk.server.tier import offset_copier
from pk.server.tier.offset_copier import OffsetCopier
from pk.sim.world import SimWorld
from pk.tiering import offset_files, stored_offsets
from pk.tiering.objects import MemoryStore
from pk.types import PartitionKey
from pk.wire import pk_pb2 as wire

MINUTE_MS = 60_000
TOPIC_ID = "t1"
KEY = PartitionKey(TOPIC_ID, 0)


class Rig:
    """A broker that coordinates partition 3, with one offset a page, and a store."""

    def __init__(self) -> None:
        self.sim = SimWorld(1)
        self.world = self.sim.world_of("tier")
        self.store = MemoryStore()
        self.epoch, self.end = 1, 10
        self.genesis = "first"
        self.groups = {"g": 5, "h": 6}
        self.away: errors.PkError | None = None
        self.reads = 0
        self.meanwhile: Callable[[], None] = lambda: None  #: called at the next read
        self.lines: list[str] = []
        self.copier = self.made()

    def made(self) -> OffsetCopier:
        """A tier process that has just started."""
        log: Any = self
        return OffsetCopier(self.world, self.ask, self.store, "c", MINUTE_MS, log)

    def error(self, event: str, **facts: Any) -> None:
        self.lines.append(event)

    info = warning = error

    async def ask(self, request: Any) -> Any:
        if self.away is not None:
            raise self.away
        if isinstance(request, wire.ListCoordinatedRequest):
            here = wire.CoordinatedPartition(
                partition=3, leader_epoch=self.epoch, high_watermark=self.end
            )
            return wire.ListCoordinatedReply(partitions=[here], genesis=self.genesis)
        self.reads += 1
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        assert (request.partition, request.leader_epoch) == (3, self.epoch)
        after = request.after.group_id
        rest = [name for name in sorted(self.groups) if name > after]
        reply = wire.ReadOffsetsReply(done=len(rest) <= 1)
        for name in rest[:1]:
            topic = wire.StoredTopic(
                topic="t", topic_id=TOPIC_ID, partitions=[0], offsets=[self.groups[name]],
                leader_epochs=[0], metadata=[""], committed_ms=[1],
            )  # fmt: skip
            reply.groups.add(group_id=name, topics=[topic])
        return reply

    def after(self, ms: int = 0) -> bool:
        """One pass, `ms` later."""

        async def copy() -> bool:
            await self.world.clock.sleep_ms(ms)
            return await self.copier.copy()

        return self.sim.run(copy())

    def stored(self) -> dict[str, int]:
        found = self.sim.run(stored_offsets.read_offsets(self.store, "c"))
        groups = found[3].groups if found else {}
        return {name: group.offsets[KEY].offset for name, group in groups.items()}

    def copies(self) -> list[str]:
        return [path for path in self.store.objects if path.endswith(".offsets")]

    def commit(self, offset: int) -> None:
        self.groups["g"] = offset
        self.end += 1


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.sim.close()


def test_offsets_are_copied_page_by_page_and_again_once_they_have_changed(rig: Rig) -> None:
    assert rig.after()
    assert rig.stored() == {"g": 5, "h": 6}
    rig.commit(7)
    assert rig.after(1_000)
    assert rig.stored() == {"g": 5, "h": 6}, "at most once a minute"
    assert rig.after(MINUTE_MS)
    assert rig.stored() == {"g": 7, "h": 6}
    before = rig.reads
    rig.after(MINUTE_MS)
    assert rig.reads == before, "nothing has changed"


def test_old_copies_are_removed(rig: Rig) -> None:
    for offset in range(5):
        rig.commit(offset)
        rig.after(MINUTE_MS)
    assert len(rig.copies()) == 2
    assert rig.stored()["g"] == 4


def test_another_coordinator_goes_on_and_a_deposed_one_changes_nothing(rig: Rig) -> None:
    """A broker that was cut off believes that it coordinates the partition."""
    rig.after()
    deposed, rig.copier = rig.copier, rig.made()
    rig.epoch, rig.end = 2, 12
    rig.groups["g"] = 9
    rig.after()
    rig.copier, rig.epoch, rig.end, rig.groups["g"] = deposed, 1, 99, 1
    rig.after(MINUTE_MS)
    assert rig.stored()["g"] == 9, "its leader epoch orders below that of its successor"
    rig.commit(2)
    before = dict(rig.store.objects)
    rig.after(MINUTE_MS)
    assert rig.store.objects == before, "it has seen the copy of its successor"


def test_metadata_that_are_older_than_the_tier_are_reported(rig: Rig) -> None:
    """server/tier/offset_copier K4: once, although nothing is copied at each interval."""
    rig.epoch = 9
    rig.after()
    rig.copier, rig.epoch, rig.end = rig.made(), 4, 99
    assert rig.after(MINUTE_MS)
    rig.end += 1
    assert rig.after(MINUTE_MS)
    assert rig.lines == ["offset_copy_superseded"]
    assert len(rig.copies()) == 1


def test_another_cluster_of_the_same_id_replaces_no_copy(rig: Rig) -> None:
    """server/tier/offset_copier K5: a restore needs the copies of the cluster that was lost."""
    rig.after()
    before = dict(rig.store.objects)
    rig.copier, rig.genesis, rig.groups = rig.made(), "second", {"new": 1}
    rig.epoch = 9
    for _ in range(3):
        rig.end += 1
        assert not rig.after(MINUTE_MS)
    assert rig.store.objects == before
    assert rig.lines == ["offset_copies_failing"], "once"


def test_a_broker_without_metadata_copies_nothing(rig: Rig) -> None:
    rig.genesis = ""
    assert not rig.after()
    assert (rig.store.objects, rig.lines) == ({}, [])


def test_a_failing_store_is_logged_once_and_asked_again(rig: Rig) -> None:
    """server/tier/offset_copier K1."""

    def fails(operation: str, path: str) -> None:
        raise errors.TierUnavailable("no answer")

    works, rig.store.fault = rig.store.fault, fails
    assert [rig.after(), rig.after(1_000), rig.after(1_000)] == [False] * 3
    assert rig.lines == ["offset_copies_failing"]
    rig.store.fault = works
    assert rig.after(1_000)
    assert rig.lines == ["offset_copies_failing", "offset_copies_recovered"]
    assert rig.stored() == {"g": 5, "h": 6}


def test_the_loop_asks_a_failing_store_with_back_off(rig: Rig) -> None:
    asked: list[int] = []

    def fails(operation: str, path: str) -> None:
        asked.append(rig.world.clock.monotonic_ms())
        raise errors.TierUnavailable("no answer")

    rig.store.fault = fails
    rig.sim.spawn("tier", rig.copier.run())
    rig.sim.run(rig.world.clock.sleep_ms(600_000))
    assert max(b - a for a, b in itertools.pairwise(asked)) <= offset_copier.BACKOFF_MS[1]
    assert 5 < len(asked) < 15


def test_a_copy_whose_reply_was_lost_is_not_written_twice(rig: Rig) -> None:
    whole = rig.store.put_if_absent

    async def lost(path: str, data: Any) -> Any:
        info = await whole(path, data)
        if not path.endswith(".offsets"):
            return info
        rig.store.put_if_absent = whole  # type: ignore[method-assign]
        raise errors.TierUnavailable("no reply")

    rig.store.put_if_absent = lost  # type: ignore[method-assign]
    assert not rig.after()
    rig.meanwhile = lambda: rig.commit(8)  # it is read, and the stored copy does not have it
    assert rig.after()
    assert rig.stored()["g"] == 5
    assert rig.after(MINUTE_MS)
    assert rig.stored()["g"] == 8


def test_a_broker_that_is_away_is_no_failure_of_the_store(rig: Rig) -> None:
    """server/tier/offset_copier K2."""
    rig.away = errors.NotCoordinator("moved")
    assert not rig.after()
    assert rig.lines == []


def test_offsets_beyond_the_bound_are_not_copied(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """server/tier/offset_copier K3."""
    monkeypatch.setattr(offset_files, "COPY_BYTES_MAX", 50)
    assert rig.after()
    rig.commit(7)
    rig.after(MINUTE_MS)
    assert rig.lines == ["offset_copy_too_large"]
    assert rig.stored() == {}
