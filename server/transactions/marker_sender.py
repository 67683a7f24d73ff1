"""Sends the markers of ended transactions to the leaders of their partitions (rules X3, X5).

World-generic.  A transaction is complete when each of its partitions has the marker below its high
watermark, or was deleted.  The sender asks again until then: markers may be written twice, and the
second one changes nothing (log/producers).

Invariants
  K1  Markers for one broker travel together; one request to it is in flight.  The markers of all
      participants of a job reach a partition in one request, and are one control batch there.
  K2  A partition counts as deleted only in a metadata image that is at least as new as the image of
      the leaders that asked about it.  An older image may not have its topic yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pk import errors, limits
from pk.backoff import Backoff, equal_jitter
from pk.server.metadata.cache import MetadataCache
from pk.server.replica.context import InterBrokerCalls
from pk.server.transactions.commands import ParticipantMarker
from pk.server.transactions.gathering import GatheredCalls
from pk.tasks import TaskRegistry
from pk.types import NONE, Epoch, NodeId, Offset, PartitionKey
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.world import World

CALL_TIMEOUT_MS = 10_000
BACKOFF_MS = (20, 1_000)
#: Partitions of all markers of one request.
REQUEST_PARTITIONS_MAX = 2_000
WAITING_MAX = 100_000


class Ending(NamedTuple):
    """A transaction that was decided.

    `markers`: one for a producer; one for each participant of a job.
    """

    transactional_id: str
    markers: tuple[ParticipantMarker, ...]
    coordinator_epoch: Epoch
    partitions: tuple[PartitionKey, ...]
    metadata_offset: Offset  #: the newest image of a leader that asked (K2)
    transaction: int = NONE  #: the number of a job's transaction
    batch: int = NONE  #: the batch of a job

    @property
    def name(self) -> tuple[object, ...]:
        """What tells this ending from others, also from one of another coordinator."""
        return self.transactional_id, self.transaction, self.markers[:1], self.coordinator_epoch


class _Write(NamedTuple):
    ending: Ending
    key: PartitionKey


class TransactionMarkerSender:
    """The markers that the coordinators of a broker have to deliver.

    `on_done`: called once with each ending whose markers are all written.
    """

    def __init__(
        self,
        world: World,
        metadata: MetadataCache,
        calls: InterBrokerCalls,
        on_done: Callable[[Ending], None],
        on_bug: Callable[[BaseException], None],
    ) -> None:
        self._world = world
        self._metadata = metadata
        self._calls = calls
        self._on_done = on_done
        self._writes: GatheredCalls[NodeId, _Write, None] = GatheredCalls(
            self._send, on_bug, request_max=REQUEST_PARTITIONS_MAX, waiting_max=WAITING_MAX
        )
        self._tasks = TaskRegistry(on_bug)

    async def close(self) -> None:
        await self._tasks.close()
        await self._writes.close()

    def deliver(self, ending: Ending) -> None:
        """Begin to deliver the markers of an ending, unless that runs already."""
        if ending.name not in self._tasks:
            self._tasks.spawn(self._deliver(ending), ending.name)

    def drop(self, ending: Ending) -> None:
        """Stop to deliver an ending: another broker coordinates it now."""
        self._tasks.cancel(ending.name)

    async def _deliver(self, ending: Ending) -> None:
        backoff = Backoff(BACKOFF_MS, equal_jitter(self._world.rng))
        left = list(ending.partitions)
        while True:
            left = [key for key in left if not self._deleted(key, ending.metadata_offset)]
            if left:
                written = await asyncio.gather(*(self._write(ending, key) for key in left))
                left = [key for key, done in zip(left, written, strict=True) if not done]
            if not left:
                break
            await self._world.clock.sleep_ms(backoff.next_ms())
        self._on_done(ending)

    def _deleted(self, key: PartitionKey, metadata_offset: Offset) -> bool:
        image = self._metadata.image
        return image.offset >= metadata_offset and image.partition(key) is None  # K2

    async def _write(self, ending: Ending, key: PartitionKey) -> bool:
        """Have one partition's leader write the marker; False: it must be asked again."""
        leader = self._metadata.leader_of(key)
        if leader == NONE:
            return False
        try:
            await self._writes.ask(leader, _Write(ending, key))
        except errors.PkError:
            return False
        return True

    async def _send(
        self, node_id: NodeId, writes: Sequence[_Write]
    ) -> Sequence[errors.PkError | None]:
        results: list[errors.PkError | None] = []
        for part in _parts(writes):
            results += await self._send_part(node_id, part)
        return results

    async def _send_part(
        self, node_id: NodeId, writes: Sequence[_Write]
    ) -> Sequence[errors.PkError | None]:
        request = wire.WriteTxnMarkersRequest()
        index: dict[ParticipantMarker, int] = {}
        for ending, key in writes:
            for marker in ending.markers:
                if marker not in index:
                    index[marker] = len(index)
                    request.markers.add(
                        producer_id=marker.producer_id,
                        producer_epoch=marker.producer_epoch,
                        commit=marker.commit,
                        coordinator_epoch=ending.coordinator_epoch,
                        partition_count=len(ending.partitions),
                        batch_id=ending.batch,
                        application="" if ending.batch == NONE else ending.transactional_id,
                    )
                request.markers[index[marker]].partitions.add(
                    topic_id=key.topic_id, partition=key.partition
                )
        reply: wire.WriteTxnMarkersReply = await self._calls.call(node_id, request, CALL_TIMEOUT_MS)
        answered: dict[tuple[int, PartitionKey], errors.PkError | None] = {}
        for result in reply.results:
            key = PartitionKey(result.topic_id, result.partition)
            failed = result.HasField("error")
            answered[result.marker, key] = frames.raise_error(result.error) if failed else None
        missing = errors.BrokerUnavailable(f"broker {node_id} left out a marker")
        return [
            next(
                (
                    failure
                    for marker in ending.markers
                    if (failure := answered.get((index[marker], key), missing)) is not None
                ),
                None,
            )
            for ending, key in writes
        ]


def _parts(writes: Sequence[_Write]) -> Iterator[Sequence[_Write]]:
    """Return the writes of each request: markers times partitions are bounded."""
    part: list[_Write] = []
    count = 0
    for each in writes:
        if part and count + len(each.ending.markers) > limits.TXN_MARKERS_MAX:
            yield part
            part, count = [], 0
        part.append(each)
        count += len(each.ending.markers)
    if part:
        yield part
