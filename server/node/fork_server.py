"""The fork server: loads the modules of a node once, and forks each process of a role.

Nearly all CPU time of a start is imports, and the roles share most modules
(docs/design/0028-node-starts.md).

    supervisor ──fork──► fork server ──fork──► (ends at once) ──fork──► broker, controller, tier

    supervisor ─────────────────── the parent from then on ───────────► broker, controller, tier

The supervisor forks the fork server before it opens a file or starts a loop or a thread.  Later it
sends one message for each process, `{"role", "run"}` with the descriptor of a pipe, and receives
`{"pid"}` or `{"failed"}`.  The fork server forks twice.  The first child ends, and the kernel then
gives the second child to the supervisor, which has made itself a reaper of orphans for that moment.
So a role's process is a child of the supervisor as if it was spawned: the supervisor waits for it,
and its death ends it.

Rules
  E1  The fork server has one thread, no open file of a node, and no state but loaded modules.  With
      a second thread it forks nothing and ends: a lock that this thread held would stay locked in
      every child.
  E2  No process depends on it.  If it is missing, has ended or does not answer, the supervisor
      spawns each process with a fresh interpreter, and the processes that were forked live on.
  E3  A forked process is as a spawned one: own session, /dev/null as stdin, a pipe as stdout, the
      supervisor's stderr, no other descriptor, and `python -m pk.server ROLE --run DIR/run` as its
      command line, as far as the supervisor's own has room; empty arguments fill the rest.
  E4  A forked process never returns into the frames of the supervisor that it has inherited.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from pk.server.node import role_process
from pk.server.node.run_config import EXIT_FAILED, EXIT_OK, SUPERVISOR_PID, die_with_parent

#: How long one answer may take; the first one waits for the imports, on a machine that is busy.
ANSWER_TIMEOUT_S = 60.0
MESSAGE_BYTES_MAX = 65_536
_PR_SET_CHILD_SUBREAPER = 36
#: Libraries that start a thread when they are loaded, and the settings with which they do not (E1).
#: pk computes no linear algebra, and Arrow allocates by mimalloc.
_NO_THREADS = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
#: Fields of /proc/self/stat behind the name: where the kernel reads the command line.
_ARG_START, _ARG_END = 45, 46


class ForkServerLostError(Exception):
    """The fork server forks nothing any more: spawn the process (E2)."""


# -- the supervisor's side -------------------------------------------------------------------------


class ForkedProcess:
    """A child that was forked, with the part of asyncio's `Process` that the supervisor needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout = asyncio.StreamReader()
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._handle = os.pidfd_open(pid)
        self._loop.add_reader(self._handle, self._reap)

    async def connect(self, pipe: int) -> None:
        """Read stdout from a pipe."""
        out = os.fdopen(pipe, "rb", buffering=0)
        await self._loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(self.stdout), out)

    def _reap(self) -> None:
        self._loop.remove_reader(self._handle)
        os.close(self._handle)
        try:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        except ChildProcessError:  # the parent ignores the end of children, so the kernel forgets
            self.returncode = EXIT_FAILED
        self._ended.set_result(self.returncode)

    async def wait(self) -> int:
        """Wait for the end; return the exit code, negative = the signal that killed it."""
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended: its pid may be another's by then."""
        if self.returncode is None:
            os.kill(self.pid, number)


class ForkServer:
    """The supervisor's end of a fork server."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self._channel = channel
        self._turns = asyncio.Lock()
        self._closed = False

    @staticmethod
    def start(roles: Sequence[str]) -> ForkServer | None:
        """Fork a fork server for these roles; None = this process or system cannot have one.

        Call it before this process has anything that a child must not have (E1).
        """
        if not _can_wait() or _threads() != 1:
            return None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        supervisor = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError:  # no memory now: processes are spawned (E2)
            ours.close()
            theirs.close()
            return None
        if pid == 0:
            _never_return(lambda: _serve(theirs, supervisor, roles))
        theirs.close()
        ours.setblocking(False)
        return ForkServer(pid, ours)

    async def fork(self, role: str, run_dir: str) -> ForkedProcess:
        """Fork the process of a role.  Raises `ForkServerLostError`, and `OSError` if the process
        cannot be started now.
        """
        async with self._turns:
            reading, writing = os.pipe()
            try:
                try:
                    pid = await self._ask({"role": role, "run": run_dir}, writing)
                finally:
                    os.close(writing)
                process = _followed(pid)
            except BaseException:
                os.close(reading)
                raise
            await process.connect(reading)
            return process

    async def _ask(self, request: dict[str, str], stdout: int) -> int:
        if self._closed:
            raise ForkServerLostError("it was closed")
        if not _adopt_orphans(True):
            raise ForkServerLostError("the kernel leaves it its children")
        try:
            socket.send_fds(self._channel, [json.dumps(request).encode()], [stdout])
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                loop = asyncio.get_running_loop()
                answer = await loop.sock_recv(self._channel, MESSAGE_BYTES_MAX)
        except TimeoutError as cause:
            raise ForkServerLostError("it does not answer") from cause
        except OSError as cause:
            raise ForkServerLostError("it has ended") from cause
        except asyncio.CancelledError:  # its answer would be taken for the next one
            self.close()
            raise
        finally:
            _adopt_orphans(False)
            self._close_if_ended()
        if not answer:
            raise ForkServerLostError("it has ended")
        said = json.loads(answer)
        if "unfit" in said:
            raise ForkServerLostError(str(said["unfit"]))
        if "failed" in said:
            raise OSError(said["failed"])
        return int(said["pid"])

    def close(self) -> None:
        """End the fork server.  Processes that it forked live on; a request fails."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):  # wakes the request that waits
            self._channel.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        if not self._turns.locked():  # else that request closes it, once the loop has woken it
            self._channel.close()

    def _close_if_ended(self) -> None:
        if self._closed:
            self._channel.close()


def _can_wait() -> bool:
    """Whether this system can wait for the end of a process by a descriptor (Linux 5.3)."""
    if not hasattr(os, "pidfd_open"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def _followed(pid: int) -> ForkedProcess:
    """Return the process of a pid.  Raises `OSError` if there is no descriptor for it."""
    try:
        return ForkedProcess(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _adopt_orphans(wanted: bool) -> bool:
    """Set whether the kernel gives this process the orphans among its descendants.

    Returns False if the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)) == 0


# -- the fork server's side ------------------------------------------------------------------------


def _never_return(work: Callable[[], int]) -> NoReturn:
    """Run `work` and end this process with its exit code, whatever it raises (E4)."""
    code = EXIT_FAILED
    try:
        code = work()
    except KeyboardInterrupt:
        pass  # before it had a session of its own; the supervisor has it, too
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            # waits for threads, as an exit does
            threading._shutdown()  # type: ignore[attr-defined]
        for out in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                out.flush()
        os._exit(code)


def _serve(channel: socket.socket, supervisor: int, roles: Sequence[str]) -> int:
    os.setsid()  # Ctrl-C reaches the supervisor only
    os.environ[SUPERVISOR_PID] = str(supervisor)
    die_with_parent()
    _keep_only(channel.fileno())
    _show_command("forkserver")
    for name, value in _NO_THREADS.items():
        os.environ.setdefault(name, value)
    gc.disable()
    role_process.load(roles)
    gc.collect()
    gc.freeze()  # the collector of a child never writes to these pages, which stay shared
    gc.enable()
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES_MAX, 1)
        if not message:
            return EXIT_OK
        request, (stdout,) = json.loads(message), descriptors
        answer: dict[str, object]
        if (threads := _threads()) != 1:  # E1
            answer = {"unfit": f"it has {threads} threads"}
        else:
            try:
                answer = {"pid": _fork_twice(channel, request["role"], request["run"], stdout)}
            except OSError as cause:
                answer = {"failed": f"fork: {cause.strerror or cause}"}
        os.close(stdout)
        channel.send(json.dumps(answer).encode())


def _fork_twice(channel: socket.socket, role: str, run_dir: str, stdout: int) -> int:
    """Fork the process of a role and leave it to the supervisor; return its pid."""
    reading, writing = os.pipe()
    try:
        between = os.fork()
        if between == 0:
            _never_return(lambda: _between(channel, role, run_dir, stdout, (reading, writing)))
        os.close(writing)
        writing = -1
        pid = os.read(reading, 32)
        os.waitpid(between, 0)  # from here on the supervisor is its parent
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)
    if not pid:
        raise OSError("no process or memory for a second child")
    return int(pid)


def _between(
    channel: socket.socket, role: str, run_dir: str, stdout: int, pipe: tuple[int, int]
) -> int:
    """Fork the process of a role, say its pid, and end."""
    me = os.getpid()
    pid = os.fork()
    if pid == 0:
        _never_return(lambda: _become(channel, role, run_dir, stdout, pipe, me))
    os.write(pipe[1], str(pid).encode())
    return EXIT_OK


def _become(
    channel: socket.socket,
    role: str,
    run_dir: str,
    stdout: int,
    pipe: tuple[int, int],
    between: int,
) -> int:
    """Be the process of a role (E3)."""
    channel.close()
    for each in pipe:
        os.close(each)
    os.setsid()
    os.dup2(stdout, 1)
    os.close(stdout)
    _show_command(role, "--run", run_dir)
    while os.getppid() == between:  # it ends at once
        _wait_for_end(between)
    return role_process.run(role, run_dir)


def _wait_for_end(pid: int) -> None:
    """Wait for the end of a process, without a clock: short sleeps fail under a faked one."""
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            select.select([handle], [], [])
        finally:
            os.close(handle)


def _keep_only(descriptor: int) -> None:
    """Close all descriptors but one and stderr; stdin and stdout lead to /dev/null."""
    empty = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):
        os.dup2(empty, standard)
    for each in map(int, os.listdir("/proc/self/fd")):
        if each not in (0, 1, 2, descriptor):
            with contextlib.suppress(OSError):  # the one of the listing
                os.close(each)


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _show_command(*arguments: str) -> None:
    """Replace the command line that other programs see, as far as it has room.

    It is the memory that the kernel gave to the program's arguments; Python does not use it.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
        room = end - start
        if start and room > 1:
            shown = [sys.executable, "-m", "pk.server", *arguments]
            text = b"\0".join(os.fsencode(each) for each in shown)[: room - 1]
            ctypes.memmove(start, text.ljust(room, b"\0"), room)
