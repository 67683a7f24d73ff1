"""The driver's end of a Spark write on a real server (sparkconnector/batch_commit E2)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

pytest.importorskip("pyspark")

from pyspark.sql.types import StringType, StructField, StructType
from real_cluster import values

from pk import AdminClient, Producer, errors
from pk.cli.embedded import EmbeddedServer
from pk.client.batch_committer import BatchCommitter
from pk.sparkconnector import sink_options
from pk.sparkconnector.batch_writer import PkWriter
from pk.sparkconnector.planner import PkWarning

pytestmark = pytest.mark.integration

SCHEMA = StructType([StructField("value", StringType())])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path_factory.mktemp("sink") / "pk") as running:
        yield running


@pytest.fixture
def topic(server: EmbeddedServer, request: pytest.FixtureRequest) -> str:
    """A topic with one record, `old`."""
    name = request.node.name.replace("_", "-")
    with AdminClient(server.address) as admin:
        admin.create_topic(name, partitions=1)
    with Producer(server.address) as producer:
        producer.send(name, b"old").result(60)
    return name


def writer(server: EmbeddedServer, topic: str, *, overwrite: bool) -> PkWriter:
    given = {
        "pk.bootstrap.servers": server.address, "topic": topic,
        "txnAppId": f"app-{topic}", "txnVersion": "1",
    }  # fmt: skip
    if overwrite:
        given["truncateTopic"] = "true"
    return PkWriter(sink_options.sink(given), SCHEMA, overwrite)


def sent(job: PkWriter, text: str) -> list[Any]:
    """Run the write's only task."""
    return [job.write(iter([pa.record_batch({"value": [text]})]))]


@pytest.fixture
def first_answer_lost(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The first commit succeeds, and the client asks again as if it had got no answer."""
    whole = BatchCommitter.commit
    found: list[bool] = []

    def commit(self: BatchCommitter, *given: Any, **named: Any) -> bool:
        if not found:
            found.append(whole(self, *given, **named))
        found.append(whole(self, *given, **named))
        return found[-1]

    monkeypatch.setattr(BatchCommitter, "commit", commit)
    return found


def test_an_overwrite_whose_answer_is_lost_deletes_the_older_records(
    server: EmbeddedServer, topic: str, first_answer_lost: list[bool]
) -> None:
    job = writer(server, topic, overwrite=True)
    messages = sent(job, "new")
    with warnings.catch_warnings():
        warnings.simplefilter("error", PkWarning)
        job.commit(messages)
    assert first_answer_lost == [False, True], "the second request was not a repetition"
    assert values(server.address, topic) == [b"new"]


def test_an_overwrite_that_an_earlier_job_committed_deletes_nothing(
    server: EmbeddedServer, topic: str
) -> None:
    first = writer(server, topic, overwrite=True)
    first.commit(sent(first, "new"))
    with Producer(server.address) as producer:
        producer.send(topic, b"later").result(60)
    again = writer(server, topic, overwrite=True)
    with pytest.warns(PkWarning, match="committed before"):
        again.commit(sent(again, "new"))
    assert values(server.address, topic) == [b"new", b"later"]


def test_an_abort_after_the_commit_undoes_nothing_and_says_so(
    server: EmbeddedServer, topic: str
) -> None:
    job = writer(server, topic, overwrite=False)
    messages = sent(job, "new")
    job.commit(messages)
    with pytest.warns(PkWarning, match="is committed, although the write failed later"):
        job.abort(messages)
    assert values(server.address, topic) == [b"old", b"new"]


def test_an_abort_without_a_commit_leaves_nothing_visible(
    server: EmbeddedServer, topic: str
) -> None:
    job = writer(server, topic, overwrite=True)
    messages = sent(job, "new")
    job.abort(messages)
    assert values(server.address, topic) == [b"old"]
    with pytest.raises(errors.PkError):
        job.commit(messages)
    assert values(server.address, topic) == [b"old"]
