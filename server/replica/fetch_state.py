"""One partition that this broker follows, on one fetch stream.

World-generic.  A replica gets a new `PartitionFetchState` when its leader, the leader epoch or its
stream changes.  Tasks and answers that still belong to an older state have no effect: it is not
`current` any more.
"""

from __future__ import annotations

from typing import Protocol

from pk import errors
from pk.backoff import Backoff
from pk.server.metadata.image import PartitionState
from pk.server.replica.partition import Partition
from pk.types import Epoch, NodeId, Offset, PartitionKey

#: The waits of a replica that the leader refused, before it asks again: the wait doubles with each
#: refusal.  A new leader learns of its election within milliseconds.
AGAIN_MS = (10, 500)


class ServingFetcher(Protocol):
    """The stream that serves the replica (replica/fetcher.py)."""

    @property
    def leader(self) -> NodeId: ...

    @property
    def is_connected(self) -> bool: ...

    def expect(self) -> None: ...

    def add(self, replica: PartitionFetchState) -> None: ...

    def remove(self, replica: PartitionFetchState) -> None: ...

    def copied(self, replica: PartitionFetchState) -> None: ...

    def stored(self, replica: PartitionFetchState) -> None: ...

    def storage_full(self, replica: PartitionFetchState) -> None: ...

    def again(self, replica: PartitionFetchState) -> None: ...


class PartitionFetchState:
    """One partition that this broker follows, on one stream."""

    __slots__ = (
        "copying",
        "fetcher",
        "leader_epoch",
        "log_start",
        "partition",
        "placed",
        "position_id",
        "refusals",
        "unclean_epoch",
    )

    def __init__(
        self, fetcher: ServingFetcher, partition: Partition, state: PartitionState, *, copying: bool
    ) -> None:
        self.fetcher = fetcher
        self.partition = partition
        self.leader_epoch: Epoch = state.leader_epoch
        self.unclean_epoch: Epoch = state.unclean_epoch
        #: number of the newest position; answers to older ones are dropped (replica/fetcher F1)
        self.position_id = 0
        self.placed = False  #: the position was sent, or will be, and the log still ends there
        self.log_start: Offset = 0  #: the leader's log start
        self.refusals = Backoff(AGAIN_MS)  #: refusals in a row
        #: a reassignment adds it, and it was not caught up yet (replica/fetcher F5)
        self.copying = copying

    @property
    def key(self) -> PartitionKey:
        return self.partition.key

    def follows(self, state: PartitionState) -> bool:
        """Whether `state` names the leader and the leader epoch that this replica follows."""
        return (self.fetcher.leader, self.leader_epoch) == (state.leader, state.leader_epoch)

    @property
    def current(self) -> bool:
        return self.partition.replica is self

    def stored(self) -> None:
        """Confirm the stored records to the leader (watchers.Follows)."""
        self.fetcher.stored(self)

    def log_start_moved(self) -> None:
        """Report the new log start to the leader (watchers.Follows)."""
        self.fetcher.stored(self)

    def not_stored(self, error: errors.PkError) -> None:
        """Fetch the undone appends again (watchers.Follows)."""
        if isinstance(error, errors.StorageFull):
            self.fetcher.storage_full(self)
        else:
            self.fetcher.again(self)
