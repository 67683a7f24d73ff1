"""Produce latency beside cold readers: `python -m bench.cold_client …`.

The readers loop over the part of a topic that is in the tier only.  They share processes of their
own, so that the producer has an interpreter to itself.  Each record of the producer waits for its
acknowledgement; the figure is the p99 of that wait in ms, from the moment when every reader has
received a batch.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.sharedctypes import Synchronized
from typing import Any

from bench.values import VALUE_BYTES

PROCESSES = 4
_BEGIN_S = 120.0
_PACE_S = 0.005
_BUFFER_BYTES = 1 << 20


def command(
    bootstrap: str, cold: str, hot: str, readers: int, ends: Sequence[int], seconds: float
) -> list[str]:
    """Return the command that runs this module.

    ends: for each partition of `cold`, where the local log begins.
    """
    words = [sys.executable, "-m", "bench.cold_client", "--bootstrap", bootstrap, "--cold", cold]
    words += ["--hot", hot, "--readers", str(readers), "--ends", ",".join(map(str, ends))]
    return [*words, "--seconds", str(seconds)]


def _read(
    bootstrap: str, topic: str, ends: Sequence[int], number: int, begun: Any, rows: Any
) -> None:
    """Loop over one partition for ever."""
    from pk import Consumer, TopicPartition

    place = TopicPartition(topic, number % len(ends))
    consumer = Consumer(bootstrap, fetch_buffer_bytes=_BUFFER_BYTES)
    consumer.assign([place])
    first = True
    while True:
        consumer.seek(place, 0)
        while consumer.position(place) < ends[place.partition]:
            count = sum(batch.num_rows for _, batch in consumer.poll_batches(timeout_s=5.0))
            with rows.get_lock():
                rows.value += count
            if count and first:
                first = False
                with begun.get_lock():
                    begun.value += 1


def _readers(given: argparse.Namespace, numbers: Sequence[int], begun: Any, rows: Any) -> None:
    threads = [
        threading.Thread(
            target=_read,
            args=(given.bootstrap, given.cold, given.ends, number, begun, rows),
            daemon=True,
        )
        for number in numbers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> int:
    """Run the readers and the producer; print the marks of the window."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--cold", required=True)
    parser.add_argument("--hot", required=True)
    parser.add_argument("--readers", type=int, required=True)
    parser.add_argument("--ends", type=_numbers, required=True)
    parser.add_argument("--seconds", type=float, default=15.0)
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    begun: Synchronized[int] = context.Value("q", 0)
    rows: Synchronized[int] = context.Value("q", 0)
    shares = [range(at, given.readers, PROCESSES) for at in range(PROCESSES)]
    workers = [
        context.Process(target=_readers, args=(given, share, begun, rows), daemon=True)
        for share in shares
        if share
    ]
    for worker in workers:
        worker.start()
    deadline = time.monotonic() + _BEGIN_S
    while begun.value < given.readers:
        if time.monotonic() > deadline or not all(worker.is_alive() for worker in workers):
            raise TimeoutError(f"{begun.value} of {given.readers} readers have read a batch")
        time.sleep(0.1)
    print("open {}", flush=True)
    rows_before, start = rows.value, time.perf_counter()
    taken = _produce(given.bootstrap, given.hot, given.seconds)
    elapsed = time.perf_counter() - start
    taken.sort()
    figures = {
        "value": taken[len(taken) * 99 // 100],
        "p50_ms": taken[len(taken) // 2],
        "records": len(taken),
        "cold_mb_s": (rows.value - rows_before) * VALUE_BYTES / 1e6 / elapsed,
    }
    print(f"close {json.dumps(figures)}", flush=True)
    for worker in workers:
        worker.terminate()
    return 0


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def _produce(bootstrap: str, topic: str, seconds: float) -> list[float]:
    """Send one record after the other; return how long each waited for its acknowledgement, in
    ms.
    """
    from pk import Producer

    value = b"x" * VALUE_BYTES
    taken: list[float] = []
    with Producer(bootstrap, acks="all", linger_ms=0) as producer:
        producer.send(topic, value, partition=0).result(timeout=60)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            begin = time.perf_counter()
            producer.send(topic, value, partition=0).result(timeout=60)
            taken.append((time.perf_counter() - begin) * 1000)
            time.sleep(_PACE_S)
    return taken


if __name__ == "__main__":
    sys.exit(main())
