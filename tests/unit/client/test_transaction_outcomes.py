"""The outcome of a transaction call that arrives as the wait of its thread ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from pk.client.transaction_manager import TransactionCall
from pk.effects import Respond
from tests.unit.client.test_transaction_engine import TransactionBench

INIT, BEGIN, _, COMMIT, ABORT = TransactionCall


@pytest.fixture
def b() -> Iterator[TransactionBench]:
    made = TransactionBench()
    made.cluster.create("t", 3)
    yield made
    made.close()


@pytest.mark.parametrize("lost", [INIT, BEGIN, COMMIT, ABORT])
def test_an_outcome_that_meets_the_end_of_the_wait_is_kept(
    b: TransactionBench, lost: TransactionCall
) -> None:
    """The thread gives up in the turn of the loop in which the outcome arrives.  Its error says to
    repeat the call, which then has to succeed.
    """
    engine, perform = b.transactions, b.transactions._perform
    task: list[asyncio.Task[None]] = []

    def cancelled(effect: Any) -> None:
        perform(effect)
        if isinstance(effect, Respond) and effect.request is lost and task:
            task.pop().cancel()

    async def made(call: Any) -> None:
        if call is not lost:
            await b.call(call)
            return
        task.append(asyncio.ensure_future(b.call(call)))
        with pytest.raises(asyncio.CancelledError):
            await task[0]
        await b.call(call)

    async def work() -> None:
        engine._perform = cancelled
        await made(INIT)
        await made(BEGIN)
        await b.sends(b"x")
        await made(ABORT if lost is ABORT else COMMIT)
        await b.begun()
        await b.sends(b"y")
        await b.call(COMMIT)

    b.run(work)
    assert not task
    assert b.cluster.committed("t") == ([b"y"] if lost is ABORT else [b"x", b"y"])


def test_an_outcome_that_another_thread_got_is_not_kept(b: TransactionBench) -> None:
    perform = b.transactions._perform
    tasks: list[asyncio.Task[None]] = []

    def cancelled(effect: Any) -> None:
        perform(effect)
        if isinstance(effect, Respond) and effect.request is COMMIT and tasks:
            tasks[0].cancel()

    async def work() -> None:
        await b.begun()
        await b.sends(b"x")
        b.transactions._perform = cancelled
        tasks[:] = [asyncio.ensure_future(b.call(COMMIT)) for _ in range(2)]
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        await tasks[1]
        tasks.clear()
        await b.begun()
        await b.sends(b"y")
        await b.call(COMMIT)

    b.run(work)
    assert b.cluster.committed("t") == [b"x", b"y"]
