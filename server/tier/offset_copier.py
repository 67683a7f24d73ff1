"""Copies the committed offsets of groups to the tier, for a restore (rule T13).

World-generic.  The tier process asks its broker which partitions of `__consumer_offsets` it
coordinates, and reads their offsets in pages.  tiering/offset_copies decides what is written and
removed, tiering/offset_files has names and bytes.

Invariants
  K1  A store that fails delays the copies and nothing else.  It is logged once until it works
      again, and asked again with back-off.
  K2  A broker that is away, or that no longer coordinates a partition, is no failure.
  K3  A partition whose copy would be larger than COPY_BYTES_MAX is not copied, and the log says so.
  K5  Nothing is copied or removed below a directory of another cluster (tiering/cluster_directory
      H1).
  K4  Nothing is copied while the store has a copy of a later leader epoch.  That ends with the
      present epoch, unless the metadata log was restored from an older backup; the log says so.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.message import Message

from pk import errors, tracing
from pk.backoff import Backoff, equal_jitter
from pk.tiering import offset_copies, offset_files
from pk.tiering.cluster_directory import ClusterOwner
from pk.tiering.objects import ObjectStore
from pk.tiering.offset_copies import OffsetCopies
from pk.tiering.offset_files import CopyLines, CopyName
from pk.tiering.stored_offsets import copies_in
from pk.wire import pk_pb2 as wire
from pk.world import World

BACKOFF_MS = (1_000, 300_000)
_STORE = (
    errors.TierUnavailable,
    errors.StoreRefused,
    errors.TierOfAnotherCluster,
    errors.DamagedTierFile,
    errors.NewerFormat,
)


class OffsetCopier:
    """Copies the offsets of the groups of one coordinating broker.

    ask: asks the broker; raises its refusal
    interval_ms: the least time between two copies of a partition
    """

    def __init__(
        self,
        world: World,
        ask: Callable[[Message], Awaitable[Any]],
        store: ObjectStore,
        cluster_id: str,
        interval_ms: int,
        log: tracing.Log | None = None,
        metrics: tracing.Metrics | None = None,
    ) -> None:
        self._clock = world.clock
        self._ask = ask
        self._store = store
        self._cluster_id = cluster_id
        self._owner = ClusterOwner(store, cluster_id)
        self._interval_ms = interval_ms
        self._log = log
        self._copies = OffsetCopies(interval_ms)
        self._backoff = Backoff(BACKOFF_MS, equal_jitter(world.rng))
        self._too_large: set[int] = set()  #: partitions of K3, logged once
        self._failing = (
            None
            if metrics is None
            else metrics.gauge(
                "tier_offset_copies_failing", "1 while committed offsets cannot be copied (T13)"
            )
        )

    async def run(self) -> None:
        """Copy at every interval, for ever."""
        while True:
            whole = await self.copy()
            if whole:
                self._backoff.reset()
            wait_ms = self._interval_ms if whole else self._backoff.next_ms()
            await self._clock.sleep_ms(wait_ms)

    async def copy(self) -> bool:
        """Copy what is due; return False if broker or store did not do their part."""
        try:
            reply = await self._ask(wire.ListCoordinatedRequest())
        except errors.PkError:
            return False  # K2
        names = {
            each.partition: CopyName(each.leader_epoch, each.high_watermark)
            for each in reply.partitions
        }
        if not reply.genesis:  # the broker has no metadata yet
            return False
        whole = True
        for partition in self._copies.due(names.items(), self._clock.monotonic_ms()):
            try:
                await self._owner.require(reply.genesis)  # K5
                whole &= await self._copy(partition, names[partition])
            except _STORE as problem:  # K1
                self._failed(problem)
                return False
        return whole

    async def _copy(self, partition: int, name: CopyName) -> bool:
        """Copy one partition; return False if the broker no longer coordinates it (K2)."""
        copies = self._copies
        if not copies.is_listed(partition):
            found = await self._names(partition)
            copies.listed(partition, found)
            self._say_superseded(partition, name, max(found, default=name))
        if not copies.is_needed(partition, name):
            return True
        try:
            lines = await self._read(partition, name)
        except errors.PkError:
            return False
        if lines is None or not copies.changed(partition, name, lines.digest, lines.offsets):
            return True
        path = offset_files.copy_path(self._cluster_id, partition, name)
        now_ms = self._clock.wall_ms()
        raw = lines.encode(self._cluster_id, partition, name, now_ms)
        # an attempt whose reply was lost may have written it: at that time, and never changed since
        is_new = await self._store.put_if_absent(path, raw)
        digest = lines.digest if is_new else None
        copies.wrote(partition, name, digest, self._clock.monotonic_ms())
        found = await self._names(partition)
        copies.listed(partition, found)
        for old in offset_copies.obsolete(found):
            await self._store.delete(offset_files.copy_path(self._cluster_id, partition, old))
        self._succeeded()
        return True

    async def _names(self, partition: int) -> list[CopyName]:
        found = await copies_in(self._store, self._cluster_id, partition)
        return list(found.get(partition, ()))

    async def _read(self, partition: int, name: CopyName) -> CopyLines | None:
        """Return the offsets of a partition; None = they are too many (K3)."""
        lines = CopyLines()
        request = wire.ReadOffsetsRequest(partition=partition, leader_epoch=name.leader_epoch)
        while True:
            reply = await self._ask(request)
            lines.add(reply.groups)
            if lines.size > offset_files.COPY_BYTES_MAX:
                self._say_too_large(partition)
                return None
            if reply.done:
                self._too_large.discard(partition)
                return lines
            request.after.CopyFrom(_last(reply))

    # -- the log -----------------------------------------------------------------------------------

    def _say_superseded(self, partition: int, name: CopyName, newest: CopyName) -> None:
        """Report a copy of a later coordinator, once in a leader epoch (K4)."""
        if self._log is not None and newest.leader_epoch > name.leader_epoch:
            self._log.warning(
                "offset_copy_superseded",
                partition=partition,
                leader_epoch=name.leader_epoch,
                newest_epoch=newest.leader_epoch,
                advice="if no other broker coordinates it, the metadata are older than the tier: "
                "move the files of _cluster away",
            )

    def _say_too_large(self, partition: int) -> None:
        if self._log is not None and partition not in self._too_large:
            bound = offset_files.COPY_BYTES_MAX
            self._log.error("offset_copy_too_large", partition=partition, bytes_max=bound)
        self._too_large.add(partition)

    def _failed(self, problem: errors.PkError) -> None:
        if self._copies.failed() and self._log is not None:
            self._log.error(
                "offset_copies_failing",
                error=type(problem).__name__,
                message=problem.message,
            )
        if self._failing is not None:
            self._failing.set(1)

    def _succeeded(self) -> None:
        if self._copies.succeeded() and self._log is not None:
            self._log.info("offset_copies_recovered")
        if self._failing is not None:
            self._failing.set(0)


def _last(reply: wire.ReadOffsetsReply) -> wire.OffsetPlace:
    """Return the place of the last offset of a page; a page that is not the last one has some."""
    group = reply.groups[-1]
    topic = group.topics[-1]
    return wire.OffsetPlace(
        group_id=group.group_id, topic_id=topic.topic_id, partition=topic.partitions[-1]
    )
