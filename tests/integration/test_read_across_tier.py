"""A reader from offset 0 reads across tier and local log while local retention drops segments.

Real processes, a running producer, small segments: every record is read once, in order (rules T1,
T6, T10).
"""

from __future__ import annotations

import threading
import time
from operator import gt
from pathlib import Path

import pytest

from pk import AdminClient, Consumer, Producer, TopicPartition
from pk.cli.embedded import EmbeddedServer

pytestmark = pytest.mark.integration

PARTITIONS = 2
PATIENCE_S = 60
PAD = bytes(2_000)
CONFIGS = {
    "segment_bytes": 200_000,
    "local_retention_bytes": 400_000,
    "local_drop_delay_ms": 100,
    "file_delete_delay_ms": 100,
    "tier_max_lag_ms": 200,
    "retention_ms": -1,
    "retention_bytes": -1,
}


def value(partition: int, number: int) -> bytes:
    return b"%d:%08d:" % (partition, number) + PAD


class Writer(threading.Thread):
    """Produces until it is stopped; `counts` = acknowledged records of each partition."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = address
        self.counts = [0] * PARTITIONS
        self.enough = threading.Event()
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            with Producer(self.address, compression="none") as producer:
                while not self.enough.is_set():
                    for partition in range(PARTITIONS):
                        first = self.counts[partition]
                        futures = [
                            producer.send("t", value(partition, n), partition=partition)
                            for n in range(first, first + 50)
                        ]
                        assert [f.result(30).offset for f in futures] == list(
                            range(first, first + 50)
                        )
                        self.counts[partition] += 50
                    self.enough.wait(0.05)
        except BaseException as failure:
            self.failure = failure


def local_starts(admin: AdminClient) -> list[int]:
    return [info.local_log_start for info in admin.describe_topics(["t"])]


def test_every_record_once_in_order_while_segments_go(tmp_path: Path) -> None:
    settings = {"log_retention_check_interval_ms": 200}
    server = EmbeddedServer(
        tmp_path / "pk", tier_url=(tmp_path / "tier").as_uri(), settings=settings
    )
    with server, AdminClient(server.address) as admin:
        admin.create_topic("t", partitions=PARTITIONS, configs=CONFIGS)
        writer = Writer(server.address)
        writer.start()
        try:
            deadline = time.monotonic() + PATIENCE_S
            while min(local_starts(admin)) < 200:  # the reader begins in the tier
                assert writer.failure is None, writer.failure
                assert time.monotonic() < deadline, (local_starts(admin), server.tail())
                time.sleep(0.1)
            began = local_starts(admin)
            moved: list[list[int]] = []
            positions = [0] * PARTITIONS
            with Consumer(
                server.address, auto_offset_reset="earliest", max_poll_records=100
            ) as consumer:
                consumer.assign([TopicPartition("t", n) for n in range(PARTITIONS)])
                while True:
                    assert writer.failure is None, writer.failure
                    assert time.monotonic() < deadline + PATIENCE_S, (positions, writer.counts)
                    for record in consumer.poll(1):
                        assert record.offset == positions[record.partition]
                        assert record.value == value(record.partition, record.offset)
                        positions[record.partition] += 1
                    if not writer.enough.is_set():
                        moved.append(local_starts(admin))
                        gone = all(map(gt, moved[-1], began))
                        if gone and all(map(gt, positions, moved[-1])):
                            # it read from the tier, then from the log; segments were dropped
                            # meanwhile
                            writer.enough.set()
                            writer.join()
                    elif positions == writer.counts:
                        break
                assert consumer.poll(0.5) == []
        finally:
            writer.enough.set()
            writer.join()
        assert writer.failure is None, writer.failure
        assert all(info.log_start == 0 for info in admin.describe_topics(["t"]))
    text = server.log.read_text()
    assert "BUG" not in text, text
    assert "invariant_violated" not in text, text
