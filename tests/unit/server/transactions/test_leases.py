"""Leases of the open transactions of jobs (participants/leases H1 to H3)."""

from __future__ import annotations

from pk.server.transactions.commands import BatchBegan
from pk.server.transactions.participants.leases import Heard, Leases
from pk.server.transactions.state import ProducerPair

WALL = 1_700_000_000_000
TASK, OTHER = ProducerPair(7, 0), ProducerPair(8, 3)


def opened(job: str = "a", transaction: int = 1, started_ms: int = WALL) -> Leases:
    leases = Leases(lease_ms=1_000, longest_ms=5_000)
    leases.began(BatchBegan(job, transaction, started_ms), 0)
    return leases


def test_a_lease_ends_unless_a_task_is_heard() -> None:
    leases = opened()
    assert leases.late(WALL, 1_000) == []
    assert leases.late(WALL, 1_001) == [("a", 1)]
    leases.heard("a", 1, TASK, 900)
    assert leases.late(WALL, 1_900) == []
    assert leases.late(WALL, 1_901) == [("a", 1)]


def test_once_a_task_has_finished_only_the_longest_time_counts() -> None:
    leases = opened()
    leases.heard("a", 1, TASK, 500, finished=True)
    leases.heard("a", 1, TASK, 600)  # another task beats, and the first one stays finished
    assert leases.late(WALL, 5_000) == []
    assert leases.late(WALL, 5_001) == [("a", 1)]


def test_the_longest_time_ends_a_transaction_that_is_heard() -> None:
    leases = opened()
    leases.heard("a", 1, TASK, 4_900)
    assert leases.late(WALL + 5_000, 5_000) == []
    assert leases.late(WALL + 5_001, 4_900) == [("a", 1)]


def test_a_begin_in_the_future_counts_by_the_monotonic_clock() -> None:
    leases = opened(started_ms=WALL + 3_600_000)
    leases.heard("a", 1, TASK, 5_000)
    assert leases.late(WALL, 5_000) == []
    leases.heard("a", 1, TASK, 5_001)
    assert leases.late(WALL, 5_001) == [("a", 1)]


def test_the_next_transaction_has_a_lease_of_its_own() -> None:
    leases = opened()
    leases.heard("a", 1, TASK, 500, finished=True)
    leases.began(BatchBegan("a", 1, WALL), 900)  # said twice: the lease goes on
    assert leases.late(WALL, 1_900) == []
    leases.began(BatchBegan("a", 2, WALL), 2_000)
    leases.heard("a", 1, TASK, 2_900)  # a late heartbeat of the transaction before
    leases.ended("a", 1)
    assert leases.late(WALL, 3_001) == [("a", 2)]
    leases.ended("a", 2)
    assert leases.late(WALL, 99_000) == []


def test_a_coordinator_that_takes_over_gives_a_whole_lease() -> None:
    leases = opened()
    leases.clear()
    assert leases.late(WALL, 5_000) == []
    leases.began(BatchBegan("a", 1, WALL), 5_000)
    assert leases.late(WALL, 6_000) == []
    assert leases.late(WALL, 6_001) == [("a", 1)]


def test_the_last_join_or_heartbeat_of_each_participant_is_known() -> None:
    leases = opened()
    leases.heard("a", 1, TASK, 100)
    leases.heard("a", 1, OTHER, 200, finished=True)
    leases.heard("a", 1, OTHER, 300)  # a heartbeat that was sent before the task finished
    leases.heard("a", 2, ProducerPair(9, 0), 400)  # of another transaction
    assert leases.last_heard("a", TASK) == Heard(100, finished=False)
    assert leases.last_heard("a", OTHER) == Heard(300, finished=True)
    assert leases.last_heard("a", ProducerPair(7, 1)) is None
    assert leases.last_heard("a", ProducerPair(9, 0)) is None
    leases.began(BatchBegan("a", 2, WALL), 500)
    assert leases.last_heard("a", OTHER) is None
    assert leases.last_heard("b", TASK) is None
