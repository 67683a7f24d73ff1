"""Finds the replicas whose directory differs from the metadata, for the broker's heartbeats.

Pure.  The controller names the directory of a replica at once if the broker has only one.  A broker
with several directories chooses one when it creates the log.  It lists the replica in its
heartbeats until the metadata name that directory (rule R11, KIP-858).
"""

from __future__ import annotations

from itertools import islice

from pk.types import PartitionKey
from pk.wire import pk_pb2 as wire

#: Most replicas in one heartbeat; the next heartbeats list the others.
REPORTS_MAX = 1_000


class DirectoryReports:
    """The replicas of one broker whose directory the metadata do not name, each with the id of that
    directory."""

    def __init__(self) -> None:
        self._unnamed: dict[PartitionKey, str] = {}

    def note(self, key: PartitionKey, named: str, directory_id: str) -> None:
        """Compare the directory that the metadata name for a replica with that of its log."""
        if named == directory_id or not directory_id:
            self._unnamed.pop(key, None)
        else:
            self._unnamed[key] = directory_id

    def forget(self, key: PartitionKey) -> None:
        """Drop a replica that this broker does not host any more."""
        self._unnamed.pop(key, None)

    def listed(self) -> list[wire.ReplicaDirectory]:
        """Return what the next heartbeat reports, at most `REPORTS_MAX` replicas."""
        return [
            wire.ReplicaDirectory(
                topic_id=key.topic_id, partition=key.partition, directory_id=directory_id
            )
            for key, directory_id in islice(self._unnamed.items(), REPORTS_MAX)
        ]
