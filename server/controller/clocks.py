"""The wall clocks of all nodes as the active controller heard them: soft state of one term (L10).

Brokers tell theirs in heartbeats, the other controllers in fetches of the metadata log.  What is
kept is how far a clock is ahead of this controller's.  A request that was late makes a clock look
behind, never ahead: of the last SAMPLES_MAX readings of a node the one furthest ahead counts.

A node is one machine: where a broker and a controller share a node id, what the broker says of its
clock counts.  The controller of this node reads its own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pk.types import NodeId
from pk.wire import pk_pb2 as wire

SAMPLES_MAX = 3


@dataclass(slots=True)
class _Heard:
    ahead_ms: deque[int] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    trusted: bool = False
    doubt: str = ""
    running_since_ms: int = 0
    heard_ms: int = 0  #: monotonic
    as_broker: bool = False


class Clocks:
    """See the module.  Every time is given; `fresh_ms`: a clock heard longer ago is not counted."""

    def __init__(self, node_id: NodeId, fresh_ms: int) -> None:
        self._node_id = node_id
        self._fresh_ms = fresh_ms
        self._heard: dict[NodeId, _Heard] = {}

    def heard(
        self, node: NodeId, reading: wire.ClockReading, wall_ms: int, now_ms: int, *, broker: bool
    ) -> None:
        """The reading of a node came at `wall_ms`; `now_ms` is monotonic."""
        if not reading.wall_ms:
            return
        known = self._heard.get(node)
        if known is None or now_ms - known.heard_ms > self._fresh_ms:
            known = self._heard[node] = _Heard()
        if known.as_broker and not broker:
            return
        known.ahead_ms.append(reading.wall_ms - wall_ms)
        known.trusted, known.doubt = reading.trusted, reading.doubt
        known.running_since_ms = reading.running_since_ms
        known.heard_ms, known.as_broker = now_ms, broker

    def forget(self, node: NodeId) -> None:
        """Its process ended."""
        self._heard.pop(node, None)

    def samples(self, now_ms: int, running_since_ms: int) -> list[wire.ClockSample]:
        """Every clock that was heard lately, and this controller's own."""
        found = [wire.ClockSample(node_id=self._node_id, running_since_ms=running_since_ms)]
        for node, each in sorted(self._heard.items()):
            if now_ms - each.heard_ms > self._fresh_ms:
                continue
            if node == self._node_id:
                found[0].trusted = each.trusted
                continue
            found.append(
                wire.ClockSample(
                    node_id=node,
                    ahead_ms=max(each.ahead_ms),
                    trusted=each.trusted,
                    running_since_ms=each.running_since_ms,
                )
            )
        return found

    def describe(self, brokers: list[wire.BrokerDescription], now_ms: int) -> None:
        """Fill in what is known of the clocks of `brokers`; the skew is of the median."""
        samples = {each.node_id: each.ahead_ms for each in self.samples(now_ms, 0)}
        lines = sorted(samples.values())
        middle = len(lines) // 2
        median_ms = (lines[middle] + lines[~middle]) // 2
        for broker in brokers:
            known = self._heard.get(broker.broker_id)
            if known is None or now_ms - known.heard_ms > self._fresh_ms:
                continue
            broker.clock_skew_ms = samples[broker.broker_id] - median_ms
            broker.clock_trusted, broker.clock_doubt = known.trusted, known.doubt
