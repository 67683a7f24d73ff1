"""The progress of a query: the offsets in Spark's checkpoint, and the ranges between two of them.

A `SourceProgress` maps a topic's name to its id, to the next offset of each partition, and to the
leader epoch of the record before that offset.  Spark stores it as JSON:

    {"v": 1, "topics": {"flights":
        {"id": "<uuid>", "offsets": {"0": 123, "1": 456}, "epochs": {"0": 4, "1": 4}}}}

A partition has no epoch if its offset is 0, if the leader no longer knows the epoch, or if a build
wrote the checkpoint that did not store epochs.

Spark compares two offsets as *text*.  Equal progress must therefore have equal JSON: topics are
sorted by name, partitions by number.

`between` turns (start, end) into ranges to read, and returns the losses it finds.  A loss is no
error here: the caller raises it or continues with the rest, as `failOnDataLoss` says.

Invariants
  O1  Equal progress has equal JSON, and parsing the JSON gives the same progress.
  O2  Each range of `between` begins at the start progress.  There are two exceptions: a range that
      a reported loss shortens, and a new partition, which begins at its earliest offset.
  O3  A topic that was deleted and re-created is another log: its offsets are never compared with
      those of the old topic (rule L8).
  O4  If the record before a stored offset has another leader epoch now, an unclean election cut the
      log below the offset (KIP-320).  `between` reports the range that was cut as a loss, and reads
      from where the stored epoch ends (rule S4).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pk import errors
from pk.log.epochs import LeaderEpochs
from pk.sparkconnector.options import EARLIEST, LATEST, OffsetRangeLimit
from pk.types import NONE, EpochStart

VERSION = 1


class Bounds(NamedTuple):
    """The offsets that the broker reports for a partition: `[earliest, latest)` can be read."""

    topic: str
    topic_id: str
    partition: int
    earliest: int
    latest: int  #: the LSO for read_committed, else the high watermark
    epochs: tuple[EpochStart, ...] = ()  #: the newest leader epochs of the partition's log


@dataclass(slots=True, frozen=True)
class TopicProgress:
    """The next offset of each partition of one topic."""

    topic_id: str
    offsets: dict[int, int] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=dict)  #: of the record before each offset


SourceProgress = dict[str, TopicProgress]


class Range(NamedTuple):
    """Offsets `[start, end)` of one partition."""

    topic: str
    topic_id: str
    partition: int
    start: int
    end: int

    @property
    def size(self) -> int:
        return max(0, self.end - self.start)


class Loss(NamedTuple):
    """Records, a partition or a topic that the query expected and that no longer exist."""

    recreated: bool
    words: str


def to_json(progress: SourceProgress) -> dict[str, Any]:
    """Return the progress as JSON, sorted so that equal progress gives equal text (O1)."""
    return {
        "v": VERSION,
        "topics": {
            topic: {
                "id": progress[topic].topic_id,
                "offsets": {str(p): int(o) for p, o in sorted(progress[topic].offsets.items())},
                **_epochs_json(progress[topic]),
            }
            for topic in sorted(progress)
        },
    }


def _epochs_json(topic: TopicProgress) -> dict[str, Any]:
    if not topic.epochs:
        return {}
    return {"epochs": {str(p): int(e) for p, e in sorted(topic.epochs.items())}}


def from_json(stored: Mapping[str, Any]) -> SourceProgress:
    """Parse the JSON of a checkpoint.

    Raises `InvalidOption` if pk did not write it, `NewerFormat` if a newer pk did: its version is
    higher, or it has fields that this build does not know.
    """
    version = stored.get("v")
    if isinstance(version, int) and version > VERSION:
        raise errors.NewerFormat(
            f"the checkpoint has offsets of format {version}; this pk reads up to {VERSION}: "
            "run the query with a newer pk"
        )
    try:
        if version != VERSION:
            raise ValueError(version)
        _refuse_unknown(set(stored) - {"v", "topics"})
        for entry in stored["topics"].values():
            _refuse_unknown(set(entry) - {"id", "offsets", "epochs"})
        return {
            str(topic): TopicProgress(
                str(entry["id"]), _numbers(entry["offsets"]), _numbers(entry.get("epochs", {}))
            )
            for topic, entry in sorted(stored["topics"].items())
        }
    except (KeyError, TypeError, ValueError, AttributeError) as cause:
        raise errors.InvalidOption(
            f"the checkpoint's offsets are not pk's: {dict(stored)!r}; a query that read from "
            "another source needs a new checkpointLocation"
        ) from cause


def _numbers(stored: Mapping[str, Any]) -> dict[int, int]:
    return {int(p): int(o) for p, o in sorted(stored.items(), key=lambda each: int(each[0]))}


def _refuse_unknown(fields: Iterable[str]) -> None:
    if fields:
        raise errors.NewerFormat(
            f"the checkpoint's offsets have fields that this pk does not know "
            f"({', '.join(sorted(fields))}): run the query with a newer pk"
        )


def of(bounds: Iterable[Bounds], chosen: Mapping[tuple[str, int], int]) -> SourceProgress:
    """Return a progress with the `chosen` offsets for the partitions of `bounds`."""
    progress: SourceProgress = {}
    for one in sorted(bounds):
        entry = progress.setdefault(one.topic, TopicProgress(one.topic_id))
        entry.offsets[one.partition] = chosen[one.topic, one.partition]
    return progress


def with_epochs(progress: SourceProgress, bounds: Iterable[Bounds]) -> SourceProgress:
    """Return the progress with the leader epoch of the record before each offset, where known."""
    found = {
        topic: TopicProgress(entry.topic_id, dict(entry.offsets))
        for topic, entry in progress.items()
    }
    for one in bounds:
        entry = found.get(one.topic)
        if entry is None or entry.topic_id != one.topic_id or one.partition not in entry.offsets:
            continue
        epoch = _epochs_of(one).epoch_of(entry.offsets[one.partition] - 1)
        if epoch != NONE:
            entry.epochs[one.partition] = epoch
    return found


def same_offsets(one: SourceProgress, other: SourceProgress) -> bool:
    """Return whether two progresses have equal topics and offsets; epochs do not count."""
    return {topic: (entry.topic_id, entry.offsets) for topic, entry in one.items()} == {
        topic: (entry.topic_id, entry.offsets) for topic, entry in other.items()
    }


def _epochs_of(one: Bounds) -> LeaderEpochs:
    return LeaderEpochs(list(one.epochs))


def latest(bounds: Iterable[Bounds]) -> SourceProgress:
    """Return the progress at the end of every partition."""
    listed = list(bounds)
    return of(listed, {(one.topic, one.partition): one.latest for one in listed})


# -- where a query begins and ends ----------------------------------------------------------------


def at_position(
    position: OffsetRangeLimit,
    bounds: Iterable[Bounds],
    found: Mapping[tuple[str, int], int | None],
    name: str,
    when_no_such_time: str = "latest",
) -> tuple[SourceProgress, list[Loss]]:
    """Return the progress that `position` names, and the losses.

    `found` holds the offset for each requested time; None = no record at or after that time.  An
    explicit offset outside the log is a loss and is moved to the nearest readable offset.  Raises
    `InvalidOption` if JSON options do not name exactly the partitions read, or if no record has the
    requested time and the strategy is "error".
    """
    listed = sorted(bounds)
    losses: list[Loss] = []
    if position.kind in ("offsets", "times"):
        given = position.offsets if position.kind == "offsets" else position.times
        _check_exact(given, listed, name)
    chosen: dict[tuple[str, int], int] = {}
    for one in listed:
        key = (one.topic, one.partition)
        if position.kind == "earliest":
            chosen[key] = one.earliest
        elif position.kind == "latest":
            chosen[key] = one.latest
        elif position.kind == "offsets":
            chosen[key], loss = _explicit(position.offsets[one.topic][one.partition], one, name)
            losses += loss
        else:
            offset = found[key]
            if offset is None and when_no_such_time == "error":
                raise errors.InvalidOption(
                    f"{name}: {one.topic}-{one.partition} has no record at or after that time; "
                    "startingOffsetsByTimestampStrategy=latest would begin at its end"
                )
            chosen[key] = (
                one.latest if offset is None else min(max(offset, one.earliest), one.latest)
            )
    return of(listed, chosen), losses


def times_of(position: OffsetRangeLimit, bounds: Iterable[Bounds]) -> dict[tuple[str, int], int]:
    """Return the times to look up for `position`, by partition; {} if it names no time."""
    if position.kind == "time":
        return {(one.topic, one.partition): position.time_ms for one in bounds}
    if position.kind == "times":
        return {
            (one.topic, one.partition): position.times[one.topic][one.partition]
            for one in bounds
            if one.partition in position.times.get(one.topic, {})
        }
    return {}


def _check_exact(
    given: Mapping[str, Mapping[int, int]], bounds: Iterable[Bounds], name: str
) -> None:
    named = {(topic, partition) for topic, listed in given.items() for partition in listed}
    there = {(one.topic, one.partition) for one in bounds}
    lacking = ", ".join(f"{topic}-{partition}" for topic, partition in sorted(there - named))
    unknown = ", ".join(f"{topic}-{partition}" for topic, partition in sorted(named - there))
    if lacking:
        raise errors.InvalidOption(
            f"{name} must name every partition that is read (-2 earliest, -1 latest); "
            f"lacking: {lacking}"
        )
    if unknown:
        raise errors.InvalidOption(f"{name} names partitions that are not read: {unknown}")


def _explicit(offset: int, one: Bounds, name: str) -> tuple[int, list[Loss]]:
    if offset == EARLIEST:
        return one.earliest, []
    if offset == LATEST:
        return one.latest, []
    if one.earliest <= offset <= one.latest:
        return offset, []
    clamped = one.earliest if offset < one.earliest else one.latest
    return clamped, [
        Loss(
            False,
            f"{name} asks for {offset} of {one.topic}-{one.partition}, which has "
            f"[{one.earliest}, {one.latest})",
        )
    ]


# -- from start to end ----------------------------------------------------------------------------


def between(
    start: SourceProgress, end: SourceProgress, bounds: Iterable[Bounds]
) -> tuple[list[Range], list[Loss]]:
    """Return the ranges from `start` to `end` that can be read now, and the losses (O2 to O4)."""
    now = {(one.topic, one.partition): one for one in bounds}
    losses = _vanished(start, end)
    ranges: list[Range] = []
    for topic in sorted(end):
        before = start.get(topic)
        if before is not None and before.topic_id != end[topic].topic_id:
            losses.append(_recreated(topic))
            before = None
        for partition, stop in sorted(end[topic].offsets.items()):
            one = now.get((topic, partition))
            begin = None if before is None else before.offsets.get(partition)
            if one is None or one.topic_id != end[topic].topic_id:
                if stop != begin:
                    losses.append(_recreated(topic) if one else _gone(topic, partition))
                continue
            new = begin is None and topic in start and before is not None
            if before is not None and begin is not None:
                begin, lost = _cut(one, begin, before.epochs.get(partition, NONE))
                losses += lost
            stop, lost = _cut(one, stop, end[topic].epochs.get(partition, NONE))
            losses += lost
            if lost:  # the next batch begins at the same place
                stop = max(stop, begin or 0)
            found, lost = _one_range(one, begin, stop, new)
            losses += lost
            if found.size:
                ranges.append(found)
    return ranges, list(dict.fromkeys(losses))


def _cut(one: Bounds, offset: int, epoch: int) -> tuple[int, list[Loss]]:
    """Return where to read from, and the loss, if the record before `offset` is another one (O4).

    This function does not report a log that ends below `offset`; `_one_range` does.
    """
    epochs = _epochs_of(one)
    now = epochs.epoch_of(offset - 1)
    if NONE in (epoch, now) or epoch == now:
        return offset, []
    ended = epochs.end_offset_for(epoch, one.latest).start_offset
    at = offset - 1 if ended == NONE else min(ended, offset - 1)
    return max(at, one.earliest), [
        Loss(
            False,
            f"offsets [{at}, {offset}) of {one.topic}-{one.partition} were cut by an unclean "
            f"election: the record before offset {offset} was of leader epoch {epoch}, and is of "
            f"epoch {now} now",
        )
    ]


def _one_range(one: Bounds, begin: int | None, stop: int, new: bool) -> tuple[Range, list[Loss]]:
    name = f"{one.topic}-{one.partition}"
    losses: list[Loss] = []
    if begin is None:
        begin = one.earliest
        if new and begin > 0:
            losses.append(Loss(False, f"the new partition {name} begins at {begin}, not at 0"))
    if stop < begin or stop > one.latest:
        short = min(stop, one.latest)
        losses.append(Loss(False, f"{name} ended at {max(begin, stop)} and now ends at {short}"))
        stop = short
    elif begin < one.earliest and begin < stop:
        missing = f"[{begin}, {min(one.earliest, stop)})"
        losses.append(Loss(False, f"offsets {missing} of {name} were deleted or aged out"))
        begin = min(one.earliest, stop)
    return Range(one.topic, one.topic_id, one.partition, min(begin, stop), stop), losses


def _vanished(start: SourceProgress, end: SourceProgress) -> list[Loss]:
    losses = []
    for topic in sorted(start):
        left = end[topic].offsets if topic in end else {}
        same = topic not in end or end[topic].topic_id == start[topic].topic_id
        losses += [_gone(topic, p) for p in sorted(start[topic].offsets) if same and p not in left]
    return losses


def _gone(topic: str, partition: int) -> Loss:
    return Loss(False, f"{topic}-{partition} is no more")


def _recreated(topic: str) -> Loss:
    return Loss(
        True, f"topic re-created: {topic} was deleted and created again under the same name"
    )


def error_of(losses: Iterable[Loss]) -> errors.PkError:
    """Return the error that a query with failOnDataLoss raises."""
    listed = list(losses)
    kind = errors.TopicRecreated if any(loss.recreated for loss in listed) else errors.DataLoss
    words = "; ".join(loss.words for loss in listed)
    return kind(
        f"{words}. Records that this query has not read may be lost. To go on with what is there, "
        "set failOnDataLoss to false."
    )
