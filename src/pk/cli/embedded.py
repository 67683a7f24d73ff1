"""Servers that a program starts for itself: one node, or a whole cluster on loopback.

The demo, the tests, chaos, soak and the benchmarks use this launcher.  Each node is one
`pk server start --config <directory>/server.toml`; it prints one ready line and logs to
`<directory>/server.log`.  Its processes are found by the pid files that each role writes (rule P1).
A node ends with the program (the thread) that started it.

Ports are reserved: a socket is bound to the port and never listens.  Other programs that look for a
free port pass over it, while the node, which sets SO_REUSEADDR, can listen there, stop, and listen
again.  They lie below the range from which the system takes the ports of outgoing connections.
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
_KILL_FIRST = ("supervisor", *ROLES)  #: a supervisor would start what dies before it
_TAIL_LINES = 30
_POLL_S = 0.02


class ReservedPorts:
    """Ports that belong to this object until it is collected."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []
        weakref.finalize(self, _close_all, self._held)

    def draw(self) -> int:
        """One more port, to which no other socket of this machine is bound."""
        while True:
            port, holder = random.randrange(*_PORTS), socket.socket()
            try:
                holder.bind(("127.0.0.1", port))
            except OSError:
                holder.close()
                continue
            # after the bind: before it, it would also admit a port that another program reserves
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._held.append(holder)
            return port

    def address(self) -> str:
        """HOST:PORT of one more port."""
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
        """The node was started and was neither stopped nor killed."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """The supervisor's process, 0 if the node is not running."""
        return self._process.pid if self._process is not None else 0

    def alive(self) -> bool:
        """The supervisor's process exists."""
        return self._process is not None and self._process.poll() is None

    def spawn(self) -> None:
        """Start without waiting: a node of a cluster is ready only once others run, too."""
        owner = {"PK_SUPERVISOR_PID": str(os.getpid())}
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                pk_command("server", "start", "--json", "--config", str(self.config)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=out,
                env={**self._inherited(), **self.environment, **owner},
                start_new_session=True,  # Ctrl-C in a terminal reaches us first; we drain it
            )

    def _inherited(self) -> Mapping[str, str]:
        return os.environ

    def wait_ready(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait until a spawned node serves; its ready line.  Raises the server's own error."""
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
        """The last lines of the log."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-_TAIL_LINES:])

    def ask_to_stop(self) -> None:
        """Send SIGTERM: the first one begins to drain, as a Ctrl-C does; the second one kills."""
        if self.alive():
            assert self._process is not None
            self._process.send_signal(signal.SIGTERM)

    def stop(self, grace_s: float = 30.0) -> int | None:
        """Drain and stop; returns the exit code, None if it was not running."""
        self.ask_to_stop()
        return self.wait(grace_s)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the end and kill at the time-out; the exit code, None if it was not running."""
        process = self._process
        if process is None:
            return None
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()  # the children follow by PR_SET_PDEATHSIG
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
        """The node's data directory, the first one of several."""
        return self._data[0]

    @property
    def node_id(self) -> int:
        """The setting `node_id`, 1 unless it is given."""
        return int(self.settings.get("node_id", 1))

    def write_config(self) -> None:
        """Write the file as the settings are now."""
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
        """A variable PK_<NAME> of this program would win over the file."""
        ours = {f"PK_{name.upper()}" for name in (*self.settings, "listen", "tier_url")}
        return {name: text for name, text in os.environ.items() if name not in ours}

    def wait_ready(self, timeout_s: float = 60.0) -> dict[str, Any]:
        ready = super().wait_ready(timeout_s)
        self.address = str(ready["address"])
        return ready

    # -- processes ---------------------------------------------------------------------------------

    def pids(self) -> dict[str, int]:
        """The living processes by role, the supervisor included."""
        found = {"supervisor": self.pid} if self.alive() else {}
        for role in ROLES:
            try:
                pid = int((self.data / "run" / f"{role}.pid").read_text())
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except (OSError, ValueError):
                continue
            # the pid of an ended process may belong to another program by now
            if b"pk.server" in command and role.encode() in command:
                found[role] = pid
        return found

    def kill(self, role: str = "supervisor") -> bool:
        """`kill -9` of one process; False if it did not exist.

        The supervisor's death ends the whole node: returns when all its processes are gone.
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
        """Wait until none of these processes is left (children die with their supervisor)."""
        _wait(
            lambda: not any(_is_alive(pid) for pid in pids.values()),
            timeout_s,
            lambda: f"of the processes {dict(pids)} some outlived their supervisor",
        )

    def wait_restarted(self, role: str, old: int, timeout_s: float = 90.0) -> int:
        """Wait until the supervisor runs another process of `role` than `old`; its pid."""
        _wait(
            lambda: self.pids().get(role, old) != old,
            timeout_s,
            lambda: f"{self.directory} has no new {role}\n{self.tail()}",
        )
        return self.pids()[role]


class EmbeddedCluster:
    """Several nodes that are one cluster, on loopback.

    nodes: so many combined nodes (controller and broker), with the ids 1 …; `add` makes others.
    settings: server settings and topic defaults of all nodes.
    """

    def __init__(
        self, directory: Path, *, nodes: int = 3, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.directory = directory
        self.settings = dict(settings or {})
        self.nodes: dict[int, EmbeddedServer] = {}
        self.brokers: dict[int, str] = {}
        self.controllers: dict[int, str] = {}  #: the first voters
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
        """Nodes that are not formatted yet; `first`: their controllers are first voters."""
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
        """The brokers, for clients."""
        return ",".join(self.brokers.values())

    def format(self, node: int, *, first: bool = True) -> Any:
        """Format a node's directory if it is not; `first`: as one of the first voters."""
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
        """Format what is not formatted yet, and start all nodes."""
        for node in self.nodes:
            self.format(node, first=node in self.controllers)
        self.start_nodes(self.nodes, timeout_s)

    def start_nodes(self, nodes: Iterable[int], timeout_s: float = 120.0) -> None:
        """Start these together and wait until all are ready."""
        servers = [self.nodes[node] for node in nodes]
        for server in servers:
            server.spawn()
        for server in servers:
            server.wait_ready(timeout_s)

    def stop(self) -> dict[int, int | None]:
        """Drain and stop all, one after the other; the exit codes."""
        return {node: server.stop() for node, server in self.nodes.items()}

    def stop_together(self, grace_s: float = 90.0) -> dict[int, int | None]:
        """Drain and stop all at once, as a terminal's Ctrl-C does; the exit codes."""
        for server in self.nodes.values():
            server.ask_to_stop()
        return {node: server.wait(grace_s) for node, server in self.nodes.items()}

    # -- faults ------------------------------------------------------------------------------------

    def pids(self) -> list[int]:
        """Every process of every node, supervisors first."""
        return [pid for node in self.nodes for pid in self.pids_of(node)]

    def pids_of(self, node: int) -> list[int]:
        """Every process of a node, the supervisor first."""
        found = self.nodes[node].pids()
        return [found[role] for role in _KILL_FIRST if role in found]

    def kill(self, *nodes: int) -> None:
        """`kill -9` of all their processes at once; returns when they are gone."""
        living = {node: self.nodes[node].pids() for node in nodes}
        _signal([pid for node in nodes for pid in self.pids_of(node)], signal.SIGKILL)
        for node, pids in living.items():
            self.nodes[node].stop(grace_s=0)
            self.nodes[node].wait_gone(pids)

    def freeze(self, node: int, pids: Sequence[int] | None = None) -> None:
        """SIGSTOP to these processes of it, or all."""
        _signal(self.pids_of(node) if pids is None else pids, signal.SIGSTOP)

    def thaw(self, node: int, pids: Sequence[int] | None = None) -> None:
        """SIGCONT, children first: their supervisor must not see them stopped."""
        _signal(reversed(self.pids_of(node) if pids is None else pids), signal.SIGCONT)

    def wipe(self, node: int) -> None:
        """Remove the data directory of a node that is down."""
        shutil.rmtree(self.nodes[node].data)


def pk_command(*arguments: str) -> tuple[str, ...]:
    """The command line of `pk …` in this environment."""
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
        except PermissionError as cause:  # the pid belongs to another program by now
            raise errors.InternalError(f"process {pid} is not ours: {cause}") from cause
