"""The comparison of replicas must be able to find differences."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from replicas import compare

from pk.log import batch as batches
from pk.log import columns


def _batch(offset: int, epoch: int, text: bytes) -> bytes:
    rows = pa.RecordBatch.from_pydict({"value": pa.array([text], pa.binary())})
    return b"".join(
        batches.patched(b"".join(columns.encode(rows, default_timestamp=1)), offset, epoch)
    )


def _replica(folder: Path, *segments: list[tuple[int, int, bytes]]) -> Path:
    folder.mkdir(parents=True)
    for each in segments:
        raw = b"".join(_batch(*one) for one in each)
        (folder / f"{each[0][0]:020d}.log").write_bytes(raw)
    return folder


ONE, TWO, OTHER = (0, 1, b"a"), (1, 1, b"b"), (1, 2, b"b")
LATER = (2, 1, b"c")


def test_segments_may_be_cut_elsewhere_and_tails_may_differ(tmp_path: Path) -> None:
    first = _replica(tmp_path / "1" / "t-0", [ONE, TWO], [LATER])
    second = _replica(tmp_path / "2" / "t-0", [ONE], [TWO])
    assert compare({1: first, 2: second}, below=2) == []


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ([ONE], "ends at 1"),
        ([ONE, OTHER], "replicas differ"),
        ([ONE, (1, 1, b"x")], "replicas differ"),
        ([TWO], "offset 1 follows 0"),
    ],
)
def test_what_is_not_the_same(
    tmp_path: Path, other: list[tuple[int, int, bytes]], told: str
) -> None:
    first = _replica(tmp_path / "1" / "t-0", [ONE, TWO])
    second = _replica(tmp_path / "2" / "t-0", other)
    words = compare({1: first, 2: second}, below=2)
    assert any(told in each for each in words), words
