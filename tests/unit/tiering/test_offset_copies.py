"""Copies of committed offsets in the tier: when they are written, their bytes, and their way back
(rule T13)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pk import errors
from pk.tiering import offset_files, stored_offsets
from pk.tiering.objects import MemoryStore
from pk.tiering.offset_copies import KEEP, OffsetCopies, obsolete
from pk.tiering.offset_files import CopyLines, CopyName, StoredOffset
from pk.types import PartitionKey
from pk.wire import pk_pb2 as wire

TOPIC, TOPIC_ID = "flights", "00000000-0000-0000-0000-000000000001"
MINUTE_MS = 60_000


def group(name: str, offsets: dict[int, int], **facts: Any) -> wire.StoredGroup:
    topic = wire.StoredTopic(topic=TOPIC, topic_id=TOPIC_ID)
    for partition, offset in offsets.items():
        topic.partitions.append(partition)
        topic.offsets.append(offset)
        topic.leader_epochs.append(4)
        topic.metadata.append("line\nbreak \u2028")
        topic.committed_ms.append(1_700_000_000_000)
    return wire.StoredGroup(group_id=name, topics=[topic], **facts)


def lines(*pages: list[wire.StoredGroup]) -> CopyLines:
    made = CopyLines()
    for page in pages:
        made.add(page)
    return made


# -- when (tiering/offset_copies) ------------------------------------------------------------------


def written(copies: OffsetCopies, name: CopyName, digest: int, now_ms: int) -> bool:
    """Whether a pass at `now_ms` writes offsets with `digest`."""
    if copies.due([(3, name)], now_ms) != [3]:
        return False
    if not copies.is_listed(3):
        copies.listed(3, [])
    if not copies.is_needed(3, name) or not copies.changed(3, name, digest, 1):
        return False
    copies.wrote(3, name, digest, now_ms)
    return True


def test_a_partition_is_written_at_most_once_in_an_interval_and_if_it_changed() -> None:
    """tiering/offset_copies D1: nor if only members have joined."""
    copies = OffsetCopies(MINUTE_MS)
    assert written(copies, CopyName(1, 10), 1, 0)
    assert not written(copies, CopyName(1, 20), 2, MINUTE_MS - 1), "within the interval"
    assert written(copies, CopyName(1, 20), 2, MINUTE_MS)
    assert not written(copies, CopyName(1, 20), 2, 9 * MINUTE_MS), "nothing was appended"
    assert not written(copies, CopyName(1, 30), 2, 9 * MINUTE_MS), "a rebalance changes no offset"
    assert written(copies, CopyName(1, 40), 3, 9 * MINUTE_MS)


def test_a_coordinator_that_returns_does_not_write_sooner() -> None:
    copies = OffsetCopies(MINUTE_MS)
    assert written(copies, CopyName(1, 10), 1, 0)
    assert not written(copies, CopyName(2, 20), 2, 1_000)
    assert written(copies, CopyName(2, 20), 2, MINUTE_MS)


def test_a_deposed_coordinator_writes_nothing_once_its_successor_has() -> None:
    """tiering/offset_copies D2: it has listed the copies of a later leader epoch."""
    copies = OffsetCopies(MINUTE_MS)
    name = CopyName(4, 900)
    assert copies.due([(3, name)], 0) == [3]
    copies.listed(3, [CopyName(3, 700), CopyName(5, 10)])
    assert not copies.is_needed(3, name)
    assert copies.due([(3, CopyName(4, 999))], MINUTE_MS) == []
    assert copies.due([(3, CopyName(6, 5))], MINUTE_MS) == [3], "it coordinates it again"


def test_a_restarted_process_knows_the_copies_of_its_predecessor() -> None:
    copies = OffsetCopies(MINUTE_MS)
    assert copies.due([(3, CopyName(4, 900))], 0) == [3], "the store was not asked yet"
    copies.listed(3, [CopyName(4, 900)])
    assert copies.due([(3, CopyName(4, 900))], MINUTE_MS) == []
    assert copies.due([(3, CopyName(4, 901))], MINUTE_MS) == [3]


def test_a_partition_without_offsets_has_no_copy_and_loses_offsets_by_one() -> None:
    copies = OffsetCopies(MINUTE_MS)
    assert copies.due([(3, CopyName(1, 10))], 0) == [3]
    copies.listed(3, [])
    assert not copies.changed(3, CopyName(1, 10), 0, 0)
    assert written(copies, CopyName(1, 20), 7, 0)
    assert copies.due([(3, CopyName(1, 30))], MINUTE_MS) == [3]
    assert copies.changed(3, CopyName(1, 30), 0, 0), "they have expired: that is a change"


def test_the_newest_copies_stay() -> None:
    """tiering/offset_copies D3: a deposed coordinator removes its own, not its successor's."""
    names = [CopyName(5, 10), CopyName(3, 800), CopyName(4, 900), CopyName(3, 700)]
    assert KEEP == 2
    assert obsolete(names) == [CopyName(3, 700), CopyName(3, 800)]
    assert obsolete(names[:2]) == []


def test_a_failure_is_told_once_until_it_is_over() -> None:
    copies = OffsetCopies(MINUTE_MS)
    assert not copies.succeeded()
    assert [copies.failed(), copies.failed(), copies.succeeded()] == [True, False, True]
    assert copies.failed()


# -- bytes (tiering/offset_files) ------------------------------------------------------------------


def test_a_copy_has_the_groups_and_their_offsets() -> None:
    name = CopyName(5, 70)
    path = offset_files.copy_path("c/1", 3, name)
    assert path == f"_cluster/c%2F1/0/offsets/00003/0000000005-{70:020d}.offsets"
    assert offset_files.parse_path(path) == (3, name)
    query = group("q", {1: 8}, query_run="r", holds_retention=True)
    raw = lines([group("g", {0: 42, 1: 7}), query]).encode("c/1", 3, name, 1_234)
    found = offset_files.decode(path, raw)
    assert found[:5] == (path, "c/1", 3, name, 1_234)
    assert {each.group_id: each.kind for each in found.groups.values()} == {
        "g": "consumer",
        "q": "query",
    }
    stored = StoredOffset(42, 4, "line\nbreak \u2028", 1_700_000_000_000)
    assert found.groups["g"].offsets == {
        PartitionKey(TOPIC_ID, 0): stored,
        PartitionKey(TOPIC_ID, 1): stored._replace(offset=7),
    }
    assert found.groups["g"].topics == {TOPIC_ID: TOPIC}
    assert (found.groups["q"].query_run, found.groups["q"].holds_retention) == ("r", True)


def test_pages_leave_no_trace() -> None:
    """tiering/offset_files F2: also if a page ends within a topic."""
    whole = lines([group("g", {0: 1, 1: 2}), group("h", {0: 3})])
    pages = lines([group("g", {0: 1})], [group("g", {1: 2})], [group("h", {0: 3})])
    assert pages.digest == whole.digest
    assert pages.encode("c", 0, CopyName(1, 1), 0) == whole.encode("c", 0, CopyName(1, 1), 0)
    assert lines([group("g", {0: 1, 1: 2})]).digest != lines([group("g", {0: 1, 1: 3})]).digest


def test_other_objects_are_no_copies() -> None:
    assert offset_files.parse_path("_cluster/c/0/offsets/00003/.pk-upload-1-1-x.offsets") is None
    assert offset_files.parse_path("t/00003/part.parquet") is None


# -- the way back (tiering/stored_offsets) ---------------------------------------------------------


def read(store: MemoryStore, **facts: Any) -> dict[int, int]:
    """The offset of group g in partition 0, by coordinator partition."""
    found = asyncio.run(stored_offsets.read_offsets(store, "c", **facts))
    key = PartitionKey(TOPIC_ID, 0)
    return {number: copy.groups["g"].offsets[key].offset for number, copy in found.items()}


def put(store: MemoryStore, partition: int, name: CopyName, offset: int) -> str:
    path = offset_files.copy_path("c", partition, name)
    store.objects[path] = lines([group("g", {0: offset})]).encode("c", partition, name, 0)
    return path


def test_the_newest_copy_of_each_partition_counts() -> None:
    store = MemoryStore()
    assert read(store) == {}
    put(store, 0, CopyName(4, 900), 1)
    put(store, 0, CopyName(5, 20), 2)
    put(store, 7, CopyName(1, 3), 3)
    put(store, 7, CopyName(1, 20), 4)
    store.objects[offset_files.copy_path("other", 0, CopyName(9, 9))] = b"of another cluster"
    assert read(store) == {0: 2, 7: 4}


def test_a_damaged_copy_is_an_error_that_names_it() -> None:
    store = MemoryStore()
    put(store, 0, CopyName(4, 900), 1)
    path = put(store, 0, CopyName(5, 20), 2)
    for damaged in (b"", store.objects[path][:-9], store.objects[path].replace(b" 2,", b" 9,")):
        store.objects[path] = damaged
        with pytest.raises(errors.DamagedTierFile, match=path):
            read(store)
        assert read(store, accept_older=True) == {0: 1}
    del store.objects[offset_files.copy_path("c", 0, CopyName(4, 900))]
    with pytest.raises(errors.DamagedTierFile, match=path):
        read(store, accept_older=True)


def test_a_copy_under_another_name_is_damaged() -> None:
    store = MemoryStore()
    path = put(store, 0, CopyName(4, 900), 1)
    other = offset_files.copy_path("c", 0, CopyName(5, 20))
    store.objects[other] = store.objects[path]
    with pytest.raises(errors.DamagedTierFile, match="does not match"):
        read(store)


def test_a_copy_that_has_an_offset_twice_is_damaged() -> None:
    """Its writer had a page twice: which offset is right is not known."""
    name = CopyName(4, 900)
    path = offset_files.copy_path("c", 0, name)
    raw = lines([group("g", {0: 1})], [group("g", {0: 1})]).encode("c", 0, name, 0)
    with pytest.raises(errors.DamagedTierFile, match=path):
        offset_files.decode(path, raw)


def test_a_copy_of_a_newer_build_is_an_error_also_if_older_ones_are_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """L21: it is whole, and this build cannot know what it says."""
    store = MemoryStore()
    put(store, 0, CopyName(4, 900), 1)
    with monkeypatch.context() as newer:
        newer.setattr(offset_files, "VERSION", offset_files.VERSION + 1)
        path = put(store, 0, CopyName(5, 20), 2)
    with pytest.raises(errors.NewerFormat, match=path):
        read(store, accept_older=True)
