"""The metrics endpoint of a node: one address for users, one socket per process behind it.

The broker listens on the address of the option `metrics`.  The other roles listen on sockets in the
run directory, which the broker reads for each request (`tracing.serve_http`).  On a node without a
broker the controller listens.  Without the option no process listens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pk import tracing

if TYPE_CHECKING:
    from pk.server.node.run_config import RoleContext, RunConfig

BROKER = "broker"


def socket_names(run: RunConfig) -> Mapping[str, str]:
    """Return the name of each role's metrics socket in the run directory."""
    if BROKER not in run.roles:
        return {}
    tier = ("tier",) if run.tier_url else ()
    return {role: f"{role}-metrics" for role in (*run.roles, *tier) if role != BROKER}


async def serve_metrics(process: RoleContext) -> asyncio.Server | None:
    """Serve the metrics of this process if the option is set.  Raises `AddressInUse`."""
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
