"""Log lines for failures and recoveries of tiering.

Pure.  The broker knows the last problem of each partition that it leads (view.py).  An unavailable
store fails every topic at once, and every retry fails again.  So one line reports one kind of
error, with the number of topics and the first names.

Invariants
  H1  A kind of error has at most one line a minute (`REPEAT_MS`), for any number of topics.
  H2  A topic that a line reported as failing is reported as recovered once its problem has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pk.errors import PkError

REPEAT_MS = 60_000
#: The most topics that a log line names.
NAMED_MAX = 10


class TierHealth:
    """The topics and errors that log lines have reported so far."""

    def __init__(self) -> None:
        self._said: dict[str, None] = {}  #: topics reported as failing
        self._said_ms: dict[str, int] = {}  #: kind of error → time of its last line

    def observe(
        self, failing: Mapping[str, PkError], now_ms: int
    ) -> list[tuple[str, dict[str, Any]]]:
        """Return the lines (event, facts) that are due at `now_ms` (monotonic).

        failing: every topic with a problem → the problem of one of its partitions.
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
            self._said_ms.clear()  # the next failure is reported at once
        return lines


def _named(topics: list[str]) -> dict[str, Any]:
    return {"topics": len(topics), "named": ",".join(sorted(topics)[:NAMED_MAX])}
