"""Rule T6 on real processes: files that the table names and the store has lost, before local data
may be dropped.

It is one history.  The tier process dies between upload and commit, again and again.  Then files
are lost, and one is cut short, while the local log still has their records.  Then the delay before
dropping ends, and the tier dies in the middle of its repairs.  No record leaves the local log
before the store has it, and in the end the table has each record once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from pk import AdminClient, Consumer, Producer, TopicPartition
from pk.cli.embedded import EmbeddedServer
from pk.clock import block_s, monotonic_s
from pk.tiering.layout import parse_data_path

pytestmark = pytest.mark.integration

PATIENCE_S = 90
TOPIC = "flights"
HOUR_MS = 3_600_000
TOPIC_SETTINGS = {
    "retention_ms": -1,
    "segment_bytes": 32_768,
    "local_retention_bytes": 0,
    "tier_max_lag_ms": 100,
    "tier_file_bytes": 32_768,
    "local_drop_delay_ms": HOUR_MS,
    "file_delete_delay_ms": 0,
}
SERVER_SETTINGS = {
    "log_retention_check_interval_ms": 100,
    "tier_retry_backoff_ms": 50,
}


class History:
    """One node, one topic of one partition, and the records stored in it."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.server = server
        self.values: list[bytes] = []
        self.admin = AdminClient(server.address)
        self.admin.create_topic(TOPIC, 1, TOPIC_SETTINGS)
        self.producer = Producer(server.address, batch_size=8_192)

    def close(self) -> None:
        self.producer.close()
        self.admin.close()

    def produce(self, count: int) -> None:
        futures = []
        for _ in range(count):
            self.values.append(b"%06d" % len(self.values) + bytes(400))
            futures.append(self.producer.send(TOPIC, self.values[-1], partition=0))
        for future in futures:
            future.result(PATIENCE_S)

    def until(self, holds: Callable[[], Any]) -> Any:
        deadline = monotonic_s() + PATIENCE_S
        while not (answer := holds()):
            assert monotonic_s() < deadline, self.server.tail()
            block_s(0.02)
        return answer

    def state(self) -> Any:
        (found,) = self.admin.describe_topics([TOPIC])
        return found

    def home(self) -> Path:
        """Return where the table is, once there is one."""
        uri = self.until(lambda: self.admin.describe_tier(TOPIC).uri)
        return Path(unquote(urlsplit(uri).path))

    def table(self) -> DeltaTable:
        return DeltaTable(str(self.home()))

    def named(self) -> dict[str, int]:
        """Return the files that the table names, with their sizes."""
        adds = pa.table(self.table().get_add_actions(flatten=True))
        return dict(zip(adds["path"].to_pylist(), adds["size_bytes"].to_pylist(), strict=True))

    def stored(self) -> set[str]:
        """Return the data files in the store."""
        home = self.home()
        found = home.glob("partition=*/*.parquet")
        return {str(path.relative_to(home)) for path in found if not path.name.startswith(".")}

    def kill_tier(self) -> None:
        self.until(lambda: self.server.kill("tier"))

    def tiered(self) -> None:
        self.until(lambda: self.state().tiered_end == len(self.values))

    def rows(self) -> list[tuple[int, bytes]]:
        found = self.table().to_pyarrow_table(columns=["offset", "value"]).sort_by("offset")
        return list(zip(found["offset"].to_pylist(), found["value"].to_pylist(), strict=True))

    def read(self) -> list[bytes | None]:
        place = TopicPartition(TOPIC, 0)
        found: list[bytes | None] = []
        with Consumer(self.server.address, auto_offset_reset="earliest") as consumer:
            consumer.assign([place])
            deadline = monotonic_s() + PATIENCE_S
            while len(found) < len(self.values):
                assert monotonic_s() < deadline, self.server.tail()
                for _, rows in consumer.poll_batches(0.5):
                    found += rows.column("value").to_pylist()
        return found


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    server = EmbeddedServer(
        tmp_path / "pk", tier_url=(tmp_path / "tier").as_uri(), settings=SERVER_SETTINGS
    )
    with server:
        made = History(server)
        try:
            yield made
        finally:
            made.close()
    assert "BUG" not in server.log.read_text(), server.tail()


def test_what_the_store_lost_is_uploaded_again_before_it_leaves_the_local_log(
    history: History,
) -> None:
    history.produce(300)
    history.tiered()
    for _ in range(3):  # uploaded, not committed: of no use to anybody afterwards
        orphans: set[str] = set()
        while not orphans:
            history.tiered()
            before = history.stored()
            history.produce(200)
            history.until(lambda before=before: history.stored() - before)
            history.kill_tier()
            orphans = history.stored() - set(history.named())
    history.tiered()
    files = history.named()
    assert len(files) > 6
    assert history.stored() - set(files), "a kill between upload and commit"
    assert history.state().local_log_start == 0

    deleted, cut, other = itertools.islice(files, 1, 4)
    for lost in (deleted, other):
        (history.home() / lost).unlink()
    with (history.home() / cut).open("r+b") as out:
        out.truncate(files[cut] // 2)
    history.admin.alter_configs(TOPIC, {"local_drop_delay_ms": 0})
    problem = history.until(lambda: history.admin.describe_tier(TOPIC).problem)
    assert any(lost in problem.message for lost in (deleted, cut, other))

    known = history.stored()
    history.until(lambda: history.stored() - known)  # its first repair is uploaded
    history.kill_tier()

    def dropped() -> bool:
        """Check that no record has left the local log that the store does not have (T6)."""
        start, home = history.state().local_log_start, history.home()
        for path, size in history.named().items():
            name, file = parse_data_path(path), home / path
            assert name is not None
            whole = file.exists() and file.stat().st_size == size
            assert whole or name.start >= start, f"{path} is lost, the local log begins at {start}"
        return bool(start >= max(ends))

    ends = [name.end for path in (deleted, cut, other) if (name := parse_data_path(path))]
    history.until(dropped)
    history.until(lambda: history.admin.describe_tier(TOPIC).problem is None)
    assert not {deleted, cut, other} & set(history.named())
    history.produce(50)
    history.tiered()
    assert history.rows() == list(enumerate(history.values))
    assert history.read() == history.values
    (partition,) = history.admin.describe_tier(TOPIC).partitions
    assert (partition.end, partition.rows) == (len(history.values), len(history.values))
