"""The groups of one coordinator partition, as far as their records are decided.

Invariants
  I1  `apply` is called in the order of the log, and is the only mutator.
  I2  `owners`, `instances`, `assignors` and `members_bytes` of a group follow from its assignment
      and its members.
  I3  Of two offsets of a partition, the one whose record is later in the log counts, also if the
      transaction of the earlier one ends later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pk import errors, limits
from pk.effects import Decision, Publish
from pk.group_ids import TOPIC, partition_of_group
from pk.server.groups import records
from pk.server.groups.commands import CHANGED, GroupRules
from pk.server.groups.records import EndedTransaction, GroupLogRecord
from pk.server.groups.state import Assigned, CommittedOffset, GroupMetadata, GroupState, Member
from pk.types import NONE, Offset, PartitionKey
from pk.wire import pk_pb2 as wire

Out = Decision[GroupLogRecord]


def check_name(name: str, what: str) -> None:
    """Raise `InvalidRequest` unless `name` has an allowed length."""
    size = len(name.encode())
    if not 0 < size <= limits.GROUP_ID_BYTES_MAX:
        raise errors.InvalidRequest(
            f"{what} has 1 to {limits.GROUP_ID_BYTES_MAX} bytes of UTF-8, not {size}"
        )


class PendingTransaction(NamedTuple):
    """A transaction whose marker the machine has not applied."""

    producer_id: int
    epoch: int


class ConsumerGroup:
    """One group: its metadata, members, assignment and offsets."""

    __slots__ = (
        "assignment",
        "assignors",
        "instances",
        "members",
        "members_bytes",
        "metadata",
        "offsets",
        "owners",
        "pending",
    )

    def __init__(self, group_id: str) -> None:
        self.metadata = GroupMetadata(group_id)
        self.members: dict[str, Member] = {}
        self.instances: dict[str, str] = {}  #: group instance id → member id
        self.assignors: Counter[str] = Counter()  #: assignor → how many members list it
        self.members_bytes = 0  #: of ids and subscriptions, as the leader gets them
        self.assignment: dict[str, Assigned] = {}  #: by member id
        #: Every assigned or released partition → the member that may commit it.
        self.owners: dict[PartitionKey, str] = {}
        self.offsets: dict[PartitionKey, CommittedOffset] = {}
        #: The offsets of transactions whose marker is not applied (X2).
        self.pending: dict[PendingTransaction, dict[PartitionKey, CommittedOffset]] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConsumerGroup) and all(
            getattr(self, name) == getattr(other, name) for name in self.__slots__
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def state(self) -> GroupState:
        """The state of the group."""
        return self.metadata.state

    @property
    def generation(self) -> int:
        """The generation of the group."""
        return self.metadata.generation

    def is_pending(self, key: PartitionKey) -> bool:
        """Whether an open transaction has an offset of the partition (X2)."""
        return any(key in each for each in self.pending.values())

    def common_assignors(self, without: Member | None = None) -> set[str]:
        """Return the assignors that every member lists, except the member `without`."""
        own = frozenset() if without is None else frozenset(without.assignors)
        count = len(self.members) - (without is not None)
        return {name for name, n in self.assignors.items() if n - (name in own) == count > 0}

    def joined(self, member: Member) -> bool:
        """Whether the member has joined the rebalance that is being prepared."""
        return member.joined == self.generation

    def member(self, asked: wire.GroupMember) -> Member:
        """Return the member that asks.  Raises if it is not in the group's generation (X12)."""
        holder = self.instances.get(asked.group_instance_id)
        if holder is not None and holder != asked.member_id:
            raise fenced(asked)
        found = self.members.get(asked.member_id)
        if found is None:
            raise unknown_member(asked)
        if found.instance_id != asked.group_instance_id:
            raise fenced(asked)
        if asked.generation != self.generation:
            raise errors.IllegalGeneration(
                f"group {asked.group_id!r} is in generation {self.generation}, member "
                f"{asked.member_id!r} in {asked.generation}: it joins again",
                generation=str(self.generation),
            )
        return found

    # -- records -----------------------------------------------------------------------------------

    def apply(
        self,
        key: records.GroupKey,
        value: wire.GroupRecord | None,
        at: Offset,
        transaction: PendingTransaction | None = None,
    ) -> None:
        """Apply the record at `at`.  transaction: of the offset; None = it counts at once."""
        if key.kind == records.GROUP:
            group_id = self.metadata.group_id
            self.metadata = (
                GroupMetadata(group_id)
                if value is None
                else records.group_of(group_id, value.group)
            )
        elif key.kind == records.MEMBER:
            self._member(
                key.member_id,
                None if value is None else records.member_of(key.member_id, value.member),
            )
        elif key.kind == records.ASSIGNMENT:
            self.assignment = {} if value is None else records.assignment_of(value.assignment)
            self.owners = {
                partition: name
                for name, each in self.assignment.items()
                for partition in (*each.partitions, *each.released)
            }
        else:
            assert key.partition is not None
            if value is None:
                self.offsets.pop(key.partition, None)
                return
            offsets = self.offsets
            if transaction is not None:
                offsets = self.pending.setdefault(transaction, {})
            _keep_newest(offsets, key.partition, records.offset_of(value.offset, at))

    def end_transaction(self, transaction: PendingTransaction, *, commit: bool) -> None:
        """Make the offsets of a transaction count, or drop them."""
        pending = self.pending.pop(transaction, {})
        for key, committed in pending.items() if commit else ():
            _keep_newest(self.offsets, key, committed)

    def _member(self, member_id: str, member: Member | None) -> None:
        before = self.members.pop(member_id, None)
        if before is not None:
            if self.instances.get(before.instance_id) == member_id:
                del self.instances[before.instance_id]
            self.members_bytes -= before.size
            self.assignors -= Counter(set(before.assignors))
        if member is not None:
            self.members[member_id] = member
            if member.instance_id:
                self.instances[member.instance_id] = member_id
            self.members_bytes += member.size
            self.assignors += Counter(set(member.assignors))


def _keep_newest(
    offsets: dict[PartitionKey, CommittedOffset], key: PartitionKey, committed: CommittedOffset
) -> None:
    """Set an offset unless the known offset has a later record: a marker is later than the
    record that it makes count, and a repeated request may find its earlier record.
    """
    known = offsets.get(key)
    if known is None or known.at <= committed.at:
        offsets[key] = committed


class Groups:
    """The groups of one partition."""

    def __init__(self, rules: GroupRules) -> None:
        self.rules = rules
        self._by_id: dict[str, ConsumerGroup] = {}
        self._recorded: set[str] = set()  #: groups that have a record of their own
        #: By producer id and epoch: the groups that have offsets of the transaction (X2).  A
        #: producer has two if the marker of the first one is appended and not yet committed.
        self._open: dict[int, dict[int, set[str]]] = {}

    def items(self) -> Mapping[str, ConsumerGroup]:
        """Return every group."""
        return self._by_id

    def apply(self, offset: Offset, record: GroupLogRecord | EndedTransaction) -> None:
        """Apply one record of the log.  Raises `CorruptLog` and `NewerFormat` for its bytes."""
        if isinstance(record, EndedTransaction):
            self._end_transaction(record)
            return
        key = records.decode_key(record.key)
        group = self._by_id.get(key.group_id)
        if group is None:
            if record.value is None:
                return
            group = self._by_id[key.group_id] = ConsumerGroup(key.group_id)
        if record.producer is None:
            group.apply(key, record.value, offset)
        else:
            transaction = PendingTransaction(*record.producer[:2])
            opened = self._open.setdefault(transaction.producer_id, {})
            opened.setdefault(transaction.epoch, set()).add(key.group_id)
            group.apply(key, record.value, offset, transaction)
        if key.kind == records.GROUP:
            (self._recorded.discard if record.value is None else self._recorded.add)(key.group_id)
        if record.value is None:
            self._drop_if_empty(group)

    def _drop_if_empty(self, group: ConsumerGroup) -> None:
        """Forget a group of which no record is left."""
        group_id = group.metadata.group_id
        rest = group.members or group.assignment or group.offsets or group.pending
        if group_id not in self._recorded and not rest:
            del self._by_id[group_id]

    def _end_transaction(self, ended: EndedTransaction) -> None:
        """Apply a marker; one that was applied before finds nothing of its transaction."""
        opened = self._open.get(ended.producer_id, {})
        for epoch in [each for each in opened if each < ended.producer_epoch]:
            for group_id in opened.pop(epoch):
                group = self._by_id[group_id]
                transaction = PendingTransaction(ended.producer_id, epoch)
                group.end_transaction(transaction, commit=ended.commit)
                self._drop_if_empty(group)
        if not opened:
            self._open.pop(ended.producer_id, None)

    def find(self, group_id: str) -> ConsumerGroup | None:
        """Return a group of this coordinator; None if it is not known.

        Raises `NotCoordinator`, and `InvalidRequest` for an id that no group may have.
        """
        check_name(group_id, "a group id")
        number = partition_of_group(group_id)
        if number != self.rules.partition:
            raise errors.NotCoordinator(f"{TOPIC}-{number} coordinates group {group_id!r}")
        return self._by_id.get(group_id)

    def known(self, group_id: str) -> ConsumerGroup:
        """Return a group.  Raises `GroupIdNotFound` if it does not exist."""
        group = self.find(group_id)
        if group is None:
            raise errors.GroupIdNotFound(f"there is no group {group_id!r}")
        return group

    def of_member(self, asked: wire.GroupMember) -> tuple[ConsumerGroup, Member]:
        """Return the group and the member that asks; raises as `ConsumerGroup.member`."""
        group = self.find(asked.group_id)
        if group is None:
            raise unknown_member(asked)
        return group, group.member(asked)


def decision(reply: Any, found: Sequence[GroupLogRecord], group_id: str = "") -> Out:
    """Return a `Decision`.  With a group id, its records are announced as a change of the group."""
    return Decision(found, reply, [Publish(CHANGED, group_id)] if group_id and found else [])


def unknown_member(asked: wire.GroupMember) -> errors.UnknownMemberId:
    """Return the refusal of a member that the group does not have."""
    return errors.UnknownMemberId(
        f"group {asked.group_id!r} has no member {asked.member_id!r}: its session ended, or it has "
        "left; it joins again without a generation"
    )


def fenced(asked: wire.GroupMember) -> errors.FencedInstanceId:
    """Return the refusal of a static member whose place another consumer took."""
    return errors.FencedInstanceId(
        f"another consumer with group_instance_id {asked.group_instance_id!r} is a member of group "
        f"{asked.group_id!r}: close this one, or give each its own group_instance_id",
        member_id=asked.member_id,
    )


def of_a_query(group_id: str) -> errors.InconsistentGroupProtocol:
    """Return the refusal of a consumer, or of a tool, in the group of a query (S1)."""
    return errors.InconsistentGroupProtocol(
        f"group {group_id!r} shows the progress of a streaming query, whose checkpoint decides "
        "where it continues: use another group"
    )


def generation_or_none(asked: wire.GroupMember) -> int:
    """Return the generation that the member has completed; NONE for the first join."""
    return asked.generation if asked.generation >= 0 else NONE
