"""The producer of one attempt of a task (client/participant.py has the theory)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pk.client import arguments
from pk.client.participant import BatchOfRun, ParticipantEngine
from pk.client.producer import Producer
from pk.client.transaction_manager import TransactionCall
from pk.wire import pk_pb2 as wire


class TaskProducer(Producer):
    """A producer whose records become visible when the driver commits the batch.

    batch: what the records belong to.  options: as for `Producer`; the transactional id is the job.

        >>> producer = TaskProducer("localhost:9092", BatchOfRun("job", "query", "run", 7))
        >>> if not producer.join(["events"]).committed:
        ...     producer.send_batch("events", rows)
        ...     participant = producer.finish()

    The calls that begin and end transactions raise `InvalidTxnState`.
    """

    def __init__(self, bootstrap: str | Iterable[str], batch: BatchOfRun, **options: Any) -> None:
        self._batch = batch
        super().__init__(bootstrap, transactional_id=batch.job, **options)

    def _open_transactions(self) -> None:
        self._participant = ParticipantEngine(
            self._thread.world, self._cluster, self._engine, self._options, self._batch
        )

    def join(
        self, topics: Sequence[str], timeout_s: float | None = None
    ) -> wire.JoinTransactionReply:
        """Join the batch, before the first record.

        topics: those that the task will write to; another one costs a request for each of its
        partitions.  timeout_s: seconds; None = max_block_ms.  Returns the reply of the coordinator:
        `committed` says that the batch is committed already, with `sums`.

        Raises `ReplayDiffers`, `ProducerFenced`, `TransactionTimedOut`, `TransactionAborted`,
        `InvalidTxnState`, `UnknownTopicOrPartition`, `RequestTimedOut`.
        """
        seconds = self._seconds(timeout_s)
        return self._thread.run(self._participant.join(topics, int(seconds * 1000)), seconds)

    def topic_id(self, topic: str) -> str:
        """Return the id of a topic that the producer has asked for (`partitions_for`, `join`)."""
        return self._cluster.metadata.topic(topic).topic_id

    def finish(self, timeout_s: float | None = None) -> tuple[int, int]:
        """Wait until every record is acknowledged; return the (producer id, epoch) for the commit.

        timeout_s: seconds; None = delivery_timeout_ms and max_block_ms.  Raises
        `TransactionAborted` if a record failed, `InvalidTxnState` without a join,
        `RequestTimedOut`.
        """
        if timeout_s is None:
            timeout_s = self._options["delivery_timeout_ms"] / 1000 + self._seconds(None)
        else:
            timeout_s = arguments.seconds(timeout_s)
        self._thread.run(self._participant.finish(max(1, int(timeout_s * 1000))), timeout_s)
        return self.identity

    def _seconds(self, timeout_s: float | None) -> float:
        if timeout_s is None:
            return max(1, int(self._options["max_block_ms"])) / 1000
        return arguments.seconds(timeout_s)

    def _transact(self, call: TransactionCall, timeout_s: float | None) -> None:
        refused = self._participant.refusal(call)
        assert refused is not None
        raise refused

    def _check_send(self) -> None:
        refused = self._participant.refusal(TransactionCall.SEND)
        if refused is not None:
            raise refused

    async def _end_engines(self) -> None:
        await self._participant.close()
        await super()._end_engines()
