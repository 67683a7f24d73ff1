"""Copies the cluster's metadata to the tier, for a restore (rule T13).

World-generic.  The tier process reads the metadata from the active controller, so that neither the
controller nor the broker calls the store.  tiering/metadata_copies has the names and decides when a
copy is due.  A copy is a snapshot in the format of server/metadata/snapshot.

Invariants
  K1  A store that fails delays the copies and nothing else.  It is logged once until it works
      again, and asked again with back-off.
  K2  A controller that is away is no failure of the store.  The age of the newest copy shows it.
  K3  Only committed records are in a copy, and all of those below its end (see
      server/metadata/snapshot N1).
  K4  Nothing is copied or removed below a directory of another cluster (tiering/cluster_directory
      H1).
"""

from __future__ import annotations

from pk import errors, tracing
from pk.backoff import Backoff, equal_jitter
from pk.server.metadata import snapshot
from pk.server.metadata.image import MetadataImage
from pk.server.metadata.snapshot_loader import ControllerCalls, read_image, read_log
from pk.server.raft.snapshot_files import SNAPSHOT_BYTES_MAX
from pk.server.raft.snapshot_id import SnapshotId
from pk.tiering import metadata_copies, restore_records
from pk.tiering.cluster_directory import ClusterOwner
from pk.tiering.metadata_copies import CopyLook, MetadataCopies, MetadataName
from pk.tiering.objects import ObjectStore
from pk.tiering.stored_metadata import metadata_in
from pk.world import World

BACKOFF_MS = (1_000, 300_000)
TICK_MS = 1_000
#: The processes of a cluster begin within this time after a common start, in a random order.
SPREAD_MS = 2_000


class MetadataCopier:
    """Copies the metadata of one cluster.

    controller: calls the active controller
    interval_ms: the least time between two copies
    level: the highest level of `pk.format` that this node knows
    """

    def __init__(
        self,
        world: World,
        controller: ControllerCalls,
        store: ObjectStore,
        cluster_id: str,
        interval_ms: int,
        level: int,
        log: tracing.Log | None = None,
        metrics: tracing.Metrics | None = None,
    ) -> None:
        self._clock = world.clock
        self._rng = world.rng
        self._controller = controller
        self._store = store
        self._cluster_id = cluster_id
        self._interval_ms = interval_ms
        self._level = level
        self._log = log
        self._owner = ClusterOwner(store, cluster_id)
        self._copies = MetadataCopies()
        self._backoff = Backoff(BACKOFF_MS, equal_jitter(world.rng))
        self._failing = False
        self._superseded = False
        self._restores = 0  #: objects of restores in the store, none of which is of this cluster
        self._started_ms = world.clock.monotonic_ms()
        self._gauges = None if metrics is None else _Gauges(metrics)

    async def run(self) -> None:
        """Copy at every interval, for ever."""
        left_ms = self._rng.uniform(0, min(SPREAD_MS, self._interval_ms))
        while True:
            while left_ms > 0:  # the age grows between two passes
                await self._clock.sleep_ms(min(TICK_MS, left_ms))
                left_ms -= TICK_MS
                self._show_age()
            whole = await self.copy()
            if whole:
                self._backoff.reset()
            left_ms = self._interval_ms if whole else self._backoff.next_ms()

    async def copy(self) -> bool:
        """Write a copy if one is due; return False if controller or store did not do their part."""
        try:
            await self._require_not_restored()
            if not self._owner.checked:
                await self._read()
            due = await self._look()
            if due is CopyLook.WRITE:
                await self._write()
        except errors.RetriableError as problem:
            if isinstance(problem, errors.TierUnavailable):
                self._failed(problem)
            return False  # K2
        except errors.PkError as problem:
            self._failed(problem)
            return False
        self._succeeded()
        self._show_age()
        return True

    async def _require_not_restored(self) -> None:
        """Raise `ClusterRestored` if this cluster was restored from its tier as another one."""
        found = await self._store.list(restore_records.RESTORES)
        if len(found) == self._restores:
            return
        for each in await restore_records.restores_in(self._store):
            if each.source == self._cluster_id:
                raise errors.ClusterRestored(
                    f"this cluster was restored from its tier as cluster {each.cluster_id} "
                    f"(generation {each.generation}): stop it, what it stores reaches no table"
                )
        self._restores = len(found)

    async def _look(self) -> CopyLook:
        names = await metadata_in(self._store, self._cluster_id)
        newest = max(names, default=MetadataName(0, 0))
        reply = (await read_log(self._controller, 0, 1)).head.fetch_metadata_log_reply
        now = MetadataName(reply.leader_epoch, reply.high_watermark)
        if newest.end == now.end:
            now = min(now, newest)  # an epoch may have begun without a committed record
        due = self._copies.look(names, now, self._clock.monotonic_ms())
        self._say_superseded(newest, now, superseded=due is CopyLook.SUPERSEDED)
        return due

    async def _read(self) -> MetadataImage:
        """Return the metadata, after the check of who owns the copies (K4)."""
        image = await read_image(self._controller, self._clock, self._level)
        if image.cluster_id != self._cluster_id or not image.genesis:
            raise errors.ControllerUnavailable("the controller has no metadata of this cluster yet")
        await self._owner.require(image.genesis)
        return image

    async def _write(self) -> None:
        read_ms = self._clock.monotonic_ms()
        image = await self._read()
        name = MetadataName(image.leader_epoch, image.offset + 1)
        path = metadata_copies.metadata_path(self._cluster_id, name)
        await self._store.put_if_absent(path, await self._encode(image, name))
        self._copies.wrote(name, read_ms)
        found = await metadata_in(self._store, self._cluster_id)
        for old in metadata_copies.obsolete(found):
            await self._store.delete(found[old])

    async def _encode(self, image: MetadataImage, name: MetadataName) -> bytes:
        raw = bytearray()
        made = SnapshotId(name.end, name.epoch)
        for piece in snapshot.encode(made, snapshot.rows_of(image)):
            raw += piece
            if len(raw) > SNAPSHOT_BYTES_MAX:
                raise errors.StoreRefused(
                    f"a copy of the metadata above {SNAPSHOT_BYTES_MAX} bytes"
                )
            await self._clock.sleep_ms(0)
        return bytes(raw)

    # -- the log and the metrics -------------------------------------------------------------------

    def _say_superseded(self, newest: MetadataName, now: MetadataName, *, superseded: bool) -> None:
        if superseded and not self._superseded and self._log is not None:
            self._log.warning(
                "metadata_copy_superseded",
                epoch=now.epoch,
                newest_epoch=newest.epoch,
                advice="the metadata are older than the tier: move the files of _cluster away",
            )
        self._superseded = superseded

    def _failed(self, problem: errors.PkError) -> None:
        if not self._failing and self._log is not None:
            self._log.error(
                "metadata_copies_failing", error=type(problem).__name__, message=problem.message
            )
        self._failing = True
        if self._gauges is not None:
            self._gauges.failing.set(1)

    def _succeeded(self) -> None:
        if self._failing and self._log is not None:
            self._log.info("metadata_copies_recovered")
        self._failing = False
        if self._gauges is not None:
            self._gauges.failing.set(0)

    def _show_age(self) -> None:
        if self._gauges is not None:
            now_ms = self._clock.monotonic_ms()
            self._gauges.age.set(self._copies.age_ms(now_ms, self._started_ms))


class _Gauges:
    def __init__(self, metrics: tracing.Metrics) -> None:
        self.failing = metrics.gauge(
            "tier_metadata_copies_failing",
            "1 while the metadata cannot be copied to the tier (T13)",
        )
        self.age = metrics.gauge(
            "tier_metadata_copy_age_ms",
            "time since the newest copy of the metadata in the tier had every record",
        )
