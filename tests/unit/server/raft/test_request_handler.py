"""raft/request_handler A2: the snapshot that a leader names to a voter that is behind, once that
snapshot cannot be sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pk import errors
from pk.server.metadata.records import record_of
from pk.server.metadata.snapshot_generator import SnapshotGenerator
from pk.server.raft.recovery import SnapshotRules
from pk.server.raft.snapshot_id import file_name
from pk.wire import pk_pb2 as wire
from tests.unit.server.raft.test_log import WORLDS, Disk


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while WORLDS:
        WORLDS.pop().close()


def test_a_snapshot_that_is_found_damaged_is_not_named_again() -> None:
    """No record is appended meanwhile; an append would have shown the machine the present
    snapshots.
    """
    disk = Disk()
    log = disk.open()
    generator = SnapshotGenerator(
        log, log._open_reader, log._files, log._clock, SnapshotRules(), lambda event, **facts: None
    )
    for name in ("a", "b"):
        log.append([record_of(wire.TopicRecord(name=name, topic_id=name))], 5)
        disk.world.run(log.commit())
        disk.world.run(generator.make())
    older, newest = log._files.kept
    assert log.log_start == older.end
    disk.storage.rot(file_name(newest), 60, 0)
    behind: Any = wire.QuorumFetchRequest(
        sender=wire.QuorumVoter(node_id=2, directory_id="e"), epoch=log.epoch, offset=1,
        last_epoch=log.epoch, number=1,
    )  # fmt: skip
    handlers = log.handlers()

    async def ask(name: str, request: Any) -> Any:
        frame: Any = None
        message, (payload,) = await handlers[name](request, frame)  # type: ignore[misc]
        return message, payload

    async def story() -> None:
        named, _ = await ask("quorum_fetch", behind)
        assert (named.snapshot_end, named.snapshot_epoch) == (newest.end, newest.epoch)
        asked = SimpleNamespace(end=newest.end, epoch=newest.epoch, position=0, max_bytes=100)
        with pytest.raises(errors.SnapshotNotFound):
            await ask("fetch_snapshot", asked)
        again, records = await ask("quorum_fetch", behind)
        assert (again.snapshot_end, again.offset) == (0, behind.offset), "no file was dropped yet"
        assert records

    disk.world.run(story())
