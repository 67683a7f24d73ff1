"""Registrations that the metadata log contradicts, and the end of a fence (rule Q2)."""

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


def test_unfenced_only_when_the_broker_knows_of_its_fence() -> None:
    """Rule Q2: until then it may coordinate what another broker leads by now."""
    bench = Bench()
    bench.up(1, 2)
    bench.fence(1)
    fenced = bench.image.offset
    assert bench.image.brokers[1].changed_offset == fenced
    bench.register(1, live=True)
    reply = bench.beat(1, metadata_offset=fenced - 1)
    assert (reply.fenced, reply.caught_up) == (True, True)
    assert not bench.beat(1, metadata_offset=fenced).fenced
