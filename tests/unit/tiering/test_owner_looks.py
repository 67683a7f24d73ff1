"""What an owner knows without a look at its table, and when it looks (T3, tiering/owner W8)."""

from __future__ import annotations

import itertools

import pytest

from pk import errors
from pk.tiering import layout
from pk.tiering import owner as owning
from pk.tiering.data_files import DataFile
from pk.tiering.owner import ClaimPartition, PartitionsSeen, Submit
from pk.tiering.plan import LogStart
from pk.tiering.table import Commit, CommitConflict, Snapshot
from pk.types import NONE
from pk.wire import pk_pb2 as wire
from tests.unit.tiering.test_owner import Driver, append, data, snapshot


def own(it: Driver, end: int = 10) -> Driver:
    """Let the owner make version 1, which ends at `end`."""
    it.step(PartitionsSeen({0: LogStart(0)})).loaded(snapshot(0, []))
    it.step(Submit("own", append(0, end))).loaded(snapshot(0, []))
    it.committed()
    return it


def test_an_owner_alone_at_its_table_commits_without_a_load() -> None:
    it = own(Driver(commit_interval_ms=0))
    for version, end in ((2, 20), (3, 30)):
        it.step(Submit(end, append(end - 10, end)))
        assert it.committed().read.version == version - 1
        assert it.answers[end].version == version


def test_beside_another_owner_each_commit_follows_a_load() -> None:
    """The other's next version most likely exists already.  Once it is not among the newest
    versions, it is not counted (tiering/commit_pacing N3).
    """
    it = own(Driver(commit_interval_ms=0))
    it.step(Submit("a", append(10, 20)))
    assert isinstance(it.asked.pop(), Commit)
    it.step(owning.Failed(CommitConflict("version 2 exists")))
    found = snapshot(2, [data(0, 0, 10)], end=10, rows=10)
    found.owners = {"another": 2}
    it.loaded(found)
    assert it.committed().read.version == 2
    for version in (3, 4, 5):
        it.now_ms += 10_000
        it.step(Submit(f"b{version}", append(10 * (version - 1), 10 * version)))
        it.loaded(it.owner.snapshot)
        assert it.committed().read.version == version
    it.now_ms += 10_000
    it.step(Submit("c", append(50, 60)))
    assert it.committed().read.version == 6


def test_nothing_is_refused_by_a_version_that_may_be_old() -> None:
    """tiering/owner W8: a job has read a version of another engine, which the owner does not
    know.
    """
    it = own(Driver(commit_interval_ms=0))
    moved = DataFile("partition=0/part-1.parquet", 0, 0, 9, 0, 0, 10, 5)
    change = wire.CommitToTableRequest(counters=[wire.TierCounter()])
    name = layout.DataName(0, 0, 10, NONE, "j", 0, 3)
    change.adds.add(path=layout.job_path(name), end=10, rows=10, max_offset=9, size=5, row_sum=3)
    change.removes.add(path=moved.path, rows=10, row_sum=3)
    it.step(Submit("a", change))
    assert "a" not in it.answers
    it.loaded(snapshot(2, [moved], end=10, rows=10, sum=3))
    assert not isinstance(it.answers.get("a"), errors.PkError)


def test_what_the_broker_knows_beyond_the_owner_is_loaded_first() -> None:
    """T8: another owner committed, or an older copy of the table was restored."""
    it = own(Driver(commit_interval_ms=0))
    it.step(PartitionsSeen({0: LogStart(0, tiered_end=50)}))
    it.step(Submit("a", append(10, 20)))
    it.loaded(snapshot(1, [data(0, 0, 10)], end=10, rows=10))
    assert isinstance(it.owner.problem, errors.TierTableChanged)


def looks(it: Driver, until_ms: int, on: Snapshot) -> list[int]:
    """Return the times of the looks at a table in which nothing happens."""
    found = []
    while it.timer is not None and it.timer <= until_ms:
        it.now_ms = it.timer
        it.step(owning.Wake())
        if it.asked:
            found.append(it.now_ms)
            it.loaded(on)
    return found


def test_an_idle_table_wakes_its_owner_for_looks_only() -> None:
    it = own(Driver(vacuum_interval_ms=86_400_000))
    on = it.owner.snapshot
    assert on is not None
    woken = 0
    while it.timer is not None and it.timer <= 7_200_000:
        it.now_ms, woken = it.timer, woken + 1
        it.step(owning.Wake())
        if it.asked:
            it.loaded(on)
    assert woken == len(looks(own(Driver()), 7_200_000, on)) <= 32


def test_looks_become_rare_while_nothing_happens() -> None:
    it = own(Driver())
    on = it.owner.snapshot
    assert on is not None
    found = looks(it, 3_600_000, on)
    assert found[:3] == [5_000, 15_000, 35_000]
    least, most = 270_000, 300_000
    rest = [later - sooner for sooner, later in itertools.pairwise(found[8:])]
    assert rest
    assert all(least <= each <= most for each in rest)


@pytest.mark.parametrize("what", ["reader", "claim", "lease", "found"])
def test_whoever_asks_brings_the_quick_pace_back(what: str) -> None:
    it = own(Driver())
    on = it.owner.snapshot
    assert on is not None
    looks(it, 1_200_000, on)
    asked_ms = it.now_ms = 1_200_001
    match what:
        case "reader":
            it.step(owning.Look("r")).loaded(on)
            assert it.answers["r"] is None
        case "claim":
            it.step(ClaimPartition("c", 0, NONE, commit=False)).loaded(on)
        case "lease":
            it.step(PartitionsSeen({0: LogStart(0)}, lease_token=1))
            it.step(owning.Look("r")).loaded(on)
        case _:
            it.now_ms = asked_ms = it.timer or 0
            on = snapshot(2, [data(0, 0, 10)], end=10, rows=10)
            it.step(owning.Wake()).loaded(on)
    assert it.timer == asked_ms + 5_000


def test_a_reader_is_answered_by_any_end_of_a_look() -> None:
    it = own(Driver())
    it.step(owning.Look("a"))
    it.step(owning.Look("b"))  # waits for the same look
    it.asked.pop()
    it.step(owning.Failed(errors.TierUnavailable("away")))
    assert (it.answers["a"], it.answers["b"]) == (None, None)
    it.step(owning.Look("c"))  # while the owner backs off, a reader does not wait
    assert it.answers["c"] is None
    assert it.asked == []


def test_a_reader_takes_no_part_in_a_look_that_began_long_before() -> None:
    it = own(Driver())
    it.step(owning.Look("a"))
    it.now_ms = 4_999
    it.step(owning.Look("b"))
    it.now_ms = 5_000
    it.step(owning.Look("c"))
    it.now_ms = 6_000  # the store is slow
    it.loaded(it.owner.snapshot)
    assert set(it.answers) >= {"a", "b"}
    assert "c" not in it.answers
    it.loaded(it.owner.snapshot)
    assert "c" in it.answers


def test_readers_that_wait_have_a_bound() -> None:
    it = own(Driver())
    for number in range(owning.WAITING_MAX):
        it.step(owning.Look(number))
    assert 0 not in it.answers
    it.step(owning.Look("more"))
    assert it.answers["more"] is None  # it reads what is known
    it.loaded(it.owner.snapshot)
    assert len(it.answers) > owning.WAITING_MAX


def test_a_version_is_fresh_for_as_long_as_readers_may_use_it() -> None:
    it = own(Driver(commit_interval_ms=0))
    assert it.owner.is_fresh(4_999)
    assert not it.owner.is_fresh(5_000)
    it.now_ms = 60_000
    it.step(Submit("b", append(10, 20)))  # an own commit proves that its version was the newest
    it.now_ms = 61_000
    it.committed()
    assert it.owner.is_fresh(64_999)
    assert not it.owner.is_fresh(65_000)
