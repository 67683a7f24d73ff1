"""The fetch streams of a follower broker (rule R12): in-sync replicas do not wait for replicas that
catch up, for another directory or for a reassignment, and a replica that moves from one stream to
another loses and doubles nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pk import errors, limits
from pk.client.options import producer_options
from pk.client.produce_engine import ProduceEngine
from pk.client.record_arguments import record_size
from pk.log.divergence import EpochEnd
from pk.server.metadata.image import PartitionState
from pk.server.replica.alter_partition import AlterPartitionManager
from pk.server.replica.fetch_limits import COPIES_MAX, PARTITION_BYTES, FetcherId, FetchKind
from pk.server.replica.partition import Partition
from pk.types import PartitionKey
from pk.wire import pk_pb2 as wire
from tests.kit.cluster import RETRIES, Kit, Ledger, written

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

LAG_MS = 2_000  #: replica_lag_time_max_ms of the kit
#: Bytes of a frame's share of one partition, of a batch, and of a partition's backlog.
SHARE, BATCH, BACKLOG = 32_768, 8_000, 100_000


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams with little credit: a backlog of kilobytes fills them."""
    monkeypatch.setattr(limits, "FETCH_CREDIT_BYTES", 2 * SHARE)
    monkeypatch.setattr(limits, "CATCH_UP_CREDIT_BYTES", SHARE)
    for kind in FetchKind:
        monkeypatch.setitem(PARTITION_BYTES, kind, SHARE)


class Feed:
    """A producer under acks=all that sends single records to chosen partitions."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self.sent = 0
        self.acked = 0
        self.world = kit.sim.world_of("feed")
        options, _ = producer_options({"linger_ms": 0, "batch_size": BATCH, **RETRIES})
        self.engine = ProduceEngine(self.world, kit.cluster("feed"), options)
        kit.done("feed", self._start())

    async def _start(self) -> None:
        self.engine.cluster.start()

    async def _send(self, topic: str, partitions: list[int], size: int) -> None:
        accumulator = await self.engine.open(topic, 60_000)
        value = bytes(size)
        for number in partitions:
            room = record_size(value, None, None, topic)
            accumulator.append(value, None, None, number, None, self._told, size=room)
            self.sent += 1
        self.engine.poke()

    def _told(self, _at: Any, error: Any) -> None:
        assert error is None, error
        self.acked += 1

    def send(self, topic: str, partitions: list[int], size: int = 10) -> None:
        """Send a record to each partition, and wait until all are acknowledged."""
        self.kit.done("feed", self._send(topic, partitions, size))
        self.kit.until(lambda: self.acked == self.sent)

    def backlog(self, topic: str, partitions: list[int]) -> None:
        """Append BACKLOG bytes to each partition, in batches of their own."""
        for _ in range(BACKLOG // BATCH):
            self.send(topic, partitions, BATCH - 500)

    def each(self, every_ms: int, topic: str, partitions: list[int]) -> None:
        """Send a record to each partition every `every_ms` from now on."""

        async def going() -> None:
            while True:
                await self._send(topic, partitions, 10)
                await self.world.clock.sleep_ms(every_ms)

        self.kit.sim.spawn("feed", going())


def stream(kit: Kit, n: int, leader: int, kind: FetchKind, directory: int = 0) -> Any:
    """Return the stream of broker `n` to `leader`."""
    core = kit.brokers[n].core
    directory_id = core.manager.directories[directory].directory_id
    return core.fetchers._fetchers[FetcherId(leader, directory_id, kind)]


def kind_of(kit: Kit, n: int, topic: str, number: int = 0) -> FetchKind:
    """Return the kind of the one stream of broker `n` that serves the partition."""
    partition = kit.replica(n, topic, number)
    on = [
        key
        for key, each in kit.brokers[n].core.fetchers._fetchers.items()
        if partition.key in each._replicas
    ]
    assert len(on) == 1
    return on[0].kind


def away(kit: Kit, topics: dict[str, int], n: int) -> None:
    """Kill broker `n` and wait until it has left every ISR."""
    kit.kill(n)
    places = [(topic, number) for topic, count in topics.items() for number in range(count)]
    kit.until(lambda: all(n not in kit.state(*each).isr for each in places))


def returned(kit: Kit, count: int) -> tuple[int, int]:
    """Return a leader and a broker that returned to `count` partitions with a backlog and joined
    the ISR of the topic `hot`, which has none.  Its disk is slow.
    """
    kit.create("big", partitions=count, min_insync_replicas=1)
    kit.create("hot", min_insync_replicas=2)
    leader, _, n = kit.state("hot").replicas
    away(kit, {"big": count, "hot": 1}, n)
    feed = Feed(kit)
    feed.backlog("big", list(range(count)))
    feed.send("hot", [0])
    kit.boot(n)
    kit.until(lambda: kit.serves(n))
    kit.storages[n].lag_ms = 300
    feed.each(1_200, "hot", [0])
    kit.until(lambda: n in kit.state("hot").isr)
    return leader, n


def test_in_sync_replicas_do_not_wait_for_those_that_catch_up(make: Any, small: None) -> None:
    """A partition without a backlog joins its ISR early and stays there, although the backlog of
    the others takes much longer than `replica_lag_time_max_ms`.
    """
    kit, count = make(1, auto_leader_rebalance_enable=False), 36
    _, n = returned(kit, count)
    begun, left = kit.now_ms, []

    def complete() -> bool:
        if n not in kit.state("hot").isr:
            left.append(kit.now_ms)
        return bool(left) or all(n in kit.state("big", each).isr for each in range(count))

    kit.until(complete)
    assert not left
    assert kit.now_ms - begun > 3 * LAG_MS, "the backlog was too small to show anything"
    assert kind_of(kit, n, "hot") is FetchKind.HOT


def test_the_end_of_one_stream_leaves_the_positions_on_the_other(make: Any, small: None) -> None:
    kit = make(7, auto_leader_rebalance_enable=False)
    leader, n = returned(kit, 36)
    kit.until(lambda: kind_of(kit, n, "hot") is FetchKind.HOT)
    kit.until(lambda: kit.replica(n, "hot").replica.placed)
    hot, late = (stream(kit, n, leader, kind) for kind in FetchKind)
    opened, position = hot._stream, kit.replica(n, "hot").replica.position_id
    for _ in range(3):
        kit.until(lambda: late.is_connected)
        assert late._replicas
        late._stream.close()
        kit.wait(LAG_MS)
        assert n in kit.state("hot").isr
    assert hot._stream is opened
    assert kit.replica(n, "hot").replica.position_id == position


def test_a_directory_that_hangs_delays_no_replica_of_another(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes that it cannot write hold the credit of its own streams only."""
    monkeypatch.setattr(limits, "FETCH_CREDIT_BYTES", 2 * BATCH)
    monkeypatch.setattr(limits, "CATCH_UP_CREDIT_BYTES", 2 * BATCH)
    kit = make(31, directories=2, auto_leader_rebalance_enable=False)
    names = [f"t{number}" for number in range(8)]
    for name in names:
        kit.create(name, min_insync_replicas=2)
    n = 1
    followed = [name for name in names if kit.state(name).leader == 2]
    hanging = [name for name in followed if kit.lies_on_second(n, name)]
    fine = [name for name in followed if name not in hanging]
    assert hanging
    assert fine
    feed = Feed(kit)
    for name in names:
        feed.send(name, [0])
    kit.second[n].lag_ms = 3_600_000
    for _ in range(4):
        for name in hanging:
            kit.done("feed", feed._send(name, [0], BATCH - 500))
    for name in fine:
        feed.each(500, name, [0])
    begun, left = kit.now_ms, {}

    def later() -> bool:
        left.update((name, kit.now_ms) for name in fine if n not in kit.state(name).isr)
        return kit.now_ms > begun + 5 * LAG_MS

    kit.until(later)
    assert not left
    assert all(n not in kit.state(name).isr for name in hanging)


def test_a_replica_moves_when_it_joins_and_when_it_leaves_the_isr(make: Any) -> None:
    kit = make(3, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2)
    ledger = written(kit, "t", 50)
    leader, _, n = kit.state("t").replicas
    assert kind_of(kit, n, "t") is FetchKind.HOT
    kit.sim.network.cut(f"b{n}", "controller")  # the registration is the same afterwards
    kit.until(lambda: n not in kit.state("t").isr)
    kit.sim.network.heal(f"b{n}", "controller")
    kinds: list[FetchKind] = []

    def joined() -> bool:
        if (kind := kind_of(kit, n, "t")) not in kinds[-1:]:
            kinds.append(kind)
        return n in kit.state("t").isr and kind is FetchKind.HOT and len(kinds) == 3

    kit.until(joined)
    assert kinds == [FetchKind.HOT, FetchKind.CATCH_UP, FetchKind.HOT]
    assert stream(kit, n, leader, FetchKind.CATCH_UP)._replicas == {}
    ledger.check()


def _joins_unnoticed(kit: Kit) -> tuple[Ledger, int, int, Callable[[], None]]:
    """Return a replica that is in the ISR, and whose broker does not act on that before it is let
    go on.
    """
    kit.create("t", min_insync_replicas=2)
    leader, _, n = kit.state("t").replicas
    away(kit, {"t": 1}, n)
    ledger = Ledger(kit, "t")
    ledger.more(100)
    kit.boot(n)
    kit.until(lambda: n in kit.brokers)
    manager, held = kit.brokers[n].core.fetchers, []
    follow = manager.follow

    def later(partition: Partition, state: PartitionState) -> None:
        if n in state.isr:
            held.append((partition, state))
        else:
            follow(partition, state)

    setattr(manager, "follow", later)  # noqa: B010 - it stands in the place of a method
    kit.until(lambda: bool(held))
    assert kind_of(kit, n, "t") is FetchKind.CATCH_UP

    async def moves() -> None:
        manager.follow = follow
        follow(*held[-1])

    return ledger, leader, n, lambda: kit.done(f"b{n}", moves())


def test_frames_of_the_former_stream_that_arrive_late_are_dropped(make: Any) -> None:
    """replica/fetcher F1: otherwise the same batches would be appended twice."""
    kit = make(4, auto_leader_rebalance_enable=False)
    ledger, leader, n, go_on = _joins_unnoticed(kit)
    former = stream(kit, n, leader, FetchKind.CATCH_UP)
    kit.sim.network.stall(former._stream.other, 3_000)
    sent = kit.sim.network.late_frames
    ledger.more(50)
    go_on()
    kit.until(lambda: kind_of(kit, n, "t") is FetchKind.HOT)
    ledger.more(100)
    taken: list[int] = []
    take = former._take

    def takes(frame: Any) -> None:
        taken.extend(entry.payload_bytes for entry in frame.head.fetch_reply.partitions)
        take(frame)

    former._take = takes
    kit.wait(4_000)
    assert sum(taken) > 0, f"no frame arrived late ({sent})"
    assert former.credit.unwritten == 0
    ledger.stop()
    kit.until(lambda: kit.in_sync("t"))
    assert len({kit.content(each, "t") for each in (1, 2, 3)}) == 1
    ledger.check()


def test_late_messages_of_the_former_stream_count_for_nothing(make: Any) -> None:
    """handlers/replica_fetch F1: a confirmation, a report of a full disk (L16) and the end of
    following belong to a position; a newer one came on another stream.
    """
    kit = make(5, auto_leader_rebalance_enable=False)
    ledger, at, n, go_on = _joins_unnoticed(kit)
    partition = kit.replica(at, "t")
    leader: Any = partition.leader
    followers: Any = partition._followers
    old: Any = next(each._replica for each in followers if each._replica.replica == n)
    position = old._compared[partition.key]
    ledger.stop()
    go_on()
    kit.until(lambda: kind_of(kit, n, "t") is FetchKind.HOT and kit.in_sync("t"))
    kit.until(lambda: leader._positions[n][1] > position.position_id)
    kit.until(lambda: partition.key not in old._compared)
    old._compared[partition.key] = position  # its `forgotten` has not arrived yet
    where = {"topic_id": partition.key.topic_id, "partition": 0}
    request = wire.FetchRequest()
    request.confirmed.add(**where, position_id=position.position_id, log_end=1)
    request.full.add(**where, leader_epoch=leader.leader_epoch, position_id=position.position_id)
    old.confirmed(request)
    old.full(request)
    assert leader.end_of(n) == leader.log_end
    assert n not in leader._followers._full
    leader.isr = tuple(each for each in leader.isr if each != n)  # else it is never forgotten
    old.forgotten([partition.key])
    assert leader.broker_epoch_of(n) == old.broker_epoch
    request.full[0].position_id = leader._positions[n][1]
    old.full(request)
    assert n in leader._followers._full


def test_a_replica_fetches_where_it_did_until_the_other_stream_is_connected(make: Any) -> None:
    """replica/fetcher_manager B2: acks=all waits for the new member of the ISR."""
    kit = make(6, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2)
    ledger = Ledger(kit, "t")
    ledger.more(50)
    leader, _, n = kit.state("t").replicas
    away(kit, {"t": 1}, n)
    ledger.more(200)
    kit.boot(n)
    kit.until(lambda: kit.serves(n))
    kit.until(lambda: stream(kit, n, leader, FetchKind.CATCH_UP).is_connected)
    kit.sim.network.refuse(f"b{leader}:9292")
    kit.until(lambda: n in kit.state("t").isr)
    begun, acked = kit.now_ms, len(ledger.acked)
    kit.wait(3 * LAG_MS)
    assert n in kit.state("t").isr
    assert kind_of(kit, n, "t") is FetchKind.CATCH_UP
    assert len(ledger.acked) > acked + 100, f"since {begun}"
    kit.sim.network.refuse(f"b{leader}:9292", refused=False)
    kit.until(lambda: kind_of(kit, n, "t") is FetchKind.HOT)
    ledger.more(50)
    ledger.stop()
    kit.until(lambda: kit.in_sync("t"))
    ledger.check()


def copying(kit: Kit, n: int) -> int:
    """Return how many added replicas of broker `n` have set a position and are not caught up."""
    states: list[Any] = [each.replica for each in kit.brokers[n].core.partitions.values()]
    return sum(each is not None and each.copying and each.placed for each in states)


def added(kit: Kit, count: int) -> tuple[int, int, list[int]]:
    """Return a leader, a broker that gets copies of its partitions, and those partitions."""
    kit.create("t", partitions=3 * count, factor=1)
    leader, n = 1, 2
    mine = [each for each in range(3 * count) if kit.state("t", each).leader == leader]
    feed = Feed(kit)
    feed.backlog("t", mine)
    return leader, n, mine


def reassign(kit: Kit, partitions: list[int], *replicas: int) -> None:
    request = wire.AlterReassignmentsRequest()
    for number in partitions:
        request.reassignments.add(
            topic="t", topic_id=kit.topic_id("t"), partition=number, replicas=replicas
        )
    reply = kit.ask(request)
    assert not any(result.HasField("error") for result in reply.results), reply


def test_added_replicas_copy_two_at_a_time(make: Any, small: None) -> None:
    """For each source broker and directory; the others wait their turn, and all end."""
    kit = make(8, auto_leader_rebalance_enable=False)
    leader, n, mine = added(kit, 5)
    kit.storages[n].lag_ms = 20
    reassign(kit, mine, leader, n)
    most = [0]

    def complete() -> bool:
        most[0] = max(most[0], copying(kit, n))
        return all(len(kit.state("t", each).isr) == 2 for each in mine)

    kit.until(complete)
    assert most[0] == COPIES_MAX == 2
    kit.until(lambda: all(not kit.state("t", each).adding for each in mine))
    for each in mine:
        ends = {kit.replica(b, "t", each).log.written_end for b in (leader, n)}
        assert len(ends) == 1


@pytest.mark.parametrize("cause", ["refused", "full", "caught up"])
def test_replicas_that_do_not_copy_do_not_keep_the_turn(
    make: Any, small: None, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    """replica/fetcher F5: the leader refuses them, their disk has no room, or they have everything
    and do not join the ISR, each for a long time.
    """
    kit = make(9, auto_leader_rebalance_enable=False)
    leader, n, mine = added(kit, 5)
    stuck = {PartitionKey(kit.topic_id("t"), each) for each in mine[:COPIES_MAX]}
    compare, append = Partition.find_divergence, Partition.append_fetched
    consider = AlterPartitionManager.consider

    def refuses(self: Partition, *given: Any) -> Any:
        if cause == "refused" and self.key in stuck:
            raise errors.NotLeaderOrFollower("not yet")
        return compare(self, *given)

    def finds_no_room(self: Any, *given: Any) -> None:
        if cause == "full" and self.key in stuck:
            self.replica.not_stored(errors.StorageFull("full"))
            raise errors.StorageFull("full")
        append(self, *given)

    def keeps_out(self: AlterPartitionManager, partition: Partition) -> None:
        if cause != "caught up" or partition.key not in stuck:
            consider(self, partition)

    monkeypatch.setattr(Partition, "find_divergence", refuses)
    monkeypatch.setattr(Partition, "append_fetched", finds_no_room)
    monkeypatch.setattr(AlterPartitionManager, "consider", keeps_out)
    reassign(kit, mine, leader, n)
    kit.until(lambda: all(len(kit.state("t", each).isr) == 2 for each in mine[COPIES_MAX:]))
    assert all(len(kit.state("t", each).isr) == 1 for each in mine[:COPIES_MAX])
    stuck.clear()
    kit.until(lambda: all(len(kit.state("t", each).isr) == 2 for each in mine))


def test_turns_survive_a_stream_that_breaks_and_a_reassignment_that_is_cancelled(
    make: Any, small: None
) -> None:
    kit = make(10, auto_leader_rebalance_enable=False)
    leader, n, mine = added(kit, 6)
    kit.storages[n].lag_ms = 20
    reassign(kit, mine, leader, n)
    kit.until(lambda: copying(kit, n) == COPIES_MAX)
    for _ in range(5):
        late = stream(kit, n, leader, FetchKind.CATCH_UP)
        kit.until(lambda late=late: late.is_connected)
        late._stream.close()
        kit.wait(50)
    turns = stream(kit, n, leader, FetchKind.CATCH_UP)._turns
    first = [key.partition for key in turns._copying]
    cancelled = first or mine[:1]
    request = wire.AlterReassignmentsRequest()
    for number in cancelled:
        request.reassignments.add(
            topic="t", topic_id=kit.topic_id("t"), partition=number, cancel=True
        )
    kit.ask(request)
    others = [each for each in mine if each not in cancelled]
    kit.until(lambda: all(len(kit.state("t", each).isr) == 2 for each in others))
    assert not turns._waiting


@pytest.mark.parametrize("kind", list(FetchKind))
def test_logs_that_diverge_and_logs_that_begin_again_on_both_kinds(
    make: Any, monkeypatch: pytest.MonkeyPatch, kind: FetchKind
) -> None:
    """R4, R5: the answers do not depend on the stream that a replica is on."""
    kit = make(12, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2)
    ledger = written(kit, "t", 100)
    n = kit.state("t").replicas[2]
    manager = kit.brokers[n].core.fetchers
    partition = kit.replica(n, "t")
    if kind is FetchKind.CATCH_UP:
        kit.sim.network.cut(f"b{n}", "controller")
        kit.until(lambda: n not in kit.state("t").isr)
        kit.sim.network.heal(f"b{n}", "controller")
        kit.until(lambda: kind_of(kit, n, "t") is kind)
    replica: Any = partition.replica
    replica.unclean_epoch = 10
    fetcher = replica.fetcher

    async def cuts() -> None:
        log = partition.log
        fetcher._change(replica, fetcher._cut(replica, EpochEnd(0, log.written_end - 5)))

    kit.done(f"b{n}", cuts())
    kit.until(lambda: not manager.changing and kit.in_sync("t"))

    async def begins_again() -> None:
        replica = partition.replica
        fetcher = replica.fetcher
        fetcher._change(replica, fetcher._begin(replica, 0, b"", 0))

    kit.done(f"b{n}", begins_again())
    kit.until(lambda: not manager.changing and kit.in_sync("t"))
    assert len({kit.content(each, "t") for each in (1, 2, 3)}) == 1
    ledger.check()
