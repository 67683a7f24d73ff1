"""CPU and bytes of small batches: `python -m bench.bursts [--side pk|kafka] [--codec lz4] …`.

A client sends bursts of 100 keyed records to a topic of 100 partitions and flushes after each, so a
batch has 1.6 records whatever else the machine does (`--burst 600`: 6 records).  With `--paced` it
sends 20 records each millisecond and never flushes: the batches are then of this size on a quiet
machine, and larger on a busy one, where figures look better.  Printed are CPU seconds per million
records of the client's process and of the server's processes, records per batch, and the bytes of
the log per record; the last two are read from the log.  The side `kafka` is a Kafka broker with
confluent-kafka as its client, with the same keys, values and linger.  A busy machine makes CPU
seconds longer: compare two builds, or two sides, by turns.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench import processes
from bench.pk_side import PkSide

_PARTITIONS = 100
_KEYS = 20_000
_WARM_UP = 2_000
_LINGER_MS = 5
#: A paced client sends so many records in each millisecond.
_PACE = 20
_NAMES = (b"alpha", b"beta", b"gamma", b"delta", b"omega", b"sigma")
#: The size of a batch in the log, by side: where it is, and what it does not count.
_SIZES = {"pk": (struct.Struct("<8xi"), 0), "kafka": (struct.Struct(">8xi"), 12)}


def _value(rng: random.Random) -> bytes:
    """Return a JSON value of about 100 bytes, half of them random."""
    head = b'{"id":%d,"name":"%s","n":%d,"f":%.6f,"t":"' % (
        rng.randrange(10**8), rng.choice(_NAMES), rng.randrange(1000), rng.random(),
    )  # fmt: skip
    return head + bytes(rng.choices(b"abcdefghijklmnop", k=98 - len(head))) + b'"}'


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


Send = Callable[[bytes, bytes], Any]


def _pk(bootstrap: str, topic: str, codec: Any) -> tuple[Send, Callable[[], Any]]:
    from pk import Producer

    producer = Producer(bootstrap, acks="all", compression=codec, linger_ms=_LINGER_MS)
    send = producer.send
    return lambda value, key: send(topic, value, key), producer.flush


def _kafka(bootstrap: str, topic: str, codec: str) -> tuple[Send, Callable[[], Any]]:
    from confluent_kafka import Producer

    settings: dict[str, Any] = {
        "bootstrap.servers": bootstrap, "acks": "all", "enable.idempotence": True,
        "linger.ms": _LINGER_MS, "compression.type": codec, "partitioner": "murmur2_random",
        "log_level": 0,
    }  # fmt: skip
    producer = Producer(settings)
    send = producer.produce
    return lambda value, key: send(topic, value, key), lambda: producer.flush(60)


def _produce(given: argparse.Namespace) -> None:
    rng = random.Random(7)
    rows = [(_value(rng), b"key-%07d" % rng.randrange(100_000)) for _ in range(_KEYS)]
    make = _pk if given.side == "pk" else _kafka
    send, flush = make(given.bootstrap, given.topic, given.codec)

    def load(first: int, end: int) -> None:
        step = _PACE if given.paced else given.burst
        due_s = time.perf_counter()
        for begin in range(first, end, step):
            for at in range(begin, begin + step):
                send(*rows[at % _KEYS])
            if not given.paced:
                flush()
                continue
            due_s += 0.001
            if (left_s := due_s - time.perf_counter()) > 0:
                time.sleep(left_s)
        flush()

    load(0, _WARM_UP)
    cpu_s = _cpu_s()
    load(_WARM_UP, _WARM_UP + given.records)
    print(json.dumps({"client_s": _cpu_s() - cpu_s}), flush=True)


def _batches(side: str, logs: Iterable[Path]) -> int:
    """Return how many batches these logs have."""
    found = 0
    size_of, uncounted = _SIZES[side]
    for log in logs:
        raw, at = log.read_bytes(), 0
        while at < len(raw):
            at += size_of.unpack_from(raw, at)[0] + uncounted
            found += 1
    return found


def _round(side: Any, topic: str, given: argparse.Namespace) -> None:
    side.create_topic(topic, partitions=_PARTITIONS)
    pids = side.pids()
    command = [sys.executable, "-m", "bench.bursts", "--bootstrap", side.address]
    command += ["--topic", topic, "--codec", given.codec, "--records", str(given.records)]
    command += ["--side", side.name, "--burst", str(given.burst)]
    command += ["--paced"] if given.paced else []
    before = processes.cpu_s(pids)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    server_s = processes.cpu_s(pids) - before
    found = json.loads(done.stdout)
    logs = [each for each in side.segment_files(topic) if each.suffix == ".log"]
    stored, sent = sum(each.stat().st_size for each in logs), given.records + _WARM_UP
    print(
        f"{side.name} {given.codec}: client {found['client_s'] / given.records * 1e6:.1f} s/M, "
        f"server {server_s / sent * 1e6:.1f} s/M, "
        f"{sent / _batches(side.name, logs):.2f} records a batch, "
        f"{stored / sent:.1f} bytes a record",
        flush=True,
    )


def _side(name: str) -> Any:
    if name == "pk":
        return PkSide()
    from bench.kafka.side import KafkaSide

    return KafkaSide()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", default="pk", choices=("pk", "kafka"))
    parser.add_argument("--codec", default="none", choices=("none", "lz4", "zstd"))
    parser.add_argument("--burst", type=int, default=100, help="records between two flushes")
    parser.add_argument("--paced", action="store_true", help="20,000 records/s, without flushes")
    parser.add_argument("--records", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bootstrap", default="")
    parser.add_argument("--topic", default="")
    given = parser.parse_args()
    if given.bootstrap:
        _produce(given)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        side = _side(given.side)
        side.start(Path(folder))
        try:
            for number in range(given.rounds):
                _round(side, f"bursts-{number}", given)
        finally:
            side.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
