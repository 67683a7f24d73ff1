"""The states of one partition's replica on this broker, and the events that change them.

Pure.  Kafka's `ReplicaManager` keeps a `HostedPartition` for each partition: None, Online or
Offline.  pk divides Online by what the replica does, and Offline by what is left of the log.

A `HostedReplica` is the state of one log.  `HostedReplicas` holds the current one of each
partition; a partition that is not in it is ABSENT.  `HostedReplicas.on` is the only way from one
state to another.  It looks the event up in `TRANSITIONS`, and raises `IllegalTransition` if the
table has no such edge.  `docs/replica-states.md` is made from the tables below.

Invariants
  H1  the broker has an open log of a partition if and only if the partition's state is one of
      `OPEN`
  H2  exactly the states of `WITH_CAUSE` have a cause; a removed replica keeps the reason for its
      removal
  H3  the state of a log that was removed or set aside never changes again: the next log of the same
      partition gets a `HostedReplica` of its own
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from pk import errors
from pk.types import Epoch, PartitionKey


class ReplicaState(Enum):
    """What this broker's replica of a partition is."""

    ABSENT = "absent"
    UNOPENED = "unopened"
    UNATTACHED = "unattached"
    FOLLOWING = "following"
    LEADING = "leading"
    RECOVERING = "recovering"
    OFFLINE = "offline"
    REBUILDING = "rebuilding"


class ReplicaEvent(Enum):
    """What happens to a replica."""

    OPENED = "opened"
    OPEN_FAILED = "open failed"
    FOLLOWED = "followed"
    DETACHED = "detached"
    ELECTED = "elected"
    RESIGNED = "resigned"
    RECOVERY_BEGUN = "recovery begun"
    RECOVERY_FAILED = "recovery failed"
    RECOVERED = "recovered"
    FAILED = "failed"
    REOPENED = "reopened"
    DISCARD_KNOWN = "discard known"
    SET_ASIDE = "set aside"
    REMOVED = "removed"


S, E = ReplicaState, ReplicaEvent

#: What each state means; the nearest state of Kafka in parentheses.
MEANINGS = {
    S.ABSENT: "This broker has no log of the partition (HostedPartition.None).",
    S.UNOPENED: "The log could not be opened, created or found; the cause says why"
    " (HostedPartition.Offline without a partition).",
    S.UNATTACHED: "The log is open. The broker neither leads nor fetches: the partition has no"
    " leader, or this process is not registered yet (UnattachedState of KRaft).",
    S.FOLLOWING: "The broker fetches from the leader (HostedPartition.Online, follower).",
    S.LEADING: "The broker leads the partition (HostedPartition.Online, leader).",
    S.RECOVERING: "The broker was elected uncleanly and compares its log with the tier's table"
    " before it leads (rule T4; LeaderRecoveryState.RECOVERING).",
    S.OFFLINE: "The log was open and cannot be served: it is damaged, its directory failed, or a"
    " full disk interrupted a truncation (HostedPartition.Offline).",
    S.REBUILDING: "The damaged or missing log was set aside; a new, empty one is not open yet"
    " (rules L9, L15).",
}

#: The meaning of each event, and the reason why it occurs only in the states of the table.
REASONS = {
    E.OPENED: "The broker opens or creates a log. It has no open log of the partition yet;"
    " otherwise two logs of one partition would be written.",
    E.OPEN_FAILED: "The broker could not open or create a log. An open log fails with the"
    " event *failed*.",
    E.FOLLOWED: "The broker begins to fetch. The log is open and idle: a leader has resigned"
    " before, and the fetcher of another leader has been detached.",
    E.DETACHED: "The broker stops fetching. Only a follower fetches.",
    E.ELECTED: "The metadata name this broker as leader. Its log is open, the records of a former"
    " leader are written or undone, and the log agrees with the tier.",
    E.RESIGNED: "The broker stops leading, or stops preparing to lead, because the metadata name"
    " another leader or none.",
    E.RECOVERY_BEGUN: "This broker was elected uncleanly. Its log is open, and its fetcher"
    " is detached.",
    E.RECOVERY_FAILED: "An attempt to compare the log with the tier's table failed. The broker"
    " repeats it.",
    E.RECOVERED: "The tier's table is fenced for the leader epoch, and the log agrees with it or"
    " begins at its end.",
    E.FAILED: "An open log is damaged, its directory fails, or a full disk interrupts a truncation."
    " The fetcher is detached first. A log that is offline cannot fail again.",
    E.REOPENED: "The disk has room again. A log that a full disk left incomplete is opened as at"
    " the start of the process.",
    E.DISCARD_KNOWN: "An operator discarded a missing log, and the replica is in neither ISR nor"
    " ELR. An empty log may be created.",
    E.SET_ASIDE: "A damaged or missing log is moved away, because the controller knows that it"
    " is offline and another broker leads (rules L9, L15). A log that is served is never moved.",
    E.REMOVED: "The topic was deleted, or the replica was reassigned. The fetcher is detached"
    " first.",
}

#: (state, event) → the state afterwards.  There is no other edge.
TRANSITIONS = {
    (S.ABSENT, E.OPENED): S.UNATTACHED,
    (S.ABSENT, E.OPEN_FAILED): S.UNOPENED,
    (S.UNOPENED, E.OPENED): S.UNATTACHED,
    (S.UNOPENED, E.OPEN_FAILED): S.UNOPENED,
    (S.UNOPENED, E.DISCARD_KNOWN): S.ABSENT,
    (S.UNOPENED, E.SET_ASIDE): S.REBUILDING,
    (S.UNOPENED, E.REMOVED): S.ABSENT,
    (S.UNATTACHED, E.FOLLOWED): S.FOLLOWING,
    (S.UNATTACHED, E.ELECTED): S.LEADING,
    (S.UNATTACHED, E.RECOVERY_BEGUN): S.RECOVERING,
    (S.UNATTACHED, E.FAILED): S.OFFLINE,
    (S.UNATTACHED, E.REMOVED): S.ABSENT,
    (S.FOLLOWING, E.DETACHED): S.UNATTACHED,
    (S.LEADING, E.ELECTED): S.LEADING,  # in a later epoch
    (S.LEADING, E.RESIGNED): S.UNATTACHED,
    (S.LEADING, E.RECOVERY_BEGUN): S.RECOVERING,
    (S.LEADING, E.FAILED): S.OFFLINE,
    (S.LEADING, E.REMOVED): S.ABSENT,
    (S.RECOVERING, E.RECOVERY_BEGUN): S.RECOVERING,  # for a later epoch
    (S.RECOVERING, E.RECOVERY_FAILED): S.RECOVERING,
    (S.RECOVERING, E.RECOVERED): S.UNATTACHED,
    (S.RECOVERING, E.RESIGNED): S.UNATTACHED,
    (S.RECOVERING, E.FAILED): S.OFFLINE,
    (S.RECOVERING, E.SET_ASIDE): S.REBUILDING,
    (S.RECOVERING, E.REMOVED): S.ABSENT,
    (S.OFFLINE, E.REOPENED): S.UNATTACHED,
    (S.OFFLINE, E.SET_ASIDE): S.REBUILDING,
    (S.OFFLINE, E.REMOVED): S.ABSENT,
    (S.REBUILDING, E.OPENED): S.UNATTACHED,
    (S.REBUILDING, E.OPEN_FAILED): S.UNOPENED,
    (S.REBUILDING, E.REMOVED): S.ABSENT,
}

#: The log is open and the replica serves: HostedPartition.Online.
ONLINE = (S.UNATTACHED, S.FOLLOWING, S.LEADING)
#: The log is open.
OPEN = (*ONLINE, S.RECOVERING, S.OFFLINE)
#: The replica cannot be served, for a cause.
WITH_CAUSE = (S.UNOPENED, S.RECOVERING, S.OFFLINE)
#: Causes for which an open log is reported to the controller as offline (rules L2, L9).
LOST = (errors.StorageFailed, errors.CorruptLog)
#: Causes that another replica can mend: the log is set aside and rebuilt (rules L9, L15).
REBUILT_FOR = (errors.CorruptLog, errors.LogMissing)
#: Events of a replica that its history keeps.
HISTORY_MAX = 8


class IllegalTransition(AssertionError):
    """A bug of pk: an event occurred in a state that has no edge for it."""


class HostedReplica:
    """The state of one log, or of a partition's replica that has no log."""

    __slots__ = ("_history", "cause", "key", "state")

    def __init__(self, key: PartitionKey) -> None:
        self.key = key
        self.state = ReplicaState.ABSENT
        self.cause: errors.PkError | None = None  #: H2
        self._history: tuple[tuple[ReplicaState, ReplicaEvent], ...] = ()

    @property
    def online(self) -> bool:
        """Whether the log is open and may be served."""
        return self.state in ONLINE

    @property
    def lost(self) -> bool:
        """Whether the log was opened and its records cannot be served from here (rules L2, L9)."""
        return self.state in OPEN and isinstance(self.cause, LOST)

    @property
    def rebuildable(self) -> bool:
        """Whether the log is damaged or missing, so that another replica's records may replace
        it.
        """
        return isinstance(self.cause, REBUILT_FOR)

    def _move(self, event: ReplicaEvent, cause: errors.PkError | None) -> None:
        after = TRANSITIONS.get((self.state, event))
        if after is None:
            raise IllegalTransition(self._story(event))
        if after is not ReplicaState.ABSENT:  # H2
            needs = "a" if after in WITH_CAUSE else "no"
            assert (cause is not None) == (after in WITH_CAUSE), f"{event.name} needs {needs} cause"
        self._history = (*self._history[1 - HISTORY_MAX :], (self.state, event))
        self.state, self.cause = after, cause

    def _story(self, event: ReplicaEvent) -> str:
        """Explain why `event` has no edge here: the replica's state, the event, and what is
        missing.
        """
        past = ", ".join(f"{was.name} {what.name}" for was, what in self._history)
        allowed = " or ".join(was.name for was, what in TRANSITIONS if what is event)
        why = "" if self.cause is None else f" ({type(self.cause).__name__}: {self.cause.message})"
        return (
            f"the replica of partition {self.key.partition} of topic {self.key.topic_id} is "
            f"{self.state.name}{why}: there is no transition for {event.name}, which needs "
            f"{allowed}. {REASONS[event]} Before: {past or 'nothing'}."
        )


class HostedReplicas:
    """The current replica of each partition on this broker; see the module's docstring."""

    def __init__(self) -> None:
        self._replicas: dict[PartitionKey, HostedReplica] = {}
        self._unopened: dict[PartitionKey, HostedReplica] = {}  #: in the order of their failures
        #: Replicas that were set aside and whose new log the leader has not compared yet, and the
        #: leader epoch in which that happened.  The broker reports them offline in that epoch
        #: (broker/metadata_publisher M8).
        self.uncompared: dict[PartitionKey, Epoch] = {}

    def __iter__(self) -> Iterator[HostedReplica]:
        """Every replica that is not ABSENT."""
        return iter(self._replicas.values())

    def get(self, key: PartitionKey) -> HostedReplica | None:
        """The replica of `key`; None if it is ABSENT."""
        return self._replicas.get(key)

    def state(self, key: PartitionKey) -> ReplicaState:
        """The state of the replica of `key`."""
        replica = self._replicas.get(key)
        return ReplicaState.ABSENT if replica is None else replica.state

    def unopened(self) -> dict[PartitionKey, errors.PkError]:
        """The UNOPENED replicas with their causes, in the order in which they failed."""
        return {
            key: replica.cause
            for key, replica in self._unopened.items()
            if replica.cause is not None
        }

    def why_unopened(self, key: PartitionKey) -> errors.PkError | None:
        """The cause of an UNOPENED replica; None in any other state."""
        replica = self._unopened.get(key)
        return None if replica is None else replica.cause

    def on(
        self, key: PartitionKey, event: ReplicaEvent, cause: errors.PkError | None = None
    ) -> HostedReplica:
        """Take the edge of `event`; returns the replica in its new state.

        Raises `IllegalTransition` if the replica of `key` has no such edge.
        """
        replica = self._replicas.get(key) or HostedReplica(key)
        if event is ReplicaEvent.SET_ASIDE:
            replica = _successor(replica)
        replica._move(event, cause)
        if replica.state is ReplicaState.ABSENT:
            self._replicas.pop(key, None)
        else:
            self._replicas[key] = replica
        if event is ReplicaEvent.REMOVED:
            self.uncompared.pop(key, None)
        if replica.state is ReplicaState.UNOPENED:
            self._unopened[key] = replica
        else:
            self._unopened.pop(key, None)
        return replica

    def forget(self, key: PartitionKey) -> None:
        """Remove the replica of `key` if this broker should not have one and its log is not
        open.
        """
        if self.state(key) in (ReplicaState.UNOPENED, ReplicaState.REBUILDING):
            self.on(key, ReplicaEvent.REMOVED)

    def compared(self, key: PartitionKey) -> bool:
        """Note that the leader has compared the log of `key`; False if no comparison was
        awaited.
        """
        return self.uncompared.pop(key, None) is not None


def _successor(replica: HostedReplica) -> HostedReplica:
    """H3: a replica of its own for the next log; the old log keeps its state and cause."""
    after = HostedReplica(replica.key)
    after.state, after.cause, after._history = replica.state, replica.cause, replica._history
    return after
