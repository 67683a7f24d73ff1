"""Ports of nodes that are not started yet, or are down at the moment (pk.cli.embedded)."""

from __future__ import annotations

import gc
import random
import socket

import pytest

from pk.cli.embedded import ReservedPorts


def test_a_reserved_port_is_drawn_by_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process listens on it yet; a second launcher that draws the same number skips it."""
    first, second = ReservedPorts(), ReservedPorts()
    taken = first.draw()
    with socket.socket() as probe, pytest.raises(OSError, match="in use"):
        probe.bind(("127.0.0.1", taken))
    drawn = iter([taken, taken, taken + 1, *range(taken + 2, taken + 50)])
    monkeypatch.setattr(random, "randrange", lambda *_: next(drawn))
    assert first.draw() != taken
    assert second.draw() != taken


def test_its_owner_may_listen_on_it_again_and_again() -> None:
    ports = ReservedPorts()
    where = ("127.0.0.1", ports.draw())
    for _ in range(2):
        with socket.create_server(where), socket.create_connection(where, timeout=10):
            pass
    with socket.socket() as probe, pytest.raises(OSError, match="in use"):
        probe.bind(where)


def test_the_reservation_ends_with_its_owner() -> None:
    ports = ReservedPorts()
    port = ports.draw()
    del ports
    gc.collect()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
