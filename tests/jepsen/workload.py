"""The clients of a run: transactional producers, producers without transactions, and consumers.

Each client is a process of the history (history.py) in a thread of its own.  It draws what it does
from a generator of its own, and notes each operation with its outcome.  The outcome says what the
application knows: a commit that returned is `ok`; a transaction that was never committed, or whose
commit was refused, is `fail`; a commit without an answer is `info`.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

from history import ASSIGN, FAIL, INFO, OK, POLL, SEND, TXN, Operation, Polled, Sent

from pk import Consumer, Producer, TopicPartition, errors
from pk.client.futures import SendFuture
from pk.clock import block_s, monotonic_s

#: The last one has what the group `exact` makes of the first one (group_clients.py).
TOPICS = ("jepsen-a", "jepsen-b", "jepsen-copy")
PARTITIONS = 3  #: of each topic
PLACES = [TopicPartition(topic, number) for topic in TOPICS for number in range(PARTITIONS)]
#: The keys from 0 that clients without a group write to.
WRITTEN = 2 * PARTITIONS
KEYS = {place: key for key, place in enumerate(PLACES)}
TRANSACTION_TIMEOUTS_MS = (4_000, 15_000)
#: A call of a producer is repeated for at most so long; then the producer is closed.
CALL_MAX_S = 60.0
DELIVERY_TIMEOUTS_MS = (5_000, 30_000, 120_000)
#: A record has an outcome after the longest of them.
OUTCOME_MAX_S = 180.0
#: How the transactions end, and how often.
FATES = {"commit": 56, "abort": 31, "hasty commit": 5, "crash": 4, "zombie": 3, "time out": 1}


class Recorder:
    """The history as it grows.  Safe to share between threads."""

    def __init__(self) -> None:
        self.history: list[Operation] = []
        self.broken: list[str] = []  #: broken promises that clients noticed themselves
        self.errors: Counter[str] = Counter()  #: errors that clients had to handle, by name
        self._values = itertools.count()
        self._processes = itertools.count()
        self._lock = threading.Lock()

    def value(self) -> int:
        """Return a value that no other write has."""
        return next(self._values)

    def process(self) -> int:
        """Return the number of a new process."""
        return next(self._processes)

    def begin(self, process: int, kind: str) -> Operation:
        """Note that an operation is invoked."""
        operation = Operation(process, kind, monotonic_s())
        self.history.append(operation)
        return operation

    def error(self, cause: BaseException) -> None:
        """Count an error."""
        with self._lock:
            self.errors[type(cause).__name__] += 1

    def promise(self, words: str) -> None:
        """Note a broken promise."""
        with self._lock:
            self.broken.append(words)


class Client:
    """A thread that repeats `turn` until `stop` is set, and then calls `end`."""

    def __init__(self, bootstrap: str, recorder: Recorder, seed: int, pause_s: float) -> None:
        self.bootstrap, self.recorder = bootstrap, recorder
        self.rng = random.Random(seed)
        self.process = recorder.process()
        self.stop = threading.Event()
        self.failure: BaseException | None = None
        self._pause_s = pause_s
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread; one that does not end is a broken promise."""
        self._thread.join(timeout_s)
        name = f"{type(self).__name__} {self.process}"
        if self._thread.is_alive():
            self.recorder.promise(f"{name} does not end within {timeout_s:g} s")
        if self.failure is not None:
            self.recorder.promise(f"{name} failed: {self.failure!r}")

    def _run(self) -> None:
        try:
            while not self.stop.is_set():
                self.turn()
                block_s(self.rng.uniform(0, 2 * self._pause_s))
            self.end()
        except BaseException as failure:
            self.failure = failure

    def turn(self) -> None:
        """Do one operation."""
        raise NotImplementedError

    def end(self) -> None:
        """Do the last operations, and close."""
        raise NotImplementedError


class Reading:
    """The read_committed consumer of a process.  It reads some keys, and changes them at times."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._consumer: Consumer | None = None
        #: the next offset of each key that was ever read
        self._positions: dict[int, int] = {}

    @property
    def begun(self) -> bool:
        """Return whether keys were assigned."""
        return self._consumer is not None

    def assign(self, keys: list[int], back: int = 0) -> None:
        """Read these keys where this process stopped, or up to `back` records earlier."""
        rng = self._client.rng
        if self._consumer is not None and rng.random() < 0.3:
            self.close()
        fresh = self._consumer is None
        if self._consumer is None:
            self._consumer = Consumer(self._client.bootstrap, auto_offset_reset="none")
        operation = self._client.recorder.begin(self._client.process, ASSIGN)
        kept = set() if fresh else {KEYS[place] for place in self._consumer.assignment()}
        self._consumer.assign([PLACES[key] for key in keys])
        for key in keys:
            start = self._positions.get(key, 0)
            if key not in kept or (back and rng.random() < 0.5):
                start = max(0, start - rng.randint(0, back))
                self._consumer.seek(PLACES[key], start)
            operation.starts[key] = self._positions[key] = start
        operation.finish(OK, monotonic_s())

    def poll(self, operation: Operation, timeout_s: float) -> None:
        """Poll once; the records become part of the operation."""
        assert self._consumer is not None
        try:
            batches = self._consumer.poll_batches(timeout_s)
        except errors.RetriableError as cause:
            self._client.recorder.error(cause)
            return
        for place, rows in batches:
            key, offsets = KEYS[place], rows.column("offset").to_pylist()
            values = [int(value) for value in rows.column("value").to_pylist()]
            operation.polls.append(Polled(key, offsets, values))
            if offsets:
                self._positions[key] = offsets[-1] + 1

    def behind(self, ends: Mapping[TopicPartition, int]) -> dict[str, str]:
        """Return the assigned partitions whose position is below their end."""
        assert self._consumer is not None
        found = {}
        for place in self._consumer.assignment():
            position = self._consumer.position(place, 30.0)
            if position < ends[place]:
                found[str(place)] = f"{position} of {ends[place]}"
        return found

    def close(self) -> None:
        """Close the consumer; the positions are kept."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None


class PollClient(Client):
    """Polls, and at times reads other keys or goes back.

    At the end it reads on until `ends`, which the driver sets, or until `deadline`.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.ends: dict[TopicPartition, int] | None = None
        self.deadline = 0.0
        self.ends_known = threading.Event()
        self._reading = Reading(self)
        self._turns = 0

    def turn(self) -> None:
        if not self._turns % 100:
            keys = list(KEYS.values())
            self._reading.assign(self.rng.sample(keys, self.rng.randint(2, len(keys))), back=300)
        self._turns += 1
        self._poll(self.rng.uniform(0, 0.3))

    def _poll(self, timeout_s: float) -> None:
        operation = Operation(self.process, POLL, monotonic_s())
        self._reading.poll(operation, timeout_s)
        if operation.polls:  # an empty poll says nothing
            operation.finish(OK, monotonic_s())
            self.recorder.history.append(operation)

    def end(self) -> None:
        self.ends_known.wait()
        assert self.ends is not None
        while left := self._reading.behind(self.ends):
            self._poll(0.5)
            if monotonic_s() > self.deadline:
                self.recorder.promise(f"consumer {self.process} is stuck at {left}")
                break
        self._reading.close()


class SendClient(Client):
    """Sends records without transactions, with an idempotent producer."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._producer: Producer | None = None

    def turn(self) -> None:
        if self._producer is None:
            self._producer = Producer(self.bootstrap, **producer_options(self.rng))
        operation = self.recorder.begin(self.process, SEND)
        sent: list[tuple[int, int, SendFuture]] = []
        try:
            for _ in range(self.rng.randint(1, 10)):
                key, value = self.rng.randrange(WRITTEN), self.recorder.value()
                sent.append((key, value, send_to(self._producer, key, value)))
        except errors.BufferExhausted as cause:  # this record was not accepted
            self.recorder.error(cause)
        if self.rng.random() < 0.02:
            # The batches that are under way may arrive at any time: another process begins.
            self._producer.close(0)
            self._producer, self.process = None, self.recorder.process()
        for _, _, future in sent:
            self._settle(future)
        operation.sends = outcomes(sent)
        known = all(each.offset >= 0 for each in operation.sends)
        operation.finish(OK if known else INFO, monotonic_s())

    def _settle(self, future: SendFuture) -> None:
        try:
            cause = future.exception(OUTCOME_MAX_S)
        except TimeoutError as late:
            self.recorder.promise(f"a record has no outcome: {late}")
            return
        if cause is not None:
            self.recorder.error(cause)

    def end(self) -> None:
        if self._producer is not None:
            self._producer.close()


class TransactionClient(Client):
    """Sends to several keys and polls, in transactions that end in the ways of FATES."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._name = f"jepsen-{self.process}"
        self._producer: Producer | None = None
        self._timeout_ms = 0
        self._reading = Reading(self)

    def turn(self) -> None:
        if self._producer is None:
            self._producer = self._open()
            if self._producer is None:
                return
        if not self._reading.begun or self.rng.random() < 0.03:
            keys = list(KEYS.values())
            self._reading.assign(self.rng.sample(keys, self.rng.randint(1, len(keys))), back=50)
        (fate,) = self.rng.choices(list(FATES), list(FATES.values()))
        self._transact(self._producer, fate)

    def end(self) -> None:
        """Leave a transaction open, as a client that is killed: it must not hold back readers."""
        producer = self._producer or self._open()
        if producer is not None and self._reading.begun:
            self._transact(producer, "crash")
        self._reading.close()

    # -- one transaction ---------------------------------------------------------------------------

    def _transact(self, producer: Producer, fate: str) -> None:
        operation = self.recorder.begin(self.process, TXN)
        sent: list[tuple[int, int, SendFuture]] = []
        outcome, note = INFO, fate
        try:
            producer.begin_transaction()
            refused = self._work(producer, operation, sent)
            if refused is not None:
                note = f"{fate}; {type(refused).__name__}"
                fate = "abort"
            outcome = self._finish(producer, fate, sent)
        finally:
            operation.sends = outcomes(sent)
            operation.finish(outcome, monotonic_s(), note)

    def _work(
        self, producer: Producer, operation: Operation, sent: list[tuple[int, int, SendFuture]]
    ) -> errors.PkError | None:
        """Send and poll; return the error if the transaction can only be aborted."""
        rng = self.rng
        for _ in range(rng.randint(1, 10)):
            if rng.random() < 0.25:
                self._reading.poll(operation, rng.uniform(0, 0.1))
                continue
            key, value = rng.randrange(WRITTEN), self.recorder.value()
            try:
                sent.append((key, value, send_to(producer, key, value)))
            except (errors.TransactionAborted, errors.BufferExhausted) as cause:
                self.recorder.error(cause)
                return cause
            if rng.random() < 0.2:
                try:
                    producer.flush(rng.uniform(0, 2))
                except TimeoutError as cause:
                    self.recorder.error(cause)
        return None

    def _finish(
        self, producer: Producer, fate: str, sent: list[tuple[int, int, SendFuture]]
    ) -> str:
        """End the transaction; return its outcome."""
        if fate == "crash":
            self._crash(producer)
            return FAIL  # no commit was requested
        if fate == "abort":
            return self._abort(producer)
        if fate == "zombie":
            return self._zombie(producer, sent)
        if fate == "hasty commit":
            return self._hasty_commit(producer)
        if fate == "time out" and self._timeout_ms == min(TRANSACTION_TIMEOUTS_MS):
            block_s(self._timeout_ms / 1000 + self.rng.uniform(0, 2))
        return self._commit(producer)

    def _commit(self, producer: Producer) -> str:
        deadline = monotonic_s() + CALL_MAX_S
        while monotonic_s() < deadline:
            try:
                producer.commit_transaction(self.rng.choice([1.0, 5.0, 30.0]))
                return OK
            except errors.TransactionAborted as cause:
                self.recorder.error(cause)
                return self._abort(producer)
            except errors.RequestTimedOut as cause:
                self.recorder.error(cause)
                if self.rng.random() < 0.3 and self._change_of_mind(producer):
                    return FAIL
            except errors.PkError as cause:
                self._unexpected(producer, "commit", cause)
                return INFO
        self._crash(producer)
        return INFO

    def _change_of_mind(self, producer: Producer) -> bool:
        """Abort a transaction whose commit timed out; return False if the commit must be repeated,
        because it was sent.
        """
        try:
            producer.abort_transaction(0.01)
        except errors.InvalidTxnState:
            return False
        except errors.RequestTimedOut:
            self._abort(producer)
        return True

    def _abort(self, producer: Producer) -> str:
        """Abort; the outcome is the same if that has no answer, because no commit was sent."""
        deadline = monotonic_s() + CALL_MAX_S
        while monotonic_s() < deadline:
            try:
                producer.abort_transaction(self.rng.choice([1.0, 5.0, 30.0]))
                return FAIL
            except errors.RequestTimedOut as cause:
                self.recorder.error(cause)
            except errors.PkError as cause:
                self._unexpected(producer, "abort", cause)
                return FAIL
        self._crash(producer)
        return FAIL

    def _hasty_commit(self, producer: Producer) -> str:
        """Commit, and die soon after the request was sent."""
        try:
            producer.commit_transaction(self.rng.choice([0.001, 0.005, 0.02, 0.1]))
            return OK
        except errors.TransactionAborted as cause:
            self.recorder.error(cause)
            return self._abort(producer)
        except errors.RequestTimedOut:
            self._crash(producer)
            return INFO

    def _zombie(self, producer: Producer, sent: list[tuple[int, int, SendFuture]]) -> str:
        """Commit after a newer instance has taken over; this must never succeed."""
        stored = bool(sent) and all(self._is_stored(future) for _, _, future in sent)
        newer = self._open()
        try:
            producer.commit_transaction(CALL_MAX_S)
            if stored:
                self.recorder.promise(f"{self._name}: a fenced producer has committed")
        except errors.PkError as cause:
            if stored and not isinstance(cause, errors.ProducerFenced):
                self.recorder.error(cause)
        producer.close(0)
        self._producer = newer
        return FAIL

    def _is_stored(self, future: SendFuture) -> bool:
        try:
            return future.exception(5.0) is None
        except TimeoutError:
            return False

    # -- producers ---------------------------------------------------------------------------------

    def _open(self) -> Producer | None:
        """Return a producer with this process' transactional id; it fences the one before."""
        self._timeout_ms = self.rng.choice(TRANSACTION_TIMEOUTS_MS)
        producer = Producer(
            self.bootstrap,
            transactional_id=self._name,
            transaction_timeout_ms=self._timeout_ms,
            **producer_options(self.rng),
        )
        deadline = monotonic_s() + 2 * CALL_MAX_S
        while monotonic_s() < deadline:
            try:
                producer.init_transactions(self.rng.choice([1.0, 5.0, 30.0]))
                return producer
            except errors.RequestTimedOut as cause:
                self.recorder.error(cause)
        self.recorder.promise(f"{self._name}: init_transactions has no outcome")
        producer.close(0)
        return None

    def _crash(self, producer: Producer) -> None:
        """End the producer without ending its transaction; the next turn opens another one."""
        producer.close(0)
        self._producer = None

    def _unexpected(self, producer: Producer, call: str, cause: errors.PkError) -> None:
        self.recorder.promise(f"{self._name}: {call} raised {type(cause).__name__}: {cause}")
        self._crash(producer)


def producer_options(rng: random.Random) -> dict[str, Any]:
    """Draw the options of a producer."""
    delivery_ms = rng.choice(DELIVERY_TIMEOUTS_MS)
    return {
        "linger_ms": rng.choice([0, 5, 20]),
        "compression": rng.choice(["none", "lz4", "zstd"]),
        "delivery_timeout_ms": delivery_ms,
        "request_timeout_ms": min(rng.choice([1_500, 5_000, 30_000]), delivery_ms - 100),
    }


def send_to(producer: Producer, key: int, value: int) -> SendFuture:
    """Send a value to the partition of a key."""
    place = PLACES[key]
    return producer.send(place.topic, b"%d" % value, partition=place.partition)


def outcomes(sent: list[tuple[int, int, SendFuture]]) -> list[Sent]:
    """Return the records with their offsets, as far as these are known now."""
    return [Sent(key, value, _offset(future)) for key, value, future in sent]


def _offset(future: SendFuture) -> int:
    if not future.done() or future.exception(0) is not None:
        return -1
    return future.result(0).offset


def final_read(
    bootstrap: str, recorder: Recorder, ends: Mapping[TopicPartition, int], timeout_s: float
) -> None:
    """Read every key from offset 0 to its end, as a consumer whose operations are `final`."""
    process, deadline = recorder.process(), monotonic_s() + timeout_s
    with Consumer(bootstrap, auto_offset_reset="none") as consumer:
        begin = recorder.begin(process, ASSIGN)
        consumer.assign(PLACES)
        for place in PLACES:
            consumer.seek(place, 0)
        begin.starts, begin.final = dict.fromkeys(KEYS.values(), 0), True
        begin.finish(OK, monotonic_s())
        while any(consumer.position(place, 30.0) < ends[place] for place in PLACES):
            operation = recorder.begin(process, POLL)
            operation.final = True
            try:
                batches = consumer.poll_batches(0.5)
            except errors.RetriableError as cause:
                recorder.error(cause)
                batches = []
            for place, rows in batches:
                values = [int(value) for value in rows.column("value").to_pylist()]
                offsets = rows.column("offset").to_pylist()
                operation.polls.append(Polled(KEYS[place], offsets, values))
            operation.finish(OK, monotonic_s())
            if monotonic_s() > deadline:
                recorder.promise(f"a consumer from offset 0 does not reach {dict(ends)}")
                return
