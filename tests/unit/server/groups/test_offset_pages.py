"""Pages of committed offsets, for their copy in the tier (rule T13)."""

from __future__ import annotations

import pytest

from pk.group_ids import partition_of_group
from pk.server.groups import commands as c
from pk.server.groups import offset_pages
from pk.types import PartitionKey
from pk.wire import pk_pb2 as wire
from tests.unit.server.groups.group_bench import (
    ID,
    KEYS,
    OTHER_ID,
    PARTITION,
    TOPIC_ID,
    Bench,
    asked,
)
from tests.unit.server.groups.test_transactional_offsets import TransactionBench

#: Another group of the same coordinator partition.
OTHER = next(
    name for name in map("other{}".format, range(999)) if partition_of_group(name) == PARTITION
)


def pages(bench: Bench) -> list[wire.ReadOffsetsReply]:
    """Read everything, page by page."""
    request = wire.ReadOffsetsRequest(partition=PARTITION)
    found = []
    while True:
        reply = bench.run(c.ReadOffsets(request, bench.image))
        found.append(reply)
        if reply.done:
            return found
        topic = reply.groups[-1].topics[-1]
        request.after.group_id = reply.groups[-1].group_id
        request.after.topic_id, request.after.partition = topic.topic_id, topic.partitions[-1]


def offsets(bench: Bench) -> list[tuple[str, PartitionKey, int]]:
    return [
        (group.group_id, PartitionKey(topic.topic_id, partition), offset)
        for page in pages(bench)
        for group in page.groups
        for topic in group.topics
        for partition, offset in zip(topic.partitions, topic.offsets, strict=True)
    ]


def commit_as_query(bench: Bench, group: str) -> None:
    request = wire.OffsetCommitRequest(
        member=asked("", group=group),
        query=wire.QueryRun(run_id="r", first=True, holds_retention=True),
    )
    request.topics.add(topic_id=OTHER_ID, partitions=[0], offsets=[8])
    assert not bench.run(c.CommitOffsets(request, bench.image)).refused


def test_a_page_has_everything_of_a_commit() -> None:
    bench = Bench()
    bench.commit({KEYS[0]: 5, KEYS[1]: 7}, metadata="m")
    commit_as_query(bench, OTHER)
    [page] = pages(bench)
    group, query = page.groups
    assert (group.group_id, group.query_run, query.group_id) == (ID, "", OTHER)
    assert (query.query_run, query.holds_retention) == ("r", True)
    [topic] = group.topics
    assert (topic.topic, topic.topic_id, list(topic.partitions)) == ("t", TOPIC_ID, [0, 1])
    assert (list(topic.offsets), list(topic.metadata)) == ([5, 7], ["m", "m"])
    assert list(topic.committed_ms) == [bench.now, bench.now]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_pages_have_each_offset_once(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """groups/offset_pages B1, with pages of any size."""
    bench = Bench()
    bench.commit({key: number for number, key in enumerate(KEYS)})
    commit_as_query(bench, OTHER)
    monkeypatch.setattr(offset_pages, "PAGE_OFFSETS", size)
    wanted = [(ID, key, number) for number, key in enumerate(KEYS)]
    assert offsets(bench) == [*wanted, (OTHER, PartitionKey(OTHER_ID, 0), 8)]
    assert len(pages(bench)) == -(-5 // size)


def test_long_metadata_fill_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.commit(dict.fromkeys(KEYS, 1), metadata="m" * 20)
    monkeypatch.setattr(offset_pages, "PAGE_BYTES", 120)
    assert 1 < len(pages(bench)) < 4
    assert len(offsets(bench)) == 4


def test_offsets_of_an_open_transaction_are_left_out() -> None:
    """groups/offset_pages B2: they are pending until the marker."""
    bench = TransactionBench()
    bench.commit({KEYS[0]: 5})
    bench.store({KEYS[0]: 9, KEYS[1]: 9})
    assert offsets(bench) == [(ID, KEYS[0], 5)]
    bench.end(commit=True)
    assert offsets(bench) == [(ID, KEYS[0], 9), (ID, KEYS[1], 9)]


def test_the_topic_of_an_unknown_id_has_no_name() -> None:
    bench = Bench()
    bench.commit({KEYS[0]: 5})
    bench.image = type(bench.image)()
    [page] = pages(bench)
    assert page.groups[0].topics[0].topic == ""


def test_without_offsets_there_is_one_empty_page() -> None:
    bench = Bench()
    bench.join("a")
    [page] = pages(bench)
    assert (list(page.groups), page.done) == ([], True)
