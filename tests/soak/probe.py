"""How long one record takes until it is acknowledged, while others fill the nodes; a process.

    python tests/soak/probe.py --bootstrap HOST:PORT --topic T --partitions N [--every-ms MS]

One record every so often, to one partition after another, whether or not the former ones were
acknowledged; until SIGTERM.  Prints one JSON line when it begins and one at the end.
"""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from pk import Producer
from pk.clock import block_s, monotonic_s, wall_ms

FLUSH_S = 120.0
SLOWEST_KEPT = 20
VALUE = b"x" * 100

asked_to_stop: list[int] = []


class Probe:
    """Sends single records, and notes the answer to each.  Callbacks come on the client's
    thread.
    """

    def __init__(self, partitions: int) -> None:
        self.took_ms: list[float] = []
        self.slowest: list[tuple[float, int]] = []  #: ms, wall clock of the sending
        self.errors: dict[str, int] = {}
        now = monotonic_s()
        self._newest_s = dict.fromkeys(range(partitions), now)
        self.longest_s = dict.fromkeys(range(partitions), 0.0)
        self.by_minute: list[float] = []  #: the slowest of those sent in each minute, ms
        self._begin_s = now

    def send(self, producer: Producer, topic: str, partition: int) -> None:
        sent_s, sent_at_ms = monotonic_s(), wall_ms()

        def delivered(_where: Any, error: Any) -> None:
            now = monotonic_s()
            if error is not None:
                name = type(error).__name__
                self.errors[name] = self.errors.get(name, 0) + 1
                return
            took_ms = 1000 * (now - sent_s)
            self.took_ms.append(took_ms)
            self._note(took_ms, sent_at_ms, int(sent_s - self._begin_s) // 60)
            self.acknowledged(partition, now)

        producer.send(topic, VALUE, partition=partition, on_delivery=delivered)

    def acknowledged(self, partition: int, now: float) -> None:
        """Note an acknowledgement; the time since the last one counts for the longest silence."""
        silent = now - self._newest_s[partition]
        self.longest_s[partition] = max(self.longest_s[partition], silent)
        self._newest_s[partition] = now

    def _note(self, took_ms: float, at_ms: int, minute: int) -> None:
        self.by_minute += [0.0] * (minute + 1 - len(self.by_minute))
        self.by_minute[minute] = max(self.by_minute[minute], took_ms)
        if len(self.slowest) < SLOWEST_KEPT or took_ms > self.slowest[-1][0]:
            self.slowest = sorted([*self.slowest, (took_ms, at_ms)], reverse=True)[:SLOWEST_KEPT]

    def found(self) -> dict[str, Any]:
        return {
            "records": len(self.took_ms),
            "ack_ms": shares(sorted(self.took_ms)),
            "longest_without_ack_ms": {p: round(1000 * s) for p, s in self.longest_s.items()},
            "slowest": [{"ms": round(ms, 1), "sent_at_ms": at} for ms, at in self.slowest],
            "slowest_by_minute_ms": [round(ms) for ms in self.by_minute],
            "errors": self.errors,
        }


def shares(ordered: Sequence[float]) -> Mapping[str, float]:
    """Return p50, p99, p99.9 and the largest of sorted values; nothing for no values."""
    if not ordered:
        return {}
    last = len(ordered) - 1
    found = {f"p{q:g}": ordered[round(last * q / 100)] for q in (50, 99, 99.9)}
    return {name: round(value, 1) for name, value in {**found, "max": ordered[-1]}.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--partitions", type=int, required=True)
    parser.add_argument("--every-ms", type=float, default=20.0)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: asked_to_stop.append(number))
    with Producer(given.bootstrap, linger_ms=0) as producer:
        print(json.dumps({"ready": "probe"}), flush=True)
        probe = Probe(given.partitions)
        begin, sent = monotonic_s(), 0
        while not asked_to_stop:
            wait_s = begin + sent * given.every_ms / 1000 - monotonic_s()
            if wait_s > 0:
                block_s(wait_s)
            probe.send(producer, given.topic, sent % given.partitions)
            sent += 1
        producer.flush(timeout_s=FLUSH_S)
    print(json.dumps(probe.found()), flush=True)


if __name__ == "__main__":
    main()
