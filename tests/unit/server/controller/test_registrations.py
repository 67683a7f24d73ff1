"""Registrations that the metadata log of a controller contradicts (rule Q2)."""

from __future__ import annotations

import pytest

from pk import errors
from tests.unit.server.controller.controller_bench import Bench


def test_metadata_that_have_grown_since_they_were_restored_are_refused_too() -> None:
    """Q2: each start of a controller appends records, so the log soon ends behind the offset at
    which the broker was registered.
    """
    bench = Bench()
    bench.up(1)
    lost = bench.image.offset + 1
    for broker in (2, 3, 4):
        bench.up(broker)
    assert bench.image.offset > lost
    with pytest.raises(errors.MetadataBehind, match=f"registered at offset {lost} .* knows none"):
        bench.register(1, "again", previous_broker_epoch=lost)
    known = bench.image.brokers[1].broker_epoch
    assert bench.register(1, "again", previous_broker_epoch=known).broker_epoch > known
