"""The checker finds every anomaly that is planted in a history, and accepts clean histories."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from checker import ANOMALIES, check
from cycles import cyclic_groups
from histories import NEVER, History, polled
from history import (
    FAIL,
    INFO,
    OK,
    SEND,
    Sent,
    dump,
    load,
)  # fmt: skip

# -- clean histories -------------------------------------------------------------------------------


def test_an_empty_history_is_clean() -> None:
    assert History().found() == {}


def test_a_clean_history_is_accepted() -> None:
    """Markers leave gaps in the offsets, and aborted records are never returned."""
    history = (
        History()
        .assign(9, k0=0, k1=0)
        .txn(1, (0, 10, 0), (1, 11, 0))
        .txn(2, (0, 20, 2), (1, 21, 2), outcome=FAIL)
        .add(3, SEND, sends=[Sent(0, 30, 4), Sent(1, 31, 4)])
        .poll(9, 0, (0, 10))
        .txn(1, (0, 12, 5), polls=[polled(1, (0, 11))])
        .poll(9, 0, (4, 30), (5, 12))
        .poll(8, 0, (0, 10), (4, 30), (5, 12), final=True)
        .poll(8, 1, (0, 11), (4, 31), final=True)
    )
    assert history.found() == {}
    assert check(history.operations).valid


def test_a_consumer_may_go_back_when_it_is_assigned_again() -> None:
    history = (
        History()
        .txn(1, (0, 10, 0), (0, 11, 1))
        .assign(9, k0=0)
        .poll(9, 0, (0, 10), (1, 11))
        .assign(9, k0=1)
        .poll(9, 0, (1, 11))
    )
    assert history.found() == {}


def test_a_write_without_an_outcome_may_be_missing() -> None:
    history = (
        History()
        .txn(1, (0, 10, 0), (1, 11, 0), outcome=INFO, lasts=NEVER)
        .add(2, SEND, INFO, sends=[Sent(0, 20)])
        .txn(3, (0, 30, 2), (1, 31, 2))
        .poll(9, 0, (2, 30), final=True)
        .poll(9, 1, (2, 31), final=True)
    )
    assert history.found() == {}


def test_a_write_without_an_outcome_may_be_there() -> None:
    """An unknown transaction is visible as a whole; records without one are independent."""
    history = (
        History()
        .txn(1, (0, 10, 0), (1, 11, 0), outcome=INFO, lasts=NEVER)
        .add(2, SEND, INFO, sends=[Sent(0, 20), Sent(1, 21)])
        .poll(9, 0, (0, 10), (2, 20), final=True)
        .poll(9, 1, (0, 11), final=True)
    )
    assert history.found() == {}


def test_transactions_that_interleave_are_counted_and_allowed() -> None:
    """The first transaction is first in key 0, the second one in key 1."""
    history = (
        History()
        .txn(1, (0, 10, 0), (1, 11, 1), at=0.0, lasts=9.0)
        .txn(2, (0, 20, 1), (1, 21, 0), at=0.0, lasts=9.0)
        .poll(9, 0, (0, 10), (1, 20))
        .poll(9, 1, (0, 21), (1, 11))
    )
    assert history.found() == {"G0": 1}
    assert check(history.operations).valid


def test_sends_without_a_transaction_have_no_common_order() -> None:
    history = (
        History()
        .add(1, SEND, sends=[Sent(0, 10, 0), Sent(1, 11, 1)])
        .add(2, SEND, sends=[Sent(0, 20, 1), Sent(1, 21, 0)])
        .poll(9, 0, (0, 10), (1, 20))
        .poll(9, 1, (0, 21), (1, 11))
    )
    assert history.found() == {}


def test_a_slow_transaction_may_read_what_began_later() -> None:
    history = (
        History()
        .txn(1, (0, 10, 2), at=0.0, lasts=9.0, polls=[polled(1, (0, 20))])
        .txn(2, (1, 20, 0), at=1.0)
        .poll(9, 0, (2, 10))
    )
    assert history.found() == {}


# -- planted anomalies -----------------------------------------------------------------------------


def test_a_lost_write_is_found() -> None:
    history = History().txn(1, (0, 10, 0)).txn(1, (0, 11, 2)).poll(9, 0, (2, 11), final=True)
    assert history.found() == {"lost": 1}


def test_a_lost_record_without_a_transaction_is_found() -> None:
    """Its own acknowledgement counts, also if another record of the call has no outcome."""
    history = (
        History()
        .add(1, SEND, INFO, sends=[Sent(0, 10, 0), Sent(0, 11)])
        .txn(2, (0, 20, 2))
        .poll(9, 0, (2, 20), final=True)
    )
    assert history.found() == {"lost": 1}


def test_a_write_that_was_read_and_vanished_is_lost() -> None:
    history = (
        History()
        .add(1, SEND, INFO, sends=[Sent(0, 10)])
        .txn(2, (0, 20, 2))
        .poll(8, 0, (0, 10))
        .poll(9, 0, (2, 20), final=True)
    )
    assert history.found() == {"lost": 1}


def test_a_write_is_lost_if_only_one_of_the_last_consumers_misses_it() -> None:
    history = (
        History()
        .txn(1, (0, 10, 0))
        .txn(1, (0, 11, 2))
        .poll(8, 0, (0, 10), (2, 11), final=True)
        .poll(9, 0, (2, 11), final=True)
    )
    assert history.found() == {"lost": 1}


def test_an_unseen_write_is_found() -> None:
    history = History().txn(1, (0, 10, 0)).txn(1, (0, 11, 2)).poll(9, 0, (0, 10), final=True)
    assert history.found() == {"unseen": 1}


def test_without_last_consumers_all_consumers_count() -> None:
    history = History().txn(1, (0, 10, 0)).txn(1, (0, 11, 2)).poll(8, 0, (0, 10))
    assert history.found() == {"unseen": 1}
    assert history.poll(9, 0, (2, 11)).found() == {}


@pytest.mark.parametrize("outcome", [OK, INFO])
def test_a_torn_transaction_is_found(outcome: str) -> None:
    """One record of a transaction is visible, so it was committed: the other one is missing."""
    history = (
        History()
        .txn(1, (0, 10, 0), (1, 11, 0), outcome=outcome)
        .txn(2, (1, 21, 2))
        .poll(9, 0, (0, 10), final=True)
        .poll(9, 1, (2, 21), final=True)
    )
    assert history.found() == {"torn": 1, "lost": 1}


def test_an_unacknowledged_record_of_a_torn_transaction_is_found() -> None:
    history = (
        History()
        .txn(1, (0, 10, -1), (1, 11, -1), outcome=INFO, lasts=NEVER)
        .poll(9, 0, (0, 10), final=True)
    )
    assert history.found() == {"torn": 1, "unseen": 1}


def test_a_duplicate_is_found() -> None:
    """It is in the log twice, so its second place also contradicts nothing else."""
    history = History().txn(1, (0, 10, 0)).poll(9, 0, (0, 10), (1, 10), final=True)
    assert history.found() == {"duplicate": 1}


def test_an_offset_with_two_values_is_found() -> None:
    history = (
        History().txn(1, (0, 10, 0), (0, 11, 1)).poll(8, 0, (0, 10), (1, 11)).poll(9, 0, (0, 11))
    )
    assert history.found() == {"duplicate": 1, "inconsistent": 1}


def test_an_acknowledgement_at_another_offset_is_found() -> None:
    history = History().txn(1, (0, 10, 3)).poll(9, 0, (5, 10))
    assert history.found() == {"inconsistent": 1}


def test_an_aborted_record_keeps_its_offset() -> None:
    """An acknowledged record is durable, also if its transaction is aborted later."""
    history = (
        History().txn(1, (0, 10, 0), outcome=FAIL).add(2, SEND, sends=[Sent(0, 20, 0)])
    ).poll(9, 0, (0, 20))
    assert history.found() == {"inconsistent": 1}


def test_a_phantom_is_found() -> None:
    history = History().txn(1, (0, 10, 0)).poll(9, 0, (0, 10), (1, 99)).poll(9, 1, (0, 10))
    assert history.found() == {"phantom": 2}


def test_an_aborted_read_is_found() -> None:
    history = History().txn(1, (0, 10, 0), outcome=FAIL).poll(9, 0, (0, 10))
    assert history.found() == {"G1a": 1}


def test_an_aborted_read_of_an_aborted_transaction_is_found() -> None:
    """Polls return committed records only, whatever becomes of the transaction around them."""
    history = (
        History().txn(1, (0, 10, 0), outcome=FAIL).txn(2, outcome=FAIL, polls=[polled(0, (0, 10))])
    )
    assert history.found() == {"G1a": 1}


def test_an_aborted_read_does_not_make_its_transaction_happen() -> None:
    history = History().txn(1, (0, 10, 0), (1, 11, 0), outcome=FAIL).poll(9, 0, (0, 10))
    assert history.found() == {"G1a": 1}


def test_a_read_of_an_own_write_is_found() -> None:
    history = History().txn(1, (0, 10, 0), polls=[polled(0, (0, 10))])
    assert history.found() == {"precommitted": 1}


def test_two_transactions_that_read_each_other_are_found() -> None:
    history = (
        History()
        .txn(1, (0, 10, 0), at=0.0, lasts=9.0, polls=[polled(1, (0, 20))])
        .txn(2, (1, 20, 0), at=0.0, lasts=9.0, polls=[polled(0, (0, 10))])
    )
    assert history.found() == {"G1c": 1}


def test_a_circle_of_three_transactions_is_found() -> None:
    history = History()
    for number in range(3):
        read = polled((number + 1) % 3, (0, (number + 1) % 3))
        history.txn(number, (number, number, 0), at=0.0, lasts=9.0, polls=[read])
    assert history.found() == {"G1c": 1}


def test_a_read_of_a_later_transaction_is_found() -> None:
    """The reader ended before the writer began."""
    history = History().txn(1, (1, 10, 0), polls=[polled(0, (0, 20))]).txn(2, (0, 20, 0))
    assert history.poll(9, 1, (0, 10)).found() == {"G1c": 1}


def test_a_circle_through_a_process_is_found() -> None:
    """A transaction of unknown outcome has ended when its process begins the next one."""
    history = (
        History()
        .txn(1, (2, 10, 0), outcome=INFO, at=0.0, lasts=NEVER, polls=[polled(1, (0, 30))])
        .txn(1, (0, 20, 0), at=1.0, lasts=9.0)
        .txn(2, (1, 30, 0), at=0.0, lasts=9.0, polls=[polled(0, (0, 20))])
    )
    assert history.poll(9, 2, (0, 10)).found() == {"G1c": 1}


def test_a_skipping_consumer_is_found() -> None:
    history = (
        History()
        .txn(1, (0, 10, 0), (0, 11, 1), (0, 12, 2))
        .assign(9, k0=0)
        .poll(9, 0, (0, 10))
        .poll(9, 0, (2, 12))
        .poll(8, 0, (0, 10), (1, 11), (2, 12))
    )
    assert history.found() == {"poll skip": 1}


def test_a_consumer_that_skips_within_a_poll_is_found() -> None:
    history = (
        History().txn(1, (0, 10, 0), (0, 11, 1), (0, 12, 2)).poll(8, 0, (0, 10), (2, 12))
    ).poll(9, 0, (0, 10), (1, 11), (2, 12))
    assert history.found() == {"poll skip": 1}


def test_a_consumer_that_begins_too_late_is_found() -> None:
    history = (History().txn(1, (0, 10, 4), (0, 11, 5)).assign(9, k0=3).poll(9, 0, (5, 11))).poll(
        8, 0, (4, 10), (5, 11)
    )
    assert history.found() == {"poll skip": 1}


def test_a_consumer_that_goes_back_is_found() -> None:
    history = (
        History()
        .txn(1, (0, 10, 0), (0, 11, 1))
        .assign(9, k0=0)
        .poll(9, 0, (0, 10), (1, 11))
        .poll(9, 0, (1, 11))
    )
    assert history.found() == {"nonmonotonic poll": 1}


def test_a_consumer_that_begins_too_early_is_found() -> None:
    history = History().txn(1, (0, 10, 0), (0, 11, 1)).assign(9, k0=1)
    assert history.poll(9, 0, (0, 10), (1, 11)).found() == {"nonmonotonic poll": 1}


def test_sends_of_a_transaction_in_another_order_are_found() -> None:
    history = History().txn(1, (0, 10, 1), (0, 11, 0)).poll(9, 0, (0, 11), (1, 10))
    assert history.found() == {"nonmonotonic send": 1}


def test_sends_of_a_process_in_another_order_are_found() -> None:
    """The place of a record without an acknowledgement is known from a read."""
    history = (
        History()
        .add(1, SEND, INFO, sends=[Sent(0, 10)])
        .add(1, SEND, sends=[Sent(0, 11, 0)])
        .poll(9, 0, (0, 11), (1, 10))
    )
    assert history.found() == {"nonmonotonic send": 1}


def test_every_anomaly_has_a_test() -> None:
    text = "".join(each.read_text() for each in Path(__file__).parent.glob("test_*.py"))
    assert [each for each in ANOMALIES if f'{{"{each}":' not in text] == []


# -- its parts -------------------------------------------------------------------------------------


def test_examples_are_bounded_and_counts_are_not() -> None:
    history = History()
    for value in range(20):
        history.txn(1, (0, value, value), outcome=FAIL)
    verdict = check(history.poll(9, 0, *((value, value) for value in range(20))).operations)
    assert verdict.counts["G1a"] == 20
    assert len(verdict.examples) == 5
    assert verdict.examples[0].startswith("G1a: key 0: 0 at 0, of fail txn 0 of process 1")


def test_totals_count_operations_and_records() -> None:
    history = (History().assign(9, k0=0).txn(1, (0, 10, 0), (1, 11, 0)).txn(2, outcome=FAIL)).poll(
        9, 0, (0, 10)
    )
    assert check(history.operations).totals == {
        "assign ok": 1, "operations": 3, "poll ok": 1, "records polled": 1, "records sent": 2,
        "txn fail": 1, "txn ok": 1,
    }  # fmt: skip


def test_a_history_survives_its_file() -> None:
    history = (
        History()
        .assign(9, k0=5)
        .txn(1, (0, 10, 0), outcome=INFO, lasts=NEVER, note="hasty commit")
        .poll(9, 0, (7, 10), final=True)
        .commit(8, 2)
    )
    assert load(dump(history.operations)) == history.operations


@pytest.mark.parametrize(
    ("edges", "groups"),
    [
        ({}, []),
        ({1: [2], 2: [3]}, []),
        ({1: [1]}, []),
        ({1: [2], 2: [1]}, [[1, 2]]),
        ({1: [2], 2: [3], 3: [1], 4: [1], 5: [6], 6: [5, 1]}, [[1, 2, 3], [5, 6]]),
        ({1: [2, 3], 2: [4], 3: [4], 4: []}, []),
    ],
)
def test_circles(edges: dict[int, list[int]], groups: list[list[int]]) -> None:
    assert sorted(cyclic_groups(edges)) == groups


def test_a_long_chain_needs_no_recursion() -> None:
    edges = {node: [node + 1] for node in range(50_000)}
    assert cyclic_groups(edges) == []
    edges[50_000] = [0]
    assert [len(group) for group in cyclic_groups(edges)] == [50_001]
