"""A consumer that follows numbered batches, as its own process.

    python tests/soak/follow.py --bootstrap HOST:PORT --topic T --partitions N --runs FILE

It reads every partition from offset 0 until SIGTERM, and then on to the ends of that moment.
Records that retention removes first are counted, and it continues behind them.  It prints one JSON
line at the beginning and one at the end; `--runs` gets the runs that it read and the ranges that it
lost, as JSON.
"""

from __future__ import annotations

import argparse
import json
import signal
from pathlib import Path
from typing import Any

from numbered import Run, add_rows, count, numbers_of

from pk import Consumer, TopicPartition, errors
from pk.clock import monotonic_s

POLL_S = 0.5
RECORDS_A_POLL = 50_000
CATCH_UP_S = 120.0

asked_to_stop: list[int] = []


class Follower:
    """One consumer and the records it read."""

    def __init__(self, consumer: Consumer, topic: str, partitions: int) -> None:
        self.consumer = consumer
        self.places = [TopicPartition(topic, number) for number in range(partitions)]
        self.runs: dict[int, list[Run]] = {place.partition: [] for place in self.places}
        self.skipped: dict[int, list[tuple[int, int]]] = {p.partition: [] for p in self.places}
        self.errors: dict[str, int] = {}
        self.longest_s = 0.0  #: without a record
        self._newest_s = monotonic_s()

    def position(self, partition: int) -> int:
        """Return the offset that is read next."""
        runs, skipped = self.runs[partition], self.skipped[partition]
        read = runs[-1].offset + runs[-1].count if runs else 0
        return max(read, skipped[-1][1] if skipped else 0)

    def poll(self) -> None:
        try:
            batches = self.consumer.poll_batches(timeout_s=POLL_S)
        except errors.OffsetOutOfRange:
            self._skip()
            return
        except errors.RetriableError as trouble:
            name = type(trouble).__name__
            self.errors[name] = self.errors.get(name, 0) + 1
            return
        for place, rows in batches:
            numbers = numbers_of(rows.column("value"))
            add_rows(self.runs[place.partition], rows.column("offset").to_numpy(), numbers)
        if batches:
            now = monotonic_s()
            self.longest_s = max(self.longest_s, now - self._newest_s)
            self._newest_s = now

    def _skip(self) -> None:
        """Skip the records that retention removed before they were read."""
        for place, begin in self.consumer.beginning_offsets(self.places).items():
            at = self.position(place.partition)
            if at < begin:
                self.skipped[place.partition].append((at, begin))
                self.consumer.seek(place, begin)

    def finish(self) -> None:
        """Read on to the present ends."""
        ends = self.consumer.end_offsets(self.places)
        deadline = monotonic_s() + CATCH_UP_S
        while any(self.position(place.partition) < end for place, end in ends.items()):
            if monotonic_s() > deadline:
                at = {place.partition: self.position(place.partition) for place in self.places}
                raise errors.RequestTimedOut(f"the consumer stands at {at} of {ends}")
            self.poll()

    def found(self) -> dict[str, Any]:
        lost = sum(end - begin for each in self.skipped.values() for begin, end in each)
        return {
            "records": count(self.runs),
            "lost_to_retention": lost,
            "errors": self.errors,
            "longest_without_record_ms": round(1000 * self.longest_s),
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--partitions", type=int, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: asked_to_stop.append(number))
    options = {"auto_offset_reset": "none", "max_poll_records": RECORDS_A_POLL}
    with Consumer(given.bootstrap, **options) as consumer:
        follower = Follower(consumer, given.topic, given.partitions)
        consumer.assign(follower.places)
        for place in follower.places:
            consumer.seek(place, 0)
        print(json.dumps({"ready": "consumer"}), flush=True)
        while not asked_to_stop:
            follower.poll()
        follower.finish()
    kept = {"runs": follower.runs, "skipped": follower.skipped}
    given.runs.write_text(json.dumps(kept))
    print(json.dumps(follower.found()), flush=True)


if __name__ == "__main__":
    main()
