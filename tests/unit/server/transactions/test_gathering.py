"""Questions to one peer travel together, one request at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

import pytest

from pk import errors
from pk.server.transactions.gathering import GatheredCalls
from pk.tasks import awaited


class Peer:
    """Answers each question with its double, once `open` is set."""

    def __init__(self) -> None:
        self.requests: list[list[int]] = []
        self.open = asyncio.Event()
        self.failures: list[errors.PkError] = []  #: of the next requests
        self.running = 0

    async def send(self, key: str, questions: Sequence[int]) -> list[int | errors.PkError]:
        self.running += 1
        assert self.running == 1, "one request at a time"
        self.requests.append(list(questions))
        await self.open.wait()
        self.running -= 1
        if self.failures:
            raise self.failures.pop(0)
        return [errors.InvalidRequest("odd") if q % 2 else 2 * q for q in questions]


def gathered(
    peer: Peer, request_max: int = 3, waiting_max: int = 5
) -> GatheredCalls[str, int, int]:
    return GatheredCalls(peer.send, awaited, request_max=request_max, waiting_max=waiting_max)


async def outcome(asked: Awaitable[int]) -> object:
    try:
        return await asked
    except errors.PkError as error:
        return type(error)


def test_questions_that_come_meanwhile_travel_together() -> None:
    async def story() -> None:
        peer = Peer()
        calls = gathered(peer)
        first = asyncio.ensure_future(outcome(calls.ask("a", 0)))
        await asyncio.sleep(0)
        rest = [asyncio.ensure_future(outcome(calls.ask("a", n))) for n in (1, 2, 4, 6)]
        await asyncio.sleep(0)
        peer.open.set()
        assert await first == 0
        assert await asyncio.gather(*rest) == [errors.InvalidRequest, 4, 8, 12]
        assert peer.requests == [[0], [1, 2, 4], [6]]

    asyncio.run(story())


def test_a_failed_request_fails_its_questions_only() -> None:
    async def story() -> None:
        peer = Peer()
        calls = gathered(peer, request_max=1)
        peer.failures = [errors.BrokerUnavailable("gone")]
        first = asyncio.ensure_future(outcome(calls.ask("a", 0)))
        second = asyncio.ensure_future(outcome(calls.ask("a", 2)))
        await asyncio.sleep(0)
        peer.open.set()
        assert await first is errors.BrokerUnavailable
        assert await second == 4

    asyncio.run(story())


def test_too_many_questions_are_refused_and_a_close_fails_the_rest() -> None:
    async def story() -> None:
        peer = Peer()
        calls = gathered(peer)
        waiting = [asyncio.ensure_future(outcome(calls.ask("a", 0)))]
        await asyncio.sleep(0)
        waiting += [asyncio.ensure_future(outcome(calls.ask("a", 2))) for _ in range(5)]
        await asyncio.sleep(0)
        with pytest.raises(errors.ThrottledError, match="5 questions wait"):
            calls.ask("a", 2)
        await calls.close()
        assert set(await asyncio.gather(*waiting)) == {errors.BrokerUnavailable}

    asyncio.run(story())


def test_a_question_that_an_answer_causes_is_sent() -> None:
    """A caller that has its answer asks before the loop reports the end of the request."""

    async def story() -> None:
        peer = Peer()
        peer.open.set()
        calls = gathered(peer)
        for number in range(0, 8, 2):
            async with asyncio.timeout(5):
                assert await calls.ask("a", number) == 2 * number
        assert peer.requests == [[0], [2], [4], [6]]

    asyncio.run(story())
