"""Servers that a program starts for itself: one node, or a whole cluster on loopback.

The demo, the tests (chaos and soak included) and the benchmarks use this launcher.  Each node is
one `pk server start --config <directory>/server.toml`; it prints one ready line and logs to
`<directory>/server.log`.  Its processes are found by the pid files that each role writes (rule P1).
A node ends with the program (the thread) that started it.

Ports are reserved: a socket is bound to the port and never listens.  Other programs that search for
a free port then skip it.  The node sets SO_REUSEADDR, so it can listen on the port, stop, and
listen again.  Reserved ports lie below the range that the system uses for outgoing connections.
"""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from pk import errors
from pk.clock import block_s, monotonic_s

ROLES = ("controller", "broker", "tier")
CLUSTER_ID = "embedded-cluster"
COMBINED = "broker,controller"
_ANY_PORT = "127.0.0.1:0"
_PORTS = (15_000, 32_000)
#: the supervisor first, because it restarts a child that ends before it
_KILL_FIRST = ("supervisor", *ROLES)
_TAIL_LINES = 30
_POLL_S = 0.02
#: Starts a node's process, with the arguments of `subprocess.Popen`.  The tests of real nodes put a
#: function here that forks the process instead.
launch: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen


class ReservedPorts:
    """Ports that are reserved for this object until it is garbage-collected."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []
        weakref.finalize(self, _close_all, self._held)

    def draw(self) -> int:
        """Reserve and return one more port, to which no other socket of this machine is bound."""
        while True:
            port, holder = random.randrange(*_PORTS), socket.socket()
            try:
                holder.bind(("127.0.0.1", port))
            except OSError:
                holder.close()
                continue
            # only after the bind: with the option, the bind would also succeed on a port that
            # another program reserves
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._held.append(holder)
            return port

    def address(self) -> str:
        """Reserve one more port and return it as HOST:PORT."""
        return f"127.0.0.1:{self.draw()}"


class ServerProcess:
    """One `pk server start --config`; its stderr is appended to `log`.

    environment: variables of the processes, in addition to those of this program.
    """

    def __init__(self, config: Path, log: Path) -> None:
        self.config = config
        self.log = log
        self.environment: dict[str, str] = {}
        self.ready: dict[str, Any] = {}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Return whether the node was started and neither stopped nor killed."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """Return the supervisor's pid, 0 if the node is not running."""
        return self._process.pid if self._process is not None else 0

    def alive(self) -> bool:
        """Return whether the supervisor's process exists."""
        return self._process is not None and self._process.poll() is None

    def spawn(self) -> None:
        """Start without waiting: a node of a cluster becomes ready only when others run, too."""
        owner = {"PK_SUPERVISOR_PID": str(os.getpid())}
        with self.log.open("ab") as out:
            self._process = launch(
                pk_command("server", "start", "--json", "--config", str(self.config)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=out,
                env={**self._inherited(), **self.environment, **owner},
                # a terminal's Ctrl-C then reaches this program only, which drains the node
                start_new_session=True,
            )

    def _inherited(self) -> Mapping[str, str]:
        return os.environ

    def wait_ready(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait until the node serves; return its ready line.  Raises the server's own error."""
        try:
            self.ready = self._ready_line(timeout_s)
        except BaseException:
            self.stop(grace_s=0)
            raise
        return self.ready

    def _ready_line(self, timeout_s: float) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        deadline = monotonic_s() + timeout_s
        buffered = b""
        while b"\n" not in buffered:
            left = deadline - monotonic_s()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                raise errors.BrokerUnavailable(f"no ready line in {timeout_s:g} s\n{self.tail()}")
            chunk = os.read(process.stdout.fileno(), 65536)
            if not chunk:
                code = process.wait()
                raise errors.BrokerUnavailable(f"the server ended ({code})\n{self.tail()}")
            buffered += chunk
        line: dict[str, Any] = json.loads(buffered.split(b"\n")[0])
        if "error" in line:
            process.wait()
            told = line["error"]
            raise errors.from_wire(int(told["code"]), f"{told['message']} (log: {self.log})")
        return line

    def tail(self) -> str:
        """Return the last lines of the log."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-_TAIL_LINES:])

    def ask_to_stop(self) -> None:
        """Send SIGTERM: the first one starts draining, like Ctrl-C; a second one kills."""
        if self.alive():
            assert self._process is not None
            self._process.send_signal(signal.SIGTERM)

    def stop(self, grace_s: float = 30.0) -> int | None:
        """Drain and stop; return the exit code, None if the node was not running."""
        self.ask_to_stop()
        return self.wait(grace_s)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the end, kill at the time-out; return the exit code, None if not running."""
        process = self._process
        if process is None:
            return None
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()  # its children end, too (PR_SET_PDEATHSIG)
            process.wait()
        self._process = None
        if process.stdout is not None:
            process.stdout.close()
        return process.returncode


class EmbeddedServer(ServerProcess):
    """One node under one supervisor, configured by `settings`.

    directory: gets `data/`, `server.toml` and `server.log`.
    listen: HOST:PORT; port 0 = a reserved one, the same after every restart.
    settings: server settings and topic defaults; written to the file at every start.
    data: the names of the data directories in `directory`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        listen: str = _ANY_PORT,
        tier_url: str = "",
        settings: Mapping[str, Any] | None = None,
        data: Sequence[str] = ("data",),
    ) -> None:
        super().__init__(directory / "server.toml", directory / "server.log")
        self.directory = directory
        self.listen = listen
        self.tier_url = tier_url
        self.settings = dict(settings or {})
        self.address = ""
        self._data = [directory / name for name in data]
        self._ports = ReservedPorts()

    def __enter__(self) -> EmbeddedServer:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def data(self) -> Path:
        """The node's data directory; the first one if there are several."""
        return self._data[0]

    @property
    def node_id(self) -> int:
        """The setting `node_id`, 1 unless it is given."""
        return int(self.settings.get("node_id", 1))

    def write_config(self) -> None:
        """Write the present settings to the configuration file."""
        if self.listen == _ANY_PORT:
            self.listen = self._ports.address()
        dirs = [str(path) for path in self._data]
        given = {"dir": dirs, "listen": self.listen, **self.settings}
        if self.tier_url:
            given["tier_url"] = self.tier_url
        self.directory.mkdir(parents=True, exist_ok=True)
        lines = [f"{name} = {json.dumps(value)}" for name, value in given.items()]
        self.config.write_text("\n".join(lines) + "\n")

    def start(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """Start, wait for the ready line and return it.  Raises the server's own error."""
        self.spawn()
        return self.wait_ready(timeout_s)

    def spawn(self) -> None:
        self.write_config()
        super().spawn()

    def _inherited(self) -> Mapping[str, str]:
        """Return the environment without variables that would override the file's settings."""
        ours = {f"PK_{name.upper()}" for name in (*self.settings, "listen", "tier_url")}
        return {name: text for name, text in os.environ.items() if name not in ours}

    def wait_ready(self, timeout_s: float = 60.0) -> dict[str, Any]:
        ready = super().wait_ready(timeout_s)
        self.address = str(ready["address"])
        return ready

    # -- processes ---------------------------------------------------------------------------------

    def pids(self) -> dict[str, int]:
        """Return the pids of the living processes by role, the supervisor included."""
        found = {"supervisor": self.pid} if self.alive() else {}
        for role in ROLES:
            try:
                pid = int((self.data / "run" / f"{role}.pid").read_text())
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except (OSError, ValueError):
                continue
            # after a process ended, another program may have its pid
            if b"pk.server" in command and role.encode() in command:
                found[role] = pid
        return found

    def kill(self, role: str = "supervisor") -> bool:
        """Send `kill -9` to one process; return False if it did not exist.

        The death of the supervisor ends the whole node: then wait until all its processes are gone.
        """
        living = self.pids()
        pid = living.get(role)
        if pid is None:
            return False
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        if role == "supervisor":
            self.wait()
            self.wait_gone(living)
        return True

    def wait_gone(self, pids: Mapping[str, int], timeout_s: float = 30.0) -> None:
        """Wait until all these processes are gone (children end with their supervisor)."""
        _wait(
            lambda: not any(_is_alive(pid) for pid in pids.values()),
            timeout_s,
            lambda: f"of the processes {dict(pids)} some outlived their supervisor",
        )

    def wait_restarted(self, role: str, old: int, timeout_s: float = 90.0) -> int:
        """Wait until `role` has another process than `old`; return its pid."""
        _wait(
            lambda: self.pids().get(role, old) != old,
            timeout_s,
            lambda: f"{self.directory} has no new {role}\n{self.tail()}",
        )
        return self.pids()[role]


class EmbeddedCluster:
    """Several nodes that form one cluster on loopback.

    nodes: how many combined nodes (controller and broker), with ids from 1; `add` makes more.
    settings: server settings and topic defaults of all nodes.
    """

    def __init__(
        self, directory: Path, *, nodes: int = 3, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.directory = directory
        self.settings = dict(settings or {})
        self.nodes: dict[int, EmbeddedServer] = {}
        self.brokers: dict[int, str] = {}
        self.controllers: dict[int, str] = {}  #: controllers that are initial voters
        self.ports = ReservedPorts()
        self.add(*range(1, nodes + 1))

    def __enter__(self) -> EmbeddedCluster:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def add(
        self, *ids: int, roles: str = COMBINED, first: bool = True, **settings: Any
    ) -> list[EmbeddedServer]:
        """Add nodes that are not formatted yet; `first`: their controllers are initial voters."""
        made = []
        for node in ids:
            given = {
                **self.settings,
                "node_id": node,
                "cluster_id": CLUSTER_ID,
                "process_roles": roles,
                **settings,
            }
            listen = self.ports.address()
            if "broker" in roles:
                self.brokers[node] = listen
            if "controller" in roles and first:
                self.controllers[node] = self.ports.address()
            elif "controller" in roles:
                given["controller_listen"] = self.ports.address()
            server = EmbeddedServer(self.directory / f"n{node}", listen=listen, settings=given)
            self.nodes[node] = server
            made.append(server)
        voters = ",".join(f"{node}@{where}" for node, where in self.controllers.items())
        for server in self.nodes.values():
            server.settings["controller_quorum_voters"] = voters
        return made

    @property
    def address(self) -> str:
        """The brokers' addresses, for clients."""
        return ",".join(self.brokers.values())

    def format(self, node: int, *, first: bool = True) -> Any:
        """Format a node's directory unless it is formatted; `first`: as an initial voter."""
        from pk.server.node.format import format_node
        from pk.server.node.settings import resolve

        server = self.nodes[node]
        resolved = resolve({**server.settings, "listen": server.listen}, {}, {})
        return format_node(
            [str(server.data)],
            resolved,
            cluster_id=CLUSTER_ID,
            initial_controllers=first,
            ignore_formatted=True,
        )

    def start(self, timeout_s: float = 120.0) -> None:
        """Format the nodes that are not formatted yet, and start all nodes."""
        for node in self.nodes:
            self.format(node, first=node in self.controllers)
        self.start_nodes(self.nodes, timeout_s)

    def start_nodes(self, nodes: Iterable[int], timeout_s: float = 120.0) -> None:
        """Start these nodes together and wait until all are ready."""
        servers = [self.nodes[node] for node in nodes]
        for server in servers:
            server.spawn()
        for server in servers:
            server.wait_ready(timeout_s)

    def stop(self) -> dict[int, int | None]:
        """Drain and stop all nodes, one after another; return their exit codes."""
        return {node: server.stop() for node, server in self.nodes.items()}

    def stop_together(self, grace_s: float = 90.0) -> dict[int, int | None]:
        """Drain and stop all nodes at once, like a terminal's Ctrl-C; return their exit codes."""
        for server in self.nodes.values():
            server.ask_to_stop()
        return {node: server.wait(grace_s) for node, server in self.nodes.items()}

    # -- faults ------------------------------------------------------------------------------------

    def pids(self) -> list[int]:
        """Return the pids of every node, supervisors first."""
        return [pid for node in self.nodes for pid in self.pids_of(node)]

    def pids_of(self, node: int) -> list[int]:
        """Return the pids of a node, the supervisor first."""
        found = self.nodes[node].pids()
        return [found[role] for role in _KILL_FIRST if role in found]

    def kill(self, *nodes: int) -> None:
        """Send `kill -9` to all processes of these nodes at once; return when they are gone."""
        living = {node: self.nodes[node].pids() for node in nodes}
        _signal([pid for node in nodes for pid in self.pids_of(node)], signal.SIGKILL)
        for node, pids in living.items():
            self.nodes[node].stop(grace_s=0)
            self.nodes[node].wait_gone(pids)

    def freeze(self, node: int, pids: Sequence[int] | None = None) -> None:
        """Send SIGSTOP to the given processes of a node, or to all."""
        _signal(self.pids_of(node) if pids is None else pids, signal.SIGSTOP)

    def thaw(self, node: int, pids: Sequence[int] | None = None) -> None:
        """Send SIGCONT, children first: the supervisor must not see them stopped."""
        _signal(reversed(self.pids_of(node) if pids is None else pids), signal.SIGCONT)

    def wipe(self, node: int) -> None:
        """Remove the data directory of a stopped node."""
        shutil.rmtree(self.nodes[node].data)


def pk_command(*arguments: str) -> tuple[str, ...]:
    """Return the command line of `pk …` in this environment."""
    return (sys.executable, "-m", "pk.cli", *arguments)


def _close_all(sockets: Iterable[socket.socket]) -> None:
    for each in sockets:
        each.close()


def _wait(holds: Callable[[], bool], timeout_s: float, problem: Callable[[], str]) -> None:
    deadline = monotonic_s() + timeout_s
    while not holds():
        if monotonic_s() > deadline:
            raise errors.InternalError(problem())
        block_s(_POLL_S)


def _is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat[stat.rindex(")") + 2] != "Z"


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
        except PermissionError as cause:  # another program has this pid by now
            raise errors.InternalError(f"process {pid} is not ours: {cause}") from cause
