"""Decisions about committed offsets: commit, fetch, delete, expiry.

Invariants
  O1  A committed offset changes only by a commit, and goes only by a delete or by expiry.
  O2  A commit of a member counts only in the group's generation, and only for partitions that are
      assigned to it, or that it has given up and no member got since (X12).
  O3  While an open transaction has an offset of a partition, the committed one neither expires nor
      is deleted (X2).
  O4  A commit that names no member counts only while the group has none.
  O5  The commits of one consumer count in their order: one that arrives after a later one of the
      same consumer is refused, so a delayed request never moves an offset back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from pk import errors, limits
from pk.server.groups import commands, records
from pk.server.groups.groups import ConsumerGroup, Groups, Out, decision, of_a_query, unknown_member
from pk.server.groups.records import GroupLogRecord
from pk.server.groups.state import CommittedOffset, GroupMetadata, GroupState, keys_of
from pk.server.metadata.image import MetadataImage
from pk.server.replica.replay_log import ProducerStamp
from pk.types import NONE, PartitionKey, TopicId
from pk.wire import frames
from pk.wire import pk_pb2 as wire

#: Most characters of the id of a query's run.
RUN_ID_MAX = 64


class _Commit(NamedTuple):
    """One partition of a commit."""

    key: PartitionKey
    offset: int
    leader_epoch: int
    metadata: str


def commit(groups: Groups, command: commands.CommitOffsets, now_ms: int) -> Out:
    """Commit offsets; a partition that is refused has its error in the reply."""
    request = command.request
    asked = request.member
    run = request.query if request.HasField("query") else None
    group = _committing(groups, asked, run)
    commits = list(_commits(request))
    reply = wire.OffsetCommitReply()
    found: dict[bytes, GroupLogRecord] = {}
    known = (
        GroupMetadata(asked.group_id, empty_since_ms=now_ms) if group is None else group.metadata
    )
    if run is not None:
        known = replace(known, query_run=run.run_id, holds_retention=run.holds_retention)
    if group is None or (known is not group.metadata and known != group.metadata):
        found[b""] = records.group_record(known)
    for each in commits:
        try:
            _check(groups, group, request, each, command.image)
        except errors.PkError as refusal:
            reply.refused.add(
                topic_id=each.key.topic_id,
                partition=each.key.partition,
                error=frames.error_of(refusal),
            )
            continue
        committed = CommittedOffset(
            each.offset,
            each.leader_epoch,
            each.metadata,
            now_ms,
            committer=request.committer,
            sequence=request.sequence,
        )
        record = records.offset_record(asked.group_id, each.key, committed)
        found[record.key] = record
    if len(found) == 1 and b"" in found and (group is None or not group.offsets):
        found.clear()  # nothing is committed: no group
    return decision(reply, list(found.values()))


def commit_in_transaction(
    groups: Groups, command: commands.CommitTransactionOffsets, now_ms: int
) -> Out:
    """Store offsets that count when the transaction commits: all of them, or none.

    The member is checked here, in the decision that appends: while the request waited for the
    transaction's coordinator, the group may have given its partitions away.
    """
    request = command.request
    asked = request.member
    group = _committing(groups, asked)
    found: dict[PartitionKey, GroupLogRecord] = {}
    stamp = ProducerStamp(request.producer_id, request.producer_epoch, request.base_sequence)
    commits = list(_commits(request))
    if not commits:
        raise errors.InvalidRequest("a commit without offsets")
    for each in commits:
        _check(groups, group, request, each, command.image)
        committed = CommittedOffset(each.offset, each.leader_epoch, each.metadata, now_ms)
        record = records.offset_record(asked.group_id, each.key, committed)
        found[each.key] = record._replace(producer=stamp)
    if len(found) != len(commits):
        raise errors.InvalidRequest("a partition is twice in one commit")
    return decision(wire.TxnOffsetCommitReply(), list(found.values()))


def _committing(
    groups: Groups, asked: wire.GroupMember, run: wire.QueryRun | None = None
) -> ConsumerGroup | None:
    """Return the group in which a member, a query, or a client without a member commits.  Raises
    why it may not.
    """
    group = groups.find(asked.group_id)
    _check_kind(group, asked, run)
    if asked.member_id:
        group, _ = groups.of_member(asked)
        if group.state is GroupState.COMPLETING_REBALANCE:
            raise errors.RebalanceInProgress(
                f"group {asked.group_id!r} has begun generation {group.generation}: the member "
                "gets its assignment first"
            )
    elif asked.group_instance_id or asked.generation >= 0:
        raise unknown_member(asked)  # a member that has lost its id, not a tool (O4)
    elif group is not None and group.members:
        raise errors.NonEmptyGroup(
            f"group {asked.group_id!r} has {len(group.members)} members: only they commit. Close "
            "them first, or use another group_id"
        )
    return group


def _check_kind(
    group: ConsumerGroup | None, asked: wire.GroupMember, run: wire.QueryRun | None
) -> None:
    """Raise unless the group is of the kind that commits, and the run of a query is its newest."""
    if run is not None and (asked.member_id or not 0 < len(run.run_id) <= RUN_ID_MAX):
        raise errors.InvalidRequest("a query commits with the id of its run, and has no member")
    if group is None:
        return
    known = group.metadata.query_run
    if run is None and known:
        raise of_a_query(asked.group_id)
    if run is not None and not known and group.offsets:
        raise errors.InconsistentGroupProtocol(
            f"group {asked.group_id!r} has offsets of consumers: give the query a group of its "
            "own, or delete this one"
        )
    if run is not None and known not in ("", run.run_id) and not run.first:
        raise errors.FencedInstanceId(
            f"another run of a query publishes its progress as group {asked.group_id!r}: give each "
            "query a group of its own"
        )


def _commits(
    request: wire.OffsetCommitRequest | wire.TxnOffsetCommitRequest,
) -> Iterator[_Commit]:
    """Yield the partitions of a commit.  Raises `InvalidRequest` if its lists do not match."""
    count = sum(len(topic.partitions) for topic in request.topics)
    if count > limits.OFFSETS_PER_REQUEST_MAX:
        raise errors.InvalidRequest(
            f"{count} partitions in one commit; {limits.OFFSETS_PER_REQUEST_MAX} are allowed: "
            "commit them in parts"
        )
    for topic in request.topics:
        size = len(topic.partitions)
        epochs = topic.leader_epochs or [NONE] * size
        texts = topic.metadata or [""] * size
        if not size == len(topic.offsets) == len(epochs) == len(texts):
            raise errors.InvalidRequest(f"the lists of topic {topic.topic_id} differ in length")
        for row in zip(topic.partitions, topic.offsets, epochs, texts, strict=True):
            yield _Commit(PartitionKey(topic.topic_id, row[0]), *row[1:])


def _check(
    groups: Groups,
    group: ConsumerGroup | None,
    request: wire.OffsetCommitRequest | wire.TxnOffsetCommitRequest,
    each: _Commit,
    image: MetadataImage,
) -> None:
    """Raise why one partition is refused."""
    key = each.key
    if key.topic_id not in image.topics:
        raise errors.UnknownTopicId(f"no topic has the id {key.topic_id}")
    if image.partition(key) is None:
        raise errors.UnknownTopicOrPartition(f"{key} does not exist")
    if each.offset < 0:
        raise errors.InvalidRequest(f"the offset of {key} is {each.offset}")
    size = len(each.metadata.encode())
    if size > groups.rules.metadata_bytes_max:
        raise errors.OffsetMetadataTooLarge(
            f"the metadata of {key} has {size} bytes; offset_metadata_max_bytes is "
            f"{groups.rules.metadata_bytes_max}"
        )
    if isinstance(request, wire.OffsetCommitRequest):
        _check_order(group, request, each)
    member_id = request.member.member_id
    if member_id:
        assert group is not None
        owner = group.owners.get(key)
        if owner != member_id:
            holder = "no member" if owner is None else f"member {owner!r}"
            raise errors.NotPartitionOwner(
                f"{key} is assigned to {holder} in generation {group.generation} of group "
                f"{group.metadata.group_id!r}"
            )


def _check_order(
    group: ConsumerGroup | None, request: wire.OffsetCommitRequest, each: _Commit
) -> None:
    """Raise if the same consumer has committed the partition later (O5)."""
    before = None if group is None else group.offsets.get(each.key)
    if before is None or not request.committer or before.committer != request.committer:
        return
    if request.sequence < before.sequence:
        raise errors.StaleOffsetCommit(
            f"this consumer has committed a later offset of {each.key} after offset {each.offset}"
        )


def fetch(groups: Groups, command: commands.FetchOffsets, now_ms: int) -> Out:
    """Return committed offsets: of the named partitions, or all that the group has."""
    request = command.request
    reply = wire.FetchedOffsets(group_id=request.group_id)
    group = groups.find(request.group_id)
    wanted = keys_of(request.topics)
    if len(wanted) > limits.OFFSETS_PER_REQUEST_MAX:
        raise errors.InvalidRequest(
            f"{len(wanted)} partitions in one request; {limits.OFFSETS_PER_REQUEST_MAX} are allowed"
        )
    if group is None:
        return decision(reply, [])
    if command.require_stable:
        check_stable(group, wanted if request.topics else None)
    topics: dict[TopicId, wire.CommitTopic] = {}
    for key in wanted if request.topics else sorted(group.offsets):
        committed = group.offsets.get(key)
        if committed is None:
            continue
        topic = topics.get(key.topic_id)
        if topic is None:
            topic = topics[key.topic_id] = reply.topics.add(topic_id=key.topic_id)
        topic.partitions.append(key.partition)
        topic.offsets.append(committed.offset)
        topic.leader_epochs.append(committed.leader_epoch)
        topic.metadata.append(committed.metadata)
    return decision(reply, [])


def check_stable(group: ConsumerGroup, wanted: Iterable[PartitionKey] | None = None) -> None:
    """Raise `UnstableOffsetCommit` if an open transaction has an offset of one of the partitions,
    or, without them, any of the group (X2).
    """
    pending = {key for each in group.pending.values() for key in each}
    if wanted is not None:
        pending.intersection_update(wanted)
    if pending:
        raise errors.UnstableOffsetCommit(
            f"group {group.metadata.group_id!r}: transactions that have not ended hold offsets of "
            f"{len(pending)} partitions, among them {min(pending)}: ask again"
        )


def delete(groups: Groups, command: commands.DeleteOffsets, now_ms: int) -> Out:
    """Delete offsets for an operator; topics that a member subscribes to keep theirs."""
    request = command.request
    group = groups.known(request.group_id)
    wanted = keys_of(request.topics)
    if len(wanted) > limits.OFFSETS_PER_REQUEST_MAX:
        raise errors.InvalidRequest(
            f"{len(wanted)} partitions in one request; {limits.OFFSETS_PER_REQUEST_MAX} are "
            "allowed: delete them in parts"
        )
    check_stable(group, wanted)
    subscribed = subscribed_ids(group, command.image)
    reply = wire.DeleteOffsetsReply()
    found: list[GroupLogRecord] = []
    for key in dict.fromkeys(wanted):
        if key.topic_id in subscribed:
            refusal = errors.GroupSubscribedToTopic(
                f"a member of group {request.group_id!r} subscribes to the topic of {key}"
            )
            reply.refused.add(
                topic_id=key.topic_id, partition=key.partition, error=frames.error_of(refusal)
            )
        elif key in group.offsets:
            found.append(records.offset_removed(request.group_id, key))
    return decision(reply, found)


def subscribed_ids(group: ConsumerGroup, image: MetadataImage) -> set[TopicId]:
    """Return the ids of the topics to which the members of a group subscribe."""
    names = {name for each in group.members.values() for name in each.subscription.topics}
    return {image.topic_ids[name] for name in names if name in image.topic_ids}


def delete_group(groups: Groups, command: commands.DeleteGroup, now_ms: int) -> Out:
    """Delete a group without members, a bounded number of records at a time."""
    group = groups.known(command.group_id)
    if group.members:
        raise errors.NonEmptyGroup(
            f"group {command.group_id!r} has {len(group.members)} members: close them first"
        )
    check_stable(group)
    keys = list(group.offsets)[: commands.EXPIRE_MAX]
    found = [records.offset_removed(command.group_id, key) for key in keys]
    done = len(keys) == len(group.offsets)
    if done:
        found.append(records.removed(records.GROUP, command.group_id))
    return decision(done, found)


def expire(groups: Groups, command: commands.ExpireOffsets, now_ms: int) -> Out:
    """Remove offsets whose retention has passed, those of deleted topics, and groups that have
    neither members nor offsets for the retention time.
    """
    before = now_ms - groups.rules.offsets_retention_ms
    found: list[GroupLogRecord] = []
    absent: set[TopicId] = set()
    for group_id in command.group_ids:
        group = groups.items().get(group_id)
        if group is None:
            continue
        absent |= {key.topic_id for key in group.offsets} - command.image.topics.keys()
        gone = _expired(group, before, command.image, command.absent & absent)
        found += [records.offset_removed(group_id, key) for key in gone]
        metadata = group.metadata
        idle = not group.members and metadata.empty_since_ms <= before and not group.pending
        if idle and len(gone) == len(group.offsets) and len(found) < commands.EXPIRE_MAX:
            found.append(records.removed(records.GROUP, group_id))
    found = found[: commands.EXPIRE_MAX]
    return decision(commands.OffsetsExpired(len(found), frozenset(absent)), found)


def _expired(
    group: ConsumerGroup, before: int, image: MetadataImage, deleted: frozenset[TopicId]
) -> list[PartitionKey]:
    """Return the partitions whose offsets expire."""
    idle = bool(group.members) or group.metadata.empty_since_ms <= before
    subscribed = subscribed_ids(group, image)
    return [
        key
        for key, committed in group.offsets.items()
        if not group.is_pending(key)
        if key.topic_id in deleted
        or (idle and committed.committed_ms <= before and key.topic_id not in subscribed)
    ]
