"""Rounds in Spark: one session per role and run, warmed by an untimed pass; each is stopped while
the other is timed.

pk's connector runs with its defaults, so the reader in the JVM reads.  The options
`columns="value"` and `columnar="false"` (Python tasks read) are modes of their own, reported beside
them.  Kafka's connector gets the tuned settings of Kafka's clients (kafka/*.properties).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bench.kafka.broker import properties
from bench.pk_side import table_files
from bench.plans import Base
from bench.plans.clients import Filled
from bench.runs import Sample
from bench.sides import Party, Side
from bench.spark.worker import SparkSession

_SOURCE_FILES = 4
#: Micro-batches of `spark_stream_group`: each publishes the progress once.
GROUP_BATCHES = 96
#: Partitions of the topics of `spark_narrow`, and the records of each partition.  With 1,000
#: partitions a pass of Kafka's connector takes minutes.
NARROW_PARTITIONS = (4, 100)
NARROW_RECORDS = 20
#: What is tiered waits for nothing.
_TIERED = {"tier_max_lag_ms": "1000"}


class _Sessions(Base):
    """The two sessions; each runs only while its side runs."""

    kind = "pk"
    peer_kind = "kafka"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.sessions = {
            role: session_of(self.bench, kind)
            for role, kind in (("pk", self.kind), ("peer", self.peer_kind))
        }
        self._warm: set[tuple[str, str]] = set()

    def parties(self, role: str) -> tuple[Party, ...]:
        return (self.side(role), self.sessions[role])

    def timed(self, role: str, mode: str, records: int | None = None, **command: Any) -> Sample:
        """Run a query once untimed, then timed; `records`: what it must see, None = all."""
        session = self.sessions[role]
        records = self.counts[role] if records is None else records
        pids = [pid for one in self.parties(role) if one is not session for pid in one.pids()]
        if (role, mode) not in self._warm:
            session.timed(pids, records, **command)
            self._warm.add((role, mode))
        return session.timed(pids, records, **command)


def session_of(bench: Any, kind: str) -> SparkSession:
    """Return the one session of a kind in a whole run."""
    known: dict[str, SparkSession] = bench.sessions
    if kind not in known:
        known[kind] = SparkSession(kind)
    return known[kind]


def source(side: Side, role: str, topic: str, mode: str, *, tuned: bool = True) -> dict[str, Any]:
    """Return `format` and `options` that read a whole topic; `tuned`: Kafka's settings for bulk."""
    options = {"subscribe": topic, "startingOffsets": "earliest"}
    if role == "pk":
        if mode == "columns":
            options["columns"] = "value"
        elif mode == "python":
            options["columnar"] = "false"
        return {"format": "pk", "options": {"pk.bootstrap.servers": side.address, **options}}
    bulk = properties("consumer.properties") if tuned else {}
    options |= {"kafka.bootstrap.servers": side.address}
    options |= {f"kafka.{key}": value for key, value in bulk.items()}
    return {"format": "kafka", "options": options}


class HotRead(_Sessions, Filled):
    def round(self, role: str, mode: str) -> Sample:
        where = source(self.side(role), role, self.topics[role], mode)
        return self.timed(role, mode, do="read", **where)


class HotStream(_Sessions, Filled):
    def round(self, role: str, mode: str) -> Sample:
        where = source(self.side(role), role, self.topics[role], mode)
        return self.timed(role, mode, do="stream", folder=str(self.bench.folder), **where)


class StreamOwn(HotStream):
    """Without groupId pk is the peer, on the same topic and in the same session.

    One session for both: whether a JVM is warm must not decide about two percent.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.sessions["peer"] = self.sessions["pk"]

    def side(self, role: str) -> Side:
        return self.bench.pk

    def fill_roles(self) -> tuple[tuple[str, str], ...]:
        return (("pk", "prebuilt"),)

    def round(self, role: str, mode: str) -> Sample:
        where = source(self.bench.pk, "pk", self.topics["pk"], mode)
        where["options"] |= {"maxOffsetsPerTrigger": str(self.counts["pk"] // GROUP_BATCHES)}
        if mode == "group":
            where["options"]["groupId"] = self.bench.fresh("bench-progress")
        return self.timed(role, mode, do="stream", folder=str(self.bench.folder), **where)


class Narrow(_Sessions):
    """Topics of many partitions with few rows: what a partition costs, whatever it holds."""

    def prepare(self) -> None:
        self._topics: dict[tuple[str, int], str] = {}
        for role in ("pk", "peer"):
            side = self.side(role)
            self.bench.wake(side)
            for partitions in NARROW_PARTITIONS:
                topic = self.bench.fresh(f"narrow-{partitions}")
                side.create_topic(topic, partitions=partitions)
                side.fill_evenly(topic, partitions, NARROW_RECORDS)
                self._topics[role, partitions] = topic

    def round(self, role: str, mode: str) -> Sample:
        parts: dict[str, Sample] = {}
        for partitions in NARROW_PARTITIONS:
            records = partitions * NARROW_RECORDS
            topic = self._topics[role, partitions]
            # as the connector is without settings: those for bulk are no help to 20 records
            where = source(self.side(role), role, topic, mode, tuned=False)
            name = f"{mode}, {partitions}"
            folder = str(self.bench.folder)
            streamed = self.timed(
                role, f"stream {name}", records, do="stream", folder=folder, **where
            )
            read = self.timed(role, f"read {name}", records, do="read", **where)
            trigger = streamed.figures["trigger_s"]
            parts[f"trigger, {partitions}"] = replace(streamed, value=trigger)
            parts[f"count, {partitions}"] = replace(read, value=read.figures["seconds"])
        return replace(next(iter(parts.values())), parts=parts)

    def close(self) -> None:
        for (role, _), topic in self._topics.items():
            self.bench.wake(self.side(role))
            self.side(role).delete_topic(topic)


class Sink(_Sessions):
    """A topic of its own for every round (bench M5); the source is the same folder for both."""

    def prepare(self) -> None:
        bench = self.bench
        self._source = bench.folder / bench.fresh("source")
        bench.wake(self.sessions["pk"])
        self.sessions["pk"].ask(
            do="values", values=str(bench.values), source=str(self._source),
            rows=self.counts["pk"], files=_SOURCE_FILES,
        )  # fmt: skip

    def round(self, role: str, mode: str) -> Sample:
        side = self.side(role)
        topic = self.bench.fresh("sink")
        side.create_topic(topic)
        if mode != "kafka":
            options = {"pk.bootstrap.servers": side.address, "pk.acks": "all"}
            options |= {"pk.compression": self.variant.codec, "topic": topic}
            options["pk.delivery"] = mode
        else:
            tuned = properties("producer.properties")
            options = {f"kafka.{key}": value for key, value in tuned.items()}
            options |= {"kafka.bootstrap.servers": side.address, "topic": topic}
            options["kafka.compression.type"] = self.variant.codec
        name = "kafka" if mode == "kafka" else "pk"
        try:
            return self.timed(
                role, mode, do="write", format=name, options=options,
                source=str(self._source), rows=self.counts[role],
            )  # fmt: skip
        finally:
            side.delete_topic(topic)


class SinkOwn(Sink):
    """pk's sink in another mode is the peer, on the same server and in the same session.

    One session for both: the CPU seconds of two JVMs that do the same differ by a third.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.sessions["peer"] = self.sessions["pk"]

    def side(self, role: str) -> Side:
        return self.bench.pk


class ColdRead(HotRead):
    """pk reads the tier only: it holds the whole log.  Kafka reads its log."""

    def side(self, role: str) -> Side:
        return self.bench.tiered if role == "pk" else self.bench.peer

    def configs(self, role: str) -> dict[str, str]:
        return _TIERED if role == "pk" else {}

    def prepare(self) -> None:
        super().prepare()
        self.bench.wake(self.side("pk"))
        self.table = self.bench.tiered.tier(self.topics["pk"])


class _OwnTable(ColdRead):
    """The peer is Spark itself, on the same table."""

    def fill_roles(self) -> tuple[tuple[str, str], ...]:
        return (("pk", "prebuilt"),)

    def parties(self, role: str) -> tuple[Party, ...]:
        return super().parties(role) if role == "pk" else (self.sessions["peer"],)


class ParquetRead(_OwnTable):
    """The peer reads the table's files as Parquet."""

    peer_kind = "parquet"

    def prepare(self) -> None:
        super().prepare()
        self._files = [str(path) for path in table_files(self.table)]

    def round(self, role: str, mode: str) -> Sample:
        if role == "pk":
            return super().round(role, mode)
        return self.timed(role, mode, do="read", format="parquet", paths=[self._files])


class TopicLog(ColdRead):
    """`read_topic` reads the table as Delta, Kafka's connector reads its log."""

    kind = "delta"

    def round(self, role: str, mode: str) -> Sample:
        if role == "peer":
            return super().round(role, mode)
        topic, address = self.topics["pk"], self.side("pk").address
        return self.timed(role, mode, do="read_topic", topic=topic, bootstrap=address)


class TopicTable(TopicLog, _OwnTable):
    """The peer is Spark's Delta reader, in the same session."""

    peer_kind = "delta"

    def round(self, role: str, mode: str) -> Sample:
        if role == "pk":
            return super().round(role, mode)
        return self.timed(role, mode, do="read", format="delta", paths=[str(self.table)])
