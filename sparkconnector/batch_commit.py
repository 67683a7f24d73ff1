"""The driver's end of a write: it checks what the tasks report, and commits or aborts their batch.

Invariants
  E1  One request commits a batch: it names the participants of the tasks whose messages Spark
      passes to `commit`, and no other attempt becomes visible.
  E2  `abort` never undoes a commit: Spark may call it after a commit that succeeded.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql.datasource import WriterCommitMessage

from pk import errors
from pk.client.batch_committer import BatchCommitter
from pk.client.participant import BatchOfRun
from pk.sparkconnector.planner import warn
from pk.sparkconnector.sink_options import SinkOptions
from pk.sparkconnector.task_writer import PkCommit
from pk.types import RowSums, TopicId

#: An abort that gets no answer is left to the lease of the tasks.
ABORT_TIMEOUT_S = 10.0


def check_messages(messages: Sequence[WriterCommitMessage | None]) -> int:
    """Check the tasks' commit messages and return the number of rows that they stored.

    Raises `InternalError` if the messages contradict sparkconnector/task_writer B1 or
    sparkconnector/task_writer B2: that would be a bug of pk.
    """
    rows = 0
    seen: set[tuple[int, int]] = set()
    for message in messages:
        if not isinstance(message, PkCommit):
            raise errors.InternalError(f"a task reported {message!r} instead of what it stored")
        room = sum(
            last - first + 1 for spans in message.spans.values() for first, last in spans.values()
        )
        pair = message.producer_id, message.epoch
        if message.rows and (message.producer_id < 0 or pair in seen):
            raise errors.InternalError(f"two tasks wrote with producer id {message.producer_id}")
        if message.rows > room:
            raise errors.InternalError(f"a task reported {message.rows} rows in {room} offsets")
        if message.rows:
            seen.add(pair)
        rows += message.rows
    return rows


def commit(sink: SinkOptions, messages: Sequence[WriterCommitMessage | None]) -> bool:
    """Commit the batch of the messages; return whether it was committed before.

    Without a transaction, nothing is left to do.  Raises `ReplayDiffers` if the batch was committed
    with other rows, and what `BatchCommitter.commit` raises.
    """
    check_messages(messages)
    found = [each for each in messages if isinstance(each, PkCommit)]
    batches = {each.batch for each in found}
    if batches == {None}:
        return False
    batch = next(iter(batches)) if len(batches) == 1 else None
    if batch is None:
        raise errors.InternalError(f"the tasks of one batch name {batches or 'none'}")
    sums: dict[TopicId, RowSums] = {}
    for each in found:
        for topic_id, part in each.sums.items():
            sums[topic_id] = sums.get(topic_id, RowSums()).plus(part)
    pairs = [(each.producer_id, each.epoch) for each in found if each.joined]
    with BatchCommitter(sink.bootstrap, batch, **sink.client) as driver:
        already = driver.commit(pairs, sums, accept_mismatch=sink.accept_mismatch)
    return already and not pairs  # with participants, the answer to this write's commit was lost


def abort(
    sink: SinkOptions,
    messages: Sequence[WriterCommitMessage | None],
    batch: BatchOfRun | None = None,
) -> None:
    """Abort the batch of the messages, and warn about what stays (E2).

    batch: that of the write, if the driver knows it without a message.
    """
    found = [each for each in messages if isinstance(each, PkCommit)]
    if not sink.exactly_once:
        stored = sum(each.rows for each in found)
        if stored:
            warn(f"the write failed; {stored} rows of its finished tasks stay (at least once)")
        return
    batch = batch or next((each.batch for each in found if each.batch is not None), None)
    if batch is None:
        return  # no task has finished: the lease of those that joined ends the batch
    try:
        with BatchCommitter(sink.bootstrap, batch, **sink.client) as driver:
            committed = driver.abort(ABORT_TIMEOUT_S)
    except errors.PkError as cause:
        warn(f"batch {batch.batch} of {batch.job!r} is left to its lease: {cause.message}")
        return
    if committed:
        warn(f"batch {batch.batch} of {batch.job!r} is committed, although the write failed later")
