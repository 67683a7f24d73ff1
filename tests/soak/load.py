"""The soak's load: columnar batches of 100-byte values at a steady rate, as its own process.

    python tests/soak/load.py --bootstrap HOST:PORT --topic T --seconds S [--rate RECORDS_PER_S]

Without a rate it sends as fast as acknowledgements allow.  Prints one JSON line at the end, also
when SIGTERM ends it early.
"""

from __future__ import annotations

import argparse
import json
import signal
from collections import deque
from typing import Any

import numpy as np
import pyarrow as pa

from pk import Producer
from pk.clock import block_s, monotonic_s

VALUE_BYTES = 100
BATCH_RECORDS = 10_000
OUTSTANDING_MAX = 64
KINDS = 16


def batches() -> list[pa.RecordBatch]:
    """A few different batches of random bytes, so that nothing compresses to nothing."""
    rng = np.random.default_rng(1)
    made = []
    for _ in range(KINDS):
        data = rng.integers(0, 256, BATCH_RECORDS * VALUE_BYTES, np.uint8).tobytes()
        offsets = np.arange(BATCH_RECORDS + 1, dtype=np.int32) * VALUE_BYTES
        buffers = [None, pa.py_buffer(offsets.tobytes()), pa.py_buffer(data)]
        values = pa.Array.from_buffers(pa.binary(), BATCH_RECORDS, buffers)
        made.append(pa.RecordBatch.from_arrays([values], names=["value"]))
    return made


asked_to_stop: list[int] = []


def run(producer: Producer, topic: str, seconds: float, rate: float | None) -> dict[str, Any]:
    ready = batches()
    outstanding: deque[Any] = deque()
    begin = monotonic_s()
    sent = worst_ms = 0
    while (elapsed := monotonic_s() - begin) < seconds and not asked_to_stop:
        if rate is not None and sent > elapsed * rate:
            block_s(min(0.05, sent / rate - elapsed))
            continue
        called = monotonic_s()
        outstanding.append(producer.send_batch(topic, ready[(sent // BATCH_RECORDS) % KINDS]))
        worst_ms = max(worst_ms, int((monotonic_s() - called) * 1000))
        sent += BATCH_RECORDS
        while len(outstanding) > OUTSTANDING_MAX or (outstanding and outstanding[0].done()):
            outstanding.popleft().result(timeout=120)
    producer.flush(timeout_s=120)
    for future in outstanding:
        future.result(timeout=120)
    took = monotonic_s() - begin
    return {"records": sent, "records_per_s": sent / took, "worst_send_ms": worst_ms}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--rate", type=float, default=None)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: asked_to_stop.append(number))
    with Producer(given.bootstrap) as producer:
        print(json.dumps(run(producer, given.topic, given.seconds, given.rate)), flush=True)


if __name__ == "__main__":
    main()
