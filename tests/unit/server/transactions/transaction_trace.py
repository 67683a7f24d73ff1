"""Golden traces of a transaction coordinator: commands, the records that they write, the replies.

The file format and `--rewrite` are those of tests/unit/server/raft/raft_trace.py.  A trace drives
the production machine (`pk.server.transactions.machine`).  After each decision a machine that
replays the log must equal the deciding one.  A line with `+` is a record, one with `>` an
effect, one with `=` the reply.

The transactional id is `app`, the topic `t` has the partitions 0 to 2.  Pn is the n-th producer id
that the coordinator has allocated, Qn that of its successor after an unclean election.  Pn:E is the
pair of it and epoch E.

Commands of a plain producer
  init [Pn:E]              a producer begins, or continues with its pair
  register Pn:E P…         leaders ask about their first batches (X6)
  verify Pn:E P            a leader asks about an open transaction (X3)
  end Pn:E commit|abort    the producer ends its transaction (X1)
  timeout Pn:E             its time is over
  markers Pn:E             every partition has the marker of its transaction
  operator-abort           `pk transactions abort`

Commands of a job with participants (X5, X7, X8)
  join BATCH RUN           a task joins the batch
  commit BATCH RUN Pn:E…   the driver commits with these participants
  give-up BATCH RUN        the driver aborts
  lease-ends               no task was heard for too long (X4)
  marked                   every partition has the markers

Commands of the coordinator
  failover [lost=N]        another coordinator replays the log; lost: an unclean election lost its
                           last N records
  wait MS                  time passes
"""

from __future__ import annotations

import re
from typing import Any

from pk import errors
from pk.server.transactions import records
from pk.server.transactions.participants.records import decode_member_key
from pk.server.transactions.state import NO_PAIR, ProducerPair, TransactionState
from pk.transactional_ids import epoch_of_producer
from pk.transactional_ids import producer_id as allocated
from pk.types import NONE, PartitionKey
from tests.unit.server.transactions.coordinator_bench import T0, T1, T2
from tests.unit.server.transactions.test_participants import WRITTEN, JobBench

_NUMBER = 0xFFFFFF  #: the bits of a producer id that count the allocations of a leader epoch
_LETTERS = {3: "P", 4: "Q", 5: "R"}  #: by the leader epoch in which a producer id was allocated
_LONG = re.compile(r"\d{17,19}")
_STATUS = {1: "live", 2: "undecided", 3: "ended"}


class Trace:
    """Performs commands and notes records, effects and replies of the machine."""

    def __init__(self) -> None:
        self.out: list[str] = []
        self.bench = JobBench()
        self.seen = 0  #: records of the log that are noted

    def command(self, line: str) -> None:
        word, *words = line.split()
        names = dict(each.split("=") for each in words if "=" in each)
        plain = [each for each in words if "=" not in each]
        self.bench.effects = {}
        try:
            reply = getattr(self, "_" + word.replace("-", "_"))(*plain, **names)
        except errors.PkError as refusal:
            reply = f"{type(refusal).__name__}: {refusal.message}"
        for record in self.bench.log[self.seen :]:
            self._note(f"+ {_record_text(record)}")
        self.seen = len(self.bench.log)
        for name, values in self.bench.effects.items():
            for value in values:
                self._note(f"> {name}: {_effect_text(value)}")
        if reply is not None:
            self._note(f"= {reply}")

    def _note(self, text: str) -> None:
        self.out.append(_LONG.sub(lambda found: _id_text(int(found[0])), text))

    # -- a plain producer --------------------------------------------------------------------------

    def _init(self, pair: str = "") -> str:
        return _pair_text(self.bench.init(pair=self._pair(pair) if pair else NO_PAIR))

    def _register(self, pair: str, *partitions: str) -> str:
        keys = [(T0, T1, T2)[int(each)] for each in partitions]
        self.bench.ask(self._pair(pair), *keys)
        return "registered and live"

    def _verify(self, pair: str, partition: str) -> str:
        answer = self.bench.verify(self._pair(pair), (T0, T1, T2)[int(partition)])
        words = _STATUS.get(answer.status, str(answer.status))
        return f"{words}: {'commit' if answer.commit else 'abort'}" if words == "ended" else words

    def _end(self, pair: str, outcome: str) -> str:
        following = self.bench.end(self._pair(pair), commit=outcome == "commit")
        return f"the next pair is {_pair_text(following)}"

    def _timeout(self, pair: str) -> str:
        return f"{self.bench.time_out(self._pair(pair))} transactions end"

    def _markers(self, pair: str) -> str:
        return "complete" if self.bench.markers(self._pair(pair)) else "nothing to complete"

    def _operator_abort(self) -> None:
        self.bench.abort()

    # -- a job -------------------------------------------------------------------------------------

    def _join(self, batch: str, run: str) -> str:
        reply = self.bench.join_reply(int(batch), run)
        if reply.committed:
            return "the batch is committed already"
        return _pair_text(ProducerPair(reply.producer_id, reply.producer_epoch))

    def _commit(self, batch: str, run: str, *named: str) -> str:
        pairs = [self._pair(each) for each in named]
        reply = self.bench.commit(int(batch), *pairs, run=run, sums=WRITTEN)
        return "it was committed already" if reply.already_committed else "committed"

    def _give_up(self, batch: str, run: str) -> str:
        reply = self.bench.give_up(int(batch), run)
        return "it is committed" if reply.committed else "aborted"

    def _lease_ends(self) -> str:
        return f"{self.bench.lease_ends()} batches end"

    def _marked(self) -> str:
        return "complete" if self.bench.marked() else "nothing to complete"

    # -- the coordinator ---------------------------------------------------------------------------

    def _failover(self, *, lost: str = "") -> str:
        if lost:
            self.bench = self.bench.elected_uncleanly(lost=int(lost))  # type: ignore[assignment]
            self.seen = len(self.bench.log)
        else:
            self.bench.machine = self.bench.replayed()
        return f"{len(self.bench.log)} records replayed"

    def _wait(self, wait_ms: str) -> None:
        self.bench.now += int(wait_ms)

    def _pair(self, text: str) -> ProducerPair:
        number, _, epoch = text[1:].partition(":")
        (epoch_of_id,) = (each for each, letter in _LETTERS.items() if letter == text[0])
        made = allocated(self.bench.rules.partition, epoch_of_id, int(number))
        return ProducerPair(made, int(epoch))


def _id_text(number: int) -> str:
    return f"{_LETTERS[epoch_of_producer(number)]}{number & _NUMBER}"


def _pair_text(pair: ProducerPair) -> str:
    return f"{pair.producer_id}:{pair.epoch}"


def _partitions(keys: Any) -> str:
    return ",".join(str(key.partition) for key in keys)


def _effect_text(value: Any) -> str:
    """Return the fields of an effect that a reader of the trace needs."""
    if hasattr(value, "markers"):
        ended = " ".join(
            f"{each.producer_id}:{each.producer_epoch}={_outcome(each.commit)}"
            for each in sorted(value.markers)
        )
        return f"markers {ended} to {_partitions(value.partitions)}"
    if hasattr(value, "marker_epoch"):
        marker = f"{value.producer_id}:{value.marker_epoch}={_outcome(value.commit)}"
        return f"markers {marker} to {_partitions(value.partitions)}"
    if hasattr(value, "commit"):
        return _outcome(value.commit)
    return value.transactional_id if hasattr(value, "transactional_id") else value.job


def _outcome(commit: bool) -> str:
    return "commit" if commit else "abort"


def _record_text(record: records.TransactionLogRecord) -> str:
    """Return one line for a record of the log."""
    value = record.value
    if value is None:
        return "a key is removed"
    kind = value.WhichOneof("record")
    if kind == "participant":
        number = decode_member_key(record.key).number
        body = value.participant
        return f"participant {number}:{body.producer_epoch} in transaction {body.transaction}"
    if kind == "committed_batch":
        return f"batch {decode_member_key(record.key).number} is committed"
    known: Any = getattr(value, kind)
    state = TransactionState(known.state).label
    keys = [
        PartitionKey(topic.topic_id, each) for topic in known.topics for each in topic.partitions
    ]
    where = f" partitions {_partitions(keys)}" if keys else ""
    why = f" ({known.reason})" if known.reason else ""
    if kind == "job":
        return f"job {state} transaction {known.transaction} batch {known.batch}{where}{why}"
    text = f"{state} {known.producer_id}:{known.producer_epoch}{where}"
    if known.next_producer_id not in (0, NONE):
        text += f", then {known.next_producer_id}:{known.next_producer_epoch}"
    return text + why
