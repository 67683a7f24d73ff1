"""Copier → table → cold read on real stores: live segment files in, a Delta table out (T1–T12)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from tier_bench import TOPIC, TOPIC_ID, Bench, LiveLog, bench

from pk import errors
from pk.tiering import layout, rowhash
from pk.tiering import owner as owning
from pk.tiering.row_groups import canonical
from pk.types import NONE
from pk.wire import pk_pb2 as wire

pytestmark = pytest.mark.integration


Run = Callable[..., None]


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.s3)])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    if request.param == "s3":
        gateway = request.getfixturevalue("s3_server")
        given = gateway.server_settings(f"worker/{tmp_path.name}")
    else:
        given = {"tier_url": (tmp_path / "tier").as_uri()}

    def go(test: Callable[[Bench], Awaitable[None]], **more: object) -> None:
        async def whole() -> None:
            async with bench(given, tmp_path / "log", **more) as made:
                await test(made)

        asyncio.run(whole())

    return go


def same(rows: pa.Table, log: LiveLog, start: int = 0) -> None:
    wanted = [row for row in log.rows if row[0] >= start]
    found = zip(
        rows.column("offset").to_pylist(),
        rows.column("key").to_pylist(),
        rows.column("value").to_pylist(),
        strict=True,
    )
    assert list(found) == wanted


def test_a_live_log_becomes_a_table_and_is_read_back(run: Run) -> None:
    async def test(it: Bench) -> None:
        log = LiveLog(it.directory)
        for _ in range(5):
            for _ in range(4):
                log.append(700)
            log.roll()
            it.tell(log)
            await it.tiered(log.end)
        log.append(10)
        it.tell(log)
        await it.tiered(log.end)
        same(it.rows(), log)
        snapshot = it.worker.topics[TOPIC_ID].owner.snapshot
        assert snapshot is not None
        counters = snapshot.partition(0)
        assert (counters.start, counters.end, counters.rows) == (0, log.end, log.end)
        rows = canonical(it.rows())
        assert counters.sum == rowhash.row_sum(rows)
        for max_bytes in (1, 5_000, 100_000, 10_000_000):
            end = log.end if max_bytes > 1 else 30
            found = await it.read_all(0, end, max_bytes)
            assert found == log.rows[:end]
        middle = await it.read_all(4_321, log.end, 50_000)
        assert middle == log.rows[4_321:]
        await it.until(lambda: it.progress.droppable_end == log.end)
        assert it.progress.tiered_end == log.end

    run(test)


def test_aborted_rows_and_markers_are_left_out_and_reads_pass_over_them(run: Run) -> None:
    """T12, L12: next_offset covers ranges without rows, including a whole file's range."""

    async def test(it: Bench) -> None:
        log = LiveLog(it.directory)
        log.append(100)
        first = log.end
        log.append(50, producer_id=9, keep=False)
        log.append(1, producer_id=9, control=True, keep=False)
        aborted = [wire.Aborted(producer_id=9, first_offset=first, last_offset=log.end - 1)]
        log.append(60, producer_id=9)
        it.tell(log, aborted=aborted)
        await it.tiered(log.end)
        before = log.end
        log.append(30, producer_id=9, keep=False)
        aborted.append(wire.Aborted(producer_id=9, first_offset=before, last_offset=log.end - 1))
        it.tell(log, aborted=aborted)
        await it.tiered(log.end)
        same(it.rows(), log)
        assert await it.read_all(0, log.end, 1_000) == log.rows
        tail = await it.worker.fetch(TOPIC_ID, TOPIC, 0, before, log.end, 1_000)
        assert (tail.next_offset, tail.batches) == (log.end, [])

    run(test)


def test_log_start_moves_and_rows_leave_the_table(run: Run) -> None:
    """T9: whole files below log_start are removed; if log_start passes the table's end, both of the
    table's ends follow.
    """

    async def test(it: Bench) -> None:
        log = LiveLog(it.directory)
        ends = []
        for _ in range(3):
            log.append(1_000)
            it.tell(log)
            await it.tiered(log.end)
            ends.append(log.end)
        it.tell(log, log_start=ends[1] - 10)
        topic = it.worker.topics[TOPIC_ID]

        def start() -> int:
            assert topic.owner.snapshot is not None
            return topic.owner.snapshot.partition(0).start

        await it.until(lambda: start() == ends[1] - 10)
        same(it.rows(), log, ends[0])
        assert await it.read_all(ends[1] - 10, log.end, 10_000) == log.rows[ends[1] - 10 :]
        log.append(500)
        low = log.end - 100
        it.tell(log, log_start=low, local_log_start=low, tiered_end=low)
        await it.tiered(log.end)
        await it.until(lambda: len(topic.owner.snapshot.files_of(0)) == 1)  # type: ignore
        same(it.rows(), log, low)
        counters = topic.owner.snapshot.partition(0)  # type: ignore[union-attr]
        assert (counters.start, counters.removed) == (low, 3_000)

    run(test)


def test_removed_files_are_vacuumed_at_once_if_asked(run: Run) -> None:
    async def test(it: Bench) -> None:
        log = LiveLog(it.directory)
        for _ in range(3):
            log.append(500)
            it.tell(log)
            await it.tiered(log.end)
        it.tell(log, log_start=1_000)
        await it.until(lambda: it.worker.counts.vacuumed_files >= 2)
        log.append(500)
        it.tell(log, log_start=1_000)
        await it.tiered(log.end)
        objects = await it.worker.store.list(it.worker.topics[TOPIC_ID].home)
        data = [found for found in objects if found.path.endswith(".parquet")]
        assert len([found for found in data if "_delta_log" not in found.path]) == 2
        same(it.rows(), log, 1_000)

    run(test, vacuum_interval_ms=50, vacuum_retention_ms=0)


@pytest.mark.parametrize("why", ["doubted", "out of contact"])
def test_nothing_is_vacuumed_while_the_brokers_clock_is_not_trusted(run: Run, why: str) -> None:
    """Rule L10 in the worker: the broker doubts its clock, or its last statement is outdated.
    Vacuums that become due are put off; the next one after the doubt deletes.
    """

    async def test(it: Bench) -> None:
        log = LiveLog(it.directory)
        put_off = 0

        def steps(step: Any) -> Any:
            def counted(event: Any, now_ms: int) -> Any:
                nonlocal put_off
                put_off += isinstance(event, owning.Vacuumed) and event.put_off
                return step(event, now_ms)

            return counted

        def doubt() -> None:
            if why == "out of contact":
                it.worker.out_of_contact()

        async def data() -> int:
            objects = await it.worker.store.list(it.worker.topics[TOPIC_ID].home)
            names = [found.path for found in objects if found.path.endswith(".parquet")]
            return len([name for name in names if "_delta_log" not in name])

        assert it.worker._clock_doubted, "before the broker was heard"
        it.clock_doubted = why != "out of contact"
        for _ in range(3):
            log.append(500)
            it.tell(log)
            doubt()
            await it.tiered(log.end)
        owner = it.worker.topics[TOPIC_ID].owner
        owner.step = steps(owner.step)  # type: ignore[method-assign]
        it.tell(log, log_start=1_000)
        doubt()
        await it.until(lambda: len(owner.snapshot.files) == 1)  # type: ignore[union-attr]
        before = put_off
        await it.until(lambda: put_off >= before + 3)
        assert it.worker.counts.vacuumed_files == 0
        assert await data() == 3
        it.clock_doubted = False
        it.tell(log, log_start=1_000)
        await it.until(lambda: it.worker.counts.vacuumed_files >= 2)
        assert await data() == 1
        same(it.rows(), log, 1_000)

    run(test, vacuum_interval_ms=50, vacuum_retention_ms=0)


def test_a_lost_file_is_noticed_and_uploaded_again(run: Run) -> None:
    """T6: a HEAD finds the file missing, no segment is dropped, and the copier uploads the file
    from the local log again.
    """

    async def test(it: Bench) -> None:
        it.configs["local_drop_delay_ms"] = "600"
        log = LiveLog(it.directory)
        log.append(2_000)
        it.tell(log)
        await it.tiered(log.end)
        topic = it.worker.topics[TOPIC_ID]
        lost = topic.owner.snapshot.files_of(0)[0]  # type: ignore[union-attr]
        await it.worker.store.delete(f"{topic.home}/{lost.path}")
        await it.until(lambda: it.worker.counts.repaired_files == 1)
        await it.until(lambda: it.progress.droppable_end == log.end)
        same(it.rows(), log)
        assert await it.read_all(0, log.end, 100_000) == log.rows

    run(test)


def test_a_hand_over_of_an_upload_that_a_sweep_removed_is_refused(run: Run) -> None:
    """Its job slept for hours.  The rows of the files that it replaces would be lost."""

    async def test(it: Bench) -> None:
        log = LiveLog(it.directory)
        log.append(500)
        it.tell(log)
        await it.tiered(log.end)
        topic = it.worker.topics[TOPIC_ID]
        (file,) = topic.owner.snapshot.files_of(0)  # type: ignore[union-attr]
        name = layout.parse_data_path(file.path)
        assert name is not None
        path = layout.job_path(name)
        change = wire.CommitToTableRequest(topic=TOPIC, topic_id=TOPIC_ID, lease_token=7)
        change.counters.add(partition=0, claim=0)
        change.removes.add(path=file.path, rows=file.rows, row_sum=name.row_sum)
        change.adds.add(
            path=path, start=name.start, end=name.end, size=file.size, rows=file.rows,
            row_sum=name.row_sum, min_offset=file.min_offset, max_offset=file.max_offset,
            min_timestamp_ms=file.min_timestamp_ms, max_timestamp_ms=file.max_timestamp_ms,
        )  # fmt: skip
        with pytest.raises(errors.UnknownTierRange, match="is not in the store"):
            await it.worker.commit_to_table(change)
        raw = await it.worker.store.get_range(f"{topic.home}/{file.path}", 0, file.size)
        await it.worker.store.put(f"{topic.home}/{path}", raw[:-1])
        with pytest.raises(errors.UnknownTierRange, match="is not in the store"):
            await it.worker.commit_to_table(change)
        await it.worker.store.put(f"{topic.home}/{path}", raw)
        await it.worker.commit_to_table(change)
        assert list(topic.owner.snapshot.files) == [path]  # type: ignore[union-attr]
        same(it.rows(), log)

    run(test)


def test_a_file_lost_after_its_confirmation_is_uploaded_again(run: Run) -> None:
    """T6: the broker sends another HEAD before it drops; the copier uploads missing files again."""

    async def test(it: Bench) -> None:
        log = LiveLog(it.directory)
        log.append(2_000)
        it.tell(log)
        await it.tiered(log.end)
        await it.until(lambda: it.progress.droppable_end == log.end)
        topic = it.worker.topics[TOPIC_ID]
        lost = topic.owner.snapshot.files_of(0)[0]  # type: ignore[union-attr]
        await it.worker.store.delete(f"{topic.home}/{lost.path}")
        missing = await it.worker.confirm(TOPIC_ID, TOPIC, 0, 0, log.end)
        assert [file.path for file in missing] == [lost.path]
        assert it.progress.problem.code == errors.DamagedTierFile.code
        assert lost.path in it.progress.problem.message
        await it.until(lambda: it.worker.counts.repaired_files == 1)
        await it.until(lambda: not it.progress.HasField("problem"))
        assert await it.worker.confirm(TOPIC_ID, TOPIC, 0, 0, log.end) == []
        same(it.rows(), log)
        assert await it.read_all(0, log.end, 100_000) == log.rows

    run(test)


def test_damage_in_the_local_log_is_reported_with_its_range_and_never_copied(run: Run) -> None:
    """L9: the records before it are in the table; the damaged batch and later records are not."""

    async def test(it: Bench) -> None:
        log = LiveLog(it.directory)
        log.append(1_000)
        it.tell(log)
        await it.tiered(log.end)
        (segment,) = it.directory.glob("*.log")
        flipped = segment.stat().st_size + 5_000
        log.append(500)
        raw = bytearray(segment.read_bytes())
        raw[flipped] ^= 0xFF
        segment.write_bytes(raw)
        log.append(500)
        it.tell(log)
        await it.until(lambda: it.progress.HasField("problem"))
        problem = it.progress.problem
        assert problem.code == errors.CorruptLog.code
        assert "offsets [1000, 1500) are damaged: checksum" in problem.message
        assert dict(problem.details) == {"offset": "1000", "next_offset": "1500"}
        assert it.progress.tiered_end == 1_000
        assert it.rows().num_rows == 1_000

    run(test)


def test_a_restarted_worker_goes_on_from_the_table(run: Run, tmp_path: Path) -> None:
    """T5: the table is the source of truth; no record is uploaded into it twice."""
    log = LiveLog(tmp_path / "log")

    async def life(it: Bench) -> None:
        log.append(1_500)
        it.tell(log)
        await it.tiered(log.end)
        log.append(1_500)
        it.tell(log)  # and die somewhere on the way

    for _ in range(3):
        run(life)

    async def end(it: Bench) -> None:
        it.tell(log)
        await it.tiered(log.end)
        same(it.rows(), log)

    run(end)


def test_outside_optimize_and_scattered_rows_are_read_right(run: Run) -> None:
    """T10: files of outside maintenance may overlap in any way; rows are returned merged by
    offset.
    """

    async def test(it: Bench) -> None:
        log = LiveLog(it.directory)
        for _ in range(4):
            log.append(1_000)
            it.tell(log)
            await it.tiered(log.end)
        before = await it.read_all(0, log.end, 40_000)
        outside = it.table()
        outside.optimize.z_order(["value"])
        topic = it.worker.topics[TOPIC_ID]
        version = topic.owner.snapshot.version  # type: ignore[union-attr]
        log.append(500)
        it.tell(log)
        await it.tiered(log.end)
        assert topic.owner.snapshot.version > version + 1  # type: ignore[union-attr]
        outside.update_incremental()
        outside.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
        found = await it.read_all(0, log.end, 40_000)
        assert found[: len(before)] == before
        assert found == log.rows
        time, _ = await it.worker.offset_for_time(TOPIC_ID, TOPIC, 0, 1_700_000_000_000 + 1_234, 0)
        assert time is not None
        assert time.offset == 1_234

    run(test)


def test_offsets_for_times(run: Run) -> None:
    async def test(it: Bench) -> None:
        log = LiveLog(it.directory)
        for _ in range(3):
            log.append(1_000)
            it.tell(log)
            await it.tiered(log.end)
        base = 1_700_000_000_000
        for stamp, start, wanted in (
            (base + 1_500, 0, 1_500),
            (base - 5, 0, 0),
            (base + 10, 2_500, 2_500),
            (base + 2_999, 0, 2_999),
        ):
            found, _ = await it.worker.offset_for_time(TOPIC_ID, TOPIC, 0, stamp, start)
            assert found is not None
            assert (found.offset, found.leader_epoch) == (wanted, 0)
        assert await it.worker.offset_for_time(TOPIC_ID, TOPIC, 0, base + 3_000, 0) == (None, NONE)

    run(test)


def test_a_claim_fences_older_leaders(run: Run) -> None:
    """T4: after epoch 3 has claimed the table, epoch 0 may not append."""

    async def test(it: Bench) -> None:
        log = LiveLog(it.directory)
        log.append(200)
        it.tell(log)
        await it.tiered(log.end)
        reply = await it.worker.claim(TOPIC_ID, TOPIC, 0, 3, commit=True)
        assert (reply.exists, reply.end, reply.end_epoch, reply.claim) == (True, 200, 0, 3)
        log.append(200)
        it.tell(log)
        await it.until(lambda: it.progress.HasField("problem"))
        assert it.progress.problem.code == errors.FencedLeaderEpoch.code
        it.tell(log, leader_epoch=3)
        await it.tiered(log.end)
        same(it.rows(), log)
        with pytest.raises(errors.FencedLeaderEpoch):
            await it.worker.claim(TOPIC_ID, TOPIC, 0, 2, commit=True)

    run(test)


def test_purge_removes_every_object(run: Run) -> None:
    async def test(it: Bench) -> None:
        log = LiveLog(it.directory)
        log.append(200)
        it.tell(log)
        await it.tiered(log.end)
        home = it.worker.topics[TOPIC_ID].home
        snapshot = layout.snapshot_path(TOPIC, TOPIC_ID)
        await it.worker.store.put(f"{snapshot}/partition=0/any.parquet", b"x")
        uri, objects = await it.worker.purge(TOPIC_ID, TOPIC)
        assert uri.endswith(f"{TOPIC}/{TOPIC_ID}")
        assert objects >= 4
        assert await it.worker.store.list(home) == []
        assert await it.worker.store.list(snapshot) == []

    run(test)


def test_an_upload_under_way_does_not_bring_a_purged_table_back(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A topic may be purged before this process learns of its deletion."""

    async def test(it: Bench) -> None:
        log = LiveLog(it.directory)
        log.append(200)
        it.tell(log)
        await it.tiered(log.end)
        topic = it.worker.topics[TOPIC_ID]
        asked, purged, done = asyncio.Event(), asyncio.Event(), asyncio.Event()
        copy = it.worker._copy

        async def late(*given: Any) -> Any:
            asked.set()
            await purged.wait()
            try:
                return await copy(*given)
            finally:
                asyncio.get_running_loop().call_later(0.2, done.set)

        monkeypatch.setattr(it.worker, "_copy", late)
        log.append(200)
        it.tell(log)
        await asked.wait()
        await it.worker.purge(TOPIC_ID, TOPIC)
        purged.set()
        await done.wait()
        left = await it.worker.store.list(topic.home)
        assert not [each.path for each in left if "_delta_log" in each.path]
        assert TOPIC_ID not in it.worker.topics

    run(test)


def test_the_table_opens_in_duckdb_and_pandas_without_pk(tmp_path: Path) -> None:
    async def test() -> None:
        given: dict[str, object] = {"tier_url": (tmp_path / "tier").as_uri()}
        async with bench(given, tmp_path / "log") as it:
            log = LiveLog(it.directory)
            log.append(3_000)
            it.tell(log)
            await it.tiered(log.end)
            files = it.table().file_uris()
            seen = duckdb.sql(
                'SELECT count(*), min("offset"), max("offset"), count(DISTINCT "offset"), '
                "any_value(partition) FROM read_parquet(?, hive_partitioning=true)",
                params=[[uri.removeprefix("file://") for uri in files]],
            ).fetchall()
            assert seen == [(3_000, 0, 2_999, 3_000, 0)]
            frame = it.table().to_pandas()
            assert len(frame) == 3_000
            assert sorted(frame["offset"]) == list(range(3_000))

    asyncio.run(test())
