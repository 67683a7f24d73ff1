"""Interfaces through which the parts of a broker use its partitions, disks, clocks and controller.

World-generic.  `BrokerCore` (broker/core.py) composes the parts.  Each part takes one of these
protocols and imports neither the core nor the other parts.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from google.protobuf.message import Message

from pk import errors
from pk.clock import Clock
from pk.log.manager import LogManager
from pk.log.plan import Now
from pk.log.storage import Disk
from pk.server.metadata.image import MetadataImage, PartitionState
from pk.server.replica.directory_writer import LogDirWriter
from pk.server.replica.metrics import BrokerMetrics
from pk.server.replica.partition import Host, Partition
from pk.tasks import TaskRegistry
from pk.types import NodeId, PartitionKey
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.world import World


class ControllerChannel(Protocol):
    """The link to the active controller (broker/lifecycle.py)."""

    @property
    def broker_epoch(self) -> int: ...

    async def call(self, request: Message, timeout_ms: int) -> frames.Frame: ...

    def heartbeat_soon(self) -> None: ...


class MetadataView(Protocol):
    """The metadata image as far as this broker has applied the log
    (broker/metadata_publisher.py).
    """

    @property
    def image(self) -> MetadataImage: ...

    def registered(self) -> bool: ...

    def settings_of(self, topic: str) -> dict[str, Any]: ...

    def is_tiered(self, topic: str, wanted: dict[str, Any]) -> bool: ...

    def compared(self, key: PartitionKey) -> None: ...

    def take_office(self, partition: Partition, state: PartitionState) -> None: ...

    async def lead_or_follow(self, partition: Partition, state: PartitionState) -> None: ...

    async def discard(self, key: PartitionKey, partition: str) -> None: ...


class Fetchers(Protocol):
    """The replicas that this broker fetches from their leaders (fetcher.py)."""

    @property
    def changing(self) -> TaskRegistry: ...

    async def wait_until_idle(self, partition: Partition) -> None: ...


class CorruptionWatch(Protocol):
    """The handling of damaged ranges (corruption.py)."""

    def opened(self, partition: Partition) -> None: ...


class BrokerClocks(Protocol):
    """Whether the wall clock is trusted (broker/clock_watch.py)."""

    def now(self) -> Now: ...


class TierSwitch(Protocol):
    """Whether the server has an object store (tier/client.py)."""

    @property
    def enabled(self) -> bool: ...


class BrokerContext(Host, Protocol):
    """The interface of `BrokerCore` that the parts of the broker use."""

    @property
    def world(self) -> World: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def manager(self) -> LogManager: ...

    @property
    def server(self) -> Mapping[str, Any]: ...

    @property
    def metrics(self) -> BrokerMetrics: ...

    @property
    def bug(self) -> Callable[[str, BaseException], None]: ...

    @property
    def warn(self) -> Callable[..., None]: ...

    @property
    def hello(self) -> wire.Hello: ...

    @property
    def draining(self) -> bool: ...

    @property
    def partitions(self) -> dict[PartitionKey, Partition]: ...

    @property
    def lifecycle(self) -> ControllerChannel: ...

    @property
    def publisher(self) -> MetadataView: ...

    @property
    def fetchers(self) -> Fetchers: ...

    @property
    def corruption(self) -> CorruptionWatch: ...

    @property
    def clocks(self) -> BrokerClocks: ...

    @property
    def tier(self) -> TierSwitch: ...

    def address_of(self, node_id: NodeId) -> str: ...

    def writer_of(self, disk: Disk) -> LogDirWriter: ...

    def replica_failed(self, partition: Partition, error: errors.PkError) -> None: ...

    def damaged(self, partition: Partition, error: errors.CorruptLog) -> None: ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> None: ...
