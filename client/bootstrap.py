"""The addresses a client begins with."""

from __future__ import annotations

from collections.abc import Iterable

from pk import errors

DEFAULT_PORT = 9292


def addresses(bootstrap: str | Iterable[str]) -> list[str]:
    """`HOST:PORT[,HOST:PORT…]` as a list.  Raises `InvalidOption`."""
    items = bootstrap.split(",") if isinstance(bootstrap, str) else list(bootstrap)
    found = []
    for item in items:
        text = str(item).strip()
        if not text:
            continue
        if text.startswith("unix:"):
            found.append(text)
            continue
        host, separator, port = text.rpartition(":")
        if not separator:
            host, port = text, str(DEFAULT_PORT)
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise errors.InvalidOption(
                f"bootstrap server {text!r} is not HOST:PORT", option="bootstrap"
            )
        found.append(f"{host}:{port}")
    if not found:
        raise errors.InvalidOption("no bootstrap server given (HOST:PORT)", option="bootstrap")
    return found
