"""The fetch streams of one broker, and the logs whose shape is being changed.

World-generic.  A `ReplicaFetcher` (replica/fetcher.py) serves the replicas of one directory that
follow one leader and are of one kind: members of the ISR, or replicas that catch up
(replica/fetch_limits.py).  This manager opens the fetchers and moves a replica from one to another
when the metadata change its leader, its leader epoch or its kind.

Invariants
  B1  A replica is on one stream at a time.  Its position on the next stream is set after every
      append of the last one is written or undone (replica/fetcher F2), so the next stream confirms
      at least what the last one did.
  B2  A replica changes its kind once the stream of the other kind is connected.  Until then it
      fetches where it did: acks=all waits for a member of the ISR.
  B3  All positions of the broker have numbers from one counter.  The leader compares the numbers
      of positions that come on different streams (Leader.is_newest).
"""

from __future__ import annotations

import asyncio
from functools import partial

from pk.log.manager import LogManager
from pk.server.metadata.cache import MetadataCache
from pk.server.metadata.image import PartitionState
from pk.server.replica.context import BrokerClocks, ControllerChannel, Environment
from pk.server.replica.fetch_limits import FetcherId, FetchKind
from pk.server.replica.fetch_state import PartitionFetchState
from pk.server.replica.fetcher import ReplicaFetcher
from pk.server.replica.partition import Partition
from pk.server.replica.state import HostedReplicas
from pk.tasks import TaskRegistry
from pk.types import PartitionKey
from pk.wire import pk_pb2 as wire


class ReplicaFetcherManager:
    """All followed partitions, by the stream that serves them."""

    def __init__(
        self,
        env: Environment,
        hello: wire.Hello,
        logs: LogManager,
        hosted: HostedReplicas,
        metadata: MetadataCache,
        controller: ControllerChannel,
        clocks: BrokerClocks,
    ) -> None:
        self._node_id = env.node_id
        self._logs = logs
        self._fetchers: dict[FetcherId, ReplicaFetcher] = {}
        self._open = partial(
            ReplicaFetcher, env, hello, logs, hosted, metadata, controller, clocks, self
        )
        self._position_id = 0  #: the number of the newest position (B3)
        #: replicas that change their kind once this fetcher is connected (B2)
        self._moving: dict[PartitionKey, tuple[ReplicaFetcher, Partition, PartitionState]] = {}
        #: logs that are being truncated or replaced (replica/fetcher F2)
        self.changing = TaskRegistry(partial(env.bug, "following a leader"))

    async def wait_until_idle(self, partition: Partition) -> None:
        """Wait until no append, truncation or replacement of the partition's log is under way."""
        while (task := self.changing.get(partition.key)) is not None:
            await asyncio.wait((task,))
        await partition.writer.settled(partition)

    def follow(self, partition: Partition, state: PartitionState) -> None:
        """Fetch `partition` from the leader that `state` names, on the stream of its kind; do
        nothing if it is fetched there already.
        """
        self._moving.pop(partition.key, None)
        fetcher = self._fetcher(partition, state)
        added = self._node_id in state.adding and self._node_id not in state.isr
        known = partition.replica
        if isinstance(known, PartitionFetchState) and known.follows(state):
            known.unclean_epoch = state.unclean_epoch
            if known.fetcher is fetcher:
                if not added:
                    fetcher.copied(known)
                return
            if not fetcher.is_connected:
                self._moving[partition.key] = fetcher, partition, state
                fetcher.expect()
                return
        self.leave(partition)
        replica = PartitionFetchState(fetcher, partition, state, copying=added)
        partition.follow(replica)
        fetcher.add(replica)

    def _fetcher(self, partition: Partition, state: PartitionState) -> ReplicaFetcher:
        """Return the fetcher that serves `partition` according to `state`."""
        directory_id = self._logs.directory_of(partition.key).directory_id
        kind = FetchKind.HOT if self._node_id in state.isr else FetchKind.CATCH_UP
        wanted = FetcherId(state.leader, directory_id, kind)
        if wanted not in self._fetchers:
            self._fetchers[wanted] = self._open(wanted)
        return self._fetchers[wanted]

    def connected(self, fetcher: ReplicaFetcher) -> None:
        """Move the replicas to `fetcher` that waited for its connection (B2)."""
        for target, partition, state in list(self._moving.values()):
            if target is fetcher:
                self.follow(partition, state)

    def next_position_id(self) -> int:
        """Return the number of a new position (B3)."""
        self._position_id += 1
        return self._position_id

    def leave(self, partition: Partition) -> None:
        """Stop fetching: this broker leads, the replica was removed, or no broker leads."""
        self._moving.pop(partition.key, None)
        replica = partition.detach()
        if isinstance(replica, PartitionFetchState):
            replica.fetcher.remove(replica)

    def brokers_changed(self) -> None:
        """Reconnect the streams whose leader's address, or whose broker epoch, has changed."""
        for fetcher in self._fetchers.values():
            fetcher.look_again()

    async def close(self) -> None:
        for fetcher in list(self._fetchers.values()):
            await fetcher.close()
        await self.changing.close()
