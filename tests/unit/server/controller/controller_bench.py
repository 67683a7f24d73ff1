"""A controller machine, its log, and short helpers for commands."""

from __future__ import annotations

from typing import Any

from pk import settings
from pk.effects import Decision, Effect
from pk.server.controller import commands as c
from pk.server.controller.batched_decision import More
from pk.server.controller.machine import Command, Controller
from pk.server.controller.reports import Report, reported
from pk.server.metadata.image import MetadataImage, PartitionState
from pk.server.metadata.records import MetadataRecord
from pk.types import PartitionKey
from pk.wire import pk_pb2 as wire

NOW = 1_000


class Bench:
    """A controller, its log, and short helpers for commands."""

    def __init__(self, **server: Any) -> None:
        self.rules = c.Rules(1, settings.SERVER.resolve(server), {})
        self.machine = Controller(self.rules)
        self.log: list[MetadataRecord] = []
        self.next_id = 0
        self.reports: dict[int, Report] = {}
        self.steps = 0
        self.effects: list[Effect] = []
        self.do(c.Bootstrap("cluster"))

    @property
    def image(self) -> MetadataImage:
        return self.machine.image

    def do(self, command: Command) -> Any:
        """Decide, append and apply, in as many steps as the command takes; check that deciding
        changed nothing (controller/machine M1).
        """
        self.steps = 0
        while True:
            before = snapshot(self.image)
            decision: Decision[MetadataRecord] = self.machine.decide(command, NOW)
            assert snapshot(self.image) == before
            for record in decision.records:
                self.machine.apply(len(self.log), record)
                self.log.append(record)
                self.image.check()
            self.effects += decision.effects
            self.steps += 1
            if not isinstance(decision.reply, More):
                return decision.reply
            assert decision.records, "a step that does nothing would be asked for ever"

    def register(
        self, broker: int = 1, incarnation: str = "i", **more: Any
    ) -> wire.RegisterBrokerReply:
        fields: dict[str, Any] = {
            "cluster_id": "cluster",
            "incarnation_id": f"{incarnation}{broker}",
            "boot_id": f"boot{broker}",
            "directory_ids": [f"dir{broker}"],
            "address": f"b{broker}:1",
        }
        live = more.pop("live", False)
        request = wire.RegisterBrokerRequest(broker_id=broker, **{**fields, **more})
        reply: wire.RegisterBrokerReply = self.do(c.Register(request, live, self.reports))
        return reply

    def beat(
        self,
        broker: int = 1,
        unclean: frozenset[PartitionKey] = frozenset(),
        offline: tuple[PartitionKey, ...] = (),
        positions: dict[PartitionKey, tuple[int, int]] | None = None,
        **more: Any,
    ) -> wire.BrokerHeartbeatReply:
        """Return the reply of the term to a heartbeat; the broker's report counts from now on."""
        fields: dict[str, Any] = {
            "broker_epoch": self.image.brokers[broker].broker_epoch,
            "metadata_offset": self.image.offset,
        }
        request = wire.BrokerHeartbeatRequest(broker_id=broker, **{**fields, **more})
        for key in offline:
            request.offline_replicas.add(topic_id=key.topic_id, partition=key.partition)
        for key, (epoch, end) in (positions or {}).items():
            request.positions.add(
                topic_id=key.topic_id, partition=key.partition, last_epoch=epoch, log_end=end
            )
        before = self.reports.get(broker)
        retry = list(positions or ())
        if self.image.brokers[broker].broker_epoch == request.broker_epoch:
            self.reports[broker] = reported(before, request, self.machine.leaderless)
            if before is not None:
                retry += [key for key in before.offline if key not in offline]
        reports = dict(self.reports)
        reply: wire.BrokerHeartbeatReply = self.do(
            c.Heartbeat(request, reports, tuple(retry), unclean)
        )
        return reply

    def recover(self, *keys: PartitionKey, waited: bool = False) -> int:
        over = frozenset(keys) if waited else frozenset()
        found: int = self.do(c.Recover(keys, over, dict(self.reports)))
        return found

    def up(self, *brokers: int) -> None:
        for broker in brokers:
            self.register(broker)
            assert not self.beat(broker).fenced

    def fence(self, broker: int) -> bool:
        epoch = self.image.brokers[broker].broker_epoch
        fenced: bool = self.do(c.Fence(broker, epoch, dict(self.reports)))
        return fenced

    def create(self, *topics: wire.NewTopic, validate_only: bool = False) -> list[wire.TopicResult]:
        ids = tuple(f"id{self.next_id + n}" for n in range(len(topics)))
        self.next_id += len(topics)
        request = wire.CreateTopicsRequest(topics=topics, validate_only=validate_only)
        reply = self.do(c.CreateTopics(request, ids, dict(self.reports)))
        assert reply.metadata_offset == self.image.offset
        return list(reply.results)

    def topic(self, name: str, partitions: int = 1, factor: int = 1, **configs: str) -> None:
        new = wire.NewTopic(
            name=name, partitions=partitions, replication_factor=factor, configs=configs
        )
        (result,) = self.create(new)
        assert not result.HasField("error"), result

    def state(self, name: str, partition: int = 0) -> PartitionState:
        topic = self.image.topic(name)
        assert topic is not None
        return topic.partitions[partition]

    def alter(
        self, kind: str, name: str, unset: tuple[str, ...] = (), **values: str
    ) -> wire.ConfigResult:
        resource = wire.ConfigResource(type=kind, name=name)
        change = wire.ConfigChange(resource=resource, set=values, unset=unset)
        reply = self.do(c.AlterConfigs(wire.AlterConfigsRequest(changes=[change])))
        result: wire.ConfigResult = reply.results[0]
        return result


def snapshot(image: MetadataImage) -> str:
    return repr(image)


def item(
    bench: Bench, name: str, isr: list[int], partition: int = 0, **more: Any
) -> wire.AlterPartitionItem:
    state = bench.state(name, partition)
    fields: dict[str, Any] = {
        "topic_id": bench.image.topic_ids[name],
        "partition": partition,
        "leader_epoch": state.leader_epoch,
        "partition_epoch": state.partition_epoch,
        "new_isr": isr,
        "isr_broker_epochs": [bench.image.brokers[b].broker_epoch for b in isr],
    }
    return wire.AlterPartitionItem(**{**fields, **more})


def alter_isr(
    bench: Bench, broker: int, wanted: wire.AlterPartitionItem
) -> wire.AlterPartitionResult:
    request = wire.AlterPartitionRequest(
        broker_id=broker,
        broker_epoch=bench.image.brokers[broker].broker_epoch,
        items=[wanted],
    )
    command = c.AlterPartition(request, dict(bench.reports))
    result: wire.AlterPartitionResult = bench.do(command).results[0]
    return result
