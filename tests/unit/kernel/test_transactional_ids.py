"""A producer id of transactions names the partition that allocated it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pk import errors, transactional_ids


@given(
    st.integers(0, 4095),
    st.integers(0, 2**26 - 1),
    st.integers(0, 2**24 - 1),
)
def test_a_producer_id_names_its_partition(partition: int, epoch: int, number: int) -> None:
    found = transactional_ids.producer_id(partition, epoch, number)
    assert transactional_ids.is_transactional(found)
    assert 0 < found < 2**63
    assert transactional_ids.partition_of_producer(found) == partition
    assert transactional_ids.epoch_of_producer(found) == epoch


def test_two_leaders_never_allocate_one_id() -> None:
    found = {
        transactional_ids.producer_id(partition, epoch, number)
        for partition in (0, 1, 4095)
        for epoch in (0, 1, 2**26 - 1)
        for number in (0, 1, 2**24 - 1)
    }
    assert len(found) == 27


def test_an_epoch_that_has_used_its_ids_says_so() -> None:
    with pytest.raises(errors.CoordinatorUnavailable, match="elect another leader"):
        transactional_ids.producer_id(3, 7, 2**24)


def test_the_partition_of_a_transactional_id_is_fixed() -> None:
    """Clients and brokers of every later build must agree."""
    assert [transactional_ids.partition_of_id(each) for each in ("", "a", "job-1", "ü")] == [
        0, 0, 6, 15,
    ]  # fmt: skip
