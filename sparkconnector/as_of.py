"""Plans a batch read of one version of each topic's table (AS OF).

The options name a version by number, by time, or by the offsets that it must hold.  The driver
resolves it once.  Every task then reads the files of that version and nothing else: neither the log
nor a newer version, so a repeated read gives the same rows until VACUUM.  Afterwards a task raises
`TableVersionNotFound`, which names the oldest version left.

The rows of a version are committed ones (rule T12).  Retention and compaction that came later do
not change them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pk import errors
from pk.sparkconnector import ranges, table_files, table_versions, tier_scan
from pk.sparkconnector.offsets import Bounds, Range, SourceProgress
from pk.sparkconnector.options import AsOf
from pk.sparkconnector.planner import PartitionTable, Planner, Task

if TYPE_CHECKING:
    from pk.sparkconnector.connection import TopicLeaders
    from pk.sparkconnector.ranges import Curve

#: Turns bounds, start and end of a read into its ranges.
Ranges = Callable[[Sequence[Bounds], SourceProgress, SourceProgress], list[Range]]


class TopicVersion(NamedTuple):
    """One version of a topic's table."""

    uri: str
    storage_options: dict[str, str]
    version: int
    found: table_files.TableFiles


def tasks(planner: Planner, ranges_of: Ranges) -> list[Task]:
    """Return the tasks of a read whose options name a version of the tables.

    Raises `TableVersionNotFound`, `InvalidOption`, `TierUnavailable`, `TierTableChanged`.
    """
    source = planner.source
    assert source.as_of is not None
    bounds: list[Bounds] = []
    tables: dict[tuple[str, int], PartitionTable] = {}
    topics = planner.topics()
    if source.as_of.version >= 0 and len(topics) != 1:
        raise errors.InvalidOption(
            f"versionAsOf is a version of one table, and {len(topics)} topics are read: "
            "subscribe to one, or give timestampAsOf",
            option="versionAsOf",
        )
    for topic in topics:
        wanted = source.ending.offsets.get(topic.name, {}) if source.as_of.pinned else {}
        table = opened(planner, topic, source.as_of, wanted)
        place = tier_scan.ColdRange(table.uri, table.storage_options, version=table.version)
        for partition in sorted(topic.leaders):
            start, end = table.found.starts[partition], table.found.ends[partition]
            bounds.append(Bounds(topic.name, topic.topic_id, partition, start, end))
            tables[topic.name, partition] = PartitionTable.of(place, table.found, partition)
    begin = planner.at(source.starting, bounds, "startingOffsets")
    end_at = planner.at(source.ending, bounds, "endingOffsets")
    whole = [one for one in ranges_of(bounds, begin, end_at) if one.size]
    whole = planner.left(whole, tables)
    ends = {(one.topic, one.partition): one.latest for one in bounds}
    curves = {
        (one.topic, one.partition): _curve(one, tables[one.topic, one.partition]) for one in whole
    }
    return planner.pieces(whole, ends, tables, curves)


def opened(
    planner: Planner, topic: TopicLeaders, as_of: AsOf, wanted: Mapping[int, int]
) -> TopicVersion:
    """Return the version of a topic's table that `as_of` names; `wanted` are its pinned ends."""
    tier = planner.cluster.tier(topic.name)
    if not tier.uri:
        raise errors.InvalidOption(
            f"{topic.name} has no table that can be read as of a version: its setting "
            "tier_enable is off, nothing was tiered yet, or its tier cannot be reached "
            "(pk tier describe)"
        )
    partitions = sorted(topic.leaders)
    version = resolved(tier.uri, tier.storage_options, topic.topic_id, as_of, wanted)
    found = table_files.list_files(
        tier.uri, tier.storage_options, topic.topic_id, partitions, version
    )
    return TopicVersion(tier.uri, tier.storage_options, version, found)


def resolved(
    uri: str,
    storage_options: Mapping[str, str],
    topic_id: str,
    as_of: AsOf,
    wanted: Mapping[int, int],
) -> int:
    """Return the number of the version that `as_of` names; `wanted`: pinned ends by partition."""
    known = table_versions.log_versions(uri, storage_options)
    if as_of.pinned:

        def ends_at(version: int) -> dict[int, int]:
            return table_files.ends_of(uri, storage_options, topic_id, list(wanted), version)

        return table_versions.covering(uri, known, wanted, ends_at)
    if as_of.time_ms >= 0:
        return table_versions.at_time(uri, known, as_of.time_ms)
    return table_versions.numbered(uri, known, as_of.version)


def _curve(one: Range, table: PartitionTable) -> Curve:
    """Return how the bytes of the files are spread over the range."""
    offsets, sizes, total = [0], [0], 0
    for file in sorted(table.files, key=lambda each: each.max_offset):
        total += file.size
        offsets.append(file.max_offset + 1)
        sizes.append(total)
    below = ranges.Curve(offsets, sizes).bytes_at(one.start)
    return ranges.curve(offsets, [size - below for size in sizes], one)
