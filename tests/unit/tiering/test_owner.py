"""The table's owner, step by step: what it plans, when it commits, and what it answers (rules
T3–T9).
"""

from __future__ import annotations

from typing import Any

import pytest

from pk import errors
from pk.effects import Effect, Publish, Respond, Send, SetTimer
from pk.tiering import accounting, layout
from pk.tiering import owner as owning
from pk.tiering.data_files import DataFile
from pk.tiering.layout import PartitionCounters
from pk.tiering.owner import ClaimPartition, Owner, OwnerSettings, PartitionsSeen, Submit
from pk.tiering.plan import LogStart, Submission, plan, start_is_due
from pk.tiering.table import (
    Commit,
    CommitConflict,
    Snapshot,
    TableProtocol,
)
from pk.types import NONE
from pk.wire import pk_pb2 as wire

ID = "0d1c2b3a-0000-4000-8000-000000000000"


def data(partition: int, start: int, end: int, attempt: str = "a") -> DataFile:
    path = layout.data_path(layout.DataName(partition, start, end, 0, attempt, 0, 0))
    return DataFile(path, partition, start, end - 1, 0, 0, end - start, 5)


def snapshot(version: int, files: list[DataFile], **counters: int) -> Snapshot:
    named = {file.path: file for file in files}
    return Snapshot(version, "id", named, {0: PartitionCounters(**counters)})


def append(
    start: int, end: int, *, epoch: int = 0, attempt: str = "a", rows: int | None = None
) -> Any:
    file = data(0, start, end, attempt)
    add = wire.AddFile(
        path=file.path,
        start=start,
        end=end,
        rows=file.rows,
        row_sum=3,
        min_offset=start,
        max_offset=end - 1,
        size=5,
    )
    counter = wire.TierCounter(
        start=start,
        end=end,
        claim=epoch,
        rows_added=file.rows if rows is None else rows,
        sum_added=3,
    )
    return wire.CommitToTableRequest(
        topic_id=ID, topic="t", adds=[add], counters=[counter], data_change=True
    )


def planned(on: Snapshot, *changes: Any, starts: dict[int, LogStart] | None = None) -> Any:
    return plan(
        on, [Submission(i, change, 10**9) for i, change in enumerate(changes)], starts or {}
    )


def refusals(result: Any) -> list[type[BaseException]]:
    return [type(error) for _, error in result.refused]


def test_contiguous_appends_share_a_commit() -> None:
    result = planned(snapshot(3, [], end=10, rows=10), append(10, 20), append(20, 30))
    assert len(result.taken) == 2
    assert result.commit.counters[0] == PartitionCounters(end=30, epoch=0, rows=30, sum=6)
    assert result.commit.blind


def test_what_the_table_has_already_is_done() -> None:
    """T5: a commit of unknown outcome that landed is found by the path of its file."""
    on = snapshot(4, [data(0, 10, 20)], end=20)
    result = planned(on, append(10, 20))
    assert (result.commit, len(result.done)) == (None, 1)


@pytest.mark.parametrize(
    ("on", "change", "why"),
    [
        (snapshot(3, [], end=10), append(12, 20), errors.UnknownTierRange),
        (snapshot(3, [], end=10), append(5, 20), errors.UnknownTierRange),
        (snapshot(3, [], end=10, claim=4), append(10, 20, epoch=3), errors.FencedLeaderEpoch),
        (snapshot(3, [], end=10), append(10, 20, rows=11), errors.InvalidRequest),
        (
            snapshot(3, [], end=10),
            wire.CommitToTableRequest(
                removes=[wire.RemoveFile(path="gone")], counters=[wire.TierCounter()]
            ),
            errors.UnknownTierRange,
        ),
    ],
)
def test_what_does_not_fit_is_refused(on: Snapshot, change: Any, why: type[errors.PkError]) -> None:
    result = planned(on, change)
    assert refusals(result) == [why]
    assert result.commit is None


def test_an_equal_hand_over_waits_for_the_first_one() -> None:
    result = planned(snapshot(3, [], end=10), append(10, 20), append(10, 20))
    assert (len(result.taken), len(result.waiting)) == (1, 1)


def test_a_claim_keeps_its_own_epoch_and_newer_ones() -> None:
    result = planned(snapshot(3, [], end=10, claim=4), append(10, 20, epoch=4))
    assert result.commit.counters[0].claim == 4


def test_log_start_removes_whole_files_only() -> None:
    on = snapshot(5, [data(0, 0, 10), data(0, 10, 20), data(0, 20, 30)], end=30, rows=30)
    result = planned(on, starts={0: LogStart(25)})
    assert result.commit.removes == (data(0, 0, 10).path, data(0, 10, 20).path)
    assert result.commit.counters[0] == PartitionCounters(start=25, end=30, rows=30, removed=20)
    assert not result.commit.blind


def test_a_log_start_past_the_end_is_txn_only_first() -> None:
    """T9: one version sets `:start` = `:end` = log_start; the next one removes the files."""
    on = snapshot(5, [data(0, 0, 30)], end=30, rows=30)
    result = planned(on, append(30, 60), starts={0: LogStart(50, epoch=2)})
    assert (result.commit.adds, result.commit.removes) == ((), ())
    assert result.commit.counters[0] == PartitionCounters(
        start=50, end=50, epoch=2, rows=30, removed=30
    )
    assert len(result.waiting) == 1
    later = planned(on.after(result.commit, 6), append(30, 60), starts={0: LogStart(50, 2)})
    assert later.commit.removes == (data(0, 0, 30).path,)
    assert len(later.waiting) == 1  # T16
    last = planned(later.commit.read.after(later.commit, 7), append(30, 60))
    assert refusals(last) == [errors.UnknownTierRange]


def test_a_version_that_takes_rows_away_holds_no_appends() -> None:
    """T16: a reader of the table's stream skips such a version whole.  The appends that waited for
    it go first in the next one, also under a constant retention.
    """
    on = snapshot(5, [data(0, 0, 10), data(0, 10, 20)], end=20, rows=20)
    first = planned(on, append(20, 30), starts={0: LogStart(10)})
    assert (first.commit.adds, len(first.commit.removes), len(first.waiting)) == ((), 1, 1)
    starts = {0: LogStart(20)}
    later = on.after(first.commit, 6)
    second = plan(later, first.waiting, starts, hand_overs_first=True)
    assert (len(second.commit.adds), second.commit.removes) == (1, ())
    third = planned(later.after(second.commit, 7), starts=starts)
    assert (third.commit.adds, len(third.commit.removes)) == ((), 1)


def named(start: int, end: int, row_sum: int) -> DataFile:
    path = layout.data_path(layout.DataName(0, start, end, 0, "a", 0, row_sum))
    return DataFile(path, 0, start, end - 1, 0, 0, end - start, 5)


def test_what_retention_removes_is_summed() -> None:
    """T2: the row sums of the live files are sum - removed_sum (tiering/accounting N6)."""
    on = snapshot(5, [named(0, 10, 7), named(10, 20, 5)], end=20, rows=20, sum=12)
    result = planned(on, starts={0: LogStart(10)})
    assert result.commit.counters[0].removed_sum == 7


def test_rows_that_an_earlier_build_removed_are_summed_with_the_next_ones() -> None:
    on = snapshot(
        5, [named(10, 20, 5), named(20, 30, 4)], start=10, end=30, rows=30, sum=16, removed=10
    )
    result = planned(on, starts={0: LogStart(20)})
    assert result.commit.counters[0].removed_sum == 12


def test_a_file_whose_name_states_no_sum_is_read_before_it_is_removed() -> None:
    """T2: another engine wrote it."""
    outside = DataFile("partition=0/part-1.parquet", 0, 0, 9, 0, 0, 10, 5)
    on = snapshot(5, [outside, named(10, 20, 5)], end=20, rows=20, sum=12)
    it = Driver()
    it.step(PartitionsSeen({0: LogStart(10)})).loaded(on)
    asked = it.asked.pop()
    assert isinstance(asked, owning.SumRows)
    assert asked.files == [outside]
    it.step(owning.RowsSummed({outside.path: 7})).loaded(on)
    commit = it.asked.pop()
    assert commit.removes == (outside.path,)
    assert commit.counters[0] == PartitionCounters(
        10, 20, rows=20, sum=12, removed=10, removed_sum=7
    )


def test_a_damaged_file_of_another_engine_holds_no_retention_up() -> None:
    """T2: its sum cannot be known; the sums of the files that are left are."""
    outside = DataFile("partition=0/part-1.parquet", 0, 0, 9, 0, 0, 10, 5)
    on = snapshot(5, [outside, named(10, 20, 5)], end=20, rows=20, sum=12)
    sums = {outside.path: accounting.UNREADABLE}
    result = plan(on, [], {0: LogStart(10)}, sums)
    assert result.unsummed == []
    assert result.commit is not None
    assert result.commit.removes == (outside.path,)
    assert result.commit.counters[0].removed_sum == 12 - 5


def test_a_deposed_leaders_log_start_moves_nothing() -> None:
    """T3, T4: the claim also fences the deletions of the deposed leader.  Otherwise the table's end
    would pass the end of the new leader's log, and the records that the new leader appends up to
    there would be in no file.
    """
    on = snapshot(5, [data(0, 0, 30)], end=30, rows=30, claim=4)
    for log_start in (10, 30, 50):
        late, now = LogStart(log_start, leader_epoch=3), LogStart(log_start, leader_epoch=4)
        assert planned(on, starts={0: late}).commit is None
        assert not start_is_due(on, 0, late)
        assert planned(on, starts={0: now}).commit is not None
        assert start_is_due(on, 0, now)


class Driver:
    """Steps an owner and keeps its effects."""

    def __init__(self, **more: int) -> None:
        self.owner = Owner("t", ID, "mem://t", OwnerSettings(**more))
        self.now_ms = 0
        self.asked: list[Any] = []
        self.answers: dict[Any, Any] = {}
        self.published: list[tuple[str, Any]] = []
        self.timer: int | None = None

    def step(self, event: Any) -> Driver:
        for effect in self.owner.step(event, self.now_ms):
            self._take(effect)
        return self

    def _take(self, effect: Effect) -> None:
        match effect:
            case Send(message=message):
                self.asked.append(message)
            case Respond(request=request, reply=reply):
                assert request not in self.answers, "answered twice"  # tiering/owner W3
                self.answers[request] = reply
            case Publish(name=name, value=value):
                self.published.append((name, value))
            case SetTimer(at_ms=at_ms):
                self.timer = at_ms

    def loaded(self, found: Snapshot | None) -> Driver:
        assert isinstance(self.asked.pop(), owning.Load)
        return self.step(owning.TableLoaded(found))

    def committed(self) -> Commit:
        commit = self.asked.pop()
        assert isinstance(commit, Commit)
        self.step(owning.Committed(commit.read.after(commit, commit.read.version + 1)))
        return commit


def test_one_commit_a_second_with_everything_that_waited() -> None:
    it = Driver(commit_interval_ms=1_000)
    it.step(Submit("a", append(0, 10))).loaded(snapshot(0, []))
    it.step(Submit("b", append(10, 20)))
    it.committed()
    assert isinstance(it.answers["a"], wire.CommitToTableReply)
    assert it.asked == []
    assert it.timer == 1_000
    it.step(Submit("c", append(20, 30)))
    assert it.asked == []
    it.now_ms = 1_000
    it.step(owning.Wake())
    assert len(it.committed().adds) == 2
    assert it.answers["c"].partitions[0].end == 30


def test_a_lost_reply_is_not_written_twice() -> None:
    """tiering/owner W2: after an unknown outcome the owner loads, finds its file and answers."""
    it = Driver(retry_backoff_ms=100)
    it.step(Submit("a", append(0, 10))).loaded(snapshot(0, []))
    it.asked.pop()
    it.step(owning.Failed(errors.TierUnavailable("lost")))
    assert it.answers == {}
    assert it.timer == 100
    it.now_ms = 100
    it.step(owning.Wake()).loaded(snapshot(1, [data(0, 0, 10)], end=10, rows=10))
    assert it.asked == []
    assert it.answers["a"].version == 1


def merged(files: list[DataFile]) -> Any:
    """Return the hand-over of a job that made one file of some."""
    start, end = files[0].min_offset, files[-1].max_offset + 1
    change = wire.CommitToTableRequest(counters=[wire.TierCounter()], lease_token=3)
    path = layout.job_path(layout.DataName(0, start, end, NONE, "j", 0, len(files)))
    change.adds.add(
        path=path, start=start, end=end, rows=end - start, min_offset=start, max_offset=end - 1,
        size=5, row_sum=len(files),
    )  # fmt: skip
    for file in files:
        change.removes.add(path=file.path, rows=file.rows, row_sum=1)
    return change


def test_a_job_waits_for_no_turn_behind_a_constant_retention() -> None:
    """T16: what it hands over waits for the version that takes rows away, which comes at once."""
    files = [named(10 * n, 10 * n + 10, 1) for n in range(8)]
    it = Driver(commit_interval_ms=1_000)
    busy = snapshot(5, files, end=80, rows=80, sum=8)
    busy.owners = {f"owner {n}": 5 for n in range(9)}
    it.step(PartitionsSeen({0: LogStart(10)}, lease_token=3)).loaded(busy)
    removed = [it.committed().removes]
    for job in (files[4:6], files[6:8]):
        it.step(Submit(job[0].path, merged(job)))
        it.step(PartitionsSeen({0: LogStart(10 * len(removed) + 10)}, lease_token=3))
        while job[0].path not in it.answers:
            it.now_ms += 1_000
            it.step(owning.Wake()).loaded(it.owner.snapshot)
            removed.append(it.committed().removes)
    names = [f.path for f in files]
    jobs = [tuple(names[4:6]), tuple(names[6:8])]
    assert removed == [(names[0],), jobs[0], (names[1], names[2]), jobs[1]]
    assert not [each for each in it.answers.values() if isinstance(each, errors.PkError)]


def test_the_owner_refuses_a_job_whose_lease_was_granted_again() -> None:
    """C5: it has seen the token of a newer lease, which has ended meanwhile."""
    on = snapshot(0, [data(0, 0, 10)], end=10, rows=10)
    name = layout.DataName(0, 0, 10, NONE, "j", 0, 0)
    change = wire.CommitToTableRequest(counters=[wire.TierCounter()], lease_token=3)
    change.adds.add(path=layout.job_path(name), end=10, rows=10, max_offset=9, size=5)
    change.removes.add(path=data(0, 0, 10).path, rows=10)
    for newest, refused in ((3, False), (4, True)):
        it = Driver()
        for token in (newest, 0):
            it.step(PartitionsSeen({0: LogStart(0)}, lease_token=token))
        it.loaded(on)
        it.step(Submit("a", change)).now_ms = 10_000
        it.step(owning.Wake()).loaded(on)
        assert isinstance(it.answers.get("a"), errors.LeaseHeld) == refused


def test_a_conflict_is_tried_again_at_once_then_with_back_off() -> None:
    it = Driver(retry_backoff_ms=100)
    it.step(Submit("a", append(0, 10)))
    for attempt in range(6):
        if not it.asked:
            assert attempt > owning.CONFLICTS_AT_ONCE
            assert it.timer is not None
            it.now_ms = it.timer
            it.step(owning.Wake())
        it.loaded(snapshot(attempt, []))
        it.asked.pop()
        it.step(owning.Failed(CommitConflict("x")))
    assert it.now_ms >= 100


def test_a_changed_table_refuses_everybody_until_it_is_itself_again() -> None:
    it = Driver(recheck_ms=500)
    it.step(PartitionsSeen({0: LogStart(0)})).loaded(snapshot(5, [], end=10))
    it.step(Submit("a", append(10, 20)))
    it.loaded(Snapshot(6, "id", {}, {}, TableProtocol(3, 7, ("deletionVectors",))))
    assert isinstance(it.answers["a"], errors.TierTableChanged)
    assert "protocol is now reader 3" in it.answers["a"].message
    it.step(Submit("b", append(10, 20)))
    assert isinstance(it.answers["b"], errors.TierTableChanged)
    assert it.asked == []
    assert it.timer == 500
    it.now_ms = 500
    it.step(owning.Wake()).loaded(snapshot(7, [], end=10))
    assert it.owner.problem is None
    assert it.published[-1][1] is None or it.published[-1][0] == owning.SNAPSHOT
    it.step(Submit("c", append(10, 20))).loaded(snapshot(7, [], end=10))
    it.committed()
    assert it.answers["c"].version == 8


def test_the_first_load_refuses_a_protocol_that_pk_does_not_accept() -> None:
    """Rule T8: such a snapshot names no files; taken as it is, the table would look empty."""
    it = Driver().step(PartitionsSeen({0: LogStart(0, tiered_end=0)}))
    it.loaded(Snapshot(6, "id", {}, {}, TableProtocol(4097, 2)))
    assert isinstance(it.owner.problem, errors.TierTableChanged)
    assert "protocol is now reader 4097" in it.owner.problem.message
    for advice in ("drop the feature", "earlier version", "remove a damaged checkpoint"):
        assert advice in it.owner.problem.message, "it may be a flipped bit as well"
    assert it.asked == []


def test_a_missing_table_is_made_only_before_anything_was_tiered() -> None:
    fresh = Driver().step(PartitionsSeen({0: LogStart(0, tiered_end=0)})).loaded(None)
    assert isinstance(fresh.asked.pop(), owning.Create)
    known = Driver().step(PartitionsSeen({0: LogStart(0, tiered_end=7)})).loaded(None)
    assert isinstance(known.owner.problem, errors.TierTableChanged)
    assert "ended at 7" in known.owner.problem.message
    deleted = Driver().step(PartitionsSeen({0: LogStart(7, tiered_end=7)})).loaded(None)
    assert deleted.owner.problem is None  # records deleted before anything was tiered (T9)
    assert isinstance(deleted.asked.pop(), owning.Create)
    asked = Driver().step(ClaimPartition("q", 0, -1, commit=False)).loaded(None)
    assert asked.answers["q"].exists is False
    assert asked.asked == []


def test_a_table_behind_what_the_broker_was_told_is_refused() -> None:
    it = Driver().step(PartitionsSeen({0: LogStart(0, tiered_end=50)}))
    it.loaded(snapshot(3, [], end=40))
    assert isinstance(it.owner.problem, errors.TierTableChanged)
    gone = Driver().step(PartitionsSeen({0: LogStart(50, tiered_end=50)}))
    gone.loaded(snapshot(3, [], end=40))  # deleted records: nothing is missing (T9)
    assert gone.owner.problem is None
    assert gone.asked[0].counters[0].end == 50


def test_a_load_that_was_slow_says_nothing_of_what_came_to_be_known_meanwhile() -> None:
    """Another node commits, the broker reports it, and only then the store answers (tiering/owner
    W7).
    """
    old = snapshot(3, [], end=40)
    it = Driver().step(PartitionsSeen({0: LogStart(0, tiered_end=40)}))
    it.step(PartitionsSeen({0: LogStart(0, tiered_end=50)})).loaded(old)
    assert it.owner.problem is None
    none = Driver().step(PartitionsSeen({0: LogStart(0, tiered_end=0)}))
    none.step(PartitionsSeen({0: LogStart(0, tiered_end=50)})).loaded(None)
    assert none.owner.problem is None
    it.now_ms = 10_000
    it.step(owning.Wake()).loaded(old)  # asked for after the report
    assert isinstance(it.owner.problem, errors.TierTableChanged)


@pytest.mark.parametrize("old", [None, snapshot(3, [], end=40)], ids=["none", "old"])
def test_a_question_is_answered_by_a_load_that_began_after_it(old: Snapshot | None) -> None:
    """tiering/owner W7: an old load does not say where the table ends."""
    it = Driver().step(ClaimPartition("early", 0, NONE, commit=False))
    it.step(ClaimPartition("late", 0, NONE, commit=False)).loaded(old)
    assert it.answers["early"].exists is (old is not None)
    assert "late" not in it.answers
    it.loaded(snapshot(4, [], end=50))
    assert it.answers["late"].end == 50
    assert it.asked == []


def test_claims_do_not_wait_for_the_next_second() -> None:
    it = Driver(commit_interval_ms=1_000)
    it.step(Submit("a", append(0, 10))).loaded(snapshot(0, []))
    it.committed()
    it.now_ms = 10
    it.step(ClaimPartition("q", 0, 3, commit=True)).loaded(snapshot(1, [data(0, 0, 10)], end=10))
    it.committed()
    assert (it.answers["q"].end, it.answers["q"].claim) == (10, 3)
    it.step(ClaimPartition("r", 0, 2, commit=True))
    it.loaded(snapshot(2, [data(0, 0, 10)], end=10, claim=3))
    assert isinstance(it.answers["r"], errors.FencedLeaderEpoch)


def counted(version: int, **ends: int) -> Snapshot:
    """Return partitions that were asked for (p0, p1 …) with their ends, claimed by epoch 7."""
    counters = {int(name[1:]): PartitionCounters(end=end, claim=7) for name, end in ends.items()}
    return Snapshot(version, "id", {}, counters)


def test_a_claim_that_comes_while_the_table_is_loaded_is_not_answered_from_that() -> None:
    """tiering/owner W6: the load did not ask for the counters of its partition, so they are unknown
    and not zero.
    """
    it = Driver()
    it.step(ClaimPartition("p", 0, NONE, commit=False))
    assert it.asked == [owning.Load([0])]
    it.step(ClaimPartition("q", 1, NONE, commit=False))
    it.step(ClaimPartition("r", 1, 6, commit=True))
    it.loaded(counted(3, p0=10))
    assert it.answers == {}
    assert it.asked == [owning.Load([0, 1])]
    it.loaded(counted(3, p0=10, p1=50))
    assert [it.answers[each].end for each in "pq"] == [10, 50]
    assert isinstance(it.answers["r"], errors.FencedLeaderEpoch)
    assert it.asked == []


@pytest.mark.parametrize("tiered_end", [NONE, 50])
def test_a_log_start_that_comes_while_the_table_is_loaded_waits_for_its_counters(
    tiered_end: int,
) -> None:
    """tiering/owner W6: otherwise the table's end would move back to it, or the table be taken for
    an old copy.
    """
    it = Driver()
    it.step(PartitionsSeen({0: LogStart(0)}))
    it.step(PartitionsSeen({1: LogStart(20, tiered_end=tiered_end, leader_epoch=7)}))
    it.loaded(counted(3, p0=10))
    assert it.asked == [owning.Load([0, 1])]
    it.loaded(counted(3, p0=10, p1=50))
    assert it.committed().counters == {1: PartitionCounters(start=20, end=50, claim=7)}
    assert all(value is None for name, value in it.published if name == owning.PROBLEM)


def test_a_request_does_not_wait_for_ever() -> None:
    it = Driver(request_timeout_ms=1_000, retry_backoff_ms=400)
    it.step(Submit("a", append(0, 10)))
    for _ in range(10):
        if "a" in it.answers:
            break
        if it.asked:
            it.asked.pop()
            it.step(owning.Failed(errors.TierUnavailable("down")))
            continue
        assert it.timer is not None
        it.now_ms = it.timer
        it.step(owning.Wake())
    assert isinstance(it.answers["a"], errors.TierUnavailable)
    assert "down" in it.answers["a"].message
    assert it.now_ms <= 1_000


def test_vacuum_follows_removals_at_its_interval() -> None:
    it = Driver(vacuum_interval_ms=5_000, vacuum_retention_ms=0, commit_interval_ms=0)
    it.step(PartitionsSeen({0: LogStart(0)})).loaded(snapshot(1, [data(0, 0, 10)], end=10, rows=10))
    it.step(PartitionsSeen({0: LogStart(10)})).loaded(
        snapshot(1, [data(0, 0, 10)], end=10, rows=10)
    )
    assert it.committed().removes
    seen = []
    while it.now_ms < 20_000:
        assert it.timer is not None
        it.now_ms = max(it.now_ms + 1, it.timer)
        it.step(owning.Wake())
        if isinstance(it.asked[-1], owning.Vacuum):
            seen.append(it.now_ms)
            it.asked.pop()
            it.step(owning.Vacuumed(1))
        else:
            it.loaded(snapshot(2, [], start=10, end=10))
    assert seen == [5_000]


def test_a_vacuum_that_was_put_off_comes_again() -> None:
    """Rule L10: the wall clock was not trusted; the next vacuum needs no new removal."""
    it = Driver(vacuum_interval_ms=5_000, vacuum_retention_ms=0, commit_interval_ms=0)
    it.step(PartitionsSeen({0: LogStart(0)})).loaded(snapshot(1, [data(0, 0, 10)], end=10, rows=10))
    it.step(PartitionsSeen({0: LogStart(10)})).loaded(
        snapshot(1, [data(0, 0, 10)], end=10, rows=10)
    )
    assert it.committed().removes
    seen = []
    while it.now_ms < 22_000:
        assert it.timer is not None
        it.now_ms = max(it.now_ms + 1, it.timer)
        it.step(owning.Wake())
        if isinstance(it.asked[-1], owning.Vacuum):
            seen.append(it.now_ms)
            it.asked.pop()
            it.step(owning.Vacuumed(0, put_off=len(seen) < 3))
        else:
            it.loaded(snapshot(2, [], start=10, end=10))
    assert [at // 5_000 for at in seen] == [1, 2, 3]


def test_vacuum_comes_in_the_pause_between_commits_that_never_end() -> None:
    it = Driver(vacuum_interval_ms=500, vacuum_retention_ms=0, commit_interval_ms=1_000)
    files = [data(0, 0, 10)]
    it.step(PartitionsSeen({0: LogStart(0)})).loaded(snapshot(1, files, end=10, rows=10))
    it.step(PartitionsSeen({0: LogStart(10)})).loaded(snapshot(1, files, end=10, rows=10))
    assert it.committed().removes
    paused_ms = it.now_ms
    it.step(Submit("a", append(10, 20)))  # work waits at any time
    assert it.timer is not None
    it.now_ms = it.timer
    it.step(owning.Wake())
    assert isinstance(it.asked[-1], owning.Vacuum)
    assert it.now_ms < paused_ms + 1_000
    it.asked.pop()
    it.step(owning.Vacuumed(1))
    assert it.timer == paused_ms + 1_000  # then the work


def test_who_waits_on_a_topic_that_goes_is_told() -> None:
    it = Driver().step(Submit("a", append(0, 10))).step(owning.Close())
    assert isinstance(it.answers["a"], errors.UnknownTopicId)
