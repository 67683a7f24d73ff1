"""Elections of partition leaders, and the changes of ISR, ELR and last-known members (KIP-966).

The controller changes a partition through `PartitionChangeBuilder`, a scratch copy to which it
applies one or more of the steps below.  `PartitionChangeBuilder.record` returns the change, or
None. An election uses the first row that applies:

  | available                                      | elected                      | unclean |
  |------------------------------------------------|------------------------------|---------|
  | an eligible member of the ISR                  | the first in replica order,  | no      |
  |                                                | a fit one if there is one    |         |
  | an eligible member of the ELR                  | the same; it joins the ISR   | no      |
  | ISR and ELR empty, every last-known reported   | the greatest                 | yes     |
  | some missing, waited for, and loss is allowed  | greatest among those present | yes     |
  | otherwise                                      | none: leader NONE            | –       |

*Eligible*: the broker is available and does not report the replica as offline.  *Fit*: no broker
reports a reason against this leader (rule L16).  An unfit replica is elected only if no eligible
replica is fit.
The third row is the recovery election of rule R3.  It needs no permission, because no other replica
can have acknowledged records.  If there is one last-known member, its log is the greatest, and the
controller does not ask for its position.  In the fourth row "those present" are last-known members,
or any replica if no last-known member is present.  A replica that a reassignment is adding is
elected only as a member of ISR or ELR or as a last-known member (rule R9): any other has only a
part of the log.

*Greatest* compares (last epoch, log end).  One kind of log has no last epoch: a log without
records, because retention emptied it or because START_AT began it where its leader's segments begin
(rule R5).  The records that it lacks were deleted or are in the tier.  If such a log belongs to a
last-known member and ends above the greatest, it is elected: the offsets in between were given to
records and must not be given again.  For other replicas the epochs alone decide, since their log
may have been begun in a history that an unclean election gave up later.

A member that leaves the ISR is treated by *required* = min(min_insync_replicas, replicas).  While a
reassignment runs, `replicas` counts the original replicas without those being added, both here and
for the leader's high watermark (rule R1).

  | the ISR is then  | it left with its data | it may have lost data | ELR and last-known          |
  |------------------|-----------------------|-----------------------|-----------------------------|
  | required or more | forgotten             | forgotten             | both empty                  |
  | smaller          | to the ELR            | to last-known         | kept until it has grown     |

A leader epoch is never counted out of its block (rule T13): the next block belongs to a restored
cluster.  The last epoch of a block has no leader, so that the loss of a leader needs no epoch
beyond it.  A partition that has used up its block keeps its leader, and elects none once the
leader is gone.

The high watermark does not move while the ISR is smaller (rule R1), so every member of the ELR
holds all records below it.  Once the ISR is large enough, the high watermark moves without these
members. So the record that enlarges the ISR also empties the ELR.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from pk import errors, generations
from pk.server.controller.reports import EpochAndEnd, Report, Reports
from pk.server.metadata.image import MetadataImage, PartitionState
from pk.types import NONE, NodeId, PartitionKey
from pk.wire import pk_pb2 as wire

_MEMBERS = ("isr", "elr", "last_known", "replicas", "adding", "removing")


@dataclass(slots=True)
class LeaderEligibility:
    """The state of the brokers that an election uses.

    `arriving`: a broker that counts as available already.  `leaving`: a broker that no longer
    counts as available.
    """

    image: MetadataImage
    reports: Reports = field(default_factory=dict)
    arriving: NodeId = NONE
    leaving: NodeId = NONE

    def available(self, member: NodeId) -> bool:
        if member == self.leaving:
            return False
        return member == self.arriving or self.image.available(member)

    def eligible(self, member: NodeId, key: PartitionKey) -> bool:
        """Whether this replica of `key` may be elected."""
        report = self.report(member)
        return self.available(member) and (report is None or key not in report.offline)

    def fit(self, member: NodeId, key: PartitionKey) -> bool:
        """Whether no broker reported a reason against this replica as leader (rule L16)."""
        report = self.report(member)
        return report is None or not any(each.covers(key) for each in report.unfit)

    def taker(self, state: PartitionState, key: PartitionKey) -> NodeId:
        """The replica that takes over from a leader that gives up the lead (rule L16); or NONE.

        Only a broker that sent a heartbeat in this term counts.  For others the controller does not
        know whether their disk has room.
        """
        if state.unclean:
            return NONE  # the leader recovers first (T4)
        for member in state.replicas:
            heard = member != state.leader and self.report(member) is not None
            able = heard and member in state.isr and self.eligible(member, key)
            if able and self.fit(member, key):
                return member
        return NONE

    def report(self, member: NodeId) -> Report | None:
        """Return the report of the current registration of `member` in this term
        (controller/reports H1); None if there is none."""
        report, broker = self.reports.get(member), self.image.brokers.get(member)
        if report is None or broker is None or report.broker_epoch != broker.broker_epoch:
            return None
        return report

    def position(self, member: NodeId, key: PartitionKey) -> EpochAndEnd | None:
        report, since = self.report(member), self.image.leaderless.get(key)
        return None if report is None or since is None else report.position(key, since)


def waits_for(state: PartitionState, there: Callable[[NodeId], bool]) -> tuple[NodeId, ...]:
    """The brokers whose return with their data would let a leaderless partition elect a leader.

    One member of ISR or ELR is enough.  If both are empty, all last-known members must return.
    `there`: the brokers that have returned.  A broker whose replica is offline does not count.
    """
    if state.leader != NONE:
        return ()
    members = (*state.isr, *state.elr) or state.last_known or state.original
    return tuple(member for member in members if not there(member))


class PartitionChangeBuilder:
    """A scratch copy of one partition, changed by steps; `record` is the outcome."""

    def __init__(self, key: PartitionKey, before: PartitionState, min_insync_replicas: int) -> None:
        self.key = key
        self.before = before
        self.now = before
        self.led_anew = False
        self.restated = False  #: the same ISR is written again, to begin a new partition epoch
        self.elected_uncleanly = False
        #: The replicas that may have held records which a recovery election lost, with their
        #: positions; empty if there was no such election.
        self.at_risk: Mapping[NodeId, EpochAndEnd | None] = {}
        self._min_isr = max(1, min_insync_replicas)

    @property
    def used_up(self) -> bool:
        """Whether no leader epoch of the block is left for a leader."""
        return generations.leaves_block(self.before.leader_epoch, 3, generations.EPOCHS)

    def require_epochs(self, name: str) -> None:
        """Raise `UnsupportedFeature` if the partition has used up its leader epochs."""
        if self.used_up:
            raise errors.UnsupportedFeature(
                f"{name} has used up its leader epochs (T13): it keeps the leader that it has, and "
                "no other replica can lead it. Copy its records to another topic"
            )

    # -- members come and leave -----------------------------------------------------------------

    def fence(self, broker_id: NodeId) -> None:
        """Remove a broker that keeps its data; below min ISR it joins the ELR."""
        if broker_id in self.now.isr:
            self._leave(broker_id, lost=())

    def lose(self, broker_id: NodeId) -> None:
        """Remove a broker that may have lost data (rule L3) or cannot serve it (L2, L9)."""
        if broker_id in self.now.isr or broker_id in self.now.elr:
            self._leave(broker_id, lost=(broker_id,))

    def _leave(self, broker_id: NodeId, lost: Collection[NodeId]) -> None:
        self._set_isr([member for member in self.now.isr if member != broker_id], lost)
        if self.now.leader == broker_id:
            self._lead(NONE)

    def alter_isr(self, isr: Collection[NodeId]) -> None:
        """Set the ISR as the leader asks (rule R2)."""
        if set(isr) != set(self.now.isr):
            self._set_isr(isr, lost=())

    def restate_isr(self) -> None:
        """Begin a new partition epoch with the same ISR, so that requests under the old one
        fail.
        """
        self.restated = True

    def recovered(self) -> None:
        """Note that the leader has recovered from an unclean election (rule T4)."""
        self.now = self.now._replace(unclean=False)

    def _set_isr(self, isr: Collection[NodeId], lost: Collection[NodeId]) -> None:
        """Set the ISR, and ELR and last-known members by the second table of the module."""
        now = self.now
        elr: tuple[NodeId, ...] = ()
        last_known: tuple[NodeId, ...] = ()
        if len(isr) < min(self._min_isr, len(now.replicas) - len(now.adding)):
            held = [each for each in (*now.elr, *now.isr) if each in now.replicas]
            elr = tuple(each for each in held if each not in isr and each not in lost)
            known = [*now.last_known, *(each for each in held if each in lost)]
            last_known = tuple(
                each
                for each in dict.fromkeys(known)
                if each in now.replicas and each not in isr and each not in elr
            )
        self.now = now.led(now.leader, tuple(isr), elr, last_known)

    def forget_eligible(self) -> None:
        """Empty the ELR because min_insync_replicas changed (rule R1).

        While the ISR is empty the high watermark cannot move.  The ELR is still correct then, and
        stays.
        """
        if self.now.isr and (self.now.elr or self.now.last_known):
            self.now = self.now._replace(elr=(), last_known=())

    # -- electing a leader ----------------------------------------------------------------------

    def elect(self, cluster: LeaderEligibility, *, may_lose: bool = False) -> bool:
        """Elect a leader for a leaderless partition by the first table of the module.

        `may_lose`: the wait for missing members is over, and an unclean election is allowed by the
        topic or asked for by an operator.
        """
        now = self.now
        if now.leader != NONE or self.used_up:
            return False
        for members in (now.isr, now.elr):
            able = [m for m in now.replicas if m in members and cluster.eligible(m, self.key)]
            if able:
                member = next((each for each in able if cluster.fit(each, self.key)), able[0])
                isr = now.isr if member in now.isr else (*now.isr, member)
                self._set_isr(isr, lost=())
                self._lead(member)
                return True
        chosen = self._recover(cluster, may_lose)
        if chosen is None:
            return False
        self.at_risk = {
            member: cluster.position(member, self.key)
            for member in now.replicas
            if member == chosen or member in (*now.isr, *now.elr, *now.last_known)
        }
        self._set_isr((chosen,), lost=(*now.isr, *now.elr))
        self._lead(chosen)
        self.now = self.now._replace(unclean=True)
        self.elected_uncleanly = True
        return True

    def _recover(self, cluster: LeaderEligibility, may_lose: bool) -> NodeId | None:
        now = self.now
        known = [member for member in now.replicas if member in (now.last_known or now.original)]
        present = self._present(known, cluster)
        if not now.isr and not now.elr:
            best = self._greatest(known, cluster)
            if best in present:
                return best
        if not may_lose:
            return None
        return self._greatest(present or self._present(now.candidates, cluster), cluster)

    def _present(self, members: Collection[NodeId], cluster: LeaderEligibility) -> list[NodeId]:
        """The eligible replicas whose brokers sent a heartbeat in this term."""
        return [
            member
            for member in members
            if cluster.eligible(member, self.key) and cluster.report(member) is not None
        ]

    def _greatest(self, members: list[NodeId], cluster: LeaderEligibility) -> NodeId | None:
        """The greatest log as the module defines it, the first in replica order among equals.

        None until every candidate has reported its position.
        """
        if len(members) == 1:
            return members[0]
        positions: dict[NodeId, EpochAndEnd] = {}
        for member in members:
            at = cluster.position(member, self.key)
            if at is None:
                return None
            positions[member] = at
        if not positions:
            return None
        best = max(positions, key=positions.__getitem__)
        for member, (epoch, end) in positions.items():
            known = member in self.now.last_known
            if known and epoch == NONE and end > positions[best][1]:
                best = member
        return best

    def _lead(self, leader: NodeId) -> None:
        now = self.now
        self.led_anew = True
        self.now = now.led(leader, now.isr, now.elr, now.last_known)

    def prefer(self, cluster: LeaderEligibility) -> bool:
        """Move the lead to the first replica if it is in sync, unless the leader recovers (T4)."""
        now = self.now
        first = now.replicas[0]
        if now.leader in (NONE, first) or now.unclean or first not in now.isr:
            return False
        if not cluster.eligible(first, self.key) or not cluster.fit(first, self.key):
            return False
        if self.used_up:
            return False
        self._lead(first)
        return True

    def hand_over(self, cluster: LeaderEligibility) -> bool:
        """Move the lead from a leader that gives it up to a replica that may take it (rule L16)."""
        report = cluster.report(self.now.leader)
        if report is None or not report.gives_up(self.key) or self.used_up:
            return False
        taker = cluster.taker(self.now, self.key)
        if taker == NONE:
            return False
        self._lead(taker)
        return True

    # -- reassignment (KIP-455) -----------------------------------------------------------------

    def can_assign(self, replicas: Collection[NodeId], cluster: LeaderEligibility) -> bool:
        """Whether `replicas` alone can go on: one of them leads or may be elected.

        A replica that leaves must not be the last holder of acknowledged records.  Holders are the
        members of ISR and ELR.  If both are empty, every last-known member is a holder, because a
        recovery election compares all of them (rule R3).
        """
        now = self.now
        if now.leader in replicas:
            return True
        if now.leader == NONE:
            if now.isr or now.elr:
                return any(member in replicas for member in (*now.isr, *now.elr))
            return bool(now.last_known) and all(each in replicas for each in now.last_known)
        return any(
            member in replicas and cluster.eligible(member, self.key)
            for member in (*now.isr, *now.elr)
        )

    def keeps_copies(self, replicas: Collection[NodeId]) -> bool:
        """Whether `replicas` alone keep as many copies of acknowledged records as rule R8 asks.

        The ISR, and the ISR together with the ELR, must keep min(required, members before).  For
        these the original replicas are counted: completion has a condition of its own.
        """
        now = self.now
        required = min(self._min_isr, len(now.replicas) - len(now.adding))
        return all(
            sum(member in replicas for member in members) >= min(required, len(members))
            for members in (now.isr, (*now.isr, *now.elr))
        )

    def assign(
        self,
        replicas: tuple[NodeId, ...],
        adding: tuple[NodeId, ...],
        removing: tuple[NodeId, ...],
        cluster: LeaderEligibility,
    ) -> None:
        """Set the replicas; elect a leader if the present one is not among them.

        A removed replica deletes its log and may be added again later.  Messages about the deleted
        log that are still in flight must not count then.  So the leader begins a new epoch (rule
        R2).
        """
        gone = any(member not in replicas for member in self.now.replicas)
        now = self.now._replace(
            replicas=replicas,
            adding=adding,
            removing=removing,
            directories=tuple(self._directory_of(each, cluster.image) for each in replicas),
        )
        if now.leader != NONE and gone:
            now = now._replace(leader=now.leader if now.leader in replicas else NONE)
            self.led_anew = True
        self.now = now
        self._set_isr([member for member in now.isr if member in replicas], lost=())
        self.elect(cluster)

    def _directory_of(self, member: NodeId, image: MetadataImage) -> str:
        """Return the directory that the record names for a replica.  For a new replica this is the
        broker's directory if the broker has only one."""
        if member in self.now.replicas:
            return self.now.directory_of(member)
        return image.only_directory(member)

    def name_directory(self, member: NodeId, directory_id: str) -> None:
        """Note the directory that holds this replica (rule R11)."""
        now = self.now
        named = now.directories or ("",) * len(now.replicas)
        both = zip(now.replicas, named, strict=True)
        names = tuple(directory_id if each == member else name for each, name in both)
        self.now = now._replace(directories=names)

    def complete(self, cluster: LeaderEligibility, *, force: bool = False) -> bool:
        """Complete a reassignment whose new replicas are all in sync (rule R8).

        Unlike Kafka, the ISR within the target must reach min_insync_replicas, so that completion
        never stops acks=all.  If the target has fewer replicas than the original, all of them must
        be in sync.  `force` waives both conditions, on request of an operator.
        """
        now = self.now
        if self.used_up or (not now.adding and not now.removing):
            return False
        target = now.target
        isr = [member for member in now.isr if member in target]
        if any(member not in isr for member in now.adding):
            return False
        smaller = len(target) < len(now.replicas) - len(now.adding)
        if not force and len(isr) < (len(target) if smaller else min(self._min_isr, len(target))):
            return False
        if now.leader not in target and not self.can_assign(target, cluster):
            return False
        self.assign(target, (), (), cluster)
        return True

    # -- the outcome ----------------------------------------------------------------------------

    def record(self) -> wire.PartitionChangeRecord | None:
        """The record that changes `before` to `now`, or None if they are equal."""
        before, now = self.before, self.now
        if now == before and not self.led_anew and not self.restated:
            return None
        change = wire.PartitionChangeRecord(
            topic_id=self.key.topic_id,
            partition=self.key.partition,
            unclean=now.unclean,
            elected_uncleanly=self.elected_uncleanly,
        )
        for name in _MEMBERS:
            members = getattr(now, name)
            if members != getattr(before, name) or (name == "isr" and self.restated):
                field: wire.IntList = getattr(change, name)
                field.SetInParent()  # an empty list is a change, too
                field.values.extend(members)
        if now.directories != before.directories:
            change.directories.extend(now.directories)
        if self.led_anew:
            change.leader = now.leader
        return change
