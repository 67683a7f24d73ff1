"""Aborted transactions: look-ups compared with the naive rule, for any histories of producers."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from pk.log import aborted, batch
from pk.log.aborted import AbortedEntry, AbortedRanges
from pk.log.batch import Header
from pk.log.control_rows import Marker
from pk.log.producers import Producers
from pk.types import AbortedTransaction


def header(producer_id: int, offset: int, *, transactional: bool = True) -> Header:
    flags = batch.VALUE | (batch.TRANSACTIONAL if transactional else 0)
    return Header(offset, 64, 0, batch.MAGIC, 0, flags, 0, 0, 0, 0, producer_id, 0, 1)


CONTROL = header(-1, 0)._replace(attributes=batch.CONTROL | batch.TRANSACTIONAL)


class History(NamedTuple):
    """The log of a partition: its batches, and what its segments' indexes say."""

    batches: list[Header]
    indexes: list[list[AbortedEntry]]
    aborted: list[AbortedTransaction]  #: by marker offset
    end: int  #: every transaction has ended


def history(seed: int, steps: int = 60) -> History:
    """Let some producers write transactions, and end all of them."""
    rng, state = random.Random(seed), Producers()
    batches: list[Header] = []
    indexes: list[list[AbortedEntry]] = [[]]
    producers, epochs = rng.randint(1, 6), dict.fromkeys(range(6), 0)
    offset = 0

    def end(ids: list[int]) -> None:
        nonlocal offset
        for who in ids:
            epochs[who] += 1
        markers = [Marker(who, epochs[who], rng.random() < 0.4) for who in ids]
        indexes[-1].extend(state.apply(CONTROL, offset, 0, markers).aborted)
        offset += 1

    for _ in range(steps):
        who = rng.randrange(producers)
        if rng.random() < 0.1:
            indexes.append([])
        if rng.random() < 0.3 and state.open_transactions:
            ids = sorted(state.open_transactions)
            end(rng.sample(ids, rng.randint(1, min(2, len(ids)))))
            continue
        one = header(who, offset)._replace(producer_epoch=epochs[who])
        state.apply(one, offset, 0)
        batches.append(one)
        offset += 1
    if state.open_transactions:
        end(sorted(state.open_transactions))
    every = [AbortedTransaction(*entry[:3]) for entries in indexes for entry in entries]
    return History(batches, indexes, every, offset)


def is_aborted(one: Header, transactions: list[AbortedTransaction]) -> bool:
    """The naive rule (KIP-98)."""
    return one.transactional and any(
        each.producer_id == one.producer_id
        and each.first_offset <= one.base_offset <= each.last_offset
        for each in transactions
    )


TRANSACTIONS = st.lists(
    st.builds(
        lambda who, first, size: AbortedTransaction(who, first, first + size),
        st.integers(0, 2), st.integers(0, 30), st.integers(0, 8),
    )
)  # fmt: skip


@given(TRANSACTIONS, st.integers(0, 3), st.integers(0, 40), st.booleans())
def test_a_look_up_says_what_the_naive_rule_says(
    transactions: list[AbortedTransaction], who: int, offset: int, transactional: bool
) -> None:
    """This includes transactions that overlap, which no broker sends."""
    one = header(who, offset, transactional=transactional)
    assert AbortedRanges(transactions).contains(one) == is_aborted(one, transactions)


@given(st.integers(0, 2**32), st.data())
def test_a_page_names_what_its_range_needs(seed: int, data: st.DataObject) -> None:
    log = history(seed)
    start = data.draw(st.integers(0, log.end - 1))
    stop = data.draw(st.integers(start + 1, log.end))
    limit = data.draw(st.one_of(st.none(), st.integers(1, 4)))
    told, end = aborted.find(log.indexes, start, stop, limit)
    assert start < end <= stop
    assert sorted(told) == sorted(
        each for each in log.aborted if each.last_offset >= start and each.first_offset < end
    )
    needed = sum(each.first_offset <= start for each in told)
    assert limit is None or len(told) <= max(limit, needed)
    assert end == stop or len(told) >= (limit or 0)
    ranges = AbortedRanges(told)
    for one in log.batches:
        if start <= one.base_offset < end:
            assert ranges.contains(one) == is_aborted(one, log.aborted), one.base_offset


@given(st.integers(0, 2**32), st.integers(1, 3))
def test_pages_cover_the_log(seed: int, limit: int) -> None:
    log = history(seed)
    start, dropped = 0, []
    while start < log.end:
        told, end = aborted.find(log.indexes, start, log.end, limit)
        ranges = AbortedRanges(told)
        dropped += [
            one for one in log.batches
            if start <= one.base_offset < end and ranges.contains(one)
        ]  # fmt: skip
        start = end
    assert dropped == [one for one in log.batches if is_aborted(one, log.aborted)]


class Counted(list[AbortedEntry]):
    """Entries that count how often one of them is looked at."""

    looks = 0

    def __getitem__(self, index: Any) -> Any:
        self.looks += 1
        return super().__getitem__(index)


def test_a_page_costs_what_is_in_its_range() -> None:
    """A reader that is far behind does not walk over everything that was aborted since."""
    entries = Counted(AbortedEntry(1, 10 * n, 10 * n + 5, 10 * n + 5) for n in range(10_000))
    told, _ = aborted.find([entries], 50_000, 50_100)
    assert len(told) == 10
    assert entries.looks < 50
    entries.looks = 0
    told, end = aborted.find([entries], 50_000, 99_999, 20)
    assert (len(told), end) == (20, 50_200)
    assert entries.looks < 100
