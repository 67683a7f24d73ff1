"""Rule T10 on real processes: bits of data files flip, and files are lost.

The long form is in `make abuse`; the helpers of tests/abuse/tier_files.py are used here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "abuse"))

import tier_files

from pk import AdminClient, Consumer, Producer, TopicPartition, errors
from pk.cli.embedded import EmbeddedServer
from pk.cli.tier import as_object, show
from pk.clock import block_s, monotonic_s
from pk.tiering.layout import parse_data_path

pytestmark = pytest.mark.integration

PATIENCE_S = 60
TOPIC = "flights"
PLACE = TopicPartition(TOPIC, 0)
#: Everything below the active segment leaves the local log at once.
COLD = {
    "retention_ms": -1,
    "segment_bytes": 32_768,
    "local_retention_bytes": 0,
    "tier_max_lag_ms": 100,
    "tier_file_bytes": 24_576,
    "local_drop_delay_ms": 0,
    "file_delete_delay_ms": 0,
}


def until(server: EmbeddedServer, holds: Callable[[], Any]) -> Any:
    deadline = monotonic_s() + PATIENCE_S
    while not (answer := holds()):
        assert monotonic_s() < deadline, server.tail()
        block_s(0.05)
    return answer


def fill(server: EmbeddedServer, count: int) -> None:
    with Producer(server.address, batch_size=8_192) as producer:
        for n in range(count):
            producer.send(TOPIC, b"%06d" % n + bytes(200), partition=0)
        producer.flush(PATIENCE_S)


def values(server: EmbeddedServer, start: int, end: int) -> list[bytes]:
    found: list[bytes] = []
    with Consumer(server.address) as consumer:
        consumer.assign([PLACE])
        consumer.seek(PLACE, start)
        deadline = monotonic_s() + PATIENCE_S
        while len(found) < end - start:
            assert monotonic_s() < deadline, server.tail()
            for _, rows in consumer.poll_batches(0.5):
                found += rows.column("value").to_pylist()
    return found


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "tier").mkdir()
    return tmp_path


def serve(place: Path) -> EmbeddedServer:
    settings = {"log_retention_check_interval_ms": 100, "tier_retry_backoff_ms": 50}
    return EmbeddedServer(place / "pk", tier_url=(place / "tier").as_uri(), settings=settings)


def test_flipped_bits_and_a_lost_file_never_give_other_rows(tmp_path: Path) -> None:
    for verdict in tier_files.run(1, tmp_path, short=True):
        assert verdict.kept, verdict


def test_a_store_that_cannot_be_written_serves_cold_reads(place: Path) -> None:
    """Rule T14: the probe of put-if-absent fails at the start; reads do not need it."""
    with serve(place) as server, AdminClient(server.address) as admin:
        admin.create_topic(TOPIC, 1, COLD)
        fill(server, 1_000)
        until(server, lambda: admin.describe_topics([TOPIC])[0].local_log_start > 500)
    (place / "tier" / "_pk_probe").write_text("in the way: nothing can be probed")
    with serve(place) as server, AdminClient(server.address) as admin:
        problem = until(server, lambda: admin.describe_tier(TOPIC).problem)
        assert isinstance(problem, errors.PkError)
        found = values(server, 0, 1_000)
        assert [value[:6] for value in found] == [b"%06d" % n for n in range(1_000)]
        times = admin.offsets(TOPIC, 0)
        assert min(times.values()) == 0


def test_a_damaged_file_is_described_and_comes_back_from_the_local_log(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Spark executors report the damaged file; the local log has its records, too."""
    from pk.sparkconnector.connection import cluster

    with serve(place) as server, AdminClient(server.address) as admin:
        admin.create_topic(TOPIC, 1, {**COLD, "local_retention_bytes": -2})
        fill(server, 1_000)
        until(server, lambda: admin.describe_topics([TOPIC])[0].tiered_end == 1_000)
        home = Path(unquote(urlsplit(admin.describe_tier(TOPIC).uri).path))
        damaged = sorted(home.glob("partition=0/*.parquet"))[1]
        tier_files.flip(damaged, 8 * (damaged.stat().st_size - 40))
        relative = f"partition=0/{damaged.name}"
        name = parse_data_path(relative)
        assert name is not None
        line = cluster(server.address)
        assert line.tier(TOPIC, [relative, "no such file"]).uri
        repaired = until(server, lambda: _replacement(admin, home, relative))
        assert (repaired.start, repaired.end, repaired.row_sum) == (*name[1:3], name.row_sum)
        show(admin.describe_tier(TOPIC))
        assert "status: ok" in capsys.readouterr().out


def _replacement(admin: AdminClient, home: Path, damaged: str) -> Any:
    """Return the name of the file that the table has in place of `damaged`."""
    from deltalake import DeltaTable

    old = parse_data_path(damaged)
    assert old is not None
    described = admin.describe_tier(TOPIC)
    assert as_object(described)["damaged"] == [
        {"partition": 0, "start": old.start, "end": old.end, "path": damaged,
         "problem": as_object(described)["damaged"][0]["problem"]}
        for _ in described.damaged
    ]  # fmt: skip
    names = [parse_data_path(path[len(str(home)) + 1 :]) for path in _paths(DeltaTable(str(home)))]
    found = [each for each in names if each is not None and each.start == old.start]
    return found[0] if found and found[0] != old and described.status == "ok" else None


def _paths(table: Any) -> list[str]:
    return [unquote(urlsplit(uri).path) for uri in table.file_uris()]
