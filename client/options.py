"""Options of clients: keyword arguments, Kafka's dotted names included, checked before any
connection opens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pk import errors
from pk.client.assignors import ASSIGNORS
from pk.settings import CONSUMER, PRODUCER, SERVER

#: The default time-out of administration calls.
TIMEOUT_S = 60.0
#: The default of the brokers' maximum.
TRANSACTION_MAX_TIMEOUT_MS: int = SERVER.by_name["transaction_max_timeout_ms"].default

#: Kafka's names for which pk has a shorter one.
ALIASES = {
    "compression_type": "compression",
    "max_in_flight_requests_per_connection": "max_in_flight",
}
#: The options of `NetworkClient`; producers have no `metadata_max_age_ms`.
_NETWORK = (
    "client_id", "request_timeout_ms", "retry_backoff_ms", "retry_backoff_max_ms",
    "metadata_max_age_ms",
)  # fmt: skip
_BOOTSTRAP = ("bootstrap_servers", "bootstrap.servers")


def bootstrap_of(bootstrap: Any, given: dict[str, Any]) -> Any:
    """Return the bootstrap argument, under any of its names."""
    for name in _BOOTSTRAP:
        if name in given:
            if bootstrap is not None:
                raise errors.InvalidOption("bootstrap servers are given twice", option=name)
            bootstrap = given.pop(name)
    if bootstrap is None:
        raise errors.InvalidOption("no bootstrap server given (HOST:PORT)", option="bootstrap")
    return bootstrap


def _aliased(given: Mapping[str, Any]) -> dict[str, Any]:
    renamed: dict[str, Any] = {}
    for name, value in given.items():
        key = name.strip().lower().replace(".", "_").replace("-", "_")
        if key == "transactional_id" and value is None:
            continue
        key = ALIASES.get(key, name)
        if key in renamed:
            raise errors.InvalidConfig(f"{key} is given twice", option=key)
        renamed[key] = value
    return renamed


def network_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the resolved options of a producer or a consumer that its `NetworkClient` takes."""
    return {name: options[name] for name in _NETWORK if name in options}


def producer_options(given: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return every producer option, and whether the producer is idempotent (rule L6)."""
    renamed = _aliased(given)
    parsed = PRODUCER.parse(renamed)
    acks = parsed.get("acks", "all")
    if acks in ("0", "1"):
        if parsed.get("enable_idempotence"):
            raise errors.InvalidConfig(
                f"enable_idempotence needs acks=all, not acks={acks}: drop one of the two",
                option="enable_idempotence",
            )
        if parsed.get("transactional_id"):
            raise errors.InvalidConfig(
                f"transactional_id needs acks=all, not acks={acks}: drop one of the two",
                option="transactional_id",
            )
        renamed = {**parsed, "enable_idempotence": False}
    options = PRODUCER.resolve(renamed)
    return options, bool(options["enable_idempotence"])


def consumer_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return every consumer option."""
    renamed = _aliased(given)
    options = CONSUMER.resolve(renamed)
    strategy = options["partition_assignment_strategy"]
    names = [name.strip() for name in strategy.split(",") if name.strip()]
    unknown = [name for name in names if name not in ASSIGNORS]
    if unknown or not names:
        raise errors.InvalidConfig(
            f"partition_assignment_strategy takes names of {', '.join(ASSIGNORS)}, not "
            f"{strategy!r}",
            option="partition_assignment_strategy",
        )
    options["assignors"] = names
    return options
