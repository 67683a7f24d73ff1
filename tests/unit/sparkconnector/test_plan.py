"""The plan of a partition: it keeps the tasks, and says what the JVM may read."""

from __future__ import annotations

import base64
import json
import pickle
from types import SimpleNamespace

import pytest

from pk import errors
from pk.settings import CONSUMER
from pk.sparkconnector import columnar_jar, plan, prepared_fetch
from pk.sparkconnector.offsets import Range
from pk.sparkconnector.plan import PkPartition
from pk.sparkconnector.planner import Task
from pk.sparkconnector.ranges import TierFile
from pk.sparkconnector.scan import CREDIT_BYTES, fetch_request
from pk.sparkconnector.tier_scan import ColdRange
from pk.tiering.layout import DataName, data_path
from pk.wire import frames
from pk.wire import pk_pb2 as wire


def file(start: int, end: int, name: str = "") -> TierFile:
    path = name or data_path(DataName(3, start, end, 0, "a", 0xC0FFEE, 7))
    return TierFile(path, start, end - 1, 100, end - start)


def cold(start: int, end: int, *files: TierFile, uri: str = "file:///tier/a%20b/id") -> Task:
    where = ColdRange(uri, {"endpoint_url": "http://x"}, files or (file(start, end),), 4)
    return Task(Range("events", "id", 3, start, end), True, where)


def hot(start: int, end: int) -> Task:
    return Task(Range("events", "id", 3, start, end), False)


def kinds(text: str) -> list[str]:
    return [each["kind"] for each in json.loads(text)["sections"]]


def test_a_partition_survives_its_pickle_with_and_without_a_plan() -> None:
    """sparkconnector/plan D1: the tasks come back, and the JVM can hand back any rest of them."""
    tasks = (cold(0, 10), hot(10, 20), cold(5, 9, uri="s3://bucket/x"))
    text = plan.plan_of(tasks)
    for one in (PkPartition(tasks), PkPartition(tasks, text)):
        back = pickle.loads(pickle.dumps(one))
        assert (back.tasks, back.plan) == (one.tasks, one.plan)
    rest = plan.from_plan(text, 1, 3, 15)
    assert [(each.range.start, each.range.end) for each in rest.tasks] == [(15, 20), (5, 9)]
    assert not rest.plan  # Python reads a rest: a plan would send it to the JVM again
    assert plan.from_plan(text, 1, 2, 3).tasks == (hot(10, 20),)  # never before the start


def test_the_pickle_is_a_call_that_the_jvm_can_read_and_write() -> None:
    text = plan.plan_of((cold(0, 10),))
    assert PkPartition((), text).__reduce__() == (plan.from_plan, (text,))
    # as sparkconnector/java/pk/reader/Pickles.java writes it
    raw = text.encode()
    written = b"\x80\x02cpk.sparkconnector.plan\nfrom_plan\n(X" + len(raw).to_bytes(4, "little")
    written += raw + b"J\0\0\0\0J\x01\0\0\0\x8a\x08" + (7).to_bytes(8, "little") + b"tR."
    (task,) = pickle.loads(written).tasks
    assert task.range.start == 7


def test_what_the_jvm_may_read_in_columns() -> None:
    other = TierFile("partition=3/part-0001.parquet", 10, 19, 100, 10)
    unknown = file(0, 10)._replace(rows=0)
    found = {
        "ours": cold(0, 20, file(0, 10), file(10, 20)),
        "overlapping": cold(0, 20, file(0, 10), file(9, 20)),
        "of another engine": cold(0, 20, file(0, 10), other),
        "without a number of rows": cold(0, 10, unknown),
        "in a bucket": cold(0, 10, uri="s3://bucket/table"),
        "hot": hot(0, 10),
    }
    planned = {name for name, task in found.items() if kinds(plan.plan_of([task])) == ["cold"]}
    assert planned == {"ours"}
    whys = {
        name: json.loads(plan.plan_of([task]))["sections"][0].get("why")
        for name, task in found.items()
    }
    assert whys == {
        "ours": None,
        "overlapping": "another engine wrote files of the table, or they overlap",
        "of another engine": "another engine wrote files of the table, or they overlap",
        "without a number of rows": "another engine wrote files of the table, or they overlap",
        "in a bucket": "the table is on s3://",
        "hot": "no address of a leader that the JVM can reach",
    }
    (section,) = json.loads(plan.plan_of([cold(0, 10)]))["sections"]
    assert section["root"] == "/tier/a b/id"
    assert section["files"][0]["crc"] == 0xC0FFEE


class Planned:
    """A planner that knows a leader for the ranges up to `leader_until`."""

    def __init__(self, *, columnar: bool, leader_until: int = 0) -> None:
        self.source = SimpleNamespace(columnar=columnar, read_committed=True)
        self.cluster = self
        self.leader_until = leader_until

    def prepared(self, ranges: list[Range], *, read_committed: bool) -> list[dict | None]:
        if not self.leader_until:
            raise errors.NotLeaderOrFollower("no leader now")
        known = [one.end <= self.leader_until for one in ranges]
        return [{"host": "h", "port": 1} if one else None for one in known]


def test_a_scan_has_plans_for_all_partitions_or_for_none() -> None:
    """sparkconnector/plan D2: a scan that Python reads for the most part is left to Python."""
    packed = [(cold(0, 10),), (hot(10, 20),)]
    assert all(one.plan for one in plan.partitions_of(packed, Planned(columnar=True)))
    assert not any(one.plan for one in plan.partitions_of(packed, Planned(columnar=False)))
    packed[1] = (hot(10, 15), hot(15, 21))
    left = plan.partitions_of(packed, Planned(columnar=True))
    assert {json.loads(one.plan)["why"] for one in left} == {
        "the JVM could read 10 of 21 offsets (no address of a leader that the JVM can reach)"
    }
    assert [
        pickle.loads(pickle.dumps(one)).tasks for one in left
    ] == packed  # sparkconnector/plan D1
    some = plan.partitions_of(packed, Planned(columnar=True, leader_until=15))
    assert [kinds(one.plan) for one in some] == [["cold"], ["hot", "python"]]
    assert plan.partitions_of([], Planned(columnar=True)) == []


def narrow(count: int, size: int = 100) -> tuple[Task, ...]:
    ranges = [Range("events", "id", partition, 0, 9) for partition in range(count)]
    return tuple(Task(one, False, bytes=size) for one in ranges)


def test_many_small_ranges_are_left_to_python() -> None:
    """sparkconnector/plan D2: Python fetches many with one request."""
    source = Planned(columnar=True, leader_until=100)
    least, most = plan.NARROW_RANGES_LEAST, plan.NARROW_BYTES_MOST
    (one,) = plan.partitions_of([narrow(least)], source)
    assert json.loads(one.plan)["why"] == f"{least} small ranges: many share a fetch request"
    assert set(kinds(one.plan)) == {"python"}
    tasks = pickle.loads(pickle.dumps(one)).tasks
    assert [task.bytes for task in tasks] == [100] * least, "joint scans need to know"
    for packed in (
        [narrow(least - 1)],
        [narrow(least, most + 1)],
        [narrow(least, -1)],
        [narrow(least), narrow(least - 1)],
        [(*narrow(least), cold(0, 10))],
    ):
        found = plan.partitions_of(packed, source)
        assert all("why" not in json.loads(each.plan) for each in found)
        assert {"hot"} <= set(kinds(found[0].plan))


def test_a_prepared_fetch_says_what_a_scan_of_python_would_send() -> None:
    settings = CONSUMER.resolve({"decoded_bytes_max": 1 << 20})
    hello = wire.Hello(client_id="spark", protocol=1)
    one = Range("events", "id", 3, 5, 9)
    found = prepared_fetch.details("[::1]:99", one, 1, hello, settings)
    assert found is not None
    assert (found["host"], found["port"], found["decoded_bytes_max"]) == ("::1", 99, 1 << 20)
    head = frames.decode(base64.b64decode(found["fetch"])).head
    assert head.fetch == fetch_request(one, 1, settings, found["position_id"], CREDIT_BYTES)
    assert head.fetch.positions[0].end_offset == 9
    assert frames.decode(base64.b64decode(found["hello"])).head.hello.protocol_min == 1
    for address in ("unix:/run/pk", "nonsense"):
        assert prepared_fetch.details(address, one, 1, hello, settings) is None


def test_a_plan_of_another_version_is_refused() -> None:
    """Rule S8; the JVM compares the version and the build before it follows a plan."""
    found = json.loads(plan.plan_of([hot(0, 1)]))
    assert found["build"] == columnar_jar.build_of_sources()
    found["v"] += 1
    with pytest.raises(errors.NewerFormat, match="driver and executors need"):
        plan.from_plan(json.dumps(found))
