"""Reads a broker's wall clock, passes it to `ClockTrust`, and reports whether it is trusted (L10).

World-generic.  Every part of the broker that decides by age takes the time from here.  The other
nodes' clocks come with the replies to heartbeats (lifecycle.py).  The difference between two clocks
is known up to half of the network time of request and reply.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from pk import errors
from pk.clock import MedianTime
from pk.log import directory as files
from pk.log.directory import Directory
from pk.log.last_run import LastRun
from pk.log.manager import LogManager
from pk.log.plan import Now
from pk.running_since import SLEW_MS, RunningSince
from pk.server.broker.clock_trust import DELAY_MAX_MS, ClockTrust, Doubt, Limits, Sample
from pk.server.controller.reports import CLOCK_OFF
from pk.server.metadata.cache import MetadataCache
from pk.server.replica.context import Environment
from pk.types import NodeId
from pk.wire import pk_pb2 as wire

#: Rows of log/validate.py that compare a client's timestamp with the broker's clock.
_BY_THE_CLOCK = ("F", "G")


class ClockWatch:
    """The clock of one broker process."""

    def __init__(self, env: Environment, manager: LogManager, metadata: MetadataCache) -> None:
        self._env = env
        self._manager = manager
        self._metadata = metadata
        self._clock = env.clock
        self._boot_id = ""
        server = env.server
        limits = Limits(
            step_max=server["clock_step_max_ms"],
            gap_max=server["clock_gap_max_ms"],
            grace=server["clock_grace_ms"],
            fresh=server["broker_session_timeout_ms"],
            producer_expiration=server["producer_id_expiration_ms"],
        )
        now = self._clock.wall_ms(), self._clock.boottime_ms()
        self._limits = limits
        self._running_since = RunningSince(self._clock)
        self.trust = ClockTrust(env.node_id, limits, *now)
        self._said = Doubt.NOT_COMPARED  #: the doubt that was logged last

    def begin(self, boot_id: str, *, fresh: bool, appended_ms: int | None = None) -> None:
        """Begin to judge the clock, once the disks were read; `fresh`: they hold no log."""
        self._boot_id = boot_id
        before = files.last_run_of(self._manager.directories)
        self.trust.begin(before, boot_id, fresh=fresh, appended_ms=appended_ms)
        self._look()

    # -- the time ----------------------------------------------------------------------------------

    def _look(self) -> int:
        """Read the wall clock, let `ClockTrust` check this reading, and return it."""
        wall_ms = self._clock.wall_ms()
        self.trust.observe(wall_ms, self._clock.boottime_ms())
        self._say()
        return wall_ms

    def trusted_ms(self) -> int | None:
        """Return the time by which records expire; None = the clock is not trusted (L10)."""
        wall_ms = self._look()
        return wall_ms if self.trust.doubt is Doubt.NONE else None

    def median_time(self) -> MedianTime | None:
        """Return the time by the median of all nodes' clocks, for times that other brokers compare
        with theirs; None = it is not known now.
        """
        wall_ms = self._look()
        return self.trust.median_time(wall_ms)

    def forget_before_ms(self) -> int | None:
        """Return the time by which idle producers expire; None = none may expire now."""
        return self.trust.forget_before_ms(self._look())

    def now(self) -> Now:
        """Return the wall clock for an append, and the time of its producer's activity."""
        wall_ms = self._clock.wall_ms()
        return Now(wall_ms, self.trust.producer_activity_ms(wall_ms, self._clock.boottime_ms()))

    # -- other nodes -------------------------------------------------------------------------------

    def reading(self) -> wire.ClockReading:
        """Return the clock reading that a heartbeat carries."""
        wall_ms, trust = self._look(), self.trust
        return wire.ClockReading(
            wall_ms=wall_ms,
            trusted=trust.doubt is Doubt.NONE,
            doubt=trust.doubt.value,
            running_since_ms=self._running_since(),
        )

    def heartbeat_answered(self, reply: wire.BrokerHeartbeatReply, sent_ms: int) -> None:
        """Compare the clocks in the reply to a heartbeat that was sent at `sent_ms` (boottime)."""
        if not reply.clock_sent_ms:
            return
        self._look()
        now_ms = self._clock.boottime_ms()
        took_ms = (now_ms - sent_ms) - (reply.clock_sent_ms - reply.clock_received_ms)
        if not -SLEW_MS <= took_ms <= min(DELAY_MAX_MS, self.trust.tolerance_ms):
            return  # slow, or the controller's clock was set between request and reply
        line_ms = (reply.clock_received_ms - sent_ms + reply.clock_sent_ms - now_ms) // 2
        samples = [
            Sample(each.node_id, line_ms + each.ahead_ms, each.trusted, each.running_since_ms)
            for each in reply.clocks
        ]
        self.trust.compare(samples, self._expected())
        self._look()

    def unfit(self) -> list[wire.Unfit]:
        """Report that this broker should not lead while its clock is off the median (L10, L16).

        A leader stamps records with its clock, and refuses clients' timestamps by it.
        """
        if not self.trust.gives_up_leadership:
            return []
        return [wire.Unfit(reason=CLOCK_OFF, all=True, gives_up=True)]

    def _expected(self) -> Collection[NodeId]:
        return list(self._metadata.image.brokers)

    # -- people ------------------------------------------------------------------------------------

    def gauges(self) -> None:
        """Set the metrics of the clock."""
        self._look()
        metrics, trust = self._env.metrics, self.trust
        metrics.clock_alert.set(trust.alert)
        metrics.clock_step.set(trust.stepped_ms)
        metrics.clock_skew.set(trust.skew_ms or 0)

    def confirm(self) -> Doubt:
        """Trust the clock because an operator confirms it; return the doubt that this ends."""
        self._look()
        ended = self.trust.confirm()
        self._env.warn("clock_confirmed", doubt=ended.value)
        self._look()
        return ended

    def _say(self) -> None:
        """Log one line whenever the doubt about the clock begins, ends or changes."""
        trust, doubt = self.trust, self.trust.doubt
        if doubt is self._said:
            return
        before, self._said = self._said, doubt
        if trust.alert:
            why = f"{self.why()}. Nothing expires by age, no producer is forgotten"
            self._env.warn("clock_not_trusted", doubt=doubt.value, why=why)
        elif before is not Doubt.NOT_COMPARED:
            self._env.warn("clock_trusted", doubt_before=before.value)

    def why(self) -> str:
        """Return the doubt in words."""
        trust, limits = self.trust, self._limits
        if trust.doubt is Doubt.START:
            gap_ms, wait = trust.gap_ms, f"waiting clock_grace_ms ({duration_text(limits.grace)})"
            if gap_ms is None:
                found = "it is not known when this broker ran last"
            else:
                side = "past" if gap_ms >= 0 else "before"
                found = f"the clock is {duration_text(abs(gap_ms))} {side} this broker's last run"
            return f"{found}: {wait} for time synchronisation, other nodes' clocks, or an operator"
        if trust.doubt is Doubt.STEP:
            by = duration_text(abs(trust.stepped_ms))
            side = "forward" if trust.stepped_ms > 0 else "back"
            return f"the clock was set {side} by {by}, clock_step_max_ms is {limits.step_max}"
        if trust.doubt is Doubt.AHEAD:
            by = duration_text(abs(trust.skew_ms or 0))
            return f"the clock is {by} ahead of the median of {trust.nodes} nodes"
        return ""

    def _suspected_clock(self) -> str:
        """Say which clock is probably off, the broker's or the client's."""
        trust = self.trust
        mine, skew_ms, limit = (
            f"the clock of broker {self._env.node_id}",
            trust.skew_ms,
            trust.tolerance_ms,
        )
        if skew_ms is not None and abs(skew_ms) > limit:
            side = "ahead of" if skew_ms > 0 else "behind"
            by = duration_text(abs(skew_ms))
            return f"{mine} is off: it is {by} {side} the median of {trust.nodes} nodes"
        if skew_ms is not None:
            return f"{mine} agrees with {trust.nodes - 1} other nodes: the client's clock is off"
        if trust.behind_ms > limit:
            return f"{mine} is off: it is {duration_text(trust.behind_ms)} behind its own last run"
        if trust.alert:
            return f"{mine} may be off: {self.why()}"
        return f"{mine} is not known to be off: look at the client's clock first"

    def explained(self, refusal: errors.InvalidRecord) -> errors.InvalidRecord:
        """Return the refusal of a timestamp, with a sentence about the clock that may be off."""
        if refusal.details.get("row") not in _BY_THE_CLOCK:
            return refusal
        details: dict[str, str] = dict(refusal.details)
        if self.trust.skew_ms is not None:
            details["broker_clock_skew_ms"] = str(self.trust.skew_ms)
        return errors.InvalidRecord(f"{refusal.message}; {self._suspected_clock()}", **details)

    # -- the last run ------------------------------------------------------------------------------

    def last_run(self) -> LastRun | None:
        """Return the last run to store; None = the clock is not trusted (broker/clock_trust W1)."""
        self._look()
        return self.trust.last_run(self._boot_id)

    async def note(self, of: Directory, run: LastRun) -> None:
        """Store the last run in one directory, SYNCED."""
        if of.failed is None:
            await of.disk.write(partial(files.note_run, of.disk.storage, run))

    async def newest_append_ms(self) -> int | None:
        """Return the newest append time that a broker wrote into the logs; None = there is none."""
        manager = self._manager
        looks: list[tuple[Any, Callable[[], int | None]]] = [
            (manager.disk_of(key), log.newest_append_ms)
            for key, log in manager.logs().items()
            if log.config.log_append_time
        ]
        found = []
        for disk, look in looks:
            try:
                found.append(await disk.read(look))
            except (errors.PkError, OSError) as error:  # a later read there reports damage
                self._env.warn("append_time_unknown", error=str(error))
        return max((each for each in found if each is not None), default=None)


def duration_text(ms: int) -> str:
    """A duration in one or two units."""
    for unit, size, part, smaller in (
        ("d", 86_400_000, "h", 3_600_000),
        ("h", 3_600_000, "min", 60_000),
        ("min", 60_000, "s", 1_000),
    ):
        if ms >= size:
            rest = ms % size // smaller
            return f"{ms // size} {unit}" + (f" {rest} {part}" if rest else "")
    return f"{ms // 1_000} s" if ms >= 1_000 else f"{ms} ms"
