"""The leader epoch that a consumer names for its position (KIP-320)."""

from __future__ import annotations

from pk.types import NONE
from tests.unit.client.test_fetch_engine import T0, Bench, put


def test_a_range_without_rows_leaves_the_epoch_of_the_position_unknown() -> None:
    """Rules R4, L12: a leader change may lie within the range.  The epoch of the last batch is then
    not that of the record before the position.
    """
    b = Bench(nodes=2)
    (log,) = b.cluster.create("t")
    put(b.cluster, T0, [b"0", b"1"])
    b.on_client(b.engine.assign, [T0])
    b.drain_for(300)

    def move() -> None:
        log.leader, log.epoch = 3 - log.leader, log.epoch + 1
        b.grow()
        b.drain_for(1_500)

    move()
    assert b.brokers[2].last_epochs == [log.epoch - 1]
    b.brokers[2].gaps, log.end = {2: 6}, 6
    b.grow()
    b.drain_for(300)
    move()
    assert b.brokers[1].last_epochs == [NONE, NONE]
    put(b.cluster, T0, [b"6"])
    b.grow()
    b.drain_for(300)
    move()
    assert b.brokers[2].last_epochs[1:] == [log.epoch - 1]
    b.close()
    assert b.values() == [b"0", b"1", b"6"]
