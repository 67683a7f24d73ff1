"""A member of a group that copies a topic in transactions, with its offsets (KIP-447).

    python tests/groups/copier.py --bootstrap HOST:PORT,… --name NAME

`--plain`: it prints each record instead, and commits afterwards.  It prints a line for each batch
that is committed, and each change of its assignment.  SIGTERM closes it; it leaves its group.
"""

from __future__ import annotations

import argparse
import signal
import sys
from types import FrameType

from pk import Consumer, Producer, Record, TopicPartition, errors

INPUT, OUTPUT = "groups-in", "groups-out"
EXACT, PLAIN = "exact", "plain"
OPTIONS = {
    "enable_auto_commit": False,
    "auto_offset_reset": "earliest",
    "session_timeout_ms": 6_000,
    "heartbeat_interval_ms": 500,
    "max_poll_records": 200,
    "partition_assignment_strategy": "cooperative-sticky",
}
#: A member that is killed leaves its transaction open for at most this time.
TRANSACTION_TIMEOUT_MS = 6_000

_ended = False


def end(number: int, frame: FrameType | None) -> None:
    """Ask the loop to end."""
    global _ended
    _ended = True


def say(words: str) -> None:
    """Print a line at once."""
    print(words, flush=True)


def consumer_of(bootstrap: str, group: str) -> Consumer:
    """Return a consumer that has joined nothing yet."""
    return Consumer(bootstrap, group_id=group, **OPTIONS)


def subscribe(consumer: Consumer) -> None:
    """Subscribe; print every change of the assignment."""

    def numbers(places: list[TopicPartition]) -> str:
        return ",".join(str(place.partition) for place in sorted(places))

    consumer.subscribe(
        [INPUT],
        on_assigned=lambda places: say(f"assigned {numbers(places)}"),
        on_revoked=lambda places: say(f"revoked {numbers(places)}"),
        on_lost=lambda places: say(f"lost {numbers(places)}"),
    )


def go_back(consumer: Consumer) -> None:
    """Read again from the committed offsets."""
    for place in sorted(consumer.assignment()):
        offset = consumer.committed(place, timeout_s=60)
        if offset is None:
            consumer.seek_to_beginning(place)
        else:
            consumer.seek(place, offset)


def copy(producer: Producer, consumer: Consumer, records: list[Record]) -> None:
    """Copy records in one transaction; after an abort they are read again."""
    at = {TopicPartition(each.topic, each.partition): each.offset + 1 for each in records}
    producer.begin_transaction()
    try:
        for record in records:
            producer.send(OUTPUT, record.value, partition=record.partition)
        producer.send_offsets_to_transaction(at, consumer.group_metadata(), timeout_s=30)
        while True:
            try:
                producer.commit_transaction(30)
                break
            except errors.RequestTimedOut as waiting:
                say(f"waiting: {waiting.message}")
    except (errors.TransactionAborted, errors.DeliveryTimedOut) as cause:
        say(f"aborted: {cause.message}")
        producer.abort_transaction(120)
        go_back(consumer)
        return
    say(f"committed {len(records)}")


def run_exact(bootstrap: str, name: str) -> None:
    """Copy until SIGTERM."""
    with (
        Producer(
            bootstrap,
            transactional_id=name,
            transaction_timeout_ms=TRANSACTION_TIMEOUT_MS,
            linger_ms=1,
        ) as producer,
        consumer_of(bootstrap, EXACT) as consumer,
    ):
        producer.init_transactions(120)
        subscribe(consumer)
        while not _ended:
            records = consumer.poll(timeout_s=0.2)
            if records:
                copy(producer, consumer, records)


def run_plain(bootstrap: str) -> None:
    """Print and commit until SIGTERM."""
    with consumer_of(bootstrap, PLAIN) as consumer:
        subscribe(consumer)
        while not _ended:
            records = consumer.poll(timeout_s=0.2)
            if not records:
                continue
            for record in records:
                assert record.value is not None
                say(f"processed {record.value.decode()}")
            try:
                consumer.commit(timeout_s=30)
            except errors.PkError as refusal:  # the partitions are another member's now
                say(f"not committed: {type(refusal).__name__}: {refusal.message}")
            else:
                say(f"committed {len(records)}")


def main() -> int:
    """Run one member."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--plain", action="store_true")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, end)
    if given.plain:
        run_plain(given.bootstrap)
    else:
        run_exact(given.bootstrap, given.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
