"""Ten owners of one table in virtual time: one version a second, short lags, jobs land (T3)."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import pytest

from pk import errors
from pk.effects import Respond, Send, SetTimer
from pk.tiering import layout
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
        self.refused: list[errors.PkError] = []
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._number = 0
        self.owners = [Owner("t", ID, "memory://t", OwnerSettings()) for _ in range(owners)]

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
            found = self.table
            event = owning.TableLoaded(Snapshot(found.version, "id", found.files, counters))
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
            self.later(THINKS_MS, lambda: self.copier(number, at + 10))

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


def running(owners: int) -> World:
    world, start = World(owners), LogStart(0, 0, 0)
    for number in range(owners):
        world.later(37 * number, lambda n=number: world.step(n, PartitionsSeen({n: start})))
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


@pytest.mark.parametrize(
    ("own", "version", "partitions", "next_ms"),
    [
        (OwnCommit(), 90, 50, 0),  # it has never committed
        (OwnCommit(5, 1_000), 5, 50, 2_000),
        (OwnCommit(5, 1_000), 8, 50, 5_000),
        (OwnCommit(5, 1_000, 9), 8, 50, 11_000),
        (OwnCommit(5, 1_000, 9), 8, 2, 3_000),  # there are at most two owners
        (OwnCommit(5, 1_000), 900, 50, 1_000 + 1_000 * OWNERS_MAX),
        (OwnCommit(5, 1_000), 900, 0, 2_000),
        (OwnCommit(5, 1_000), 2, 50, 2_000),  # the table went back: this is refused elsewhere
    ],
)
def test_an_interval_for_each_version(
    own: OwnCommit, version: int, partitions: int, next_ms: int
) -> None:
    assert own.next_ms(version, 1_000, partitions) == next_ms


def test_an_owner_that_commits_rarely_does_not_wait_for_all_versions_of_a_busy_one() -> None:
    """It would count those that the busy one makes while it waits, and wait as long again."""
    world = running(2)
    world.run(60_000)
    quiet = OwnCommit(1, 0, 0).followed_by(world.table.version, 60_000)
    assert quiet.others > OWNERS_MAX
    assert quiet.next_ms(world.table.version, 1_000, 2) == 62_000
