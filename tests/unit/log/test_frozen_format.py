"""The bytes of format 1 are frozen: `FINGERPRINT` is a hash of what this build writes at level 1.

The test writes a sample that uses every file of a data directory: batches with and without keys,
headers, nulls, gaps and wide timestamps, producers, an aborted transaction, two epochs, a roll, the
checkpoints.  Compressed bodies are left out, because libraries produce their bytes.  So are the
lines of a clean stop, because a build that does not know them reads the files instead
(log/closed_logs_file B4).  The kinds and fields of the records of metadata, transactions and
groups, and of the stored copies of offsets, are in a file beside the golden directories, one line
for each field.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from pk import formats, settings
from pk.log import batch as batches
from pk.log import closed_logs, closed_logs_file, columns, control_rows
from pk.log.control_rows import Marker
from pk.log.manager import LogManager
from pk.log.plan import LogConfig
from pk.server.metadata import snapshot
from pk.server.metadata.image import BrokerState, MetadataImage, TopicState
from pk.server.raft import quorum_state_store
from pk.server.raft.messages import Vote
from pk.server.raft.snapshot_id import SnapshotId, file_name
from pk.sim.disk import SimDisk, SimStorage
from pk.types import PartitionKey, TopicPartition
from pk.wire import pk_pb2 as wire
from pk.world import World

NOW = 1_700_000_000_000
CONFIG = LogConfig.of(
    settings.TOPIC.resolve({"segment_bytes": 14 * 1024, "index_interval_bytes": 1024})
)
#: Never to be changed.
FINGERPRINT = "a30a1723a4af2687"
RECORDS = Path(__file__).parents[2] / "data" / "golden" / "format-1-records.txt"
STORED = (wire.MetadataRecord, wire.TransactionRecord, wire.GroupRecord, wire.StoredGroup)
#: Names of the types of fields, as the declaration has them.
TYPES = {
    value: name.removeprefix("TYPE_").lower()
    for name, value in vars(FieldDescriptor).items()
    if name.startswith("TYPE_")
}
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def rows(count: int, *, rich: bool = False) -> pa.RecordBatch:
    values = [b"%d" % n * (n % 50 + 1) for n in range(count)]
    if not rich:
        return pa.record_batch({"value": pa.array(values, pa.binary())})
    keys = [None if n % 3 == 0 else b"k%d" % n for n in range(count)]
    headers = [[{"key": "h", "value": None if n % 2 else b"x"}] * (n % 3) for n in range(count)]
    stamps = [NOW + n * 10_000_000_000 for n in range(count)]
    return pa.record_batch(
        {
            "value": pa.array([None if n % 5 == 0 else v for n, v in enumerate(values)]),
            "key": pa.array(keys, pa.binary()),
            "timestamp": pa.array(stamps, pa.int64()),
            "headers": pa.array(headers, HEADERS),
            "offset": pa.array([2 * n for n in range(count)], pa.int64()),
        }
    )


def sample() -> list[bytes]:
    """Append what producers and the broker itself append, in this order."""
    plain = {"default_timestamp": NOW}
    open_transaction = {**plain, "producer_id": 9, "producer_epoch": 1, "transactional": True}
    whole = [columns.encode(rows(40), **plain)]
    whole += [
        columns.encode(rows(30), **plain, producer_id=7, producer_epoch=0, base_sequence=turn * 30)
        for turn in range(7)
    ]
    whole.append(columns.encode(rows(20, rich=True), **plain, keep_offsets=True))
    whole.append(columns.encode(rows(5), **open_transaction, base_sequence=0))
    whole.append(control_rows.encode_markers([Marker(9, 2, False, 3)], NOW))
    open_transaction["producer_epoch"] = 2
    whole.append(columns.encode(rows(5), **open_transaction, base_sequence=0))
    whole += [columns.encode(rows(400), **plain) for _ in range(2)]
    return [b"".join(parts) for parts in whole]


class Clock:
    """Time does not pass."""

    wall_ms = monotonic_ms = staticmethod(lambda: NOW)

    async def sleep_ms(self, duration_ms: float) -> None:
        await asyncio.sleep(0)


async def written() -> dict[str, bytes]:
    """Return every file of the directory with the sample, as its process leaves it."""
    storage = SimStorage("d")
    no_network: Any = None
    clock: Any = Clock()
    world = World(clock, no_network, random.Random(1), lambda: "id")
    disk = SimDisk(storage, clock, random.Random(1))
    manager = LogManager([disk], node_id=1, cluster_id="c", build="b", world=world, boot_id="boot")
    await manager.open()
    await manager.load(lambda topic_id, tp: CONFIG)
    key = PartitionKey("topic-id", 0)
    log = await manager.create(TopicPartition("t", 0), "topic-id", CONFIG)
    for turn, raw in enumerate(sample()):
        log.decide(batches.check(raw), raw, leader_epoch=turn // 5, now_ms=NOW, from_client=False)
    plan = log.take_writes()
    assert plan is not None
    log.perform(plan)
    log.complete(plan)
    assert log.segment_count > 1
    log.advance_log_start(3)
    manager.set_high_watermark(key, log.written_end)
    manager.remember_broker_epoch(5)
    with pytest.MonkeyPatch.context() as patched:  # every file that a log can have
        patched.setattr(closed_logs, "WALKED_MAX", -1)
        await manager.close()
    vote = quorum_state_store.state_bytes(Vote(3, 1, "d"), 8)
    files = storage.files() | {quorum_state_store.QUORUM_STATE: vote}
    image = MetadataImage(offset=6)
    image.topics["topic-id"] = TopicState("t", "topic-id")
    image.brokers[7] = BrokerState(7, 3, "i", "b", ("d",), "a:1", "r", changed_offset=5)
    made = SnapshotId(7, 3)
    files[file_name(made)] = b"".join(snapshot.encode(made, snapshot.rows_of(image)))
    del files[closed_logs_file.FILE]
    return files


def declared(message: Descriptor, seen: dict[str, list[str]]) -> None:
    """Add the fields of a message and of the messages it contains to `seen`."""
    if message.full_name not in seen:
        seen[message.full_name] = [
            f"{message.full_name} {each.number} {each.name} {TYPES[each.type]}"
            f"{' repeated' if each.is_repeated else ''}"
            for each in message.fields
        ]
        for each in message.fields:
            if each.message_type is not None:
                declared(each.message_type, seen)


def test_the_bytes_of_level_1_are_frozen() -> None:
    files = asyncio.run(written())
    suffixes = {name.rpartition(".")[2] for name in files if name.startswith("topics/t-0/0")}
    assert suffixes == {"log", "index", "timeindex", "txnindex", "snapshot"}
    told = hashlib.sha256()
    for name in sorted(files):
        told.update(b"%b %d\n%b" % (name.encode(), len(files[name]), files[name]))
    assert told.hexdigest()[:16] == FINGERPRINT, (
        "what is written to the disk at level 1 has changed, and older builds of level 1 cannot "
        "read it: write the new bytes only at the next level of pk.format (rule Q6)"
    )


def test_the_records_of_level_1_are_frozen() -> None:
    records: dict[str, list[str]] = {}
    for message in STORED:
        declared(message.DESCRIPTOR, records)
    found = sorted(line for fields in records.values() for line in fields)
    frozen = RECORDS.read_text().splitlines()
    assert set(frozen) <= set(found), "a field of level 1 is gone or another one (rule Q8)"
    if formats.LEVEL == 1:
        assert found == frozen, (
            "a build of level 1 refuses a field that it does not know (rule Q7): raise "
            "formats.LEVEL, and write the field only at that level"
        )
