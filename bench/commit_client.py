"""Commits of offsets: `python -m bench.commit_client sync|async pk|kafka …`.

All consumers are members of one group, and each owns one partition of the topic.  So a commit takes
the whole path: the coordinator checks member, generation and owner.  All commits go to one
partition of the group's internal topic, and how many partitions that has on each side plays no
part.  (With a group for each consumer, 16 partitions of pk would be compared with one of Kafka's.)

  sync   each consumer commits the next offset when the last commit was answered, in a thread of
         its own; commits a second of all, in a window that opens once all have committed
  async  one consumer commits without waiting, in bursts of `BURST`, each of which ends when the
         coordinator returns its last offset; commits a second.  pk's client joins commits that
         wait, Kafka's sends each

The consumers are spread over `--processes` processes, on both sides: in a single Python process
they would measure how threads share its interpreter.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import sys
import threading
import time
from typing import Any

from bench.group_members import Member, open_member

#: Commits of a burst of `async`.  Kafka answers the requests of a connection one by one, each after
#: its linger of 5 ms, and heartbeats wait behind them: more would outlast the session.
BURST = 500
_WARM_UP_S = 2.0
_JOIN_S = 90.0
_LAST_S = 60.0
_WAITS, _COMMITS, _ENDS = 0, 1, 2


def command(
    how: str, kind: str, bootstrap: str, topic: str, protocol: str, clients: int, seconds: float
) -> list[str]:
    """Return the command that runs this module."""
    words = [sys.executable, "-m", "bench.commit_client", how, kind, "--bootstrap", bootstrap]
    words += ["--topic", topic, "--protocol", protocol, "--clients", str(clients)]
    return [*words, "--seconds", str(seconds)]


class Shared:
    """What the processes tell each other; every number has one writer."""

    def __init__(self, clients: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.phase: Any = context.Value(ctypes.c_int, _WAITS, lock=False)
        self.owned: Any = context.Array(ctypes.c_int, clients, lock=False)
        self.commits: Any = context.Array(ctypes.c_longlong, clients, lock=False)


def joined(owned: list[int]) -> bool:
    """Return whether each member has exactly one partition."""
    return all(count == 1 for count in owned)


def _until_joined(member: Member, at: int, shared: Shared) -> None:
    """Poll until every member has its partition; a member that does not poll delays the others."""
    member.subscribe(lambda what, partitions: None)
    deadline = time.monotonic() + _JOIN_S
    while shared.phase.value == _WAITS:
        member.poll(0.1)
        shared.owned[at] = len(member.owned())
        if time.monotonic() > deadline:
            raise TimeoutError(f"member {at} has {shared.owned[at]} partitions")


def _client(given: argparse.Namespace, at: int, shared: Shared) -> None:
    member = open_member(given.kind, given.bootstrap, given.topic, given.topic, given.protocol)
    try:
        _until_joined(member, at, shared)
        (partition,) = member.owned()
        offset = 0
        while shared.phase.value == _COMMITS:
            offset += 1
            member.commit(partition, offset)
            shared.commits[at] = offset
        if member.committed(partition) != offset:
            raise RuntimeError(f"{member.committed(partition)} is committed instead of {offset}")
    finally:
        member.close()


def _worker(given: argparse.Namespace, clients: list[int], shared: Shared) -> None:
    troubles: list[BaseException] = []

    def run(at: int) -> None:
        try:
            _client(given, at, shared)
        except BaseException as trouble:
            troubles.append(trouble)

    threads = [threading.Thread(target=run, args=(at,)) for at in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if troubles:
        raise troubles[0]


def sync(given: argparse.Namespace) -> None:
    """Print the synchronous commits a second of all members."""
    shared = Shared(given.clients)
    context = multiprocessing.get_context("spawn")
    shares = [list(range(at, given.clients, given.processes)) for at in range(given.processes)]
    workers = [context.Process(target=_worker, args=(given, one, shared)) for one in shares]
    for worker in workers:
        worker.start()
    try:
        _until(lambda: joined(list(shared.owned)), workers, "own one partition each")
        shared.phase.value = _COMMITS
        _until(lambda: all(shared.commits), workers, "have committed")
        time.sleep(_WARM_UP_S)
        print("open {}", flush=True)
        before, start = list(shared.commits), time.perf_counter()
        time.sleep(given.seconds)
        counts = [now - then for now, then in zip(list(shared.commits), before, strict=True)]
        elapsed = time.perf_counter() - start
        figures = {"value": sum(counts) / elapsed, "records": sum(counts), "least": min(counts)}
        print("close", json.dumps(figures), flush=True)
    finally:
        shared.phase.value = _ENDS
        for worker in workers:
            worker.join()
    if any(worker.exitcode for worker in workers):
        raise RuntimeError(f"workers ended with {[worker.exitcode for worker in workers]}")


def _until(holds: Any, workers: list[Any], what: str) -> None:
    deadline = time.monotonic() + _JOIN_S
    while not holds():
        if time.monotonic() > deadline or any(worker.exitcode for worker in workers):
            raise TimeoutError(f"not all members {what}")
        time.sleep(0.05)


def asynchronous(given: argparse.Namespace) -> None:
    """Print the asynchronous commits a second of one member."""
    member = open_member(given.kind, given.bootstrap, given.topic, given.topic, given.protocol)
    try:
        member.subscribe(lambda what, partitions: None)
        deadline = time.monotonic() + _JOIN_S
        while not member.owned():
            member.poll(0.1)
            if time.monotonic() > deadline:
                raise TimeoutError("the group assigns nothing")
        partition, offset = member.owned()[0], 1
        member.commit(partition, offset)
        print("open {}", flush=True)
        start = time.perf_counter()
        while time.perf_counter() - start < given.seconds:
            offset = _burst(member, partition, offset)
        elapsed = time.perf_counter() - start
        figures = {"value": (offset - 1) / elapsed, "records": offset - 1}
        print("close", json.dumps(figures), flush=True)
    finally:
        member.close()


def _burst(member: Member, partition: int, offset: int) -> int:
    """Commit the offsets after this one, and wait until the last of them is stored."""
    last = offset + BURST
    for number in range(offset + 1, last + 1):
        member.commit(partition, number, asynchronous=True)
    deadline = time.monotonic() + _LAST_S
    while (found := member.committed(partition)) != last:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{found} is committed instead of {last}")
        time.sleep(0.002)
    return last


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("how", choices=("sync", "async"))
    parser.add_argument("kind", choices=("pk", "kafka"))
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--protocol", default="classic", choices=("classic", "consumer"))
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=8.0)
    given = parser.parse_args()
    (sync if given.how == "sync" else asynchronous)(given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
