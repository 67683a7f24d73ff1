"""Canaries: each breaks one rule of docs/PROTOCOL.md in the production classes, and the simulator
must notice.

A canary patches classes only while its context is open; production code has no switch for it.  The
canary's options choose few but frequent faults, those that make the broken rule matter.
`tests/data/canaries.json` holds for each canary a seed that notices it and that passes when the
rule is whole; CI replays only this seed.  `python -m pk.sim.canaries` searches for the seeds again,
up to SEEDS_MAX seeds for each canary.

A rule whose history is too rare for drawn faults has a directed test instead, which breaks the rule
in the same way: tests/sim/test_unsettled_leaders.py (rule L6).
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pk.log import identity, writing
from pk.log.directory import Directory
from pk.log.divergence import StartAt
from pk.log.manager import LogManager
from pk.log.validate import ValidationResult
from pk.server.broker.metadata_publisher import MetadataPublisher
from pk.server.controller.elections import PartitionChangeBuilder
from pk.server.controller.sessions import Sessions
from pk.server.metadata.cache import MetadataCache
from pk.server.raft.log import RaftLog
from pk.server.raft.log_writer import LogWriter
from pk.server.raft.machine import Quorum
from pk.server.raft.quorum_state_store import QUORUM_STATE, first_state
from pk.server.replica import follower
from pk.server.replica.leader import Leader
from pk.server.replica.partition import Partition
from pk.server.runtime.replayed_host import ReplayedHost
from pk.sim import (
    clock_canaries,
    format_canaries,
    log_canaries,
    move_canaries,
    tier_canaries,
)
from pk.sim.canary import FLUSHED, HOT, SAFE, THREE, TIERED, Canary
from pk.sim.compaction_canaries import COMPACTION_CANARIES
from pk.sim.group_canaries import GROUP_CANARIES
from pk.sim.job_canaries import JOB_CANARIES
from pk.sim.options import KEPT, NodePlan
from pk.sim.restore_canaries import RESTORE_CANARIES, RestoreCanary
from pk.sim.table_canaries import TABLE_CANARIES
from pk.sim.together_canaries import TOGETHER_CANARIES
from pk.sim.transaction_canaries import TRANSACTION_CANARIES

RECORD = Path(__file__).resolve().parents[1] / "tests" / "data" / "canaries.json"
SEEDS_MAX = 200


def _put(target: Any, name: str, value: Any) -> Callable[[ExitStack], None]:
    return lambda stack: stack.enter_context(patch.object(target, name, value)) and None


def _any(name: str, value: Any) -> Callable[[ExitStack], None]:
    return lambda stack: stack.enter_context(patch(name, value)) and None


# -- log and durability ----------------------------------------------------------------------------


def _answered_before_the_write() -> Any:
    append = Partition.append

    def early(self: Partition, *args: Any) -> None:
        append(self, *args)
        args[-1].answer(None)

    return _put(Partition, "append", early)


def _fenced_for_good() -> Any:
    heartbeat = Sessions.heartbeat

    def known_only(self: Sessions, broker_id: int, *given: int) -> None:
        if broker_id in self._by_broker:
            heartbeat(self, broker_id, *given)

    return _put(Sessions, "heartbeat", known_only)


def _flush_that_only_says_so() -> Any:
    sync = writing._sync_segment

    def lazy(storage: Any, segment: Any) -> None:
        if segment.path().startswith("__"):  # the metadata log is still flushed
            sync(storage, segment)

    return _put(writing, "_sync_segment", lazy)


def _duplicate_answered_at_once() -> Any:
    append = Partition.append

    def eager(self: Partition, *args: Any) -> None:
        append(self, *args)
        delayed = args[-1]
        if delayed.size == 0:  # a duplicate
            delayed.answer(None)

    return _put(Partition, "append", eager)


def _parked_replies_told_success() -> Any:
    def overtaken(self: Partition, leader_epoch: int | None) -> None:
        for delayed in self._host.purgatory.on_epoch(self.key, leader_epoch):
            delayed.answer(None)
        for delayed in list(self._inflight):
            delayed.answer(None)

    return _put(Partition, "_overtaken", overtaken)


def _log_start_seen_before_it_is_durable() -> Any:
    move = LogManager.move_log_starts

    async def eager(self: LogManager, moves: Any) -> None:
        for key, to in moves.items():
            log = self.get(key)
            if log is not None:
                log.advance_log_start(to)
        await move(self, moves)

    return _put(LogManager, "move_log_starts", eager)


# -- replication -----------------------------------------------------------------------------------


def _removal_counts_at_once() -> Any:
    proposed = Leader.on_isr_proposed

    def eager(self: Leader, isr: Any) -> None:
        proposed(self, isr)
        self.isr = tuple(isr)

    return _put(Leader, "on_isr_proposed", eager)


def _acknowledged_before_the_isr_has_it() -> Any:
    def alone(self: Leader) -> bool:
        before = self.high_watermark
        self.high_watermark = max(before, self._written_end)
        return self.high_watermark > before

    return _put(Leader, "_move", alone)


def _watermark_goes_back() -> Any:
    told = Leader.on_follower_end

    def back(self: Leader, replica: int, end: int, *args: Any, **more: Any) -> bool:
        moved = told(self, replica, end, *args, **more)
        self.high_watermark = min(self.high_watermark, end)
        return moved

    return _put(Leader, "on_follower_end", back)


def _elected_without_waiting() -> Any:
    recover = PartitionChangeBuilder._recover

    def hasty(self: PartitionChangeBuilder, cluster: Any, may_lose: bool) -> Any:
        last_known_only = not self.now.isr and not self.now.elr
        return recover(self, cluster, may_lose or last_known_only)

    return _put(PartitionChangeBuilder, "_recover", hasty)


def _cut_below_the_watermark() -> Any:
    cut_at = follower.cut_at

    def deep(*args: Any, **more: Any) -> Any:
        found = cut_at(*args, **more)
        return found._replace(offset=max(0, min(found.offset, more["high_watermark"] - 1)))

    return _put(follower, "cut_at", deep)


def _follower_begins_at_the_end() -> Any:
    find_divergence = Partition.find_divergence

    def skipping(self: Partition, *args: Any, **more: Any) -> Any:
        found = find_divergence(self, *args, **more)
        return StartAt(self.log.written_end) if isinstance(found, StartAt) else found

    return _put(Partition, "find_divergence", skipping)


# -- quorum and controller -------------------------------------------------------------------------


def _full_leader_keeps_leading() -> Any:
    return _put(PartitionChangeBuilder, "hand_over", lambda *_: False)


def _full_controller_keeps_leading() -> Any:
    return _put(RaftLog, "_resign_unless_alone", lambda _self: None)


def _vote_not_saved() -> Any:
    def forget(self: LogWriter[Any], vote: Any) -> None:
        """Keep the file as it was when the directory was formatted.

        Without a file the next start would be refused (rule Q5).
        """
        self.log.flush()
        if not self._disk.storage.exists(QUORUM_STATE):
            self._disk.storage.replace_file(QUORUM_STATE, first_state())

    return _put(LogWriter, "_save", forget)


def _replies_before_the_commit() -> Any:
    async def hasty(self: Any) -> None:
        replies: list[Any] = []
        while self._queue:
            command, future = self._queue.popleft()
            if not future.done():
                self._decide(command, future, replies)
        for future, reply, _effects in replies:
            if isinstance(reply, Exception):
                future.set_exception(reply)
            else:
                future.set_result(reply)
        if self._log.committed < self._log.end:
            await self._log.commit()

    return _put(ReplayedHost, "_round", hasty)


def _stray_taken_for_the_topic_of_its_name(stack: ExitStack) -> None:
    read, load = identity.read, MetadataPublisher.load
    ids: dict[str, str] = {}

    def by_name(storage: Any, path: str) -> Any:
        found = read(storage, path)
        if found is None:
            return None
        return found._replace(topic_id=ids.get(found.topic_partition.topic, found.topic_id))

    async def knowing(self: MetadataPublisher) -> None:
        ids.update((topic.name, topic.topic_id) for topic in self._metadata.image.topics.values())
        await load(self)

    _put(identity, "read", by_name)(stack)
    _put(MetadataPublisher, "load", knowing)(stack)


KILLS = ("kill_broker", "kill_leader", "pause", "isolate")
LOSSES = "V6 V8 V12 V14"

CANARIES: dict[str, Canary | RestoreCanary] = {
    "acknowledged before it is written": Canary(
        "L1", _answered_before_the_write(), "V5 V6", HOT, ("kill_broker", "torn_write")
    ),
    "a flush that only says so": Canary(
        "L2", _flush_that_only_says_so(), LOSSES, FLUSHED, ("power",)
    ),
    "lost data and stayed in the ISR": Canary(
        "L3", _put(PartitionChangeBuilder, "lose", lambda *_: None), f"V2 {LOSSES}", SAFE,
        ("power",), nodes=THREE, copies=3, fault_ms=20_000, fault_every_ms=(1_000, 4_000),
    ),
    # A batch waits behind a cut for its follower until its time is over, or its stream breaks, and
    # the producer sends it again.  The leader dies, and the follower, in sync all the time, leads
    # without the batch.
    "a duplicate answered at once": Canary(
        "L4", _duplicate_answered_at_once(), "V6", SAFE, ("cut", "flaky_network", "kill_leader"),
        nodes=THREE, copies=2, fault_ms=8_000, lag_ms=60_000, session_ms=12_000,
    ),
    # An administrator moves the leadership while a batch is on its way to the next leader over a
    # slow link: a broker that is no longer a follower does not fetch the batch any more.
    "success told when leadership is lost": Canary(
        "L5", _parked_replies_told_success(), "V6", SAFE, ("slow_network",),
        ("reassign", "elect"), nodes=THREE, copies=2, fault_ms=5_000, fault_every_ms=(200, 600),
    ),
    "a duplicate that is not recognised": Canary(
        "L6", _any("pk.log.validate.check_producer", lambda *_: (ValidationResult.ASSIGN, None)),
        "V5 V6 V7", HOT, ("break_streams", "kill_broker", "slow_network"),
    ),
    "who was silent once is heard of no more": Canary(
        "R7", _fenced_for_good(), "liveness", SAFE, ("pause",),
        nodes=THREE, copies=3, fault_ms=6_000, fault_every_ms=(200, 600),
    ),
    "HW moves below min ISR": Canary(
        "R1", _put(Leader, "in_sync_required", property(lambda _: 1)), "V13", SAFE, KILLS,
        nodes=THREE, copies=3, fault_ms=10_000,
    ),
    "a removal from the ISR counts before it is committed": Canary(
        "R2", _removal_counts_at_once(), "V13", {**HOT, "min_insync_replicas": "1"},
        ("cut", "pause", "isolate"), nodes=THREE, copies=3, fault_ms=20_000,
    ),
    # Replica A loses power and leaves the ISR, which is large enough without it.  Replica B commits
    # alone, loses power too and is the last-known replica.  B has registered but is not unfenced
    # yet when A is already there and could be elected at once.
    "elected without waiting for the last-known": Canary(
        "R3", _elected_without_waiting(), "V6 V12 V14", {**FLUSHED, "min_insync_replicas": "1"},
        ("power",), nodes=THREE, copies=2, fault_ms=6_000, fault_every_ms=(300, 1_500),
    ),
    "cut below the committed high watermark": Canary(
        "R4", _cut_below_the_watermark(), LOSSES, SAFE, KILLS,
        nodes=THREE, copies=3, fault_ms=20_000,
    ),
    "a follower that begins at the leader's end": Canary(
        "R5", _follower_begins_at_the_end(), "V4 V5 V6 V12 V14",
        {**TIERED, "min_insync_replicas": "1"}, ("isolate", "kill_leader", "replace_disk"),
        nodes=THREE, copies=2, fault_ms=20_000, fault_every_ms=(500, 3_000),
    ),
    "acknowledged before the ISR has it": Canary(
        "R2", _acknowledged_before_the_isr_has_it(), "V13", SAFE, KILLS,
        nodes=THREE, copies=3,
    ),
    "the high watermark goes back": Canary(
        "R2", _watermark_goes_back(), "V2 assertion", SAFE, KILLS, nodes=THREE, copies=3,
    ),
    "a full leader keeps leading": Canary(
        "L16", _full_leader_keeps_leading(), "V16", {**SAFE, "segment_bytes": "14336"},
        ("leader_full",), nodes=THREE, copies=3, fault_ms=60_000,
        fault_every_ms=(5_000, 15_000), reserve_bytes=16_000,
    ),
    "a full controller keeps leading": Canary(
        "L16", _full_controller_keeps_leading(), "V16", {**SAFE, "segment_bytes": "14336"},
        ("leader_full", "controller_full"), nodes=THREE, copies=3, fault_ms=60_000,
        fault_every_ms=(1_000, 6_000), reserve_bytes=16_000,
    ),
    "half is a majority": Canary(
        "Q1", _put(Quorum, "majority", property(lambda self: len(self.voters) // 2)), "V10",
        HOT, ("split", "kill_controller"), nodes=(*THREE, NodePlan(4)), fault_ms=20_000,
    ),
    "a vote that is not saved": Canary(
        "Q1", _vote_not_saved(), "V10", HOT, ("kill_controller", "split", "power"),
        nodes=THREE, fault_ms=20_000,
    ),
    # The controllers come back after a power loss and have fenced no broker yet.  The first
    # metadata image of a broker that comes back, too, still names it as leader, as its last process
    # was.
    "a broker that leads in the name of its predecessor": Canary(
        "Q2", _put(MetadataCache, "registered", lambda _: True), "V2 V12 V13 V14",
        {**FLUSHED, "min_insync_replicas": "1"}, ("power",), nodes=THREE, copies=2,
        fault_ms=4_000, fault_every_ms=(500, 2_500),
    ),
    # A broker dies.  Its topic is deleted and created again before the broker is fenced, so that
    # the broker is a replica again.  It comes back and finds the directory of the earlier topic.
    "a stray that is taken for the topic of its name": Canary(
        "Q2", _stray_taken_for_the_topic_of_its_name, "V6 V12", SAFE,
        ("cut", "isolate", "kill_broker", "kill_machine"), ("recreate",), nodes=THREE, copies=3,
        fault_ms=6_000, session_ms=4_000,
    ),
    "replies before the commit": Canary(
        "Q3", _replies_before_the_commit(), "V15 V6 V7", HOT,
        ("kill_controller", "kill_broker", "isolate"), nodes=THREE, fault_ms=10_000,
    ),
    # Replicas of the original lag while a new one is in sync; the move is cancelled.
    "cancel below min ISR": Canary(
        "R8", move_canaries.copies_not_counted, f"V18 {LOSSES}",
        SAFE, KILLS, ("resize",), nodes=(*THREE, NodePlan(4)), copies=2, fault_ms=20_000,
        lag_ms=500,
    ),
    # All members of the ISR are away, and the topic allows loss.
    "adding replica elected": Canary(
        "R9", move_canaries.any_replica_elected, "V18",
        {**HOT, "min_insync_replicas": "1", "unclean_leader_election_enable": "true"},
        ("kill_machine", "kill_machine", "kill_leader", "power", "isolate"), ("resize",),
        nodes=(*THREE, NodePlan(4)), copies=1, fault_ms=20_000, lag_ms=500,
    ),
    "plan by topic name": Canary(
        "R10", move_canaries.topic_by_name, "V18", SAFE,
        ("slow_network",), ("recreate", "resize"), nodes=THREE, copies=2, fault_ms=6_000,
    ),
    "a table that takes any range": Canary(
        "T3", tier_canaries.takes_any_range, "V4 V9 assertion", TIERED, ("late_commit",)
    ),
    "a log that wins over its table": Canary(
        "T4", _any("pk.server.tier.epoch_fence.agrees", lambda *_, **_more: True),
        "V4 V6 V9 V12 assertion", TIERED, ("power",),
    ),
    # The reply to a commit is lost, and the copier deletes the file.  Rule T6 would upload the file
    # again before local data is dropped, which does not happen in this run.
    "a copier that tidies up after a failed commit": Canary(
        "T5", tier_canaries.tidies_up_after_a_commit, "V9",
        {**TIERED, "local_drop_delay_ms": "60000"}, ("store_flaky",),
    ),
    "dropped before the tier has it": Canary(
        "T6", tier_canaries.dropped_before_the_tier_has_it, "V4", TIERED, ("store_outage",)
    ),
    "a page whose checksum is not verified": Canary(
        "T10", tier_canaries.pages_not_verified, "V5 V6 V7", TIERED,
        ("object_rot", "object_rot", "object_rot", "kill_client", "kill_tier"),
        fault_ms=10_000, fault_every_ms=(20, 60),
    ),
    # A load accepts a version that lacks a file, or that has a later end of the table.
    "a Delta log whose checksums are not verified": Canary(
        "T2", tier_canaries.delta_log_not_verified, "V4 V5 V6 V9 assertion", TIERED,
        ("delta_rot", "delta_rot", "kill_client", "kill_tier"),
        fault_ms=10_000, fault_every_ms=(50, 200),
    ),
    "missing rows that are not counted": Canary(
        "T17", tier_canaries.rows_not_counted, "V5", {**TIERED, **KEPT},
        ("delete_rows", "delete_rows", "kill_client", "kill_tier"),
        fault_ms=10_000, fault_every_ms=(50, 200),
    ),
    # The follower is out of the ISR while the leader's copy rots, and a reader starts from the
    # beginning.
    "a damaged range that is passed over in silence": Canary(
        "L9", log_canaries.damaged_range_not_told, "V5",
        {**HOT, "min_insync_replicas": "1", "unclean_leader_election_enable": "true"},
        ("rot", "rot", "rot", "kill_client", "kill_client", "cut", "isolate", "kill_machine"),
        nodes=THREE, copies=2, fault_ms=10_000, fault_every_ms=(50, 300), recent_bytes=0,
    ),
    "a clock that jumped makes producers unknown": Canary(
        "L10", clock_canaries.trusted_for_producers, "V5 V6 V7", HOT,
        ("clock_jump", "break_streams", "late_frames"), fault_ms=8_000, expiration_ms=120_000,
    ),
    "retention believes the clock after a start": Canary(
        "L10", clock_canaries.believed_after_a_start, "V3 V5 V6",
        {**HOT, "segment_bytes": "14336", "retention_ms": "7200000"},
        ("wrong_start",), fault_ms=8_000, fault_every_ms=(500, 2_000),
    ),
    # The machine of the active controller jumps ahead.  Its broker finds that the old readings
    # agree with the wrong clock, trusts it, and retention deletes records.  Producers pause for
    # longer than retention needs from the roll of the active segment to the drop.
    "other clocks follow the controller's when it is set": Canary(
        "L10", clock_canaries.relative_to_the_controllers_wall_clock, "V3 V5 V6",
        {**HOT, "segment_bytes": "14336", "retention_ms": "7200000"},
        ("clock_jump",), nodes=THREE, fault_ms=8_000, fault_every_ms=(500, 2_000),
        session_ms=6_000, heartbeat_ms=1_500, pace_ms=(500, 1_500),
    ),
    # All brokers restart with clocks that are behind, and set horizons that have passed once the
    # clocks are set right.
    "by a clock that is behind a process is older": Canary(
        "L10", clock_canaries.older_by_a_wrong_clock, "V28 V29", HOT,
        ("wrong_start",), nodes=THREE, copies=3, compacted={"delete_retention_ms": "60000"},
        fault_ms=24_000, fault_every_ms=(3_000, 8_000),
    ),
    # A full directory has no space for the new names of dropped segments; the next drop takes later
    # segments.
    "a dropped segment that keeps its name": Canary(
        "L2", log_canaries.what_was_not_renamed_is_forgotten, "V5 liveness",
        {**HOT, "segment_bytes": "14336", "retention_bytes": "30000"},
        ("disk_short", "kill_broker"), fault_ms=8_000,
    ),
    "a lack of descriptors fails the directory": Canary(
        "L2", log_canaries.lack_of_descriptors_fails_the_directory,
        "V5 n1/controller liveness", HOT,
        ("no_descriptors",), ("grow",),
    ),
    "a directory without identity is out of the way": Canary(
        "L15", log_canaries.directory_out_of_the_way, f"V5 {LOSSES}", HOT, ("identity_lost",)
    ),
    # Both replicas are down, and one has lost its log.  This replica comes back first and leads,
    # because ISR or ELR still name it.
    "a missing log begun empty in the ISR": Canary(
        "L15", _put(Directory, "had", lambda *_: False), f"V2 V5 {LOSSES}", SAFE,
        ("partition_lost", "kill_machine", "kill_leader"), nodes=THREE, copies=2, fault_ms=20_000,
    ),
    # The replica joins the ISR as if it were whole.
    "first segments that are missing in silence": Canary(
        "L9", log_canaries.missing_front_not_compared, "V4 V5 liveness",
        {**SAFE, "segment_bytes": "14336"},
        ("front_lost", "front_lost", "kill_client", "kill_leader"), nodes=THREE, copies=3,
        fault_ms=10_000, fault_every_ms=(200, 1_000),
    ),
    # A newer build ran on the disk of a node for a moment; then this build is started there.
    "a checkpoint of another version read as empty": Canary(
        "L21", format_canaries.read_as_empty, "format V3 V5", HOT, ("other_version",),
        ("delete_records",), fault_ms=8_000, fault_every_ms=(1_000, 2_000),
    ),
    "an unknown field that is dropped": Canary(
        "Q7", format_canaries.unknown_field_dropped, "format", HOT, ("unknown_field",),
        ("configure", "elect"), nodes=THREE, copies=2, fault_ms=15_000,
        fault_every_ms=(1_000, 3_000), snapshot_bytes=3_000,
    ),
    # An older build starts in a cluster of a newer level with an empty disk, or on a disk that was
    # away while the level was raised.
    "a level that is not compared": Canary(
        "Q6", format_canaries.level_not_compared, "format", HOT, ("older_build",),
        ("upgrade", "elect"), nodes=THREE, copies=2, fault_ms=20_000,
        fault_every_ms=(3_000, 8_000),
    ),
    "log_start seen before it is durable": Canary(
        "T9", _log_start_seen_before_it_is_durable(), "V3 V4 V5", HOT,
        ("disk_full", "kill_broker"), ("delete_records",),
    ),
    **TRANSACTION_CANARIES,
    **JOB_CANARIES,
    **TOGETHER_CANARIES,
    **GROUP_CANARIES,
    **COMPACTION_CANARIES,
    **TABLE_CANARIES,
    **RESTORE_CANARIES,
}  # fmt: skip


def recorded() -> dict[str, int]:
    """Return the recorded seed of each canary."""
    found: dict[str, int] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return found


def find(name: str, first: int = 1) -> int | None:
    """Return the first seed that notices the canary and passes with the rule whole.

    Returns None if none of SEEDS_MAX seeds does.
    """
    canary = CANARIES[name]
    for seed in range(first, first + SEEDS_MAX):
        violation = canary.notices(seed)
        if not violation:
            continue
        known = canary.passes(seed)
        right = "caught" if canary.caught(violation) and not known else "WRONG"
        print(f"{canary.rule} {name}: seed {seed}: {right}: {violation[:160]}", flush=True)
        if known:
            print(f"without the canary too: {known[:160]}", flush=True)
        elif canary.caught(violation):
            return seed
    print(f"{canary.rule} {name}: NOT CAUGHT", flush=True)
    return None


def main(names: list[str]) -> int:
    """Search the seeds of the named canaries, or of all, and record them."""
    logging.disable(logging.CRITICAL)
    for name in names or CANARIES:
        seed = find(name)
        found = recorded()
        if seed is not None:
            RECORD.write_text(json.dumps({**found, name: seed}, indent=1, sort_keys=True) + "\n")
    return 0 if set(recorded()) >= set(CANARIES) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
