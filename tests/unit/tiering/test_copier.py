"""One partition's copier, step by step: which range is due when, and what may be dropped (rules
T1–T6).
"""

from __future__ import annotations

from typing import Any

from pk import errors
from pk.effects import Send, SetTimer
from pk.tiering import copier as copying
from pk.tiering import layout
from pk.tiering.copier import Copier, CopySettings, TableSeen, View, Viewed
from pk.tiering.damage import DamagedFile, damaged
from pk.tiering.data_files import DataFile
from pk.wire import pk_pb2 as wire


class Driver:
    def __init__(self, **chosen: int) -> None:
        settings: dict[str, int] = {"max_lag_ms": 100, "file_bytes": 1_000, "drop_delay_ms": 10**6}
        self.settings = CopySettings(**{**settings, **chosen})
        self.copier = Copier("t", "id", 0)
        self.now_ms = 0
        self.sent: list[Any] = []
        self.told: wire.TierProgress | None = None
        self.timer: int | None = None

    def step(self, event: Any) -> Driver:
        for effect in self.copier.step(event, self.now_ms):
            match effect:
                case Send(peer=copying.BROKER, message=message):
                    self.told = message
                case Send(message=message):
                    self.sent.append(message)
                case SetTimer(at_ms=at_ms):
                    self.timer = at_ms
        return self

    def view(self, stable: int, *, start: int = 0, epoch: int = 0, ready: bool = True) -> Driver:
        return self.step(Viewed(View(epoch, ready, start, start, stable, self.settings)))

    def table(self, end: int, *, start: int = 0) -> Driver:
        return self.step(TableSeen(start, end, 0, 1))

    def wake(self, at_ms: int | None = None) -> Driver:
        assert self.timer is not None
        self.now_ms = self.timer if at_ms is None else at_ms
        return self.step(copying.Wake())

    def take(self, kind: type) -> Any:
        found = [each for each in self.sent if isinstance(each, kind)]
        assert len(found) == 1, self.sent
        self.sent.remove(found[0])
        return found[0]

    def uploaded(self, asked: Any, end: int, row_sum: int = 7) -> Driver:
        name = layout.DataName(0, asked.start, end, 0, f"n{self.now_ms}", 0, row_sum)
        add = wire.AddFile(
            path=layout.data_path(name),
            start=asked.start,
            end=end,
            rows=end - asked.start,
            row_sum=row_sum,
        )
        return self.step(copying.Uploaded(asked, end, 0, add))


def damaged_file() -> DamagedFile:
    """Return the damaged file of [0, 100), with 100 rows whose sum is 7."""
    name = layout.data_path(layout.DataName(0, 0, 100, 0, "x", 0, 7))
    file = DataFile(name, 0, 0, 99, 0, 0, 100, 5)
    return DamagedFile(file, damaged("memory://t", file, 0, "it is not in the store"))


def test_the_next_file_is_built_while_one_is_on_its_way() -> None:
    """tiering/copier K3: files are handed over in order, once they and all before are stored."""
    it = Driver().table(0).view(5_000)
    it.step(copying.Measured(it.take(copying.Measure), 10_000))
    first = it.take(copying.Upload)
    assert it.sent == []
    it.step(copying.Built(first, 1_000, 0))
    it.step(copying.Measured(it.take(copying.Measure), 9_000))
    second = it.take(copying.Upload)
    assert (second.start, it.sent) == (1_000, [])
    it.step(copying.Built(second, 2_000, 0))
    it.step(copying.Measured(it.take(copying.Measure), 8_000))
    third = it.take(copying.Upload)
    it.uploaded(second, 2_000)
    assert it.sent == []  # the first one is not stored yet
    it.uploaded(first, 1_000)
    request = it.take(copying.CommitToTable).request
    assert [(add.start, add.end) for add in request.adds] == [(0, 1_000), (1_000, 2_000)]
    it.uploaded(third, 3_000)
    assert not [each for each in it.sent if isinstance(each, copying.CommitToTable)]


def test_a_file_that_fails_takes_those_after_it_along() -> None:
    it = Driver().table(0).view(5_000)
    asked = []
    for end in (1_000, 2_000, 3_000):
        it.step(copying.Measured(it.take(copying.Measure), 10_000))
        asked.append(it.take(copying.Upload))
        if end < 3_000:
            it.step(copying.Built(asked[-1], end, 0))
    it.uploaded(asked[0], 1_000)
    assert len(it.take(copying.CommitToTable).request.adds) == 1
    it.step(copying.OperationFailed(asked[1], errors.TierUnavailable("no")))
    it.uploaded(asked[2], 3_000)  # abandoned: it began after the lost file
    it.step(copying.OperationFailed(asked[1], errors.TierUnavailable("no")))
    it.wake()
    again = [each for each in it.sent if isinstance(each, copying.Measure | copying.Upload)]
    assert [each.start for each in again] == [1_000]
    assert not [each for each in it.sent if isinstance(each, copying.CommitToTable)]


def test_nothing_is_copied_before_the_watermark_has_caught_up() -> None:
    it = Driver().table(0).view(500, ready=False)
    assert it.sent == []
    it.view(500)
    assert it.take(copying.Measure).limit == 500


def test_age_makes_a_range_due() -> None:
    it = Driver().table(0).view(500)
    it.step(copying.Measured(it.take(copying.Measure), 10))
    assert it.sent == []
    assert it.timer == 100
    it.wake()
    upload = it.take(copying.Upload)
    assert (upload.start, upload.limit) == (0, 500)


def test_bytes_make_a_range_due() -> None:
    it = Driver().table(0).view(500)
    it.step(copying.Measured(it.take(copying.Measure), 1_000))
    assert it.take(copying.Upload).limit == 500


def test_age_counts_from_when_data_was_first_seen() -> None:
    """Each record is tiered at the latest max_lag after it became stable, not after the last record
    did.
    """
    it = Driver().table(0).view(10)
    for now_ms in range(5, 100, 5):
        it.now_ms = now_ms
        it.view(10 + now_ms)
    it.wake(100)
    upload = it.take(copying.Upload)
    assert upload.limit == 105
    it.uploaded(upload, upload.limit)


def test_uploads_run_ahead_of_the_commit_and_follow_each_other() -> None:
    it = Driver(max_lag_ms=0).table(0).view(10_000)
    at = 0
    for _ in range(copying.AHEAD_MAX):
        upload = it.take(copying.Upload)
        assert upload.start == at
        at += 100
        it.uploaded(upload, at)
    assert not [each for each in it.sent if isinstance(each, copying.Upload)]
    hand_over = it.take(copying.CommitToTable)
    assert (hand_over.request.counters[0].start, hand_over.request.counters[0].end) == (0, 100)
    it.table(100).step(copying.HandedOver(hand_over))
    rest = it.take(copying.CommitToTable).request
    assert (rest.counters[0].start, rest.counters[0].end, len(rest.adds)) == (100, 400, 3)
    assert it.take(copying.Upload).start == 400


def test_a_refused_hand_over_starts_again_from_the_table() -> None:
    it = Driver(max_lag_ms=0).table(0).view(200)
    it.uploaded(it.take(copying.Upload), 100)
    hand_over = it.take(copying.CommitToTable)
    late = it.take(copying.Upload)
    it.step(copying.OperationFailed(hand_over, errors.UnknownTierRange("ends at 150")))
    it.table(150)
    it.uploaded(late, 200)  # an answer to an abandoned request changes nothing (tiering/copier K3)
    assert it.sent == []
    it.wake()
    assert it.take(copying.Upload).start == 150


def test_failures_wait_longer_and_longer_and_are_reported() -> None:
    it = Driver(max_lag_ms=0, retry_backoff_ms=10).table(0).view(100)
    waits = []
    for _ in range(14):
        asked = it.take(copying.Upload)
        it.step(copying.OperationFailed(asked, errors.TierUnavailable("down")))
        assert it.timer is not None
        waits.append(it.timer - it.now_ms)
        it.wake()
    assert waits[:4] == [10, 20, 40, 80]
    assert waits[-1] == copying.BACKOFF_MAX_MS
    assert it.told is not None
    assert it.told.problem.code == errors.TierUnavailable.code
    it.uploaded(it.take(copying.Upload), 100)
    assert not it.told.HasField("problem")


def test_local_data_goes_after_the_delay_and_a_head() -> None:
    it = Driver(drop_delay_ms=50).view(100).table(100)
    assert it.told is not None
    assert (it.told.tiered_end, it.told.droppable_end) == (100, -1)
    it.wake()
    assert it.now_ms == 50
    confirm = it.take(copying.Confirm)
    assert (confirm.start, confirm.end) == (0, 100)
    it.step(copying.Confirmed(confirm, []))
    assert it.told.droppable_end == 100


def test_a_missing_file_stops_dropping_and_is_uploaded_again() -> None:
    it = Driver(drop_delay_ms=0, max_lag_ms=0).view(100).table(100)
    lost = damaged_file()
    it.step(copying.Confirmed(it.take(copying.Confirm), [lost]))
    assert it.told is not None
    assert (it.told.droppable_end, it.told.problem.code) == (-1, errors.DamagedTierFile.code)
    again = it.take(copying.Upload)
    assert (again.start, again.limit, again.replaces) == (0, 100, lost.file)
    it.uploaded(again, 100)
    swap = it.take(copying.CommitToTable)
    assert [each.path for each in swap.request.removes] == [lost.file.path]
    assert not swap.request.data_change
    it.step(copying.HandedOver(swap))
    it.step(copying.Confirmed(it.take(copying.Confirm), []))
    assert it.told.droppable_end == 100
    assert not it.told.HasField("problem")


def test_a_lost_file_is_replaced_by_all_of_its_range_or_not_at_all() -> None:
    """T6: the segments may be dropped, or the log started again, while they are read."""
    it = Driver(drop_delay_ms=0, max_lag_ms=0).view(100).table(100)
    lost = damaged_file()
    it.step(copying.Confirmed(it.take(copying.Confirm), [lost]))
    it.uploaded(it.take(copying.Upload), 60)
    assert it.sent == []
    it.wake()
    it.step(copying.Confirmed(it.take(copying.Confirm), [lost]))
    it.uploaded(it.take(copying.Upload), 100)
    assert [each.end for each in it.take(copying.CommitToTable).request.adds] == [100]


def test_rows_of_another_sum_replace_no_file() -> None:
    """T6: the local log has other records at these offsets; an operator must restore the file."""
    it = Driver(drop_delay_ms=0, max_lag_ms=0).view(100).table(100)
    it.step(copying.Checked([damaged_file()]))
    it.sent = [each for each in it.sent if not isinstance(each, copying.Confirm)]
    it.uploaded(it.take(copying.Upload), 100, row_sum=8)
    it.step(copying.Checked([damaged_file()]))
    assert not [
        each for each in it.sent if isinstance(each, copying.Upload | copying.CommitToTable)
    ]
    assert it.told is not None
    assert it.told.problem.code == errors.DamagedTierFile.code
    it.view(100, epoch=1)
    it.step(copying.Checked([damaged_file()]))
    it.uploaded(it.take(copying.Upload), 100)
    assert it.take(copying.CommitToTable).request.removes
    it.step(copying.Checked([]))
    assert not it.told.HasField("problem")


def test_a_changed_table_stops_copying_and_dropping() -> None:
    it = Driver(drop_delay_ms=0, max_lag_ms=0).view(100)
    it.step(copying.TableProblem(errors.TierTableChanged("gone"))).table(50)
    assert it.sent == []
    assert it.told is not None
    assert it.told.problem.message == "gone"
    it.step(copying.TableProblem(None))
    assert {type(each) for each in it.sent} == {copying.Upload, copying.Confirm}


def test_a_hand_over_that_lands_ends_the_trouble_with_the_table() -> None:
    """The owner refused one file, then the table was repaired; only the next commit shows it."""
    it = Driver(max_lag_ms=0).table(0).view(500)
    it.uploaded(it.take(copying.Upload), 500)
    error = errors.TierTableChanged("the table went back")
    it.step(copying.OperationFailed(it.take(copying.CommitToTable), error))
    assert it.told is not None
    assert it.told.problem.code == errors.TierTableChanged.code
    it.wake()
    it.uploaded(it.take(copying.Upload), 500)
    it.step(copying.HandedOver(it.take(copying.CommitToTable))).table(500)
    assert not it.told.HasField("problem")


def test_deleted_records_wait_for_the_owner() -> None:
    """T9, T1: no record below log_start is copied; the owner first moves the table's end."""
    it = Driver(max_lag_ms=0, drop_delay_ms=10**6).table(10).view(100, start=60)
    assert it.sent == []
    it.table(60, start=60)
    assert it.take(copying.Upload).start == 60


def test_a_leader_is_told_again_once_its_watermark_has_caught_up() -> None:
    """Before that, the leader may not have known that the table's records are stable, and refused
    the report.
    """
    it = Driver().table(100).view(80, ready=False)
    assert it.told is not None
    it.told = None
    it.view(90, ready=False)
    assert it.told is None
    it.view(100)
    assert it.told is not None
    assert it.told.tiered_end == 100


def test_a_new_leader_epoch_and_a_new_session_are_told_everything() -> None:
    it = Driver(drop_delay_ms=10**6).view(100).table(100)
    it.told = None
    it.step(copying.Wake())
    assert it.told is None
    it.step(copying.SessionLost())
    assert it.told is not None
    it.told = None
    it.view(100, epoch=1)
    assert it.told is not None
    assert it.told.leader_epoch == 1


def test_a_table_that_the_log_has_passed_by_is_left_alone() -> None:
    """T15: the table is neither continued nor reported until the log contains none of its records,
    whatever was known of it before.
    """
    it = Driver(max_lag_ms=0, drop_delay_ms=0).view(10).step(TableSeen(0, 10, 0, 1, epoch=0))
    it.step(copying.Confirmed(it.take(copying.Confirm), []))
    assert it.told is not None
    assert (it.told.tiered_end, it.told.droppable_end) == (10, 10)

    def log(end: int, epochs: tuple[tuple[int, int], ...], start: int = 0) -> Driver:
        view = View(2, True, start, start, end, it.settings, log_end=end, epochs=epochs)
        return it.step(Viewed(view))

    for end, epochs in ((9, ((0, 0),)), (12, ((0, 0), (2, 8)))):
        log(end, epochs)
        assert it.sent == []
        assert (it.told.tiered_end, it.told.droppable_end) == (-1, -1)
        assert it.told.problem.code == errors.TierTableChanged.code
    log(12, ((0, 0), (2, 10)))
    assert it.take(copying.Upload).start == 10
    assert (it.told.tiered_end, it.told.HasField("problem")) == (10, False)
    log(12, ((2, 10),), start=10)
    assert it.copier.status is None


def test_a_measurement_that_fails_is_not_asked_for_again_at_once() -> None:
    it = Driver(max_lag_ms=60_000).table(0).view(500)
    asked = it.take(copying.Measure)
    it.step(copying.OperationFailed(asked, errors.TierUnavailable("away")))
    assert it.sent == []
    it.view(600)
    assert it.sent == []
    it.wake()
    assert it.take(copying.Measure).limit == 600
    assert it.now_ms == copying.MEASURE_RETRY_MS
