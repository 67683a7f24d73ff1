"""What a simulated reader may be told without anybody having to answer for it."""

from __future__ import annotations

import pytest

from pk import errors
from pk.sim.disk import SimStorage
from pk.sim.readers import _for_want_of_room


def test_only_a_full_disk_takes_a_log_from_its_readers_for_a_while() -> None:
    storage = SimStorage("n1.d1")
    storage.capacity = 1
    with pytest.raises(errors.StorageFull) as full:
        storage.replace_file("log", bytes(2))
    assert _for_want_of_room(errors.StorageFailed(full.value.message))
    assert not _for_want_of_room(full.value), "that is explained by itself"
    assert not _for_want_of_room(errors.StorageFailed("n1.d1 is offline: it failed"))
