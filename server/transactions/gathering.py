"""Gathers questions to one peer: one request is in flight, and the next one takes what has come.

World-generic.

Invariants
  E1  At most one request for a key is in flight.
  E2  At most `waiting_max` questions wait for a key, and a request has at most `request_max`.
  E3  Every question is answered once: with its answer, with its refusal, or with the failure of its
      request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Generic, TypeVar

from pk import errors
from pk.tasks import TaskRegistry

K = TypeVar("K", bound=Hashable)
Q = TypeVar("Q")
A = TypeVar("A")


class GatheredCalls(Generic[K, Q, A]):
    """Questions by key.

    `send`: carries the questions of one request to the key's peer.  It returns an answer or a
    refusal for each question, in order, or raises what fails the whole request.
    """

    def __init__(
        self,
        send: Callable[[K, Sequence[Q]], Awaitable[Sequence[A | errors.PkError]]],
        on_bug: Callable[[BaseException], None],
        *,
        request_max: int,
        waiting_max: int,
    ) -> None:
        self._send = send
        self._request_max = request_max
        self._waiting_max = waiting_max
        self._waiting: dict[K, list[tuple[Q, asyncio.Future[A]]]] = {}
        self._tasks = TaskRegistry(on_bug)

    async def close(self) -> None:
        """Fail every question that waits."""
        await self._tasks.close()
        every, self._waiting = self._waiting, {}
        for waiting in every.values():
            _fail(waiting, errors.BrokerUnavailable("this broker is shutting down"))

    def ask(self, key: K, question: Q) -> Awaitable[A]:
        """Return the answer to one question.  Raises `ThrottledError` at once (E2)."""
        waiting = self._waiting.setdefault(key, [])
        if len(waiting) >= self._waiting_max:
            raise errors.ThrottledError(f"{self._waiting_max} questions wait for {key}")
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        waiting.append((question, future))
        if key not in self._tasks:
            self._tasks.spawn(self._run(key), key)
        return future

    async def _run(self, key: K) -> None:
        while waiting := self._waiting.pop(key, None):
            now, later = waiting[: self._request_max], waiting[self._request_max :]
            if later:
                self._waiting[key] = later
            try:
                answers = await self._send(key, [question for question, _ in now])
                if len(answers) != len(now):
                    raise errors.InternalError(f"{len(answers)} answers to {len(now)} questions")
            except errors.PkError as failure:
                _fail(now, failure)
                continue
            except BaseException:
                _fail(now, errors.BrokerUnavailable("the request was given up"))
                raise
            for (_, future), answer in zip(now, answers, strict=True):
                if future.done():
                    continue
                if isinstance(answer, errors.PkError):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)


def _fail(waiting: Sequence[tuple[object, asyncio.Future[A]]], failure: errors.PkError) -> None:
    for _, future in waiting:
        if not future.done():
            future.set_exception(failure)
            future.exception()  # unless the caller was cancelled
