"""Which brokers are alive in the active controller's eyes: soft state, rebuilt after a restart
(rule R7).

A session belongs to the stream its broker registered on.  A lost stream makes the session
*lost*: it is fenced at once if the broker's address refuses a connection, else when the session
timeout has passed since the last heartbeat, unless the broker comes back first.  A new active
controller grants every unfenced broker a timeout, less what is over for certain (raft/timing.py);
three quarters are always left to find this controller (BrokerLifecycleManager).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pk.types import NodeId


@dataclass(slots=True)
class Session:
    """One registered broker."""

    broker_id: NodeId
    broker_epoch: int
    stream: int | None  #: None = lost, or not heard of since this controller started
    deadline_ms: int


class Sessions:
    """All sessions; times are the controller's monotonic clock."""

    def __init__(self, timeout_ms: int) -> None:
        self._timeout_ms = timeout_ms
        self._by_broker: dict[NodeId, Session] = {}

    def grant(
        self, unfenced: Iterable[tuple[NodeId, int]], now_ms: int, spent_ms: int = 0
    ) -> list[Session]:
        """The controller started: (broker id, broker epoch) of every unfenced broker, and what is
        over of their sessions.
        """
        deadline_ms = now_ms + self._timeout_ms - min(spent_ms, self._timeout_ms // 4)
        granted = [Session(broker, epoch, None, deadline_ms) for broker, epoch in unfenced]
        self._by_broker.update((session.broker_id, session) for session in granted)
        return granted

    def open(self, broker_id: NodeId, broker_epoch: int, stream: int, now_ms: int) -> None:
        """A broker registered on `stream`."""
        deadline_ms = now_ms + self._timeout_ms
        self._by_broker[broker_id] = Session(broker_id, broker_epoch, stream, deadline_ms)

    def beat(self, broker_id: NodeId, broker_epoch: int, stream: int, now_ms: int) -> None:
        """A heartbeat of the current registration renews, and so does its process that registers
        again; a session of another one is not touched.

        Who was fenced for its silence and speaks again on its old stream has a session again: it
        will be unfenced, and nobody would notice its next silence.
        """
        session = self._by_broker.get(broker_id)
        if session is None:
            self.open(broker_id, broker_epoch, stream, now_ms)
        elif session.broker_epoch == broker_epoch:
            session.stream = stream
            session.deadline_ms = now_ms + self._timeout_ms

    def lose(self, stream: int) -> list[Session]:
        """`stream` broke; returns the sessions it carried."""
        lost = [each for each in self._by_broker.values() if each.stream == stream]
        for session in lost:
            session.stream = None
        return lost

    def live(self, broker_id: NodeId, *, except_stream: int) -> bool:
        """The broker has another stream than the one it asks on."""
        session = self._by_broker.get(broker_id)
        return session is not None and session.stream not in (None, except_stream)

    def is_lost(self, session: Session) -> bool:
        """The session is still the broker's and still has no stream."""
        return self._by_broker.get(session.broker_id) is session and session.stream is None

    def end(self, session: Session) -> None:
        """The broker is being fenced."""
        if self._by_broker.get(session.broker_id) is session:
            del self._by_broker[session.broker_id]

    def retry(self, session: Session) -> None:
        """Fencing failed: the session is expired again, unless the broker came back."""
        self._by_broker.setdefault(session.broker_id, session)

    def expired(self, now_ms: int) -> list[Session]:
        return [each for each in self._by_broker.values() if each.deadline_ms <= now_ms]

    def is_expired(self, session: Session, now_ms: int) -> bool:
        """It is still the broker's, and nothing was heard since."""
        mine = self._by_broker.get(session.broker_id) is session
        return mine and session.deadline_ms <= now_ms
