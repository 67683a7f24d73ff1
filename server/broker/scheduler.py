"""The periodic work of a broker: retention, flushes, checkpoints, gauges, in one task (rule P6).

World-generic.  The task runs in ticks.  Each tick starts the work that is due: it turns the wheel
of retention (broker/retention.py), flushes (broker/flushes.py), measures free space
(broker/free_space.py), sets gauges (broker/gauges.py), and writes checkpoints.  Work that needs a
disk runs in jobs beside the tick (broker/disk_jobs.py).

Invariants
  U2  A failure of one partition stops neither the wheel nor the retention of other partitions.
  U4  No tick waits for a disk or a store.  If one hangs, a dead follower must still leave the ISR,
      because partitions of every other directory may wait for its confirmation.  The jobs of other
      directories do not wait either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import partial

from pk.log.manager import LogManager
from pk.server.broker.clock_watch import ClockWatch
from pk.server.broker.disk_jobs import DiskJobs
from pk.server.broker.failures import FailureHandler
from pk.server.broker.flushes import Flushes
from pk.server.broker.free_space import FreeSpace
from pk.server.broker.gauges import BrokerGauges
from pk.server.broker.retention import TICK_MS, RetentionVisits
from pk.server.replica.alter_partition import AlterPartitionManager
from pk.server.replica.context import Environment
from pk.server.replica.partition import Partition
from pk.tasks import TaskRegistry
from pk.types import PartitionKey

GAUGES_MS = 5_000
#: Interval at which the broker stores that it runs and trusts its clock.
NOTE_RUN_MS = 30_000


class BrokerScheduler:
    """Runs the periodic work of one broker.  Call `start` once the partitions are loaded."""

    def __init__(
        self,
        env: Environment,
        manager: LogManager,
        clocks: ClockWatch,
        partitions: Mapping[PartitionKey, Partition],
        alter_partition: AlterPartitionManager,
        failures: FailureHandler,
        retention: RetentionVisits,
        flushes: Flushes,
        free_space: FreeSpace,
        gauges: BrokerGauges,
        jobs: DiskJobs,
    ) -> None:
        self._env = env
        self._manager = manager
        self._clocks = clocks
        self._partitions = partitions
        self._alter_partition = alter_partition
        self._failures = failures
        self._retention = retention
        self._flushes = flushes
        self._free_space = free_space
        self._gauges = gauges
        self._jobs = jobs
        self._checkpoint_at = 0
        self._gauges_at = 0
        self._noted = 0  #: boottime of the last run that was stored; 0 = none by this process
        self._led: deque[PartitionKey] = deque()  #: led partitions, next to check first
        self._led_all = 0  #: the length of `_led` when the round began
        self._led_at = 0  #: when to look for led partitions again, after none had a follower
        self._turns = 0.0
        self._tasks = TaskRegistry()

    def start(self) -> None:
        interval_ms = self._env.server["log_flush_offset_checkpoint_interval_ms"]
        self._checkpoint_at = self._env.now_ms + interval_ms
        self._tasks.spawn(self._run())

    async def close(self) -> None:
        await self._tasks.close()
        await self._retention.close()
        await self._jobs.close()

    async def _run(self) -> None:
        clock = self._env.clock
        while True:
            await clock.sleep_ms(TICK_MS)
            try:
                self._tick(clock.monotonic_ms())
            except Exception as bug:  # U2
                self._env.bug("upkeep", bug)

    def _tick(self, now_ms: int) -> None:
        """Start the work that is due; nothing here waits for a disk or a store (U4)."""
        self._clocks.gauges()
        self._note_run()
        self._flushes.start_due(now_ms)
        self._retention.remove_pending_delete(now_ms)
        self._consider_followers(now_ms)
        self._failures.notice_failed_directories()
        self._free_space.measure_due(now_ms)
        self._retention.turn()
        if now_ms >= self._checkpoint_at:
            interval_ms = self._env.server["log_flush_offset_checkpoint_interval_ms"]
            self._checkpoint_at = now_ms + interval_ms
            forget_ms = self._clocks.forget_before_ms()
            for each in self._manager.directories:
                work = partial(self._manager.checkpoint, each, forget_ms)
                self._jobs.beside("checkpoint", each.disk, work)
        if now_ms >= self._gauges_at:
            self._gauges_at = now_ms + GAUGES_MS
            self._gauges.set()

    def _note_run(self) -> None:
        """Store, at once and then every NOTE_RUN_MS, that the broker trusts its clock (L10)."""
        run = self._clocks.last_run()
        if run is None or (self._noted and run.boottime_ms - self._noted < NOTE_RUN_MS):
            return
        self._noted = run.boottime_ms
        for each in self._manager.directories:
            self._jobs.beside("last run", each.disk, partial(self._clocks.note, each, run))

    def _consider_followers(self, now_ms: int) -> None:
        """Have followers that make no progress removed from the ISR (replica/isr M1).

        Every led partition is checked twice per `replica_lag_time_max_ms`.
        """
        lag_ms = self._env.server["replica_lag_time_max_ms"]
        if not self._led:
            if now_ms < self._led_at:
                return
            self._led.extend(
                key
                for key, each in self._partitions.items()
                if each.leader is not None and len(each.leader.replicas) > 1
            )
            self._led_all = len(self._led)
            if not self._led:
                self._led_at = now_ms + lag_ms // 2
        turns = 2 * self._led_all * TICK_MS / lag_ms
        self._turns = min(self._turns + turns, float(len(self._led)))
        while self._turns >= 1 and self._led:
            self._turns -= 1
            partition = self._partitions.get(self._led.popleft())
            if partition is not None:
                self._alter_partition.consider(partition)
