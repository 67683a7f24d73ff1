"""Names in `topics/`, and fields of `partition.json`, that this build does not know (rule L22)."""

from __future__ import annotations

import json

import pytest

from pk import errors
from pk.log import adoption, identity, sealed
from pk.log.identity import PARTITION_FILE, partition_of
from pk.sim.disk import SimStorage
from pk.types import TopicPartition
from tests.unit.log.house import CONFIG, KEY, TP, House, append, run

FILE = f"topics/t-0/{PARTITION_FILE}"
STRANGE = (
    "copy of t-0",
    "t-0.backup",
    "future",
    "t-01",
    "-0",
    "notes-delete",
    "t-0-delete",
)
ODD = ("t", "t-", "t-x", "t-٣", "..-0", "t 1-0", "x" * 250 + "-0")


@pytest.mark.parametrize(
    ("name", "partition"),
    [
        ("t-0", TopicPartition("t", 0)),
        ("a-b.c_d-12", TopicPartition("a-b.c_d", 12)),
        ("t-0.x-delete-3", TopicPartition("t-0.x-delete", 3)),
        *((name, None) for name in (*STRANGE, *ODD)),
    ],
)  # fmt: skip
def test_the_name_of_a_partition_is_topic_and_number(
    name: str, partition: TopicPartition | None
) -> None:
    assert partition_of(name) == partition


def test_a_deleted_log_is_known_by_its_name() -> None:
    assert identity.is_pending_delete("t-0.5f0c-delete")
    assert identity.is_pending_delete("a.b-7.id-3-delete")
    assert not any(map(identity.is_pending_delete, (*STRANGE, "t-0", "t-0.-delete", ".x-delete")))


def copied(storage: SimStorage, name: str) -> None:
    """Copy the directory of t-0, as an operator or another build may."""
    storage.make_dir(f"topics/{name}")
    for each in storage.list("topics/t-0"):
        storage.replace_file(f"topics/{name}/{each}", storage.read_file(f"topics/t-0/{each}"))


async def filled(house: House) -> None:
    manager = await house.opened()
    await manager.create(TP, "tid", CONFIG)
    await append(manager, KEY, 3)
    await manager.close()


def test_other_directories_are_left_alone_and_listed() -> None:
    """A copy of t-0 took t-0 offline, and every name with the suffix -delete was removed."""

    async def main() -> None:
        house = House()
        await filled(house)
        storage = house.storages[0]
        for name in STRANGE:
            copied(storage, name)
        storage.replace_file("topics/README", b"by an operator")
        files = {name: raw for name, raw in storage.files().items() if "topics/t-0/" not in name}
        manager = await house.opened()
        log = manager.get(KEY)
        assert log is not None
        assert log.written_end == 3
        names = sorted(f"/d0/topics/{name}" for name in (*STRANGE, "README"))
        assert sorted(manager.ignored) == names
        assert await manager.discard_strays() == ([], [])
        await manager.close()
        now = storage.files()
        assert {name: now[name] for name in files if name.startswith("topics/")} == {
            name: raw for name, raw in files.items() if name.startswith("topics/")
        }
        listed = {each.name: each.status for each in adoption.survey(storage)}
        expected = dict.fromkeys((*STRANGE, "README"), adoption.IGNORED)
        assert listed == {"t-0": adoption.OK, **expected}
        ignored = next(each for each in adoption.survey(storage) if each.name == "future")
        with pytest.raises(errors.InvalidRequest, match="move it away by hand"):
            adoption.discard(storage, ignored, "id")

    run(main)


def test_a_copy_under_the_name_of_another_partition_does_not_close_the_log() -> None:
    async def main() -> None:
        house = House()
        await filled(house)
        copied(house.storages[0], "t-7")
        manager = house.manager()
        await manager.open()
        ((key, problem),) = await manager.load(lambda topic_id, tp: CONFIG)
        assert isinstance(problem, errors.LogUnidentified)
        assert key != KEY
        assert manager.get(KEY) is not None
        await manager.close()

    run(main)


def test_fields_of_another_build_are_kept_in_partition_json() -> None:
    """The checksum covers the stored bytes, so such a file is whole."""

    async def main() -> None:
        house = House()
        await filled(house)
        storage = house.storages[0]
        known = sealed.decode(storage.read_file(FILE))
        storage.replace_file(FILE, sealed.encode({**known, "directory": "d7", "n": [1]}))
        raw = storage.read_file(FILE)
        manager = await house.opened()
        assert manager.get(KEY) is not None
        await manager.close()
        assert storage.read_file(FILE) == raw
        adoption.adopt(storage, "t-0", adoption.to_adopt(storage, "t-0", "other-id"))
        found = json.loads(storage.read_file(FILE))
        assert (found["topic_id"], found["directory"], found["n"]) == ("other-id", "d7", [1])

    run(main)


@pytest.mark.parametrize("field", ["topic", "partition", "topic_id", "created"])
def test_a_whole_file_without_a_field_is_no_identity(field: str) -> None:
    known = sealed.decode(identity.encode(identity.Identity("tid", TP, "c", "g", 3)))
    del known[field]
    with pytest.raises(errors.LogUnidentified, match=field):
        identity.decode(sealed.encode(known), "partition.json")
