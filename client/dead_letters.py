"""A dead-letter topic: where a consumer sends the records that it cannot deserialise.

Invariants
  N1  A record is acknowledged by the dead-letter topic before the consumer's position passes it.
      If a consumer ends in between, the record is sent twice, and never missing.
"""

from __future__ import annotations

from pk import errors
from pk.client import arguments
from pk.client.deserialization import place_of
from pk.client.producer import Producer
from pk.types import Record

#: The longest text of an error in a header, in characters.
_TEXT_MAX = 1000


class DeadLetterTopic:
    """Sends records that cannot be deserialised to a topic, for `on_deserialize_error`.

    A dead-letter record has the key, value and headers of the record as they were.  Headers say
    where it was and what was wrong, under the names of Kafka Connect (KIP-298):
    `__connect.errors.topic`, `.partition`, `.offset`, `.exception.class.name`,
    `.exception.message`.  The poll continues once the record is acknowledged.  If it is not, the
    poll raises the error of `send`, and the next poll sends the record again.

        >>> errors_of = DeadLetterTopic("flights.dlq", producer)
        >>> Consumer("localhost:9092", value_deserializer="json", on_deserialize_error=errors_of)
    """

    def __init__(self, topic: str, producer: Producer) -> None:
        """topic: another one than those that are read.  producer: it stays the caller's."""
        self._topic = arguments.topic(topic)
        if not isinstance(producer, Producer) or not producer._takes_bytes:
            raise errors.InvalidOption(
                "producer must be a Producer without serializers, because keys and values are sent "
                f"as they were; not {arguments.shown(producer)}",
                option="producer",
            )
        self._producer = producer

    def __call__(self, record: Record, error: errors.SerializationError) -> None:
        """Send the record and wait for its acknowledgement.

        Raises the errors of `Producer.send`, `UnknownTopicOrPartition` soon if there is no
        dead-letter topic, and `InvalidOption` for a record of the dead-letter topic itself.
        """
        if record.topic == self._topic:
            raise errors.InvalidOption(
                f"{place_of(record)} cannot be deserialised, and {self._topic} is the dead-letter "
                "topic itself: read it without a deserialiser",
                option="on_deserialize_error",
            ) from error
        cause = error.__cause__ or error
        told = {
            "topic": record.topic,
            "partition": str(record.partition),
            "offset": str(record.offset),
            "exception.class.name": f"{type(cause).__module__}.{type(cause).__qualname__}",
            "exception.message": error.message[:_TEXT_MAX],
        }
        headers = [
            *record.headers,
            *((f"__connect.errors.{name}", text.encode()) for name, text in told.items()),
        ]
        stamp = record.timestamp_ms if record.timestamp_ms >= 0 else None
        self._producer.partitions_for(self._topic)  # else `send` waits long for a missing topic
        self._producer.send(
            self._topic, record.value, record.key, headers, timestamp_ms=stamp
        ).result()
