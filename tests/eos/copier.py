"""Copies a topic to another one, exactly once: a read-process-write loop in transactions.

    python tests/eos/copier.py --bootstrap HOST:PORT,… --partitions N --records N

Each transaction has up to BATCH records of the output topic and, in the topic PROGRESS, the next
input offset of each partition that it read.  A copier that starts reads its progress only after
`init_transactions`, which ends the transaction of its predecessor.  It prints a line for each
commit, and ends with code 0 once it has copied everything.
"""

from __future__ import annotations

import argparse
import sys

from pk import Consumer, Producer, Record, TopicPartition, errors
from pk.clock import block_s

INPUT, OUTPUT, PROGRESS = "eos-in", "eos-out", "eos-progress"
BATCH = 750
#: Pause between two transactions: kills of brokers and of copiers meet each other.
PAUSE_S = 0.2
TRANSACTION_TIMEOUT_MS = 10_000


def progress(bootstrap: str, partitions: int) -> dict[int, int]:
    """Return the next input offset of each partition, as the committed transactions say."""
    found = dict.fromkeys(range(partitions), 0)
    place = TopicPartition(PROGRESS, 0)
    with Consumer(bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.assign([place])
        end = consumer.end_offsets([place], timeout_s=60)[place]
        while consumer.position(place) < end:
            for record in consumer.poll(timeout_s=1.0):
                assert record.key is not None
                assert record.value is not None
                found[int(record.key)] = int(record.value)
    return found


class Copier:
    """One instance of the loop."""

    def __init__(self, bootstrap: str, partitions: int, records: int) -> None:
        self._bootstrap = bootstrap
        self._partitions = partitions
        self._left = partitions * records
        self._producer = Producer(
            bootstrap,
            transactional_id="eos-copier",
            transaction_timeout_ms=TRANSACTION_TIMEOUT_MS,
            linger_ms=1,
        )
        self._producer.init_transactions(120)
        self._consumer = Consumer(bootstrap, auto_offset_reset="earliest", max_poll_records=BATCH)
        self._next: dict[int, int] = {}

    def run(self) -> None:
        """Copy until nothing is left."""
        self._seek()
        while sum(self._next.values()) < self._left:
            records = self._consumer.poll(timeout_s=0.5)
            if records:
                self._copy(records)
        self._consumer.close()
        self._producer.close()

    def _seek(self) -> None:
        """Go on where the last committed transaction ended."""
        self._next = progress(self._bootstrap, self._partitions)
        places = [TopicPartition(INPUT, number) for number in self._next]
        self._consumer.assign(places)
        for place in places:
            self._consumer.seek(place, self._next[place.partition])

    def _copy(self, records: list[Record]) -> None:
        """Copy records in one transaction; after an abort, read them again."""
        producer, moved = self._producer, dict(self._next)
        producer.begin_transaction()
        try:
            for record in records:
                producer.send(OUTPUT, record.value, partition=record.partition)
                moved[record.partition] = record.offset + 1
            for number, offset in moved.items():
                if offset != self._next[number]:
                    producer.send(PROGRESS, b"%d" % offset, key=b"%d" % number, partition=0)
            self._commit()
        except (errors.TransactionAborted, errors.DeliveryTimedOut) as cause:
            print(f"aborted: {cause}", flush=True)
            producer.abort_transaction(120)
            self._seek()
            return
        self._next = moved
        block_s(PAUSE_S)
        print(f"committed {sum(moved.values())}", flush=True)

    def _commit(self) -> None:
        """Commit; a commit without an outcome is asked for again until there is one."""
        while True:
            try:
                self._producer.commit_transaction(30)
                return
            except errors.RequestTimedOut as waiting:
                print(f"waiting: {waiting}", flush=True)


def main() -> int:
    """Run one copier."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--partitions", type=int, required=True)
    parser.add_argument("--records", type=int, required=True, help="of each partition")
    given = parser.parse_args()
    Copier(given.bootstrap, given.partitions, given.records).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
