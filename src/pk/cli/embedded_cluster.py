"""Several servers of one's own that are one cluster: formatted, started and stopped together, for
chaos runs and benchmarks.

Every node is controller and broker, as a small cluster's are.  Ports are drawn below those that the
system gives to outgoing connections, so that a node which was down finds its own free again.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from pk import errors
from pk.cli.embedded import ROLES, EmbeddedServer
from pk.server.node.format import Formatted, format_node
from pk.server.node.settings import resolve

CLUSTER_ID = "embedded-cluster"
_PORTS = (15_000, 32_000)
_KILL_FIRST = ("supervisor", *ROLES)  #: a supervisor would start what dies before it


class EmbeddedCluster:
    """Nodes 1 … `nodes` on loopback.  `settings` are server settings and topic defaults of all."""

    def __init__(
        self, directory: Path, *, nodes: int = 3, settings: Mapping[str, Any] | None = None
    ) -> None:
        ids = range(1, nodes + 1)
        ports = free_ports(2 * nodes)
        self.directory = directory
        self.brokers = {node: f"127.0.0.1:{ports[node - 1]}" for node in ids}
        self.controllers = {node: f"127.0.0.1:{ports[nodes + node - 1]}" for node in ids}
        voters = ",".join(f"{node}@{where}" for node, where in self.controllers.items())
        self.nodes = {
            node: EmbeddedServer(
                directory / f"n{node}",
                listen=self.brokers[node],
                settings={
                    **(settings or {}),
                    "node_id": node,
                    "cluster_id": CLUSTER_ID,
                    "controller_quorum_voters": voters,
                },
            )
            for node in ids
        }

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

    @property
    def address(self) -> str:
        """Of all brokers, for clients."""
        return ",".join(self.brokers.values())

    def format(self, node: int, *, first: bool = True) -> Formatted:
        """Format a node's empty directory; `first`: as one of the first voters."""
        server = self.nodes[node]
        resolved = resolve({}, {}, {**server.settings, "listen": server.listen})
        return format_node(
            [str(server.data)],
            resolved,
            cluster_id=CLUSTER_ID,
            initial_controllers=first,
            ignore_formatted=False,
        )

    def start(self, timeout_s: float = 120.0) -> None:
        """Format what is not formatted yet, and start all nodes."""
        for node, server in self.nodes.items():
            if not server.data.exists():
                self.format(node)
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

    # -- what befalls nodes ------------------------------------------------------------------------

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
        """The disk of a node that is down is gone."""
        shutil.rmtree(self.nodes[node].data)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(*_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
        except PermissionError as cause:  # a pid that was given to somebody else
            raise errors.InternalError(f"process {pid} is not ours: {cause}") from cause
