"""The live files of a version: they answer like a dict of `DataFile`, and take little memory."""

from __future__ import annotations

import gc
import random
import sys
import tracemalloc
from collections.abc import Callable

import pytest

from pk.tiering import data_files, layout, live_files
from pk.tiering.data_files import OFFSET_MAX, DataFile, by_offset, held_by, is_whole
from pk.tiering.live_files import BLOCK_FILES, LiveFiles, PartitionFiles

#: What a file may cost: its path of 109 bytes and its columns, with room for the blocks.
BYTES_MAX = 250


def written(number: int, partition: int = 0, rows: int = 10) -> DataFile:
    """Returns a file as the copier writes it."""
    start = number * 10
    name = layout.DataName(
        partition, start, start + 10, 3, f"{number:016x}", number * 7919 % 2**32, number * 10**14
    )
    at_ms = 1_700_000_000_000 + number
    return DataFile(
        layout.data_path(name), partition, start, start + 9, at_ms, at_ms + 7, rows, 1_000 + number
    )


def foreign(path: str, low: int, high: int = OFFSET_MAX, partition: int = 0) -> DataFile:
    """Returns a file as another engine writes it."""
    return DataFile(path, partition, low, high, -(2**62), 2**62, 5, 77, high != OFFSET_MAX)


def same(files: LiveFiles, model: dict[str, DataFile]) -> None:
    """Compares all that is asked of files with a dict of them."""
    assert files == model
    assert len(files) == len(model)
    assert list(files) == [file.path for file in files.values()]
    assert files.partitions.keys() == {file.partition for file in model.values()}
    for partition, found in files.partitions.items():
        wanted = sorted(
            (each for each in model.values() if each.partition == partition), key=by_offset
        )
        assert list(found) == wanted
        assert [found[at] for at in range(len(found))] == wanted
        assert found[-1] == wanted[-1]
        assert found[2:5] == wanted[2:5]
        assert found.bytes == sum(each.size for each in wanted)
        held = [(*held_by(each), is_whole(each)) for each in wanted]
        columns = found.columns()
        assert columns["whole"].tolist() == [each[2] for each in held]
        assert columns["start"].tolist() == [each[0] for each in held]
        assert columns["end"].tolist() == [min(each[1], OFFSET_MAX) for each in held]
        for low, high in ((0, 1), (95, 230), (0, 10**6), (10**6, 10**7)):
            some = [each for each in wanted if each.min_offset < high and each.max_offset >= low]
            assert found.covering(low, high) == some
            live = [each for each in wanted if each.max_offset >= low]
            assert list(found.live(low)) == live
            assert found.columns(low)["max_offset"].tolist() == [f.max_offset for f in live]
            assert list(found.below(low)) == [each for each in wanted if each.max_offset < low]


def strange(number: int) -> list[DataFile]:
    """Returns files whose paths say nothing of their partition, or something else."""
    return [
        foreign(f"part-{number:05d}.parquet", number, partition=number % 3),
        foreign(f"partition={number % 3}/é-{number}\n.parquet", number, number, (number + 1) % 3),
        foreign(f"x/partition=1/{number}", number, number + 40, number % 2),
        foreign(f"partition={number % 3}/part-{number}.parquet", number, number, number % 3),
    ]


@pytest.mark.parametrize("seed", range(4))
def test_files_are_those_of_a_dict(seed: int) -> None:
    rng = random.Random(seed)
    pool = [written(number, number % 3) for number in range(1_500)]
    pool += [file for number in range(40) for file in strange(number)]
    model: dict[str, DataFile] = {}
    files = LiveFiles()
    for _ in range(25):
        removes = rng.sample(sorted(model), rng.randrange(min(len(model), 400) + 1))
        adds = rng.sample(pool, rng.choice((1, 3, 300)))
        before, known = files, dict(model)
        files = files.after(removes, adds)
        for path in removes:
            del model[path]
        model.update((file.path, file) for file in adds)
        same(files, model)
        assert before == known  # a version never changes
        for path in removes:
            assert (path in files) == (path in model)
        assert all(files[path] == file for path, file in model.items())
    ordered = sorted(model.values(), key=lambda file: (file.partition, by_offset(file)))
    same(LiveFiles.ordered(ordered), model)
    same(LiveFiles.of(model.values()), model)


def test_a_damaged_name_may_state_any_offset() -> None:
    """The number has 20 digits; the check of names refuses it later (log_check)."""
    path = written(1).path.replace("/0", "/9").replace("-0", "-9")
    assert held_by(foreign(path, 3))[0] > OFFSET_MAX
    assert LiveFiles.of([foreign(path, 3)])[path] == foreign(path, 3)


def test_a_file_that_is_added_again_replaces_the_first() -> None:
    one, other = written(1), written(1, rows=7)
    assert list(LiveFiles.of([one, other]).values()) == [other]
    assert list(LiveFiles.of([one]).after((), [other]).values()) == [other]


def test_a_path_that_is_not_there_is_not_found() -> None:
    files = LiveFiles.of([written(1), foreign("part-1.parquet", 4)])
    for path in (written(2).path, written(1, 7).path, "part-2.parquet", "", "partition=9/x"):
        assert path not in files
        with pytest.raises(KeyError):
            files[path]
        with pytest.raises(KeyError):
            files.after([path], ())
    with pytest.raises(IndexError):
        files.partitions[0][5]


#: Where what a version keeps is allocated.  Other threads of the process allocate, too.
MEASURED = [
    tracemalloc.Filter(True, str(each.__file__))
    for each in (live_files, data_files, layout, sys.modules[__name__])
]


def kept_bytes(make: Callable[[], LiveFiles]) -> tuple[LiveFiles, int]:
    """Returns what `make` returns, and the bytes that it keeps."""
    gc.collect()
    tracemalloc.start()
    try:
        kept = make()
        gc.collect()
        found = tracemalloc.take_snapshot().filter_traces(MEASURED)
    finally:
        tracemalloc.stop()
    return kept, sum(trace.size for trace in found.traces)


def test_a_file_takes_few_bytes() -> None:
    """Objects in a dict take 460 bytes a file."""
    count = 20_000
    kept, size = kept_bytes(lambda: LiveFiles.ordered(written(number) for number in range(count)))
    assert len(kept) == count
    assert 109 < size / count <= BYTES_MAX


def test_a_version_shares_its_files_with_the_one_before() -> None:
    count = 20_000
    kept = LiveFiles.ordered(written(number) for number in range(count))
    kept = kept.after((), [written(count)])
    later, size = kept_bytes(lambda: kept.after([written(5).path], [written(count + 1)]))
    assert len(later) == count + 1
    index = 16 * count  # by which paths are found
    assert 0 < size <= index + 3 * BLOCK_FILES * BYTES_MAX


def test_no_object_is_kept_for_a_file() -> None:
    """Files of other tests, which may be alive, are in other partitions."""
    partition = 987_654
    kept = LiveFiles.ordered(written(number, partition) for number in range(5_000))
    gc.collect()
    found = [each for each in gc.get_objects() if isinstance(each, DataFile)]
    assert not [each for each in found if each.partition == partition]
    assert len(kept) == 5_000


def test_blocks_that_became_small_are_joined() -> None:
    """Retention and merges leave few files of each block."""
    kept = LiveFiles.ordered(written(number) for number in range(40 * BLOCK_FILES))
    left = [written(number).path for number in range(40 * BLOCK_FILES) if number % 64]
    for at in range(0, len(left), 1_000):
        kept = kept.after(left[at : at + 1_000], ())
    assert len(kept) == 40 * BLOCK_FILES // 64
    assert block_count(kept.partitions[0]) <= 4


def block_count(files: PartitionFiles) -> int:
    return len(files._blocks)
