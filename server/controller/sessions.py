"""The sessions of brokers at the active controller: soft state of one term (rule R7).

A session belongs to the stream on which its broker registered.  When that stream breaks, the
session is *lost*.  The controller fences the broker at once if its address refuses a connection,
else when the session timeout has passed since the last heartbeat.  A broker that registers again
before that keeps its registration.  A new active controller grants every unfenced broker a session
timeout, less the time that has certainly passed (raft/timing.py).  At least three quarters of the
timeout are left for the broker to find this controller (BrokerLifecycleManager).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pk.types import NodeId


@dataclass(slots=True)
class Session:
    """The session of one registered broker."""

    broker_id: NodeId
    broker_epoch: int
    stream: int | None  #: None = lost, or no stream since this controller started
    deadline_ms: int


class Sessions:
    """All sessions.  Times are of the controller's monotonic clock."""

    def __init__(self, timeout_ms: int) -> None:
        self._timeout_ms = timeout_ms
        self._by_broker: dict[NodeId, Session] = {}

    def grant(
        self, unfenced: Iterable[tuple[NodeId, int]], now_ms: int, spent_ms: int = 0
    ) -> list[Session]:
        """Grant a session to every unfenced broker when a term begins.

        brokers: (broker id, broker epoch), with the part of the session timeout that has passed.
        """
        deadline_ms = now_ms + self._timeout_ms - min(spent_ms, self._timeout_ms // 4)
        granted = [Session(broker, epoch, None, deadline_ms) for broker, epoch in unfenced]
        self._by_broker.update((session.broker_id, session) for session in granted)
        return granted

    def open(self, broker_id: NodeId, broker_epoch: int, stream: int, now_ms: int) -> None:
        """Open the session of a broker that registered on `stream`."""
        deadline_ms = now_ms + self._timeout_ms
        self._by_broker[broker_id] = Session(broker_id, broker_epoch, stream, deadline_ms)

    def heartbeat(self, broker_id: NodeId, broker_epoch: int, stream: int, now_ms: int) -> None:
        """Renew the session for a heartbeat, or a repeated registration, of the same registration.

        A broker that was fenced for its silence and sends a heartbeat on its old stream gets a
        session again: it will be unfenced, and its next silence must be noticed.
        """
        session = self._by_broker.get(broker_id)
        if session is None:
            self.open(broker_id, broker_epoch, stream, now_ms)
        elif session.broker_epoch == broker_epoch:
            session.stream = stream
            session.deadline_ms = now_ms + self._timeout_ms

    def lose(self, stream: int) -> list[Session]:
        """Mark the sessions of a broken stream as lost; return them."""
        lost = [each for each in self._by_broker.values() if each.stream == stream]
        for session in lost:
            session.stream = None
        return lost

    def live(self, broker_id: NodeId, *, except_stream: int) -> bool:
        """Whether the broker has a session on another stream than the one it asks on."""
        session = self._by_broker.get(broker_id)
        return session is not None and session.stream not in (None, except_stream)

    def is_lost(self, session: Session) -> bool:
        """Whether this is still the broker's session, and still without a stream."""
        return self._by_broker.get(session.broker_id) is session and session.stream is None

    def end(self, session: Session) -> None:
        """End the session of a broker that is being fenced."""
        if self._by_broker.get(session.broker_id) is session:
            del self._by_broker[session.broker_id]

    def retry(self, session: Session) -> None:
        """Restore an expired session after fencing failed, unless the broker has a new one."""
        self._by_broker.setdefault(session.broker_id, session)

    def expired(self, now_ms: int) -> list[Session]:
        return [each for each in self._by_broker.values() if each.deadline_ms <= now_ms]

    def is_expired(self, session: Session, now_ms: int) -> bool:
        """Whether this is still the broker's session, with no heartbeat since it expired."""
        mine = self._by_broker.get(session.broker_id) is session
        return mine and session.deadline_ms <= now_ms
