"""How many calls of a real S3 server a table costs: counts of its access log, never times."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tier_bench import TOPIC, TOPIC_ID, Bench, LiveLog, bench
from versitygw import S3Server, binary_or_skip, free_port

pytestmark = [pytest.mark.s3, pytest.mark.integration]

PARTITIONS = 4
#: Settings with which many looks are made in a short time.
QUICK = {"refresh_interval_ms": 100, "refresh_max_ms": 200}
#: Settings with which no look is made during a test unless it is asked for.
NEVER = {"refresh_interval_ms": 600_000, "refresh_max_ms": 600_000}

#: Readers look each time, and the owner's own looks soon become rare.
SLOWING = {"refresh_interval_ms": 1, "refresh_max_ms": 600_000}


class Calls(NamedTuple):
    """The calls that the server has logged: (operation, object below the table)."""

    log: Path

    def all(self) -> list[tuple[str, str]]:
        lines = [line.split() for line in self.log.read_text().splitlines()]
        made = [(each[7], each[8]) for each in lines if len(each) > 11]
        return [(what.removeprefix("s3_"), path.partition(TOPIC_ID)[2]) for what, path in made]

    def since(self, count: int) -> list[tuple[str, str]]:
        return self.all()[count:]


@pytest.fixture
def logged(tmp_path: Path) -> Iterator[tuple[S3Server, Calls]]:
    server, log = S3Server(binary_or_skip(), tmp_path, free_port()), tmp_path / "access.log"
    server.start("--access-log", str(log))
    yield server, Calls(log)
    server.stop()


def run(
    server: S3Server,
    directory: Path,
    test: Callable[[Bench, list[LiveLog]], Awaitable[None]],
    **more: int,
) -> None:
    async def whole() -> None:
        given = {**server.server_settings("t"), "tier_timeout_ms": 60_000}
        async with bench(given, directory, **more) as it:
            logs = [LiveLog(directory / str(i), i + 1) for i in range(PARTITIONS)]
            await copy(it, logs)
            await copy(it, logs)
            await test(it, logs)

    asyncio.run(whole())


async def copy(it: Bench, logs: list[LiveLog]) -> None:
    """Append to each partition, and wait until its local data may be dropped (T6)."""
    for partition, log in enumerate(logs):
        log.append(50)
        it.tell(log, partition)

    def dropped() -> bool:
        ends = {key.partition: each.droppable_end for key, each in it.worker.outbox.items()}
        return all(ends.get(p, -1) >= log.end for p, log in enumerate(logs))

    await it.until(dropped)


def version(it: Bench) -> int:
    snapshot = it.worker.topics[TOPIC_ID].owner.snapshot
    assert snapshot is not None
    return snapshot.version


def test_a_commit_costs_two_calls_a_file_and_three(
    logged: tuple[S3Server, Calls], tmp_path: Path
) -> None:
    """Rule T3; the checkpoints of the versions are among the calls."""
    server, calls = logged

    async def test(it: Bench, logs: list[LiveLog]) -> None:
        before, first, files = len(calls.all()), version(it), it.worker.counts.uploaded_files
        while version(it) < first + 10:
            await copy(it, logs)
        made, commits = calls.since(before), version(it) - first
        files = it.worker.counts.uploaded_files - files
        assert len(made) <= 2 * files + 3 * commits, Counter(made)
        whats = Counter(what for what, _ in made)
        assert "ListObjectsV2" not in whats
        read = [path for what, path in made if what == "GetObject" and path.endswith(".json")]
        assert read == [], "an owner reads no commit of its own"

    run(server, tmp_path / "log", test, **NEVER)


def test_a_first_look_costs_as_much_for_one_partition_as_for_all(
    logged: tuple[S3Server, Calls], tmp_path: Path
) -> None:
    """The counters of all partitions come from one pass over the log (tiering/app_transactions)."""
    server, calls = logged

    async def test(it: Bench, logs: list[LiveLog]) -> None:
        made = []
        for partitions in ((0,), range(PARTITIONS)):
            before = len(calls.all())
            found = await it.delta.table(TOPIC, TOPIC_ID).load(partitions)
            assert found is not None
            assert len(found.counters) == len(partitions)
            made.append(len(calls.since(before)))
        one, whole = made
        assert one == whole <= 4 * version(it) + 12, made

    run(server, tmp_path / "log", test, **NEVER)


def test_a_table_at_rest_is_asked_for_two_names(
    logged: tuple[S3Server, Calls], tmp_path: Path
) -> None:
    server, calls = logged

    async def test(it: Bench, logs: list[LiveLog]) -> None:
        before, known = len(calls.all()), version(it)
        await it.until(lambda: len(calls.since(before)) >= 20)
        made = Counter(calls.since(before))
        known_name = f"/_delta_log/{known:020d}.json"
        next_name = f"/_delta_log/{known + 1:020d}.json"
        assert set(made) == {("HeadObject", known_name), ("HeadObject", next_name)}

    run(server, tmp_path / "log", test, **QUICK)


def test_a_reader_of_a_table_at_rest_sees_what_another_engine_did(
    logged: tuple[S3Server, Calls], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule T17: at the slowest pace the reader's own look finds the version."""
    server, _ = logged
    monkeypatch.setattr("pk.tiering.worker.LOOK_WAIT_MS", 60_000)

    async def test(it: Bench, logs: list[LiveLog]) -> None:
        topic = it.worker.topics[TOPIC_ID]
        assert await it.worker.fetch(TOPIC_ID, TOPIC, 0, 0, logs[0].end, 1)
        await asyncio.sleep(1.1)  # the owner's next look of its own is another second away
        it.table().delete("partition = 0 AND offset < 50")
        assert await it.worker.fetch(TOPIC_ID, TOPIC, 0, 50, logs[0].end, 1)
        assert topic.missing[0].rows == 50

    run(server, tmp_path / "log", test, **SLOWING)
