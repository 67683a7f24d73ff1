"""Decides which connections a listener keeps: pending ones, clients, known brokers and controllers.

A pure core of pk.wire.socket_network.  A connection is *pending* until the server accepts a hello
on one of its streams.  Then it is *admitted*, either as a client, or as a known peer: a broker or
controller that proved its identity (docs/design/0011-inbound-memory.md).

Pending connections never wait for each other.  A full listener closes the oldest pending
connection, which has had the most time for its hello.  Silent connections thus displace each other,
and a peer that sends its hello gets in.  One address has at most half of all connections.  Some
connections are reserved for known peers, and clients cannot take them.

Invariants
  N9   The listener keeps at most `connections_max` connections, including pending ones and known
       peers.
  N10  Clients have at most `connections_max` - `reserved` connections; the clients of one address
       have at most half of all.
  N11  A pending connection is turned away only if there is no older pending connection to close
       instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Generic, TypeVar

C = TypeVar("C")

#: One connection of this many is reserved for known peers.
RESERVED_SHARE = 8
#: One address may have one connection of this many.
ADDRESS_SHARE = 2


def host_of(peer: str) -> str:
    """Return the host of `HOST:PORT`, without brackets; '' for a Unix socket."""
    if peer.startswith("unix"):
        return ""
    return peer.rpartition(":")[0].removeprefix("[").removesuffix("]")


def proven_by_address(peer: str, addresses: Iterable[str]) -> bool:
    """Return whether a connection comes from a host of `addresses`, or through a socket of this
    node.

    A loopback address proves nothing, because every process of the machine has it.
    """
    host = host_of(peer)
    if not host:
        return True
    if host.startswith("127.") or host == "::1":
        return False
    return any(host == host_of(address) for address in addresses)


class ConnectionQuotas(Generic[C]):
    """The connections of one listener; `C` identifies one.  An address of '' is not counted."""

    def __init__(self, connections_max: int) -> None:
        self.connections_max = connections_max
        self.reserved = connections_max // RESERVED_SHARE
        self.per_address = max(1, connections_max // ADDRESS_SHARE)
        self._address: dict[C, str] = {}
        self._pending: dict[C, None] = {}  #: pending connections, the oldest first
        self._known: dict[C, None] = {}
        self._clients: Counter[str] = Counter()  #: admitted clients by address

    def __len__(self) -> int:
        return len(self._address)

    def arrive(self, connection: C, address: str) -> list[C]:
        """Add a pending connection; return the connections that the caller must close (N11).

        They are removed from the quotas already.  The new connection may be one of them.
        """
        self._address[connection] = address
        self._pending[connection] = None
        if len(self._address) <= self.connections_max:
            return []
        first = next(iter(self._pending))
        self.leave(first)
        return [first]

    def admit(self, connection: C, known: bool) -> str:
        """Admit a connection after its hello; return why it must close, '' if it may stay."""
        if connection not in self._address or connection in self._known:
            return ""
        address = self._address[connection]
        if known:
            self._forget_client(connection)
            self._pending.pop(connection, None)
            self._known[connection] = None
            return ""
        if connection not in self._pending:
            return ""
        if address and self._clients[address] >= self.per_address:
            return f"{self.per_address} connections of {address} are open already"
        if self._clients.total() >= max(1, self.connections_max - self.reserved):
            return f"{self._clients.total()} connections are open already"
        del self._pending[connection]
        self._clients[address] += 1
        return ""

    def leave(self, connection: C) -> None:
        """Remove a closed connection; idempotent."""
        if connection not in self._address:
            return
        self._forget_client(connection)
        self._pending.pop(connection, None)
        self._known.pop(connection, None)
        del self._address[connection]

    def _forget_client(self, connection: C) -> None:
        if connection in self._pending or connection in self._known:
            return
        address = self._address[connection]
        self._clients[address] -= 1
        if not self._clients[address]:
            del self._clients[address]
