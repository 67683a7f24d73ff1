"""When the broker's log says that tiering fails, and that it works again.

Pure.  The broker knows the last problem of each partition it leads (view.py).  A store that is
away fails every topic at once, and every retry fails again.  So lines are gathered: one line for
each kind of error, with the number of topics and the first names.

Invariants
  H1  a kind of error has at most one line a minute (`REPEAT_MS`), however many topics it hits
  H2  a topic that a line called failing is called recovered by a later line, once its problem ends
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pk.errors import PkError

REPEAT_MS = 60_000
#: Topics that one line names.
NAMED_MAX = 10


class TierHealth:
    """What was said of the tier so far."""

    def __init__(self) -> None:
        self._said: dict[str, None] = {}  #: topics that a line called failing
        self._said_ms: dict[str, int] = {}  #: kind of error → when it last had a line

    def observe(
        self, failing: Mapping[str, PkError], now_ms: int
    ) -> list[tuple[str, dict[str, Any]]]:
        """The lines (event, facts) that are due at `now_ms` (monotonic).

        failing: topic → the problem of one of its partitions; every topic that has one.
        """
        lines = []
        kinds: dict[str, list[str]] = {}
        for topic, problem in failing.items():
            kinds.setdefault(type(problem).__name__, []).append(topic)
        for kind, topics in kinds.items():
            last_ms = self._said_ms.get(kind)
            if last_ms is not None and now_ms - last_ms < REPEAT_MS:
                continue  # H1
            self._said_ms[kind] = now_ms
            self._said.update(dict.fromkeys(topics))
            why = failing[topics[0]].message
            lines.append(("tier_failing", {"error": kind, **_named(topics), "message": why}))
        over = [topic for topic in self._said if topic not in failing]
        if over:
            for topic in over:
                del self._said[topic]
            lines.append(("tier_recovered", _named(over)))
        if not failing:
            self._said_ms.clear()  # the next failure is news
        return lines


def _named(topics: list[str]) -> dict[str, Any]:
    return {"topics": len(topics), "named": ",".join(sorted(topics)[:NAMED_MAX])}
