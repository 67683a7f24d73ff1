"""The jobs `retention` and `vacuum`: the brokers do the work, now instead of at their intervals.

They need no Spark and no lease: the leaders of the partitions and the owner of the table do what
they do anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pk.clock import block_s, monotonic_s
from pk.schedules import DONE

#: How long a retention job waits until the table has followed, and between two looks.
SETTLE_S, LOOK_S = 30.0, 1.0
#: Equal looks in a row, after which nothing more is expected: a pass may roll a segment, the next
#: one drop it, the next one move the log start.
LOOKS = 4


@dataclass(slots=True, frozen=True)
class RetentionReport:
    """The result of one run."""

    topic: str
    starts_before: dict[int, int]  #: log start of each partition
    starts: dict[int, int]
    settled: bool  #: whether the table begins at these starts; otherwise it follows later

    @property
    def outcome(self) -> str:
        return DONE

    def summary(self) -> str:
        """Return the result as one line."""
        gone = sum(self.starts[each] - before for each, before in self.starts_before.items())
        moved = sum(self.starts[each] > before for each, before in self.starts_before.items())
        later = "" if self.settled else "; the table follows"
        return f"{gone} offsets left {moved} partitions{later}"


@dataclass(slots=True, frozen=True)
class VacuumReport:
    """The result of one run."""

    topic: str
    deleted_files: int

    @property
    def outcome(self) -> str:
        return DONE

    def summary(self) -> str:
        """Return the result as one line."""
        return f"{self.deleted_files} files deleted"


def retention(bootstrap: str, topic: str) -> RetentionReport:
    """Have retention applied to a topic now, and wait until its table has followed.

    Raises `InvalidRequest` if the topic has no tier, `UnknownTopicOrPartition`.
    """
    from pk.client.admin import AdminClient

    with AdminClient(bootstrap) as admin:
        before = admin.retain_tier(topic)

        def look() -> tuple[dict[int, int], dict[int, int]]:
            admin.retain_tier(topic)  # the next pass
            starts = {p.partition: at for p, at in admin.offsets(topic, "earliest").items()}
            tier = admin.describe_tier(topic)
            return starts, {each.partition: each.start for each in tier.partitions}

        starts, settled = settle(look, block_s, monotonic_s)
    return RetentionReport(topic, before, {each: starts[each] for each in before}, settled)


def settle(
    look: Callable[[], tuple[dict[int, int], dict[int, int]]],
    wait: Callable[[float], None],
    now_s: Callable[[], float],
) -> tuple[dict[int, int], bool]:
    """Look until the log starts stay and the table begins there, for at most SETTLE_S.

    look: returns the starts of the logs and of the table, by partition
    """
    deadline_s = now_s() + SETTLE_S
    last: dict[int, int] = {}
    equal = 0
    while True:
        wait(LOOK_S)
        starts, of_table = look()
        behind = [each for each, at in starts.items() if of_table.get(each, at) < at]
        equal = equal + 1 if starts == last and not behind else 1
        if equal >= LOOKS and not behind:
            return starts, True
        if now_s() >= deadline_s:
            return starts, False
        last = starts


def vacuum(bootstrap: str, topic: str) -> VacuumReport:
    """Delete the files that a topic's table dropped long enough ago, now.

    Raises `InvalidRequest` if the topic has no tier, `TierUnavailable` while the broker does not
    trust its clock (rule L10), `UnknownTopicOrPartition`.
    """
    from pk.client.admin import AdminClient

    with AdminClient(bootstrap) as admin:
        return VacuumReport(topic, admin.vacuum_tier(topic))
