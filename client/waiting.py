"""Waiting that a signal may interrupt at any instruction.

Signal handlers run on the main thread between two instructions of Python code, and Ctrl-C raises
there.  This can happen inside `threading.Condition.__enter__`, after the acquire and before the
`with` that would release.  The lock then stays held, and the loop's thread blocks on it at the next
notification, even while closing.  A plain `Lock` has no such instruction: its methods are C.

Invariants
  W1  No exception at any instruction of the waiting thread makes `set` or a `with lock` of another
      thread block.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from pk import errors
from pk.clock import block_s, monotonic_s

P = ParamSpec("P")
T = TypeVar("T")

#: The time-out for waits without one.
FOREVER_S = 1e9
#: Another thread on the same signal may have taken it: check again after this time.
_LOOK_AGAIN_S = 1.0


class WakeupSignal:
    """One thread waits, any thread may set the signal.  A signal that is set while no thread waits
    ends the next wait.  At rest the lock is held, by no particular thread.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self, _: object = None) -> None:
        """Set the signal; as a callback of a task it is called with the task."""
        try:
            self._lock.release()
        except RuntimeError:
            pass  # it is set already

    def wait_for(self, holds: Callable[[], Any], timeout_s: float) -> Any:
        """Wait until `holds()` is true or the time is up; returns its last result."""
        deadline = monotonic_s() + timeout_s
        while not (answer := holds()):
            left = deadline - monotonic_s()
            if left <= 0:
                break
            self._lock.acquire(timeout=min(left, _LOOK_AGAIN_S))
        return answer


class OneThread:
    """Refuses a second thread while one is inside an object that only one thread may use at a time.

    The thread that is inside may enter again: a consumer's deserialiser may call the consumer.
    """

    __slots__ = ("_depth", "_inside")

    def __init__(self) -> None:
        self._inside: dict[None, threading.Thread] = {}
        self._depth = 0

    def enter(self) -> None:
        """Enter, or raise `InvalidRequest`.  `setdefault` is atomic, so only one of two threads
        enters.
        """
        me = threading.current_thread()
        inside = self._inside.setdefault(None, me)
        if inside is not me:
            raise errors.InvalidRequest(
                f"thread {me.name} calls this consumer while thread {inside.name} is in a call: "
                "a consumer is used by one thread at a time; open one for each thread, or take a "
                "lock around every call"
            )
        self._depth += 1

    def busy(self) -> bool:
        """Return whether another thread is inside."""
        inside = self._inside.get(None)
        return inside is not None and inside is not threading.current_thread()

    def leave(self) -> None:
        self._depth -= 1
        if self._depth <= 0:
            self._depth = 0
            self._inside.clear()


class _Guarded(Protocol):
    _one_thread: OneThread


G = TypeVar("G", bound=_Guarded)


def one_thread(method: Callable[Concatenate[G, P], T]) -> Callable[Concatenate[G, P], T]:
    """Wrap `method` of an object with a `_one_thread`, so that each call enters and leaves it."""

    @functools.wraps(method)
    def call(self: G, /, *arguments: P.args, **named: P.kwargs) -> T:
        guard = self._one_thread
        guard.enter()
        try:
            return method(self, *arguments, **named)
        finally:
            guard.leave()

    return call


class Monitor:
    """A lock and a condition on it.  Use `with monitor.lock:`, never `with` the condition (module
    docstring).
    """

    __slots__ = ("_condition", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._condition = threading.Condition(self.lock)

    def notify_all(self) -> None:
        """Wake all waiting threads; the caller holds the lock."""
        self._condition.notify_all()

    def wait_for(self, holds: Callable[[], Any], timeout_s: float | None = None) -> Any:
        """Wait until `holds()` is true or the time is up; returns its last result.  The caller
        holds the lock.
        """
        return self._condition.wait_for(holds, timeout_s)


class SpinLock:
    """A mutex for sections of a few instructions: `send` has one per record.

    A thread holds the lock by taking the only token out of the list.  That is a fifth faster than a
    `Lock`, whose methods parse keyword arguments.  No signal is handled between taking the token
    and the `try` that returns it, which is not so after `acquire()`, so Ctrl-C cannot leave it
    locked.  A thread that finds it locked lets the other threads run and tries again.
    """

    __slots__ = ("tokens",)

    def __init__(self) -> None:
        self.tokens: list[None] = [None]

    def __enter__(self) -> None:
        while True:
            try:
                del self.tokens[0]
            except IndexError:
                block_s(0)
            else:
                return

    def __exit__(self, *_: object) -> None:
        self.tokens.append(None)
