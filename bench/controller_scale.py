"""The cost of one decision of the controller when a broker has a hundred thousand partitions.

    python -m bench.controller_scale [--partitions 100000] [--brokers 4] [--factor 3]

Only the machine runs: decide, encode, apply; there is no disk and no network.  It prints one line
of JSON: CPU seconds of the whole decision and of its longest step (during a step the controller
does nothing else), records and bytes of the largest batch.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import time
from typing import Any

from pk import settings
from pk.server.controller import commands as c
from pk.server.controller import leaders
from pk.server.controller.batched_decision import CHANGES_MAX
from pk.server.controller.machine import Controller
from pk.server.controller.reports import reported
from pk.server.metadata.image import MetadataImage
from pk.server.metadata.records import decode_batches, encode_batch
from pk.types import PartitionKey
from pk.wire import pk_pb2 as wire

TOPIC_PARTITIONS = 1_000


class Cluster:
    """A controller machine and its log."""

    def __init__(self) -> None:
        self.machine = Controller(c.Rules(1, settings.SERVER.resolve({}), {}))
        self.batches: list[bytes] = []
        self.reports: dict[int, Any] = {}
        self.figures: dict[str, dict[str, float]] = {}

    @property
    def image(self) -> MetadataImage:
        return self.machine.image

    def do(self, what: str, command: Any) -> Any:
        """Run a command until it is complete; add its cost to the figures of `what`."""
        told = self.figures.setdefault(
            what, {"cpu_s": 0.0, "step_s": 0.0, "steps": 0, "records": 0, "batch_bytes": 0}
        )
        while True:
            start = time.process_time()
            decision = self.machine.decide(command, 0)
            raw = encode_batch(decision.records, 0) if decision.records else b""
            offset = self.image.offset + 1
            for record in decision.records:
                self.machine.apply(offset, record)
                offset += 1
            spent = time.process_time() - start
            told["cpu_s"] += spent
            told["step_s"] = max(told["step_s"], spent)
            told["steps"] += 1
            told["records"] += len(decision.records)
            told["batch_bytes"] = max(told["batch_bytes"], len(raw))
            self.batches.append(raw)
            if type(decision.reply).__name__ != "More":
                return decision.reply

    def register(self, what: str, broker: int, boot: str = "") -> None:
        request = wire.RegisterBrokerRequest(
            broker_id=broker,
            incarnation_id=f"{broker}{boot}",
            boot_id=f"{broker}{boot}",
            directory_ids=[f"dir{broker}"],
            address=f"b{broker}:1",
        )
        self.do(what, c.Register(request, False, self.reports))

    def beat(self, what: str, broker: int, positions: Any = ()) -> wire.BrokerHeartbeatReply:
        request = wire.BrokerHeartbeatRequest(
            broker_id=broker,
            broker_epoch=self.image.brokers[broker].broker_epoch,
            metadata_offset=self.image.offset,
        )
        for key in positions:
            request.positions.add(
                topic_id=key.topic_id, partition=key.partition, last_epoch=1, log_end=broker
            )
        report = reported(self.reports.get(broker), request, self.machine.leaderless)
        self.reports[broker] = report
        reply: wire.BrokerHeartbeatReply = self.do(
            what, c.Heartbeat(request, dict(self.reports), tuple(positions))
        )
        return reply

    def fence(self, what: str, broker: int) -> None:
        epoch = self.image.brokers[broker].broker_epoch
        self.do(what, c.Fence(broker, epoch, self.reports))


def fill(cluster: Cluster, partitions: int, brokers: int, factor: int) -> None:
    for broker in range(1, brokers + 1):
        cluster.register("register", broker)
        cluster.beat("register", broker)
    for number in range(partitions // TOPIC_PARTITIONS):
        new = wire.NewTopic(
            name=f"topic-{number}", partitions=TOPIC_PARTITIONS, replication_factor=factor,
            configs={"min_insync_replicas": str(max(1, factor - 1))},
        )  # fmt: skip
        topic_id = f"{number:08x}-0000-4000-8000-000000000000"
        request = wire.CreateTopicsRequest(topics=[new])
        cluster.do("create", c.CreateTopics(request, (topic_id,)))


def power_cut(cluster: Cluster, brokers: int) -> None:
    """All brokers lose power: sessions end, they register again, report and are elected."""
    for broker in range(1, brokers + 1):
        cluster.fence("power_cut_fences", broker)
    for broker in range(1, brokers + 1):
        cluster.register("power_cut_registrations", broker, "again")
    asked: dict[int, Any] = dict.fromkeys(range(1, brokers + 1), ())
    while cluster.machine.leaderless:
        for broker in asked:
            keys = [PartitionKey(k.topic_id, k.partition) for k in asked[broker]]
            asked[broker] = cluster.beat("power_cut_beats", broker, keys).report_positions
        left = tuple(cluster.machine.leaderless)
        for at in range(0, len(left), CHANGES_MAX):
            chunk = left[at : at + CHANGES_MAX]
            cluster.do("power_cut_recover", c.Recover(chunk, frozenset(), cluster.reports))


def rejoin(cluster: Cluster, broker: int) -> None:
    """Let every leader add `broker` to its ISR again."""
    items: dict[int, list[wire.AlterPartitionItem]] = {}
    epochs = {each.broker_id: each.broker_epoch for each in cluster.image.brokers.values()}
    for topic, number, state in cluster.image.partitions_of(broker):
        if broker not in state.isr and state.leader > 0:
            isr = [*state.isr, broker]
            item = wire.AlterPartitionItem(
                topic_id=topic.topic_id, partition=number, leader_epoch=state.leader_epoch,
                partition_epoch=state.partition_epoch, new_isr=isr,
                isr_broker_epochs=[epochs[member] for member in isr],
            )  # fmt: skip
            items.setdefault(state.leader, []).append(item)
    for leader, wanted in items.items():
        for start in range(0, len(wanted), 1_000):
            request = wire.AlterPartitionRequest(
                broker_id=leader, broker_epoch=epochs[leader], items=wanted[start : start + 1_000]
            )
            cluster.do("rejoin", c.AlterPartition(request, cluster.reports))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partitions", type=int, default=100_000)
    parser.add_argument("--brokers", type=int, default=4)
    parser.add_argument("--factor", type=int, default=3)
    given = parser.parse_args()
    cluster = Cluster()
    fill(cluster, given.partitions, given.brokers, given.factor)
    gc.collect()
    gc.freeze()
    cluster.fence("fence", 1)
    cluster.beat("unfence", 1)
    rejoin(cluster, 1)
    start = time.process_time()
    keys = tuple(leaders.imbalanced(cluster.image))
    cluster.figures["imbalanced"] = {"cpu_s": time.process_time() - start, "found": len(keys)}
    for at in range(0, len(keys), leaders.MOVES_MAX):
        cluster.do("prefer", c.Prefer(keys[at : at + leaders.MOVES_MAX], cluster.reports))
    cluster.register("lost_data", 2, "again")
    cluster.beat("lost_data", 2)
    rejoin(cluster, 2)
    power_cut(cluster, given.brokers)
    start = time.process_time()
    replayed, offset = MetadataImage(), 0
    for raw in cluster.batches:
        for at, record in decode_batches(raw):
            replayed.apply(offset + at, record)
        offset = replayed.offset + 1
    cluster.figures["replay"] = {"cpu_s": time.process_time() - start, "records": offset}
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rounded = {
        what: {name: round(value, 3) for name, value in told.items()}
        for what, told in cluster.figures.items()
    }
    print(json.dumps({"partitions": given.partitions, "peak_mib": round(peak_mib), **rounded}))


if __name__ == "__main__":
    main()
