"""The configuration of a child process of `pk server start`, and the frame of its `main`.

The supervisor resolves all settings once and writes them to `DIR/run/config.json` (mode 0600: it
may hold store credentials); a child is started as `python -m pk.server ROLE --run DIR/run` and
reads them back.  `process_main` gives the role's coroutine a `RoleContext`: the real World, a log,
metrics, the request to stop, and the ready line.

    def main(run: RunConfig) -> int:
        return process_main("broker", run, serve)

    async def serve(process: Process) -> None:
        node = BrokerNode(process.world, disks, process.run)
        await node.start()
        process.ready(node.address)
        await process.stopping.wait()      # SIGTERM: drain
        await node.close()

A typed error that leaves the coroutine is printed as one JSON line `{"failed": role, …}` and
becomes the exit code: 3 = the operator must act (do not restart), 1 = anything else."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import json
import os
import random
import resource
import signal
import sys
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import sha1
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pk import descriptors, errors, event_loops, formats, settings, tracing
from pk.clock import SystemClock
from pk.server.node.settings import bootstrap_of, peers_of, roles_of, voters_of
from pk.tasks import TaskRegistry
from pk.types import NodeId
from pk.world import World

if TYPE_CHECKING:
    from pk.wire.memory import InboundMemory

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_OPERATOR = 3
#: sockaddr_un holds 108 bytes; a socket with a longer path is created in /tmp.
UNIX_PATH_MAX = 100
TIER_NICENESS = 5
MESSAGE_BYTES_USUAL = int(settings.TOPIC.by_name["max_message_bytes"].default)
#: The variable that has the pid of the process with which this one is to die.
SUPERVISOR_PID = "PK_SUPERVISOR_PID"
_PR_SET_PDEATHSIG = 1
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(slots=True, frozen=True)
class RunConfig:
    """The configuration that the processes of one node share.  Settings are complete and
    checked.
    """

    dirs: tuple[str, ...]  #: absolute data directories; the first also holds `metadata/` and `run/`
    directory_ids: tuple[str, ...]  #: uuids of the directories, in the same order
    run_dir: str
    cluster_id: str
    node_id: int
    server: Mapping[str, Any]  #: resolved `settings.SERVER`
    topic_defaults: Mapping[str, Any] = field(default_factory=dict)  #: given `settings.TOPIC`s only
    #: uuid of `metadata/` as a voter has it (rule Q1); '' = the first directory's
    metadata_directory_id: str = ""
    #: The level of `pk.format` that this build knows; tests give another one (rule Q6).
    format_level: int = formats.LEVEL

    @property
    def controller_address(self) -> str:
        """The unix socket of the controller of a node that is alone."""
        return socket_address(self.run_dir, "controller")

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of this node, of `controller` and `broker`."""
        return roles_of(self.server)

    @property
    def voters(self) -> dict[NodeId, str]:
        """The addresses of the first voters by node id; {} = this node alone."""
        return voters_of(self.server)

    @property
    def controller_listen(self) -> str:
        """The address on which this node's controller listens."""
        given = str(self.server["controller_listen"])
        return given or self.voters.get(self.node_id) or self.controller_address

    @property
    def controller_addresses(self) -> tuple[str, ...]:
        """The controllers that this node's broker asks for the active one, its own first."""
        peers = self.peer_controller_addresses
        known = {node: peers.get(node, address) for node, address in self.voters.items()}
        if "controller" in self.roles:
            known = {self.node_id: self.controller_listen, **known}
        return tuple(dict.fromkeys((*known.values(), *bootstrap_of(self.server))))

    @property
    def peer_addresses(self) -> dict[NodeId, str]:
        """Addresses by node id that replace the advertised addresses of brokers."""
        return peers_of(self.server, "peer_addresses")

    @property
    def peer_controller_addresses(self) -> dict[NodeId, str]:
        """Addresses by node id that replace the known addresses of controllers."""
        return peers_of(self.server, "peer_controller_addresses")

    @property
    def tier_address(self) -> str:
        return socket_address(self.run_dir, "tier")

    @property
    def broker_address(self) -> str:
        """The address on which the broker listens."""
        return str(self.server["listen"])

    @property
    def advertise(self) -> str:
        """The address that clients get; '' = the address on which the broker listens."""
        return str(self.server["advertise"])

    @property
    def metadata_dir(self) -> str:
        return os.path.join(self.dirs[0], "metadata")

    @property
    def tier_url(self) -> str:
        return str(self.server["tier_url"])

    def save(self) -> Path:
        """Write `config.json` into the run directory, readable by the owner only.

        An equal file stays as it is, so that a node starts on a full disk.  Raises `StorageFull`,
        `StorageFailed`.
        """
        path = Path(self.run_dir) / "config.json"
        fresh, text = path.with_suffix(".tmp"), json.dumps(asdict(self), indent=1)
        try:
            if path.exists() and path.read_text() == text:
                return path
            fresh.unlink(missing_ok=True)
            descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as out:
                out.write(text)
            fresh.rename(path)
        except OSError as cause:
            full = cause.errno in (errno.ENOSPC, errno.EDQUOT)
            kind = errors.StorageFull if full else errors.StorageFailed
            raise kind(f"writing {path}: {cause.strerror}", directory=self.run_dir) from cause
        return path

    @staticmethod
    def load(run_dir: str) -> RunConfig:
        """Read the configuration that the supervisor wrote.  Raises `InvalidConfig`."""
        path = Path(run_dir) / "config.json"
        try:
            known = json.loads(path.read_text())
            known["dirs"] = tuple(known["dirs"])
            known["directory_ids"] = tuple(known["directory_ids"])
            return RunConfig(**known)
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as cause:
            raise errors.InvalidConfig(f"{path} is not a run configuration: {cause}") from cause


def socket_address(run_dir: str, role: str) -> str:
    """Return `unix:PATH` of a role's socket, in /tmp if the path is too long for the kernel."""
    path = os.path.join(os.path.abspath(run_dir), f"{role}.sock")
    if len(os.fsencode(path)) > UNIX_PATH_MAX:
        home = f"/tmp/pk-{sha1(os.fsencode(os.path.abspath(run_dir))).hexdigest()}"
        os.makedirs(home, mode=0o700, exist_ok=True)
        if os.stat(home).st_uid != os.getuid():
            raise errors.InvalidConfig(f"{home} belongs to another user")
        path = os.path.join(home, f"{role}.sock")
    return f"unix:{path}"


def remove_sockets(run_dir: str, roles: Iterable[str]) -> None:
    """Remove the sockets of killed children.  The live supervisor owns these names."""
    for role in roles:
        path = Path(socket_address(run_dir, role).removeprefix("unix:"))
        path.unlink(missing_ok=True)
        if path.parent != Path(run_dir):  # the replacement in /tmp
            with contextlib.suppress(OSError):
                path.parent.rmdir()


def write_pid(run_dir: str, role: str, pid: int | None = None) -> None:
    """Write the pid file, for operators (None = of this process).  A full disk does not prevent the
    start.
    """
    with contextlib.suppress(OSError):
        (Path(run_dir) / f"{role}.pid").write_text(f"{os.getpid() if pid is None else pid}\n")


def boot_id() -> str:
    """Return the kernel's boot id (rule L3), or a fresh id, after which no stop counts as clean."""
    with contextlib.suppress(OSError):
        if found := _BOOT_ID.read_text().strip():
            return found
    return str(uuid.uuid4())  # noqa: TID251 - a shell


def real_world(
    on_error: Callable[[str, BaseException], None] | None = None,
    memory: InboundMemory | None = None,
) -> World:
    """Return the World of the operating system; `memory`: the budget of inbound frames."""
    from pk.wire.socket_network import PkNetwork  # the supervisor needs no grpc

    return World(
        clock=SystemClock(),
        network=PkNetwork(on_error, memory=memory),
        rng=random.Random(),
        new_id=lambda: str(uuid.uuid4()),  # noqa: TID251 - this is where ids come from
    )


class RoleContext:
    """The argument of a role's coroutine."""

    def __init__(self, role: str, run: RunConfig) -> None:
        from pk.wire.socket_network import inbound_memory

        clock = SystemClock()
        self.role = role
        self.run = run
        self.log = tracing.Log(role, clock.wall_ms)
        usual = run.topic_defaults.get("max_message_bytes", MESSAGE_BYTES_USUAL)
        #: of inbound frames (rule L17)
        self.memory = inbound_memory(int(run.server["inbound_bytes_max"]), int(usual))
        self.world = real_world(self.log.bug, self.memory)
        self.metrics = tracing.Metrics()
        self.health = tracing.Health()
        self.stopping = asyncio.Event()  #: set by SIGTERM or SIGINT: drain, then return
        self.boot_id = boot_id()
        self.incarnation_id = self.world.new_id()  #: id of this start of the process

    def ready(self, address: str, **facts: object) -> None:
        """Report that the role serves: pid file, ready line, /readyz.  Freezes the heap."""
        write_pid(self.run.run_dir, self.role)
        from pk.server.node import garbage

        garbage.freeze_loaded()
        self.health.not_ready = None
        print_line({"ready": self.role, "address": address, "pid": os.getpid(), **facts})
        self.log.info("ready", address=address, pid=os.getpid())

    async def close(self) -> None:
        """Close the network connections."""
        from pk.wire.socket_network import PkNetwork

        if isinstance(self.world.network, PkNetwork):
            await self.world.network.close()


def print_line(facts: Mapping[str, object]) -> None:
    """Print one JSON line for the supervisor; ignore that the supervisor may be dead."""
    try:
        sys.stdout.write(json.dumps(dict(facts)) + "\n")
        sys.stdout.flush()
    except (BrokenPipeError, ValueError):
        pass


def process_main(role: str, run: RunConfig, serve: Callable[[RoleContext], Awaitable[None]]) -> int:
    """Run `serve` until it returns.  Returns the exit code (see the module)."""
    die_with_parent()
    raise_descriptor_limit()
    if role == "tier":
        os.nice(TIER_NICENESS)  # P1: bulk work yields
    try:
        event_loops.run(_run(role, run, serve))
    except errors.PkError as error:
        name, code = type(error).__name__, error.code
        failed = {"failed": role, "error": name, "code": code, "message": error.message}
        print_line(failed)
        tracing.Log(role, SystemClock().wall_ms).error("failed", error=name, message=error.message)
        return EXIT_OPERATOR if isinstance(error, errors.OperatorError) else EXIT_FAILED
    except Exception as bug:
        print_line({"failed": role, "error": type(bug).__name__, "code": -1, "message": str(bug)})
        tracing.Log(role, SystemClock().wall_ms).bug("failed", bug)
        return EXIT_FAILED
    return EXIT_OK


async def _run(role: str, run: RunConfig, serve: Callable[[RoleContext], Awaitable[None]]) -> None:
    from pk.server.node import garbage

    garbage.collect_seldom()
    process = RoleContext(role, run)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, process.stopping.set)
    loop.set_exception_handler(lambda _loop, context: _report(process.log, context))
    ticks = TaskRegistry(partial(process.log.bug, "a periodic task"))
    ticks.spawn(tracing.watch_loop_lag(process.metrics, process.world.clock))
    try:
        await serve(process)
    finally:
        await ticks.close()
        await process.close()


def _report(log: tracing.Log, context: dict[str, Any]) -> None:
    error = context.get("exception")
    if isinstance(error, BaseException):
        log.bug(str(context.get("message", "event loop")), error)
    else:
        log.error("event_loop", message=str(context.get("message", "")))


def raise_descriptor_limit() -> None:
    """Raise the soft limit of descriptors to the hard limit.

    The soft limit, often 1024, protects programs that call `select`.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # not allowed everywhere: the limit stays
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_descriptor_limit() -> None:
    """Raise `InvalidConfig` if a node may not have the descriptors that it needs to start."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < descriptors.LEAST:
        raise errors.InvalidConfig(
            f"this process may have {hard} open files, and a node needs {descriptors.LEAST} or "
            "more: raise the limit (ulimit -Hn 65536, or LimitNOFILE= of systemd)"
        )


def die_with_parent() -> None:
    """On Linux, have the kernel kill this process when the supervisor dies (rule P1)."""
    parent = os.environ.get(SUPERVISOR_PID)
    if parent is not None:  # else it was started by hand
        die_with(int(parent))


def die_with(parent: int) -> None:
    """On Linux, have the kernel kill this process when `parent`, which started it, dies."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died between the start and this line
        os._exit(EXIT_FAILED)
