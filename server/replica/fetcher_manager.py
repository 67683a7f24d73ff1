"""The fetch streams of one broker, and the logs whose shape is being changed.

World-generic.  A `ReplicaFetcher` (replica/fetcher.py) serves all replicas that follow one leader.
This manager opens one fetcher per leader and moves a replica from one to another.
"""

from __future__ import annotations

import asyncio
from functools import partial

from pk.log.manager import LogManager
from pk.server.metadata.cache import MetadataCache
from pk.server.metadata.image import PartitionState
from pk.server.replica.context import BrokerClocks, ControllerChannel, Environment
from pk.server.replica.fetcher import PartitionFetchState, ReplicaFetcher
from pk.server.replica.partition import Partition
from pk.server.replica.state import HostedReplicas
from pk.tasks import TaskRegistry
from pk.types import NodeId
from pk.wire import pk_pb2 as wire


class ReplicaFetcherManager:
    """All followed partitions, by the broker that leads them."""

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
        self._fetchers: dict[NodeId, ReplicaFetcher] = {}
        self._open = partial(
            ReplicaFetcher, env, hello, logs, hosted, metadata, controller, clocks, self
        )
        #: logs that are being truncated or replaced (replica/fetcher F2)
        self.changing = TaskRegistry(partial(env.bug, "following a leader"))

    async def wait_until_idle(self, partition: Partition) -> None:
        """Wait until no append, truncation or replacement of the partition's log is under way."""
        while (task := self.changing.get(partition.key)) is not None:
            await asyncio.wait((task,))
        await partition.writer.settled(partition)

    def follow(self, partition: Partition, state: PartitionState) -> None:
        """Fetch `partition` from the leader that `state` names; do nothing if it is fetched
        already.
        """
        known = partition.replica
        if isinstance(known, PartitionFetchState):
            same = known.fetcher.leader == state.leader
            if same and known.leader_epoch == state.leader_epoch:
                known.unclean_epoch = state.unclean_epoch
                return
            self.leave(partition)
        fetcher = self._fetchers.get(state.leader)
        if fetcher is None:
            fetcher = self._fetchers[state.leader] = self._open(state.leader)
        replica = PartitionFetchState(fetcher, partition, state)
        partition.follow(replica)
        fetcher.add(replica)

    def leave(self, partition: Partition) -> None:
        """Stop fetching: this broker leads, the replica was removed, or no broker leads."""
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
