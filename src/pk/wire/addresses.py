"""Sockets at addresses, connected or listening: `HOST:PORT`, `unix:PATH`, and on Linux sockets
without a file.  pk.wire.socket_network speaks over them.
"""

from __future__ import annotations

import asyncio
import errno
import os
import platform
import secrets
import socket
import stat
from typing import Any

from pk.wire.grpc_network import KEEPALIVE_MS
from pk.world import Disconnected

ABSTRACT = "unix-abstract:"  # Linux: a socket without a file
_BACKLOG = 1024


def tune(sock: socket.socket) -> None:
    """Set the socket options: small frames without delay, and keepalive.

    Keepalive notices within seconds that the host of an idle connection vanished.
    pk.wire.dead_peers notices it while data is on its way.
    """
    sock.setblocking(False)
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_MS // 1000),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", KEEPALIVE_MS // 1000),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def split_address(address: str) -> tuple[str, int]:
    """Split `HOST:PORT`; the host may be in brackets.  Raises `ValueError`."""
    host, colon, port = address.rpartition(":")
    if not colon:
        raise ValueError(f"{address}: not HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


async def dial(address: str) -> socket.socket:
    """Return a connected socket.  Raises `OSError` or `ValueError`."""
    loop = asyncio.get_running_loop()
    targets: list[tuple[int, Any]]
    if address.startswith("unix:"):
        targets = [(socket.AF_UNIX, address.removeprefix("unix:"))]
    elif address.startswith(ABSTRACT):
        targets = [(socket.AF_UNIX, "\0" + address.removeprefix(ABSTRACT))]
    else:
        host, port = split_address(address)
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except RuntimeError:  # the interpreter ends, and no executor takes work any more
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        targets = [(family, where) for family, _, _, _, where in found]
    failure: OSError = OSError(errno.EADDRNOTAVAIL, f"{address} has no address")
    for family, where in targets:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            tune(sock)
            await loop.sock_connect(sock, where)
        except OSError as cause:
            sock.close()
            failure = cause
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure


def why_not(cause: OSError | ValueError) -> str:
    """Say why no connection was made; a loop's own text names only the address."""
    number = getattr(cause, "errno", None)
    if number is not None and number in errno.errorcode:
        return os.strerror(number)
    return getattr(cause, "strerror", None) or str(cause)


class NotOpened(Disconnected):
    """The peer has closed the connection instead of answering the opening."""


async def read_exactly(sock: socket.socket, size: int) -> bytes:
    """Read `size` bytes.  Raises `NotOpened` if the peer sends fewer."""
    loop, got = asyncio.get_running_loop(), b""
    while len(got) < size:
        more = await loop.sock_recv(sock, size - len(got))
        if not more:
            raise NotOpened("the peer closed the connection before it was open")
        got += more
    return got


async def dial_named(address: str) -> tuple[socket.socket, str]:
    """Connect to a private address; return the socket and the server's name for this peer."""
    if not address.startswith(ABSTRACT):
        sock = await dial(address)
        host, port = sock.getsockname()[:2]
        return sock, f"ipv4:{host}:{port}"
    name = f"pk-{os.getpid()}-{secrets.token_hex(8)}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.bind("\0" + name)
        target = "\0" + address.removeprefix(ABSTRACT)
        await asyncio.get_running_loop().sock_connect(sock, target)
    except BaseException:
        sock.close()
        raise
    return sock, ABSTRACT + name


def private_address() -> str:
    """Return the private address on which grpc listens behind the public address."""
    if platform.system() == "Linux":
        return f"{ABSTRACT}pk-{os.getpid()}-{secrets.token_hex(8)}"
    return "127.0.0.1:0"


def bind(address: str) -> socket.socket:
    """Return a listening socket.  Raises `OSError` that names the address."""
    sock: socket.socket | None = None
    try:
        if address.startswith("unix:"):
            path = address.removeprefix("unix:")
            unlink_socket(path)  # of a killed process; the directory's lock excludes a live one
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.bind(path)
        else:
            host, port = split_address(address)
            info = socket.getaddrinfo(
                host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            sock = socket.socket(info[0], info[1])
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(info[4])
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as cause:
        if sock is not None:
            sock.close()
        why = f"cannot listen on {address}: {cause.strerror or cause}"
        raise OSError(cause.errno or errno.EADDRINUSE, why) from cause
    except ValueError as cause:
        raise OSError(errno.EINVAL, f"cannot listen on {address}: not HOST:PORT") from cause
    return sock


def unlink_socket(path: str) -> None:
    """Remove a socket file; any other file at that path stays, and binding then fails."""
    try:
        if stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)
    except OSError:
        pass
