"""Spark's `format("pk")`: batch and streaming, source and sink.

Executors import this package, so it loads heavy modules only when they are used.

    from pk.sparkconnector import session
    spark = session(master="local[2]")
    spark.read.format("pk").option("pk.bootstrap.servers", "127.0.0.1:9292").option("subscribe",
    "flights").load()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pk.sparkconnector.lag_listener import LagListener, PartitionLag, QueryLag
    from pk.sparkconnector.sessions import read_topic, register, session
    from pk.sparkconnector.together import commit_together

#: What users import from here, and the module of each.
_MODULES = {
    "session": "sessions",
    "register": "sessions",
    "read_topic": "sessions",
    "commit_together": "together",
    "LagListener": "lag_listener",
    "QueryLag": "lag_listener",
    "PartitionLag": "lag_listener",
}
__all__ = [
    "commit_together", "read_topic", "register", "session",
    "LagListener", "QueryLag", "PartitionLag",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'pk.sparkconnector' has no attribute {name!r}")
    return getattr(import_module(f"pk.sparkconnector.{module}"), name)
