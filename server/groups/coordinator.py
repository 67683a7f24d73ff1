"""The group coordinator of one broker: a host for each partition of `__consumer_offsets` that the
broker leads.

World-generic.  The decisions are the machine's (machine.py); this module gives it what a pure core
has not: the metadata image, the clocks, and the requests that wait.

Invariants
  N1  A partition is hosted in the leader epoch in which this broker leads it.  When that epoch ends
      the host ends.
  N2  While the host replays, requests get CoordinatorLoading.
  N3  After every replay, also after a failed write, every member has a whole session and every
      rebalance a whole timeout.
  N4  No reply leaves a broker without contact to the controller: another broker may coordinate the
      partition by then.
  N5  No offset expires while the clock is not trusted (rule L10).  Sessions are monotonic.
  N6  A join or a sync waits for other members at most JOIN_WAIT_MS, and a third of the member's
      session timeout.  Then it is answered `pending` and the client asks again.
  N7  A commit of a transaction that waits for the transaction's coordinator counts as pending:
      a fetch with require_stable waits for its outcome.
  N8  No session ends because this broker had no contact to the controller and refused heartbeats:
      sessions and timeouts begin again when the contact is regained.
  N9  A change of a group wakes its waiting joins and syncs only if the state or the generation
      changes.
  N10 A heartbeat renews the session when it arrives.  It waits for news (rule P5), at most a part
      of its session, and its wait renews nothing: a member that died must not live in its wait.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from pk import errors, limits
from pk.backoff import Backoff
from pk.effects import Effect, Publish
from pk.group_ids import PARTITIONS, TOPIC, partition_of_group
from pk.server.groups import commands, records
from pk.server.groups.groups import ConsumerGroup
from pk.server.groups.hosted_groups import HostedGroups
from pk.server.groups.machine import GroupCoordinator
from pk.server.groups.sessions import MemberSessions
from pk.server.groups.state import keys_of
from pk.server.groups.waiting_heartbeats import check
from pk.server.metadata.cache import MetadataCache
from pk.server.replica.context import ControllerContact, Environment, MetadataProgress
from pk.server.replica.partition import Partition
from pk.server.replica.replay_log import PartitionReplayLog
from pk.server.runtime.replayed_host import ReplayedHost
from pk.tasks import TaskRegistry
from pk.types import NONE, Epoch, PartitionKey, TopicId
from pk.wire import frames
from pk.wire import pk_pb2 as wire

TICK_MS = 100
#: How long a join or a sync waits for other members (N6).
JOIN_WAIT_MS = 5_000
#: A heartbeat waits for at most this part of its member's session (N10).
HEARTBEAT_WAIT_PART = 3
#: How often offsets are looked at for expiry, and how many groups one command looks at.
EXPIRE_MS = 600_000
EXPIRE_GROUPS = 100
BACKOFF_MS = (50, 2_000)
#: How long a request waits for the metadata that its client knows.
METADATA_WAIT_MS = 3_000
#: How long a commit is parked.
REGISTER_MS = 10_000
MINUTE_MS = 60_000


class GroupClock(Protocol):
    """The broker's wall clock (broker/clock_watch.py)."""

    def trusted_ms(self) -> int | None: ...


class GroupCoordinators:
    """The coordinator partitions of one broker."""

    def __init__(
        self,
        env: Environment,
        metadata: MetadataCache,
        contact: ControllerContact,
        clocks: GroupClock,
    ) -> None:
        self._env = env
        self._metadata = metadata
        self._contact = contact
        self._clocks = clocks
        self._hosted: dict[int, HostedGroups] = {}
        self._tasks = TaskRegistry(partial(env.bug, "a group coordinator"))
        self._ticking = False  #: from the first partition on that this broker coordinates

    async def close(self) -> None:
        """End every host."""
        hosted, self._hosted = list(self._hosted.values()), {}
        await self._tasks.close()
        for each in hosted:
            await each.close()

    def groups_here(self) -> dict[str, ConsumerGroup]:
        """Return the groups that this broker coordinates now."""
        return {
            name: group for _, _, groups in self.coordinated() for name, group in groups.items()
        }

    def coordinated(self) -> list[tuple[int, Epoch, Mapping[str, ConsumerGroup]]]:
        """Return the partitions that this broker coordinates now, their epochs and groups."""
        return [
            (each.number, each.epoch, each.groups)
            for each in self._hosted.values()
            if not each.reading
        ]

    # -- leadership ------------------------------------------------------------------------------

    def partition_moved(self, partition: Partition) -> None:
        """Host the partition, or end its host, if its leadership changed (N1)."""
        number, epoch = partition.key.partition, partition.leader_epoch
        hosted = self._hosted.get(number)
        if hosted is not None and hosted.epoch == epoch:
            return
        if hosted is not None:
            del self._hosted[number]
            self._tasks.spawn(hosted.close())
        if epoch != NONE and number < PARTITIONS:
            if not self._ticking:
                self._ticking = True
                self._tasks.spawn(self._ticks())
            self._tasks.spawn(self._load(self._host(partition, number, epoch)))

    def _host(self, partition: Partition, number: int, epoch: Epoch) -> HostedGroups:
        server = self._env.server
        rules = commands.GroupRules(
            number,
            server["group_min_session_timeout_ms"],
            server["group_max_session_timeout_ms"],
            server["group_initial_rebalance_delay_ms"],
            server["group_max_size"],
            server["offsets_retention_minutes"] * MINUTE_MS,
            server["offset_metadata_max_bytes"],
        )
        log = PartitionReplayLog(
            partition,
            epoch,
            self._env.clock,
            records.to_row,
            records.from_row,
            records.TransactionalOffsets(),
        )
        host: ReplayedHost[Any, Any] = ReplayedHost(
            partial(GroupCoordinator, rules),
            log,
            self._env.clock,
            on_fatal=partial(self._env.bug, f"{TOPIC}-{number}"),
            on_effects=partial(self._effects, number, epoch),
            unavailable=errors.NotCoordinator,
        )
        sessions = MemberSessions(rules.initial_rebalance_delay_ms)
        hosted = self._hosted[number] = HostedGroups(
            number, epoch, host, log, sessions, partition.key
        )
        hosted.expire_at_ms = self._env.now_ms + EXPIRE_MS
        return hosted

    async def _load(self, hosted: HostedGroups) -> None:
        """Replay the partition (N2)."""
        backoff = Backoff(BACKOFF_MS)
        began_ms = self._env.now_ms
        while self._hosted.get(hosted.number) is hosted:
            try:
                await hosted.host.start()
                break
            except errors.PkError as failure:
                self._env.warn(
                    "group_coordinator_not_loaded",
                    partition=hosted.number,
                    error=failure.message,
                )
                await self._env.clock.sleep_ms(backoff.next_ms())
        else:
            return
        self._resume(hosted)
        hosted.loading = False
        took_ms = self._env.now_ms - began_ms
        self._env.say("group_coordinator_loaded", partition=hosted.number, took_ms=took_ms)

    def _resume(self, hosted: HostedGroups) -> None:
        """Begin sessions and timeouts again (N3)."""
        hosted.sessions.restart(hosted.groups, self._env.now_ms)
        hosted.heartbeats.compare_all(hosted.groups)
        hosted.resumed = hosted.host.machine

    def _effects(self, number: int, epoch: Epoch, effects: Sequence[Effect]) -> None:
        hosted = self._hosted.get(number)
        if hosted is None or hosted.epoch != epoch:
            return
        for effect in effects:
            assert isinstance(effect, Publish)
            hosted.changed(effect.value, lambda: self._env.now_ms)

    # -- time ------------------------------------------------------------------------------------

    async def _ticks(self) -> None:
        while True:
            await self._env.clock.sleep_ms(TICK_MS)
            for hosted in list(self._hosted.values()):
                name = (hosted.number, hosted.epoch)
                if not hosted.reading and name not in self._tasks:
                    self._tasks.spawn(self._tick(hosted), name)

    async def _tick(self, hosted: HostedGroups) -> None:
        """Do what is due in one partition."""
        if not self._contact.in_contact():
            hosted.resumed = None  # N8
            return
        if hosted.resumed is not hosted.host.machine:
            self._resume(hosted)
        due = hosted.sessions.due(self._env.now_ms)
        try:
            for group_id, generation in due.joins:
                await hosted.host.ask(commands.EndJoin(group_id, generation))
            for at in range(0, len(due.expired), commands.EXPIRE_MAX):
                part = due.expired[at : at + commands.EXPIRE_MAX]
                count = await hosted.host.ask(commands.ExpireMembers(tuple(part)))
                if count:
                    self._env.warn("group_members_expired", members=part[:20], count=count)
            if self._env.now_ms >= hosted.expire_at_ms:
                hosted.expire_at_ms = self._env.now_ms + EXPIRE_MS
                await self._expire_offsets(hosted)
        except errors.PkError:
            hosted.resumed = None  # the next tick begins the timeouts again

    async def _expire_offsets(self, hosted: HostedGroups) -> None:
        """Remove the offsets whose retention has passed, and those of deleted topics (N5)."""
        names = list(hosted.groups)
        absent: set[TopicId] = set()
        for at in range(0, len(names), EXPIRE_GROUPS):
            part = tuple(names[at : at + EXPIRE_GROUPS])
            again = True
            while again and self._clocks.trusted_ms() is not None:
                command = commands.ExpireOffsets(part, self._metadata.image, hosted.absent)
                reply: commands.OffsetsExpired = await hosted.host.ask(command)
                absent |= reply.absent
                again = reply.written == commands.EXPIRE_MAX
        hosted.absent = frozenset(absent)

    # -- requests --------------------------------------------------------------------------------

    def _serving(self, group_id: str) -> HostedGroups:
        """Return the host of a group; raises why it cannot answer (N2, N4)."""
        return self._serving_partition(partition_of_group(group_id))

    def _serving_partition(self, number: int) -> HostedGroups:
        self._check_contact()
        hosted = self._hosted.get(number)
        if hosted is None:
            raise errors.NotCoordinator(f"this broker does not lead {TOPIC}-{number}")
        if hosted.reading:
            raise errors.CoordinatorLoading(f"{TOPIC}-{number} is being read")
        return hosted

    def _check_contact(self) -> None:
        if not self._contact.in_contact():
            raise errors.CoordinatorUnavailable("this broker has no contact to the controller")

    async def _ask(self, hosted: HostedGroups, command: Any) -> Any:
        try:
            return await hosted.host.ask(command)
        finally:
            self._check_contact()  # N4

    async def join(self, request: wire.JoinGroupRequest) -> wire.JoinGroupReply:
        """Let a member join; the reply waits for the other members (N6)."""
        hosted = self._serving(request.member.group_id)
        command = commands.JoinGroup(request)
        wait_ms = min(JOIN_WAIT_MS, request.session_timeout_ms // 3)
        reply: wire.JoinGroupReply = await self._until_ready(
            hosted, request.member, wait_ms, lambda: self._ask(hosted, command)
        )
        return reply

    async def sync(
        self, request: wire.SyncGroupRequest, progress: MetadataProgress
    ) -> wire.SyncGroupReply:
        """Give a member its assignment; the reply waits for the leader's (N6)."""
        hosted = self._serving(request.member.group_id)
        if request.HasField("assignment"):
            await progress.reached(request.assignment.metadata_offset, METADATA_WAIT_MS)
        command = commands.SyncGroup(request, self._metadata.image)
        group = hosted.groups.get(request.member.group_id)
        member = None if group is None else group.members.get(request.member.member_id)
        session_ms = JOIN_WAIT_MS if member is None else member.session_timeout_ms

        async def ask() -> wire.SyncGroupReply:
            reply: wire.SyncGroupReply = await self._ask(hosted, command)
            hosted.sessions.synced(request.member.group_id, request.member.member_id)
            return reply

        wait_ms = min(JOIN_WAIT_MS, session_ms // 3)
        found: wire.SyncGroupReply = await self._until_ready(hosted, request.member, wait_ms, ask)
        return found

    async def _until_ready(
        self,
        hosted: HostedGroups,
        asked: wire.GroupMember,
        wait_ms: int,
        ask: Callable[[], Awaitable[Any]],
    ) -> Any:
        """Ask after every change of the group until the reply is not `pending`, or for `wait_ms`.

        The requests may be repeated, so the machine keeps no list of those that wait.
        """
        deadline_ms = self._env.now_ms + wait_ms
        name = (asked.group_id, asked.member_id)
        hosted.sessions.asks(*name, self._env.now_ms)
        try:
            while True:
                change = hosted.change(asked.group_id)
                reply = await ask()
                left_ms = deadline_ms - self._env.now_ms
                if not reply.pending or left_ms <= 0:
                    return reply
                try:
                    async with asyncio.timeout(left_ms / 1000):
                        await change.wait()
                except TimeoutError:
                    return reply
        finally:
            hosted.sessions.answered(*name, self._env.now_ms)

    async def heartbeat(self, request: wire.GroupHeartbeatRequest) -> wire.GroupHeartbeatReply:
        """Renew the session of a member, and wait for news of its group (N10).

        Writes nothing and waits for no write.  Raises the news: `RebalanceInProgress` if the member
        has to join again, and what ends its membership.
        """
        asked = request.member
        if request.wait_ms < 0:
            raise errors.InvalidRequest(f"a heartbeat that waits {request.wait_ms} ms")
        hosted = self._serving(asked.group_id)
        member = _group(hosted, asked).member(asked)
        hosted.sessions.heard(asked.group_id, asked.member_id, self._env.now_ms)
        check(_group(hosted, asked), asked)
        wait_ms = min(request.wait_ms, member.session_timeout_ms // HEARTBEAT_WAIT_PART)
        if wait_ms > 0 and await hosted.heartbeats.wait(asked, wait_ms):
            # the broker may have lost the partition, or the contact (N4)
            check(_group(self._serving(asked.group_id), asked), asked)
        return wire.GroupHeartbeatReply()

    async def leave(self, request: wire.LeaveGroupRequest) -> wire.LeaveGroupReply:
        """Remove members from a group."""
        if len(request.members) > limits.GROUPS_DESCRIBED_MAX:
            raise errors.InvalidRequest(f"{len(request.members)} members in one request")
        hosted = self._serving(request.group_id)
        reply: wire.LeaveGroupReply = await self._ask(hosted, commands.LeaveGroup(request))
        return reply

    async def commit(
        self, request: wire.OffsetCommitRequest, progress: MetadataProgress
    ) -> wire.OffsetCommitReply:
        """Commit offsets, once this broker knows the topics that the client knows."""
        hosted = self._serving(request.member.group_id)
        await progress.reached(request.metadata_offset, METADATA_WAIT_MS)
        command = commands.CommitOffsets(request, self._metadata.image)
        name = (request.member.group_id, request.member.member_id)
        hosted.sessions.asks(*name, self._env.now_ms)
        try:
            reply: wire.OffsetCommitReply = await self._ask(hosted, command)
        finally:
            hosted.sessions.answered(*name, self._env.now_ms)
        return reply

    async def commit_in_transaction(
        self,
        request: wire.TxnOffsetCommitRequest,
        progress: MetadataProgress,
        register: Callable[[PartitionKey], Awaitable[None]],
    ) -> wire.TxnOffsetCommitReply:
        """Store offsets that count when the producer's transaction commits (X2).

        The partition of `__consumer_offsets` becomes one of the transaction first.  Meanwhile the
        commit is parked (N7).

        register: returns once a partition that this broker leads is one of the transaction (X6),
            or raises the refusal of the transaction's coordinator
        """
        group_id = request.member.group_id
        hosted = self._serving(group_id)
        await progress.reached(request.metadata_offset, METADATA_WAIT_MS)
        places = Counter(keys_of(request.topics))
        if len(places) > limits.OFFSETS_PER_REQUEST_MAX:
            raise errors.InvalidRequest(
                f"{len(places)} partitions in one commit; {limits.OFFSETS_PER_REQUEST_MAX} are "
                "allowed: commit them in parts"
            )
        parked = hosted.parked.setdefault(group_id, Counter())
        parked.update(places)
        name = (group_id, request.member.member_id)
        hosted.sessions.asks(*name, self._env.now_ms)
        try:
            await _registered(register(hosted.key))
            if self._serving(group_id) is not hosted:
                raise errors.NotCoordinator(f"the leader epoch of {hosted.key} ended meanwhile")
            command = commands.CommitTransactionOffsets(request, self._metadata.image)
            reply: wire.TxnOffsetCommitReply = await self._ask(hosted, command)
            return reply
        finally:
            hosted.sessions.answered(*name, self._env.now_ms)
            parked -= places
            if not parked:
                hosted.parked.pop(group_id, None)

    async def fetch(self, request: wire.OffsetFetchRequest) -> wire.OffsetFetchReply:
        """Return the offsets of groups; each has its own error."""
        _check_count(len(request.groups))
        reply = wire.OffsetFetchReply()
        for each in request.groups:
            try:
                hosted = self._serving(each.group_id)
                if request.require_stable:
                    hosted.check_parked(each)
                command = commands.FetchOffsets(each, request.require_stable)
                reply.groups.append(await self._ask(hosted, command))
            except errors.PkError as error:
                reply.groups.add(group_id=each.group_id, error=frames.error_of(error))
        return reply

    async def list_coordinated(
        self, request: wire.ListCoordinatedRequest
    ) -> wire.ListCoordinatedReply:
        """List the partitions that this broker coordinates, for the copies in the tier (T13)."""
        self._check_contact()
        reply = wire.ListCoordinatedReply(genesis=self._metadata.image.genesis)
        for number, hosted in sorted(self._hosted.items()):
            end = hosted.committed
            if not hosted.reading and end != NONE:
                reply.partitions.add(
                    partition=number, leader_epoch=hosted.epoch, high_watermark=end
                )
        return reply

    async def read_offsets(self, request: wire.ReadOffsetsRequest) -> wire.ReadOffsetsReply:
        """Return a page of the offsets of one partition (T13).

        Raises `NotCoordinator` if this broker does not coordinate it in that leader epoch.
        """
        hosted = self._serving_partition(request.partition)
        if hosted.epoch != request.leader_epoch:
            raise errors.NotCoordinator(f"{TOPIC}-{request.partition} is in another leader epoch")
        command = commands.ReadOffsets(request, self._metadata.image)
        reply: wire.ReadOffsetsReply = await self._ask(hosted, command)
        return reply

    async def describe(self, request: wire.DescribeGroupsRequest) -> wire.DescribeGroupsReply:
        """Describe groups; those of other coordinators have NotCoordinator."""
        _check_count(len(request.group_ids))
        reply = wire.DescribeGroupsReply()
        for each in request.group_ids:
            try:
                hosted = self._serving(each)
                found: wire.DescribedGroup = await self._ask(hosted, commands.DescribeGroup(each))
            except errors.PkError as error:
                found = wire.DescribedGroup(group_id=each, error=frames.error_of(error))
            else:
                for member in found.members:
                    heard_ms = hosted.sessions.last_heard(each, member.member_id)
                    if heard_ms is not None:
                        member.heard_ago_ms = self._env.now_ms - heard_ms
            found.coordinator_id = self._env.node_id
            reply.groups.append(found)
        return reply

    async def list(self, request: wire.ListGroupsRequest) -> wire.ListGroupsReply:
        """List the groups that this broker coordinates."""
        self._check_contact()
        reply = wire.ListGroupsReply()
        for number, hosted in sorted(self._hosted.items()):
            if hosted.loading:
                reply.loading.append(number)
                continue
            reply.groups.extend(await self._ask(hosted, commands.ListGroups(request)))
        return reply

    async def delete(self, request: wire.DeleteGroupsRequest) -> wire.DeleteGroupsReply:
        """Delete groups without members; each has its own error."""
        _check_count(len(request.group_ids))
        reply = wire.DeleteGroupsReply()
        for each in request.group_ids:
            deleted = reply.groups.add(group_id=each)
            try:
                hosted = self._serving(each)
                while not await self._ask(hosted, commands.DeleteGroup(each)):
                    pass
            except errors.PkError as error:
                deleted.error.CopyFrom(frames.error_of(error))
        return reply

    async def delete_offsets(self, request: wire.DeleteOffsetsRequest) -> wire.DeleteOffsetsReply:
        """Delete offsets of a group."""
        hosted = self._serving(request.group_id)
        command = commands.DeleteOffsets(request, self._metadata.image)
        reply: wire.DeleteOffsetsReply = await self._ask(hosted, command)
        return reply


def _group(hosted: HostedGroups, asked: wire.GroupMember) -> ConsumerGroup:
    return hosted.groups.get(asked.group_id) or ConsumerGroup(asked.group_id)


async def _registered(asked: Awaitable[None]) -> None:
    """Wait until a partition is one of a transaction, for REGISTER_MS."""
    try:
        async with asyncio.timeout(REGISTER_MS / 1000):
            await asked
    except TimeoutError:
        raise errors.CoordinatorUnavailable(
            "the transaction's coordinator did not answer in time"
        ) from None


def _check_count(count: int) -> None:
    if count > limits.GROUPS_DESCRIBED_MAX:
        raise errors.InvalidRequest(
            f"{count} groups in one request; {limits.GROUPS_DESCRIBED_MAX} are allowed"
        )
