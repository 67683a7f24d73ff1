"""How a client's call ends that does not succeed.

Which errors another broker may spare the caller, what an error says of a batch, what an error says
once the client has stopped retrying, and which reply answers which request.
"""

from __future__ import annotations

import re

from google.protobuf.message import Message

from pk import errors
from pk.wire import frames
from pk.wire import pk_pb2 as wire

#: The broker could not answer, another one may.
ELSEWHERE = (errors.BrokerUnavailable, errors.RequestTimedOut, errors.ControllerUnavailable)

OUT_OF_SIGHT = (
    "a leader was elected uncleanly meanwhile: it may have been stored before, so it is not sent "
    "again"
)
#: The answer says that the batch was not appended, and that it may be tried again; unless its
#: details say that it was, as parked replies do when leadership goes (rule L5).
NOT_STORED = (
    errors.NotLeaderOrFollower, errors.UnknownTopicOrPartition, errors.NotEnoughReplicas,
    errors.FencedLeaderEpoch, errors.UnknownLeaderEpoch, errors.ThrottledError,
    errors.StorageFull, errors.UnknownTopicId,
    errors.BrokerUnavailable, errors.ControllerUnavailable,  # shutting down; rule R6
)  # fmt: skip
#: The answer says that leadership moved or the topic did: ask for metadata.
STALE = (
    errors.NotLeaderOrFollower, errors.UnknownTopicOrPartition, errors.FencedLeaderEpoch,
    errors.UnknownLeaderEpoch, errors.UnknownTopicId, errors.BrokerUnavailable,
)  # fmt: skip

_WITHIN = re.compile(r" within (\d+) ms")

#: Requests whose reply is not named after them.
_REPLIES = {"AddVoterRequest": "ChangeVotersReply", "RemoveVoterRequest": "ChangeVotersReply"}


def given_up(error: errors.PkError, after_ms: int | None = None) -> errors.PkError:
    """`error` after the client's own retries: now a person must act, and the error says who.

    `after_ms`: the time-out that ended the retries; an error about reaching a broker names it.
    """
    message = error.message
    if after_ms is not None and isinstance(error, ELSEWHERE):
        message = f"{_no_longer(message, after_ms)} (tried for {after_ms} ms)"
    if type(error) is errors.UnknownTopicOrPartition and "partitions" in error.details:
        setattr(error, "acts", "user")  # noqa: B010 - the topic is there
    elif type(error) is errors.UnknownTopicOrPartition:
        error = errors.UnknownTopicOrPartition(
            f"{message}; create it first (pk topics create …)", **error.details
        )
        setattr(error, "acts", "user")  # noqa: B010 - the class says what holds otherwise
    elif type(error) is errors.BrokerUnavailable:
        error = errors.BrokerUnavailable(f"{message}; is a server running there?", **error.details)
        setattr(error, "acts", "operator")  # noqa: B010
    elif error.acts == "client":  # it tried for as long as it may
        if message != error.message:
            error = type(error)(message, **error.details)
        setattr(error, "acts", "operator")  # noqa: B010
    return error


def _no_longer(message: str, after_ms: int) -> str:
    """`message` without a time-out longer than `after_ms`: an attempt to reach a broker may have
    begun before the call that waits for it.
    """
    return _WITHIN.sub(lambda found: "" if int(found[1]) > after_ms else found[0], message)


def refusal(answer: wire.Error) -> errors.PkError:
    """What a broker answered about one item of a request: it speaks for the cluster, and the
    client does not ask again, so a person must act.
    """
    error = frames.raise_error(answer)
    if type(error) is errors.UnknownTopicOrPartition:
        setattr(error, "acts", "user")  # noqa: B010 - the class says what holds otherwise
        return error
    return given_up(error)


def no_partition(topic: str, partition: int, count: int) -> errors.UnknownTopicOrPartition:
    """What there is to say of a partition beyond the last of a topic."""
    has = "one partition, 0" if count == 1 else f"{count} partitions, 0 to {count - 1}"
    return errors.UnknownTopicOrPartition(
        f"{topic} has no partition {partition}: it has {has}",
        partition=str(partition),
        partitions=str(count),
    )


def check_answers(address: str, request: Message, reply: Message) -> None:
    """Raises `BrokerUnavailable` if `reply` is of another kind than what `request` asks for: then
    what answers there is no broker of this protocol, and another address may be one.
    """
    asked, came = request.DESCRIPTOR.name, reply.DESCRIPTOR.name
    if came != _REPLIES.get(asked, asked.removesuffix("Request") + "Reply"):
        raise errors.BrokerUnavailable(
            f"{address} answers {asked} with {came}: it does not speak this protocol"
        )


def perhaps_stored(error: errors.PkError) -> errors.PkError:
    """`error` as the end of a batch that an earlier attempt may have stored."""
    return type(error)(f"{error.message}; it may have been stored", **error.details)


def refused_batch(error: errors.PkError, *, unknown: bool) -> errors.PkError:
    """What it means for a batch that a broker refuses it for good.

    `unknown`: an earlier attempt may have stored the batch; the refusal says nothing of that one
    (settings change), nor of this one if the broker had begun to write (rule L5).
    """
    if unknown:
        why = "an earlier attempt, whose answer was lost, may have stored it"
    elif "appended" in error.details:
        why = "it may have been stored"
    else:
        return error
    return errors.OutcomeUnknown(f"{error.message}; {why}", **error.details)
