"""Cold reads over files in any layout: merged by offset, bounded, cached, fetched in advance."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given

from pk import errors
from pk.clock import SystemClock
from pk.log import batch as log_batch
from pk.log import columns
from pk.tiering.data_files import DataFile
from pk.tiering.layout import FILE_SCHEMA, PartitionCounters
from pk.tiering.objects import MemoryStore
from pk.tiering.reader import TablePartition, TierReader
from pk.tiering.table import Snapshot

HOME = "t/id"


def rows_at(offsets: list[int]) -> pa.RecordBatch:
    count = len(offsets)
    columns_of = {
        "offset": offsets,
        "timestamp": [offset * 1_000 for offset in offsets],
        "timestamp_type": [0] * count,
        "key": [None] * count,
        "value": [b"value %d" % offset for offset in offsets],
        "headers": [None] * count,
        "leader_epoch": [offset // 50 for offset in offsets],
        "delete_horizon_ms": [None] * count,
    }
    arrays = [pa.array(columns_of[field.name], field.type) for field in FILE_SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=FILE_SCHEMA)


class Tier:
    """Files in memory, and a snapshot of them."""

    def __init__(
        self,
        layouts: list[list[int]],
        end: int,
        *,
        group: int = 8,
        cache: int = 10**6,
        store: MemoryStore | None = None,
        ahead: int = 10**6,
    ) -> None:
        self.store = store or MemoryStore()
        self.reads: list[str] = []
        self.store.fault = lambda operation, path: self.reads.append(path)
        files: dict[str, DataFile] = {}
        for number, offsets in enumerate(layouts):
            sink = pa.BufferOutputStream()
            with pq.ParquetWriter(sink, FILE_SCHEMA) as writer:
                writer.write_batch(rows_at(offsets), row_group_size=group)
            path = f"partition=0/f{number}.parquet"
            self.store.objects[f"{HOME}/{path}"] = sink.getvalue().to_pybytes()
            size = len(self.store.objects[f"{HOME}/{path}"])
            files[path] = DataFile(
                path, 0, min(offsets), max(offsets), min(offsets), max(offsets), len(offsets), size
            )
        snapshot = Snapshot(1, "id", files, {0: PartitionCounters(end=end)})
        self.place = TablePartition(HOME, 0, snapshot)

        async def here(work: Callable[[], Any]) -> Any:
            return work()

        clock = SystemClock()
        self.reader = TierReader(self.store, here, clock, cache, ahead)  # type: ignore[arg-type]

    async def all(self, start: int, end: int, max_bytes: int) -> list[int]:
        found: list[int] = []
        at = start
        while at < end:
            fetched = await self.reader.fetch(self.place, at, end, max_bytes)
            assert fetched.next_offset > at
            for batch in fetched.batches:
                header = log_batch.check(batch)
                assert at <= header.base_offset
                assert header.next_offset <= fetched.next_offset
                rows = columns.decode(batch, decoded_bytes_max=1 << 20)
                offsets = rows.column("offset").to_pylist()
                assert rows.column("value").to_pylist() == [b"value %d" % o for o in offsets]
                assert {offset // 50 for offset in offsets} == {header.leader_epoch}
                found += offsets
            at = fetched.next_offset
        return found


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=120, unique=True),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
    st.integers(1, 4_000),
    st.integers(0, 200),
    st.booleans(),
)
def test_any_layout_reads_the_same(
    offsets: list[int], files: int, chance: Any, max_bytes: int, start: int, scattered: bool
) -> None:
    """T10: the files are sorted and disjoint, or Z-ordered, in row groups of eight."""
    order = list(offsets)
    if scattered:
        chance.shuffle(order)
    else:
        order.sort()
    size = -(-len(order) // files)
    layouts = [order[i : i + size] for i in range(0, len(order), size)]

    async def test() -> None:
        tier = Tier(layouts, 201, cache=chance.choice([0, 3_000, 10**6]))
        found = await tier.all(start, 201, max_bytes)
        assert found == sorted(offset for offset in offsets if offset >= start)
        await tier.reader.close()

    run(test())


def test_a_gap_at_the_end_is_passed_in_one_read() -> None:
    async def test() -> None:
        tier = Tier([[0, 1, 2]], 1_000)
        fetched = await tier.reader.fetch(tier.place, 3, 900, 100)
        assert (fetched.next_offset, fetched.batches) == (900, [])
        with pytest.raises(errors.UnknownTierRange):
            await tier.reader.fetch(tier.place, 1_000, 2_000, 100)

    run(test())


def test_what_was_deleted_is_no_gap() -> None:
    """T9: the reader must get OffsetOutOfRange, once the broker knows the deletion, too."""

    async def test() -> None:
        tier = Tier([[5, 6, 7]], 8)
        tier.place.snapshot.counters[0] = PartitionCounters(start=5, end=8)
        with pytest.raises(errors.UnknownTierRange, match=r"covers \[5, 8\)"):
            await tier.reader.fetch(tier.place, 4, 8, 100)
        assert (await tier.reader.fetch(tier.place, 5, 8, 10**6)).next_offset == 8
        await tier.reader.close()

    run(test())


def test_a_read_that_is_late_answers_with_what_it_has() -> None:
    """tiering/reader H7: repeated reads reach the end, even without a cache."""

    async def test() -> None:
        tier = Tier([list(range(8)), list(range(8, 16)), list(range(16, 24))], 24, cache=0)
        whole = await tier.reader.fetch(tier.place, 0, 24, 10**6)
        assert whole.next_offset == 24
        at = []
        while not at or at[-1] < 24:
            start = at[-1] if at else 0
            part = await tier.reader.fetch(tier.place, start, 24, 10**6, late=lambda: True)
            assert part.batches
            at.append(part.next_offset)
        assert at == [8, 16, 24]
        await tier.reader.close()

    run(test())


def test_footers_and_row_groups_are_read_once_and_shared() -> None:
    async def test() -> None:
        tier = Tier([list(range(64))], 64)
        await asyncio.gather(*(tier.reader.fetch(tier.place, 0, 8, 10**6) for _ in range(20)))
        assert len(tier.reads) == 2  # the footer, one row group
        await tier.reader.fetch(tier.place, 4, 8, 10**6)
        assert len(tier.reads) == 2

    run(test())


def test_a_sequential_reader_finds_the_next_group_there() -> None:
    async def test() -> None:
        tier = Tier([list(range(64))], 64)
        at = 0
        for _ in range(3):
            at = (await tier.reader.fetch(tier.place, at, 64, 200)).next_offset
        await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        before = len(tier.reads)
        nearest = await tier.reader.fetch(tier.place, at, 64, 100)
        assert nearest.batches
        assert len(tier.reads) == before
        await tier.reader.close()

    run(test())


class FarStore(MemoryStore):
    """A store in which the requests of one moment are answered together: a round trip each."""

    def __init__(self) -> None:
        super().__init__()
        self.round_trips = 0
        self.at_once = 0  #: the most requests of one round trip
        self._asked: list[asyncio.Future[None]] = []

    async def get_range(self, path: str, start: int, size: int) -> bytes:
        answer = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        await answer
        return await super().get_range(path, start, size)

    async def answer(self) -> None:
        while True:
            for _ in range(50):  # until every task waits for the store
                await asyncio.sleep(0)
            asked, self._asked = self._asked, []
            self.round_trips += bool(asked)
            self.at_once = max(self.at_once, len(asked))
            for each in asked:
                each.set_result(None)


@pytest.mark.parametrize(("ahead", "most"), [(0, 136), (10**6, 28)])
def test_a_reader_that_goes_straight_on_waits_for_few_round_trips(ahead: int, most: int) -> None:
    """tiering/read_ahead: 128 row groups of 8 files, and 8 footers, would be 136 round trips."""

    async def test() -> None:
        store = FarStore()
        layouts = [list(range(i, i + 512)) for i in range(0, 4096, 512)]
        tier = Tier(layouts, 4096, group=32, store=store, ahead=ahead, cache=4 * 10**6)
        trips = asyncio.ensure_future(store.answer())
        assert await tier.all(0, 4096, 2_000) == list(range(4096))
        assert len(tier.reads) == 136  # nothing twice
        assert store.round_trips <= most
        assert store.at_once <= 17
        trips.cancel()
        await tier.reader.close()

    run(test())


def test_a_reader_that_seeks_around_reads_nothing_ahead() -> None:
    async def test() -> None:
        tier = Tier([list(range(1024))], 1024, group=16, cache=10**6)
        for start in (512, 32, 800, 208, 640):
            await tier.reader.fetch(tier.place, start, 1024, 100)
            for _ in range(20):
                await asyncio.sleep(0)
        assert len(tier.reads) == 6  # the footer, and a row group for each read
        assert tier.reader.ahead.read_bytes == 0
        await tier.reader.close()

    run(test())


def test_a_load_that_fails_gives_its_memory_back() -> None:
    async def test() -> None:
        tier = Tier([list(range(64)), list(range(64, 128))], 128, cache=10**6)
        at = 0
        for _ in range(2):
            at = (await tier.reader.fetch(tier.place, at, 128, 200)).next_offset
        del tier.store.objects[f"{HOME}/partition=0/f0.parquet"]
        for _ in range(50):
            await asyncio.sleep(0)
        assert tier.reader.ahead.loading_bytes == 0
        await tier.reader.close()

    run(test())


def test_the_cache_stays_within_its_bound() -> None:
    async def test() -> None:
        tier = Tier([list(range(i, i + 64)) for i in range(0, 640, 64)], 640, cache=4_000)
        assert await tier.all(0, 640, 500) == list(range(640))
        assert 0 < tier.reader.cached_bytes <= 4_000
        assert tier.reader.ahead.bytes_max == 2_000
        await tier.reader.close()

    run(test())


def test_a_file_that_is_gone_says_so() -> None:
    async def test() -> None:
        tier = Tier([[0, 1], [2, 3]], 4)
        del tier.store.objects[f"{HOME}/partition=0/f1.parquet"]
        with pytest.raises(match=r"f1\.parquet"):
            await tier.all(0, 4, 10)

    run(test())


def test_damaged_files_raise_typed_errors() -> None:
    async def test() -> None:
        for damage in (
            lambda raw: raw[:-1] + b"?",
            lambda raw: b"x" * len(raw),
            lambda raw: raw[:4] + b"\0" * 200 + raw[204:],
        ):
            tier = Tier([list(range(200))], 200, group=200)
            path = next(iter(tier.store.objects))
            tier.store.objects[path] = damage(tier.store.objects[path])
            with pytest.raises(errors.PkError):
                await tier.all(0, 200, 10**6)

    run(test())


@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=60, unique=True),
    st.integers(0, 110),
    st.integers(0, 100),
    st.randoms(use_true_random=False),
)
def test_the_first_offset_of_a_time(
    offsets: list[int], stamp: int, start: int, chance: Any
) -> None:
    """T11; timestamps equal offsets here."""
    order = list(offsets)
    chance.shuffle(order)
    half = len(order) // 2
    layouts = [part for part in (order[:half], order[half:]) if part]

    async def test() -> None:
        tier = Tier(layouts, 101)
        found = await tier.reader.offset_for_time(tier.place, stamp, start)
        fits = [offset for offset in offsets if offset >= max(stamp, start)]
        assert (found.offset if found else None) == (min(fits) if fits else None)

    run(test())


def test_a_look_up_by_time_reads_three_columns() -> None:
    """T11: retention asks this of every partition, so it must not read the values or need memory
    for them.
    """

    async def test() -> None:
        tier = Tier([list(range(1_000))], 1_000, group=1_000)
        (file,) = tier.place.snapshot.files.values()
        asked: list[int] = []
        get_range = tier.store.get_range

        async def counted(path: str, start: int, size: int) -> bytes:
            asked.append(size)
            return await get_range(path, start, size)

        tier.store.get_range = counted  # type: ignore[method-assign]
        found = await tier.reader.offset_for_time(tier.place, 700, 0)
        assert found == (700, 700, 14)
        footer, *parts = asked
        assert footer <= file.size
        assert 0 < sum(parts) < file.size * 2 // 3
        assert tier.reader.cached_bytes == 0
        await tier.reader.fetch(tier.place, 0, 1_000, 10**6)
        asked.clear()
        assert await tier.reader.offset_for_time(tier.place, 7, 0) == (7, 7, 0)
        assert asked == []  # the rows are at hand

    run(test())


def test_files_that_left_the_table_are_forgotten() -> None:
    # tiering/reader H6

    async def test() -> None:
        tier = Tier([list(range(10)), list(range(10, 20))], 20)
        await tier.reader.fetch(tier.place, 0, 20, 10**6)
        before = tier.reader.cached_bytes
        first, second = tier.place.snapshot.files
        tier.reader.keep_files("another/table", [])
        assert tier.reader.cached_bytes == before
        tier.reader.keep_files(HOME, [second])
        assert 0 < tier.reader.cached_bytes < before
        tier.reads.clear()
        await tier.reader.fetch(tier.place, 10, 20, 10**6)
        assert tier.reads == []
        await tier.reader.fetch(tier.place, 0, 10, 10**6)
        assert set(tier.reads) == {f"{HOME}/{first}"}
        assert len(tier.reads) == 3  # the footer and two row groups

    run(test())
