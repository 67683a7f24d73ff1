"""The transaction calls of `Producer`.

    >>> producer = Producer("localhost:9092", transactional_id="orders-1")
    >>> producer.init_transactions()
    >>> with producer.transaction():
    ...     producer.send("orders", b"1")
    ...     producer.send("payments", b"1")

Each error says what the caller does next: abort, repeat the call, or close the producer.
docs/transactions.md has the table, and the guarantees.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from pk import errors
from pk.client import arguments
from pk.client.connection import LoopThread
from pk.client.group_consumer import to_commit
from pk.client.group_types import ConsumerGroupMetadata, OffsetAndMetadata
from pk.client.transaction_engine import TransactionEngine
from pk.client.transaction_manager import TransactionCall
from pk.types import TopicPartition


class ProducerTransactions:
    """The transaction calls of `Producer`, which implements the attributes.

    All of them raise `InvalidTxnState` for a call that does not fit the state of the transaction:
    its sentence names the call that is missing.  Once `ProducerFenced` was raised, every call
    raises it: close the producer.
    """

    _options: dict[str, Any]
    _thread: LoopThread
    _transactions: TransactionEngine | None
    _closed: bool

    def init_transactions(self, timeout_s: float | None = None) -> None:
        """Get a producer id and epoch from the coordinator; call it once, before all others.

        Fences older producers with this transactional id: their next request fails.  A transaction
        that they left open is aborted first.  timeout_s: seconds; None = max_block_ms.
        Raises `RequestTimedOut` (call it again), `InvalidTransactionTimeout`.
        """
        self._transact(TransactionCall.INIT, timeout_s)

    def begin_transaction(self) -> None:
        """Begin a transaction.  Records that are sent from now on belong to it."""
        self._transact(TransactionCall.BEGIN, None)

    def commit_transaction(self, timeout_s: float | None = None) -> None:
        """Send and acknowledge every record of the transaction, then make all of them visible.

        When it returns, the decision is durable, and read_committed consumers see the records as
        soon as the coordinator has written the markers.  timeout_s: seconds; None = max_block_ms.

        Raises `TransactionAborted` if a record failed, or the coordinator has aborted the
        transaction (`TransactionTimedOut`): call `abort_transaction`, begin another transaction and
        send the records again.  Raises `RequestTimedOut` if there is no outcome yet: call it again.
        """
        self._transact(TransactionCall.COMMIT, timeout_s)

    def abort_transaction(self, timeout_s: float | None = None) -> None:
        """Abort the transaction: read_committed consumers never see its records.

        Records that were not sent yet fail with `TransactionAborted`.  timeout_s: seconds;
        None = max_block_ms.  Raises `RequestTimedOut` (call it again).
        """
        self._transact(TransactionCall.ABORT, timeout_s)

    def send_offsets_to_transaction(
        self,
        offsets: Mapping[TopicPartition, int | OffsetAndMetadata],
        group_metadata: ConsumerGroupMetadata,
        timeout_s: float | None = None,
    ) -> None:
        """Commit offsets of a consumer group with the transaction (KIP-447).

        offsets: partition → offset of the next record to process, or an `OffsetAndMetadata`
        group_metadata: of the consumer that read the records, `consumer.group_metadata()`, taken
            before the next poll.  Set `enable_auto_commit=False` on that consumer.
        timeout_s: seconds; None = max_block_ms

        They count when the transaction commits, and never if it is aborted.  Until then a consumer
        that gets the partitions waits for the outcome.

        Raises `TransactionAborted` if the group's coordinator refuses the offsets, or does not
        answer in time: call `abort_transaction`, and read the records again from the committed
        offsets.  `__cause__` says why: `UnknownMemberId`, `IllegalGeneration` or
        `RebalanceInProgress` if the group has gone on without the consumer, `NotPartitionOwner`,
        `FencedInstanceId`, `NonEmptyGroup`, `RequestTimedOut`.
        """
        wanted = to_commit(offsets)
        if not isinstance(group_metadata, ConsumerGroupMetadata):
            raise errors.InvalidOption(
                f"group_metadata is {group_metadata!r}: pass consumer.group_metadata()"
            )
        seconds = self._seconds(timeout_s)
        engine = self._engine_of("send_offsets_to_transaction")
        timeout_ms = max(1, int(seconds * 1000))
        self._thread.run(engine.send_offsets(wanted, group_metadata, timeout_ms), seconds)

    @contextlib.contextmanager
    def transaction(self, timeout_s: float | None = None) -> Iterator[None]:
        """Begin a transaction; commit it at the end of the block, abort it after an exception.

        The exception of the block, or of the commit, is raised after the abort.  A commit that
        timed out is not aborted: call `commit_transaction` again.
        timeout_s: of the commit or the abort, in seconds; None = max_block_ms.
        """
        self.begin_transaction()
        try:
            yield
            self.commit_transaction(timeout_s)
        except BaseException as cause:
            if self._transactions is not None and self._transactions.open:
                try:
                    self.abort_transaction(timeout_s)
                except errors.PkError as second:
                    cause.add_note(f"the transaction could not be aborted: {second.message}")
            raise

    def _transact(self, call: TransactionCall, timeout_s: float | None) -> None:
        """Make a call and wait for its outcome."""
        seconds = self._seconds(timeout_s)
        engine = self._engine_of(call.value)
        timeout_ms = max(1, int(seconds * 1000))
        self._thread.run(engine.call(call, timeout_ms), seconds)

    def _seconds(self, timeout_s: float | None) -> float:
        """Return the time-out of a call in seconds."""
        if timeout_s is None:
            return float(self._options["max_block_ms"]) / 1000
        return arguments.seconds(timeout_s)

    def _engine_of(self, name: str) -> TransactionEngine:
        """Return the engine of a call.  Raises `ClosedError`, `InvalidTxnState`."""
        if self._closed:
            raise errors.ClosedError("the producer was closed")
        if self._transactions is None:
            raise errors.InvalidTxnState(
                f"{name} needs the option transactional_id: Producer(…, transactional_id=…)"
            )
        return self._transactions

    def _check_send(self) -> None:
        """Raise the error of `send` outside a transaction."""
        if self._transactions is not None:
            error = self._transactions.manager.refusal(TransactionCall.SEND)
            if error is not None:
                raise error
