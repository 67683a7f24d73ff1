"""How errors end a client's call: which are retried elsewhere, and what the final error says.

This module decides which errors another broker may avoid, what an error means for a batch, what an
error says once the client has stopped retrying, and which reply belongs to which request.
"""

from __future__ import annotations

import re

from google.protobuf.message import Message

from pk import errors
from pk.wire import frames
from pk.wire import pk_pb2 as wire

#: The broker could not answer; another broker may.
ELSEWHERE = (errors.BrokerUnavailable, errors.RequestTimedOut, errors.ControllerUnavailable)

OUT_OF_SIGHT = (
    "a leader was elected uncleanly meanwhile: it may have been stored before, so it is not sent "
    "again"
)
#: Errors that say the batch was not appended, and may be sent again.  If the details contain
#: "appended", the batch was: a parked request fails like this when leadership moves (rule L5).
NOT_STORED = (
    errors.NotLeaderOrFollower, errors.UnknownTopicOrPartition, errors.NotEnoughReplicas,
    errors.FencedLeaderEpoch, errors.UnknownLeaderEpoch, errors.ThrottledError,
    errors.StorageFull, errors.UnknownTopicId,
    errors.BrokerUnavailable, errors.ControllerUnavailable,  # shutting down; rule R6
    # the leader could not verify the transaction (rule X6)
    errors.ConcurrentTransactions, errors.CoordinatorLoading, errors.CoordinatorUnavailable,
    errors.NotCoordinator,
)  # fmt: skip
#: Errors that say the leader or the topic changed: the client refreshes its metadata.
STALE = (
    errors.NotLeaderOrFollower, errors.UnknownTopicOrPartition, errors.FencedLeaderEpoch,
    errors.UnknownLeaderEpoch, errors.UnknownTopicId, errors.BrokerUnavailable,
)  # fmt: skip

_WITHIN = re.compile(r" within (\d+) ms")

#: Requests whose reply has another name.
_REPLIES = {"AddVoterRequest": "ChangeVotersReply", "RemoveVoterRequest": "ChangeVotersReply"}


def given_up(error: errors.PkError, after_ms: int | None = None) -> errors.PkError:
    """Return `error` as it is raised after the client's last retry: it names the person who must
    act.

    `after_ms`: the time-out that ended the retries; an error about reaching a broker names it.
    """
    message = error.message
    if after_ms is not None and isinstance(error, ELSEWHERE):
        message = f"{_no_longer(message, after_ms)} (tried for {after_ms} ms)"
    if type(error) is errors.UnknownTopicOrPartition and "partitions" in error.details:
        setattr(error, "acts", "user")  # noqa: B010 - the topic exists
    elif type(error) is errors.UnknownTopicOrPartition:
        error = errors.UnknownTopicOrPartition(
            f"{message}; create it first (pk topics create …)", **error.details
        )
        setattr(error, "acts", "user")  # noqa: B010 - differs from the class's default
    elif type(error) is errors.BrokerUnavailable:
        error = errors.BrokerUnavailable(f"{message}; is a server running there?", **error.details)
        setattr(error, "acts", "operator")  # noqa: B010
    elif error.acts == "client":  # the client has retried for as long as it may
        if message != error.message:
            error = type(error)(message, **error.details)
        setattr(error, "acts", "operator")  # noqa: B010
    return error


def _no_longer(message: str, after_ms: int) -> str:
    """Remove from `message` a time-out longer than `after_ms`.  An attempt to reach a broker may
    have begun before the call that waits for it.
    """
    return _WITHIN.sub(lambda found: "" if int(found[1]) > after_ms else found[0], message)


def refusal(answer: wire.Error) -> errors.PkError:
    """Return the error that a broker reported for one item of a request.  The broker answers for
    the whole cluster and the client does not retry, so a person must act.
    """
    error = frames.raise_error(answer)
    if type(error) is errors.UnknownTopicOrPartition:
        setattr(error, "acts", "user")  # noqa: B010 - differs from the class's default
        return error
    return given_up(error)


def no_partition(topic: str, partition: int, count: int) -> errors.UnknownTopicOrPartition:
    """Return the error for a partition number beyond the last of a topic."""
    has = "one partition, 0" if count == 1 else f"{count} partitions, 0 to {count - 1}"
    return errors.UnknownTopicOrPartition(
        f"{topic} has no partition {partition}: it has {has}",
        partition=str(partition),
        partitions=str(count),
    )


def check_answers(address: str, request: Message, reply: Message) -> None:
    """Raise `BrokerUnavailable` if the type of `reply` does not belong to `request`.  The server at
    the address then does not speak this protocol, and another address may.
    """
    asked, came = request.DESCRIPTOR.name, reply.DESCRIPTOR.name
    if came != _REPLIES.get(asked, asked.removesuffix("Request") + "Reply"):
        raise errors.BrokerUnavailable(
            f"{address} answers {asked} with {came}: it does not speak this protocol"
        )


def perhaps_stored(error: errors.PkError) -> errors.PkError:
    """Return `error` with the note that an earlier attempt may have stored the batch."""
    return type(error)(f"{error.message}; it may have been stored", **error.details)


def refused_batch(error: errors.PkError, *, unknown: bool) -> errors.PkError:
    """Return the final error of a batch that a broker refused without retry.

    `unknown`: an earlier attempt may have stored the batch.  The refusal does not tell: settings
    may have changed since.  The refused attempt itself may have stored the batch if the broker had
    begun to write (rule L5).
    """
    if unknown:
        why = "an earlier attempt, whose answer was lost, may have stored it"
    elif "appended" in error.details:
        why = "it may have been stored"
    else:
        return error
    return errors.OutcomeUnknown(f"{error.message}; {why}", **error.details)
