"""CPU of small batches: `python -m bench.bursts [--codec lz4] [--records 10000] [--rounds 3]`.

A client sends bursts of 100 keyed records to a topic of 100 partitions and flushes after each, so a
batch has 1.6 records whatever else the machine does.  (At a steady 20,000 records/s the batches are
of this size on a quiet machine, and larger on a busy one, where figures then look better.)  Printed
are CPU seconds per million records of the client's process and of the server's processes, records
per batch, and the bytes of the log per record.  A busy machine makes CPU seconds longer: compare
two builds by turns.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import processes
from bench.pk_side import PkSide

_PARTITIONS = 100
_BURST = 100
_KEYS = 20_000
_WARM_UP = 20
_NAMES = (b"alpha", b"beta", b"gamma", b"delta", b"omega", b"sigma")


def _value(rng: random.Random) -> bytes:
    """Return a JSON value of about 100 bytes, half of them random."""
    head = b'{"id":%d,"name":"%s","n":%d,"f":%.6f,"t":"' % (
        rng.randrange(10**8), rng.choice(_NAMES), rng.randrange(1000), rng.random(),
    )  # fmt: skip
    return head + bytes(rng.choices(b"abcdefghijklmnop", k=98 - len(head))) + b'"}'


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _produce(bootstrap: str, topic: str, codec: Any, records: int) -> None:
    from pk import Producer

    rng = random.Random(7)
    rows = [(_value(rng), b"key-%07d" % rng.randrange(100_000)) for _ in range(_KEYS)]
    with Producer(bootstrap, acks="all", compression=codec) as producer:

        def burst(number: int) -> None:
            for at in range(number * _BURST, (number + 1) * _BURST):
                value, key = rows[at % _KEYS]
                producer.send(topic, value, key=key)
            producer.flush()

        for number in range(_WARM_UP):
            burst(number)
        before, cpu_s = producer.metrics(), _cpu_s()
        for number in range(records // _BURST):
            burst(number)
        after, cpu_s = producer.metrics(), _cpu_s() - cpu_s
    batches = after["batches_acknowledged_total"] - before["batches_acknowledged_total"]
    print(json.dumps({"client_s": cpu_s, "batches": batches}), flush=True)


def _round(side: PkSide, topic: str, codec: str, records: int) -> None:
    side.create_topic(topic, partitions=_PARTITIONS)
    pids = side.pids()
    command = [sys.executable, "-m", "bench.bursts", "--bootstrap", side.address]
    command += ["--topic", topic, "--codec", codec, "--records", str(records)]
    before = processes.cpu_s(pids)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    server_s = processes.cpu_s(pids) - before
    found = json.loads(done.stdout)
    stored = sum(each.stat().st_size for each in side.segment_files(topic) if each.suffix == ".log")
    sent = records + _WARM_UP * _BURST
    print(
        f"{codec}: client {found['client_s'] / records * 1e6:.1f} s/M, "
        f"server {server_s / sent * 1e6:.1f} s/M, "
        f"{records / found['batches']:.2f} records a batch, {stored / sent:.1f} bytes a record",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--codec", default="none", choices=("none", "lz4", "zstd"))
    parser.add_argument("--records", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bootstrap", default="")
    parser.add_argument("--topic", default="")
    given = parser.parse_args()
    if given.bootstrap:
        _produce(given.bootstrap, given.topic, given.codec, given.records)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        side = PkSide()
        side.start(Path(folder))
        try:
            for number in range(given.rounds):
                _round(side, f"bursts-{number}", given.codec, given.records)
        finally:
            side.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
