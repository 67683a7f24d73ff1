"""The supervisor: starts, restarts and drains the child processes of one node (rule P1).

It holds no data and speaks no protocol.  Its children die with it.

    fork server (node/fork_server)
    prepare ──► start controller, broker, tier ──► all ready ──► one ready line ──► watch
    after the ready line: the runner of maintenance schedules (maintenance_runner)
    a child dies: before the ready line its cause ends the start (a typed error).  Afterwards it is
    started again after 50 ms … 5 s with jitter; a child that lived 10 s begins with the short wait
    SIGTERM, Ctrl-C: the runner stops, broker and tier drain, then the controller; a second Ctrl-C
    kills

Rules
  O1  A node has one supervisor, which holds the lock of DIR/run while it lives.
  O2  Settings reach children only through DIR/run/config.json.
      The runner is a client of this node: it gets the broker's address, as any client does.
  O3  Before the ready line an error that the operator must mend ends the start.  Other deaths of
      children are retried a few times.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pk import errors, tracing
from pk.backoff import Backoff, equal_jitter
from pk.clock import SystemClock
from pk.server.node.fork_server import ForkedProcess, ForkServer, ForkServerLostError
from pk.server.node.format import prepare
from pk.server.node.metrics_endpoint import socket_names
from pk.server.node.run_config import (
    EXIT_FAILED,
    EXIT_OK,
    SUPERVISOR_PID,
    RunConfig,
    check_descriptor_limit,
    remove_sockets,
    write_pid,
)
from pk.server.node.running import publish, withdraw
from pk.server.node.settings import Resolved, is_clustered, is_loopback, roles_of, voters_of
from pk.tasks import TaskRegistry

BACKOFF_MS = (50, 5_000)
STABLE_MS = 10_000
START_ATTEMPTS = 3
START_TIMEOUT_MS = 60_000
#: The longest time that the ready line waits for a tier whose store does not answer.
TIER_START_MS = 5_000
#: A controller syncs its log when it stops: seconds on a disk or a core that others keep busy.
CONTROLLER_STOP_MS = 15_000
RUNNER_STOP_MS = 10_000
KILLED = 137
#: The role of the process that runs maintenance schedules, with a JVM while a job needs Spark.
RUNNER = "maintenance"


# -- children --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Child:
    """One role and its current process."""

    role: str
    backoff: Backoff
    process: asyncio.subprocess.Process | ForkedProcess | None = None
    ready: dict[str, Any] | None = None  #: its ready line
    failure: errors.PkError | None = None  #: the error that its last process reported
    deaths: int = 0
    told: signal.Signals | None = None  #: asked to stop; also a process that is being started

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None else None


def children_of(roles: Sequence[str], tier_url: str) -> tuple[str, ...]:
    """Return the roles of a node's processes; a broker with a store has a tier beside it."""
    return (*roles, "tier") if tier_url and "broker" in roles else tuple(roles)


class Supervisor:
    """Runs the children of one node; `run` returns the exit code."""

    def __init__(
        self,
        config: RunConfig,
        *,
        log: tracing.Log,
        on_ready: Callable[[dict[str, Any]], None],
        roles: Sequence[str] | None = None,
        forks: ForkServer | None = None,
    ) -> None:
        self.config = config
        self._forks = forks  #: None = each process is spawned
        self._log = log
        self._on_ready = on_ready
        self._clock = SystemClock()
        jitter = equal_jitter(random.Random())
        wanted = roles or children_of(config.roles, config.tier_url)
        self.children = {role: Child(role, Backoff(BACKOFF_MS, jitter)) for role in wanted}
        if config.server["maintenance_runner"] and "broker" in self.children:
            self.children[RUNNER] = Child(RUNNER, Backoff(BACKOFF_MS, jitter))
        self._keepers = TaskRegistry(partial(log.bug, "keeping a process"))  #: named by role
        self._progress = asyncio.Event()
        self._stopping = asyncio.Event()
        self._killing = asyncio.Event()
        self._served = False

    def request_stop(self) -> None:
        """Handle a stop signal: the first one drains, the second one kills."""
        if self._stopping.is_set():
            self._killing.set()
        self._stopping.set()
        self._progress.set()

    async def run(self) -> int:
        """Start the children, serve until asked to stop, then drain.

        Raises the typed error that prevented the start.
        """
        pid_file = Path(self.config.run_dir) / "supervisor.pid"
        withdraw(self.config.run_dir)  # of a supervisor that was killed
        write_pid(self.config.run_dir, "supervisor")
        for child in self.children.values():
            if child.role != RUNNER:
                self._keepers.spawn(self._keep(child), child.role)
        try:
            await self._until_ready()
            if not self._stopping.is_set():
                self._served = True
                self._pin_address()
                publish(self.config.run_dir, self._facts())
                self._on_ready(self._facts())
                if RUNNER in self.children:
                    self._keepers.spawn(self._keep(self.children[RUNNER]), RUNNER)
                await self._stopping.wait()
            publish(self.config.run_dir, {"stopping": True})
            return await self._drain()
        finally:
            withdraw(self.config.run_dir)
            await self._kill_all()
            pid_file.unlink(missing_ok=True)

    def _facts(self) -> dict[str, Any]:
        pids = {"supervisor": os.getpid()}
        pids |= {role: child.pid for role, child in self.children.items() if child.pid is not None}
        return {
            "ready": "server",
            "address": self._address("broker") or self._address("controller"),
            "controller": self._address("controller"),
            "roles": list(self.config.roles),
            "cluster_id": self.config.cluster_id,
            "node_id": self.config.node_id,
            "pids": pids,
            "dirs": list(self.config.dirs),
            "tier_url": self.config.tier_url,
            "metrics": self.config.server["metrics"],
        }

    def _address(self, role: str) -> str:
        child = self.children.get(role)
        return str((child.ready or {}).get("address", "")) if child is not None else ""

    def _pin_address(self) -> None:
        """Keep the port that the kernel chose for port 0, so that a restart uses it again."""
        address = self._address("broker")
        if self.config.broker_address.endswith(":0") and address and not self.config.advertise:
            self.config = replace(self.config, server={**self.config.server, "listen": address})
            self.config.save()

    # -- starting ----------------------------------------------------------------------------------

    async def _until_ready(self) -> None:
        deadline_ms = self._clock.monotonic_ms() + START_TIMEOUT_MS
        tier_until_ms = self._clock.monotonic_ms() + TIER_START_MS
        while not self._stopping.is_set():
            now_ms = self._clock.monotonic_ms()
            waiting = [
                child
                for child in self.children.values()
                if child.ready is None and child.role != RUNNER
            ]
            for child in waiting:
                self._raise_if_fatal(child)
            if not waiting or ([c.role for c in waiting] == ["tier"] and now_ms > tier_until_ms):
                return
            if now_ms > deadline_ms:
                self._late(waiting[0].role)
                deadline_ms = now_ms + START_TIMEOUT_MS
            self._progress.clear()
            try:
                async with asyncio.timeout(0.5):
                    await self._progress.wait()
            except TimeoutError:
                continue

    def _late(self, role: str) -> None:
        """Whether the start took too long.  The node of a cluster has no limit.

        Such a node may have to wait for other nodes, and other nodes for its controller.
        """
        if not is_clustered(self.config.server):
            raise errors.RequestTimedOut(
                f"the {role} did not start within {START_TIMEOUT_MS // 1000} s"
            )
        self._log.warning("still_starting", role=role, why="no controller is active, or reachable")

    def _raise_if_fatal(self, child: Child) -> None:
        """Raise if another start of `child` cannot succeed (O3)."""
        failure = child.failure
        if failure is not None and failure.acts in ("operator", "user"):
            raise failure
        if child.deaths >= START_ATTEMPTS:
            raise failure or errors.InternalError(
                f"the {child.role} process died {child.deaths} times while starting; see the log"
            )

    async def _keep(self, child: Child) -> None:
        """Run the process of a role, and restart it, until the supervisor stops."""
        while not self._stopping.is_set():
            started_ms = self._clock.monotonic_ms()
            try:
                code = await self._run_once(child)
            except OSError as cause:  # no memory or descriptors now: try again
                code = EXIT_FAILED
                child.failure = errors.BrokerUnavailable(f"the {child.role} did not start: {cause}")
            if self._stopping.is_set():
                return
            child.deaths += 1
            lived_ms = self._clock.monotonic_ms() - started_ms
            if lived_ms >= STABLE_MS:
                child.backoff.reset()
            wait_ms = child.backoff.next_ms()
            self._log.warning(
                "child_died",
                role=child.role,
                how=_how(code),
                why=child.failure.message if child.failure is not None else "",
                lived_ms=lived_ms,
                restart_in_ms=round(wait_ms),
            )
            self._progress.set()
            try:
                async with asyncio.timeout(wait_ms / 1000):
                    await self._stopping.wait()
            except TimeoutError:
                continue

    async def _run_once(self, child: Child) -> int:
        process = child.process = await self._start(child.role)
        child.failure = None
        if child.role == RUNNER:  # a client knows no run directory
            write_pid(self.config.run_dir, RUNNER, process.pid)
        if child.told is not None:  # meanwhile
            process.send_signal(child.told)
        assert process.stdout is not None
        try:
            while line := await _line(process.stdout):
                self._on_line(child, line)
            return await process.wait()
        finally:
            child.ready = child.ready if self._served else None
            child.process = None
            (Path(self.config.run_dir) / f"{child.role}.pid").unlink(missing_ok=True)

    async def _start(self, role: str) -> asyncio.subprocess.Process | ForkedProcess:
        """Fork the process of a role, or spawn it (node/fork_server E2).  Raises `OSError`."""
        if role != RUNNER and self._forks is not None:
            try:
                return await self._forks.fork(role, self.config.run_dir)
            except ForkServerLostError as lost:
                if self._stopping.is_set():
                    raise OSError("the node stops") from lost
                self._log.warning("fork_server_lost", why=str(lost))
                self._close_forks()
        return await asyncio.create_subprocess_exec(
            *self._command(role),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, SUPERVISOR_PID: str(os.getpid())},
            start_new_session=True,  # Ctrl-C reaches the supervisor only, which drains in order
        )

    def _close_forks(self) -> None:
        if self._forks is not None:
            self._forks.close()
            self._forks = None

    def _command(self, role: str) -> list[str]:
        if role != RUNNER:
            return [sys.executable, "-m", "pk.server", role, "--run", self.config.run_dir]
        options = ["--bootstrap", self._address("broker"), "--supervised"]
        master = ["--master", str(self.config.server["maintenance_master"])]
        return [sys.executable, "-m", "pk.cli", RUNNER, "runner", *options, *master]

    def _on_line(self, child: Child, line: bytes) -> None:
        """Handle a line that a child printed: the ready line, or the error that ended it."""
        try:
            said = json.loads(line)
        except ValueError:
            said = None
        if not isinstance(said, dict):
            self._log.warning("child_said", role=child.role, text=line.decode(errors="replace"))
            return
        if "ready" in said:
            child.ready = said
            if self._served:
                self._log.info("child_restarted", role=child.role, pid=said.get("pid"))
        elif "failed" in said:
            child.failure = errors.from_wire(int(said["code"]), str(said["message"]))
        self._progress.set()

    # -- stopping ----------------------------------------------------------------------------------

    async def _drain(self) -> int:
        """Stop the runner, which releases its leases, then broker and tier, then the controller,
        which a controlled shutdown needs (L3)."""
        timeout_ms = int(self.config.server["shutdown_timeout_ms"])
        await self._stop([RUNNER], RUNNER_STOP_MS)  # killed, its leases end after 30 s
        first = [role for role in self.children if role not in (RUNNER, "controller")]
        drained = True
        for roles, bound_ms in ((first, timeout_ms), (["controller"], CONTROLLER_STOP_MS)):
            killed = await self._stop(roles, bound_ms)
            drained = drained and not killed
            if killed and not self._killing.is_set():
                self._log.warning("drain_timed_out", killed=",".join(killed), after_ms=bound_ms)
        if self._killing.is_set():
            return KILLED
        return EXIT_OK if drained else 1

    async def _stop(self, roles: Sequence[str], timeout_ms: int) -> list[str]:
        """Send SIGTERM and wait; return the roles whose process had to be killed."""
        for role in roles:
            self._signal(role, signal.SIGTERM)
        keepers = {role: task for role in roles if (task := self._keepers.get(role)) is not None}
        waits = TaskRegistry()
        killing = waits.spawn(self._killing.wait())
        everyone = asyncio.gather(*keepers.values(), return_exceptions=True)
        try:
            await asyncio.wait(
                (everyone, killing),
                timeout=timeout_ms / 1000,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            await waits.close()
        late = [role for role, keeper in keepers.items() if not keeper.done()]
        if late:  # it may be the fork server that they wait for
            self._close_forks()
        for role in late:
            self._signal(role, signal.SIGKILL)
        await everyone
        return late

    def _signal(self, role: str, number: signal.Signals) -> None:
        child = self.children.get(role)
        if child is None:
            return
        child.told = number
        if child.process is not None and child.process.returncode is None:
            child.process.send_signal(number)

    async def _kill_all(self) -> None:
        """Kill every child, so that none outlives the supervisor."""
        self._stopping.set()
        self._close_forks()
        for role in self.children:
            self._signal(role, signal.SIGKILL)
        await self._keepers.wait()


async def _line(out: asyncio.StreamReader) -> bytes:
    """Read the next line; empty at the end.

    No child prints a line beyond the limit; the rest of such a line is read as another line.
    """
    try:
        return await out.readline()
    except ValueError:
        return b"(a line that is too long)\n"


def _how(code: int) -> str:
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"exit code {code}"


def _warn_if_open(log: tracing.Log, resolved: Resolved) -> None:
    server, listens = resolved.server, []
    if "broker" in roles_of(server):
        listens.append(str(server["listen"]))
    if "controller" in roles_of(server):
        mine = voters_of(server).get(int(server["node_id"]), "")
        listens.append(str(server["controller_listen"]) or mine)
    for listen in listens:
        if listen and not is_loopback(listen):
            log.warning(
                "open_to_the_network",
                listen=listen,
                why="this build has no TLS and no authentication: whoever reaches it may do "
                "everything",
            )


def serve(
    dirs: Sequence[str], resolved: Resolved, on_ready: Callable[[dict[str, Any]], None]
) -> int:
    """Run `pk server start`; return the exit code.  Raises the error that prevented the start."""
    log = tracing.Log("supervisor", SystemClock().wall_ms)
    check_descriptor_limit()
    _warn_if_open(log, resolved)
    # before this process has the lock, which its children must not have
    forks = ForkServer.start(
        children_of(roles_of(resolved.server), str(resolved.server["tier_url"]))
    )
    try:
        return _serve(dirs, resolved, log, on_ready, forks)
    finally:
        if forks is not None:
            forks.close()


def _serve(
    dirs: Sequence[str],
    resolved: Resolved,
    log: tracing.Log,
    on_ready: Callable[[dict[str, Any]], None],
    forks: ForkServer | None,
) -> int:
    config, lock = prepare(dirs or resolved.dirs, resolved)

    async def main() -> int:
        supervisor = Supervisor(config, log=log, on_ready=on_ready, forks=forks)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, supervisor.request_stop)
        return await supervisor.run()

    try:
        return asyncio.run(main())
    finally:
        remove_sockets(config.run_dir, ("controller", "tier", *socket_names(config).values()))
        lock.unlock()
