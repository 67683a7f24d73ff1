"""Where a node's metrics are served: one address for its users, a socket per process behind it.

The broker listens on the option `metrics`; the other roles on sockets in the run directory, which
the broker asks whenever it is asked (`tracing.serve_http`).  The controller of a node without a
broker listens itself.  Without the option nobody listens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pk import tracing

if TYPE_CHECKING:
    from pk.server.node.run_config import Process, RunConfig

BROKER = "broker"


def socket_names(run: RunConfig) -> Mapping[str, str]:
    """The name of each role's socket for metrics in the run directory."""
    if BROKER not in run.roles:
        return {}
    tier = ("tier",) if run.tier_url else ()
    return {role: f"{role}-metrics" for role in (*run.roles, *tier) if role != BROKER}


async def serve_metrics(process: Process) -> asyncio.Server | None:
    """Serve this process's metrics if the option asks for it.  Raises `AddressInUse`."""
    from pk.server.node.run_config import socket_address

    run = process.run
    if not run.server["metrics"]:
        return None
    sockets = {role: socket_address(run.run_dir, name) for role, name in socket_names(run).items()}
    if process.role in sockets:
        return await tracing.serve_http(sockets[process.role], process.metrics, process.health)
    return await tracing.serve_http(
        str(run.server["metrics"]), process.metrics, process.health, sockets
    )
