"""What a load compares with pk's own checksums: commits, files, counters, properties (rules T2,
T8).  The contract suite flips bits; the tests here are about commits of other engines, and the
walk.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from pk import errors, settings
from pk.clock import SystemClock
from pk.tiering import layout, log_check
from pk.tiering.data_files import DataFile, NewFile
from pk.tiering.delta import DeltaTables
from pk.tiering.fsspec_store import open_store
from pk.tiering.layout import PartitionCounters
from pk.tiering.store_settings import StoreSettings
from pk.tiering.table import Commit, Snapshot

#: The txn `check` of the counters 1 to 7, as builds before `removed_sum` wrote it.
EARLIER_HASH = 2_821_451_839_813_834_519
TOPIC, TOPIC_ID = "flights", "2f1c6a2e-55a0-4c87-9a6d-0d6f4f7f8f10"


def data(start: int, end: int) -> DataFile:
    path = layout.data_path(layout.DataName(0, start, end, 0, "a", 0, 0))
    return DataFile(path, 0, start, end - 1, 5, 9, end - start, 10)


def append(read: Snapshot, partition: int, end: int) -> Commit:
    was = read.partition(partition)
    counters = was._replace(end=end, epoch=0, rows=was.rows + end - was.end)
    return Commit(read, (NewFile(data(was.end, end), 1),), (), {partition: counters})


@asynccontextmanager
async def opened(root: Path) -> AsyncIterator[DeltaTables]:
    """Return tables in a directory."""
    clock = SystemClock()
    chosen = StoreSettings.of(settings.SERVER.resolve({"tier_url": root.as_uri()}))
    store = open_store(chosen, clock)
    real = DeltaTables(chosen, store, clock)
    try:
        yield real
    finally:
        await real.close()
        await store.close()


def test_an_altered_creation_is_refused(tmp_path: Path) -> None:
    """Version 0 has pk's checksum, too: of the protocol and of all metadata."""

    async def created() -> None:
        async with opened(tmp_path) as tables:
            await tables.table(TOPIC, TOPIC_ID).create()

    asyncio.run(created())
    (path,) = tmp_path.glob("**/_delta_log/*.json")
    raw = path.read_bytes()
    assert log_check.read_commit("uri", 0, raw).ours
    begin = raw.index(b"\n") + 1
    for at in (each for each in range(begin, len(raw)) if raw[each : each + 1] != b"\n"):
        altered = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
        with pytest.raises(errors.TierTableChanged, match=r"version 0 .* is damaged"):
            log_check.read_commit("uri", 0, altered)


def test_the_counters_of_an_earlier_build_keep_their_hash() -> None:
    """T2: a table whose later counters are 0 has the hash that earlier builds wrote and read."""
    assert log_check.counters_check(PartitionCounters(1, 2, 3, 4, 5, 6, 7)) == EARLIER_HASH
    later = PartitionCounters(1, 2, 3, 4, 5, 6, 7)._replace(removed_sum=1)
    assert log_check.counters_check(later) != EARLIER_HASH


def test_every_counter_is_seen_by_another_handle(tmp_path: Path) -> None:
    """T2: also those that a table has only once rows were removed from it."""

    async def test() -> None:
        async with opened(tmp_path) as tables:
            table = tables.table(TOPIC, TOPIC_ID)
            counters = PartitionCounters(10, 100, 3, 2, 90, 2**62, 20, 40, 2**63 - 1, 31)
            assert await table.load([0]) is None
            await table.commit(Commit(await table.create(), counters={0: counters}))
            seen = await tables.table(TOPIC, TOPIC_ID).load([0])
            assert seen is not None
            assert seen.partition(0) == counters

    asyncio.run(test())


def test_the_counters_of_a_newer_build_are_refused_by_name() -> None:
    layout.check_version("file:///t", 0, None)
    layout.check_version("file:///t", 0, layout.COUNTERS_VERSION)
    with pytest.raises(errors.NewerFormat, match="file:///t: partition 3"):
        layout.check_version("file:///t", 3, layout.COUNTERS_VERSION + 1)


def test_another_engine_that_replaces_gone_files_is_refused_with_the_version_to_restore(
    tmp_path: Path,
) -> None:
    """T2: delta-rs commits an OPTIMIZE whose files were replaced meanwhile; rows are then doubled.

    The error names pk's last version.  Once an operator has restored it, pk goes on.
    """

    async def whole() -> None:
        async with opened(tmp_path) as tables:
            table = tables.table(TOPIC, TOPIC_ID)
            snapshot = await table.create()
            for end in (100, 200):
                snapshot = await table.commit(append(snapshot, 0, end))
            gone = snapshot.files_of(0)[0]
            left = snapshot.partition(0)
            moved = data(0, 100)
            moved = replace(moved, path=moved.path.replace("-a-", "-b-"))
            commit = Commit(snapshot, (NewFile(moved, 1, False),), (gone.path,), {0: left}, False)
            await table.commit(commit)
            log = tmp_path / layout.table_path(TOPIC, TOPIC_ID) / "_delta_log"
            lines: list[dict[str, Any]] = [
                {"commitInfo": {"operation": "OPTIMIZE"}},
                {"remove": {"path": gone.path, "dataChange": False}},
                {
                    "add": {
                        "path": "partition=0/part-1.parquet",
                        "partitionValues": {"partition": "0"},
                        "size": 20,
                        "modificationTime": 1,
                        "dataChange": False,
                    }
                },
            ]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (log / f"{4:020d}.json").write_text(text)
            for reader in (table, tables.table(TOPIC, TOPIC_ID)):
                with pytest.raises(errors.TierTableChanged, match="restore version 3, if another"):
                    await reader.load([0])
            DeltaTable(log.parent).restore(3, ignore_missing_files=True)
            for reader in (table, tables.table(TOPIC, TOPIC_ID)):
                seen = await reader.load([0])
                assert seen is not None
                assert sorted(seen.files) == sorted([moved.path, snapshot.files_of(0)[1].path])
            seen = await table.commit(append(seen, 0, 300))
            assert (await tables.table(TOPIC, TOPIC_ID).load([0])) is not None

    asyncio.run(whole())


def test_commits_of_other_engines_need_no_checksum(tmp_path: Path) -> None:
    """Rule T2: the paths of an OPTIMIZE are followed, by a fresh handle and by one that was
    open.
    """

    async def whole() -> None:
        async with opened(tmp_path) as tables:
            table = tables.table(TOPIC, TOPIC_ID)
            snapshot = await table.create()
            for end in (100, 200, 300):
                snapshot = await table.commit(append(snapshot, 0, end))
            log = tmp_path / layout.table_path(TOPIC, TOPIC_ID) / "_delta_log"
            old = [file.path for file in snapshot.files_of(0)][:2]
            lines: list[dict[str, Any]] = [{"commitInfo": {"operation": "OPTIMIZE"}}]
            for path in old:
                lines.append({"remove": {"path": path, "dataChange": False}})
            stats = {"numRecords": 200, "minValues": {"offset": 0}, "maxValues": {"offset": 199}}
            added = {
                "path": "partition=0/part-1.parquet", "partitionValues": {"partition": "0"},
                "size": 20, "modificationTime": 1, "dataChange": False, "stats": json.dumps(stats),
            }  # fmt: skip
            lines.append({"add": added})
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (log / f"{4:020d}.json").write_text(text)
            for reader in (table, tables.table(TOPIC, TOPIC_ID)):
                seen = await reader.load([0])
                assert seen is not None
                assert len(seen.files) == 2
            seen = await table.commit(append(seen, 0, 400))
            again = await tables.table(TOPIC, TOPIC_ID).load([0])
            assert again is not None
            assert again.files.keys() == seen.files.keys()
            forged = [{"txn": {"appId": layout.app_id(TOPIC_ID, 7, "end"), "version": 9}}]
            (log / f"{6:020d}.json").write_text("".join(json.dumps(x) + "\n" for x in forged))
            for reader in (table, tables.table(TOPIC, TOPIC_ID)):
                with pytest.raises(errors.TierTableChanged, match="no checksum"):
                    await reader.load([0])

    asyncio.run(whole())


@pytest.mark.parametrize("changed", [*layout.TABLE_PROPERTIES, *layout.REFUSED_PROPERTIES])
def test_a_table_with_other_properties_is_refused(tmp_path: Path, changed: str) -> None:
    """Rule T8: once the properties are set back, the table is read again."""

    async def whole() -> None:
        async with opened(tmp_path) as tables:
            table = tables.table(TOPIC, TOPIC_ID)
            snapshot = await table.create()
            snapshot = await table.commit(append(snapshot, 0, 100))
            log = tmp_path / layout.table_path(TOPIC, TOPIC_ID) / "_delta_log"
            text = (log / f"{0:020d}.json").read_text()
            first = [json.loads(line) for line in text.splitlines()]
            (metadata,) = (line["metaData"] for line in first if "metaData" in line)
            altered = {**metadata["configuration"], changed: "interval 1 days"}
            for version, properties in ((2, altered), (3, metadata["configuration"])):
                line = {"metaData": {**metadata, "configuration": properties}}
                (log / f"{version:020d}.json").write_text(json.dumps(line) + "\n")
                if version == 2:
                    with pytest.raises(errors.TierTableChanged, match=changed):
                        await table.load([0])
            for reader in (table, tables.table(TOPIC, TOPIC_ID)):
                seen = await reader.load([0])
                assert seen is not None
                assert seen.files == snapshot.files

    asyncio.run(whole())


def test_extreme_timestamps_are_the_same_in_the_log(tmp_path: Path) -> None:
    """Statistics can hold the years 1 to 9999; the sums count values that can be read back."""

    async def whole() -> None:
        async with opened(tmp_path) as tables:
            table = tables.table(TOPIC, TOPIC_ID)
            snapshot = await table.create()
            for low, high in (
                (-(2**62), 2**62),
                (-62_135_596_800_000, 0),
                (-1, 253_402_300_799_999),
            ):
                commit = append(snapshot, 0, snapshot.partition(0).end + 10)
                (new,) = commit.adds
                file = replace(new.file, min_timestamp_ms=low, max_timestamp_ms=high)
                snapshot = await table.commit(replace(commit, adds=(NewFile(file, 1),)))
            assert await tables.table(TOPIC, TOPIC_ID).load([0]) is not None

    asyncio.run(whole())


def test_a_walk_reads_no_more_than_it_must() -> None:
    """tiering/log_check H3: it reads pk's newest commit, and the commits that were not seen yet."""
    uri, sums = "t", log_check.FileSums().plus([data(0, 10)])
    info: dict[str, Any] = {log_check.FILES: sums.text()}
    said = log_check.of_actions([{"commitInfo": info}])
    ours = json.dumps({"commitInfo": {**info, log_check.CHECK: said, "timestamp": 3}}).encode()
    walk = log_check.CommitWalk(uri, 900, sums, -1)
    assert walk.wanted() == list(range(900, 892, -1))
    walk.take(900, ours)
    assert walk.wanted() == []
    walk.finish()
    walk = log_check.CommitWalk(uri, 900, sums, 897)
    for version in (900, 899, 898):
        assert version in walk.wanted()
        walk.take(version, ours if version == 898 else b'{"commitInfo":{}}')
    assert walk.wanted() == []
    walk.finish()
    walk = log_check.CommitWalk(uri, 900, sums, -1)
    walk.take(900, None)  # the log was cleaned up: the earlier files are unknown
    assert walk.wanted() == []
    walk.finish()


def test_counters_without_a_checksum_are_damaged() -> None:
    log_check.check_counters("t", 1, 0, PartitionCounters(), None)
    for check in (None, 5):
        with pytest.raises(errors.TierTableChanged, match="partition 3"):
            log_check.check_counters("t", 1, 3, PartitionCounters(end=4), check)
