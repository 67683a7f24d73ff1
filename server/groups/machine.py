"""The group coordinator of one partition of `__consumer_offsets`: a Replayed machine.

`decide` reads the groups and answers a command with records and a reply; `apply` applies a record.
The machine uses no clock but `now_ms`, and that only for the times of commits and of empty groups.
The shell measures sessions and rebalance timeouts.  The decisions are in `membership` (with
`rebalances`), `offsets`,
`offset_pages` and `queries`.

Invariants
  M1  `decide` never mutates.  Equal logs give equal machines.
  M2  One decision has at most one record per key.  Its records are one atomic batch.
  M3  A partition has one owner in a generation: an assignment that gives it to two members is
      refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pk.server.groups import commands, membership, offset_pages, offsets, queries
from pk.server.groups.commands import Command, GroupRules
from pk.server.groups.groups import ConsumerGroup, Groups, Out
from pk.server.groups.records import EndedTransaction, GroupLogRecord


class GroupCoordinator:
    """The replayed state of one coordinator partition and its decisions.  See the module."""

    def __init__(self, rules: GroupRules) -> None:
        self._groups = Groups(rules)

    @property
    def groups(self) -> Mapping[str, ConsumerGroup]:
        """Every group, as far as its records are decided."""
        return self._groups.items()

    def decide(self, command: Command, now_ms: int) -> Out:
        """Return the records, the reply and the effects of `command`.  Raises typed refusals."""
        return _DECISIONS[type(command)](self._groups, command, now_ms)

    def apply(self, offset: int, record: GroupLogRecord | EndedTransaction) -> None:
        """Apply one record of the log, or a marker."""
        self._groups.apply(offset, record)


_DECISIONS: Mapping[type, Callable[[Groups, Any, int], Out]] = {
    commands.JoinGroup: membership.join,
    commands.SyncGroup: membership.sync,
    commands.LeaveGroup: membership.leave,
    commands.ExpireMembers: membership.expire,
    commands.EndJoin: membership.end_join,
    commands.CommitOffsets: offsets.commit,
    commands.CommitTransactionOffsets: offsets.commit_in_transaction,
    commands.FetchOffsets: offsets.fetch,
    commands.ReadOffsets: offset_pages.read_page,
    commands.DescribeGroup: queries.describe,
    commands.ListGroups: queries.list_groups,
    commands.DeleteGroup: offsets.delete_group,
    commands.DeleteOffsets: offsets.delete,
    commands.ExpireOffsets: offsets.expire,
}
