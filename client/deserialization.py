"""Makes records of fetched rows, and decides about a record that cannot be deserialised.

A whole slice of rows is deserialised at once.  Only if that fails is each row tried alone, and the
rows before the failing one are returned first.  `on_deserialize_error` then decides:

  "raise"     the poll raises `SerializationError`, and raises again until a seek passes the record
  "skip"      the record is left out, with a warning in the log
  a function  `f(record, error)` gets the record with key and value as bytes.  It returns a record
              to be returned in its place, or None to leave it out.  A `DeadLetterTopic`
              (client/dead_letters) is such a function.

Invariants
  N1  A record is left out only for what is wrong with itself.  An error that may go away, such as a
      registry that cannot be reached, is raised whatever `on_deserialize_error` says.
  N2  A record is left out once the function has returned.  If the function raises, the poll raises,
      and the next one gives the function the same record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pk import errors
from pk.client import arguments
from pk.client.fetch_buffer import FetchedRows
from pk.client.records import ConsumerRecords
from pk.client.serializers import deserializer
from pk.types import Record, TopicPartition

#: Decides about a record with raw key and value: the record to return, or None to leave it out.
OnDeserializeError = Callable[[Record, errors.SerializationError], Record | None]

#: The status of a registry that does not know the schema's id: the record is wrong, not the call.
_UNKNOWN_SCHEMA = "404"


class RowFailed(Exception):
    """A row that cannot be deserialised, and the records before it."""

    def __init__(self, good: list[ConsumerRecords], rest: FetchedRows, error: Exception) -> None:
        super().__init__(error)
        self.good = good
        self.rest = rest  #: the failing row and those after it
        self.error = error


class RecordDeserializer:
    """The deserialisers of one consumer, and what it does if they fail."""

    def __init__(self, key: Any, value: Any, on_error: Any, warn: Callable[[str], None]) -> None:
        """Check the arguments of a `Consumer`.  Raises `InvalidOption`.

        warn: is called with a line about records that were left out
        """
        self._warn = warn
        self._key = deserializer(key, "key_deserializer")
        self._value = deserializer(value, "value_deserializer")
        self._on_error = _policy(on_error)
        self.skipped = 0  #: records left out

    def records(self, item: FetchedRows) -> list[ConsumerRecords]:
        """Return the records of fetched rows.

        Raises `RowFailed` with the rows that are still to be returned.
        """
        try:
            return [self._made(item)]
        # A deserialiser that the caller gave may raise any exception.
        except Exception:
            return self._one_by_one(item)

    def _made(self, item: FetchedRows) -> ConsumerRecords:
        return ConsumerRecords(item.place, item.rows, self._key, self._value, item.position_id)

    def _one_by_one(self, item: FetchedRows) -> list[ConsumerRecords]:
        found: list[ConsumerRecords] = []
        left_out: list[errors.SerializationError] = []
        for index in range(item.rows.num_rows):
            row = item._replace(rows=item.rows.slice(index, 1))
            try:
                found.append(self._made(row))
            except Exception as cause:
                try:
                    kept = self._decided(row, cause, left_out)
                except Exception as error:
                    self._count(item.place, left_out)
                    rest = item._replace(rows=item.rows.slice(index))
                    raise RowFailed(found, rest, error) from error
                if kept is not None:
                    found.append(kept)
        self._count(item.place, left_out)
        return found

    def _count(self, place: TopicPartition, left_out: Sequence[errors.SerializationError]) -> None:
        """Count what was left out of a slice, and log it in one line."""
        self.skipped += len(left_out)
        if left_out:
            self._warn(
                f"{len(left_out)} records of {place} left out, the first: {left_out[0].message}"
            )

    def _decided(
        self, row: FetchedRows, cause: Exception, left_out: list[errors.SerializationError]
    ) -> ConsumerRecords | None:
        """Return what takes the place of a row that cannot be deserialised; None: nothing."""
        raw = next(iter(ConsumerRecords(row.place, row.rows, None, None)))
        if not _is_of_the_record(cause):
            assert isinstance(cause, errors.PkError)
            raise type(cause)(f"{place_of(raw)}: {cause.message}", **cause.details) from cause
        error = self._error(raw, cause)
        if self._on_error is None:
            raise error from cause
        error.__cause__ = cause
        given = self._on_error(raw, error)
        if given is None:
            left_out.append(error)
            return None
        if not isinstance(given, Record):
            raise errors.InvalidOption(
                f"on_deserialize_error returned {arguments.shown(given)}: it returns a Record to "
                "be returned, or None to leave the record out",
                option="on_deserialize_error",
            )
        return ConsumerRecords.of(row.place, row.rows, given, row.position_id)

    def _error(self, raw: Record, cause: Exception) -> errors.SerializationError:
        """Return the error that names the record and its part."""
        part = "value"
        try:
            if self._key is not None:
                self._key(raw.topic, raw.key)
        except Exception:
            part = "key"
        what = cause.message if isinstance(cause, errors.PkError) else repr(cause)
        details = cause.details if isinstance(cause, errors.PkError) else {}
        return errors.SerializationError(
            f"{place_of(raw)}: the {part} cannot be deserialised: {what}; seek past it to go on, "
            "or give on_deserialize_error",
            **{
                **details,
                "topic": raw.topic,
                "partition": str(raw.partition),
                "offset": str(raw.offset),
                "part": part,
            },
        )


def place_of(record: Record) -> str:
    """Return a record's place in words."""
    return f"{record.topic}-{record.partition} at offset {record.offset}"


def _is_of_the_record(cause: Exception) -> bool:
    """Return whether the record is to blame (N1)."""
    if isinstance(cause, errors.RegistryError):
        return cause.details.get("status") == _UNKNOWN_SCHEMA
    return not (isinstance(cause, errors.PkError) and cause.retriable)


def _policy(given: Any) -> OnDeserializeError | None:
    if given == "raise":
        return None
    if given == "skip":
        return _skip
    if isinstance(given, str) or not callable(given):
        raise errors.InvalidOption(
            'on_deserialize_error is "raise", "skip", a function or a DeadLetterTopic, not '
            f"{arguments.shown(given)}",
            option="on_deserialize_error",
        )
    chosen: OnDeserializeError = given
    return chosen


def _skip(record: Record, error: errors.SerializationError) -> None:
    return None
