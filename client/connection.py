"""The thread under the synchronous clients: one event loop per process, shared by all clients (rule
P3).

An open client holds the loop; the thread ends with the last client.  Forking a process that has
open clients is not supported.  The child has no loop thread, and calls of the inherited clients
raise an error.  Open clients in the child, or use spawn.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import logging
import os
import random
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from pk import errors, event_loops
from pk.client.waiting import FOREVER_S, WakeupSignal
from pk.clock import SystemClock
from pk.world import World

T = TypeVar("T")

_log = logging.getLogger("pk.client")
#: Logs a line that the application's owner should read.
warn: Callable[[str], None] = _log.warning

#: Number of threads that compress; all producers of the process share them.
ENCODERS = max(1, min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2))
_JOIN_S = 5.0
#: How long a call may last beyond its time-out.  First number: the call reports the cause itself.
#: Second number: the loop is busy, with a delivery callback or on a machine under load.
_LATE_S = 0.25
_BUSY_S = 5.0
#: How long closing a client waits for its streams to end.
_CLOSE_S = 5.0
_FAREWELL_S = 2.5


class LoopThread:
    """The event loop, its thread, and the world that its clients use."""

    def __init__(self) -> None:
        from pk.wire.socket_network import PkNetwork  # a simulated client needs no sockets

        self.pid = os.getpid()
        self.users = 0
        self.loop = event_loops.EventLoop()
        self.world = World(
            clock=SystemClock(),
            network=PkNetwork(),
            rng=random.Random(),
            new_id=lambda: str(uuid.UUID(bytes=os.urandom(16), version=4)),
        )
        self._encoder: concurrent.futures.ThreadPoolExecutor | None = None
        self.thread = threading.Thread(target=self._run, name="pk-client", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            # Closed streams first send what is queued.  Any other task that is left has no owner.
            for grace_s in (_FAREWELL_S, 1.0):
                tasks = asyncio.all_tasks(self.loop)
                if tasks:
                    self.loop.run_until_complete(asyncio.wait(tasks, timeout=grace_s))
                for task in asyncio.all_tasks(self.loop):
                    task.cancel()
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()

    def check_process(self) -> None:
        """Raise `UnsupportedFeature` in a forked child of the process that opened the client."""
        if self.pid != os.getpid():
            raise errors.UnsupportedFeature(
                "this client was opened before a fork; open it in the child process"
            )

    def must_not_block(self) -> None:
        """Refuse to wait on the loop's own thread: the wait would never end."""
        if threading.current_thread() is self.thread:
            raise errors.InvalidRequest(
                "a delivery callback must not block: it runs on the sending thread"
            )

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine on the loop and wait for it; Ctrl-C cancels it.

        Raises what `bounded` raises, and `ClosedError` if the client was closed meanwhile.
        """
        return self._wait_for(bounded(work, timeout_s), work, timeout_s)

    def finish(self, work: Coroutine[Any, Any, None], timeout_s: float = _CLOSE_S) -> None:
        """Run the closing work of a client.  Work that is not done in time continues in the
        background, and this is logged.  The client counts as closed in either case.
        """
        try:
            self._wait_for(bounded(work, None), work, timeout_s, abandon=False)
        except errors.RequestTimedOut:
            _log.warning("closing a client takes longer than %g s; it goes on", timeout_s)
        except errors.ClosedError:
            pass  # the loop has ended, and its streams with it

    def _wait_for(
        self,
        runs: Coroutine[Any, Any, T],
        work: Coroutine[Any, Any, T],
        timeout_s: float | None,
        *,
        abandon: bool = True,
    ) -> T:
        def drop() -> None:
            runs.close()
            work.close()

        try:
            self.check_process()
            self.must_not_block()
        except errors.PkError:
            drop()
            raise
        wakeup = WakeupSignal()
        begun: list[asyncio.Task[T]] = []
        given_up = False

        def begin() -> None:
            if given_up:
                drop()
                return
            task = self.loop.create_task(runs)
            task.add_done_callback(wakeup.set)
            begun.append(task)

        def ended() -> bool:
            return (bool(begun) and begun[0].done()) or not self.thread.is_alive()

        try:
            self.loop.call_soon_threadsafe(begin)
        except RuntimeError:  # the last client, in another thread, has ended the loop
            drop()
            raise errors.ClosedError("the client was closed meanwhile") from None
        patience = FOREVER_S if timeout_s is None else timeout_s + _BUSY_S
        try:
            if not wakeup.wait_for(ended, patience):
                raise errors.RequestTimedOut(
                    f"not within {timeout_s:g} s: the client's own thread is busy"
                )
        except BaseException as cause:  # mostly Ctrl-C
            if abandon or not isinstance(cause, errors.RequestTimedOut):
                given_up = True
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self.loop.call_soon_threadsafe(lambda: begun and begun[0].cancel())
            raise
        if not begun:
            drop()
        if not begun or not begun[0].done() or begun[0].cancelled():
            raise errors.ClosedError("the client was closed meanwhile")
        return begun[0].result()

    async def compute(self, work: Callable[[], Any]) -> Any:
        """Run CPU-bound work on other threads, at most ENCODERS at a time."""
        try:
            if self._encoder is None:
                self._encoder = concurrent.futures.ThreadPoolExecutor(ENCODERS, "pk-encode")
            computed = self.loop.run_in_executor(self._encoder, work)
        except RuntimeError:  # the interpreter ends, and no executor takes work any more
            return work()
        return await computed

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        if threading.current_thread() is not self.thread:
            self.thread.join(_JOIN_S)
        if self._encoder is not None:
            self._encoder.shutdown(wait=False)


_lock = threading.Lock()
_shared: LoopThread | None = None
_open: dict[int, Callable[[], None]] = {}
_at_fork: dict[int, Callable[[], None]] = {}


def acquire() -> LoopThread:
    """Return the shared loop thread, started if necessary.  Call `release` once for it."""
    global _shared
    with _lock:
        if _shared is None or _shared.pid != os.getpid() or not _shared.thread.is_alive():
            _shared = LoopThread()
        _shared.users += 1
        return _shared


def release(held: LoopThread) -> None:
    """Release the loop.  The last user ends it, after streams had a moment to close."""
    global _shared
    with _lock:
        held.users -= 1
        if held.users or held.pid != os.getpid():
            return
        if _shared is held:
            _shared = None
    held.stop()


@contextlib.contextmanager
def opening() -> Iterator[LoopThread]:
    """Hold the shared loop thread for a client; released again if the client cannot be opened."""
    held = acquire()
    try:
        yield held
    except BaseException:
        release(held)
        raise


def end(client: object, held: LoopThread, work: Coroutine[Any, Any, None]) -> None:
    """Run the closing work of a client, and release the loop."""
    _open.pop(id(client), None)
    _at_fork.pop(id(client), None)
    try:
        held.finish(work)
    finally:
        release(held)


def close_at_exit(
    client: object, close: Callable[[], None], at_fork: Callable[[], None] | None = None
) -> None:
    """Register a client to be closed when the interpreter ends.  `at_fork` is called in a forked
    child of this process, where the client no longer works.
    """
    _open[id(client)] = close
    if at_fork is not None:
        _at_fork[id(client)] = at_fork


@atexit.register
def _close_all() -> None:
    for close in list(_open.values()):
        try:
            close()
        except Exception:  # the process ends anyway
            continue


def _forked() -> None:
    """Reset the module's state in a forked child: the parent closes the clients, and the thread
    that may have held the lock does not exist here.
    """
    global _lock, _shared
    _lock, _shared = threading.Lock(), None
    for call in _at_fork.values():
        call()
    _at_fork.clear()
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


async def bounded(work: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
    """Bound a public call: it ends soon after its time-out, and with a typed error.

    `work` keeps its own deadlines, and its errors name the cause more exactly; this is for cases
    that `work` misses.  Raises `RequestTimedOut`; `InternalError` for any exception that is not an
    error of pk.
    """
    late_s = None if timeout_s is None else timeout_s + _LATE_S
    try:
        async with asyncio.timeout(late_s):
            return await work
    except errors.PkError:
        raise
    except TimeoutError as cause:
        limit = "" if timeout_s is None else f" within {timeout_s:g} s"
        raise errors.RequestTimedOut(f"no answer{limit}") from cause
    except Exception as bug:
        raise errors.InternalError(repr(bug)) from bug
