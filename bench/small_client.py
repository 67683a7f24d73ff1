"""Many clients with one record in flight each: `python -m bench.small_client pk|kafka …`.

Every client is a producer of its own with linger 0, in a thread of its own, that sends 100 bytes to
one partition and waits for the acknowledgement.  The figure is the number of acknowledgements from
the moment when all have warmed up to the end.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from bench.values import VALUE_BYTES

_VALUE = b"x" * VALUE_BYTES
_WARM_UP_S = 3.0
_CALL_S = 30.0


def command(kind: str, bootstrap: str, topic: str, clients: int, seconds: float) -> list[str]:
    """Return the command that runs this module."""
    words = [sys.executable, "-m", "bench.small_client", kind, "--bootstrap", bootstrap]
    words += ["--topic", topic, "--clients", str(clients), "--seconds", str(seconds)]
    return words


def _pk(bootstrap: str, topic: str) -> tuple[Callable[[], None], Callable[[], None]]:
    from pk import Producer

    producer = Producer(bootstrap, acks="all", linger_ms=0)

    def send() -> None:
        producer.send(topic, _VALUE, partition=0).result(timeout=_CALL_S)

    return send, producer.close


def _kafka(bootstrap: str, topic: str) -> tuple[Callable[[], None], Callable[[], None]]:
    from confluent_kafka import Producer

    settings: dict[str, Any] = {"bootstrap.servers": bootstrap, "acks": "all", "linger.ms": 0}
    producer = Producer({**settings, "enable.idempotence": True, "log_level": 0})

    def send() -> None:
        producer.produce(topic, _VALUE, partition=0)
        if producer.flush(_CALL_S):
            raise TimeoutError(f"no acknowledgement in {_CALL_S} s")

    return send, lambda: None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("pk", "kafka"))
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=8.0)
    given = parser.parse_args()
    make = _pk if given.kind == "pk" else _kafka
    counts = [0] * given.clients
    troubles: list[Exception] = []
    ended = threading.Event()
    ready = threading.Barrier(given.clients + 1)

    def client(number: int) -> None:
        send, close = make(given.bootstrap, given.topic)
        try:
            send()
            ready.wait(_CALL_S * 2)
            while not ended.is_set():
                send()
                counts[number] += 1
        except Exception as trouble:
            troubles.append(trouble)
            ready.abort()
        finally:
            close()

    threads = [threading.Thread(target=client, args=(n,)) for n in range(given.clients)]
    for thread in threads:
        thread.start()
    ready.wait(_CALL_S * 2)
    time.sleep(_WARM_UP_S)
    print("open {}", flush=True)
    before, start = sum(counts), time.perf_counter()
    time.sleep(given.seconds)
    done, elapsed = sum(counts) - before, time.perf_counter() - start
    print("close", json.dumps({"value": done / elapsed, "records": done}), flush=True)
    ended.set()
    for thread in threads:
        thread.join()
    if troubles:
        raise troubles[0]
    return 0


if __name__ == "__main__":
    sys.exit(main())
