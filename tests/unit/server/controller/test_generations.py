"""The controller stays in the blocks of its restore generation (rule T13)."""

from __future__ import annotations

import pytest

from pk import errors, generations
from pk.server.controller import commands as c
from pk.wire import pk_pb2 as wire
from tests.unit.server.controller.controller_bench import Bench


def test_producer_ids_of_the_next_generation_are_never_handed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A restored cluster may give them already."""
    monkeypatch.setattr(generations, "PRODUCER_IDS", 1_500)
    bench = Bench()
    bench.up(1)
    epoch = bench.image.brokers[1].broker_epoch
    ask = c.AllocateProducerIds(wire.AllocateProducerIdsRequest(broker_id=1, broker_epoch=epoch))
    assert bench.do(ask).first == 0
    with pytest.raises(errors.UnsupportedFeature, match="no producer ids left"):
        bench.do(ask)
