"""Tracks which replicas the controller knows to be offline, and whether the metadata image includes
the controller's reaction.

Pure.  A broker lists its offline replicas in every heartbeat (rules L2, L9, L15).  The controller
takes such a replica out of ISR and ELR before it replies, so the reply acknowledges the report.
The broker's metadata image gets the controller's records later.  A fetch of the metadata log that
was sent after the reply, and that reached the committed end, includes them.  Only then may the
broker set a damaged log aside (broker/metadata_publisher M7).

Invariants
  O1  An acknowledgement ends when the replica is online again.  A later failure is reported, and
      acknowledged, again.
  O2  The image includes an acknowledgement only if the reply with it arrived before the fetch of
      the metadata log was sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from pk.types import PartitionKey


class OfflineReports:
    """The acknowledged reports of one broker, each with the number of the reply that had it."""

    def __init__(self) -> None:
        self._replies = 0
        self._acknowledged: dict[PartitionKey, int] = {}
        self._in_image: Mapping[PartitionKey, int] = {}

    @property
    def acknowledged(self) -> Mapping[PartitionKey, int]:
        """The replicas that the controller knows to be offline, and the reply that first said so.

        The mapping is never changed: a new one takes its place.
        """
        return self._acknowledged

    def on_reply(self, reported: Iterable[PartitionKey], offline: Collection[PartitionKey]) -> None:
        """Note a reply to a heartbeat that listed `reported`; `offline` are the replicas that are
        still offline.
        """
        self._replies += 1
        before = self._acknowledged
        self._acknowledged = {
            key: before.get(key, self._replies) for key in reported if key in offline
        }

    def on_image(self, acknowledged: Mapping[PartitionKey, int]) -> None:
        """Note that the image includes the log as it was when `acknowledged` was read (O2)."""
        self._in_image = acknowledged

    def withdraw(self, key: PartitionKey) -> None:
        """Drop the acknowledgement of a replica that is online again (O1)."""
        self._acknowledged = {k: at for k, at in self._acknowledged.items() if k != key}

    def in_image(self, key: PartitionKey) -> bool:
        """Whether the report of `key` is acknowledged and the image includes the controller's
        reaction.
        """
        reply = self._acknowledged.get(key)
        return reply is not None and reply == self._in_image.get(key)
