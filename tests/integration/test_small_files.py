"""A quiet topic ends with few files: the tier process merges them without Spark."""

from __future__ import annotations

from pathlib import Path

from deltalake import DeltaTable

from pk import AdminClient, Consumer, Producer, TopicPartition
from pk.cli.embedded import EmbeddedServer
from pk.client.maintenance_lease import MaintenanceLease
from pk.clock import block_s, monotonic_s
from pk.tiering import layout, merge_plan

CHUNKS = 20


def until(what: str, holds) -> None:
    deadline = monotonic_s() + 90
    while not holds():
        assert monotonic_s() < deadline, what
        block_s(0.2)


def names(admin: AdminClient) -> list[layout.DataName]:
    files = DeltaTable(admin.describe_tier("quiet").uri).get_add_actions(flatten=True)
    found = [layout.parse_data_path(path) for path in files.column("path").to_pylist()]
    return sorted(name for name in found if name is not None)


def test_a_quiet_topic_ends_with_few_files(tmp_path: Path) -> None:
    """Same rows, one exact commit, and none while a job holds the lease of the table."""
    tier = tmp_path / "tier"
    tier.mkdir()
    settings = {"tier_merge_interval_ms": 500}
    with (
        EmbeddedServer(tmp_path, tier_url=tier.as_uri(), settings=settings) as server,
        AdminClient(server.address) as admin,
    ):
        admin.create_topic("quiet", 1, {"tier_max_lag_ms": 50, "retention_ms": -1})

        def tiered() -> bool:
            return admin.describe_tier("quiet").partitions[0].lag == 0

        with MaintenanceLease(server.address, "quiet", "a-job"), Producer(server.address) as out:
            for chunk in range(CHUNKS):
                for n in range(10):
                    out.send("quiet", value=b"%d" % (10 * chunk + n))
                out.flush(60)
                until("the chunk is tiered", tiered)
            apart = names(admin)
            assert len(apart) == CHUNKS
        until("files are merged", lambda: len(names(admin)) < CHUNKS)
        left = names(admin)
        merged = [each for each in left if merge_plan.generation_of(each.attempt) == 1]
        assert len(left) == CHUNKS - merge_plan.RUN_FILES + 1
        assert [(each.start, each.end) for each in merged] == [
            (apart[0].start, apart[merge_plan.RUN_FILES - 1].end)
        ]
        assert sum(each.row_sum for each in left) % layout.SUM_MODULUS == (
            admin.describe_tier("quiet").partitions[0].sum
        )
        with Consumer(server.address, auto_offset_reset="earliest") as consumer:
            consumer.assign([TopicPartition("quiet", 0)])
            found: list[bytes | None] = []
            until(
                "all is read",
                lambda: found.extend(r.value for r in consumer.poll(1.0)) or len(found) == 200,
            )
        assert found == [b"%d" % n for n in range(200)]
