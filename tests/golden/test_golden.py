"""Every golden directory opens, and reads as it was written (tests/golden/golden.py)."""

from __future__ import annotations

import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

sys.path.insert(0, str(Path(__file__).parent))

import golden

from pk import Producer, formats
from pk.log import directory

pytestmark = pytest.mark.integration
ARCHIVES = pytest.mark.parametrize("archive", golden.archives(), ids=lambda path: path.name)


def test_each_format_has_its_directory() -> None:
    """A build that raises FORMAT keeps what the format before it wrote."""
    names = {path.name for path in golden.archives()}
    assert names == {f"format-{number}.tar.xz" for number in range(1, directory.FORMAT + 1)}


def opened(archive: Path, home: Path) -> Any:
    return golden.unpacked(archive, home)


@ARCHIVES
def test_a_data_directory_reads_as_it_was_written(archive: Path, tmp_path: Path) -> None:
    expected = opened(archive, tmp_path)
    with golden.server(tmp_path) as node:
        for topic, rows in expected["topics"].items():
            assert golden.consumed(node.address, topic) == rows, topic
        assert golden.committed(node.address) == expected["committed"]
        with Producer(node.address, transactional_id=golden.TRANSACTIONAL_ID) as producer:
            producer.init_transactions()
            producer.begin_transaction()
            later = producer.send(golden.TRANSACTED, value=b"later", partition=1)
            producer.commit_transaction()
            assert later.result(60).offset > max(
                row[1] for row in expected["topics"][golden.TRANSACTED] if row[0] == 1
            )
        with Producer(node.address) as producer:
            sent = producer.send(golden.TIERED, value=b"later", partition=0).result(60)
        ends = [row[1] for row in expected["topics"][golden.TIERED] if row[0] == 0]
        assert sent.offset == max(ends) + 1
    with golden.server(tmp_path) as node:  # and again, as this build wrote it
        assert len(golden.consumed(node.address, golden.TIERED)) == golden.RECORDS + 11


@ARCHIVES
def test_each_file_of_a_data_directory_has_an_entry_in_the_registry(
    archive: Path, tmp_path: Path
) -> None:
    """A new kind of file fails here until pk.formats has its version, or why it has none."""
    opened(archive, tmp_path)
    known = {each.name for each in formats.FORMATS} | set(formats.WITHOUT_VERSION)
    patterns = [f"*{name}" if name.startswith(".") else name for name in known]

    def unknown() -> list[str]:
        files = [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
        names = [path.name for path in files if path.parent.name != "run"]
        assert names
        return [name for name in names if not any(fnmatch(name, each) for each in patterns)]

    assert unknown() == []
    with golden.server(tmp_path) as node:
        with Producer(node.address) as producer:
            producer.send(golden.TIERED, value=b"later").result(60)
        assert unknown() == []
    assert unknown() == []


@ARCHIVES
def test_a_table_reads_as_it_was_written(archive: Path, tmp_path: Path) -> None:
    expected = opened(archive, tmp_path)
    for topic in (golden.TIERED, golden.TRANSACTED):
        (log,) = (tmp_path / "tier" / topic).glob("*/_delta_log")
        table = DeltaTable(str(log.parent))
        columns = ["partition", "offset", "value"]
        rows = sorted(
            (row["partition"], row["offset"], row["value"] and row["value"].hex())
            for row in table.to_pyarrow_table(columns=columns).to_pylist()
        )
        wanted = [(row[0], row[1], row[3]) for row in expected["topics"][topic]]
        assert rows == sorted(wanted), topic


@pytest.mark.spark
@ARCHIVES
def test_a_spark_checkpoint_is_continued(archive: Path, tmp_path: Path) -> None:
    expected = opened(archive, tmp_path)
    begin = {int(number): end for number, end in expected["checkpoint"].items()}
    with golden.server(tmp_path) as node:
        rows = golden.query(node.address, tmp_path)
    wanted = [
        (row[0], row[1]) for row in expected["topics"][golden.QUERIED] if row[1] >= begin[row[0]]
    ]
    assert rows == sorted(wanted)
    assert wanted
