"""The losses that a simulated reader or producer may meet without a violation."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest

from pk import errors
from pk.sim.checkers import ReaderCheck, ReadRow, Violation
from pk.sim.disk import SimStorage
from pk.sim.options import TopicPlan
from pk.sim.oracle import Oracle, Outcome, RecordId
from pk.sim.readers import SimConsumer, _out_of_resources
from pk.sim.workload import SimProducer
from pk.types import TopicPartition


def test_only_a_full_disk_and_a_lack_of_descriptors_take_a_log_for_a_while() -> None:
    storage = SimStorage("n1.d1")
    storage.capacity = 1
    with pytest.raises(errors.StorageFull) as full:
        storage.replace_file("log", bytes(2))
    assert _out_of_resources(errors.StorageFailed(full.value.message))
    assert not _out_of_resources(full.value), "that is explained by itself"
    assert not _out_of_resources(errors.StorageFailed("n1.d1 is offline: it failed"))
    wanting = "n4.d1: read topics/t-0/00000000000000000039.log: Too many open files"
    assert _out_of_resources(errors.StorageFailed(wanting))
    assert not _out_of_resources(errors.StorageFull(wanting)), "that is explained by itself"


PLACE = TopicPartition("t", 0)
RANGE = {"offset": "6", "next_offset": "9"}


def told_of(loss: errors.DataLoss, position: int, *, rotten: bool, only: bool) -> list[str]:
    """Return the violations of a run whose consumer is given `loss` behind row 5."""
    oracle = Oracle([TopicPlan("t", 1, {})])
    oracle.created("t", "id", 1)
    if rotten:
        oracle.rotten["id", 0] = None
    if only:
        oracle.stranded["id", 0] = None
    check = ReaderCheck("c", oracle)
    check.took("t", 0, [ReadRow(5, RecordId("p", 1), 0)], 0)
    troubles: list[str] = []
    consumer = SimpleNamespace(check=check, _oracle=oracle, _tell=id, _trouble=troubles.append)
    SimConsumer._lost(cast("SimConsumer", consumer), PLACE, loss, position)
    check.took("t", 0, [ReadRow(9, RecordId("p", 2), 0)], 0)  # behind the range
    with pytest.raises(Violation, match="a gap"):
        check.took("t", 0, [ReadRow(11, RecordId("p", 3), 0)], 0)
    return troubles


def test_a_lost_range_is_passed_where_the_promise_permits_the_loss() -> None:
    assert told_of(errors.DataLoss("x", **RANGE), 6, rotten=True, only=True) == []


@pytest.mark.parametrize(
    ("position", "rotten", "only", "more"),
    [(6, False, True, {}), (6, True, False, {}), (9, True, True, {}), (5, True, True, {}),
     (6, True, True, {"partition": "0"})],
    ids=["nothing rotted", "others have it", "behind it", "before it", "of a table"],
)  # fmt: skip
def test_a_loss_that_nothing_explains_is_a_violation(
    position: int, rotten: bool, only: bool, more: dict[str, str]
) -> None:
    loss = errors.DataLoss("x", **RANGE, **more)
    (words,) = told_of(loss, position, rotten=rotten, only=only)
    assert words.startswith("V5: c at t-0")


def acknowledged(oracle: Oracle, number: int, *, ordered: bool = False) -> bool:
    """Return whether an acknowledgement by the leader alone counts as a promise to keep the record.

    An ordered producer has acks=all.
    """
    sent = oracle.send(RecordId("p", number), "t", 0, ordered=ordered)
    producer = SimpleNamespace(_ordered=ordered, _oracle=oracle, _replicated={"t": False})
    told = SimProducer._told(cast("SimProducer", producer), sent, oracle.topics["t"].topic_id)
    told(SimpleNamespace(partition=0, offset=number), None)
    return sent.outcome is Outcome.ACKNOWLEDGED


def test_a_move_takes_the_promise_of_acks_1_from_a_topic_of_one_replica() -> None:
    oracle = Oracle([TopicPlan("t", 1, {})])
    oracle.created("t", "id", 1)
    assert acknowledged(oracle, 1)
    oracle.moving("t")
    assert not acknowledged(oracle, 2)
    assert acknowledged(oracle, 3, ordered=True)
    oracle.created("t", "id of its next life", 1)
    assert acknowledged(oracle, 4)


@pytest.mark.parametrize("lossy", [True, False], ids=["records were lost", "nothing was lost"])
def test_a_producer_that_ended_while_it_waited_is_over(lossy: bool) -> None:
    """`open` raises the fatal error: without a look at it the producer would wait for ever, and
    the run would go on without it."""
    oracle = SimpleNamespace(lossy=lossy, ahead=False, topics={"t": SimpleNamespace(life=1)})
    fatal = errors.OutOfOrderSequence("acknowledged records are no longer in the log")

    async def open_topic(topic: str, timeout_ms: int) -> None:
        raise fatal

    async def sleep_ms(ms: float) -> None:
        await asyncio.sleep(0)

    plan = SimpleNamespace(pace_ms=(1, 2), topics=[SimpleNamespace(name="t")])
    troubles: list[str] = []
    producer = SimpleNamespace(
        name="p", over=False, engine=SimpleNamespace(open=open_topic, fatal=fatal),
        _rng=random.Random(1), _options=plan, _oracle=oracle, _ordered=True,
        _trouble=troubles.append, _world=SimpleNamespace(clock=SimpleNamespace(sleep_ms=sleep_ms)),
    )  # fmt: skip
    producer._ended = partial(SimProducer._ended, cast("SimProducer", producer))
    asyncio.run(asyncio.wait_for(SimProducer._run(cast("SimProducer", producer)), 10))
    assert producer.over
    assert len(troubles) == (0 if lossy else 1)
