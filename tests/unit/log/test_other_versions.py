"""A data directory with one file of another version: refused by name, nothing is changed (L21)."""

from __future__ import annotations

import pytest

from pk import errors
from pk.log import aborted, checkpoints, directory, epochs, index, last_run, producers
from pk.log.identity import IDENTITIES
from pk.log.last_run import LastRun
from tests.unit.log.house import CONFIG, KEY, TP, House, append, run

#: Constants with a version, of the codecs of each file.
CODECS = {
    ".index": (index, "VERSION"),
    ".timeindex": (index, "VERSION"),
    ".txnindex": (aborted, "VERSION"),
    ".snapshot": (producers, "VERSION"),
    epochs.FILE: (checkpoints, "VERSION"),
}


async def filled(house: House) -> None:
    manager = await house.opened()
    await manager.create(TP, "tid", CONFIG)
    await append(manager, KEY, 40)
    manager.set_high_watermark(KEY, 20)
    directory.note_run(house.storages[0], LastRun(1, 1, "boot-1"))
    await manager.close()


@pytest.mark.parametrize("name", [*directory.OFFSETS, IDENTITIES, last_run.FILE])
def test_a_checkpoint_of_another_version_stops_the_broker(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read as empty, a log start would bring deleted records back, and an identity would not vouch
    for its log any more (rules L21, L15)."""

    async def main() -> None:
        house = House()
        await filled(house)
        storage = house.storages[0]
        lines = checkpoints.decode(name, storage.read_file(name))
        with monkeypatch.context() as newer:
            newer.setattr(checkpoints, "VERSION", checkpoints.VERSION + 1)
            storage.replace_file(name, checkpoints.encode(name, lines))
        before = storage.files()
        manager = house.manager()
        with pytest.raises(errors.NewerFormat, match=f"^/d0: {name} has version 1"):
            await manager.open()
        assert storage.files() == before
        await house.manager(build="b2").close()

    run(main)


@pytest.mark.parametrize("suffix", CODECS)
def test_a_file_of_a_log_of_another_version_keeps_the_log_closed(
    suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken for damage, it would be rebuilt over what the other build wrote."""

    async def main() -> None:
        house = House()
        module, constant = CODECS[suffix]
        with monkeypatch.context() as newer:
            newer.setattr(module, constant, getattr(module, constant) + 1)
            if suffix == epochs.FILE:
                newer.setattr(directory, "write_offsets", lambda *_: None)
                newer.setattr(directory.identity, "write_all", lambda *_: None)
            await filled(house)
        storage = house.storages[0]
        if suffix == epochs.FILE:
            storage.remove(last_run.FILE)
        files = [name for name in storage.files() if name.startswith("topics/")]
        assert any(name.endswith(suffix) for name in files)
        before = {name: storage.peek(name) for name in files}
        manager = house.manager()
        await manager.open()
        ((key, problem),) = await manager.load(lambda topic_id, tp: CONFIG)
        assert isinstance(problem, errors.NewerFormat)
        assert problem.message.startswith("/d0/topics/t-0: ")
        if suffix in (".index", ".txnindex", ".snapshot"):
            assert f"{suffix}: " in problem.message, "it names the file"
        assert key == KEY
        await manager.close()
        assert {name: storage.peek(name) for name in files} == before

    run(main)
