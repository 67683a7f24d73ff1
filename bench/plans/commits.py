"""Rounds of commits of offsets."""

from __future__ import annotations

from bench import commit_client, runs
from bench.plans import Base
from bench.runs import Sample

_CLIENTS = 64
_COMMIT_S = 8.0


class Commits(Base):
    """Variant `sync`: all members, one commit in flight each; `async`: one member."""

    def round(self, role: str, mode: str) -> Sample:
        side = self.side(role)
        topic = self.bench.fresh("commits")
        side.create_topic(topic, partitions=_CLIENTS)
        protocol = mode if role == "peer" else "classic"
        command = commit_client.command(
            self.variant.name, side.kind, side.address, topic, protocol, _CLIENTS, _COMMIT_S
        )
        try:
            return runs.watch(command, runs.read_line, side.pids())
        finally:
            side.delete_topic(topic)
