"""The wall clocks of all nodes, as the active controller measures them (rule L10).

This is soft state of one term.  Brokers send their clock in heartbeats, the other controllers in
fetches of the metadata log.  The module keeps each reading relative to this controller's
CLOCK_BOOTTIME, not to its wall clock: if an administrator sets this wall clock, the other clocks do
not move with it.  Otherwise the old readings would agree with the wrong clock, and a broker on this
node would trust it.  A delayed request makes a clock look behind, never ahead.  So the reading that
is furthest ahead among the last SAMPLES_MAX readings of a node counts, with the trust that the node
had in its clock then.  Otherwise a node whose clock was set right would vouch for the wrong one.

A node is one machine.  If a broker and a controller share a node id, the clock that the broker sent
counts.  The controller of this node reads its own clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from pk.clock import MedianTime
from pk.types import NodeId
from pk.wire import pk_pb2 as wire

SAMPLES_MAX = 3


class _Reading(NamedTuple):
    line_ms: int  #: wall clock of the node − CLOCK_BOOTTIME of this controller
    trusted: bool
    doubt: str
    running_since_ms: int


@dataclass(slots=True)
class _NodeClock:
    readings: deque[_Reading] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    read_ms: int = 0  #: CLOCK_BOOTTIME
    as_broker: bool = False

    @property
    def counts(self) -> _Reading:
        """The reading that was delayed least."""
        return max(self.readings, key=lambda each: each.line_ms)


class Clocks:
    """The measured clocks of all nodes.  See the module.

    fresh_ms: a reading that is older than this, in ms, does not count.
    """

    def __init__(self, node_id: NodeId, fresh_ms: int) -> None:
        self._node_id = node_id
        self._fresh_ms = fresh_ms
        self._readings: dict[NodeId, _NodeClock] = {}

    def observe(
        self, node: NodeId, reading: wire.ClockReading, boottime_ms: int, *, broker: bool
    ) -> None:
        """Note a reading of a node, received at `boottime_ms` of this controller."""
        if not reading.wall_ms:
            return
        known = self._readings.get(node)
        if known is None or boottime_ms - known.read_ms > self._fresh_ms:
            known = self._readings[node] = _NodeClock()
        if known.as_broker and not broker:
            return
        known.readings.append(
            _Reading(
                reading.wall_ms - boottime_ms,
                reading.trusted,
                reading.doubt,
                reading.running_since_ms,
            )
        )
        known.read_ms, known.as_broker = boottime_ms, broker

    def forget(self, node: NodeId) -> None:
        """Drop the readings of a node whose process ended."""
        self._readings.pop(node, None)

    def samples(
        self, wall_ms: int, boottime_ms: int, running_since_ms: int
    ) -> list[wire.ClockSample]:
        """Return every fresh reading, and this controller's own clock, which is at `wall_ms`."""
        found = [wire.ClockSample(node_id=self._node_id, running_since_ms=running_since_ms)]
        for node, each in sorted(self._readings.items()):
            if boottime_ms - each.read_ms > self._fresh_ms:
                continue
            last, counts = each.readings[-1], each.counts
            if node == self._node_id:  # unless this clock was set since
                moved_ms = abs(wall_ms - boottime_ms - last.line_ms)
                found[0].trusted = last.trusted and moved_ms <= self._fresh_ms
                continue
            found.append(
                wire.ClockSample(
                    node_id=node,
                    ahead_ms=counts.line_ms - (wall_ms - boottime_ms),
                    trusted=counts.trusted,
                    running_since_ms=counts.running_since_ms,
                )
            )
        return found

    def trusted_time(self, wall_ms: int, boottime_ms: int, brokers: int) -> MedianTime | None:
        """Return the median of the fresh clocks that brokers trust; None = half of the brokers do
        not trust theirs, or were not heard recently.

        wall_ms: this controller's clock, which counts only if a broker of this node trusts it
        brokers: how many there are
        """
        samples = self.samples(wall_ms, boottime_ms, 0)
        ahead = [each.ahead_ms for each in samples if each.trusted]
        if 2 * len(ahead) <= brokers:
            return None
        return MedianTime.of(ahead, brokers).plus(wall_ms)

    def describe(
        self, brokers: list[wire.BrokerDescription], wall_ms: int, boottime_ms: int
    ) -> None:
        """Fill in the clock fields of `brokers`; the skew is relative to the median."""
        samples = {each.node_id: each.ahead_ms for each in self.samples(wall_ms, boottime_ms, 0)}
        median_ms = MedianTime.of(samples.values()).middle_ms
        for broker in brokers:
            known = self._readings.get(broker.broker_id)
            if known is None or boottime_ms - known.read_ms > self._fresh_ms:
                continue
            broker.clock_skew_ms = samples[broker.broker_id] - median_ms
            last = known.readings[-1]
            broker.clock_trusted, broker.clock_doubt = last.trusted, last.doubt
