"""The data source `format("pk")`: creates the readers and writers for Spark.

The package `pyspark_pk` registers it, or `pk.sparkconnector.register(spark)`.  Spark passes options
in lower case.  They are checked when Spark asks for a reader or a writer, because only then it is
known whether they are for a source or a sink.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from pk import errors
from pk.sparkconnector import options, sink_options
from pk.sparkconnector.planner import warn
from pk.sparkconnector.worker_errors import sentence_alone

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType


class PkDataSource(DataSource):
    """The source and sink `format("pk")`, for batches and streams.

    Its options are those of Spark's Kafka connector under the same names, with
    `pk.bootstrap.servers` for the addresses (sparkconnector/options).  An option that is unknown or
    contradicts another raises `InvalidOption` when Spark asks for a reader or a writer, and for a
    stream when the query starts.

        spark.readStream.format("pk").option("pk.bootstrap.servers", "localhost:9092").option(
            "subscribe", "events"
        ).load()
    """

    @classmethod
    def name(cls) -> str:
        """The word that users write in `format`."""
        return "pk"

    @sentence_alone
    def schema(self) -> str:
        """The columns that the options ask for, as Spark's DDL."""
        given = dict(self.options)
        read = options.source(_any_side(given), streaming=True)
        return options.ddl(options.column_names(read))

    @sentence_alone
    def reader(self, schema: StructType) -> DataSourceReader:
        """A batch read; its offsets are frozen when Spark plans."""
        from pk.sparkconnector.batch_reader import PkReader

        read = options.source(dict(self.options), streaming=False)
        _warn(read.warnings)
        return PkReader(read, _columns(read, schema))

    @sentence_alone
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """A streaming read; its offsets are in Spark's checkpoint."""
        from pk.sparkconnector.refused_stream import RefusedStream
        from pk.sparkconnector.stream_reader import PkStreamReader

        try:
            read = options.source(dict(self.options), streaming=True)
            columns = _columns(read, schema)
        except errors.PkError as error:
            return RefusedStream(error)
        _warn(read.warnings)
        return PkStreamReader(read, columns)

    @sentence_alone
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """A batch write to a topic."""
        from pk.sparkconnector.batch_writer import PkWriter

        sink = sink_options.sink(dict(self.options))
        _warn(sink.warnings)
        return PkWriter(sink, schema, overwrite)

    @sentence_alone
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """A streaming write: one transaction for each trigger."""
        from pk.sparkconnector.stream_writer import PkStreamWriter

        sink = sink_options.sink(dict(self.options))
        _warn(sink.warnings)
        return PkStreamWriter(sink_options.for_stream(sink), schema, overwrite)


def _any_side(given: Mapping[str, str]) -> dict[str, str]:
    """Return the options without those for batches only; the schema does not depend on them."""
    ends = {name.lower() for name in options.BATCH_ONLY}
    return {name: value for name, value in given.items() if name.lower() not in ends}


def _warn(words: tuple[str, ...]) -> None:
    for line in words:
        warn(line)


def _columns(read: options.Source, schema: StructType) -> tuple[options.Column, ...]:
    """Return the columns of a reader; a user's schema may name any of them, in any order."""
    types = {name.lower(): kind for name, kind in options.COLUMNS.items()}
    names = tuple(field.name for field in schema.fields)
    for field in schema.fields:
        wanted = types.get(field.name.lower())
        found = field.dataType.simpleString()
        if wanted is None:
            raise errors.InvalidOption(
                f"the source has no column {field.name}; there are {', '.join(options.COLUMNS)}"
            )
        if found != wanted:
            raise errors.InvalidOption(
                f"column {field.name} is {wanted}, not {found}; cast it after load()"
            )
        if not field.nullable and field.name.lower() in options.MAY_BE_NULL:
            raise errors.InvalidOption(
                f"column {field.name} may be null: drop NOT NULL from the schema"
            )
    if len({name.lower() for name in names}) < len(names):
        raise errors.InvalidOption("the schema names a column twice")
    chosen = {name.lower() for name in read.columns}
    if chosen and chosen != {name.lower() for name in names}:
        raise errors.InvalidOption(
            "the option columns and the schema name different columns; give one of them"
        )
    return tuple(options.Column(field.name, field.nullable) for field in schema.fields)
