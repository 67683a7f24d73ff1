"""The check of copies of committed offsets notices what V37 forbids."""

from __future__ import annotations

from collections import Counter

import pytest

from pk.sim.checkers import Violation
from pk.sim.offset_copies import CopyCheck
from pk.tiering import offset_files
from pk.tiering.offset_files import CopyLines, CopyName
from pk.types import PartitionKey
from pk.wire import pk_pb2 as wire

KEY = PartitionKey("t1", 0)


class Store:
    """The objects of a store, and their check."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.counts: Counter[str] = Counter()
        self.check = CopyCheck(self.objects, "c", "g", self.counts, lambda _key: False)

    def put(self, name: CopyName, offset: int) -> str:
        topic = wire.StoredTopic(
            topic="t", topic_id=KEY.topic_id, partitions=[0], offsets=[offset],
            leader_epochs=[0], metadata=[""], committed_ms=[1],
        )  # fmt: skip
        lines = CopyLines()
        lines.add([wire.StoredGroup(group_id="g", topics=[topic])])
        path = offset_files.copy_path("c", 3, name)
        self.objects[path] = lines.encode("c", 3, name, 0)
        return path


def test_copies_may_grow_and_older_ones_may_go() -> None:
    store = Store()
    store.check.look()
    first = store.put(CopyName(1, 10), 5)
    store.check.look()
    store.put(CopyName(2, 4), 7)
    store.put(CopyName(1, 99), 6)  # of a deposed coordinator
    store.check.look()
    del store.objects[first]
    store.check.look()
    assert store.check.behind({KEY: 7}) == ""
    assert store.check.behind({KEY: 8})
    assert store.counts["copies of offsets"] == 2


def test_a_newest_copy_that_is_removed_is_noticed() -> None:
    store = Store()
    store.put(CopyName(1, 10), 5)
    newest = store.put(CopyName(2, 4), 7)
    store.check.look()
    del store.objects[newest]
    with pytest.raises(Violation, match="V37"):
        store.check.look()


def test_an_offset_that_goes_back_is_noticed() -> None:
    store = Store()
    store.put(CopyName(1, 10), 5)
    store.check.look()
    store.put(CopyName(1, 12), 4)
    with pytest.raises(Violation, match="V37"):
        store.check.look()
