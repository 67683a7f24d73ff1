"""Parsing of the addresses that a client connects to first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pk import errors
from pk.client.arguments import shown

DEFAULT_PORT = 9292


def addresses(bootstrap: Any) -> list[str]:
    """Parse `HOST:PORT[,HOST:PORT…]` into a list.  Raises `InvalidOption`."""
    if isinstance(bootstrap, Mapping):
        raise errors.InvalidOption(
            f"bootstrap is HOST:PORT or a list of them, not the dict {shown(bootstrap)}; "
            'options are keyword arguments: Producer("HOST:PORT", linger_ms=5), or '
            'Producer(**{"bootstrap.servers": "HOST:PORT", "linger.ms": 5}), and so for '
            "Consumer and AdminClient",
            option="bootstrap",
        )
    if isinstance(bootstrap, bytes | bytearray) or not isinstance(bootstrap, Iterable):
        raise errors.InvalidOption(
            f"bootstrap is HOST:PORT or a list of them, not {shown(bootstrap)}", option="bootstrap"
        )
    items = bootstrap.split(",") if isinstance(bootstrap, str) else list(bootstrap)
    found = []
    for item in items:
        text = item.strip() if isinstance(item, str) else None
        if text is None or not text.isprintable():
            raise errors.InvalidOption(
                f"bootstrap server {shown(item)} is not HOST:PORT", option="bootstrap"
            )
        if not text:
            continue
        if text.startswith("unix:"):
            found.append(text)
            continue
        host, separator, port = text.rpartition(":")
        if not separator:
            host, port = text, str(DEFAULT_PORT)
        number = int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else 0
        if not host or not 0 < number < 65536:
            raise errors.InvalidOption(
                f"bootstrap server {shown(text)} is not HOST:PORT", option="bootstrap"
            )
        found.append(f"{host}:{port}")
    if not found:
        raise errors.InvalidOption("no bootstrap server given (HOST:PORT)", option="bootstrap")
    return found
