"""The transaction coordinator of one partition of `__transaction_state`: a Replayed machine.

`decide` reads the transactional ids and answers a command with records and a reply; `apply` applies
a record.  The machine uses no clock but `now_ms`.  The shell measures the timeouts, sends the
markers, and asks again after a failure.  The decisions are in `producers`, `questions`, `endings`
and `queries`; those about jobs, whose transactions have many producers, are in `participants`.

Invariants
  M1  `decide` never mutates.  Equal logs give equal machines.
  M2  One decision has at most one record per key.  Its records are one atomic batch.
  M3  The markers of a transaction go to all its registered partitions.  The leader's question
      registers a plain producer's partition, in the step that decides the positive answer.  So the
      registered partitions are those that a leader asked about, also after a replay, and the
      machine keeps no other set of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pk.effects import Decision, Publish
from pk.server.transactions import commands, endings, producers, queries
from pk.server.transactions.commands import Command, TransactionRules
from pk.server.transactions.ids import Out, TransactionalIds, began_event, decision
from pk.server.transactions.participants import endings as participant_endings
from pk.server.transactions.participants import joins, preparations
from pk.server.transactions.participants.jobs import Jobs
from pk.server.transactions.participants.records import job_record
from pk.server.transactions.questions import Questions
from pk.server.transactions.records import TransactionLogRecord
from pk.server.transactions.state import TransactionMetadata


def add_partitions(ids: TransactionalIds, command: commands.AddPartitions, now_ms: int) -> Out:
    """Answer the questions of leaders in order; later ones see what earlier ones registered."""
    questions = Questions(ids.rules, ids, command.request.metadata_offset, now_ms)
    answers = tuple(questions.answer(question) for question in command.request.questions)
    events = [Publish(commands.BEGAN, began_event(known)) for known in questions.began]
    out = decision(answers, list(questions.changed.values()), *events)
    jobs = [job_record(each) for each in questions.changed_jobs.values()]
    return Decision([*out.records, *jobs], out.reply, out.effects)


def abort(ids: TransactionalIds, command: commands.AbortTransaction, now_ms: int) -> Out:
    """Abort the transaction of a producer or of a job for an operator."""
    job = command.request.transactional_id in ids.jobs.items()
    decide = participant_endings.abort_for_operator if job else endings.abort
    return decide(ids, command, now_ms)


def commit_participants(
    ids: TransactionalIds, command: commands.CommitParticipants, now_ms: int
) -> Out:
    """Commit the batch of a job, open or prepared."""
    prepared = command.request.HasField("evidence")
    decide = preparations.commit_by_evidence if prepared else participant_endings.commit
    return decide(ids, command, now_ms)


def abort_participants(
    ids: TransactionalIds, command: commands.AbortParticipants, now_ms: int
) -> Out:
    """Abort the batch of a job, open or prepared."""
    prepared = command.request.HasField("evidence")
    decide = preparations.abort_by_evidence if prepared else participant_endings.abort
    return decide(ids, command, now_ms)


class TransactionCoordinator:
    """The replayed state of one coordinator partition and its decisions.  See the module."""

    def __init__(self, rules: TransactionRules) -> None:
        self._ids = TransactionalIds(rules)

    @property
    def transactions(self) -> Mapping[str, TransactionMetadata]:
        """Every transactional id, as far as its records are decided."""
        return self._ids.items()

    @property
    def jobs(self) -> Jobs:
        """Every job with its participants and history, as far as their records are decided."""
        return self._ids.jobs

    def decide(self, command: Command, now_ms: int) -> Out:
        """Return the records, the reply and the effects of `command`.  Raises typed refusals."""
        return _DECISIONS[type(command)](self._ids, command, now_ms)

    def apply(self, offset: int, record: TransactionLogRecord) -> None:
        """Apply one record of the log."""
        self._ids.apply(offset, record)


_DECISIONS: Mapping[type, Callable[[TransactionalIds, Any, int], Out]] = {
    commands.InitProducer: producers.init_producer,
    commands.AddPartitions: add_partitions,
    commands.EndTransaction: endings.end_transaction,
    commands.ExpireTransactions: endings.expire,
    commands.MarkersWritten: endings.markers_written,
    commands.JoinTransaction: joins.join,
    commands.CommitParticipants: commit_participants,
    commands.PrepareParticipants: preparations.prepare,
    commands.AbortParticipants: abort_participants,
    commands.ExpireBatches: participant_endings.expire,
    commands.BatchMarked: participant_endings.markers_written,
    commands.AbortTransaction: abort,
    commands.ForgetTransaction: queries.forget,
    commands.ForgetExpired: queries.forget_expired,
    commands.DescribeTransactions: queries.describe,
    commands.ListTransactions: queries.list_transactions,
    commands.Resume: queries.resume,
}
