"""Publishes how far streaming queries are behind their pk sources: `LagListener`.

Spark reports the progress of a query after each trigger: for each source the offset where the
trigger ended (`endOffset`) and the newest offset that the source had when the trigger was planned
(`latestOffset`).  For a pk source both are the JSON of sparkconnector/offsets, with an offset for
each partition.  Their difference is the lag.  The listener reads the events only and asks no
broker: a broker that is away changes nothing here, except that no event comes.

Invariants
  W1  No event and no callback raises from the listener: the first failure of each kind is a
      warning, and the query goes on.
  W2  At most QUERIES_MAX queries are known, and at most `partition_limit` partitions have a series
      of their own.  The lag of each topic counts all partitions, also those without a series.
  W3  The series of a query end with the query.
  W4  A partition that the query has not planned yet has no position, and therefore no lag.
  W5  The labels of two queries differ: a query without a name, with the name of another one, or
      with a name over NAME_MAX characters has its id as its label.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pyspark.sql.streaming.listener import StreamingQueryListener

from pk import clock, errors
from pk.sparkconnector import offsets
from pk.sparkconnector.planner import PkWarning, warn

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
    )

QUERIES_MAX = 100
NAME_MAX = 200


class PartitionLag(NamedTuple):
    """What a query had not read of one partition when a trigger was planned."""

    source: int  #: which of the query's sources, from 0
    topic: str
    partition: int
    offset: int  #: the next offset that the query reads
    latest: int  #: the end of what a reader of this isolation level could read
    lag: int  #: offsets between the two; transactions' markers and aborted records count


@dataclass(slots=True, frozen=True)
class QueryLag:
    """The lag of one query after a trigger."""

    query_id: str
    run_id: str
    name: str | None
    batch_id: int
    partitions: tuple[PartitionLag, ...]

    @property
    def total(self) -> int:
        """The lag of all partitions together."""
        return sum(each.lag for each in self.partitions)

    def by_topic(self) -> dict[tuple[int, str], int]:
        """The lag by source and topic."""
        found: dict[tuple[int, str], int] = {}
        for each in self.partitions:
            key = each.source, each.topic
            found[key] = found.get(key, 0) + each.lag
        return found


def lag_of(progress: Mapping[str, Any]) -> QueryLag | None:
    """Return the lag in a query's progress, the parsed JSON of Spark; None without a pk source.

    Raises `ValueError` if the progress is not as Spark writes it.  A source whose offsets are not
    pk's, or are those of a newer pk, is left out.
    """
    try:
        found = [
            lag
            for number, source in enumerate(progress["sources"])
            for lag in _lags(number, source)
        ]
        if not found:
            return None
        name = progress.get("name")
        return QueryLag(
            str(progress["id"]),
            str(progress["runId"]),
            None if name is None else str(name),
            int(progress["batchId"]),
            tuple(found),
        )
    except (KeyError, TypeError, AttributeError) as cause:
        raise ValueError(f"the progress is not as Spark writes it: {cause!r}") from cause


def _lags(number: int, source: Mapping[str, Any]) -> list[PartitionLag]:
    latest, end = _progress(source.get("latestOffset")), _progress(source.get("endOffset"))
    found = []
    for topic in sorted(set(latest) & set(end)):
        if latest[topic].topic_id != end[topic].topic_id:  # W4: another topic of this name
            continue
        ends = end[topic].offsets
        for partition, newest in latest[topic].offsets.items():
            at = ends.get(partition)
            if at is not None:
                lag = max(0, newest - at)
                found.append(PartitionLag(number, topic, partition, at, newest, lag))
    return found


def _progress(stored: object) -> offsets.SourceProgress:
    """Return the offsets of a source; {} if they are not pk's."""
    if isinstance(stored, str):
        try:
            stored = json.loads(stored)
        except ValueError:
            return {}
    if not isinstance(stored, Mapping):
        return {}
    try:
        return offsets.from_json(stored)
    except (errors.InvalidOption, errors.NewerFormat, OverflowError):
        return {}


class LagListener(StreamingQueryListener):
    """Publishes the lag of streaming queries that read `format("pk")`, per partition.

    on_lag: called with the `QueryLag` after each trigger, in Spark's listener thread.  registry:
    where the gauges are (prometheus_client's own by default); None = no gauges.  partition_limit:
    how many partitions have a gauge of their own.

    Queries of all sessions that have this listener are known by their names, else by their ids.
    Raises `InvalidOption` if the registry has another LagListener: close the other one first.

        from prometheus_client import start_http_server

        spark.streams.addListener(LagListener())
        start_http_server(9400)
    """

    def __init__(
        self,
        on_lag: Callable[[QueryLag], object] | None = None,
        *,
        registry: CollectorRegistry | None = REGISTRY,
        partition_limit: int = 1000,
    ) -> None:
        if on_lag is not None and not callable(on_lag):
            raise errors.InvalidOption(f"on_lag is a function or None, not {on_lag!r}")
        if partition_limit < 0:
            raise errors.InvalidOption(f"partition_limit is at least 0, not {partition_limit}")
        self._on_lag = on_lag
        self._gauges = _Gauges(partition_limit)
        self._registry = registry
        self._warned: set[str] = set()
        if registry is not None:
            try:
                registry.register(self._gauges)
            except ValueError:
                raise errors.InvalidOption(
                    "the registry has the metrics of another LagListener: close() it, or give "
                    "this one a registry of its own"
                ) from None

    def close(self) -> None:
        """Take the gauges out of the registry.  `spark.streams.removeListener` ends the events."""
        registry, self._registry = self._registry, None
        if registry is not None:
            registry.unregister(self._gauges)

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Do nothing: a query has a lag after its first trigger."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Publish the lag after a trigger."""
        try:
            found = lag_of(json.loads(event.progress.json))
            if found is not None:
                self._gauges.set(found)
                if self._on_lag is not None:
                    self._on_lag(found)
        except Exception as failure:  # W1: also what a caller's function raises
            self._warn(failure)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Note that the query is alive: it had nothing to read."""
        try:
            self._gauges.alive(str(event.id))
        except Exception as failure:  # W1
            self._warn(failure)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Drop the gauges of a query that has ended (W3)."""
        try:
            self._gauges.drop(str(event.id))
        except Exception as failure:  # W1
            self._warn(failure)

    def _warn(self, failure: Exception) -> None:
        """Warn once for each kind of failure."""
        kind = type(failure).__name__
        if kind not in self._warned and len(self._warned) < QUERIES_MAX:
            self._warned.add(kind)
            # a program that makes errors of warnings gets none from here (W1)
            with contextlib.suppress(PkWarning):
                warn(f"the lag of a query is not published: {kind}: {failure}")


class _Known(NamedTuple):
    label: str
    lag: QueryLag
    at_s: float  #: wall time of the last event


class _Gauges(Collector):
    """The lag of the queries that run, as metrics; events and scrapes come in threads of theirs."""

    def __init__(self, partition_limit: int) -> None:
        self._limit = partition_limit
        self._lock = threading.Lock()
        self._queries: dict[str, _Known] = {}
        self._left_out = 0

    def set(self, lag: QueryLag) -> None:
        with self._lock:
            known = self._queries.get(lag.query_id)
            if known is None and len(self._queries) >= QUERIES_MAX:  # W2
                self._left_out += 1
                return
            label = self._label(lag) if known is None else known.label
            self._queries[lag.query_id] = _Known(label, lag, clock.wall_ms() / 1000)

    def _label(self, lag: QueryLag) -> str:
        taken = {known.label for known in self._queries.values()}
        name = lag.name or ""
        return lag.query_id if not 0 < len(name) <= NAME_MAX or name in taken else name  # W5

    def alive(self, query_id: str) -> None:
        with self._lock:
            known = self._queries.get(query_id)
            if known is not None:
                self._queries[query_id] = known._replace(at_s=clock.wall_ms() / 1000)

    def drop(self, query_id: str) -> None:
        with self._lock:
            self._queries.pop(query_id, None)

    def describe(self) -> Iterable[Metric]:
        """Return the families without samples: a registry refuses a second listener by them."""
        return families()

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            queries, left_out = list(self._queries.values()), self._left_out
        partition, topic, rows, event, without, dropped = families()
        room = self._limit
        for known in queries:
            for each in known.lag.partitions[:room]:
                labels = known.label, str(each.source), each.topic, str(each.partition)
                partition.add_metric(labels, each.lag)
            room = max(0, room - len(known.lag.partitions))
            for (source, name), lag in known.lag.by_topic().items():
                topic.add_metric((known.label, str(source), name), lag)
            rows.add_metric((known.label,), known.lag.batch_id)
            event.add_metric((known.label,), known.at_s)
        total = sum(len(known.lag.partitions) for known in queries)
        without.add_metric((), max(0, total - self._limit))
        dropped.add_metric((), left_out)
        return partition, topic, rows, event, without, dropped


def families() -> tuple[Any, ...]:
    """Return the families of metrics, without samples."""
    return (
        GaugeMetricFamily(
            "pk_spark_lag",
            "offsets of a partition that the query had not read when its last trigger was planned",
            labels=("query", "source", "topic", "partition"),
        ),
        GaugeMetricFamily(
            "pk_spark_topic_lag",
            "as pk_spark_lag, all partitions of a topic together",
            labels=("query", "source", "topic"),
        ),
        GaugeMetricFamily("pk_spark_batch_id", "the query's last micro-batch", labels=("query",)),
        GaugeMetricFamily(
            "pk_spark_last_event_timestamp_seconds",
            "when Spark last reported that the query has made progress or is idle",
            labels=("query",),
        ),
        GaugeMetricFamily(
            "pk_spark_partitions_without_metrics", "partitions over partition_limit", labels=()
        ),
        CounterMetricFamily(
            "pk_spark_progress_left_out",
            f"reports of queries beyond the first {QUERIES_MAX}, which have no metrics",
            labels=(),
        ),
    )
