"""Ten owners of one table in virtual time: one version a second, short lags, jobs land (T3)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from pk import errors
from pk.effects import Respond, Send, SetTimer
from pk.tiering import commit_pacing, layout
from pk.tiering import owner as owning
from pk.tiering.commit_pacing import OWNERS_MAX, OwnCommit
from pk.tiering.layout import DataName
from pk.tiering.owner import Owner, OwnerSettings, PartitionsSeen, Submit
from pk.tiering.plan import LogStart
from pk.tiering.table import Commit, CommitConflict, Snapshot
from pk.types import NONE
from pk.wire import pk_pb2 as wire

ID = "0d1c2b3a-0000-4000-8000-000000000000"
OWNERS = 10
PARTITIONS = 5  #: of each owner; the first one gets files
STORE_MS, THINKS_MS = 60, 300
RUN_MS = 120_000
SUM = 3


class World:
    """One table, its owners, and the events to come, by time."""

    def __init__(self, owners: int) -> None:
        self.now_ms = 0
        self.table = Snapshot(0, "id", {}, {})
        self.commits: list[int] = []  #: times
        self.lags: list[int] = []
        self.lags_of: list[tuple[int, int]] = []  #: owner, lag
        self.quiet: set[int] = set()  #: owners whose copiers hand nothing over
        self.thinks_ms: dict[int, int] = {}
        self.refused: list[errors.PkError] = []
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._number = 0
        self.owners = [
            Owner("t", ID, "memory://t", OwnerSettings(name=str(number)))
            for number in range(owners)
        ]

    def later(self, ms: int, work: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (self.now_ms + ms, self._number, work))

    def run(self, until_ms: int) -> None:
        while self._events and self._events[0][0] <= until_ms:
            self.now_ms, _, work = heapq.heappop(self._events)
            work()

    def step(self, number: int, event: Any) -> None:
        for effect in self.owners[number].step(event, self.now_ms):
            match effect:
                case Send(message=operation):
                    self.later(STORE_MS, lambda asked=operation: self._on_table(number, asked))
                case SetTimer(at_ms=at_ms) if at_ms is not None:
                    wait_ms = max(0, at_ms - self.now_ms)
                    self.later(wait_ms, lambda: self.step(number, owning.Wake()))
                case Respond(request=answered, reply=reply):
                    answered(reply)
                case _:
                    pass

    def _on_table(self, number: int, asked: Any) -> None:
        event: Any = None
        if isinstance(asked, owning.Load):
            counters = {each: self.table.partition(each) for each in asked.partitions}
            found = Snapshot(self.table.version, "id", self.table.files, counters)
            found.owners = self.table.owners
            event = owning.TableLoaded(found)
        elif isinstance(asked, owning.Create):
            event = owning.TableLoaded(self.table)
        elif asked.read.version != self.table.version:
            event = owning.Failed(CommitConflict("another owner was faster"))
        else:
            assert isinstance(asked, Commit)
            self.table = self.table.after(asked, self.table.version + 1)
            self.commits.append(self.now_ms)
            event = owning.Committed(asked.read.after(asked, self.table.version))
        self.step(number, event)

    def copier(self, number: int, at: int = 0) -> None:
        """Hand one file of the partition over, and the next one once it is committed."""
        asked_ms = self.now_ms

        def answered(reply: Any) -> None:
            if isinstance(reply, errors.PkError):
                self.refused.append(reply)
                return
            self.lags.append(self.now_ms - asked_ms)
            self.lags_of.append((number, self.now_ms - asked_ms))
            if number not in self.quiet:
                thinks_ms = self.thinks_ms.get(number, THINKS_MS)
                self.later(thinks_ms, lambda: self.copier(number, at + 10))

        self.step(number, Submit(answered, appended(number, at, at + 10)))


def appended(partition: int, start: int, end: int) -> wire.CommitToTableRequest:
    change = wire.CommitToTableRequest(topic_id=ID, topic="t", data_change=True)
    path = layout.data_path(DataName(partition, start, end, 0, "a", 0, SUM))
    change.adds.add(
        path=path, partition=partition, start=start, end=end, rows=10, row_sum=SUM,
        min_offset=start, max_offset=end - 1, size=5,
    )  # fmt: skip
    change.counters.add(
        partition=partition, start=start, end=end, rows_added=10, sum_added=SUM, claim=0
    )
    return change


def merged(table: Snapshot) -> wire.CommitToTableRequest:
    """Return the hand-over of a job that writes the first file of partition 0 again."""
    file = table.files_of(0)[0]
    change = wire.CommitToTableRequest(topic_id=ID, topic="t", lease_token=7)
    name = DataName(0, file.min_offset, file.max_offset + 1, NONE, "j", 0, SUM)
    change.adds.add(
        path=layout.job_path(name), partition=0, start=name.start, end=name.end, rows=10,
        row_sum=SUM, min_offset=name.start, max_offset=file.max_offset, size=5,
    )  # fmt: skip
    change.removes.add(path=file.path, partition=0, rows=10, row_sum=SUM)
    change.counters.add(partition=0, claim=0)
    return change


def running(owners: int, thinks_ms: dict[int, int] | None = None) -> World:
    world, start = World(owners), LogStart(0, 0, 0)
    world.thinks_ms = thinks_ms or {}
    for number in range(owners):
        led = dict.fromkeys(range(number, PARTITIONS * owners, owners), start)
        world.later(37 * number, lambda n=number, led=led: world.step(n, PartitionsSeen(led)))
        world.later(37 * number + 5, lambda n=number: world.copier(n))
    return world


def test_ten_owners_make_one_version_a_second() -> None:
    world = running(OWNERS)
    world.run(RUN_MS)
    assert not world.refused
    assert len(world.commits) <= RUN_MS // 1_000 + 3 * OWNERS  # at first they know of no others
    counts = [world.table.partition(number).end // 10 for number in range(OWNERS)]
    assert min(counts) >= RUN_MS // 1_000 // OWNERS // 2  # no owner starves
    assert max(world.lags) <= 3 * OWNERS * 1_000  # far below tier_max_lag_ms
    last = [each for each in world.commits if each > RUN_MS - 60_000]
    assert 40 <= len(last) <= 61  # the pace settles


def test_one_owner_does_not_wait_for_others() -> None:
    world = running(1)
    world.run(RUN_MS)
    assert len(world.commits) >= RUN_MS // 1_000 * 0.8
    assert max(world.lags) <= 1_200


def test_a_job_does_not_wait_for_the_turn_of_its_owner() -> None:
    world = running(OWNERS)
    world.run(60_000)
    landed: list[Any] = []
    world.step(0, Submit(landed.append, merged(world.table)))
    world.run(65_000)
    assert [type(each) for each in landed] == [wire.CommitToTableReply]


def test_an_owner_that_had_nothing_for_a_while_gets_its_turns_again() -> None:
    """It has missed many versions of the busy ones, which must not make it wait for as many."""
    world = running(3)
    world.quiet = {2}
    world.run(60_000)
    world.quiet = set()
    before = world.table.partition(2).end
    world.lags.clear()
    world.copier(2, before)
    world.run(RUN_MS)
    shares = [world.table.partition(number).end for number in range(3)]
    assert world.table.partition(2).end - before >= 10 * (RUN_MS - 60_000) // 1_000 // 3 - 30
    assert max(world.lags) <= 2 * 3 * 1_000
    assert max(shares[:2]) - min(shares[:2]) <= 50


def test_a_busy_owner_and_one_with_little_to_commit() -> None:
    world = running(2, thinks_ms={1: 7_000})
    world.run(RUN_MS)
    waited = [lag for number, lag in world.lags_of if number == 1]
    assert waited
    assert max(waited) <= 3_000


@pytest.mark.parametrize(
    ("own", "others", "next_ms"),
    [
        (OwnCommit(), 50, 0),  # it has never committed
        (OwnCommit(5, 1_000), 0, 2_000),
        (OwnCommit(5, 1_000), 2, 4_000),
        (OwnCommit(5, 1_000), 900, 1_000 + 1_000 * OWNERS_MAX),
    ],
)
def test_an_interval_for_each_owner(own: OwnCommit, others: int, next_ms: int) -> None:
    assert own.next_ms(1_000, others) == next_ms


def test_owners_that_commit_at_the_moment_are_counted() -> None:
    owners: Mapping[str, int] = {}
    for version in range(100):
        owners = commit_pacing.owners_after(owners, str(version % 10), version)
    assert commit_pacing.others(owners, 99, "3") == 9
    assert commit_pacing.others(owners, 99, "new") == 10
    for version in range(100, 103):
        owners = commit_pacing.owners_after(owners, "3", version)
    assert commit_pacing.others(owners, 102, "3") == 9
    for version in range(103, 160):
        owners = commit_pacing.owners_after(owners, "3", version)
    assert owners == {"3": 159}
    assert commit_pacing.owners_after(owners, "", 160) is owners


def test_an_owner_that_has_left_is_soon_not_counted() -> None:
    owners = commit_pacing.owners_after({}, "1", 10)
    for version in range(11, 15):
        assert commit_pacing.others(owners, version - 1, "2") == 1
        owners = commit_pacing.owners_after(owners, "2", version)
    assert commit_pacing.others(owners, 14, "2") == 0
