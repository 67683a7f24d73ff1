"""The lease of one run of a maintenance job, the hand-over of its files, and its note (rule C5).

The active controller grants the lease.  A task on the client's loop renews it, so it lives as long
as this process.  Every hand-over carries the token of the grant; the broker that leads partition 0,
and the owner of the table, refuse an older one.

Invariants
  N1  Once a renewal was refused, `check` and every hand-over raise `LeaseHeld`.
  N2  A hand-over may be sent again after a lost answer: the owner finds its files in the table and
      answers that it is done (rule T5).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Literal

from pk import errors
from pk.client import arguments
from pk.client.admin import described
from pk.client.admin.connection import AdminConnection
from pk.client.network_client import NetworkClient
from pk.clock import MedianTime
from pk.tasks import TaskRegistry
from pk.types import Offset, TopicPartition
from pk.wire import pk_pb2 as wire

TTL_MS = 30_000
#: A lease is renewed this many times within its TTL.
RENEWALS = 3
CALL_TIMEOUT_S = 30.0
COMMIT_TIMEOUT_S = 120.0


class MaintenanceLease:
    """A lease of a topic; release it with `close` or a `with` block.

    kind: "exclusive" = of the files of the table; "run" = of the job, so that it runs once at a
    time.  granted_ms: the controller's wall clock at the grant.

    Raises `LeaseHeld` if another job has it, `UnknownTopicOrPartition` for an unknown topic.
    """

    def __init__(
        self,
        bootstrap: str | Iterable[str],
        topic: str,
        job: str,
        *,
        kind: Literal["exclusive", "run"] = "exclusive",
        ttl_ms: int = TTL_MS,
    ) -> None:
        self.topic = arguments.topic(topic)
        self.job = job
        self._connection = AdminConnection(
            bootstrap,
            of_controllers=False,
            client_id=f"maintenance-{job}",
            request_timeout_ms=30_000,
        )
        self._tasks = TaskRegistry()
        self._lost: errors.PkError | None = None
        cluster = self._connection.cluster
        self.holder = f"{job}-{cluster.world.new_id()}"
        request = wire.AcquireLeaseRequest(
            topic=self.topic,
            holder=self.holder,
            kind=kind if kind == "exclusive" else f"run:{job}",
            ttl_ms=ttl_ms,
        )
        try:
            granted = self._connection.ask(request, wire.AcquireLeaseReply, CALL_TIMEOUT_S)
            self.topic_id, self.token, self.ttl_ms = granted.topic_id, granted.token, granted.ttl_ms
            self.granted_ms = granted.now_ms
            self._connection.run(lambda _ms: self._begin(), CALL_TIMEOUT_S)
        except BaseException:
            self._connection.close()
            raise

    async def _begin(self) -> None:
        self._tasks.spawn(self._renew())

    async def _renew(self) -> None:
        cluster = self._connection.cluster
        request = wire.RenewLeaseRequest(topic_id=self.topic_id, token=self.token)
        while True:
            await cluster.world.clock.sleep_ms(self.ttl_ms // RENEWALS)
            try:
                await cluster.call_any(request, timeout_ms=self.ttl_ms // RENEWALS)
            except errors.LeaseHeld as refused:
                self._lost = refused  # N1
                return
            except errors.PkError:
                continue  # the controller is away; hand-overs show whether the lease lives

    def check(self) -> None:
        """Raise `LeaseHeld` if the lease is known to have ended."""
        if self._lost is not None:
            raise self._lost.with_traceback(None)

    def now(self) -> MedianTime | None:
        """Renew the lease and return the time by the brokers' clocks; None = they do not trust them
        (rule L10).

        Raises `LeaseHeld` if the lease has ended.
        """
        self.check()
        request = wire.RenewLeaseRequest(topic_id=self.topic_id, token=self.token)
        reply = self._connection.ask(request, wire.RenewLeaseReply, CALL_TIMEOUT_S)
        return time_of(reply)

    def local_log_starts(self) -> dict[int, Offset]:
        """Return the lowest local_log_start of all replicas of each partition (rule C4).

        A replica whose broker does not answer, or does not have the replica, counts as 0.
        """
        return lowest_starts(self.topic_id, self._views())

    def retention_holds(self, partitions: Iterable[int]) -> dict[int, Offset]:
        """Return the lowest hold of each partition that has one, of all brokers (S1).

        Raises `BrokerUnavailable` unless the leaders of `partitions` answer.
        """
        return lowest_holds(self.topic_id, self._views(), partitions)

    def _views(self) -> Mapping[int, wire.DescribePartitionsReply]:
        request = wire.DescribePartitionsRequest(topics=[self.topic])
        cluster = self._connection.cluster
        return self._connection.run(
            lambda ms: described.everyone(cluster, request, ms), CALL_TIMEOUT_S
        )

    def commit(self, change: wire.CommitToTableRequest) -> wire.CommitToTableReply:
        """Hand files over to the owner of the table; return the version that has them.

        Raises `UnknownTierRange` if the job must plan again on the newest version, `LeaseHeld` if
        another job has had the lease.
        """
        self.check()
        change.topic, change.topic_id, change.lease_token = self.topic, self.topic_id, self.token
        cluster = self._connection.cluster
        final = errors.UnknownTierRange
        return self._connection.run(
            lambda ms: cluster.retrying(
                lambda one_ms: ask_owner(cluster, change, one_ms), ms, final=final
            ),
            COMMIT_TIMEOUT_S,
        )

    def note(self, outcome: str, detail: str, runner: str) -> None:
        """Note the outcome of the run for which the lease of kind "run" was granted.

        Raises `LeaseHeld` if another runner got the lease meanwhile.
        """
        request = wire.NoteRunRequest(
            topic_id=self.topic_id,
            job=self.job,
            token=self.token,
            started_ms=self.granted_ms,
            outcome=outcome,
            detail=detail,
            runner=runner,
        )
        self._connection.ask(request, wire.NoteRunReply, CALL_TIMEOUT_S)

    def close(self) -> None:
        """Release the lease.  If no controller answers, it ends after its TTL."""
        self._connection.run(lambda _ms: self._tasks.close(), CALL_TIMEOUT_S)
        request = wire.ReleaseLeaseRequest(topic_id=self.topic_id, token=self.token)
        try:
            self._connection.ask(request, wire.ReleaseLeaseReply, self.ttl_ms / 1000)
        except errors.PkError:
            pass
        self._connection.close()

    def __enter__(self) -> MaintenanceLease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def lowest_starts(
    topic_id: str, views: Mapping[int, wire.DescribePartitionsReply]
) -> dict[int, Offset]:
    """Return the lowest local_log_start of each partition, from the replies of all brokers.

    Every replica counts that any broker knows of.
    """
    replicas: dict[int, set[int]] = {}
    starts: dict[tuple[int, int], Offset] = {}
    for node, reply in views.items():
        for state in reply.partitions:
            if state.topic_id == topic_id:
                replicas.setdefault(state.partition, set()).update(state.replicas)
                healthy = not state.HasField("error")
                starts[state.partition, node] = state.local_log_start if healthy else 0
    return {
        partition: min((starts.get((partition, node), 0) for node in nodes), default=0)
        for partition, nodes in replicas.items()
    }


def lowest_holds(
    topic_id: str,
    views: Mapping[int, wire.DescribePartitionsReply],
    partitions: Iterable[int],
) -> dict[int, Offset]:
    """Return the lowest hold of each partition that has one, from the replies of all brokers.

    Raises `BrokerUnavailable` if the leader of one of `partitions` is missing from the replies.
    """
    holds: dict[int, Offset] = {}
    led: set[int] = set()
    for node, reply in views.items():
        for state in reply.partitions:
            if state.topic_id != topic_id:
                continue
            if state.leader == node:
                led.add(state.partition)
            if state.HasField("retention_hold"):
                known = holds.get(state.partition, state.retention_hold)
                holds[state.partition] = min(known, state.retention_hold)
    silent = sorted(set(partitions) - led)
    if silent:
        raise errors.BrokerUnavailable(
            f"the leaders of the partitions {silent} do not answer, so their retention holds are "
            "not known: run the job again"
        )
    return holds


async def ask_owner(
    cluster: NetworkClient, change: wire.CommitToTableRequest, timeout_ms: int
) -> wire.CommitToTableReply:
    """Send the hand-over to the leader of partition 0, in whose tier process the owner runs."""
    await cluster.topic(change.topic, timeout_ms)
    place = TopicPartition(change.topic, 0)
    leader = cluster.metadata.leader(cluster.metadata.key(place))
    if leader is None:
        cluster.want_metadata()
        raise cluster.metadata.leaderless(place)
    reply: Any = await cluster.call_node(leader.node, change, timeout_ms=timeout_ms)
    assert isinstance(reply, wire.CommitToTableReply)
    return reply


def time_of(reply: wire.RenewLeaseReply) -> MedianTime | None:
    """Return the time that a reply to a renewal states; None = there is none."""
    if not reply.HasField("now_ms"):
        return None
    return MedianTime(reply.now_ms, max(reply.now_ms, reply.latest_ms))
