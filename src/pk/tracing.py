"""Logs, metrics and health of a process: structured lines, an HTTP endpoint, the loop's lag.

A log line is `time level role event key=value …`, written to stderr in one call, so that the lines
of several processes do not mix.  Metrics are prometheus_client's, in a registry of the process's
own.  The endpoint is a minimal HTTP/1.1 server on the process's event loop (`/metrics`, `/healthz`,
`/readyz`).  Users of a node need the broker's endpoint only.  The node's other processes serve
theirs on local sockets; for each request the broker fetches their metrics and adds them with the
label `role`.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import datetime
import itertools
import json
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Any, NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from pk import errors
from pk.clock import Clock

# These are a time series for each counter and histogram, and say little.
disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has no type here

#: Upper bounds of latency histograms, in milliseconds.
LATENCY_MS = (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000)
LAG_TICK_MS = 50
REQUEST_BYTES_MAX = 8192
REQUEST_TIMEOUT_S = 5.0
#: If another process of the node does not answer within this time, its metrics are left out.
OTHER_TIMEOUT_S = 1.0
UNIX = "unix:"


def _text(value: object) -> str:
    text = str(value)
    if not text or any(mark in text for mark in ' "=\n'):
        return json.dumps(text, ensure_ascii=False)
    return text


class Log:
    """Structured lines of one role; `bug` logs exceptions that only a bug of pk explains.

    A line that cannot be written is dropped, and the caller continues.
    """

    def __init__(self, role: str, wall_ms: Callable[[], int], out: IO[str] | None = None) -> None:
        self._role = role
        self._wall_ms = wall_ms
        self._out = out

    def _line(self, level: str, event: str, facts: dict[str, object]) -> None:
        now = datetime.datetime.fromtimestamp(self._wall_ms() / 1000, datetime.UTC)
        stamp = now.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        pairs = "".join(f" {name}={_text(value)}" for name, value in facts.items())
        out = self._out or sys.stderr
        # a write fails if the disk is full or the reader of the pipe has ended
        with contextlib.suppress(OSError, ValueError):
            out.write(f"{stamp} {level} {self._role} {event}{pairs}\n")
            out.flush()

    def info(self, event: str, **facts: object) -> None:
        self._line("INFO", event, facts)

    def warning(self, event: str, **facts: object) -> None:
        self._line("WARNING", event, facts)

    def error(self, event: str, **facts: object) -> None:
        self._line("ERROR", event, facts)

    def bug(self, where: str, error: BaseException) -> None:
        """Log an unexpected exception with its traceback; the signature fits `on_error`
        callbacks.
        """
        trace = "".join(traceback.format_exception(error)).rstrip()
        self._line("BUG", where, {"error": repr(error), "trace": trace})


class Family(NamedTuple):
    """A metric with its samples, made for one scrape."""

    kind: str  #: gauge or counter
    name: str  #: with the prefix; a counter's gets `_total`
    doc: str
    labels: Sequence[str]
    samples: Sequence[tuple[Sequence[str], float]]  #: values of the labels, and the value


class StageTimes:
    """How long requests spent in each stage: one histogram with the label `stage`.

    `observe` costs a tenth of prometheus_client's own, which matters at one call a batch and stage:
    no lock, because one loop writes and the same loop is scraped.
    """

    def __init__(self, name: str, doc: str, stages: Iterable[str]) -> None:
        self.name = name
        self.doc = doc
        #: by stage: how many fell into each bucket, the last one without a bound; and the sum in ms
        self._counts = {stage: [0] * (len(LATENCY_MS) + 1) for stage in stages}
        self._sums = dict.fromkeys(self._counts, 0.0)

    def observe(self, stage: str, seconds: float) -> None:
        """Count one request that spent this time in a stage."""
        took_ms = seconds * 1000
        self._counts[stage][bisect.bisect_left(LATENCY_MS, took_ms)] += 1
        self._sums[stage] += took_ms

    def family(self) -> Metric:
        """Return the histogram of this moment."""
        found = HistogramMetricFamily(self.name, self.doc, labels=("stage",))
        for stage, counts in self._counts.items():
            bounds = [*map(_bound, LATENCY_MS), "+Inf"]
            buckets = list(zip(bounds, itertools.accumulate(counts), strict=True))
            found.add_metric((stage,), buckets, self._sums[stage])
        return found


def _bound(bound: float) -> str:
    return str(float(bound))


class _AtScrape(Collector):
    """Asks for families when the registry is scraped."""

    def __init__(self, families: Callable[[], Iterable[Family]]) -> None:
        self._families = families

    def describe(self) -> Iterable[Metric]:
        """Return no names: registering then reads nothing."""
        return ()

    def collect(self) -> Iterable[Metric]:
        for each in self._families():
            kind = CounterMetricFamily if each.kind == "counter" else GaugeMetricFamily
            metric = kind(each.name, each.doc, labels=each.labels)
            for labels, value in each.samples:
                metric.add_metric(labels, value)
            yield metric


class _Stages(Collector):
    """Exports a `StageTimes`."""

    def __init__(self, times: StageTimes) -> None:
        self._times = times

    def collect(self) -> Iterable[Metric]:
        yield self._times.family()


class Metrics:
    """The process's metrics.  A second request for a name returns the same metric."""

    def __init__(self, prefix: str = "pk") -> None:
        self.registry = CollectorRegistry()
        self._prefix = prefix
        self._known: dict[str, Any] = {}

    def _get(self, kind: Any, name: str, doc: str, labels: Iterable[str], **more: Any) -> Any:
        metric = self._known.get(name)
        if metric is None:
            full = f"{self._prefix}_{name}"
            metric = kind(full, doc, tuple(labels), registry=self.registry, **more)
            self._known[name] = metric
        return metric

    def counter(self, name: str, doc: str, labels: Iterable[str] = ()) -> Counter:
        metric: Counter = self._get(Counter, name, doc, labels)
        return metric

    def gauge(self, name: str, doc: str, labels: Iterable[str] = ()) -> Gauge:
        metric: Gauge = self._get(Gauge, name, doc, labels)
        return metric

    def histogram(
        self,
        name: str,
        doc: str,
        labels: Iterable[str] = (),
        buckets: tuple[float, ...] = LATENCY_MS,
    ) -> Histogram:
        metric: Histogram = self._get(Histogram, name, doc, labels, buckets=buckets)
        return metric

    def at_scrape(self, families: Callable[[], Iterable[Family]]) -> None:
        """Add metrics that `families` makes for each scrape."""
        self.registry.register(_AtScrape(families))

    def stages(self, name: str, doc: str, stages: Iterable[str]) -> StageTimes:
        """Return a histogram by stage."""
        times = StageTimes(f"{self._prefix}_{name}", doc, stages)
        self.registry.register(_Stages(times))
        return times

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        raw: bytes = generate_latest(self.registry)
        return raw


async def watch_loop_lag(metrics: Metrics, clock: Clock) -> None:
    """Measure `loop_lag_ms` (rule P2): how late the loop runs a timer.  Runs until cancelled."""
    lag = metrics.histogram("loop_lag_ms", "how late the event loop runs what is due")
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_TICK_MS / 1000
        await clock.sleep_ms(LAG_TICK_MS)
        lag.observe(max(0.0, (loop.time() - due) * 1000))


class Health:
    """The health of a process: `alive` while the loop runs; `ready` says why it is not serving, or
    None.
    """

    def __init__(self) -> None:
        self.not_ready: str | None = "starting"


async def serve_http(
    address: str, metrics: Metrics, health: Health, others: Mapping[str, str] | None = None
) -> asyncio.Server:
    """Serve /metrics, /healthz and /readyz on HOST:PORT or unix:PATH.  `others` are the addresses
    of the node's other processes by role.  Raises `AddressInUse`.
    """
    ProcessCollector(registry=metrics.registry)
    up = metrics.gauge("up", "whether the process answered just now", ("role",)) if others else None

    async def everything() -> bytes:
        found = {}
        for role, other in (others or {}).items():
            text = await _ask(other)
            if up is not None:
                up.labels(role).set(text is not None)
            if text is not None:
                found[role] = text
        return merged(metrics.text(), found)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                raw = await reader.readuntil(b"\r\n\r\n")
                path = raw.split(b" ", 2)[1].split(b"?")[0] if raw.count(b" ") >= 2 else b""
                text = await everything() if path == b"/metrics" else b""
                writer.write(_answer(path, text, health))
                await writer.drain()
        except TimeoutError:
            # a client that does not read would otherwise block this answer
            writer.transport.abort()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass
        finally:
            writer.close()

    host, _, port = address.rpartition(":")
    try:
        if address.startswith(UNIX):
            path = address.removeprefix(UNIX)
            return await asyncio.start_unix_server(serve, path, limit=REQUEST_BYTES_MAX)
        return await asyncio.start_server(
            serve, host.strip("[]"), int(port), limit=REQUEST_BYTES_MAX
        )
    except OSError as cause:
        raise errors.AddressInUse(f"metrics cannot listen on {address}: {cause}") from cause


def _answer(path: bytes, text: bytes, health: Health) -> bytes:
    status, kind, body = "200 OK", "text/plain; charset=utf-8", b"ok\n"
    if path == b"/metrics":
        kind, body = CONTENT_TYPE_LATEST, text
    elif path == b"/readyz" and health.not_ready is not None:
        status, body = "503 Service Unavailable", f"{health.not_ready}\n".encode()
    elif path not in (b"/healthz", b"/readyz"):
        status, body = "404 Not Found", b"try /metrics, /healthz or /readyz\n"
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body


async def _ask(address: str) -> bytes | None:
    """Return the metrics of another process of this node; None if it does not answer."""
    try:
        async with asyncio.timeout(OTHER_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(address.removeprefix(UNIX))
            try:
                writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
                return body if head.startswith(b"HTTP/1.1 200 ") else None
            finally:
                writer.close()
    except (TimeoutError, OSError):
        return None


def merged(own: bytes, others: Mapping[str, bytes]) -> bytes:
    """Merge several texts of metrics: each family once, samples of the others with their role."""
    families: dict[str, list[str]] = {}
    for role, text in [("", own), *others.items()]:
        lines: list[str] = []
        told = False
        for line in text.decode().splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                told = name in families
                lines = families.setdefault(name, [])
            if not line.startswith("#"):
                lines.append(_labelled(line, role) if role else line)
            elif not told:
                lines.append(line)
    return "".join(f"{line}\n" for lines in families.values() for line in lines).encode()


def _labelled(sample: str, role: str) -> str:
    """Return `name 1` or `name{a="b"} 1` with the label role in front."""
    name, brace, rest = sample.partition("{")
    if brace:
        return f'{name}{{role="{role}",{rest}'
    name, _, value = sample.partition(" ")
    return f'{name}{{role="{role}"}} {value}'
