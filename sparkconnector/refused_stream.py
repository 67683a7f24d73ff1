"""A stream reader that stands for refused options and raises their error when Spark first asks.

Spark 4.2 stops its stream reader in a `finally` (python_streaming_source_runner.main).  If the
creation of the reader raises, that `finally` fails on a name that was never bound, and the user
sees `UnboundLocalError` in place of the error.  So the creation succeeds, and the first call that
plans the query raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow

from pk import errors
from pk.sparkconnector.worker_errors import sentence_alone


class RefusedStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Every call that plans raises `error`; nothing is ever read."""

    def __init__(self, error: errors.PkError) -> None:
        self._error = error

    @sentence_alone
    def initialOffset(self) -> dict[str, Any]:
        raise self._error

    @sentence_alone
    def getDefaultReadLimit(self) -> ReadLimit:
        raise self._error

    @sentence_alone
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        raise self._error

    @sentence_alone
    def prepareForTriggerAvailableNow(self) -> None:
        raise self._error

    @sentence_alone
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        raise self._error

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        raise self._error
