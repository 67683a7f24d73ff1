"""pk: a Spark-native streaming log whose cold part is a Delta table.

Public names are loaded lazily, so that an executor that imports `pk.sparkconnector` loads neither
the server nor the clients it does not use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pk.client.admin import AdminClient
    from pk.client.aio import AsyncConsumer, AsyncProducer
    from pk.client.consumer import Consumer
    from pk.client.dead_letters import DeadLetterTopic
    from pk.client.producer import Producer
    from pk.types import BatchMetadata, Record, RecordMetadata, TopicPartition

_HOMES = {
    "Producer": "pk.client.producer",
    "Consumer": "pk.client.consumer",
    "AdminClient": "pk.client.admin",
    "TopicPartition": "pk.types",
    "Record": "pk.types",
    "AsyncConsumer": "pk.client.aio",
    "AsyncProducer": "pk.client.aio",
    "DeadLetterTopic": "pk.client.dead_letters",
    "RecordMetadata": "pk.types",
    "BatchMetadata": "pk.types",
}

__all__ = [
    "AdminClient",
    "AsyncConsumer",
    "AsyncProducer",
    "BatchMetadata",
    "Consumer",
    "DeadLetterTopic",
    "Producer",
    "Record",
    "RecordMetadata",
    "TopicPartition",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'pk' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
