"""Epoch files of many logs are replaced together (log/epoch_files), before their first batches."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from pk import errors
from pk.log import batch as batches
from pk.log import columns, epoch_files, epochs
from pk.log.epoch_files import epoch_file_of, replace_together
from pk.log.manager import LogManager
from pk.log.partition_log import PartitionLog
from pk.log.plan import WritePlan
from pk.types import PartitionKey, TopicPartition
from tests.unit.log.house import CONFIG, House, run

COUNT = 4
KEYS = [PartitionKey("tid", number) for number in range(COUNT)]


async def logs(house: House) -> list[PartitionLog]:
    manager: LogManager = await house.opened()
    for number in range(COUNT):
        await manager.create(TopicPartition("t", number), "tid", CONFIG)
    found = [manager.get(key) for key in KEYS]
    return [each for each in found if each is not None]


def decided(log: PartitionLog, leader_epoch: int, count: int = 1) -> WritePlan:
    for _ in range(count):
        raw = b"".join(columns.encode_lists([b"v"]))
        log.decide(batches.check(raw), raw, leader_epoch=leader_epoch, now_ms=5)
    plan = log.take_writes()
    assert plan is not None
    return plan


def replaced(house: House, of: list[PartitionLog], plans: list[WritePlan]) -> None:
    found = [epoch_file_of(log.path, plan) for log, plan in zip(of, plans, strict=True)]
    replace_together(house.storages[0], [each for each in found if each is not None])


def on_disk(house: House, log: PartitionLog) -> int:
    raw = house.storages[0].read_file(f"{log.path}/{epochs.FILE}")
    return epochs.LeaderEpochs.decode(raw).latest


@pytest.mark.parametrize("seed", range(8))
def test_the_files_are_synced_before_the_plans(seed: int) -> None:
    async def main() -> None:
        house = House()
        of = await logs(house)
        plans = [decided(log, 7) for log in of]
        replaced(house, of, plans)
        assert all(plan.epochs_synced for plan in plans)
        house.storages[0].power_loss(random.Random(seed))
        assert [on_disk(house, log) for log in of] == [7] * COUNT

    run(main)


def test_a_plan_replaces_no_file_that_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        house = House()
        of = await logs(house)
        plans = [decided(log, 7) for log in of]
        replaced(house, of, plans)
        storage, again = house.storages[0], list[str]()
        monkeypatch.setattr(storage, "replace_file", lambda path, _: again.append(path))
        for log, plan in zip(of, plans, strict=True):
            log.perform(plan)
            log.complete(plan)
        assert again == []
        assert [log.written_end for log in of] == [1] * COUNT
        plan = decided(of[0], 8)
        of[0].perform(plan)
        assert again == [f"{of[0].path}/{epochs.FILE}"]  # alone

    run(main)


def test_few_files_are_replaced_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """If one of them fails, all of them are left to their plans."""
    monkeypatch.setattr(epoch_files, "TOGETHER_MAX", 3)

    async def main() -> None:
        house = House()
        of = await logs(house)
        storage, together = house.storages[0], list[int]()
        replace_all = storage.replace_all

        def counted(files: Mapping[str, bytes]) -> None:
            together.append(len(files))
            replace_all(files)

        monkeypatch.setattr(storage, "replace_all", counted)
        plans = [decided(log, 7) for log in of]
        replaced(house, of, plans)
        assert together == [3, 1]
        assert all(plan.epochs_synced for plan in plans)

    run(main)


def test_a_log_that_is_gone_leaves_all_files_to_their_plans() -> None:
    async def main() -> None:
        house = House()
        of = await logs(house)
        plans = [decided(log, 7) for log in of]
        house.storages[0].remove_tree(of[2].path)
        replaced(house, of, plans)
        assert not any(plan.epochs_synced for plan in plans)
        for log, plan in zip(of, plans, strict=True):
            if log is of[2]:
                with pytest.raises((FileNotFoundError, errors.PkError)):
                    log.perform(plan)
            else:
                log.perform(plan)
                assert on_disk(house, log) == 7

    run(main)


def test_a_plan_that_does_not_begin_with_its_epoch_takes_no_part() -> None:
    """Records of the epoch before come first, or a repair, which writes the file itself."""

    async def main() -> None:
        house = House()
        of = await logs(house)
        for log in of:
            raw = b"".join(columns.encode_lists([b"v"]))
            log.decide(batches.check(raw), raw, leader_epoch=3, now_ms=5)
        first = [log.take_writes() for log in of]
        for log, plan in zip(of, first, strict=True):
            assert plan is not None
            log.perform(plan)
            log.complete(plan)
        same = decided(of[0], 3)  # no new epoch
        assert epoch_file_of(of[0].path, same) is None
        raw = b"".join(columns.encode_lists([b"v"]))
        of[1].decide(batches.check(raw), raw, leader_epoch=3, now_ms=5)
        later = decided(of[1], 4)
        assert epoch_file_of(of[1].path, later) is None
        of[1].perform(later)
        assert on_disk(house, of[1]) == 4

    run(main)
