"""Requests of transactions: of clients to a coordinator, and between brokers.

World-generic.  Questions of leaders and markers are requests of brokers: a peer that has not proven
that it is a broker of this cluster gets InvalidRequest, so a client cannot forge a marker.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence

from pk import errors, limits
from pk.log.control_rows import Marker
from pk.server.broker.hosted_partitions import HostedPartitions
from pk.server.replica.context import BrokerClocks, Environment, MetadataProgress
from pk.server.replica.markers import write_markers
from pk.server.transactions.coordinator import TransactionCoordinators
from pk.server.transactions.verifier import TransactionVerifier
from pk.transactional_ids import is_transactional, partition_of_producer
from pk.types import NONE, PartitionKey
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import Handler

#: How long a coordinator waits for the metadata that a leader knows.
METADATA_WAIT_MS = 3_000
#: How long a leader waits until its marker is below the high watermark.
MARKER_WAIT_MS = 8_000


class TransactionRequests:
    """Answers the requests of transactions for one broker."""

    def __init__(
        self,
        env: Environment,
        partitions: HostedPartitions,
        clocks: BrokerClocks,
        coordinators: TransactionCoordinators,
        verifier: TransactionVerifier,
        progress: MetadataProgress,
    ) -> None:
        self._env = env
        self._partitions = partitions
        self._clocks = clocks
        self._verifier = verifier
        self._progress = progress
        self.init_producer = coordinators.init_producer
        self.end = coordinators.end
        self.abort = coordinators.abort
        self.forget = coordinators.forget
        self.describe = coordinators.describe
        self.list = coordinators.list
        self.heartbeat = coordinators.heartbeat
        self.commit_participants = coordinators.commit_participants
        self.prepare_participants = coordinators.prepare_participants
        self.abort_participants = coordinators.abort_participants
        self._join = coordinators.join
        self._add_partitions = coordinators.add_partitions

    def between_brokers(self) -> dict[str, Handler]:
        """Return the handlers of requests that only brokers send, by name."""
        return {
            "add_partitions_to_txn": lambda request, _: self.add_partitions(request),
            "write_txn_markers": lambda request, _: self.write_markers(request),
        }

    async def join(self, request: wire.JoinTransactionRequest) -> wire.JoinTransactionReply:
        """Make a task a participant of its batch (rule X5)."""
        return await self._join(request, self._progress, METADATA_WAIT_MS)

    async def add_partitions(
        self, request: wire.AddPartitionsToTxnRequest
    ) -> wire.AddPartitionsToTxnReply:
        """Answer the questions of a leader (rules X3, X6)."""
        return await self._add_partitions(request, self._progress, METADATA_WAIT_MS)

    async def write_markers(
        self, request: wire.WriteTxnMarkersRequest
    ) -> wire.WriteTxnMarkersReply:
        """Write the markers of a coordinator to the partitions that this broker leads (rule X5).

        Each result is sent once the marker is below the high watermark, or says why it is not.
        """
        markers: defaultdict[PartitionKey, list[tuple[int, Marker]]] = defaultdict(list)
        count = 0
        for index, item in enumerate(request.markers):
            marker = self._marker(item)
            count += len(item.partitions)
            for place in item.partitions:
                markers[PartitionKey(place.topic_id, place.partition)].append((index, marker))
        if count > limits.TXN_MARKERS_MAX:
            raise errors.InvalidRequest(f"{count} markers in one request")
        outcomes = await asyncio.gather(
            *(self._written(key, [each for _, each in found]) for key, found in markers.items())
        )
        reply = wire.WriteTxnMarkersReply()
        for (key, found), outcome in zip(markers.items(), outcomes, strict=True):
            for (index, _), error in zip(found, outcome, strict=True):
                result = reply.results.add(
                    marker=index, topic_id=key.topic_id, partition=key.partition
                )
                if error is not None:
                    result.error.CopyFrom(frames.error_of(error))
        return reply

    def _marker(self, item: wire.TxnMarker) -> Marker:
        if not is_transactional(item.producer_id):
            raise errors.InvalidRequest(f"producer id {item.producer_id} has no coordinator")
        self._verifier.heard(partition_of_producer(item.producer_id), item.coordinator_epoch)
        return Marker(
            item.producer_id,
            item.producer_epoch,
            item.commit,
            item.coordinator_epoch,
            item.partition_count,
            item.batch_id,
            item.application,
        )

    async def _written(
        self, key: PartitionKey, markers: list[Marker]
    ) -> Sequence[errors.PkError | None]:
        """Write markers to one partition; return the error of each, None = written."""
        deadline_ms = self._env.now_ms + MARKER_WAIT_MS
        try:
            partition = self._partitions.find(key)
            return await write_markers(partition, markers, NONE, self._clocks.now(), deadline_ms)
        except errors.PkError as error:
            return [error] * len(markers)
