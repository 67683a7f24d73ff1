"""Which positions of streaming queries hold retention at this broker, and for how long (rule S1).

Pure.  The coordinators of groups report the holds of their groups again and again.  Each report is
a lease: a broker keeps what it has heard until the bound, whatever becomes of the coordinator.
A query commits its position to its group; the offset of that record names the commit.

Invariants
  H1  A new leader holds everything until every coordinator has reported since, or `grace_ms` have
      passed.  A replica that begins to clean its own log does the same.
  H2  A hold falls `max_ms` after the last commit of its query.  The time is monotonic, and another
      report of the same commit does not renew it, whichever coordinator sends it.
  H3  A hold that is too large falls, too (`fall`).  The shell knows the bytes of the log.
  H4  A fallen hold holds again once its query has committed again, unless it is still too large.
      Each fall is reported once.
  H5  A coordinator's report replaces its previous one: a hold that is missing was given up.  A
      report of an older leader epoch than the last one counts for nothing.
  H6  A hold of the end of the log holds nothing yet, so it does not fall.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from pk.types import NONE, Epoch, Offset, PartitionKey


class Hold(NamedTuple):
    """The position of a query in one partition, as its coordinator reports it."""

    group_id: str
    key: PartitionKey
    offset: Offset  #: the first offset that the query has not processed
    commit_offset: Offset  #: of the record of the commit
    age_ms: int  #: of the commit, as far as the coordinator knows


class Fall(NamedTuple):
    """A hold that has fallen."""

    group_id: str
    offset: Offset
    why: str


@dataclass(slots=True)
class _Lease:
    """A hold at this broker."""

    coordinator: int  #: the partition of `__consumer_offsets`
    offset: Offset
    commit_offset: Offset
    commit_ms: int  #: when the query committed, by the monotonic clock
    too_large: str = ""  #: why it fell for its size (H3); "" = it did not
    measured: Offset = NONE  #: the commit at which it was found too large
    silent: str = ""  #: why it fell for its age (H2)

    @property
    def fallen(self) -> str:
        return self.silent or self.too_large


class RetentionHolds:
    """The holds of which a broker has heard.

    max_ms: how long a query may be silent.  grace_ms: see H1.
    """

    def __init__(self, max_ms: int, grace_ms: int) -> None:
        self._max_ms = max_ms
        self._grace_ms = grace_ms
        self._leases: dict[PartitionKey, dict[str, _Lease]] = {}  #: by group id
        self._of: dict[int, set[tuple[PartitionKey, str]]] = {}  #: by coordinator
        self._heard: dict[int, tuple[Epoch, int]] = {}  #: by coordinator: its epoch, and when
        #: The leader epoch in which each partition is judged, and since when (H1).
        self._since: dict[PartitionKey, tuple[Epoch, int]] = {}

    def report(self, coordinator: int, epoch: Epoch, holds: Iterable[Hold], now_ms: int) -> bool:
        """Take over all holds of one coordinator; False if it is deposed (H5)."""
        known, _ = self._heard.get(coordinator, (epoch, 0))
        if epoch < known:
            return False
        self._heard[coordinator] = (epoch, now_ms)
        before = self._of.get(coordinator, set())
        now = self._of[coordinator] = set[tuple[PartitionKey, str]]()
        for hold in holds:
            now.add((hold.key, hold.group_id))
            leases = self._leases.setdefault(hold.key, {})
            lease = leases.get(hold.group_id)
            if lease is None:
                commit_ms = now_ms - max(0, hold.age_ms)
                leases[hold.group_id] = _Lease(
                    coordinator, hold.offset, hold.commit_offset, commit_ms
                )
            elif lease.commit_offset != hold.commit_offset:  # H2, H4
                lease.offset, lease.commit_offset, lease.silent = (
                    hold.offset,
                    hold.commit_offset,
                    "",
                )
                lease.commit_ms = max(lease.commit_ms, now_ms - max(0, hold.age_ms))
        for key, group_id in before - now:
            leases = self._leases.get(key, {})
            leases.pop(group_id, None)
            if not leases:
                self._leases.pop(key, None)
        return True

    def forget(self, kept: Collection[PartitionKey]) -> None:
        """Forget the leader epochs of partitions that are not here any more."""
        if len(self._since) <= len(kept):
            return
        here = set(kept)
        self._since = {key: since for key, since in self._since.items() if key in here}

    def keys(self) -> list[PartitionKey]:
        """Return the partitions that have holds."""
        return sorted(self._leases)

    def settled(
        self, key: PartitionKey, leader_epoch: Epoch, coordinators: int, now_ms: int
    ) -> bool:
        """Whether the holds of a partition are known (H1).

        leader_epoch: in which this broker leads it, or NONE
        coordinators: how many there are; 0 = this cluster has no groups
        """
        since = self._since.get(key)
        if since is None or since[0] != leader_epoch:
            since = self._since[key] = (leader_epoch, now_ms)
        if now_ms - since[1] >= self._grace_ms:
            return True
        return all(
            number in self._heard and self._heard[number][1] >= since[1]
            for number in range(coordinators)
        )

    def lowest(self, key: PartitionKey, now_ms: int) -> tuple[Offset, str] | None:
        """Return the lowest position that is held, and its group; None = nothing is held."""
        return min(
            (
                (lease.offset, group_id)
                for group_id, lease in self._leases.get(key, {}).items()
                if not lease.fallen and now_ms - lease.commit_ms < self._max_ms
            ),
            default=None,
        )

    def groups_below(self, key: PartitionKey, end: Offset, now_ms: int) -> list[str]:
        """Return the groups whose holds are below `end`, which a deletion by hand passes."""
        return sorted(
            group_id
            for group_id, lease in self._leases.get(key, {}).items()
            if lease.offset < end and not lease.fallen and now_ms - lease.commit_ms < self._max_ms
        )

    def expire(self, key: PartitionKey, end: Offset, now_ms: int) -> list[Fall]:
        """Let the holds fall whose queries are silent (H2, H6); return them.

        end: of the log
        """
        found = []
        for group_id, lease in sorted(self._leases.get(key, {}).items()):
            late = now_ms - lease.commit_ms >= self._max_ms
            if late and not lease.fallen and lease.offset < end:
                lease.silent = f"its query has not committed for {self._max_ms} ms (hold_max_ms)"
                found.append(Fall(group_id, lease.offset, lease.silent))
        return found

    def too_large(self, key: PartitionKey) -> list[tuple[Offset, str]]:
        """Return position and group of the holds that fell for their size, and whose queries have
        committed since.

        Without a new commit, the rows that expire would make a fallen hold small enough.
        """
        return sorted(
            (lease.offset, group_id)
            for group_id, lease in self._leases.get(key, {}).items()
            if lease.too_large and lease.commit_offset != lease.measured
        )

    def fall(self, key: PartitionKey, group_id: str, why: str) -> Fall | None:
        """Let a hold fall for its size, or, without a reason, hold again (H3, H4)."""
        lease = self._leases.get(key, {}).get(group_id)
        if lease is None:
            return None
        first = bool(why) and not lease.too_large
        lease.too_large, lease.measured = why, lease.commit_offset
        return Fall(group_id, lease.offset, why) if first else None

    def fallen(self, key: PartitionKey) -> list[Fall]:
        """Return the holds of a partition that have fallen."""
        return [
            Fall(group_id, lease.offset, lease.fallen)
            for group_id, lease in sorted(self._leases.get(key, {}).items())
            if lease.fallen
        ]

    def count(self, keys: Iterable[PartitionKey], now_ms: int) -> int:
        """Return how many holds of these partitions hold."""
        return sum(
            not lease.fallen and now_ms - lease.commit_ms < self._max_ms
            for key in keys
            for lease in self._leases.get(key, {}).values()
        )
