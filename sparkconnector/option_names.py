"""Sorts the options of `format("pk")`: those of Spark's Kafka connector, under the same names (S2).

Spark passes every key in lower case, so names are compared in lower case and shown as the docs
spell them.  `kafka.X` means `pk.X`.  Each given name falls into one class:

  known        parsed and checked here; contradictions are refused
  client's     `pk.` + a setting of pk's Consumer (source) or Producer (sink), dotted names too
  meaningless  valid for Kafka's connector or clients, without effect in pk: one warning each
  other side   a source's option given to a sink or the other way round: one warning each
  security     refused: pk has no security yet and must not ignore such an option silently
  Spark's own  ignored
  unknown      refused, with the nearest valid name
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any

from pk import errors, settings

SOURCE_NAMES = (
    "subscribe", "subscribePattern", "assign", "startingOffsets", "startingTimestamp",
    "startingOffsetsByTimestamp", "startingOffsetsByTimestampStrategy", "endingOffsets",
    "endingTimestamp", "endingOffsetsByTimestamp", "failOnDataLoss", "minPartitions",
    "maxRecordsPerPartition", "maxBytesPerPartition", "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger", "maxTriggerDelay", "maxBytesPerTrigger", "columns", "groupId",
    "holdRetention", "packPartitions", "openCostBytes", "versionAsOf", "timestampAsOf", "pinned",
    "columnar",
)  # fmt: skip
SINK_NAMES = (
    "topic",
    "truncateTopic",
    "txnAppId",
    "txnVersion",
    "onReplayMismatch",
    "onLostHistory",
)
BOTH_NAMES = ("includeHeaders", "connectTimeoutMs")
CLIENT_NAMES = ("bootstrap.servers", "isolation.level", "delivery")

#: How long a process tries to reach the first broker; later calls have pk's own time-outs.
CONNECT_TIMEOUT_MS = 10_000

#: The default of the option `columnar`.  The JVM reads the same variable.  Where neither is given,
#: the jar states `columnar` = true; Python cannot see the class path, so its own default is off.
COLUMNAR_VARIABLE = "PK_SPARK_COLUMNAR"

#: Accepted with one warning each: Kafka has these options, in pk they have no effect.
MEANINGLESS = frozenset(
    name.lower()
    for name in (
        "kafkaConsumer.pollTimeoutMs", "fetchOffset.numRetries", "fetchOffset.retryIntervalMs",
        "groupIdPrefix", "useDeprecatedOffsetFetching", "pk.group.instance.id",
        "pk.key.deserializer", "pk.value.deserializer", "pk.key.serializer",
        "pk.value.serializer", "pk.auto.offset.reset", "pk.enable.auto.commit",
        "pk.auto.commit.interval.ms", "pk.interceptor.classes", "pk.max.poll.records",
        "pk.max.poll.interval.ms", "pk.session.timeout.ms", "pk.heartbeat.interval.ms",
        "pk.partition.assignment.strategy", "pk.allow.auto.create.topics",
        "pk.exclude.internal.topics", "pk.client.dns.lookup", "pk.client.rack",
        "pk.connections.max.idle.ms", "pk.receive.buffer.bytes", "pk.send.buffer.bytes",
        "pk.reconnect.backoff.ms", "pk.reconnect.backoff.max.ms",
        "pk.socket.connection.setup.timeout.ms", "pk.socket.connection.setup.timeout.max.ms",
        "pk.metric.reporters", "pk.metrics.num.samples", "pk.metrics.recording.level",
        "pk.metrics.sample.window.ms", "pk.metadata.max.age.ms", "pk.metadata.max.idle.ms",
        "pk.partitioner.class", "pk.partitioner.ignore.keys",
        "pk.partitioner.adaptive.partitioning.enable", "pk.partitioner.availability.timeout.ms",
        "pk.retries", "pk.auto.include.jmx.reporter", "pk.enable.metrics.push",
        "pk.group.protocol", "pk.group.remote.assignor",
    )
)  # fmt: skip
_SECURITY = ("pk.security.", "pk.ssl.", "pk.sasl.", "pk.delegation.")
#: Options that Spark itself adds or reads.
_SPARKS_OWN = frozenset(
    (
        "path", "paths", "checkpointlocation", "queryname", "outputmode", "mode", "format",
        "mergeschema", "overwriteschema", "timezone", "serialization.format", "provider",
        "location", "owner",
)
)  # fmt: skip
#: Client settings that Kafka names differently.
_RENAMED = {
    "compression_type": "compression",
    "max_in_flight_requests_per_connection": "max_in_flight",
}


class OptionNames:
    """Sorts the given names into classes; collects the warnings and the client settings."""

    def __init__(
        self, known: tuple[str, ...], other_side: tuple[str, ...], client: settings.Options
    ) -> None:
        self._known = {name.lower(): name for name in known}
        self._other = {name.lower(): name for name in other_side}
        self._client_options = client
        self.values: dict[str, str] = {}
        self.client: dict[str, Any] = {}
        self.warnings: list[str] = []

    def take(self, given: Mapping[str, str]) -> None:
        seen: dict[str, tuple[str, str]] = {}
        for name, value in sorted(given.items()):
            key = name.strip().lower()
            if key in _SPARKS_OWN or key.startswith("__"):
                continue
            key = "pk." + key[len("kafka.") :] if key.startswith("kafka.") else key
            key = "pk.isolation.level" if key == "isolation.level" else key
            key = "groupid" if key == "pk.group.id" else key
            before = seen.get(key)
            if before is not None and before[1] != str(value):
                raise errors.InvalidOption(
                    f"{before[0]} and {name} are the same option, with two values", option=name
                )
            if before is None:
                seen[key] = (name, str(value))
                self._place(key, name, str(value))

    def _place(self, key: str, name: str, value: str) -> None:
        if key in self._known:
            self.values[self._known[key]] = value
        elif key.startswith("pk.") and key[3:] in CLIENT_NAMES:
            self.values[key[3:]] = value
        elif key.startswith(_SECURITY):
            raise errors.UnsupportedFeature(
                f"{name}: pk has no security yet, and could not do what this option asks for",
                option=name,
            )
        elif key in MEANINGLESS:
            self.warnings.append(f"option {name} has no meaning for pk and is ignored")
        elif key in self._other:
            self.warnings.append(
                f"option {name} has no effect on this side of the connector and is ignored"
            )
        elif key.startswith("pk."):
            self._client(key, name, value)
        else:
            raise errors.InvalidOption(f"unknown option {name!r}{self._nearest(key)}", option=name)

    def _client(self, key: str, name: str, value: str) -> None:
        setting = key[3:].replace(".", "_").replace("-", "_")
        setting = _RENAMED.get(setting, setting)
        option = self._client_options.by_name.get(setting)
        if option is None:
            for other in (settings.CONSUMER, settings.PRODUCER):
                if setting in other.by_name:
                    self.warnings.append(
                        f"option {name} has no effect on this side of the connector and is ignored"
                    )
                    return
            raise errors.InvalidOption(f"unknown option {name!r}{self._nearest(key)}", option=name)
        try:
            self.client[setting] = option.parse(value)
        except errors.InvalidConfig as cause:
            raise errors.InvalidOption(f"option {name}: {cause.message}", option=name) from cause

    def _nearest(self, key: str) -> str:
        right = [*self._known.values(), *(f"pk.{name}" for name in CLIENT_NAMES)]
        right += [f"pk.{name.replace('_', '.')}" for name in self._client_options.by_name]
        by_key = {name.lower(): name for name in right}
        near = difflib.get_close_matches(key, by_key, n=1) or difflib.get_close_matches(
            f"pk.{key}", by_key, n=1
        )
        return f"; did you mean {by_key[near[0]]}?" if near else ""

    # -- values ------------------------------------------------------------------------------------

    def bootstrap(self) -> str:
        text = ",".join(
            part.strip()
            for part in self.values.get("bootstrap.servers", "").split(",")
            if part.strip()
        )
        if not text:
            raise errors.InvalidOption("pk.bootstrap.servers must be given: HOST:PORT of a broker")
        return text

    def flag(self, name: str, default: bool) -> bool:
        text = self.values.get(name, str(default)).strip().lower()
        if text not in ("true", "false"):
            raise errors.InvalidOption(
                f"{name} is true or false, not {self.values[name]!r}", option=name
            )
        return text == "true"

    def columnar(self) -> bool:
        """Return whether the JVM may read columns (sparkconnector/plan)."""
        given = os.environ.get(COLUMNAR_VARIABLE, "false").strip().lower()
        if given not in ("true", "false"):
            raise errors.InvalidOption(
                f"{COLUMNAR_VARIABLE} is true or false, not {given!r}", option="columnar"
            )
        return self.flag("columnar", given == "true")

    def number(self, name: str) -> int:
        """Return the option as a positive whole number; 0 = not given."""
        text = self.values.get(name)
        if text is None:
            return 0
        try:
            number = int(text.strip())
        except ValueError:
            number = 0
        if number <= 0:
            raise errors.InvalidOption(
                f"{name} is a whole number greater than 0, not {text!r}", option=name
            )
        return number

    def choice(self, name: str, default: str, choices: tuple[str, ...]) -> str:
        text = self.values.get(name, default).strip().lower()
        if text not in choices:
            raise errors.InvalidOption(
                f"{name} is one of {', '.join(choices)}, not {text!r}", option=name
            )
        return text
