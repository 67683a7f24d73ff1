"""The part of a consumer that belongs to its group: commits, and changes of its assignment.

A change is applied from within a poll, in the application's thread: the listener, the commit of
what was returned before, then the new assignment.  The membership itself runs on the client's loop
(client/group_membership.py).

Invariants
  H1  Only what an earlier poll has returned is committed by itself: the position as of the call.
  H2  A listener of revoked partitions may commit them; lost partitions have another owner already.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pk import errors
from pk.client import arguments
from pk.client.fetch_buffer import FetchBuffer
from pk.client.fetch_engine import FetchEngine
from pk.client.group_membership import (
    AssignmentChange,
    ConsumerGroupMetadata,
    GroupMembership,
    OffsetAndMetadata,
)
from pk.client.offsets import OFFSET_MAX
from pk.client.waiting import OneThread, one_thread
from pk.clock import monotonic_s
from pk.types import TopicPartition

#: How long `close` waits for its commit.
CLOSE_S = 5.0
#: A listener: it gets the partitions that are assigned, revoked or lost.
Listener = Callable[[list[TopicPartition]], Any]


class GroupConsumer(ABC):
    """What `Consumer` has of its group."""

    _options: dict[str, Any]
    _engine: FetchEngine
    _fetch_buffer: FetchBuffer
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

    @abstractmethod
    def _next_record_of(self, place: TopicPartition) -> int | None: ...

    @abstractmethod
    def _drop_lines(self, keep: Iterable[TopicPartition]) -> None: ...

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
        other members, `NotPartitionOwner`, `FencedInstanceId`, `NonEmptyGroup`, `RequestTimedOut`.
        """
        member = self._member()
        wanted = self._positions() if offsets is None else to_commit(offsets)
        if asynchronous:
            self._call(lambda: member.commit_soon(wanted))
            return
        seconds = self._api_s(timeout_s)
        self._thread.run(member.commit(wanted, int(seconds * 1000)), seconds)

    @one_thread
    def committed(self, partition: TopicPartition, timeout_s: float | None = None) -> int | None:
        """Return the committed offset of a partition; None = the group has none.

        timeout_s: seconds; None = default_api_timeout_ms.  Raises `RequestTimedOut`,
        `UnknownTopicOrPartition`, `InvalidRequest` without a group_id.
        """
        place = arguments.place(partition)
        member = self._member()
        seconds = self._api_s(timeout_s)
        work = member.committed([place], int(seconds * 1000))
        found: OffsetAndMetadata | None = self._thread.run(work, seconds)[place]
        return None if found is None else found.offset

    def group_metadata(self) -> ConsumerGroupMetadata:
        """Return the group, the member and its generation, as commits name them now."""
        found: ConsumerGroupMetadata = self._member().metadata()
        return found

    def _positions(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return the position of each assigned partition that has one."""
        found: dict[TopicPartition, OffsetAndMetadata] = {}
        for place in self.assignment():
            offset = self._next_record_of(place)
            if offset is None:
                offset = self._fetch_buffer.position(place)
            if offset is not None:
                found[place] = OffsetAndMetadata(offset)
        return found

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
            self._commit_if_due(member)
            change = member.change
            if change is not None:
                self._apply(member, change)
            problem, member.problem = member.problem, None
            if problem is not None:
                self._take({}, ())
                raise problem
        finally:
            self._following = False

    def _commit_if_due(self, member: GroupMembership) -> None:
        if not self._options["enable_auto_commit"]:
            return
        now_s = monotonic_s()
        if now_s >= self._commit_at_s:
            self._commit_at_s = now_s + self._options["auto_commit_interval_ms"] / 1000
            positions = self._positions()  # H1
            if positions:
                self._call(lambda: member.commit_soon(positions))

    def _apply(self, member: GroupMembership, change: AssignmentChange) -> None:
        """Give up what the change takes, then take what it gives."""
        here = self.assignment()
        gone = [place for place in here if place not in change.owned]
        if gone and change.lost:
            listener = self._on_lost or self._on_revoked
            if listener is not None:
                listener(gone)
        elif gone:
            self._give_up(member, gone)
        added = [place for place in change.owned if place not in here]
        starts = {place: change.assigned.get(place) for place in change.owned}
        self._take(starts, change.owned)
        self._call(lambda: member.has_applied(change))
        if self._on_assigned is not None and not change.lost and (added or not gone):
            self._on_assigned(added)

    def _give_up(
        self, member: GroupMembership, gone: list[TopicPartition], most_s: float = math.inf
    ) -> None:
        """Call the listener, and commit what was returned of the partitions (H1)."""
        if self._on_revoked is not None:
            self._on_revoked(gone)
        if not self._options["enable_auto_commit"]:
            return
        positions = {place: each for place, each in self._positions().items() if place in gone}
        seconds = min(most_s, self._options["request_timeout_ms"] / 1000)
        try:
            self._thread.run(member.commit(positions, int(seconds * 1000)), seconds)
        except errors.ClosedError:
            raise
        except errors.PkError as failure:
            member.report_uncommitted(failure)

    def _take(
        self, starts: Mapping[TopicPartition, int | None], owned: Iterable[TopicPartition]
    ) -> None:
        """Read exactly these partitions; those that stay keep their positions and buffers."""
        self._call(lambda: self._engine.assign_for_group(starts))
        self._drop_lines(tuple(owned))
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
        """Call the listener for every partition, and commit what was returned."""
        member = self._membership
        if member is None or not member.subscribed:
            return
        gone = self.assignment()
        if gone and member.change is None and member.problem is None:
            self._give_up(member, gone, CLOSE_S)


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
