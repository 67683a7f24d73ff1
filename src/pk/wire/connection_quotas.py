"""Who may have a connection to a listener: pending connections, clients, proven brokers and
controllers.

A pure core of pk.wire.socket_network.  A connection is *pending* until one of its streams said a
hello that was accepted.  Then it is *admitted*, as a client, or as a known peer: a broker or a
controller that proved itself (docs/design/0011-inbound-memory.md).

Pending connections never wait behind each other.  A full listener closes the pending connection
that came first, for it has had the most time for its hello: so silent connections displace each
other, and a peer that speaks gets in.  One address has at most half of all connections, and some
connections are reserved for known peers: clients cannot take them.

Invariants
  N9   at most `connections_max` connections are kept, pending connections and known peers included
  N10  clients have at most `connections_max` - `reserved` connections, those of one address at most
       half of all
  N11  a pending connection is turned away only if no other pending connection can go in its place
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Generic, TypeVar

C = TypeVar("C")

#: One of so many connections is reserved for known peers.
RESERVED_SHARE = 8
#: One address may have one of so many connections.
ADDRESS_SHARE = 2


def host_of(peer: str) -> str:
    """The host of `HOST:PORT`, without brackets; '' of a Unix socket."""
    if peer.startswith("unix"):
        return ""
    return peer.rpartition(":")[0].removeprefix("[").removesuffix("]")


def proven_by_address(peer: str, addresses: Iterable[str]) -> bool:
    """Whether a connection comes from a host of `addresses`, or through a socket of this node.

    A loopback address proves nothing: every process of the machine has it.
    """
    host = host_of(peer)
    if not host:
        return True
    if host.startswith("127.") or host == "::1":
        return False
    return any(host == host_of(address) for address in addresses)


class ConnectionQuotas(Generic[C]):
    """The connections of one listener.  `C` is what names one; an address of '' is not counted."""

    def __init__(self, connections_max: int) -> None:
        self.connections_max = connections_max
        self.reserved = connections_max // RESERVED_SHARE
        self.per_address = max(1, connections_max // ADDRESS_SHARE)
        self._address: dict[C, str] = {}
        self._pending: dict[C, None] = {}  #: the first to come first
        self._known: dict[C, None] = {}
        self._clients: Counter[str] = Counter()  #: admitted ones by address

    def __len__(self) -> int:
        return len(self._address)

    def arrive(self, connection: C, address: str) -> list[C]:
        """Take a pending connection in.  The caller closes whom this returns: others, or the
        pending connection (N11).

        Those are forgotten already.
        """
        self._address[connection] = address
        self._pending[connection] = None
        if len(self._address) <= self.connections_max:
            return []
        first = next(iter(self._pending))
        self.leave(first)
        return [first]

    def admit(self, connection: C, known: bool) -> str:
        """Its hello was accepted.  Returns why it is turned away, '' if it may stay."""
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
        """It is closed; idempotent."""
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
