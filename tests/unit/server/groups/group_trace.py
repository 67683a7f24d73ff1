"""Golden traces of a group's coordinator: commands, the records that they write, and the replies.

The file format and `--rewrite` are those of tests/unit/server/raft/raft_trace.py.  A trace drives
the production machine (`pk.server.groups.machine`).  After each record a machine that replays the
whole log must equal the deciding one.  A line with `+` is a record, a line with `=` the reply.

The group is `app`, its topic `t` has the partitions 0 to 3.  P:O is offset O of partition P.

Commands (M is a member id, G a generation, -1 = none)
  join M G [instance=I] [assignors=A,…] [topics=T,…]
                       M has completed generation G, and joins
  sync M G [M=P,…]…    M asks for its assignment; the leader brings that of all
  heartbeat M G [instance=I]
                       the news that a waiting heartbeat of M would be woken for (P5)
  leave M…             members leave
  expire M…            the sessions of members are over
  end-join             the time of the join phase is over
  commit M G P:O…      M commits offsets; `-` = a tool
  txn-commit M G PRODUCER EPOCH P:O…
                       M commits offsets in the transaction of a producer (X2)
  marker PRODUCER EPOCH commit|abort
                       the marker that ends the transaction of that epoch is below the HW
  query RUN [first] [holds] P:O…
                       a run of a streaming query commits its progress (S1)
  fetch [stable]       the committed offsets
  wait DAYS            time passes
  expire-offsets       the coordinator looks for offsets whose retention is over
  failover             another coordinator replays the log
  status               the group
"""

from __future__ import annotations

from typing import Any

from pk import errors
from pk.server.groups import commands as c
from pk.server.groups import records
from pk.server.groups.machine import GroupCoordinator
from pk.server.groups.state import GroupState, keys_of
from pk.server.groups.waiting_heartbeats import check
from pk.types import NONE, PartitionKey
from pk.wire import pk_pb2 as wire
from tests.unit.server.groups.group_bench import DAY_MS, ID, KEYS, TOPIC_ID, asked
from tests.unit.server.groups.test_transactional_offsets import TransactionBench


class _NotingBench(TransactionBench):
    """Notes each record that is applied."""

    def __init__(self, out: list[str]) -> None:
        super().__init__()
        self.out = out

    def _apply(self, record: Any) -> None:
        self.out.append(f"+ {_record_text(record)}")
        super()._apply(record)


class Trace:
    """Performs commands and notes the records and the replies of the machine."""

    def __init__(self) -> None:
        self._out: list[str] = []
        self.bench = _NotingBench(self._out)

    @property
    def out(self) -> list[str]:
        return self._out

    @out.setter
    def out(self, lines: list[str]) -> None:
        self._out = self.bench.out = lines

    def command(self, line: str) -> None:
        word, *words = line.split()
        names = dict(each.split("=") for each in words if "=" in each)
        plain = [each for each in words if "=" not in each]
        try:
            reply = getattr(self, "_" + word.replace("-", "_"))(*plain, **names)
        except errors.PkError as refusal:
            reply = f"{type(refusal).__name__}: {refusal.message}"
        if reply is not None:
            self.out.append(f"= {reply}")

    # -- members -----------------------------------------------------------------------------------

    def _join(
        self, member: str, generation: str, *, instance: str = "", assignors: str = "range",
        topics: str = "t",
    ) -> str:  # fmt: skip
        reply = self.bench.join(
            member, int(generation), instance=instance, assignors=assignors.split(","),
            topics=topics.split(","),
        )  # fmt: skip
        if reply.pending:
            return f"{member} waits for the other members"
        words = f"{member} is in generation {reply.generation}, {reply.leader} leads"
        if reply.members:
            words += f", assignor {reply.assignor} of " + " ".join(
                each.member_id for each in reply.members
            )
        return words + (", the assignment stands" if reply.skip_assignment else "")

    def _sync(self, member: str, generation: str, *, instance: str = "", **given: str) -> str:
        wanted = {
            name: [KEYS[int(number)] for number in partitions.split(",") if number]
            for name, partitions in given.items()
        }
        reply = self.bench.sync(member, int(generation), wanted or None, instance=instance)
        if reply.pending:
            return f"{member} waits for the leader"
        return f"{member} has {_partitions(keys_of(reply.partitions))}"

    def _heartbeat(self, member: str, generation: str, *, instance: str = "") -> str:
        check(self.bench.group, asked(member, int(generation), instance))
        return f"{member} has no news, and waits"

    def _leave(self, *members: str) -> str:
        return f"codes {self.bench.leave(*members)}"

    def _expire(self, *members: str) -> str:
        return f"{self.bench.expire(*members)} members removed"

    def _end_join(self) -> None:
        self.bench.end_join()

    # -- offsets -----------------------------------------------------------------------------------

    def _commit(self, member: str, generation: str, *offsets: str, instance: str = "") -> str:
        wanted = _offsets(offsets)
        found = self.bench.commit(
            wanted, "" if member == "-" else member, int(generation), instance=instance
        )
        codes = " ".join(
            f"{key.partition}:{errors.BY_CODE[code].__name__}" for key, code in found.items()
        )
        return f"refused {codes}" if found else "committed"

    def _txn_commit(
        self, member: str, generation: str, producer: str, epoch: str, *offsets: str
    ) -> str:
        self.bench.store(
            _offsets(offsets), member, int(generation), epoch=int(epoch), producer=int(producer)
        )
        return "pending"

    def _marker(self, producer: str, epoch: str, outcome: str) -> None:
        commit = outcome == "commit"
        self.bench.end(commit=commit, epoch=int(epoch), producer=int(producer))

    def _query(self, run: str, *words: str) -> str:
        said = wire.QueryRun(run_id=run, first="first" in words, holds_retention="holds" in words)
        request = wire.OffsetCommitRequest(member=asked(""), query=said)
        for key, offset in _offsets([each for each in words if ":" in each]).items():
            request.topics.add(topic_id=key.topic_id, partitions=[key.partition], offsets=[offset])
        self.bench.run(c.CommitOffsets(request, self.bench.image))
        return "committed"

    def _fetch(self, stable: str = "") -> str:
        if stable:
            self.bench.stable_fetch()
        found = self.bench.fetched()
        return " ".join(f"{key.partition}:{offset}" for key, offset in found.items()) or "nothing"

    def _wait(self, days: str) -> None:
        self.bench.now += int(days) * DAY_MS

    def _expire_offsets(self) -> str:
        return f"{self.bench.expire_offsets().written} records"

    # -- the coordinator ---------------------------------------------------------------------------

    def _failover(self) -> str:
        machine = GroupCoordinator(self.bench.rules)
        for offset, record in self.bench.entries:
            machine.apply(offset, record)
        self.bench.machine = machine
        return f"{len(self.bench.entries)} records replayed"

    def _status(self) -> str:
        group = self.bench.machine.groups.get(ID)
        if group is None:
            return "no group"
        words = f"{group.state.label} generation={group.generation}"
        for name, member in sorted(group.members.items()):
            owned = group.assignment.get(name)
            has = _partitions(owned.partitions) if owned is not None else "nothing"
            words += f", {name}{_instance(member.instance_id)} has {has}"
        return words


def _offsets(words: Any) -> dict[PartitionKey, int]:
    found = {}
    for word in words:
        number, _, offset = word.partition(":")
        found[PartitionKey(TOPIC_ID, int(number))] = int(offset)
    return found


def _partitions(keys: Any) -> str:
    return ",".join(str(key.partition) for key in sorted(keys)) or "nothing"


def _instance(name: str) -> str:
    return f"[{name}]" if name else ""


def _record_text(record: Any) -> str:
    """Return one line for a record of the log."""
    if isinstance(record, records.EndedTransaction):
        outcome = "commit" if record.commit else "abort"
        return f"marker of producer {record.producer_id} epoch {record.producer_epoch}: {outcome}"
    key, value = records.decode_key(record.key), record.value
    if key.kind == records.OFFSET:
        assert key.partition is not None
        text = f"offset {key.partition.partition}"
        if record.producer is not None:
            text += (
                f" of transaction ({record.producer.producer_id}, {record.producer.producer_epoch})"
            )
        return f"{text} removed" if value is None else f"{text} is {value.offset.offset}"
    if value is None:
        kinds = {records.GROUP: "group", records.MEMBER: "member", records.ASSIGNMENT: "assignment"}
        return f"{kinds[key.kind]} {key.member_id or key.group_id} removed"
    if key.kind == records.GROUP:
        return _group_text(value.group)
    if key.kind == records.MEMBER:
        joined = value.member.joined
        after = "not joined" if joined == NONE else f"joined after generation {joined}"
        return f"member {key.member_id}{_instance(value.member.group_instance_id)} {after}"
    found = records.assignment_of(value.assignment)
    parts = [
        f"{name}={_partitions(each.partitions)}"
        + (f" (released {_partitions(each.released)})" if each.released else "")
        for name, each in sorted(found.items())
    ]
    return f"assignment of generation {value.assignment.generation}: {' '.join(parts)}"


def _group_text(body: wire.GroupStateRecord) -> str:
    text = f"group {GroupState(body.state).label} generation={body.generation}"
    if body.leader:
        text += f" leader={body.leader}"
    if body.query_run:
        text += f" query={body.query_run}{' holds' if body.holds_retention else ''}"
    return text
