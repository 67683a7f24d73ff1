"""The soak's load: columnar batches of 100-byte values at a steady rate, as its own process.

    python tests/soak/load.py --bootstrap HOST:PORT --topic T --seconds S [--rate RECORDS_PER_S]
        [--first NUMBER] [--acked FILE]

Without a rate it sends as fast as acknowledgements allow.  Prints one JSON line when it begins and
one at the end, also when SIGTERM ends it early.  Values are numbered from `--first` on; `--acked`
takes one line `partition offset number count` for each batch that was acknowledged.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections import deque
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).parent))

from numbered import Maker, acknowledged

from pk import Producer
from pk.clock import block_s, monotonic_s

BATCH_RECORDS = 10_000
OUTSTANDING_MAX = 64
RESULT_S = 120

asked_to_stop: list[int] = []


class Waiting:
    """Batches in flight, oldest first, and the outcomes so far."""

    def __init__(self, acked: IO[str] | None) -> None:
        self._acked = acked
        self._waiting: deque[tuple[Any, int]] = deque()
        self._newest_s = monotonic_s()
        #: the longest time without an acknowledgement, as far as the samples show
        self.longest_s = 0.0

    def add(self, future: Any, first: int) -> None:
        self._waiting.append((future, first))

    def look(self, limit: int) -> None:
        """Take finished batches; wait until at most `limit` are left."""
        while len(self._waiting) > limit or (self._waiting and self._waiting[0][0].done()):
            future, first = self._waiting.popleft()
            stored = future.result(timeout=RESULT_S)
            now = monotonic_s()
            self.longest_s = max(self.longest_s, now - self._newest_s)
            self._newest_s = now
            if self._acked is not None:
                for partition, run in acknowledged(stored, first):
                    print(partition, *run, file=self._acked)


def run(
    producer: Producer, topic: str, seconds: float, rate: float | None, maker: Maker, out: Any
) -> dict[str, Any]:
    waiting = Waiting(out)
    begin = monotonic_s()
    sent = worst_ms = 0
    while (elapsed := monotonic_s() - begin) < seconds and not asked_to_stop:
        if rate is not None and sent > elapsed * rate:
            block_s(min(0.05, sent / rate - elapsed))
            continue
        first, batch = maker.next, maker.batch()
        called = monotonic_s()
        waiting.add(producer.send_batch(topic, batch), first)
        worst_ms = max(worst_ms, int((monotonic_s() - called) * 1000))
        sent += BATCH_RECORDS
        waiting.look(OUTSTANDING_MAX)
    producer.flush(timeout_s=RESULT_S)
    waiting.look(0)
    took = monotonic_s() - begin
    return {
        "records": sent,
        "records_per_s": sent / took,
        "worst_send_ms": worst_ms,
        "longest_without_ack_ms": round(1000 * waiting.longest_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--rate", type=float, default=None)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--acked", type=argparse.FileType("w"), default=None)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: asked_to_stop.append(number))
    maker = Maker(BATCH_RECORDS, given.first)
    with Producer(given.bootstrap) as producer:
        print(json.dumps({"ready": "load"}), flush=True)
        found = run(producer, given.topic, given.seconds, given.rate, maker, given.acked)
    if given.acked is not None:
        given.acked.close()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
