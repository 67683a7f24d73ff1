"""Many small ranges with one request: sparkconnector/joint_scan J1–J5, against a broker that
breaks.
"""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("pyspark")

from pk import errors
from pk.log import columns
from pk.sparkconnector import connection, joint_scan, options, planner
from pk.sparkconnector.joint_scan import JointScan, Small, runs
from pk.sparkconnector.offsets import Range
from pk.sparkconnector.planner import Task
from pk.types import NONE
from tests.kit.fake_broker import FakeBroker, SocketBroker

FAST = {"pk.retry_backoff_ms": "1", "pk.retry_backoff_max_ms": "5"}
NAMES = ("topic", "partition", "offset", "value", "timestampType", "headers")
TRANSACTION = {"producer_id": 7, "producer_epoch": 0, "base_sequence": 0, "transactional": True}
Row = tuple[str, int, int, bytes]
#: A patience whose end a test never sees: if the reader waited for it, the test would not end.
FOREVER_S = 3_600.0


def value_of(partition: int, offset: int) -> bytes:
    return f"{partition}/{offset}".encode()


def fill(log, counts, **given) -> None:
    for count in counts:
        values = [value_of(log.key.partition, log.end + n) for n in range(count)]
        log.append(columns.encode_lists(values, default_timestamp=log.end, **given))


def source_of(broker, **given) -> options.Source:
    base = {"pk.bootstrap.servers": broker.address, "subscribe": "t", **FAST}
    return options.source({**base, **given}, streaming=False)


def a_task(partition: int, start: int, end: int, topic: str = "t", size: int = 100) -> Task:
    one = Range(topic, f"id-of-{topic}", partition, start, end)
    return Task(one, True, bytes=size)


def rows_of(tasks, source) -> list[Row]:
    found: list[Row] = []
    for batch in planner.read(tasks, source, options.columns_of(NAMES)):
        batch.validate(full=True)
        names = ("topic", "partition", "offset", "value")
        found += zip(*(batch.column(name).to_pylist() for name in names), strict=True)
    return found


def wanted(tasks) -> list[Row]:
    return [
        (one.range.topic, one.range.partition, offset, value_of(one.range.partition, offset))
        for one in tasks
        for offset in range(one.range.start, one.range.end)
    ]


def fall_silent(broker, *frames: int) -> None:
    """Let the next fetch streams fall silent after so many frames (NONE = never)."""
    broker.break_after = list(frames)
    broker._break = lambda stream: None  # only the sending ends


def requests(broker) -> int:
    """The requests so far, without those that only grant credit."""
    return len(broker.grants)


@pytest.fixture
def narrow(broker):
    """20 partitions of 12 records, in batches of 5, 4 and 3."""
    broker.logs = broker.create("t", 20)
    for log in broker.logs:
        fill(log, [5, 4, 3])
    return broker


def all_of(broker, start: int = 0, end: int = 12) -> list[Task]:
    return [a_task(log.key.partition, start, end) for log in broker.logs]


# -- what is read together -------------------------------------------------------------------------


def small(partition: int, size: int = 100) -> Small:
    return Small(Range("t", "id", partition, 0, 9), size)


def test_adjacent_small_ranges_are_read_together():
    huge = small(7, joint_scan.RANGE_BYTES_MAX + 1)
    found = [small(0), small(1), None, small(2), huge, small(3), small(4), small(5)]
    assert runs(found) == [range(2), range(5, 8)]
    assert runs([]) == runs([None]) == runs([small(1)]) == []


def test_a_joint_scan_has_one_range_of_a_partition():
    assert runs([small(0), small(1), small(1), small(2)]) == [range(2), range(2, 4)]
    assert runs([small(1), small(1), small(1)]) == []


def test_a_joint_scan_is_bounded():
    most = joint_scan.RANGES_MAX
    many = [small(partition) for partition in range(2 * most + 1)]
    assert runs(many) == [range(most), range(most, 2 * most)]
    large = [small(partition, joint_scan.RANGE_BYTES_MAX) for partition in range(9)]
    assert runs(large) == [range(4), range(4, 8)]


@given(st.lists(st.none() | st.builds(small, st.integers(0, 9), st.integers(0, 2 << 20))))
def test_no_joint_scan_is_larger_than_its_bounds(found):
    seen: list[int] = []
    for group in runs(found):
        seen += group
        ranges = [found[at] for at in group]
        assert None not in ranges
        assert 1 < len(ranges) == len({each.range.partition for each in ranges})
        assert max(each.bytes for each in ranges) <= joint_scan.RANGE_BYTES_MAX
        assert sum(each.bytes for each in ranges) <= joint_scan.BYTES_MAX
    assert seen == sorted(set(seen))


# -- without faults --------------------------------------------------------------------------------


def test_a_thousand_ranges_of_a_leader_take_two_requests(broker):
    for log in broker.create("t", 1_000):
        fill(log, [2])
    tasks = [a_task(partition, 0, 2) for partition in range(1_000)]
    assert rows_of(tasks, source_of(broker)) == wanted(tasks)
    assert (requests(broker), broker.positions_set, broker.streams) == (2, 1_000, 2)
    assert rows_of(tasks, source_of(broker)) == wanted(tasks)
    assert (requests(broker), broker.streams) == (4, 2), "the streams are used again"


def test_the_planner_says_which_ranges_are_small(narrow, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    source = source_of(narrow)
    made = planner.Planner(source)
    tasks = all_of(narrow)
    (first, second) = made.packed([Task(each.range, True) for each in tasks])
    assert first + second == tuple(tasks)
    assert all(0 < each.bytes < 1_000 for each in first + second)
    assert rows_of(first, source) + rows_of(second, source) == wanted(tasks)
    assert requests(narrow) == 2


def test_ranges_begin_and_end_inside_batches(narrow):
    tasks = [a_task(0, 1, 2), a_task(1, 3, 11), a_task(2, 8, 9), a_task(3, 0, 5), a_task(4, 11, 12)]
    assert rows_of(tasks, source_of(narrow)) == wanted(tasks)
    assert requests(narrow) == 1


def test_ranges_of_unknown_size_and_large_ones_are_read_by_themselves(narrow):
    sizes = [100, NONE, 100, 100, 2 << 20, 100, 100]
    tasks = [a_task(partition, 0, 12, size=size) for partition, size in enumerate(sizes)]
    assert rows_of(tasks, source_of(narrow)) == wanted(tasks)
    assert requests(narrow) == 1 + 1 + 1 + 1 + 1


def test_empty_ranges_and_offsets_without_rows(narrow):
    """An answer may pass offsets without a payload (rule L12)."""
    for log in narrow.logs:
        log.end = 20
    narrow.gaps = {12: 17}
    for log in narrow.logs:
        log.end = 17
        fill(log, [3])
    tasks = [a_task(0, 0, 0), a_task(1, 12, 17), a_task(2, 10, 19), a_task(3, 14, 16)]
    narrow.gaps[14] = 17
    rows = [row for row in wanted(tasks) if not 12 <= row[2] < 17]
    assert rows_of(tasks, source_of(narrow)) == rows


def test_several_topics_take_one_look_up(broker):
    tasks = []
    for number in range(9):
        (log,) = broker.create(f"t{number}")
        fill(log, [4])
        tasks.append(a_task(0, 0, 4, f"t{number}"))
    assert rows_of(tasks, source_of(broker)) == wanted(tasks)
    assert requests(broker) == 1


def test_aborted_transactions_and_markers_are_left_out(narrow):
    aborted, kept = narrow.logs[3], narrow.logs[4]
    for log in (aborted, kept):
        fill(log, [2], **TRANSACTION)
    aborted.aborted.append((7, 12, 13))
    tasks = all_of(narrow, end=14)
    for log in narrow.logs:
        if log.end == 12:
            fill(log, [2])
    rows = [row for row in wanted(tasks) if row[1] != 3 or row[2] < 12]
    assert rows_of(tasks, source_of(narrow)) == rows
    assert requests(narrow) == 1


# -- with faults -----------------------------------------------------------------------------------


def test_an_entry_with_an_error_leaves_only_its_range_to_a_scan(narrow):
    moved, failed = narrow.logs[5], [True]

    def once(log, offset):
        if log is moved and failed:
            failed.clear()
            return errors.NotLeaderOrFollower("moved")
        return None

    narrow.on_fetch = once
    tasks = all_of(narrow)
    assert rows_of(tasks, source_of(narrow)) == wanted(tasks)
    assert (requests(narrow), narrow.positions_set) == (2, 21)
    assert narrow.streams == 1, "the error ended the position, so the stream is clean"


@pytest.mark.parametrize(
    ("cause", "raised"),
    [
        (errors.InvalidRequest("no"), errors.InvalidRequest),
        (errors.OffsetOutOfRange("no"), errors.DataLoss),
    ],
)
def test_a_range_that_fails_is_named_behind_the_rows_before_it(narrow, cause, raised):
    fifth = narrow.logs[5]
    narrow.on_fetch = lambda log, offset: cause if log is fifth else None
    with pytest.raises(raised, match="t-5"):
        rows_of(all_of(narrow), source_of(narrow))


def test_a_lost_range_is_left_out_if_the_user_says_so(narrow):
    narrow.logs[5].log_start = 9
    tasks = all_of(narrow)
    rows = [row for row in wanted(tasks) if row[1] != 5 or row[2] >= 9]
    with pytest.warns(planner.PkWarning, match="t-5"):
        assert rows_of(tasks, source_of(narrow, failOnDataLoss="false")) == rows


@pytest.mark.parametrize("frames", [0, 1, 2])
def test_a_stream_that_breaks_loses_and_repeats_nothing(narrow, frames):
    narrow.frame_bytes, narrow.break_after = 1, [frames]
    tasks = all_of(narrow)
    assert rows_of(tasks, source_of(narrow)) == wanted(tasks)
    assert requests(narrow) == 1 + 20
    epochs = narrow.last_epochs[20:]
    assert epochs == [NONE if frames == 0 else 1] * 20, "scans go on with the epoch (KIP-320)"


@pytest.mark.parametrize("frames", [0, 1])
def test_a_silent_broker_is_given_up_soon(narrow, monkeypatch, frames):
    monkeypatch.setattr(joint_scan, "PATIENCE_MS", 80)
    narrow.frame_bytes = 1
    fall_silent(narrow, frames)
    tasks = all_of(narrow)
    assert rows_of(tasks, source_of(narrow)) == wanted(tasks)
    assert requests(narrow) == 1 + 20


def test_a_range_that_the_broker_does_not_advance_holds_up_nothing_else(narrow, monkeypatch):
    monkeypatch.setattr(joint_scan, "PATIENCE_MS", 2_000)
    waits = narrow.logs[2]
    waits.lso = 5

    def advance() -> None:
        while requests(narrow) < 2:  # until its scan asks
            time.sleep(0.01)
        waits.lso = None
        narrow._loop.call_soon_threadsafe(narrow.grew)

    advancing = threading.Thread(target=advance)
    advancing.start()
    tasks = all_of(narrow)
    assert rows_of(tasks, source_of(narrow)) == wanted(tasks)
    advancing.join()
    assert (requests(narrow), narrow.positions_set) == (2, 21)


def test_more_bytes_than_known_use_up_the_credit_and_end_the_joint_scan(narrow, monkeypatch):
    monkeypatch.setattr(joint_scan, "CREDIT_BYTES", 2_000)
    monkeypatch.setattr(JointScan, "_patience_s", FOREVER_S)
    tasks = all_of(narrow)
    assert rows_of(tasks, source_of(narrow)) == wanted(tasks)
    assert narrow.grants[0] == 2_000
    assert 1 < requests(narrow) < 21


def test_a_payload_that_is_damaged_on_the_way_is_asked_for_again(narrow):
    log = narrow.logs[6]
    base, following, raw = log.batches[1]
    bad = raw[:-1] + bytes([raw[-1] ^ 1])
    log.batches[1] = (base, following, bad)

    def mended(which, offset):
        if which is log and offset == 5:  # the scan asks from the position of the damage
            log.batches[1] = (base, following, raw)

    narrow.on_fetch = mended
    tasks = all_of(narrow)
    assert rows_of(tasks, source_of(narrow)) == wanted(tasks)
    assert (requests(narrow), narrow.positions_set) == (2, 21)


def test_a_topic_that_no_broker_knows_is_left_to_its_scan(narrow):
    gone = a_task(0, 0, 3, "gone")
    with pytest.raises(errors.TopicRecreated, match="gone-0"):
        rows_of([*all_of(narrow), gone], source_of(narrow))
    assert (requests(narrow), narrow.positions_set) == (1, 20)


@pytest.fixture
def other(broker):
    """A second broker of the same cluster."""
    second = FakeBroker(broker.cluster, broker.world, node=2)
    broker._run(second.listen("127.0.0.1:0"))
    yield second
    broker._run(second.listener.close(100))


def test_the_ranges_of_each_leader_take_one_request(narrow, other):
    for log in narrow.logs[::2]:
        log.leader = 2
    tasks = all_of(narrow)
    assert rows_of(tasks, source_of(narrow)) == wanted(tasks)
    assert (narrow.positions_set, requests(narrow)) == (10, 1)
    assert (other.positions_set, requests(other)) == (10, 1)


def test_a_leader_that_moves_away_from_a_silent_broker_is_followed(narrow, other, monkeypatch):
    """sparkconnector/joint_scan J4: neither its answer nor the patience is waited for."""
    monkeypatch.setattr(JointScan, "_patience_s", FOREVER_S)
    source = source_of(narrow)
    rows_of([a_task(0, 0, 1), a_task(1, 0, 1)], source)  # the metadata are known and kept fresh
    fall_silent(narrow, 0)
    client = connection.cluster(source.bootstrap, source.client, source.connect_timeout_ms)
    client._idle.clear()
    before = requests(narrow)

    def move() -> None:
        while requests(narrow) == before:
            time.sleep(0.01)
        for log in narrow.logs:
            log.leader = 2
        client._process.loop.call_soon_threadsafe(client._network.want_metadata)

    mover = threading.Thread(target=move)
    mover.start()
    tasks = all_of(narrow)
    assert rows_of(tasks, source) == wanted(tasks)
    mover.join()
    assert (requests(narrow) - before, other.positions_set) == (1, 20)


def test_a_first_contact_that_fails_is_waited_for_once(monkeypatch):
    waits = 0
    reach = connection.ClusterClient._reach

    async def counted(client):
        nonlocal waits
        waits += 1
        await reach(client)

    monkeypatch.setattr(connection.ClusterClient, "_reach", counted)
    with SocketBroker() as broker:
        source = source_of(broker, connectTimeoutMs="300")
    with pytest.raises(errors.PkError, match="connectTimeoutMs=300"):
        rows_of([a_task(0, 0, 3), a_task(1, 0, 3)], source)
    assert waits == 1


def test_a_task_that_is_given_up_closes_what_it_has_not_read(narrow, monkeypatch):
    monkeypatch.setattr(joint_scan, "RANGES_MAX", 4)
    fall_silent(narrow, NONE, 0)
    source = source_of(narrow)
    reading = planner._each(all_of(narrow), source, planner_shape())
    next(reading)
    reading.close()
    client = connection.cluster(source.bootstrap, source.client, source.connect_timeout_ms)
    for _ in range(200):
        if not client._scans:
            break
        time.sleep(0.01)
    assert not client._scans


def planner_shape():
    from pk.sparkconnector import rows

    return rows.Shape(options.columns_of(NAMES))


# -- any faults ------------------------------------------------------------------------------------

FAULTS = (
    errors.NotLeaderOrFollower("moved"), errors.UnknownLeaderEpoch("not yet"),
    errors.ThrottledError("busy"), errors.OffsetNotAvailable("soon"),
)  # fmt: skip


#: A joint scan's patience with a leader that says nothing.
SILENT_S = 0.04


@st.composite
def cuts(draw, most: int) -> tuple[int, int]:
    start = draw(st.integers(0, most))
    return start, draw(st.integers(start, most))


@given(data=st.data())
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_rows_are_those_of_scans_whatever_breaks(data, monkeypatch):
    monkeypatch.setattr(joint_scan, "PATIENCE_MS", SILENT_S * 1000)
    draw = data.draw
    with SocketBroker() as broker:
        tasks = []
        left_out = set()
        for log in broker.create("t", draw(st.integers(2, 7))):
            partition = log.key.partition
            for count in draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)):
                if not draw(st.booleans()):
                    fill(log, [count])
                    continue
                begun = log.end
                fill(log, [count], **TRANSACTION)
                log.producers.clear()  # each batch is the first of a transaction
                if draw(st.booleans()):
                    log.aborted.append((7, begun, log.end - 1))
                    left_out |= {(partition, offset) for offset in range(begun, log.end)}
            start, end = draw(cuts(log.end))
            middle = draw(st.integers(start, end))
            sizes = st.sampled_from([NONE, 50, 50, 50, 2 << 20])
            tasks.append(a_task(partition, start, middle, size=draw(sizes)))
            tasks.append(a_task(partition, middle, end, size=draw(sizes)))
        tasks = draw(st.permutations(tasks))
        numbers = st.lists(st.integers(-1, 3), max_size=4)
        broker.frame_bytes = draw(st.sampled_from([1, 100, 1 << 20]))
        broker.break_after = draw(numbers)
        source = source_of(broker)
        client = connection.cluster(source.bootstrap, source.client, source.connect_timeout_ms)
        silent, broken = draw(st.booleans()), broker._break

        def fall(stream) -> None:
            """Fall silent, or break; a scan would wait for a silent leader until that moves."""
            joint = all(isinstance(each, joint_scan.JointScan) for each in list(client._scans))
            if silent and joint:
                # a joint scan whose rows have all come keeps the stream, and a scan may take it
                asyncio.get_running_loop().call_later(5 * SILENT_S, stream.close)
            else:
                broken(stream)

        broker._break = fall
        faults = draw(st.lists(st.none() | st.sampled_from(FAULTS), max_size=12))
        broker.on_fetch = lambda log, offset: faults.pop(0) if faults else None
        monkeypatch.setattr(joint_scan, "CREDIT_BYTES", draw(st.sampled_from([300, 1 << 24])))
        monkeypatch.setattr(joint_scan, "RANGES_MAX", draw(st.sampled_from([2, 3, 512])))
        rows = [row for row in wanted(tasks) if row[1:3] not in left_out]
        assert rows_of(tasks, source) == rows
