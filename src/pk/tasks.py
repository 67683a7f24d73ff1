"""The background tasks of one owner.

World-generic.  The event loop keeps only a weak reference to a task.  It does not end a task with
the object that started it, and reports the exception of a task only when the task is collected.  A
`TaskRegistry` keeps its owner's tasks until they end, reports a failure at once, and cancels the
remaining tasks when the owner closes.

`asyncio.TaskGroup` does not fit: one failure ends all its siblings, and it cancels in the order of
a set, which follows memory addresses and not the seed of a simulation.

Invariants
  B1  tasks are cancelled, and waited for, in the order in which they were started
  B2  a name belongs to at most one task; a task that has ended, or is cancelled, gives up its name
      at once.  The loop reports the end later: code that runs between would take the task for
      running, and leave its work to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def awaited(failure: BaseException) -> None:
    """Use as `on_failure` if another task awaits the result and handles the error."""


class TaskRegistry:
    """The running tasks of one owner.

    on_failure: called with the exception of a failed task; cancellation is not a failure.
    None leaves the exception to the event loop's handler, unless other code retrieves it.
    """

    def __init__(self, on_failure: Callable[[BaseException], None] | None = None) -> None:
        self._on_failure = on_failure
        self._tasks: dict[asyncio.Task[Any], Hashable] = {}  #: task → its name
        self._named: dict[Hashable, asyncio.Task[Any]] = {}

    def spawn(self, work: Coroutine[Any, Any, T], name: Hashable = None) -> asyncio.Task[T]:
        """Start `work`.  `name` must be free (B2); None = the task has no name."""
        assert name is None or name not in self, f"{name} runs already"
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = name
        if name is not None:
            self._named[name] = task
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        name = self._tasks.pop(task)
        if self._named.get(name) is task:
            del self._named[name]
        if self._on_failure is not None and not task.cancelled():
            failure = task.exception()
            if failure is not None:
                self._on_failure(failure)

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(list(self._tasks))

    def __contains__(self, name: Hashable) -> bool:
        """Return whether a task of this name runs."""
        return self.get(name) is not None

    def get(self, name: Hashable) -> asyncio.Task[Any] | None:
        """Return the running task of this name."""
        task = self._named.get(name)
        return None if task is None or task.done() else task

    def cancel(self, name: Hashable) -> None:
        """Cancel the task of this name, if there is one; the name is free at once (B2)."""
        task = self._named.pop(name, None)
        if task is not None:
            task.cancel()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all tasks that run now have ended, or for `timeout_s`."""
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=timeout_s)

    async def close(self) -> None:
        """Cancel every task and wait until all have ended; the calling task is left out."""
        own = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not own]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
