"""The options of a sink `format("pk")` (sparkconnector/option_names sorts the names).

`pk.delivery` says what a write promises.  *exactly_once* (the default): the tasks' records belong
to one transaction, which the driver commits.  A streaming query has one for each trigger, a batch
write has one.  `txnAppId` and `txnVersion` (Delta's names) let a batch write, as in `foreachBatch`,
be repeated: the same pair becomes visible once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pk import errors, limits, settings
from pk.sparkconnector.option_names import (
    BOTH_NAMES,
    CONNECT_TIMEOUT_MS,
    SINK_NAMES,
    SOURCE_NAMES,
    OptionNames,
)

EXACTLY_ONCE, AT_LEAST_ONCE = "exactly_once", "at_least_once"


@dataclass(slots=True, frozen=True)
class SinkOptions:
    """The checked options of a sink."""

    bootstrap: str
    topic: str | None = None
    client: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    truncate: bool = False  #: mode overwrite may delete the topic's older records
    connect_timeout_ms: int = CONNECT_TIMEOUT_MS
    exactly_once: bool = True
    app: str = ""  #: txnAppId; "" = none
    version: int = 0  #: txnVersion
    accept_mismatch: bool = False  #: onReplayMismatch=accept
    write_unknown: bool = False  #: onLostHistory=write


def sink(given: Mapping[str, str]) -> SinkOptions:
    """Return the options of a write.  Raises `InvalidOption`, `UnsupportedFeature`."""
    names = OptionNames(SINK_NAMES + BOTH_NAMES, SOURCE_NAMES, settings.PRODUCER)
    names.take(given)
    if "isolation.level" in names.values:
        names.warnings.append("option isolation.level has no effect on a sink and is ignored")
    names.flag(
        "includeHeaders", False
    )  # a headers column is written if the DataFrame has one, as in Kafka's connector
    for setting, needed in (("enable_idempotence", True), ("acks", "all")):
        if names.client.get(setting, needed) not in (needed, "-1"):
            raise errors.InvalidOption(
                f"pk.{setting.replace('_', '.')} of a sink is {needed}: it reports what was stored",
                option=setting,
            )
        names.client.pop(setting, None)
    for setting, advice in (
        ("transactional_id", "a query has its own; a batch write takes txnAppId and txnVersion"),
        ("transaction_timeout_ms", "the brokers have participant_transaction_max_ms instead"),
    ):
        if names.client.pop(setting, ""):
            raise errors.InvalidOption(
                f"pk.{setting.replace('_', '.')} is not an option of the sink: {advice}",
                option=setting,
            )
    exactly_once = (
        names.choice("delivery", EXACTLY_ONCE, (EXACTLY_ONCE, AT_LEAST_ONCE)) == EXACTLY_ONCE
    )
    app, version = _transaction(names, exactly_once)
    return SinkOptions(
        names.bootstrap(),
        names.values.get("topic", "").strip() or None,
        names.client,
        tuple(names.warnings),
        names.flag("truncateTopic", False),
        names.number("connectTimeoutMs") or CONNECT_TIMEOUT_MS,
        exactly_once,
        app,
        version,
        names.choice("onReplayMismatch", "fail", ("fail", "accept")) == "accept",
        names.choice("onLostHistory", "fail", ("fail", "write")) == "write",
    )


def _transaction(names: OptionNames, exactly_once: bool) -> tuple[str, int]:
    """Return txnAppId and txnVersion, or ("", 0)."""
    app, text = names.values.get("txnAppId"), names.values.get("txnVersion")
    if not exactly_once:
        for name in ("txnAppId", "txnVersion", "onReplayMismatch", "onLostHistory"):
            if name in names.values:
                raise errors.InvalidOption(
                    f"{name} needs pk.delivery={EXACTLY_ONCE}, which is the default", option=name
                )
    if app is None and text is None:
        return "", 0
    if app is None or text is None:
        raise errors.InvalidOption(
            "give txnAppId and txnVersion together: which application writes, and its batch",
            option="txnAppId" if app is None else "txnVersion",
        )
    size = len(app.encode("utf-8", "surrogatepass"))
    if not app.strip() or size > limits.JOB_NAME_BYTES_MAX:
        raise errors.InvalidOption(
            f"txnAppId has 1 to {limits.JOB_NAME_BYTES_MAX} bytes, not {size}", option="txnAppId"
        )
    version = int(text) if text.strip().isdecimal() else -1
    if not 0 <= version < 2**63:
        raise errors.InvalidOption(
            f"txnVersion is a whole number from 0 to 2^63 - 1, not {text!r}", option="txnVersion"
        )
    return app, version


def for_stream(options: SinkOptions) -> SinkOptions:
    """Return the options of a streaming write, whose transactions Spark names."""
    if options.app:
        raise errors.InvalidOption(
            "txnAppId and txnVersion are for batch writes, as in foreachBatch: a streaming query "
            "has its query id and its batch id",
            option="txnAppId",
        )
    return options


def job_name(owner: str, topic: str | None) -> str:
    """Return the transactional id of a query or an application, for one sink.

    owner: query id or txnAppId.  The topic option is part of it, so two sinks of one query have two
    ids.  A name that would be too long has a digest in place of its parts.
    """
    name = f"{owner}:{topic or '*'}"
    if len(name.encode()) > limits.TRANSACTIONAL_ID_BYTES_MAX:
        return hashlib.sha256(name.encode()).hexdigest()
    return name
