"""Offsets that count when a producer's transaction commits (rule X2)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pk import errors
from pk.log.control_rows import Marker
from pk.server.groups import commands as c
from pk.server.groups import records
from pk.server.groups.machine import GroupCoordinator
from pk.server.replica.replay_log import ProducerStamp
from pk.types import NONE, PartitionKey
from pk.wire import pk_pb2 as wire
from tests.unit.server.groups.group_bench import DAY_MS, ID, KEYS, Bench, asked

PRODUCER = 7


class TransactionBench(Bench):
    """A machine whose log has markers, too.  Replays of the whole log must equal it."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = False
        self.at = 0
        self.entries: list[tuple[int, Any]] = []

    def run(self, command: c.Command) -> Any:
        decision = self.machine.decide(command, self.now)
        for record in decision.records:
            stored = records.from_row(*records.to_row(record))
            if record.producer is not None:
                known = records.TransactionalOffsets()
                stamp = known.stamp_of(record)
                assert stamp is not None
                stored = known.stamped(stored, stamp._replace(base_sequence=NONE))
            self._apply(stored)
        return decision.reply

    def _apply(self, record: Any) -> None:
        self.machine.apply(self.at, record)
        self.entries.append((self.at, record))
        self.at += 1
        again = GroupCoordinator(self.rules)
        for offset, each in self.entries:
            again.apply(offset, each)
        assert again.groups == self.machine.groups

    def store(
        self,
        offsets: Mapping[PartitionKey, int],
        member: str = "",
        generation: int = NONE,
        *,
        epoch: int = 0,
        producer: int = PRODUCER,
    ) -> None:
        request = wire.TxnOffsetCommitRequest(
            member=asked(member, generation), producer_id=producer, producer_epoch=epoch
        )
        for key, offset in offsets.items():
            request.topics.add(topic_id=key.topic_id, partitions=[key.partition], offsets=[offset])
        self.run(c.CommitTransactionOffsets(request, self.image))

    def end(self, *, commit: bool, epoch: int = 0, producer: int = PRODUCER) -> None:
        marker = Marker(producer, epoch + 1, commit)
        self._apply(records.TransactionalOffsets().ended(marker))

    def stable_fetch(self, *keys: PartitionKey) -> None:
        request = wire.OffsetFetchGroup(group_id=ID)
        for key in keys:
            request.topics.add(topic_id=key.topic_id, partitions=[key.partition])
        self.run(c.FetchOffsets(request, require_stable=True))


def test_offsets_count_with_the_commit_marker_and_go_with_the_abort_marker() -> None:
    bench = TransactionBench()
    generation = bench.stable("a", a=KEYS[:2])
    bench.store({KEYS[0]: 5}, "a", generation)
    assert bench.fetched() == {}
    bench.end(commit=False)
    assert bench.fetched() == {}
    bench.store({KEYS[0]: 6, KEYS[1]: 7}, "a", generation, epoch=1)
    bench.store({KEYS[0]: 8}, "a", generation, epoch=1)
    bench.end(commit=True, epoch=1)
    assert bench.fetched() == {KEYS[0]: 8, KEYS[1]: 7}


def test_a_stable_fetch_waits_for_the_partitions_that_it_names() -> None:
    bench = TransactionBench()
    generation = bench.stable("a", a=KEYS[:2])
    bench.store({KEYS[0]: 5}, "a", generation)
    bench.stable_fetch(KEYS[1])
    for wanted in ((KEYS[0],), ()):
        with pytest.raises(errors.UnstableOffsetCommit):
            bench.stable_fetch(*wanted)
    bench.end(commit=True)
    bench.stable_fetch()


def test_the_member_is_checked_in_the_decision_that_stores() -> None:
    """The group went on while the commit waited for the transaction's coordinator."""
    bench = TransactionBench()
    generation = bench.stable("a", "b", a=[KEYS[0]], b=[KEYS[1]])
    with pytest.raises(errors.NotPartitionOwner):
        bench.store({KEYS[0]: 1, KEYS[1]: 5}, "a", generation)
    bench.expire("a")
    with pytest.raises(errors.UnknownMemberId):
        bench.store({KEYS[0]: 5}, "a", generation)
    bench.stable("b", b=KEYS[:2])
    with pytest.raises(errors.IllegalGeneration):
        bench.store({KEYS[1]: 5}, "b", generation)
    with pytest.raises(errors.NonEmptyGroup):
        bench.store({KEYS[1]: 5})
    assert not bench.group.pending, "all or none are stored"


def test_the_later_record_counts_and_not_the_later_marker() -> None:
    bench = TransactionBench()
    generation = bench.stable("a", a=KEYS[:1])
    bench.store({KEYS[0]: 5}, "a", generation)
    bench.commit({KEYS[0]: 9}, "a", generation)
    bench.end(commit=True)
    assert bench.fetched() == {KEYS[0]: 9}


def test_a_marker_ends_the_transactions_below_its_epoch_only() -> None:
    """The machine gets a marker once it is committed, which may be after the next transaction has
    begun; a replay may have applied it before.
    """
    bench = TransactionBench()
    bench.store({KEYS[0]: 5}, epoch=0)
    bench.store({KEYS[1]: 6}, epoch=1)
    bench.store({KEYS[2]: 1}, epoch=0, producer=8)
    bench.end(commit=True, epoch=0)
    bench.end(commit=True, epoch=0)
    assert bench.fetched() == {KEYS[0]: 5}
    bench.end(commit=False, epoch=1)
    assert bench.fetched() == {KEYS[0]: 5}
    assert len(bench.group.pending) == 1


def test_pending_offsets_keep_the_group_and_its_offsets() -> None:
    """transactions.md 21: such a group is neither expired, nor deleted, nor reset."""
    bench = TransactionBench()
    bench.commit({KEYS[0]: 3, KEYS[1]: 3})
    bench.store({KEYS[0]: 5})
    bench.now += 30 * DAY_MS
    bench.expire_offsets()
    assert bench.fetched() == {KEYS[0]: 3}
    with pytest.raises(errors.UnstableOffsetCommit):
        bench.run(c.DeleteGroup(ID))
    with pytest.raises(errors.UnstableOffsetCommit):
        bench.run(
            c.DeleteOffsets(
                wire.DeleteOffsetsRequest(
                    group_id=ID,
                    topics=[wire.TopicPartitions(topic_id=KEYS[0].topic_id, partitions=[0])],
                ),
                bench.image,
            )
        )
    bench.end(commit=False)
    bench.expire_offsets()
    assert ID not in bench.machine.groups


def test_an_aborted_first_commit_leaves_no_group() -> None:
    bench = TransactionBench()
    bench.store({KEYS[0]: 5})
    bench.end(commit=False)
    assert ID not in bench.machine.groups


def test_another_record_of_a_transaction_is_of_a_newer_build() -> None:
    known = records.TransactionalOffsets()
    record = records.removed(records.GROUP, ID)
    with pytest.raises(errors.NewerFormat):
        known.stamped(record, ProducerStamp(1, 0))


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["plain", "store", "commit", "abort"]),
        st.sampled_from([1, 2]),
        st.sampled_from(KEYS[:2]),
    ),
    max_size=12,
)


@given(STEPS)
def test_any_history_gives_what_the_order_of_its_records_says(
    steps: list[tuple[str, int, PartitionKey]],
) -> None:
    """Markers may come in any order after the records; the naive oracle sorts by record."""
    bench = TransactionBench()
    numbers = itertools.count(1)
    stored: list[tuple[int | None, PartitionKey, int]] = []  #: producer, partition, offset
    for kind, producer, key in steps:
        if kind in ("plain", "store"):
            offset = next(numbers)
            if kind == "plain":
                bench.commit({key: offset})
            else:
                bench.store({key: offset}, producer=producer)
            stored.append((producer if kind == "store" else None, key, offset))
            continue
        bench.end(commit=kind == "commit", producer=producer)
        stored = [
            (None if each[0] == producer else each[0], *each[1:])
            for each in stored
            if kind == "commit" or each[0] != producer
        ]
        # the next transaction of this producer has the same epoch here: markers end those below
    expected = {key: offset for owner, key, offset in stored if owner is None}
    assert bench.fetched() == expected
