"""Who is in sync: lag is time, joining needs every record, and an earlier life of a replica does
not count.
"""

from __future__ import annotations

from typing import Any

from pk.server.replica.isr import InSync
from pk.server.replica.leader import Leader

LAG_MS = 1_000


def wanted(known: InSync, isr: tuple[int, ...], **given: Any) -> tuple[int, ...]:
    asked: dict[str, Any] = {
        "log_end": 10, "high_watermark": 10, "epoch_start": 0, "log_start": 0,
        "eligible": {2: 20, 3: 30}, "now_ms": 0, "lag_max_ms": LAG_MS,
    }  # fmt: skip
    return known.wanted(isr, (1, 2, 3), 1, **{**asked, **given})


def test_a_member_has_the_whole_lag_from_the_beginning_of_the_epoch() -> None:
    known = InSync((1, 2, 3), 10, now_ms=500)
    assert wanted(known, (1, 2, 3), now_ms=1_500) == (1, 2, 3)
    assert wanted(known, (1, 2, 3), now_ms=1_501) == (1,)


def test_a_follower_always_one_batch_behind_is_in_sync() -> None:
    """replica/isr M1: at each confirmation it had what the leader had at the confirmation
    before.
    """
    known = InSync((1, 2), 0, now_ms=0)
    for turn in range(1, 30):
        known.fetched(2, 10 * (turn - 1), 10 * turn, now_ms=300 * turn, broker_epoch=20)
        assert wanted(known, (1, 2), log_end=10 * turn, now_ms=300 * turn) == (1, 2)
    assert wanted(known, (1, 2), log_end=290, now_ms=300 * 28 + LAG_MS) == (1, 2)
    assert wanted(known, (1, 2), log_end=290, now_ms=300 * 28 + LAG_MS + 1) == (1,)


def test_a_follower_that_has_everything_may_be_silent() -> None:
    known = InSync((1, 2), 0, now_ms=0)
    known.fetched(2, 10, 10, now_ms=0, broker_epoch=20)
    assert wanted(known, (1, 2), now_ms=10**9) == (1, 2)


def test_a_member_of_an_idle_partition_has_the_whole_lag_from_the_next_append() -> None:
    """replica/isr M1: it was not behind before, although its last confirmation is long ago."""
    known = InSync((1, 2, 3), 0, now_ms=0)
    known.fetched(2, 10, 10, now_ms=0, broker_epoch=20)
    known.fetched(3, 9, 10, now_ms=0, broker_epoch=30)
    known.leader_appends(10, now_ms=50_000)
    assert wanted(known, (1, 2), log_end=11, now_ms=50_000 + LAG_MS) == (1, 2)
    known.leader_appends(11, now_ms=50_500)
    assert wanted(known, (1, 2), log_end=12, now_ms=50_001 + LAG_MS) == (1,)
    assert wanted(known, (1, 3), log_end=11, now_ms=50_000, eligible={}) == (1,), "it was behind"


def test_joining_needs_the_watermark_and_the_epochs_beginning() -> None:
    # replica/isr M2
    known = InSync((1,), 10, now_ms=0)
    assert wanted(known, (1,)) == (1,), "nothing was heard of it"
    known.fetched(2, 9, 10, now_ms=0, broker_epoch=20)
    assert wanted(known, (1,)) == (1,)
    assert wanted(known, (1,), high_watermark=9) == (1, 2)
    assert wanted(known, (1,), high_watermark=5, epoch_start=10) == (1,)
    known.fetched(2, 10, 10, now_ms=0, broker_epoch=20)
    assert wanted(known, (1,), epoch_start=10) == (1, 2)


def test_joining_needs_to_know_what_was_deleted() -> None:
    """replica/isr M2, rule T9: otherwise deleted records would come back with the next leader."""
    known = InSync((1,), 10, now_ms=0)
    known.fetched(2, 10, 10, now_ms=0, broker_epoch=20, log_start=4)
    assert wanted(known, (1,), log_start=5) == (1,)
    known.fetched(2, 10, 10, now_ms=0, broker_epoch=20, log_start=5)
    assert wanted(known, (1,), log_start=5) == (1, 2)


def test_the_low_watermark_is_that_of_all_who_may_lead_next() -> None:
    one = leader()
    one.on_follower_end(2, 10, 0, 20, log_start=3)
    assert one.low_watermark(7) == 3
    one.on_follower_end(2, 10, 0, 20, log_start=8)
    assert one.low_watermark(7) == 7
    one.on_isr_proposed((1, 2, 3))
    assert one.low_watermark(7) == 0
    one.on_config(3, False)
    assert one.low_watermark(7) == -1, "an eligible replica outside the ISR may lead next"


def test_joining_needs_the_registration_that_fetched() -> None:
    # replica/isr M3 (KIP-903)
    known = InSync((1,), 10, now_ms=0)
    known.fetched(2, 10, 10, now_ms=0, broker_epoch=19)
    assert wanted(known, (1,)) == (1,)
    known.fetched(2, 10, 10, now_ms=0, broker_epoch=20)
    assert wanted(known, (1,), eligible={3: 30}) == (1,), "fenced, or leaving"
    assert wanted(known, (1,)) == (1, 2)


def test_a_new_life_is_not_caught_up_by_what_the_old_one_had() -> None:
    known = InSync((1, 2), 10, now_ms=0)
    known.fetched(2, 10, 10, now_ms=0, broker_epoch=20)
    known.fetched(2, 0, 50, now_ms=2_000, broker_epoch=21)
    known.fetched(2, 20, 60, now_ms=2_001, broker_epoch=21)
    assert wanted(known, (1, 2), log_end=60, now_ms=2_001) == (1,)


def leader() -> Leader:
    return Leader(
        node_id=1, leader_epoch=5, partition_epoch=0, replicas=(1, 2, 3), isr=(1, 2), log_end=10,
        synced_end=10, high_watermark=0, min_insync_replicas=1, flush_on_ack=False, now_ms=0,
    )  # fmt: skip


def test_one_wish_at_a_time_and_a_refused_one_lets_go() -> None:
    # rule R2
    one = leader()
    one.on_follower_end(2, 10, 0, 20)
    one.on_follower_end(3, 10, 0, 30)
    assert one.wanted_isr({2: 20, 3: 30}, 0, LAG_MS) == (1, 2, 3)
    one.on_isr_proposed((1, 2, 3))
    assert one.wanted_isr({2: 20, 3: 30}, 0, LAG_MS) is None
    one.on_local_end(20, 20)
    one.on_follower_end(2, 20, 0, 20)
    assert one.high_watermark == 10, "held by who may have joined"
    assert not one.on_isr_refused((1, 3)), "of another wish"
    assert one.on_isr_refused((1, 2, 3))
    assert one.high_watermark == 20


def test_who_may_have_been_no_replica_for_a_moment_is_compared_anew() -> None:
    """replica/isr M4: a reassignment is cancelled and begun again; the leader learns of both at
    once, and the replica deleted its log in between.
    """
    eligible = {2: 20, 3: 30}
    for partition_epoch, joins in ((1, True), (2, False)):
        one = leader()
        one.on_follower_end(2, 10, 0, 20)
        one.on_follower_end(3, 10, 0, 30)
        one.on_isr_committed((1, 2), (1, 2, 3), partition_epoch, 0)
        assert (one.wanted_isr(eligible, 0, LAG_MS) == (1, 2, 3)) == joins
        assert one.end_of(2) == 10, "no member leaves and comes back without being asked for"
        one.on_follower_end(3, 10, 0, 30)
        assert one.wanted_isr(eligible, 0, LAG_MS) == (1, 2, 3)


def test_a_removal_counts_only_once_it_is_committed() -> None:
    # rule R2
    one = leader()
    one.on_isr_proposed((1,))
    assert not one.on_local_end(20, 20)
    assert one.on_isr_committed((1,), (1, 2, 3), 1, 0)
    assert one.high_watermark == 20


def test_who_joined_without_being_asked_for_has_the_whole_lag() -> None:
    one = leader()
    one.on_isr_committed((1, 2, 3), (1, 2, 3), 1, 5_000)
    one.on_follower_end(2, 10, 5_000, 20)
    assert one.wanted_isr({2: 20}, 5_900, LAG_MS) is None
    assert one.wanted_isr({2: 20}, 6_100, LAG_MS) == (1, 2)


def test_an_undone_write_is_not_waited_for() -> None:
    one = leader()
    one.on_follower_end(2, 8, 0, 20)
    assert not one.ready
    one.on_undone(8)
    assert one.ready


def test_a_member_whose_disk_is_full_leaves_at_once_if_enough_stay() -> None:
    """replica/isr M1, L16: records that it cannot store would hold back every acknowledgement."""
    known = InSync((1, 2, 3), 0, now_ms=0)
    for member, epoch in ((2, 20), (3, 30)):
        known.fetched(member, 10, 10, now_ms=0, broker_epoch=epoch)
    known.storage_full(2)
    assert wanted(known, (1, 2, 3)) == (1, 2, 3), "it has everything"
    assert wanted(known, (1, 2, 3), log_end=11, required=2) == (1, 3)
    assert wanted(known, (1, 2, 3), log_end=11, required=3) == (1, 2, 3)
    known.fetched(2, 10, 11, now_ms=5, broker_epoch=20)
    assert wanted(known, (1, 2, 3), log_end=11, required=2) == (1, 3), "it asks again, no more"
    assert wanted(known, (1, 3), log_end=11, required=2) == (1, 3), "nor does it join so"
    known.fetched(2, 11, 12, now_ms=5, broker_epoch=20)
    assert wanted(known, (1, 2, 3), log_end=12, required=2) == (1, 2, 3), "it stores again"
    assert wanted(known, (1, 3), log_end=12, required=2) == (1, 2, 3)


def test_who_left_and_was_forgotten_is_not_taken_for_full() -> None:
    known = InSync((1, 2), 0, now_ms=0)
    known.storage_full(2)
    known.forget(2)
    known.fetched(2, 10, 11, now_ms=0, broker_epoch=20)
    assert wanted(known, (1,), log_end=11) == (1, 2)
