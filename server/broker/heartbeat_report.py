"""What a broker's heartbeat says of its directories and replicas.

World-generic.  The link to the controller (broker/lifecycle.py) calls these methods when it makes a
heartbeat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pk.log.manager import LogManager
from pk.server.broker.clock_watch import ClockWatch
from pk.server.controller.reports import STORAGE_FULL
from pk.server.metadata.cache import MetadataCache
from pk.server.replica.directory_writers import LogDirWriters
from pk.server.replica.partition import Partition
from pk.server.replica.state import HostedReplicas
from pk.tasks import TaskRegistry
from pk.types import NONE, NodeId, PartitionKey
from pk.wire import pk_pb2 as wire


class HeartbeatReport:
    """Reads the state of one broker; it changes nothing."""

    def __init__(
        self,
        node_id: NodeId,
        manager: LogManager,
        metadata: MetadataCache,
        replicas: HostedReplicas,
        partitions: Mapping[PartitionKey, Partition],
        writers: LogDirWriters,
        clocks: ClockWatch,
        changing: TaskRegistry,
    ) -> None:
        self._node_id = node_id
        self._manager = manager
        self._metadata = metadata
        self._replicas = replicas
        self._partitions = partitions
        self._writers = writers
        self._clocks = clocks
        self._changing = changing  #: logs that are being truncated or replaced

    def offline_directories(self) -> list[str]:
        """Return the ids of the directories that failed."""
        return [
            each.directory_id
            for each in self._manager.directories
            if each.failed is not None or each.disk.storage.failed is not None
        ]

    def offline_replicas(self) -> list[wire.FetchPartition]:
        """Return the replicas that the broker reports to the controller as offline.

        These are replicas that are damaged or in a failed directory (L2, L9), UNOPENED replicas,
        replicas whose log an operator adopted or discarded (L15), and rebuilt replicas that their
        leader has not compared yet (broker/metadata_publisher M8).  A replica that waits for its
        tier's table is not reported, because it will be served.
        """
        lost = {key: None for key, each in self._partitions.items() if each.hosted.lost}
        image, uncompared = self._metadata.image, self._replicas.uncompared
        unopened = dict.fromkeys(self._replicas.unopened())
        closed = {**lost, **unopened, **self._manager.operator_marked}
        found = []
        for key in {**uncompared, **closed}:
            state = image.partition(key)
            if state is None or self._node_id not in state.replicas:
                continue
            if key in closed or state.leader_epoch == uncompared.get(key):
                found.append(wire.FetchPartition(topic_id=key.topic_id, partition=key.partition))
        return found

    def unfit(self) -> list[wire.Unfit]:
        """Return which replicas here should not lead, and why (rules L10, L16)."""
        writers = [
            self._writers.of(each.disk) for each in self._manager.directories if each.failed is None
        ]
        full = [writer for writer in writers if writer.space.full]
        short = [writer for writer in writers if not writer.space.full and not writer.space.roomy]
        found = self._clocks.unfit()
        for some, gives_up in ((full, True), (short, False)):
            if not some:
                continue
            said = wire.Unfit(reason=STORAGE_FULL, gives_up=gives_up, all=len(some) == len(writers))
            for key, partition in {} if said.all else self._partitions.items():
                if partition.writer in some:
                    said.replicas.add(topic_id=key.topic_id, partition=key.partition)
            found.append(said)
        return found

    def positions(self, asked: Sequence[wire.FetchPartition]) -> list[wire.ReplicaPosition]:
        """Return the log ends of those requested replicas that have no leader and no writes (R3).

        The controller asks again for the other replicas.  Their pending writes end soon.
        """
        found = []
        for each in asked:
            key = PartitionKey(each.topic_id, each.partition)
            partition, state = self._partitions.get(key), self._metadata.image.partition(key)
            if partition is None or state is None or state.leader != NONE:
                continue
            log, lost = partition.log, partition.hosted.lost
            if lost or log.written_end != log.log_end or key in self._changing:
                continue
            found.append(
                wire.ReplicaPosition(
                    topic_id=key.topic_id,
                    partition=key.partition,
                    last_epoch=log.epochs.latest,
                    log_end=log.written_end,
                )
            )
        return found
