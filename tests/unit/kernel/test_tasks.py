"""A `TaskRegistry` keeps the tasks of one owner: names, failures, and the end of all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from pk.tasks import TaskRegistry, awaited


async def _for_ever(ended: list[str] | None = None, name: str = "") -> None:
    try:
        await asyncio.Event().wait()
    finally:
        if ended is not None:
            ended.append(name)


async def _fail() -> None:
    raise ValueError("broken")


def test_close_ends_every_task_in_the_order_of_their_start() -> None:
    async def main() -> list[str]:
        ended: list[str] = []
        tasks = TaskRegistry()
        for name in "abcdefgh":
            tasks.spawn(_for_ever(ended, name))
        await asyncio.sleep(0)
        assert len(tasks) == 8
        await tasks.close()
        assert not tasks
        return ended

    assert asyncio.run(main()) == list("abcdefgh")


def test_a_failure_is_reported_once_and_cancellation_is_none() -> None:
    async def main() -> list[BaseException]:
        failures: list[BaseException] = []
        tasks = TaskRegistry(failures.append)
        tasks.spawn(_for_ever())
        failed = tasks.spawn(_fail())
        await asyncio.wait((failed,))
        await tasks.close()
        return failures

    (failure,) = asyncio.run(main())
    assert str(failure) == "broken"


@pytest.mark.parametrize(("told", "reports"), [(None, 1), (awaited, 0)])
def test_without_a_callback_the_loop_reports(told: Any, reports: int) -> None:
    async def main() -> int:
        heard: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context))
        tasks = TaskRegistry(told)
        tasks.spawn(_fail())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not tasks
        return len(heard)

    assert asyncio.run(main()) == reports


def test_a_name_belongs_to_one_task_until_it_ends() -> None:
    async def main() -> None:
        tasks = TaskRegistry()
        work: Coroutine[Any, Any, None] = _for_ever()
        task = tasks.spawn(asyncio.sleep(0), "a")
        assert "a" in tasks
        assert tasks.get("a") is task
        with pytest.raises(AssertionError, match="a runs already"):
            tasks.spawn(work, "a")
        work.close()
        await tasks.wait()
        assert "a" not in tasks
        assert tasks.get("a") is None

    asyncio.run(main())


def test_a_cancelled_task_gives_up_its_name_at_once() -> None:
    async def main() -> None:
        tasks = TaskRegistry()
        old = tasks.spawn(_for_ever(), "a")
        await asyncio.sleep(0)
        tasks.cancel("a")
        tasks.cancel("a")
        new = tasks.spawn(_for_ever(), "a")
        await asyncio.wait((old,))
        assert tasks.get("a") is new  # the end of the old one does not free the name
        await tasks.close()

    asyncio.run(main())


def test_waiting_is_bounded_and_cancels_nothing() -> None:
    async def main() -> None:
        tasks = TaskRegistry()
        await tasks.wait()
        task = tasks.spawn(_for_ever())
        await tasks.wait(0.001)
        assert not task.done()
        await tasks.close()

    asyncio.run(main())


def test_a_task_that_closes_its_registry_is_not_cancelled() -> None:
    async def main() -> bool:
        tasks = TaskRegistry()
        other = tasks.spawn(_for_ever())
        own = tasks.spawn(tasks.close())
        await own
        return other.cancelled()

    assert asyncio.run(main())


def test_an_ended_task_gives_up_its_name_before_the_loop_reports_its_end() -> None:
    """Its work may be started again by the code that its end wakes."""

    async def story() -> None:
        tasks = TaskRegistry()
        done: list[str] = []

        async def work(name: str) -> None:
            done.append(name)

        def follow() -> None:
            assert first.done()
            assert len(tasks) == 1, "the loop has not reported the end"
            assert "a" not in tasks
            assert tasks.get("a") is None
            tasks.spawn(work("second"), "a")

        first = tasks.spawn(work("first"), "a")
        asyncio.get_running_loop().call_soon(follow)
        await asyncio.sleep(0)
        assert "a" in tasks, "the end of the first one leaves the second one its name"
        await tasks.wait()
        assert done == ["first", "second"]

    asyncio.run(story())
