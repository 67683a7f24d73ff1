"""Rule L16 on real processes: disks that are file systems of their own, filled completely.

Times are verdicts of `make abuse` (tests/abuse/full_disk.py), which runs the same history.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_disks import CannotMount, SmallDisk, small_disk

from pk import AdminClient, Consumer, Producer, TopicPartition, errors
from pk.cli.embedded import EmbeddedServer

pytestmark = pytest.mark.integration

sys.path.insert(0, str(Path(__file__).parent.parent / "abuse"))
full_disk = importlib.import_module("full_disk")

PLACE = TopicPartition("t", 0)
VALUE = bytes(500)


def cannot(why: object) -> None:
    """Skip the test; in CI fail instead, because a skip would hide that nothing is shown."""
    assert not os.environ.get("CI"), f"tmpfs cannot be mounted: {why}"
    pytest.skip(f"a disk that can be filled needs the right to mount (run as root): {why}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    try:
        with small_disk(tmp_path / "node" / "data", 64) as made:
            yield made
    except CannotMount as why:
        cannot(why)


def test_leaders_on_a_full_disk_hand_over_and_others_do_not_wait(tmp_path: Path) -> None:
    try:
        facts = full_disk.tell(tmp_path, short=True)
    except CannotMount as why:
        cannot(why)
        return
    assert facts.moved == {"at the reserve": True, "full": True}
    assert facts.refused_waited, "the partition with no other replica"
    assert facts.resumed
    assert facts.controller_moved_s is not None
    assert facts.failed == []
    assert facts.lost == 0
    assert facts.bugs == []
    assert facts.read_while_full
    assert "StorageFull" in facts.refusal or "free space" in facts.refusal, facts.refusal


def test_a_node_killed_while_its_disk_is_full_starts_reads_and_refuses(disk: SmallDisk) -> None:
    """No byte is free, twice in a row; the node serves again by itself once there is room."""
    with EmbeddedServer(disk.place.parent, settings={"disk_reserve_bytes": 8 << 20}) as server:
        address = server.address
        with AdminClient(address) as admin, Producer(address) as producer:
            admin.create_topic("t", 1, {})
            for _ in range(20):
                producer.send("t", VALUE, partition=0).result(60)
        disk.fill()
        for _ in range(2):
            pids = server.pids()
            server.kill("supervisor")
            server.wait_gone(pids)
            server.stop()
            server.start()
            with Consumer(server.address) as consumer:
                consumer.assign([PLACE])
                consumer.seek_to_beginning(PLACE)
                found = 0
                while found < 20:
                    found += len(consumer.poll(1.0))
            with (
                Producer(
                    server.address, delivery_timeout_ms=2_500, request_timeout_ms=1_000, linger_ms=0
                ) as producer,
                pytest.raises(errors.DeliveryTimedOut, match="disk_reserve_bytes"),
            ):
                producer.send("t", VALUE, partition=0).result(60)
        disk.make_room()
        with Producer(server.address) as producer:
            assert producer.send("t", VALUE, partition=0).result(60).offset == 20
        assert "BUG" not in server.log.read_text()
