"""The members of two consumer groups, as processes of the history.

  exact   copies the first topic to the last one in transactions that have its offsets (X2)
  plain   processes the second topic and commits afterwards

A member notes where the group is when it gets partitions (`fetch`), and begins there (`assign`).
Some members leave and join again, and some work for longer than max_poll_interval_ms: the group
removes them, and they commit nevertheless.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from history import ASSIGN, COMMIT, FETCH, INFO, OK, POLL, TXN, Operation, Polled
from workload import (
    KEYS,
    PARTITIONS,
    PLACES,
    TOPICS,
    Client,
    TransactionClient,
    outcomes,
    send_to,
)

from pk import Consumer, Producer, TopicPartition, errors
from pk.client.futures import SendFuture
from pk.clock import block_s, monotonic_s

EXACT, PLAIN = "exact", "plain"
INPUTS = {EXACT: TOPICS[0], PLAIN: TOPICS[1]}
ASSIGNORS = {EXACT: "cooperative-sticky", PLAIN: "range"}
MAX_POLL_MS = 6_000
OPTIONS: dict[str, Any] = {
    "enable_auto_commit": False,
    "auto_offset_reset": "earliest",
    "session_timeout_ms": 6_000,
    "heartbeat_interval_ms": 500,
    "max_poll_interval_ms": MAX_POLL_MS,
}
#: How a turn of a member goes on after its poll, and how often.
EXACT_FATES = {"commit": 70, "abort": 14, "hasty commit": 5, "crash": 4, "leave": 5, "stall": 2}
PLAIN_FATES = {"commit": 60, "soon": 10, "nothing": 20, "leave": 8, "stall": 2}
FETCH_S = 5.0
#: Refusals of a commit that docs/SEMANTICS.md names, and a time-out.
REFUSALS = (
    errors.UnknownMemberId,
    errors.IllegalGeneration,
    errors.RebalanceInProgress,
    errors.NotPartitionOwner,
    errors.StaleOffsetCommit,
    errors.RequestTimedOut,
)


class Membership:
    """The consumer of a member, and the positions of its partitions as far as they are known."""

    def __init__(self, client: Client, group: str) -> None:
        self._client, self._group = client, group
        self.positions: dict[int, int] = {}
        rows = client.rng.choice([20, 200])
        self.consumer = Consumer(
            client.bootstrap,
            group_id=group,
            max_poll_records=rows,
            partition_assignment_strategy=ASSIGNORS[group],
            **OPTIONS,
        )
        self.consumer.subscribe(
            [INPUTS[group]], on_assigned=self.begin_at_committed, on_revoked=self._gone
        )

    def poll(self, timeout_s: float) -> list[Polled]:
        """Return what one poll returns."""
        try:
            batches = self.consumer.poll_batches(timeout_s)
        except errors.RetriableError as cause:
            self._client.recorder.error(cause)
            return []
        found = []
        for place, rows in batches:
            offsets = rows.column("offset").to_pylist()
            values = [int(value) for value in rows.column("value").to_pylist()]
            if offsets:
                found.append(Polled(KEYS[place], offsets, values))
                self.positions[KEYS[place]] = offsets[-1] + 1
        return found

    def go_back(self) -> None:
        """Read again from the committed offsets.  Raises `RequestTimedOut` if one is not known."""
        places = self.consumer.assignment()
        self.begin_at_committed(places)
        for place in places:
            if KEYS[place] not in self.positions:
                raise errors.RequestTimedOut(f"the committed offset of {place} is not known")
            self.consumer.seek(place, self.positions[KEYS[place]])

    def begin_at_committed(self, places: Sequence[TopicPartition]) -> None:
        """Note where the group is in these partitions, and that the process reads there.

        No other member can commit them now, so this is where the consumer began.
        """
        recorder, process = self._client.recorder, self._client.process
        operation = recorder.begin(process, FETCH)
        operation.group = self._group
        for place in places:
            self.positions.pop(KEYS[place], None)
            try:
                found = self.consumer.committed(place, FETCH_S) or 0
            except errors.RetriableError as cause:
                recorder.error(cause)
            else:
                operation.offsets[KEYS[place]] = self.positions[KEYS[place]] = found
        operation.finish(OK, monotonic_s())
        self._assign()

    def _gone(self, places: Sequence[TopicPartition]) -> None:
        for place in places:
            self.positions.pop(KEYS[place], None)
        self._assign()

    def _assign(self) -> None:
        operation = self._client.recorder.begin(self._client.process, ASSIGN)
        operation.starts = dict(self.positions)
        operation.finish(OK, monotonic_s())

    def reached(self) -> dict[TopicPartition, int]:
        """Return the positions of the consumer.

        They are behind the markers that it has passed, as soon as it got something.
        """
        found = {}
        for place in self.consumer.assignment():
            try:
                found[place] = self.consumer.position(place, 0)
            except errors.RequestTimedOut:
                found[place] = self.positions.get(KEYS[place], 0)
        return found


class MemberClient(Client):
    """What the members of both groups have.  At the end they go on until `finished` is set."""

    group = ""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.finished = threading.Event()
        #: What the group has processed as far as this member knows: partition → position.
        self.reached: dict[TopicPartition, int] = {}
        self._member: Membership | None = None

    def joined(self) -> Membership:
        """Return the membership; the first turn begins it."""
        if self._member is None:
            self._member = Membership(self, self.group)
        return self._member

    def leave(self) -> None:
        """Leave the group; the next turn joins it as a new member."""
        self.reached = {}
        if self._member is not None:
            self._member.consumer.close()
            self._member = None

    def stall(self) -> None:
        """Work until the group has removed this member."""
        block_s(MAX_POLL_MS / 1000 + self.rng.uniform(0.5, 2))


class PlainMember(MemberClient):
    """Processes records, and commits its positions afterwards."""

    group = PLAIN

    def turn(self) -> None:
        member = self.joined()
        operation = Operation(self.process, POLL, monotonic_s(), group=PLAIN)
        operation.polls = member.poll(self.rng.uniform(0, 0.3))
        if operation.polls:
            operation.finish(OK, monotonic_s())
            self.recorder.history.append(operation)
        self._go_on(member)

    def _go_on(self, member: Membership) -> None:
        (fate,) = self.rng.choices(list(PLAIN_FATES), list(PLAIN_FATES.values()))
        if fate == "leave":
            self.leave()
            return
        if fate == "stall":
            self.stall()
        if fate != "nothing" and member.positions:
            self._commit(member, soon=fate == "soon")

    def _commit(self, member: Membership, *, soon: bool) -> bool:
        """Commit the known positions; returns whether that is acknowledged."""
        operation = self.recorder.begin(self.process, COMMIT)
        operation.group, operation.offsets = PLAIN, dict(member.positions)
        offsets = {PLACES[key]: offset for key, offset in operation.offsets.items()}
        outcome, note = INFO, "soon" if soon else ""
        try:
            member.consumer.commit(
                offsets, asynchronous=soon, timeout_s=self.rng.choice([1.0, 5.0, 30.0])
            )
            outcome = INFO if soon else OK
        except REFUSALS as cause:  # other partitions of it may be committed
            self.recorder.error(cause)
            note = type(cause).__name__
        except errors.PkError as cause:
            self.recorder.promise(f"a commit raised {type(cause).__name__}: {cause}")
        operation.finish(outcome, monotonic_s(), note)
        return outcome == OK

    def end(self) -> None:
        while not self.finished.is_set():
            member = self.joined()
            operation = Operation(self.process, POLL, monotonic_s(), group=PLAIN)
            operation.polls = member.poll(0.3)
            if operation.polls:
                operation.finish(OK, monotonic_s())
                self.recorder.history.append(operation)
            elif not member.positions or self._commit(member, soon=False):
                self.reached = member.reached()
        self.leave()


class ExactMember(TransactionClient, MemberClient):
    """Copies records in transactions that have the offsets of its group."""

    group = EXACT

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._name = f"jepsen-exact-{self.process}"
        self._astray = False  #: the position is not the committed one

    def turn(self) -> None:
        (fate,) = self.rng.choices(list(EXACT_FATES), list(EXACT_FATES.values()))
        if fate == "leave":
            self.leave()
        else:
            self._copy_once(fate)

    def _copy_once(self, fate: str) -> bool:
        """Poll and copy; returns whether the member is where its group is and got nothing."""
        if self._producer is None:
            self._producer = self._open()
        if self._producer is None:
            return False
        self._find_back()
        begun = monotonic_s()
        polls = self.joined().poll(self.rng.uniform(0, 0.3))
        if polls:
            self._copy(self._producer, begun, polls, fate)
        return not polls

    def _find_back(self) -> None:
        """Go back after a transaction that did not commit, or join again.

        While a transaction of the producer is open, its offsets are not known: a new producer has
        ended it before.
        """
        if self._astray:
            try:
                self.joined().go_back()
            except errors.PkError as cause:
                self.recorder.error(cause)
                self.leave()
            self._astray = False

    def _copy(self, producer: Producer, begun: float, polls: list[Polled], fate: str) -> None:
        operation = Operation(self.process, TXN, begun, group=EXACT, polls=polls)
        self.recorder.history.append(operation)
        operation.offsets = {each.key: each.offsets[-1] + 1 for each in polls}
        sent: list[tuple[int, int, SendFuture]] = []
        outcome, note = INFO, fate
        try:
            producer.begin_transaction()
            if fate == "stall":
                self.stall()
            refused = self._send_copies(producer, polls, operation.offsets, sent)
            if refused is not None:
                note = f"{fate}; {type(refused).__name__}"
                fate = "abort"
            outcome = self._finish(producer, fate, sent)
        finally:
            operation.sends = outcomes(sent)
            operation.finish(outcome, monotonic_s(), note)
            self._astray = outcome != OK

    def _send_copies(
        self,
        producer: Producer,
        polls: list[Polled],
        offsets: dict[int, int],
        sent: list[tuple[int, int, SendFuture]],
    ) -> errors.PkError | None:
        """Send a record for each record, and the offsets; returns why it must be aborted."""
        try:
            for each in polls:
                key = each.key % PARTITIONS + len(PLACES) - PARTITIONS
                for _ in each.values:
                    value = self.recorder.value()
                    sent.append((key, value, send_to(producer, key, value)))
            found = {PLACES[key]: offset for key, offset in offsets.items()}
            who = self.joined().consumer.group_metadata()
            producer.send_offsets_to_transaction(found, who, timeout_s=10.0)
        except (
            errors.TransactionAborted,
            errors.BufferExhausted,
            errors.RebalanceInProgress,
        ) as cause:
            self.recorder.error(cause)
            return cause
        return None

    def end(self) -> None:
        while not self.finished.is_set():
            if self._copy_once("commit"):
                self.reached = self.joined().reached()
        if self._producer is not None:
            self._producer.close()
        self.leave()
