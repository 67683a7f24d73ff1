"""The jobs of one coordinator partition, with their participants and their committed batches.

Invariants
  I1  `apply` is called in the order of the log, and is the only mutator.
  I2  A producer id belongs to one job for ever.  No job has two participants with one producer id.
  I3  The history of a job has at most its newest HISTORY_MAX batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pk import errors
from pk.server.transactions.participants import records
from pk.server.transactions.participants.state import BatchSums, Job, Participant
from pk.server.transactions.records import (
    BATCH,
    PARTICIPANT,
    TRANSACTIONAL_ID,
    TransactionLogRecord,
    decode_key,
    forgotten,
    kind_of,
)
from pk.types import ProducerId


@dataclass(slots=True)
class _Members:
    """What a job has besides its own record.  A log may have these keys before the job's."""

    participants: dict[ProducerId, Participant] = field(default_factory=dict)
    history: dict[int, BatchSums] = field(default_factory=dict)


class Jobs:
    """The jobs, as far as their records are decided."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        self._members: dict[str, _Members] = {}
        self._owners: dict[ProducerId, str] = {}

    def __eq__(self, other: object) -> bool:
        """Return whether both have equal jobs, participants and histories."""
        if not isinstance(other, Jobs):
            return NotImplemented
        return (self._jobs, self._members) == (other._jobs, other._members)

    def items(self) -> Mapping[str, Job]:
        """Return every job with its state."""
        return self._jobs

    def apply(self, offset: int, record: TransactionLogRecord) -> None:
        """Apply one record of the log.  Raises `CorruptLog` and `NewerFormat` for its bytes."""
        if kind_of(record.key) == TRANSACTIONAL_ID:
            self._apply_job(record)
            return
        key = records.decode_member_key(record.key)
        members = self._members.setdefault(key.job, _Members())
        if key.kind == BATCH:
            if record.value is None:
                members.history.pop(key.number, None)
            else:
                sums = records.sums_of(record.value.committed_batch.sums)
                members.history[key.number] = sums
        elif record.value is None:
            members.participants.pop(key.number, None)
            self._owners.pop(key.number, None)
        else:
            owner = self._owners.setdefault(key.number, key.job)
            if owner != key.job:  # I2
                raise errors.CorruptLog(
                    f"__transaction_state gives producer id {key.number} to {owner!r} and, at "
                    f"offset {offset}, to {key.job!r}"
                )
            members.participants[key.number] = records.participant_of(record.value.participant)
        if not members.participants and not members.history:
            del self._members[key.job]

    def _apply_job(self, record: TransactionLogRecord) -> None:
        name = decode_key(record.key)
        if record.value is None:
            self._jobs.pop(name, None)
            return
        self._jobs[name] = records.job_of(name, record.value.job)

    def participants(self, job: str) -> Mapping[ProducerId, Participant]:
        """Return the pool of a job."""
        members = self._members.get(job)
        return {} if members is None else members.participants

    def history(self, job: str) -> Mapping[int, BatchSums]:
        """Return the newest committed batches of a job."""
        members = self._members.get(job)
        return {} if members is None else members.history

    def joined(self, known: Job) -> Iterator[tuple[ProducerId, Participant]]:
        """Return the participants of the open or the last transaction of a job."""
        return (
            (producer_id, each)
            for producer_id, each in self.participants(known.job).items()
            if known.joined(each)
        )

    def owner(self, producer_id: ProducerId) -> tuple[Job, Participant] | None:
        """Return the job that has a producer id, and the participant; None if no job has it."""
        name = self._owners.get(producer_id)
        known = None if name is None else self._jobs.get(name)
        if known is None:
            return None
        return known, self._members[known.job].participants[producer_id]

    def forgotten(self, job: str) -> list[TransactionLogRecord]:
        """Return the records that remove a job, its participants and its history."""
        return [
            forgotten(job),
            *(records.removed(PARTICIPANT, job, each) for each in self.participants(job)),
            *(records.removed(BATCH, job, each) for each in self.history(job)),
        ]
