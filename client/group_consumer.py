"""The part of a consumer that belongs to its group: commits, and changes of its assignment.

A change is applied from within a poll, in the application's thread: the listener, the commit of
what was returned before, then the new assignment.  The membership itself runs on the client's loop
(client/group_membership.py).

Invariants
  H1  Only what an earlier poll has returned is committed by itself: the position as of the call.
  H2  A listener of revoked partitions may commit them; lost partitions have another owner already.
  H3  A commit carries what was true of its positions: the member, the generation, the topic ids.
      After the member was removed, nothing is committed until polls return records again.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from pk import errors
from pk.client import arguments
from pk.client.fetch_buffer import FetchBuffer
from pk.client.fetch_engine import FetchEngine
from pk.client.group_membership import GroupMembership
from pk.client.group_types import (
    AssignmentChange,
    ConsumerGroupMetadata,
    OffsetAndMetadata,
    OffsetsToCommit,
)
from pk.client.offsets import OFFSET_MAX
from pk.client.records import ConsumerRecords
from pk.client.waiting import OneThread, one_thread
from pk.clock import monotonic_s
from pk.types import PartitionKey, TopicPartition

#: How long `close` waits for its commit.
CLOSE_S = 5.0
#: Returns offsets with what is known of them on the loop, where it is called (H3).
Capture = Callable[[], OffsetsToCommit]
#: A listener: it gets the partitions that are assigned, revoked or lost.
Listener = Callable[[list[TopicPartition]], Any]


class GroupConsumer(ABC):
    """What `Consumer` has of its group."""

    _options: dict[str, Any]
    _engine: FetchEngine
    _fetch_buffer: FetchBuffer
    _lines: deque[ConsumerRecords]
    _thread: Any
    _one_thread: OneThread
    _closed: bool

    def __init__(self) -> None:
        self._membership: GroupMembership | None = None
        self._on_assigned: Listener | None = None
        self._on_revoked: Listener | None = None
        self._on_lost: Listener | None = None
        self._commit_at_s = 0.0  #: when offsets are committed by themselves next
        self._following = False  #: a listener of a change may poll

    # -- implemented by the consumer ---------------------------------------------------------------

    @abstractmethod
    def assignment(self) -> list[TopicPartition]: ...

    @abstractmethod
    def _call(self, function: Any) -> Any: ...

    def _api_s(self, timeout_s: float | None) -> float:
        """Return the time-out of a call in seconds; None = default_api_timeout_ms."""
        if timeout_s is None:
            return float(self._options["default_api_timeout_ms"] / 1000)
        return arguments.seconds(timeout_s)

    def _check_open(self) -> None:
        if self._closed:
            raise errors.ClosedError("the consumer was closed")
        self._thread.check_process()

    # -- commits -----------------------------------------------------------------------------------

    def _member(self) -> GroupMembership:
        self._check_open()
        if self._membership is None:
            raise errors.InvalidRequest("this consumer has no group: set group_id")
        return self._membership

    @one_thread
    def commit(
        self,
        offsets: Mapping[TopicPartition, int | OffsetAndMetadata] | None = None,
        *,
        asynchronous: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Commit the offsets of the next records to process.

        offsets: partition → offset, or an `OffsetAndMetadata`; None = the positions of all assigned
        partitions, which follow everything that polls have returned.
        asynchronous: do not wait; a failure is logged.  timeout_s: seconds; None =
        default_api_timeout_ms.

        Raises `UnknownMemberId` or `IllegalGeneration` if the group has given the partitions to
        other members, and `RebalanceInProgress` if this consumer has no assignment now: poll again,
        and commit what polls return then.  Raises `NotPartitionOwner`, `FencedInstanceId`,
        `NonEmptyGroup`, `UnknownTopicId` for a deleted topic, `RequestTimedOut`.
        """
        member = self._member()
        capture = self._positions() if offsets is None else self._given(offsets)
        if asynchronous:
            self._commit_soon(member, capture)
            return
        seconds = self._api_s(timeout_s)
        self._thread.run(_commit(member, capture, int(seconds * 1000)), seconds)

    @one_thread
    def committed(self, partition: TopicPartition, timeout_s: float | None = None) -> int | None:
        """Return the committed offset of a partition; None = the group has none.

        timeout_s: seconds; None = default_api_timeout_ms.  Raises `UnstableOffsetCommit` if an open
        transaction holds the offset for so long (read_committed only), `RequestTimedOut`,
        `UnknownTopicOrPartition`, `InvalidRequest` without a group_id.
        """
        place = arguments.place(partition)
        member = self._member()
        seconds = self._api_s(timeout_s)
        work = member.commits.committed([place], int(seconds * 1000))
        found: OffsetAndMetadata | None = self._thread.run(work, seconds)[place]
        return None if found is None else found.offset

    def group_metadata(self) -> ConsumerGroupMetadata:
        """Return the group, the member, the generation and the topic ids that are read now.

        Raises `RebalanceInProgress` if this consumer has subscribed and has no assignment now: poll
        again, and commit what polls return then.
        """
        member = self._member()
        found: ConsumerGroupMetadata = self._call(member.committer)
        return found

    def _positions(self) -> Capture:
        """Capture the position of each assigned partition that has one (H3)."""
        found: dict[TopicPartition, OffsetAndMetadata] = {}
        ids: dict[TopicPartition, int] = {}
        for place in self.assignment():
            position = self._next_line(place) or self._fetch_buffer.position_and_id(place)
            if position is not None:
                found[place] = OffsetAndMetadata(position[0])
                ids[place] = position[1]
        member = self._member()

        def capture() -> OffsetsToCommit:
            keys = self._engine.fetcher.keys_of(ids)
            offsets = {place: each for place, each in found.items() if place in keys}
            known = {place: key for place, key in keys.items() if key is not None}
            return OffsetsToCommit(offsets, known, member.committer())

        return capture

    def _given(self, offsets: Mapping[TopicPartition, int | OffsetAndMetadata]) -> Capture:
        """Capture offsets of the application, for the topics that are read now (H3)."""
        wanted = to_commit(offsets)
        member = self._member()
        fetcher = self._engine.fetcher

        def capture() -> OffsetsToCommit:
            ids = {place: fetcher.position_id(place) for place in wanted}
            here = {place: each for place, each in ids.items() if each is not None}
            keys = {**fetcher.keys_of(here), **member.applied}
            known = {place: key for place in wanted if (key := keys.get(place)) is not None}
            return OffsetsToCommit(wanted, known, member.committer())

        return capture

    def _commit_soon(self, member: GroupMembership, capture: Capture) -> None:
        timeout_ms = self._options["request_timeout_ms"]

        def commit() -> None:
            wanted = capture()
            if wanted.offsets:
                member.commits.commit_soon(wanted, timeout_ms)

        self._call(commit)

    def _next_line(self, place: TopicPartition) -> tuple[int, int] | None:
        """Return offset and position id of the next record that iteration holds of a partition."""
        for each in self._lines:
            offset = each.next_offset if each.place == place else None
            if offset is not None:
                return offset, each.position_id
        return None

    def _next_record_of(self, place: TopicPartition) -> int | None:
        """Return the offset of the next record that iteration holds of a partition."""
        found = self._next_line(place)
        return None if found is None else found[0]

    def _drop_lines(self, keep: Iterable[TopicPartition]) -> None:
        """Drop polled records that were not handed out yet, except of these partitions."""
        kept = set(keep)
        for each in self._lines:
            if each.place not in kept:
                each.drop()  # a running iteration drops them too

    # -- changes of the assignment -----------------------------------------------------------------

    def _listen(
        self, on_assigned: Listener | None, on_revoked: Listener | None, on_lost: Listener | None
    ) -> None:
        """Set the listeners.  Raises `InvalidOption` for one that cannot be called."""
        given = {"on_assigned": on_assigned, "on_revoked": on_revoked, "on_lost": on_lost}
        for name, each in given.items():
            if each is not None:
                arguments.function(each, name)
        named = [name for name, each in given.items() if each is not None]
        if self._membership is None and named:
            raise errors.InvalidOption(f"{', '.join(named)}: listeners need a group; set group_id")
        self._on_assigned, self._on_revoked, self._on_lost = on_assigned, on_revoked, on_lost

    @contextlib.contextmanager
    def _polling(self) -> Iterator[None]:
        """While a poll waits, however long, the application polls (max_poll_interval_ms)."""
        member = self._membership
        if member is None:
            yield
            return
        member.polling = True
        try:
            yield
        finally:
            member.polled()
            member.polling = False

    def _group_waits(self) -> bool:
        """Whether the next poll has something to do for the group."""
        member = self._membership
        return member is not None and (member.change is not None or member.problem is not None)

    def _follow_group(self) -> None:
        """Apply a change that waits, and commit what is due; every poll calls it first."""
        member = self._membership
        if member is None or self._closed or self._following:
            return
        self._following = True
        try:
            member.polled()
            if not _lost(member):
                self._commit_if_due(member)
            change, problem = member.change, member.problem
            if change is not None:
                self._apply(member, change)
            if problem is not None:
                gone = self.assignment()
                self._take({}, {})
                self._lose(gone)
                member.problem = None
                raise problem
        finally:
            self._following = False

    def _commit_if_due(self, member: GroupMembership) -> None:
        if not self._options["enable_auto_commit"]:
            return
        now_s = monotonic_s()
        if now_s >= self._commit_at_s:
            self._commit_at_s = now_s + self._options["auto_commit_interval_ms"] / 1000
            if self.assignment():
                try:
                    self._commit_soon(member, self._positions())  # H1
                except errors.ClosedError:
                    raise
                except errors.PkError as failure:  # the member was removed meanwhile
                    member.commits.report_uncommitted(member.group_id, failure)

    def _apply(self, member: GroupMembership, change: AssignmentChange) -> None:
        """Give up what the change takes, then take what it gives."""
        before, after = member.applied, change.keys
        here = self.assignment()
        stays = {place for place in here if place in after and before.get(place) == after[place]}
        gone = [place for place in here if place not in stays]
        if gone and change.lost:
            self._lose(gone)
        elif gone:
            self._give_up(member, gone)
        added = [place for place in after if place not in stays]
        starts = {place: change.assigned.get(place) for place in after}
        self._drop_lines(stays)
        self._take(starts, after)
        self._call(lambda: member.has_applied(change))
        if self._on_assigned is not None and not change.lost and (added or not gone):
            self._on_assigned(added)

    def _lose(self, gone: list[TopicPartition]) -> None:
        """Call the listener for partitions that are not the member's any more (H2)."""
        listener = self._on_lost or self._on_revoked
        if gone and listener is not None:
            listener(gone)

    def _give_up(
        self, member: GroupMembership, gone: list[TopicPartition], most_s: float = math.inf
    ) -> None:
        """Call the listener, and commit what was returned of the partitions (H1)."""
        if self._on_revoked is not None:
            self._on_revoked(gone)
        if not self._options["enable_auto_commit"]:
            return
        seconds = min(most_s, self._options["request_timeout_ms"] / 1000)
        try:
            work = _commit(member, self._positions(), int(seconds * 1000), gone)
            self._thread.run(work, seconds)
        except errors.ClosedError:
            raise
        except errors.PkError as failure:
            member.commits.report_uncommitted(member.group_id, failure)

    def _take(
        self,
        starts: Mapping[TopicPartition, int | None],
        keys: Mapping[TopicPartition, PartitionKey],
    ) -> None:
        """Read exactly these partitions; those that stay keep their positions and buffers."""
        self._call(lambda: self._engine.assign_for_group(starts, keys))
        self._drop_lines(keys)
        self._fetch_buffer.purge()

    def _leave_group(self) -> None:
        """Commit, call the listener and leave, as the consumer takes other partitions."""
        member = self._membership
        if member is not None and member.subscribed:
            self._give_up_all()
            self._thread.run(member.close())

    async def _close_all(self) -> None:
        if self._membership is not None:
            await self._membership.close()
        await self._engine.close()

    def _give_up_all(self) -> None:
        """Call the listener for every partition, and commit what was returned, also while a change
        waits that no poll has applied.
        """
        member = self._membership
        if member is None or not member.subscribed:
            return
        gone = self.assignment()
        if gone and _lost(member):
            self._lose(gone)
        elif gone:
            self._give_up(member, gone, CLOSE_S)


def _lost(member: GroupMembership) -> bool:
    """Whether the partitions that the consumer reads are not the member's any more."""
    change = member.change
    return member.problem is not None or (change is not None and change.lost)


async def _commit(
    member: GroupMembership,
    capture: Capture,
    timeout_ms: int,
    only: Collection[TopicPartition] | None = None,
) -> None:
    """Capture offsets and commit them, both on the loop: one change of threads for both.

    only: the partitions to commit; None = all that are captured
    """
    wanted = capture()
    if only is not None:
        offsets = {place: each for place, each in wanted.offsets.items() if place in only}
        wanted = wanted._replace(offsets=offsets)
    await member.commits.commit(wanted, timeout_ms)


def to_commit(
    offsets: Mapping[TopicPartition, int | OffsetAndMetadata],
) -> dict[TopicPartition, OffsetAndMetadata]:
    """Return checked offsets.  Raises `TypeError` and `InvalidOption`."""
    found: dict[TopicPartition, OffsetAndMetadata] = {}
    for place, given in arguments.by_place(offsets, "offsets", "offsets").items():
        each = given if isinstance(given, OffsetAndMetadata) else OffsetAndMetadata(given)
        offset = arguments.whole(each.offset, f"offsets[{place}]", 0, OFFSET_MAX)
        found[place] = each._replace(offset=offset)
    return found
