"""Batches that wait for a Delta table, on real processes: what the resolver and operators do (X11).

The tests play the driver.  It dies after its preparation: before or after its commit to the table.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from real_cluster import until, values

from pk import AdminClient
from pk.cli.embedded import EmbeddedServer
from pk.client.batch_committer import BatchCommitter
from pk.client.participant import BatchOfRun
from pk.client.task_producer import TaskProducer
from pk.wire import pk_pb2 as wire

pytestmark = pytest.mark.integration


class Lake:
    """A server whose resolver may read the tables of a directory, and one topic."""

    def __init__(self, server: EmbeddedServer, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.admin = AdminClient(server.address)
        self.topics = 0

    def topic(self) -> str:
        self.topics += 1
        self.admin.create_topic(f"t{self.topics}", 1, {"tier_enable": False})
        return f"t{self.topics}"

    def table(self, name: str, version: int = 0, app: str = "setup") -> Path:
        properties = CommitProperties(app_transactions=[Transaction(app, version)])
        rows = pa.table({"x": [1]})
        write_deltalake(self.folder / name, rows, mode="append", commit_properties=properties)
        return self.folder / name

    def prepare(self, job: str, topic: str, table: Path, run: str = "r1") -> None:
        """Write a record of batch 0, and prepare it for the table."""
        batch = BatchOfRun(job, "q", run, 0)
        with TaskProducer(self.server.address, batch) as task:
            task.join([topic])
            task.send(topic, run.encode(), partition=0)
            task.flush(60)
            producer_id, epoch = task.finish()
            topic_id = task.topic_id(topic)
        request = wire.PrepareParticipantsRequest(
            batch=batch.to_wire(),
            participants=[wire.Participant(producer_id=producer_id, producer_epoch=epoch)],
            sums=[wire.TopicSums(topic_id=topic_id, rows=1, bytes=2, row_sum=1)],
            table=wire.PreparedTable(
                url=table.as_uri(), table_id=str(DeltaTable(table).metadata().id), app=job
            ),
        )
        with BatchCommitter(self.server.address, batch) as driver:
            driver._run(driver._calls._calls.call(request, 60_000), 60.0)
        assert self.state(job) == "AwaitingTable"
        assert values(self.server.address, topic) == []

    def state(self, job: str) -> Any:
        [found] = self.admin.describe_transactions([job])
        return found.state

    def ends(self, job: str, state: str) -> None:
        until(lambda: self.state(job) == state, f"{job} is not {state}")


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lake]:
    folder = tmp_path_factory.mktemp("lake")
    settings = {"prepared_max_ms": 2_000, "resolver_table_urls": (folder / "lake").as_uri()}
    (folder / "lake").mkdir()
    tier_url = (folder / "tier").as_uri()
    with EmbeddedServer(folder / "pk", tier_url=tier_url, settings=settings) as server:
        found = Lake(server, folder / "lake")
        yield found
        found.admin.close()


def test_the_resolver_commits_a_batch_that_the_table_has(lake: Lake) -> None:
    topic, table = lake.topic(), lake.table("commits")
    lake.prepare("commits", topic, table)
    lake.table("commits", 0, app="commits")
    lake.ends("commits", "CompleteCommit")
    until(lambda: values(lake.server.address, topic) == [b"r1"], "the batch is not visible")


def test_the_resolver_aborts_a_batch_that_the_table_does_not_have(lake: Lake) -> None:
    topic, table = lake.topic(), lake.table("aborts")
    lake.prepare("aborts", topic, table)
    lake.ends("aborts", "CompleteAbort")
    lake.prepare("aborts", topic, table, run="r2")
    lake.table("aborts", 0, app="aborts")
    lake.ends("aborts", "CompleteCommit")
    until(lambda: values(lake.server.address, topic) == [b"r2"], "not only the second attempt")


def test_an_operator_decides_if_the_table_cannot_be_read(lake: Lake) -> None:
    topic, table = lake.topic(), lake.table("lost")
    lake.prepare("lost", topic, table)
    shutil.rmtree(table)
    log = lake.server.log
    until(lambda: "batch_unresolved" in log.read_text(), "the resolver reports nothing")
    assert lake.state("lost") == "AwaitingTable"
    lake.admin.resolve_transaction("lost", commit=True)
    lake.ends("lost", "CompleteCommit")
    until(lambda: values(lake.server.address, topic) == [b"r1"], "the batch is not visible")
