"""The package by which Spark finds pk: every package `pyspark_*` with a `DefaultSource` is a data
source.

An exception here would hide *all* Python data sources of the session, so nothing that can fail is
imported until a method is called.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql.datasource import DataSource


class DefaultSource(DataSource):
    """The data source of `format("pk")`; see pk.sparkconnector.source."""

    @classmethod
    def name(cls) -> str:
        return "pk"

    def _pk(self) -> Any:
        from pk.sparkconnector.source import PkDataSource

        return PkDataSource(self.options)

    def schema(self) -> Any:
        return self._pk().schema()

    def reader(self, schema: Any) -> Any:
        return self._pk().reader(schema)

    def streamReader(self, schema: Any) -> Any:
        return self._pk().streamReader(schema)

    def writer(self, schema: Any, overwrite: bool) -> Any:
        return self._pk().writer(schema, overwrite)

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:
        return self._pk().streamWriter(schema, overwrite)
