"""Consumer groups on real processes: members and coordinators die, and no record is skipped."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_cluster import close, run, until

from pk import AdminClient, Consumer, Producer, TopicPartition, errors
from pk.cli.embedded import EmbeddedCluster, EmbeddedServer
from pk.client.connection import acquire, release
from pk.client.coordinator_calls import GROUP
from pk.client.network_client import NetworkClient
from pk.wire import pk_pb2 as wire

pytestmark = pytest.mark.integration

MEMBER = Path(__file__).resolve().parents[1] / "fixtures" / "group_member.py"
SETTINGS = {"group_initial_rebalance_delay_ms": "300", "group_min_session_timeout_ms": "500"}
OPTIONS = {"session_timeout_ms": 3_000, "heartbeat_interval_ms": 300}
PARTITIONS = 6


class Member:
    """One consumer in a process of its own, and what it has printed."""

    def __init__(self, address: str, group: str, topic: str, **options: Any) -> None:
        self.lines: list[dict[str, Any]] = []
        self._process = subprocess.Popen(
            [sys.executable, MEMBER, address, group, topic, json.dumps({**OPTIONS, **options})],
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(json.loads(line))

    def owned(self) -> set[int]:
        """The partitions that it reads now."""
        found: set[int] = set()
        for line in self.lines.copy():
            found |= {*line.get("assigned", ())}
            found -= {*line.get("revoked", ())}
        return found

    def processed(self) -> set[tuple[int, int]]:
        """Partition and offset of the records that it has processed."""
        return {
            (line["processed"], line["offset"]) for line in self.lines.copy() if "processed" in line
        }

    def rebalances(self) -> int:
        return sum("assigned" in line for line in self.lines.copy())

    def kill(self) -> None:
        """Kill the process with SIGKILL, and read the rest of its output."""
        self._process.kill()
        self._process.wait()
        self._reader.join(10)
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    directory = tmp_path_factory.mktemp("groups") / "pk"
    with EmbeddedServer(directory, settings=SETTINGS) as running:
        yield running


@pytest.fixture
def topic(server: EmbeddedServer, request: pytest.FixtureRequest) -> str:
    name = re.sub("[^a-z0-9_]+", "-", request.node.name)[:100].strip("-")
    with AdminClient(server.address) as admin:
        admin.create_topic(name, partitions=PARTITIONS)
    return name


def produce(address: str, topic: str, count: int) -> None:
    """Write `count` records to every partition."""
    with Producer(address) as producer:
        for number in range(count * PARTITIONS):
            producer.send(topic, b"%d" % number, partition=number % PARTITIONS)
        producer.flush()


def all_of(count: int) -> set[tuple[int, int]]:
    return {(partition, offset) for partition in range(PARTITIONS) for offset in range(count)}


def shared(*members: Member) -> bool:
    """Whether the members own all partitions, each once, and each member about as many."""
    owned = [each.owned() for each in members]
    sizes = [len(each) for each in owned]
    return sum(sizes) == PARTITIONS == len(set().union(*owned)) and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("assignor", ["range", "cooperative-sticky"])
def test_the_partitions_of_a_killed_member_move_and_nothing_is_lost(
    server: EmbeddedServer, topic: str, assignor: str
) -> None:
    options = {"partition_assignment_strategy": assignor}
    members = [Member(server.address, topic, topic, **options) for _ in range(3)]
    try:
        until(lambda: shared(*members), "three members share the topic")
        produce(server.address, topic, 50)
        until(lambda: len(set().union(*(m.processed() for m in members))) > 100, "they process")
        killed, *others = members
        killed.kill()
        produce(server.address, topic, 50)
        until(lambda: shared(*others), "the others take its partitions")
        until(
            lambda: set().union(*(each.processed() for each in members)) == all_of(100),
            "every record is processed",
        )
        again = Member(server.address, topic, topic, **options)
        members.append(again)
        until(lambda: shared(*others, again), "a new member gets its share")
    finally:
        for each in members:
            each.kill()


@pytest.mark.parametrize("assignor", ["range", "cooperative-sticky"])
def test_a_member_learns_at_once_that_another_one_joins(
    server: EmbeddedServer, topic: str, assignor: str
) -> None:
    """Rule P5: the heartbeats of these members are 15 s apart, so none of them brings the news."""
    options = {
        "partition_assignment_strategy": assignor,
        "session_timeout_ms": 45_000,
        "heartbeat_interval_ms": 15_000,
    }
    members = [Member(server.address, topic, topic, **options)]
    try:
        until(lambda: len(members[0].owned()) == PARTITIONS, "the first member has the topic")
        began = time.monotonic()  # the start of the second process is a part of it
        members.append(Member(server.address, topic, topic, **options))
        until(lambda: shared(*members), "they share the topic")
        assert time.monotonic() - began < 10
    finally:
        for each in members:
            each.kill()


def heartbeat_and_commit(
    address: str, who: wire.GroupMember, place: TopicPartition
) -> list[type[Exception]]:
    """Send what a zombie would send; return the errors."""
    from pk.client.coordinator_calls import CoordinatorCalls

    held = acquire()
    try:
        cluster = NetworkClient(held.world, address)
        calls = CoordinatorCalls(held.world, cluster, who.group_id, 5_000, GROUP)
        found: list[type[Exception]] = []

        async def ask() -> None:
            topic = await cluster.topic(place.topic, 5_000)
            request = wire.OffsetCommitRequest(member=who)
            request.topics.add(topic_id=topic.topic_id, partitions=[place.partition], offsets=[1])
            for each in (wire.GroupHeartbeatRequest(member=who), request):
                try:
                    await calls.call(each, 5_000)
                except errors.PkError as refusal:
                    found.append(type(refusal))
            await cluster.close()

        held.run(ask())
        return found
    finally:
        release(held)


def test_a_zombie_does_not_commit(server: EmbeddedServer, topic: str) -> None:
    """A member that does not poll leaves its group; its commit, and its old identity, are
    refused.
    """
    options = {**OPTIONS, "group_id": topic, "max_poll_interval_ms": 1_500}
    place = TopicPartition(topic, 0)
    with Consumer(server.address, auto_offset_reset="earliest", **options) as zombie:
        gone: list[TopicPartition] = []
        zombie.subscribe(topic, on_revoked=gone.extend)
        until(lambda: zombie.poll(timeout_s=0.1) or len(zombie.assignment()) == PARTITIONS)
        old = zombie.group_metadata()
        with Consumer(server.address, **options) as other:
            other.subscribe(topic)
            until(lambda: other.poll(timeout_s=0.1) or len(other.assignment()) == PARTITIONS)
            other.commit({place: 5})
            with pytest.raises((errors.UnknownMemberId, errors.NonEmptyGroup)):
                zombie.commit({place: 1})
            who = wire.GroupMember(
                group_id=topic, member_id=old.member_id, generation=old.generation
            )
            assert heartbeat_and_commit(server.address, who, place) == [errors.UnknownMemberId] * 2
            assert other.committed(place) == 5
            zombie.poll(timeout_s=0.1)
            assert len(gone) == PARTITIONS


def test_a_consumer_continues_where_its_group_has_committed(
    server: EmbeddedServer, topic: str
) -> None:
    """Closing commits what was returned, not what was fetched ahead."""
    produce(server.address, topic, 10)
    seen: list[tuple[int, int]] = []
    while len(seen) < 10 * PARTITIONS:  # each poll returns at most a third
        with Consumer(
            server.address, group_id=topic, auto_offset_reset="earliest", max_poll_records=20,
            **OPTIONS,
        ) as consumer:  # fmt: skip
            consumer.subscribe(topic)
            records = until(lambda it=consumer: it.poll(timeout_s=0.5))
            seen += [(record.partition, record.offset) for record in records]
    assert sorted(seen) == sorted(all_of(10)), "each record once"


def test_a_group_is_shown_reset_and_deleted(server: EmbeddedServer, topic: str) -> None:
    """`pk groups`: lag, a reset that only shows and one that acts, refusals while members live."""
    produce(server.address, topic, 10)
    where = ["--bootstrap", server.address]
    with Consumer(
        server.address, group_id=topic, auto_offset_reset="earliest", client_id="me", **OPTIONS
    ) as consumer:
        consumer.subscribe(topic)
        count = 0
        while count < 10 * PARTITIONS:
            count += len(consumer.poll(timeout_s=0.5))
        consumer.commit({TopicPartition(topic, 0): 4})
        listed = json.loads(run(["groups", "list", "--state", "Stable", "--json", *where]))
        assert topic in [each["group_id"] for each in listed["groups"]]
        found = json.loads(run(["groups", "describe", topic, "--json", *where]))
        assert [each["client_id"] for each in found["members"]] == ["me"]
        assert found["offsets"][0]["lag"] == 6
        assert found["offsets"][0]["member"] == found["members"][0]["member_id"]
        assert "cooperative" not in run(["groups", "describe", topic, *where])
        with AdminClient(server.address) as admin:
            with pytest.raises(errors.NonEmptyGroup):
                admin.delete_group(topic)
            with pytest.raises(errors.NonEmptyGroup):
                admin.alter_group_offsets(topic, {TopicPartition(topic, 0): 0})
    reset = ["groups", "reset-offsets", topic, "--topic", f"{topic}:0,1", "--shift-by", "-3"]
    shown = json.loads(run([*reset, "--json", *where]))
    assert [each["offset"] for each in shown["offsets"]] == [7, 7]
    with AdminClient(server.address) as admin:
        assert set(admin.group_offsets(topic).values()) == {10}
        run([*reset, "--execute", *where])
        assert sorted(admin.group_offsets(topic).values()) == [7, 7, 10, 10, 10, 10]
        run(["groups", "reset-offsets", topic, "--all-topics", "--to-latest", "--execute", *where])
        assert set(admin.group_offsets(topic).values()) == {10}
        run(["groups", "delete", topic, *where])
        with pytest.raises(errors.GroupIdNotFound):
            admin.describe_group(topic)


def test_offsets_are_exported_restored_set_by_time_and_deleted(
    server: EmbeddedServer, topic: str, tmp_path: Path
) -> None:
    where = ["--bootstrap", server.address]
    zero, one = (TopicPartition(topic, number) for number in (0, 1))
    with Producer(server.address) as producer:
        for number in range(3):
            producer.send(topic, b"v", partition=0, timestamp_ms=1_000 * (number + 1))
    with Consumer(server.address, group_id=topic, **OPTIONS) as consumer:
        consumer.assign([zero, one])
        consumer.commit({zero: 1, one: 0})
    described = json.loads(run(["groups", "describe", topic, "--lag-time", "--json", *where]))
    assert [(each["lag"], each["lag_ms"]) for each in described["offsets"]] == [(2, 1_000), (0, 0)]
    reset = ["groups", "reset-offsets", topic]
    backup = tmp_path / "offsets.csv"
    backup.write_text(run([*reset, "--all-topics", "--to-current", "--export", *where]))
    assert backup.read_text() == f"{topic},0,1\n{topic},1,0\n"
    with AdminClient(server.address) as admin:
        at = ["--topic", topic, "--execute", *where]
        run([*reset, "--to-datetime", "1970-01-01T00:00:02.500Z", *at])
        assert admin.group_offsets(topic)[zero] == 2
        run([*reset, "--by-duration", "1d", *at])
        assert admin.group_offsets(topic)[zero] == 3, "no record is newer: the end"
        run([*reset, "--from-file", str(backup), "--topic", f"{topic}:0", "--execute", *where])
        assert admin.group_offsets(topic)[zero] == 1
        backup.write_text(f"{topic},0,2\n{topic},{PARTITIONS},0\n")
        with pytest.raises(AssertionError, match="which does not exist"):
            run([*reset, "--from-file", str(backup), "--execute", *where])
        assert admin.group_offsets(topic)[zero] == 1, "nothing of a wrong file is committed"
        delete = ["groups", "delete-offsets", topic, "--topic", f"{topic}:0"]
        run([*delete, *where])
        assert zero in admin.group_offsets(topic)
        run([*delete, "--execute", *where])
        assert zero not in admin.group_offsets(topic)
        assert one in admin.group_offsets(topic)
        with pytest.raises(errors.GroupIdNotFound):
            admin.delete_group_offsets("nope", [zero])
        with Consumer(server.address, group_id=topic, **OPTIONS) as consumer:
            consumer.subscribe(topic)
            until(lambda: consumer.poll(timeout_s=0.1) or consumer.assignment())
            with pytest.raises(errors.GroupSubscribedToTopic):
                admin.delete_group_offsets(topic, [one])
        assert one in admin.group_offsets(topic)


def test_the_group_goes_on_when_its_coordinator_dies(tmp_path: Path) -> None:
    """No member rebalances, commits go on, and every record is processed."""
    with EmbeddedCluster(tmp_path, settings=SETTINGS) as cluster:
        address = cluster.address
        with AdminClient(address) as admin:
            admin.create_topic("t", partitions=PARTITIONS, replication_factor=3)
        options = {"session_timeout_ms": 20_000}
        members = [Member(address, "g", "t", **options) for _ in range(2)]
        try:
            until(lambda: shared(*members), "two members share the topic")
            produce(address, "t", 30)
            rebalances = [each.rebalances() for each in members]
            with Consumer(address, group_id="g") as watcher:
                until(
                    lambda: all(
                        (watcher.committed(TopicPartition("t", n)) or 0) > 0
                        for n in range(PARTITIONS)
                    )
                )
                cluster.kill(coordinator(address, "g"))
                produce(address, "t", 30)
                until(
                    lambda: set().union(*(each.processed() for each in members)) == all_of(60),
                    "every record is processed",
                )
                until(
                    lambda: all(
                        watcher.committed(TopicPartition("t", n)) == 60 for n in range(PARTITIONS)
                    ),
                    "every record is committed",
                )
            assert [each.rebalances() for each in members] == rebalances
        finally:
            for each in members:
                each.kill()
        close(cluster)


def coordinator(address: str, group: str) -> int:
    """Return the node that coordinates a group."""
    held = acquire()
    try:
        cluster = NetworkClient(held.world, address)

        async def ask() -> Any:
            request = wire.FindCoordinatorRequest(key=group, key_type=GROUP)
            found = await cluster.call_any(request, timeout_ms=5_000)
            await cluster.close()
            return found

        return int(held.run(ask()).node_id)
    finally:
        release(held)
