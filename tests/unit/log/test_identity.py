"""The identity of a log directory: its two copies, and what happens to a log if both copies, or the
log itself, are missing (rule L15).
"""

from __future__ import annotations

import pytest

from pk import errors
from pk.log import adoption, identity
from pk.log.creation import NewPartition
from pk.log.identity import ADOPTED, DISCARDED, IDENTITIES, PARTITION_FILE, Identity, Known
from pk.log.manager import LogManager
from pk.log.partition_log import PartitionLog
from pk.types import TopicPartition
from tests.unit.log.house import CONFIG, KEY, TP, House, append, run

ONE = Identity("tid", TP, "c", "genesis", 7)
NEW = NewPartition(TP, "tid", CONFIG, genesis="genesis", created=7)
FILE = f"topics/t-0/{PARTITION_FILE}"


async def filled(house: House) -> LogManager:
    manager = await house.opened()
    (log,) = await manager.create_all([NEW])
    assert isinstance(log, PartitionLog)
    await append(manager, KEY, 20)
    return manager


async def begun(house: House) -> tuple[LogManager, list[errors.PkError]]:
    """Open the next log manager; return it and the logs that it could not open."""
    manager = house.manager()
    await manager.open()
    problems = await manager.load(lambda topic_id, tp: CONFIG)
    return manager, [error for _, error in problems if isinstance(error, errors.PkError)]


@pytest.mark.parametrize("bit", range(8))
def test_every_flipped_bit_of_an_identity_is_noticed(bit: int) -> None:
    raw = identity.encode(ONE)
    assert identity.decode(raw, "x") == ONE
    for position in range(len(raw)):
        damaged = bytearray(raw)
        damaged[position] ^= 1 << bit
        with pytest.raises(errors.LogUnidentified):
            identity.decode(bytes(damaged), "x")
    for size in range(len(raw)):
        with pytest.raises(errors.LogUnidentified):
            identity.decode(raw[:size], "x")


def test_the_second_copy_reads_what_it_wrote() -> None:
    known = {
        "t-0": Known(ONE),
        "--1": Known(Identity("", TopicPartition("-", 1)), DISCARDED),
        "a.b-c-12": Known(Identity("x", TopicPartition("a.b-c", 12), "c"), ADOPTED),
    }
    assert identity.parse(identity.lines_of(known.values())) == known


@pytest.mark.parametrize("loss", ["missing", "empty", "rotten"])
def test_an_identity_is_restored_from_the_second_copy(loss: str) -> None:
    async def main() -> None:
        house = House()
        (storage,) = house.storages
        await filled(house)  # and dies: no checkpoint of offsets was written
        storage.crash()
        raw = storage.read_file(FILE)
        storage.remove(FILE) if loss == "missing" else storage.replace_file(
            FILE, b"" if loss == "empty" else raw.replace(b"tid", b"tie")
        )
        manager, problems = await begun(house)
        assert problems == []
        assert list(manager.restored) == ["/d0/topics/t-0"]
        assert manager.logs()[KEY].log_end == 20
        assert storage.read_file(FILE) == raw
        await manager.close()

    run(main)


@pytest.mark.parametrize("loss", ["missing", "rotten"])
def test_without_a_second_copy_nothing_is_touched(loss: str) -> None:
    async def main() -> None:
        house = House()
        (storage,) = house.storages
        await (await filled(house)).close()
        storage.remove(IDENTITIES)
        storage.remove(FILE) if loss == "missing" else storage.replace_file(FILE, b"{}")
        before = {name: raw for name, raw in storage.files().items() if "/t-0/" in name}
        manager, problems = await begun(house)
        assert [type(each) for each in problems] == [errors.LogUnidentified]
        for again in (False, True):
            (outcome,) = await manager.create_all([NEW._replace(again=again)])
            assert isinstance(outcome, errors.LogUnidentified)
            assert "pk log adopt /d0 t-0 --topic-id tid" in outcome.message
        manager.gone = lambda found: True
        assert await manager.discard_strays() == ([], [])
        await manager.set_aside(TP, "tid", 0)
        await house.clock.advance(120_000)
        after = {name: raw for name, raw in storage.files().items() if "/t-0/" in name}
        assert after == before
        await manager.close()

    run(main)


def test_a_directory_of_another_identity_is_in_the_way_unless_its_topic_was_deleted() -> None:
    async def main() -> None:
        for gone in (False, True):
            house = House()
            (storage,) = house.storages
            await (await filled(house)).close()
            manager = house.manager()
            await manager.open()
            await manager.load(lambda topic_id, tp: None)  # the metadata do not know it
            manager.gone = lambda found, gone=gone: gone  # type: ignore[misc]
            (outcome,) = await manager.create_all([NEW._replace(topic_id="other")])
            assert isinstance(outcome, PartitionLog if gone else errors.LogUnidentified)
            assert ("t-0" in storage.list("topics")) is True
            kept = f"topics/t-0/{'0' * 20}.log"
            assert bool(storage.files()[kept]) != gone
            await manager.close()

    run(main)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("disks", [1, 2])
def test_a_missing_log_is_not_begun_empty(disks: int, checkpointed: bool) -> None:
    """The second copy names the log; if that copy is lost too, a checkpoint of offsets names it."""

    async def main() -> None:
        house = House(disks=disks)
        manager = await filled(house)
        storage = manager.disk_of(KEY).storage
        if checkpointed:
            await manager.close()
            storage.remove(IDENTITIES)
        else:
            for each in house.storages:
                each.crash()
        storage.remove_tree("topics/t-0")
        for _ in range(2):
            again, problems = await begun(house)
            assert problems == []
            (outcome,) = await again.create_all([NEW])
            assert isinstance(outcome, errors.LogMissing)
            assert "pk log discard" in outcome.message
            assert not any("t-0" in each.list("topics") for each in house.storages)
            await again.close()
        # Its replica was given up, because other replicas exist: it is created again, here or
        # elsewhere.
        again, _ = await begun(house)
        await again.set_aside(TP, "tid", 0)
        (outcome,) = await again.create_all([NEW])
        assert isinstance(outcome, PartitionLog)
        assert outcome.log_end == 0
        await again.close()

    run(main)


def test_a_deleted_log_is_not_a_missing_one() -> None:
    async def main() -> None:
        house = House()
        manager = await filled(house)
        await manager.delete(KEY)
        (outcome,) = await manager.create_all([NEW])
        assert isinstance(outcome, PartitionLog)
        assert outcome.log_end == 0
        await manager.close()

    run(main)


def test_what_an_operator_adopts_or_discards_is_told_to_the_cluster_first() -> None:
    async def main() -> None:
        house = House()
        (storage,) = house.storages
        await (await filled(house)).close()
        storage.remove(IDENTITIES)
        storage.remove(FILE)
        with pytest.raises(errors.InvalidOption, match="--topic-id"):
            adoption.to_adopt(storage, "t-0", "")
        adoption.adopt(storage, "t-0", adoption.to_adopt(storage, "t-0", "tid"))
        for _ in range(2):  # as long as the cluster does not know
            manager, problems = await begun(house)
            assert (problems, list(manager.operator_marked)) == ([], [KEY])
            assert manager.logs()[KEY].log_end == 20
            await manager.close()
        manager, _ = await begun(house)
        await manager.clear_operator_mark(NEW)
        await manager.close()
        assert identity.read(storage, "topics/t-0") == ONE
        manager, _ = await begun(house)
        assert not manager.operator_marked
        await manager.close()
        # And now it is given up.
        adoption.discard(storage, adoption.of_name(storage, "t-0", ""), "id")
        assert storage.list("topics") == ["t-0.id-delete"]
        for _ in range(2):
            manager, problems = await begun(house)
            (outcome,) = await manager.create_all([NEW])
            assert isinstance(outcome, errors.LogMissing)
            assert (problems, list(manager.operator_marked)) == ([], [KEY])
            await manager.close()
        manager, _ = await begun(house)
        await manager.create_all([NEW])
        await manager.clear_operator_mark(NEW)
        (outcome,) = await manager.create_all([NEW])
        assert isinstance(outcome, PartitionLog)
        assert (outcome.log_end, list(manager.operator_marked)) == (0, [])
        await manager.close()

    run(main)
