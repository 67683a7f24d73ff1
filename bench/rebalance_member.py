"""One member of `rebalance`: `python -m bench.rebalance_member pk|kafka …`, with the same loop on
both sides.

It starts without joining, and joins when its standard input has a line.  SIGTERM makes it leave.
It prints a JSON line for each of these, with the time of the clock that all processes share:

  assigned, revoked   partitions that came or went
  polled              partitions of which the first record since their assignment came
  pause               seconds between two polls with records, if they are more than `PAUSE_S`
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from types import FrameType
from typing import Any

from bench.group_members import open_member

#: Twice the time between two records of a member: shorter pauses are none.
PAUSE_S = 0.05
_POLL_S = 0.1

_ended = False


def command(kind: str, bootstrap: str, topic: str, protocol: str) -> list[str]:
    """Return the command that runs this module; the group has the name of the topic."""
    words = [sys.executable, "-m", "bench.rebalance_member", kind, "--bootstrap", bootstrap]
    return [*words, "--topic", topic, "--protocol", protocol]


def _end(number: int, frame: FrameType | None) -> None:
    global _ended
    _ended = True


def _say(what: str, **more: Any) -> None:
    print(json.dumps({"what": what, "at": time.monotonic(), **more}), flush=True)


class Reporter:
    """Tells what a member owns and has polled."""

    def __init__(self) -> None:
        self._fresh: set[int] = set()  #: owned, and not polled yet
        self._last = 0.0

    def changed(self, what: str, partitions: list[int]) -> None:
        if what == "assigned":
            self._fresh.update(partitions)
        else:
            self._fresh.difference_update(partitions)
        _say(what, partitions=partitions)

    def polled(self, partitions: set[int]) -> None:
        """Note a poll that returned records of these partitions."""
        now = time.monotonic()
        if self._last and now - self._last > PAUSE_S:
            _say("pause", seconds=now - self._last)
        self._last = now
        first = self._fresh & partitions
        if first:
            self._fresh -= first
            _say("polled", partitions=sorted(first))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("pk", "kafka"))
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--protocol", default="classic", choices=("classic", "consumer"))
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    member = open_member(given.kind, given.bootstrap, given.topic, given.topic, given.protocol)
    reporter = Reporter()
    _say("ready")
    sys.stdin.readline()
    member.subscribe(reporter.changed)
    while not _ended:
        partitions = member.poll(_POLL_S)
        if partitions:
            reporter.polled(partitions)
    member.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
