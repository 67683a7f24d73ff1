"""Paths of a table's files are relative to the table (rule T8)."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from pk import errors
from pk.tiering.delta_actions import files_of

SCHEMA = json.dumps(
    {
        "type": "struct",
        "fields": [
            {"name": "partition", "type": "integer", "nullable": True, "metadata": {}},
            {"name": "offset", "type": "long", "nullable": True, "metadata": {}},
        ],
    }
)


def table_of(home: Path, path: str) -> pa.Table:
    """The add actions of a table with one file, as another engine may have committed it."""
    (home / "_delta_log").mkdir(parents=True)
    stats = {"numRecords": 1, "minValues": {"offset": 0}, "maxValues": {"offset": 0}}
    actions = [
        {"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}},
        {
            "metaData": {
                "id": "m", "format": {"provider": "parquet", "options": {}},
                "schemaString": SCHEMA, "partitionColumns": ["partition"], "configuration": {},
            }
        },
        {
            "add": {
                "path": path, "partitionValues": {"partition": "0"}, "size": 1,
                "modificationTime": 1, "dataChange": True, "stats": json.dumps(stats),
            }
        },
    ]  # fmt: skip
    text = "\n".join(map(json.dumps, actions))
    (home / "_delta_log" / f"{0:020d}.json").write_text(text)
    return pa.table(DeltaTable(str(home)).get_add_actions(flatten=True))


def test_a_relative_path_is_the_name_of_the_file(tmp_path: Path) -> None:
    assert list(files_of(table_of(tmp_path, "partition=0/a%20b.parquet"))) == [
        "partition=0/a b.parquet"
    ]


@pytest.mark.parametrize(
    "path",
    [
        "file:///elsewhere/x.parquet",
        "s3://bucket/x.parquet",
        "/elsewhere/x.parquet",
        "../x.parquet",
    ],
)
def test_a_path_that_leads_out_of_the_table_is_refused(tmp_path: Path, path: str) -> None:
    """A reader of pk looked for the file inside the table and called it damaged."""
    with pytest.raises(errors.TierTableChanged, match="not inside it"):
        files_of(table_of(tmp_path, path))
