"""Decides whether this broker accepts new sessions and appends.  It does not during a shutdown, or
without contact to the controller.

World-generic.

Invariants
  B2  Without contact to the controller for `broker_session_timeout_ms` the broker acknowledges
      nothing under acks=0|1 and accepts no new session (rule R6).  Under acks=all the high
      watermark decides, and readers read up to it.
"""

from __future__ import annotations

from pk import errors
from pk.server.replica.context import ControllerContact
from pk.server.replica.leader import ACKS_ALL


class Admission:
    """Refuses the sessions and appends that a broker may not accept now."""

    def __init__(self, lifecycle: ControllerContact) -> None:
        self._lifecycle = lifecycle

    def check_append(self, acks: int) -> None:
        """Raise if a batch under `acks` may not be appended."""
        lifecycle = self._lifecycle
        if lifecycle.want_shutdown:
            raise errors.BrokerUnavailable("this broker is shutting down")
        if acks != ACKS_ALL and not lifecycle.in_contact():
            raise errors.ControllerUnavailable(
                "no contact to the controller: only acks=all is accepted (rule R6)"
            )

    def check_new_session(self) -> None:
        """Refuse a new session without contact to the controller (rule R6) or during shutdown."""
        if self._lifecycle.want_shutdown:
            raise errors.BrokerUnavailable("this broker is shutting down")
        if not self._lifecycle.in_contact():
            raise errors.ControllerUnavailable(
                "no contact to the controller: no new sessions (rule R6)"
            )
