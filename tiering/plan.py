"""Plans one commit of the table's owner: requests and a snapshot → a commit and answers.  Pure.

`owner.py` plans before every attempt.  The same request may be planned repeatedly on newer
snapshots, so this module keeps no state between attempts.

Decision table for a hand-over of partition p (rules T3–T5); the first row that applies decides:

    its files are in the snapshot                done  (a commit of unknown outcome had landed)
    table claim > the maker's leader epoch       refuse FencedLeaderEpoch
    a later restore claimed another partition    refuse FencedLeaderEpoch
    a file to be removed is not there any more   refuse UnknownTierRange  (plan again)
    table end != its start                       refuse UnknownTierRange  (go on from there)
    its numbers contradict each other            refuse InvalidRequest
    else                                         take it

A refusal names the table's end, so that the copier can continue from there.

A version that takes rows away (rule T9, and a job whose removes change the data) holds no appends,
so that a reader of the table's stream may skip it whole (rule T16).  The two take turns.
`hand_overs_first` is set after such a version: waiting hand-overs then come before retention, which
may be constant.  After any other version, jobs that take rows away come before appends.

A log start (rule T9) counts unless the table's claim is above the epoch of the leader that reported
it.

A restore claims every partition that it knows (rule T13).  Its generation is above all leader
epochs of earlier clusters, also in partitions that are younger than the restore.  The first claim
of such a partition in the restored cluster begins it at the first offset of the generation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pk import errors, generations
from pk.tiering import accounting, rewrites
from pk.tiering.accounting import suspects
from pk.tiering.data_files import DataFile, NewFile
from pk.tiering.layout import SUM_MODULUS, PartitionCounters
from pk.tiering.table import Commit, Snapshot
from pk.types import NONE, Epoch, Offset
from pk.wire import pk_pb2 as wire

#: Maximum number of files that a commit adds or removes; further ones wait for the next commit.
ACTIONS_PER_COMMIT_MAX = 1_000


@dataclass(slots=True)
class Submission:
    """A hand-over that waits for its commit."""

    request: Any
    change: wire.CommitToTableRequest
    deadline_ms: int


@dataclass(slots=True)
class Claim:
    """A leader that asks for the partition's state, and claims it if `commit` (rule T4)."""

    request: Any
    partition: int
    epoch: Epoch
    commit: bool
    deadline_ms: int


@dataclass(slots=True, frozen=True)
class LogStart:
    """The broker's durable facts about one partition (rule T9)."""

    log_start: Offset  #: of the leader's own log
    epoch: Epoch = NONE  #: leader epoch of `log_start - 1`, as far as the leader knows
    tiered_end: Offset = 0  #: the end of the table that was reported to the broker
    leader_epoch: Epoch = 0  #: of the leader that reported these facts
    #: the log start known to every replica that may lead next; None = log_start
    known: Offset | None = None

    @property
    def target(self) -> Offset:
        """Returns the offset up to which the table's start may move.

        The table does not follow a deletion that the next leader may not know.
        """
        return self.log_start if self.known is None else min(self.known, self.log_start)


@dataclass(slots=True)
class Plan:
    """One commit, and the requests that are answered without it or wait."""

    commit: Commit | None
    taken: list[Submission | Claim] = field(
        default_factory=list
    )  #: answered once the commit has landed
    done: list[Submission | Claim] = field(default_factory=list)  #: the table contains it already
    refused: list[tuple[Submission | Claim, errors.PkError]] = field(default_factory=list)
    waiting: list[Submission | Claim] = field(default_factory=list)  #: for a later commit
    #: files whose rows must be read and summed before rows can be counted as removed (rule T2)
    unsummed: list[DataFile] = field(default_factory=list)


class _Draft:
    """A commit that is being assembled on a snapshot."""

    def __init__(self, snapshot: Snapshot, sums: Mapping[str, int]) -> None:
        self.snapshot = snapshot
        self.sums = sums  #: row sums of files whose names do not state them
        self.unsummed: dict[str, DataFile] = {}
        self.adds: dict[str, NewFile] = {}
        self.removes: dict[str, bool] = {}  #: path -> data change
        self.counters: dict[int, PartitionCounters] = {}
        self.closed: set[int] = set()  #: partitions whose next change waits for the next commit
        self.appends = False
        self.takes_rows = False  #: the version takes rows away: no appends (rule T16)

    def partition(self, partition: int) -> PartitionCounters:
        return self.counters.get(partition) or self.snapshot.partition(partition)

    def claim(self, partition: int) -> Epoch:
        """Returns the lowest leader epoch that may append to the partition; NONE = any."""
        return max(self.partition(partition).claim, self.snapshot.restored)

    def has(self, path: str) -> bool:
        return path in self.snapshot.files and path not in self.removes

    def commit(self, data_change: bool) -> Commit | None:
        counters = {
            partition: value
            for partition, value in self.counters.items()
            if value != self.snapshot.partition(partition)
        }
        if not (self.adds or self.removes or counters):
            return None
        return Commit(
            self.snapshot,
            tuple(self.adds.values()),
            tuple(self.removes),
            counters,
            data_change,
        )


def plan(
    snapshot: Snapshot,
    waiting: Iterable[Submission | Claim],
    log_starts: Mapping[int, LogStart],
    sums: Mapping[str, int] | None = None,
    *,
    hand_overs_first: bool = False,
    lease_newest: int = 0,
) -> Plan:
    """Returns the next commit on `snapshot`: log starts first (T9), then claims and hand-overs in
    order.

    sums: row sums of files whose names do not state them
    hand_overs_first: the version before took rows away; retention waits for hand-overs (T16)
    lease_newest: hand-overs of jobs with an older lease are refused (C5)
    """
    waiting = list(waiting)
    draft = _Draft(snapshot, sums or {})
    result = Plan(None)
    removing = not (hand_overs_first and any(isinstance(i, Submission) for i in waiting))
    if not hand_overs_first:
        waiting.sort(key=lambda item: not (isinstance(item, Submission) and _takes_in(item)))
    for partition, start in log_starts.items():
        _move_start(draft, partition, start, removing)
    draft.takes_rows = bool(draft.removes)
    for item in waiting:
        if isinstance(item, Claim):
            _take_claim(draft, item, result)
        elif 0 < item.change.lease_token < lease_newest:
            result.refused.append((item, _old_lease(item.change.lease_token, lease_newest)))
        else:
            _take(draft, item, result)
    result.commit = draft.commit(any(draft.removes.values()))
    result.unsummed = list(draft.unsummed.values())
    if result.commit is None:
        result.done += result.taken
        result.taken = []
    return result


def takes_rows(change: wire.CommitToTableRequest) -> bool:
    """Returns whether the hand-over removes files and changes the data (rule T16)."""
    return bool(change.removes) and change.data_change


def _takes_in(item: Submission) -> bool:
    """Returns whether a job hands over that rows leave the table."""
    return item.change.lease_token > 0 and takes_rows(item.change)


def _appends(item: Submission | Claim) -> bool:
    """Returns whether the request adds rows that the table never had."""
    return isinstance(item, Submission) and bool(item.change.adds) and not item.change.removes


def start_is_due(snapshot: Snapshot, partition: int, start: LogStart) -> bool:
    """Returns whether `start` needs a commit: `:start` must move, or files lie wholly below it."""
    counters = snapshot.partition(partition)
    if max(counters.claim, snapshot.restored) > start.leader_epoch:
        return False  # rule T4: reported by a deposed leader
    if start.target > counters.start:
        return True
    files = snapshot.files_of(partition)
    for file in files:
        if file.min_offset >= counters.start:
            break
        if file.max_offset < counters.start:
            return True
    return accounting.is_due(files, counters)


def _move_start(draft: _Draft, partition: int, start: LogStart, removing: bool) -> None:
    """Moves `:start` to log_start and removes whole files below it from the table (rule T9).

    `:start` stays if the rows of a file that it would pass are not summed yet (rule T2).
    """
    counters = draft.partition(partition)
    if draft.claim(partition) > start.leader_epoch:
        return  # rule T4: the present leader's log may end below it
    files = draft.snapshot.files_of(partition)
    unsummed = accounting.unsummed(files, counters, max(start.target, counters.start), draft.sums)
    if unsummed:
        draft.unsummed.update((file.path, file) for file in unsummed)
        start = replace(start, log_start=counters.start, known=None)
    if start.target > counters.end:
        # This version changes nothing else of the partition; the next commit removes its files.
        moved = accounting.settled(files, counters, start.target, draft.sums)
        moved = moved._replace(end=start.target)
        if start.epoch != NONE:
            moved = moved._replace(epoch=start.epoch)
        draft.counters[partition] = moved
        draft.closed.add(partition)
        return
    low = max(start.target, counters.start)
    if removing:
        more = ACTIONS_PER_COMMIT_MAX - len(draft.removes)
        draft.removes.update((file.path, True) for file in itertools.islice(files.below(low), more))
    if unsummed:
        return
    moved = accounting.settled(files, counters, low, draft.sums)
    if moved != counters:
        draft.counters[partition] = moved


def _take_claim(draft: _Draft, claim: Claim, result: Plan) -> None:
    counters = draft.partition(claim.partition)
    if not claim.commit or counters.claim == claim.epoch:
        result.done.append(claim)
    elif (lowest := draft.claim(claim.partition)) > claim.epoch:
        result.refused.append((claim, _fenced(claim.partition, lowest, claim.epoch)))
    else:
        draft.counters[claim.partition] = begun(counters, claim.epoch)
        result.taken.append(claim)


def begun(before: PartitionCounters, claim: Epoch) -> PartitionCounters:
    """Returns the counters of a partition after a claim of its leader.

    A partition that the restored cluster created begins with the block of its generation: an
    earlier cluster that lives may have created the same partition, and given offsets from 0 on.
    """
    generation = generations.generation_of_epoch(claim)
    if generation > generations.generation_of_epoch(before.claim):
        first = generation * generations.OFFSETS
        before = before._replace(start=max(before.start, first), end=max(before.end, first))
    return before._replace(claim=claim)


def _take(draft: _Draft, item: Submission, result: Plan) -> None:
    change = item.change
    actions = len(change.adds) + len(change.removes)
    touched = {counter.partition for counter in change.counters}
    if touched & draft.closed or (
        (draft.adds or draft.removes)
        and len(draft.adds) + len(draft.removes) + actions > ACTIONS_PER_COMMIT_MAX
    ):
        result.waiting.append(item)
        return
    taking, appending = takes_rows(change), _appends(item)
    if (appending and draft.takes_rows) or (taking and draft.appends):
        result.waiting.append(item)  # T16
        return
    if change.removes and draft.removes and any(draft.removes.values()) != change.data_change:
        result.waiting.append(item)  # a version has either data changes or other changes
        return
    if change.accept:
        _settle(draft, item, result)
        return
    if change.adds and all(draft.has(add.path) for add in change.adds):
        result.done.append(item)
        return
    if any(add.path in draft.adds for add in change.adds):
        result.waiting.append(item)  # handed over twice: the next snapshot answers
        return
    try:
        counters = _checked(draft, change)
    except errors.PkError as error:
        result.refused.append((item, error))
        return
    draft.counters.update(counters)
    for remove in change.removes:
        draft.removes[remove.path] = change.data_change
    for add in change.adds:
        draft.adds[add.path] = new_file(add, change.data_change or not change.removes)
    draft.appends = draft.appends or appending
    draft.takes_rows = draft.takes_rows or taking
    result.taken.append(item)


def _settle(draft: _Draft, item: Submission, result: Plan) -> None:
    """Counts the missing rows of the partitions as removed (rule T17)."""
    counters: dict[int, PartitionCounters] = {}
    for counter in item.change.counters:
        before, claim = draft.partition(counter.partition), draft.claim(counter.partition)
        if claim > counter.claim:
            error = _fenced(counter.partition, claim, counter.claim)
            result.refused.append((item, error))
            return
        missing = draft.snapshot.rows_missing(counter.partition)
        if missing is None:
            continue
        files = draft.snapshot.files_of(counter.partition)
        live = files.live(before.start)
        unsummed = [file for file in live if accounting.row_sum_of(file, draft.sums) is None]
        if unsummed:
            draft.unsummed.update((file.path, file) for file in unsummed)
            result.waiting.append(item)
            return
        settled = before._replace(removed=before.removed + missing.rows)
        counters[counter.partition] = accounting.rebased(files, settled, draft.sums)
    draft.counters.update(counters)
    draft.closed.update(counters)
    (result.taken if counters else result.done).append(item)


def _check_refill(draft: _Draft, change: wire.CommitToTableRequest) -> None:
    """Raises unless the added rows fill missing ranges, and are no more than are missing (rule
    T17)."""
    for counter in change.counters:
        partition = counter.partition
        adds = [add for add in change.adds if add.partition == partition]
        spans = [(each.start, each.end) for each in suspects(draft.snapshot, partition)]
        for add in adds:
            if not any(start <= add.start and add.end <= end for start, end in spans):
                raise errors.UnknownTierRange(f"{add.path}: no row is missing there: plan again")
        removed = sum(draft.snapshot.files[each.path].rows for each in change.removes)
        missing = draft.snapshot.rows_missing(partition)
        if missing is None or sum(add.rows for add in adds) - removed > missing.rows:
            raise errors.UnknownTierRange(
                f"partition {partition}: more rows than are missing: the log has other records"
            )


def _checked(draft: _Draft, change: wire.CommitToTableRequest) -> dict[int, PartitionCounters]:
    """Returns the counters after `change`, or raises its refusal (see the module's table)."""
    for remove in change.removes:
        if not draft.has(remove.path):
            raise errors.UnknownTierRange(
                f"{remove.path} is not in version {draft.snapshot.version}: plan again"
            )
    after: dict[int, PartitionCounters] = {}
    for counter in change.counters:
        before, claim = draft.partition(counter.partition), draft.claim(counter.partition)
        if claim > counter.claim:
            raise _fenced(counter.partition, claim, counter.claim)
        if counter.end > counter.start and before.end != counter.start:
            raise errors.UnknownTierRange(
                f"partition {counter.partition} of the table ends at {before.end}, "
                f"not at {counter.start}",
                table_end=str(before.end),
            )
        adds = [add for add in change.adds if add.partition == counter.partition]
        if not change.removes and not change.refill:
            _check_numbers(counter, adds)
        after[counter.partition] = before._replace(
            end=max(before.end, counter.end),
            epoch=counter.epoch if counter.end > counter.start else before.epoch,
            rows=before.rows + counter.rows_added,
            sum=(before.sum + counter.sum_added) % SUM_MODULUS,
            removed=before.removed + counter.removed_added,
            removed_sum=(before.removed_sum + counter.removed_sum_added) % SUM_MODULUS,
            cleaned=max(before.cleaned, counter.cleaned),
            forgotten=max(before.forgotten, counter.forgotten),
        )
    if change.lease_token:
        rewrites.check(draft.snapshot, change)
        draft.closed.update(after)
    if change.lease_token or len(change.removes) > 1:
        rewrites.check_starts(draft.snapshot, change, lambda p: draft.partition(p).start)
    if change.refill:
        _check_refill(draft, change)
        draft.closed.update(after)
    unclaimed = {add.partition for add in change.adds} - after.keys()
    if unclaimed and not change.removes:
        raise errors.InvalidRequest(f"files of partitions {sorted(unclaimed)} without counters")
    return after


def _check_numbers(counter: wire.TierCounter, adds: Sequence[wire.AddFile]) -> None:
    """Raises unless the files of an append lie in order inside the range and their rows add up."""
    at = counter.start
    for add in adds:
        if not (at <= add.start < add.end <= counter.end):
            raise errors.InvalidRequest(f"{add.path} does not follow {at} within {counter.end}")
        if add.rows and not (add.start <= add.min_offset <= add.max_offset < add.end):
            raise errors.InvalidRequest(f"{add.path} holds offsets outside its range")
        at = add.end
    if counter.end < counter.start:
        raise errors.InvalidRequest(f"range [{counter.start}, {counter.end})")
    rows = sum(add.rows for add in adds)
    total = sum(add.row_sum for add in adds) % SUM_MODULUS
    if rows != counter.rows_added or total != counter.sum_added % SUM_MODULUS:
        raise errors.InvalidRequest(
            f"partition {counter.partition}: {rows} rows in the files, "
            f"{counter.rows_added} in the counters"
        )


def _old_lease(token: int, newest: int) -> errors.LeaseHeld:
    return errors.LeaseHeld(
        f"the lease with token {token} has ended, lease {newest} was granted since: nothing was "
        "committed for it. Run the job again",
        token=str(token),
    )


def _fenced(partition: int, claim: Epoch, epoch: Epoch) -> errors.FencedLeaderEpoch:
    generation = generations.generation_of_epoch(claim)
    if generation > generations.generation_of_epoch(epoch):
        return errors.FencedLeaderEpoch(
            f"partition {partition} of the table: this cluster was restored from its tier as "
            f"another one (generation {generation}): stop it, its records reach no table any more"
        )
    return errors.FencedLeaderEpoch(
        f"partition {partition} of the table is claimed by leader epoch {claim}; "
        f"epoch {epoch} may not append"
    )


def new_file(add: wire.AddFile, data_change: bool) -> NewFile:
    """Returns the wire's file as a file to be added to the table."""
    file = DataFile(
        add.path,
        add.partition,
        add.min_offset,
        add.max_offset,
        add.min_timestamp_ms,
        add.max_timestamp_ms,
        add.rows,
        add.size,
    )
    return NewFile(file, add.modified_ms, add.null_keys, add.null_values, data_change)


def partition_state(snapshot: Snapshot, partition: int) -> wire.TierPartitionState:
    """Returns the state of a partition as replies carry it."""
    counters = snapshot.partition(partition)
    files = snapshot.files_of(partition)
    return wire.TierPartitionState(
        partition=partition,
        start=counters.start,
        end=counters.end,
        epoch=counters.epoch,
        claim=counters.claim,
        rows=counters.rows,
        sum=counters.sum,
        removed=counters.removed,
        files=len(files),
        bytes=snapshot.bytes_of(partition),
        cleaned=counters.cleaned,
        removed_sum=counters.removed_sum,
        forgotten=counters.forgotten,
    )


def is_urgent(item: Submission | Claim) -> bool:
    """Returns whether the request does not wait for the turn of its owner (commit_pacing)."""
    return isinstance(item, Claim) or item.change.lease_token > 0


def reply_of(
    item: Submission | Claim, snapshot: Snapshot
) -> wire.TierClaimReply | wire.CommitToTableReply:
    """Returns the reply to a request that `snapshot` has."""
    if isinstance(item, Claim):
        counters = snapshot.partition(item.partition)
        return wire.TierClaimReply(
            exists=True,
            start=counters.start,
            end=counters.end,
            end_epoch=counters.epoch,
            claim=counters.claim,
        )
    touched = sorted(
        {c.partition for c in item.change.counters} | {a.partition for a in item.change.adds}
    )
    return wire.CommitToTableReply(
        version=snapshot.version,
        partitions=[partition_state(snapshot, partition) for partition in touched],
    )
