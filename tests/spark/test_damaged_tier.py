"""Rule T10 in Spark: a flipped bit of a page is an error, never another value."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

import pyarrow.parquet as pq
import pytest
from py4j.protocol import Py4JJavaError


def test_a_flipped_bit_is_read_from_the_log_and_mended(spark, cluster, load) -> None:
    """Spark's own readers refuse the page.  format("pk") reads the range through the broker, whose
    local log still has it, and so the file is uploaded again.
    """
    topic = cluster.topic(tier_file_bytes=8192, tier_max_lag_ms=200)
    cluster.fill(topic, 2000, batch_size=2048)
    cluster.wait("all is tiered", lambda: cluster.admin.describe_tier(topic).partitions[0].lag == 0)
    expected = cluster.consumed(topic)
    uri = cluster.admin.describe_tier(topic).uri
    home = Path(unquote(urlsplit(uri).path))
    table = spark.read.format("delta").load(str(home)).select("offset", "value")
    assert table.count() == len(expected)

    damaged = sorted(home.glob("partition=0/*.parquet"))[1]
    metadata = pq.read_metadata(damaged)
    chunk = metadata.row_group(0).column(metadata.schema.names.index("offset"))
    raw = bytearray(damaged.read_bytes())
    raw[chunk.data_page_offset + chunk.total_compressed_size - 2] ^= 4
    damaged.write_bytes(raw)

    for read in (table, spark.read.parquet(str(damaged)).select("offset")):
        with pytest.raises(Py4JJavaError, match="CRC checksum verification failed"):
            read.collect()
    rows = load(topic).select("offset", "value").collect()
    assert sorted((row.offset, bytes(row.value)) for row in rows) == [
        (row[1], row[3]) for row in expected
    ]

    cluster.wait("the file is uploaded again", lambda: _names(cluster, topic, damaged.name))
    fresh = spark.read.format("delta").load(str(home)).select("offset", "value").collect()
    assert sorted((row.offset, bytes(row.value)) for row in fresh) == [
        (row[1], row[3]) for row in expected
    ]


def _names(cluster, topic: str, damaged: str) -> bool:
    """Return whether the table has another file in place of `damaged`, and no problem."""
    from deltalake import DeltaTable

    described = cluster.admin.describe_tier(topic)
    listed = DeltaTable(described.uri).file_uris()
    return described.status == "ok" and not any(path.endswith(damaged) for path in listed)
