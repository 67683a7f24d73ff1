"""Copies one partition to the tier: decides which range is copied when, and which local data may be
dropped.

Sans-IO; one machine per partition.  The table is the source of truth: the copier starts at the
table's end, and returns to it after every refusal or unknown outcome (rule T5).

A range [start, end) is due (bytes or age) → building → built → uploaded → handed to the owner →
committed → droppable, after its delay and a HEAD of its files.  The next file is built while the
one before it is on its way, so a far store costs no time of building.  Files run ahead of the
commit by at most AHEAD_MAX, because the owner commits only once a second.

Invariants
  K1  Ranges are contiguous from the table's end: queue[0].start == table end, queue[i].end ==
      queue[i+1].start.
  K2  Copying waits until the watermark has caught up, and stays below the LSO (rule T1).
  K3  At most one file is being built and one hand-over is under way.  Only files that have reached
      the store, with all before them, are handed over.  After a failed file, all after it are built
      again, too.  A retry waits, the wait doubles up to 30 s.  An answer names its request; the
      answer to an abandoned request changes nothing.
  K4  `droppable_end` covers only ranges whose files answered a HEAD after `local_drop_delay_ms`
      (rule T6).
  K5  The copier deletes no object; VACUUM deletes uploads that were never committed (rule T5).
  K6  The copier reports a table's problem, and neither copies nor drops.  The broker continues.
  K7  If the table has diverged from the log (rule T15), the copier does not append to it and
      reports no coverage, because the table's newest records are not those of the log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from pk import errors
from pk.backoff import Backoff
from pk.effects import Effect, Send, SetTimer
from pk.tiering.copier_events import Built as Built
from pk.tiering.copier_events import Checked as Checked
from pk.tiering.copier_events import CommitToTable as CommitToTable
from pk.tiering.copier_events import Confirm as Confirm
from pk.tiering.copier_events import Confirmed as Confirmed
from pk.tiering.copier_events import CopierEvent as CopierEvent
from pk.tiering.copier_events import CopySettings as CopySettings
from pk.tiering.copier_events import HandedOver as HandedOver
from pk.tiering.copier_events import Measure as Measure
from pk.tiering.copier_events import Measured as Measured
from pk.tiering.copier_events import OperationFailed as OperationFailed
from pk.tiering.copier_events import SessionLost as SessionLost
from pk.tiering.copier_events import TableProblem as TableProblem
from pk.tiering.copier_events import TableSeen as TableSeen
from pk.tiering.copier_events import Upload as Upload
from pk.tiering.copier_events import Uploaded as Uploaded
from pk.tiering.copier_events import View as View
from pk.tiering.copier_events import Viewed as Viewed
from pk.tiering.copier_events import Wake as Wake
from pk.tiering.damage import DamagedFile, holds_the_same
from pk.tiering.divergence import find_divergence
from pk.tiering.layout import SUM_MODULUS, parse_data_path
from pk.types import NONE, Epoch, Offset
from pk.wire import pk_pb2 as wire

#: Names of the peers in `Send` effects.
STORE = "store"
OWNER = "owner"
BROKER = "broker"

#: Maximum number of files that are on their way to the store or wait for their commit.
AHEAD_MAX = 4
BACKOFF_MAX_MS = 30_000
#: Delay before a range with a missing file, or one that could not be measured, is tried again.
CONFIRM_RETRY_MS = MEASURE_RETRY_MS = 5_000
#: Resolution with which the age of stable data is remembered, as a share of tier_max_lag_ms.
MARKS = 8
#: Maximum number of committed ranges that wait for their delay; more are merged (later time).
COMMITTED_MAX = 128


@dataclass(slots=True)
class _Piece:
    """A range whose file is built; `add` is None if it holds no rows, or is not stored yet."""

    asked: Upload
    end: Offset
    epoch: Epoch
    stored: bool = False
    add: wire.AddFile | None = None

    @property
    def start(self) -> Offset:
        return self.asked.start


@dataclass(slots=True)
class _Repair:
    """A lost or damaged file that is being repaired (rule T6)."""

    upload: Upload
    sent: bool = False
    add: wire.AddFile | None = None
    hand_over: CommitToTable | None = None


class Copier:
    """The state machine that copies one partition; the module states its invariants."""

    def __init__(self, topic: str, topic_id: str, partition: int) -> None:
        self.topic = topic
        self.topic_id = topic_id
        self.partition = partition
        self.view: View | None = None
        self.table: TableSeen | None = None
        self.problem: errors.PkError | None = None
        self.droppable_end: Offset = NONE
        self._queue: deque[_Piece] = deque()
        self._upload: Upload | None = None
        self._hand_over: CommitToTable | None = None
        self._repair: _Repair | None = None
        self._hopeless: dict[str, None] = {}  #: damaged files whose rows the local log lacks
        self._marks: deque[tuple[int, Offset]] = deque()  #: (time, the LSO first seen at that time)
        self._measuring: Measure | None = None
        self._measure_not_before_ms = 0
        self._backlog_bytes: int | None = None
        self._backoff = Backoff((CopySettings().retry_backoff_ms, BACKOFF_MAX_MS))
        self._not_before_ms = 0
        self._committed: deque[tuple[int, Offset]] = deque()  #: (time, end), not yet droppable
        self._confirming: Confirm | None = None
        self._confirm_not_before_ms = 0
        self._owner_problem: errors.PkError | None = None
        self._diverged: errors.TierTableChanged | None = None  #: the divergence (K7)
        self._told: tuple[object, ...] | None = None

    @property
    def next_start(self) -> Offset:
        """Returns the offset where the next upload begins (K1)."""
        if self._queue:
            return self._queue[-1].end
        return self.table.end if self.table is not None else 0

    @property
    def status(self) -> errors.PkError | None:
        """Returns the problem that keeps this partition from being tiered."""
        return self._owner_problem or self._diverged or self.problem

    def step(self, event: CopierEvent, now_ms: int) -> Sequence[Effect]:
        """Applies one event and returns its effects; nothing else changes the state."""
        match event:
            case Viewed():
                self._viewed(event.view, now_ms)
            case TableSeen():
                self._table_seen(event, now_ms)
            case Measured():
                if event.asked is self._measuring:
                    self._measuring, self._backlog_bytes = None, event.bytes
            case Built():
                self._built(event)
            case Uploaded():
                self._uploaded(event)
            case HandedOver():
                self._handed_over(event)
            case Confirmed():
                self._confirmed(event, now_ms)
            case Checked():
                self._checked(event.missing, now_ms)
            case OperationFailed():
                self._operation_failed(event, now_ms)
            case TableProblem():
                self._owner_problem = event.error
            case SessionLost():
                self._told = None
            case Wake():
                pass
        effects: list[Effect] = []
        self._go_on(now_ms, effects)
        return effects

    # -- what is known -----------------------------------------------------------------------------

    def _viewed(self, view: View, now_ms: int) -> None:
        old, self.view = self.view, view
        self._backoff.bounds_ms = (view.settings.retry_backoff_ms, BACKOFF_MAX_MS)
        if old is not None and old.leader_epoch != view.leader_epoch:
            self._restart()  # the owner may refuse files of an older epoch (rule T4)
            self._told = None
            self._hopeless.clear()
        if not self._marks or view.last_stable_offset > self._marks[-1][1]:
            fine = max(1, view.settings.max_lag_ms // MARKS)
            young = bool(self._marks) and now_ms - self._marks[-1][0] < fine
            if young or len(self._marks) > 2 * MARKS:
                self._marks[-1] = (self._marks[-1][0], view.last_stable_offset)
            else:
                self._marks.append((now_ms, view.last_stable_offset))
            self._backlog_bytes = None
        self._forget_marks()

    def _forget_marks(self) -> None:
        while len(self._marks) > 1 and self._marks[0][1] <= self.next_start:
            self._marks.popleft()

    def _table_seen(self, seen: TableSeen, now_ms: int) -> None:
        before, self.table = self.table, seen
        if before is None or seen.end > before.end:
            if len(self._committed) >= COMMITTED_MAX:
                self._committed.pop()
            self._committed.append((now_ms, seen.end))
        if before is not None and seen.end == before.end:
            return
        while self._queue and self._queue[0].end <= seen.end:
            self._queue.popleft()
        if not self._queue or self._queue[0].start != seen.end:
            self._queue.clear()  # K1: the end moved otherwise (T9, another committer)
        if self._upload is not None and self._upload.start != self.next_start:
            self._upload = None
        self._backlog_bytes = None
        self._forget_marks()

    def _restart(self) -> None:
        """Starts again at the table's end (T5); answers that are still to come are ignored (K3)."""
        self._queue.clear()
        self._upload = self._hand_over = self._measuring = None
        self._backlog_bytes = None

    # -- answers -----------------------------------------------------------------------------------

    def _uploaded(self, event: Uploaded) -> None:
        if self._repair is not None and event.asked is self._repair.upload:
            lost = event.asked.replaces
            assert lost is not None
            if event.add is None or event.end < event.asked.limit:
                # The local log lacks all or some of these rows, and no other file has them.  The
                # table must not seem whole.  The next check tries again.
                self._repair = None
            elif not holds_the_same(lost, event.add):
                self._repair, self._hopeless[lost.path] = None, None  # rows differ from the table's
            else:
                self._repair.add = event.add
            return
        self._built(Built(event.asked, event.end, event.epoch))  # a range without rows is no file
        for piece in self._queue:
            if piece.asked is event.asked:
                piece.stored, piece.add = True, event.add
                self._solved(errors.TierUnavailable, errors.StoreRefused)

    def _built(self, event: Built) -> None:
        if event.asked is self._upload:
            self._upload = None
            self._queue.append(_Piece(event.asked, event.end, event.epoch))
            self._backlog_bytes = None
            self._forget_marks()

    def _handed_over(self, event: HandedOver) -> None:
        if self._repair is not None and event.asked is self._repair.hand_over:
            self._repair = None
            self._confirm_not_before_ms = 0
            self._solved(errors.DamagedTierFile)  # the next check names other missing files
        elif event.asked is self._hand_over:
            self._hand_over = None
            refused = errors.FencedLeaderEpoch, errors.TierTableChanged  # solved by a commit
            self._solved(errors.TierUnavailable, errors.StoreRefused, *refused)

    def _operation_failed(self, event: OperationFailed, now_ms: int) -> None:
        asked, repair = event.asked, self._repair
        if repair is not None and (asked is repair.upload or asked is repair.hand_over):
            self._repair = None
        elif asked is self._upload:
            self._upload = None
        elif any(piece.asked is asked for piece in self._queue):
            while self._queue.pop().asked is not asked:  # K3
                pass
            self._upload = self._backlog_bytes = None
        elif asked is self._hand_over:
            self._restart()  # refused, failed or unknown: continue from the table's end (T5)
        elif asked is self._confirming:
            self._confirming = None
            self._confirm_not_before_ms = now_ms + CONFIRM_RETRY_MS
            return
        else:
            if asked is self._measuring:
                self._measuring = None
                self._measure_not_before_ms = now_ms + MEASURE_RETRY_MS
            return
        self._not_before_ms = now_ms + int(self._backoff.next_ms())  # K3
        if not isinstance(event.error, errors.UnknownTierRange):
            self.problem = event.error

    def _solved(self, *kinds: type[errors.PkError]) -> None:
        self._backoff.reset()
        if isinstance(self.problem, kinds):
            self.problem = None

    def _confirmed(self, event: Confirmed, now_ms: int) -> None:
        if event.asked is not self._confirming:
            return
        self._confirming = None
        if not event.missing:
            self.droppable_end = max(self.droppable_end, event.asked.end)  # K4
            while self._committed and self._committed[0][1] <= event.asked.end:
                self._committed.popleft()
        self._checked(event.missing, now_ms)

    def _checked(self, missing: Sequence[DamagedFile], now_ms: int) -> None:
        """Copies again the first damaged file whose rows the local log still has (T6)."""
        if not missing:
            self._solved(errors.DamagedTierFile)
            return
        self._confirm_not_before_ms = now_ms + CONFIRM_RETRY_MS
        self.problem = missing[0].error
        view = self.view
        if view is None or self._repair is not None:
            return
        for each in missing:
            name = parse_data_path(each.file.path)
            if name is None or each.file.path in self._hopeless:
                continue
            if name.start >= view.local_log_start:
                upload = Upload(name.start, name.end, 2**62, view.leader_epoch, each.file)
                self._repair = _Repair(upload)
                return

    # -- what is due -------------------------------------------------------------------------------

    def _go_on(self, now_ms: int, effects: list[Effect]) -> None:
        due: list[int] = []
        view, table = self.view, self.table
        self._diverged = self._divergence(view, table)
        in_trouble = isinstance(self._owner_problem or self._diverged, errors.OperatorError)  # K6
        if view is not None and table is not None and view.ready and not in_trouble:  # K2
            if view.settings.enabled and table.end >= view.log_start:  # T1, after T9
                due += self._repair_file(view, table, now_ms, effects)
                due += self._hand(view, table, now_ms, effects)
                due += self._copy(view, now_ms, effects)
            due += self._drop(view, table, now_ms, effects)
        self._report(effects)
        effects.append(SetTimer(self.partition, min(due) if due else None))

    def _divergence(
        self, view: View | None, table: TableSeen | None
    ) -> errors.TierTableChanged | None:
        if view is None or table is None or table.end <= max(table.start, view.log_start):
            return None  # no row of the table is left (T9)
        if table.epoch > view.leader_epoch:
            return None  # a newer leader's records are in the table: that leader decides
        return find_divergence(self.partition, table.end, table.epoch, view.log_end, view.epochs)

    def _copy(self, view: View, now_ms: int, effects: list[Effect]) -> list[int]:
        """Starts an upload if one is due; otherwise sets the time to check again."""
        start, limit = self.next_start, view.last_stable_offset
        if self._upload is not None or start >= limit or len(self._queue) >= AHEAD_MAX:
            return []
        if now_ms < self._not_before_ms:
            return [self._not_before_ms]
        age_due = self._age_due_ms(start, view.settings.max_lag_ms)
        backlog = self._backlog_bytes
        if now_ms >= age_due or (backlog is not None and backlog >= view.settings.file_bytes):
            self._upload = Upload(start, limit, view.settings.file_bytes, view.leader_epoch)
            effects.append(Send(STORE, self._upload))
            return []
        if backlog is None and self._measuring is None:
            if now_ms < self._measure_not_before_ms:
                return [min(age_due, self._measure_not_before_ms)]
            self._measuring = Measure(start, limit)
            effects.append(Send(STORE, self._measuring))
        return [age_due]

    def _age_due_ms(self, start: Offset, max_lag_ms: int) -> int:
        for seen_ms, end in self._marks:
            if end > start:
                return seen_ms + max_lag_ms
        return 0

    def _hand(self, view: View, table: TableSeen, now_ms: int, effects: list[Effect]) -> list[int]:
        """Hands all uploaded pieces to the owner, one hand-over at a time."""
        pieces = list(takewhile(lambda piece: piece.stored, self._queue))
        if self._hand_over is not None or not pieces:
            return []
        if now_ms < self._not_before_ms:
            return [self._not_before_ms]
        assert pieces[0].start == table.end, (pieces[0].start, table.end)  # K1
        adds = [piece.add for piece in pieces if piece.add is not None]
        counter = wire.TierCounter(
            partition=self.partition,
            start=pieces[0].start,
            end=pieces[-1].end,
            epoch=pieces[-1].epoch,
            claim=view.leader_epoch,
            rows_added=sum(add.rows for add in adds),
            sum_added=sum(add.row_sum for add in adds) % SUM_MODULUS,
        )
        self._hand_over = CommitToTable(self._request(table, adds, [], counter, data_change=True))
        effects.append(Send(OWNER, self._hand_over))
        return []

    def _repair_file(
        self, view: View, table: TableSeen, now_ms: int, effects: list[Effect]
    ) -> list[int]:
        """Repairs a lost file: uploads its range, then replaces the file's name in the table."""
        repair = self._repair
        if repair is None or repair.hand_over is not None:
            return []
        if repair.add is None:
            if not repair.sent:
                repair.sent = True
                effects.append(Send(STORE, repair.upload))
            return []
        lost = repair.upload.replaces
        assert lost is not None
        counter = wire.TierCounter(partition=self.partition, claim=view.leader_epoch)
        removes = [wire.RemoveFile(path=lost.path, partition=self.partition, rows=lost.rows)]
        repair.hand_over = CommitToTable(
            self._request(table, [repair.add], removes, counter, data_change=False)
        )
        effects.append(Send(OWNER, repair.hand_over))
        return []

    def _request(
        self,
        table: TableSeen,
        adds: Sequence[wire.AddFile],
        removes: Sequence[wire.RemoveFile],
        counter: wire.TierCounter,
        *,
        data_change: bool,
    ) -> wire.CommitToTableRequest:
        return wire.CommitToTableRequest(
            topic_id=self.topic_id,
            topic=self.topic,
            adds=adds,
            removes=removes,
            counters=[counter],
            version_read=table.version,
            data_change=data_change,
        )

    def _drop(self, view: View, table: TableSeen, now_ms: int, effects: list[Effect]) -> list[int]:
        """Requests a HEAD of every file of the next droppable range after its delay (T6)."""
        if self._confirming is not None or self._repair is not None or not self._committed:
            return []
        delay = view.settings.drop_delay_ms
        due = max(self._committed[0][0] + delay, self._confirm_not_before_ms)
        if now_ms < due:
            return [due]
        end = max(end for when, end in self._committed if when + delay <= now_ms)
        start = max(self.droppable_end, table.start, view.local_log_start)
        if end <= start:
            self.droppable_end = max(self.droppable_end, end)
            while self._committed and self._committed[0][1] <= end:
                self._committed.popleft()
            return self._drop(view, table, now_ms, effects)
        self._confirming = Confirm(start, end)
        effects.append(Send(STORE, self._confirming))
        return []

    def _report(self, effects: list[Effect]) -> None:
        """Reports to the broker what has changed."""
        view, table = self.view, self.table
        if view is None:
            return
        status = self.status
        text = (type(status), status.message) if status is not None else None
        if self._diverged is not None:
            table = None  # K7
        droppable_end = NONE if table is None else self.droppable_end
        facts = table and (table.start, table.end, table.bytes, table.missing_from)
        # A leader that is not ready refuses a table above its old watermark: repeat then.
        news = (view.leader_epoch, view.ready, facts, droppable_end, text)
        if news == self._told or (table is None and status is None):
            return
        self._told = news
        progress = wire.TierProgress(
            topic_id=self.topic_id,
            partition=self.partition,
            leader_epoch=view.leader_epoch,
            tiered_end=NONE,
            droppable_end=droppable_end,
        )
        if table is not None:
            progress.start, progress.tiered_end = table.start, table.end
            progress.tier_bytes, progress.version = table.bytes, table.version
            if table.missing_from != NONE:
                progress.missing_from = table.missing_from
        if status is not None:
            progress.problem.code = status.code if status.code >= 0 else errors.TierUnavailable.code
            progress.problem.message = status.message
            progress.problem.details.update(status.details)
        effects.append(Send(BROKER, progress))
