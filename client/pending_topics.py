"""What was sent to a topic that the metadata do not name (any more): kept until they do.

A topic may be deleted and created again under the same name while a producer is open; between the
two, and until the news arrives, its name means nothing.  What is sent then waits, in order, for
`wait_ms` from its own beginning.

Invariants
  W1  of a topic with anything pending, whatever is handed over later is pending behind it.
  W2  nothing is pending for longer than `wait_ms`.
"""

from __future__ import annotations

from collections import deque

from pk.client.accumulator import Chunk, Columns, RecordAccumulator

Handed = tuple[RecordAccumulator, Chunk | Columns]


class PendingTopics:
    """By topic, oldest first."""

    def __init__(self, wait_ms: int) -> None:
        self.wait_ms = wait_ms
        self._by_topic: dict[str, deque[Handed]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_topic)

    def __contains__(self, topic: str) -> bool:
        return topic in self._by_topic

    def topics(self) -> list[str]:
        return list(self._by_topic)

    def add(self, accumulator: RecordAccumulator, taken: Chunk | Columns) -> None:
        self._by_topic.setdefault(accumulator.topic, deque()).append((accumulator, taken))

    def take(self, topic: str) -> list[Handed]:
        """All of a topic's, which has nothing pending from then on."""
        return list(self._by_topic.pop(topic, ()))

    def expired(self, topic: str, now_ms: int) -> list[Handed]:
        """What of a topic's has waited for long enough."""
        found, waiting = [], self._by_topic[topic]
        while waiting and waiting[0][1].opened_ms + self.wait_ms <= now_ms:
            found.append(waiting.popleft())
        if not waiting:
            del self._by_topic[topic]
        return found

    def next_ms(self) -> int:
        """When the next one expires; something is pending."""
        return min(each[0][1].opened_ms for each in self._by_topic.values()) + self.wait_ms
