"""A damaged batch in the only copy of a partition, read by Spark (rule L9)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

BATCHES = 6
FLIPPED = 3
SIZE = 40_000  #: more than the broker keeps in memory (log/batch_cache.py)


def damaged_topic(cluster: Any) -> str:
    """Return a topic with one record per batch; one bit of the record FLIPPED is flipped on the
    disk.
    """
    topic = cluster.topic(tier_enable=False)
    for number in range(BATCHES):
        cluster.fill_one(topic, b"<%d>" % number + bytes(SIZE))
    (path,) = (Path(cluster.server.data) / "topics" / f"{topic}-0").glob("*.log")
    raw = path.read_bytes()
    place = raw.index(b"<%d>" % FLIPPED) + 1_000
    with path.open("r+b") as out:
        out.seek(place)
        out.write(bytes([raw[place] ^ 0x10]))
    return topic


@pytest.mark.filterwarnings("ignore:.*failOnDataLoss is false")
def test_fail_on_data_loss_decides_about_a_damaged_range(cluster: Any, load: Any) -> None:
    topic = damaged_topic(cluster)
    with pytest.raises(Exception, match=rf"\[{FLIPPED}, {FLIPPED + 1}\) is gone") as told:
        load(topic, startingOffsets="earliest").collect()
    assert "checksum" in str(told.value)
    rows = load(topic, startingOffsets="earliest", failOnDataLoss="false").collect()
    assert sorted(row.offset for row in rows) == [n for n in range(BATCHES) if n != FLIPPED]
    assert all(row.value.startswith(b"<%d>" % row.offset) for row in rows)
