"""What `pk consume` reads: topics by name or by pattern, one partition, and their bounds.

Without bounds the consumer subscribes: partitions and topics that appear later are read, too.  With
bounds, and with --partition, the partitions are those that exist at the start.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import typer

from pk import errors
from pk.cli import positions
from pk.client import arguments
from pk.types import TopicPartition

if TYPE_CHECKING:
    from pk.client.consumer import Consumer


class ReadBounds(NamedTuple):
    """Where to start and to stop; None = as a subscription does, and never."""

    begin: positions.TopicPosition | None = None
    end: positions.TopicPosition | None = None


class TopicChoice(NamedTuple):
    """Topics by name or by pattern, and perhaps one partition of one topic."""

    names: Sequence[str]
    pattern: re.Pattern[str] | None
    partition: int | None


def choice(names: Sequence[str], include: str | None, partition: int | None) -> TopicChoice:
    """Check what the command was given.  Raises `InvalidOption`."""
    if include is None and not names:
        raise errors.InvalidOption("give topics to read, or --include and a regular expression")
    if include is not None and names:
        raise errors.InvalidOption("topics and --include contradict each other: give one")
    if partition is not None and len(names) != 1:
        raise errors.InvalidOption("--partition is of one topic: name it", option="partition")
    pattern = None if include is None else arguments.pattern(include, "--include")
    return TopicChoice(list(dict.fromkeys(names)), pattern, partition)


def begin(
    consumer: Consumer,
    bootstrap: str,
    given: TopicChoice,
    bounds: ReadBounds,
    seconds: float | None,
) -> Mapping[TopicPartition, int]:
    """Make the consumer read what was asked for; return the stops of its partitions.

    bootstrap: of the cluster that lists the topics for a pattern
    seconds: how long one answer may take; None = the client's default

    Raises `UnknownTopicOrPartition`.
    """
    names = given.names if given.pattern is None else _matching(bootstrap, given.pattern, seconds)
    # fails at once for an unknown topic
    places = [place for name in names for place in consumer.partitions_for(name, seconds)]
    if given.partition is None and bounds == ReadBounds():
        if given.pattern is None:
            consumer.subscribe(names)
        else:
            if not names:
                typer.echo(f"no topic matches {given.pattern.pattern!r} yet", err=True)
            consumer.subscribe(pattern=given.pattern)
        return {}
    if given.pattern is not None and not names:
        raise errors.UnknownTopicOrPartition(f"no topic matches {given.pattern.pattern!r}")
    if given.partition is not None:
        place = TopicPartition(names[0], given.partition)
        if place not in places:
            raise errors.UnknownTopicOrPartition(
                f"{place.topic} has no partition {place.partition}: there are {len(places)}"
            )
        places = [place]
    return _assigned(consumer, places, bounds, seconds)


def _matching(bootstrap: str, pattern: re.Pattern[str], seconds: float | None) -> list[str]:
    """Return the topics whose whole name matches; pk's own topics never do."""
    from pk.client.admin import AdminClient

    with AdminClient(bootstrap) as admin:
        listed = admin.list_topics() if seconds is None else admin.list_topics(timeout_s=seconds)
    return [topic.name for topic in listed if pattern.fullmatch(topic.name)]


def _assigned(
    consumer: Consumer, places: list[TopicPartition], bounds: ReadBounds, seconds: float | None
) -> Mapping[TopicPartition, int]:
    consumer.assign(places)

    def at_time(time_ms: int) -> dict[TopicPartition, int]:
        found = consumer.offsets_for_times(dict.fromkeys(places, time_ms), seconds)
        return {place: at.offset if at else -1 for place, at in found.items()}

    first = consumer.beginning_offsets(places, seconds)
    last = consumer.end_offsets(places, seconds)
    if bounds.begin is not None:
        for place, offset in positions.resolved(bounds.begin, first, last, at_time).items():
            consumer.seek(place, offset)
    return {} if bounds.end is None else positions.resolved(bounds.end, first, last, at_time)
