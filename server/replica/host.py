"""What a partition needs of its broker (broker/partition_host.py).

World-generic.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from pk import errors
from pk.server.replica.delayed_produce import DelayedProduce
from pk.server.replica.purgatory import ProducePurgatory
from pk.server.replica.state import HostedReplicas
from pk.types import NodeId, PartitionKey

P = TypeVar("P", contravariant=True)  #: the partition


class Host(Protocol[P]):
    """What a partition needs of its broker."""

    @property
    def node_id(self) -> NodeId: ...

    @property
    def now_ms(self) -> int: ...  # of the monotonic clock

    @property
    def purgatory(self) -> ProducePurgatory[DelayedProduce]: ...

    @property
    def replicas(self) -> HostedReplicas: ...

    def parked(self) -> None:
        """Set the timer again, after a reply was parked that may have an earlier deadline."""
        ...

    def partition_moved(self, partition: P) -> None:
        """React to a partition whose watermark, log start, epoch or settings changed."""
        ...

    def storage_failed(self, partition: P, error: errors.PkError) -> None: ...

    def replica_failed(self, partition: P, error: errors.PkError) -> None: ...

    def damaged(self, partition: P, error: errors.CorruptLog) -> None: ...

    def retain_soon(self, key: PartitionKey) -> None: ...
