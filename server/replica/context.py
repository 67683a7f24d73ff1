"""What the parts of a broker have in common, and the protocols through which they use each other.

World-generic.  `Environment` holds the facts and the facilities of the process.  It holds no part
of the broker: a part gets each collaborator by its constructor, as the object itself if its module
is below, or as one of these protocols.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from google.protobuf.message import Message

from pk.clock import Clock
from pk.log.plan import Now
from pk.server.replica.metrics import BrokerMetrics
from pk.types import NodeId, Offset, PartitionKey
from pk.wire import frames
from pk.world import World

OnBug = Callable[[str, BaseException], None]


@dataclass(slots=True)
class Environment:
    """The world, settings, metrics and reports of one broker process."""

    world: World
    node_id: NodeId
    server: Mapping[str, Any]  #: settings.SERVER
    metrics: BrokerMetrics
    bug: OnBug  #: reports an exception that is a bug of pk
    warn: Callable[..., None]  #: (event, **facts): one line in the process's log
    #: the same for an event that asks nothing of the operator
    say: Callable[..., None] = lambda event, **facts: None

    @property
    def clock(self) -> Clock:
        return self.world.clock

    @property
    def now_ms(self) -> int:
        """Return the monotonic time."""
        return self.world.clock.monotonic_ms()


class ControllerContact(Protocol):
    """The state of the link to the controller (broker/lifecycle.py)."""

    @property
    def want_shutdown(self) -> bool: ...

    def in_contact(self) -> bool: ...


class ControllerChannel(ControllerContact, Protocol):
    """The link to the active controller (broker/lifecycle.py)."""

    @property
    def broker_epoch(self) -> int: ...

    async def call(self, request: Message, timeout_ms: int) -> frames.Frame: ...

    def heartbeat_soon(self) -> None: ...

    def replica_online(self, key: PartitionKey) -> None:
        """End the report that the replica of `key` is offline."""
        ...


class MetadataProgress(Protocol):
    """How far the broker has reacted to the metadata log (broker/metadata_publisher.py)."""

    @property
    def listeners(self) -> dict[Any, None]: ...

    async def reached(self, offset: Offset, timeout_ms: int) -> None: ...


class InterBrokerCalls(Protocol):
    """Calls of the brokers by their id (broker/broker_channels.py)."""

    async def call(self, node_id: NodeId, request: Message, timeout_ms: int) -> Any: ...


class BrokerClocks(Protocol):
    """The clock of appends (broker/clock_watch.py)."""

    def now(self) -> Now: ...
