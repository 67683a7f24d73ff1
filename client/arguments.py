"""Checks of the arguments of the public classes, before anything is sent.

Each function returns the value in the form that the client uses, or raises an error that names the
argument and the accepted values: `TypeError` for another type, `InvalidOption` for a value outside
its bounds, `InvalidTopic` and `InvalidPartitions` for an impossible topic name or partition number.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from reprlib import Repr
from typing import Any, TypeVar

from pk import errors
from pk.log.batch import TIMESTAMP_MS_MAX
from pk.topic_names import what_is_wrong
from pk.types import TopicPartition

T = TypeVar("T")

INT32_MAX = 2**31 - 1
#: A time-out travels as a 32-bit number of milliseconds.
TIMEOUT_S_MAX = INT32_MAX // 1000

_shown = Repr()
_shown.maxstring = _shown.maxother = 100


def shown(value: Any) -> str:
    """Return `value` as an error message quotes it, shortened if it is long."""
    try:
        return _shown.repr(value)
    except ValueError:  # an integer of thousands of digits cannot be shown
        return f"a huge {type(value).__name__}"


def seconds(value: Any, name: str = "timeout_s") -> float:
    """Check a time-out in seconds."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number of seconds, not {shown(value)}")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not 0 <= found <= TIMEOUT_S_MAX:  # NaN is neither
        raise errors.InvalidOption(
            f"{name} must be from 0 to {TIMEOUT_S_MAX} seconds, not {shown(value)}", option=name
        )
    return found


def whole(
    value: Any, name: str, least: int | None = -INT32_MAX - 1, most: int | None = INT32_MAX
) -> int:
    """Check an integer in `[least, most]`.  A numpy integer is accepted, 1.5 is not."""
    try:
        found = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {shown(value)}") from None
    if (least is not None and found < least) or (most is not None and found > most):
        raise errors.InvalidOption(
            f"{name} must be from {least} to {most}, not {shown(found)}", option=name
        )
    return found


def timestamp(value: Any, topic: str) -> int:
    """Check a create time in ms since the epoch, of a record for `topic`."""
    found = whole(value, "timestamp_ms", None, None)
    if not 0 <= found <= TIMESTAMP_MS_MAX:
        raise errors.SerializationError(
            f"{topic}: timestamp_ms {shown(found)} is out of range: it is from 0 to "
            f"{TIMESTAMP_MS_MAX}"
        )
    return found


def function(value: Any, name: str) -> Callable[..., Any]:
    """Check a callable."""
    if not callable(value):
        raise TypeError(f"{name} must be a function, not {shown(value)}")
    found: Callable[..., Any] = value
    return found


def flag(value: Any, name: str) -> bool:
    """Check a bool."""
    if not isinstance(value, int):
        raise TypeError(f"{name} must be True or False, not {shown(value)}")
    return bool(value)


def text(value: Any, name: str, *, secret: bool = False) -> str:
    """Check text that can be encoded in UTF-8; an error about a `secret` does not quote it."""
    quoted = "***" if secret else shown(value)
    if not isinstance(value, str):
        raise TypeError(f"{name} must be text, not {quoted}")
    if not _utf8(value):
        raise errors.InvalidOption(f"{name} is no valid Unicode text: {quoted}", option=name)
    return value


def _utf8(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True


def choice(value: Any, name: str, choices: Mapping[str, T]) -> T:
    """Return the value that the word `value` stands for."""
    if not isinstance(value, str) or value not in choices:
        raise errors.InvalidOption(
            f"{name} {shown(value)} is none of {', '.join(choices)}", option=name
        )
    return choices[value]


def topic(value: Any, name: str = "topic") -> str:
    """Check a topic name; the topic need not exist."""
    if not isinstance(value, str):
        raise errors.InvalidTopic(f"{name} must be a topic's name, not {shown(value)}")
    if wrong := what_is_wrong(value):
        raise errors.InvalidTopic(f"{name}: topic name {shown(value)} {wrong}")
    return value


def pattern(value: Any, name: str) -> re.Pattern[str]:
    """Compile or check a regular expression over text."""
    given = value.pattern if isinstance(value, re.Pattern) else value
    if not isinstance(given, str):
        raise TypeError(f"{name} must be a regular expression of text, not {shown(value)}")
    try:
        return re.compile(value)
    except (re.error, RecursionError, OverflowError) as cause:
        raise errors.InvalidOption(f"{name} {shown(value)}: {cause}", option=name) from cause


def items(given: Iterable[T], name: str, what: str = "") -> list[T]:
    """Check a list and return its items.  A bare string is not accepted as a list of strings."""
    bare = isinstance(given, str | bytes | bytearray | TopicPartition | Mapping)
    if bare or not isinstance(given, Iterable):
        of = f" of {what}" if what else ""
        raise TypeError(f"{name} must be a list{of}, not {shown(given)}")
    return list(given)


def topics(given: Iterable[str], name: str) -> list[str]:
    """Check a list of topic names."""
    return [topic(each, name) for each in items(given, name, "topic names")]


def number(value: Any, name: str = "partition") -> int:
    """Check a partition number; the partition need not exist."""
    found = whole(value, name, None, None)
    if not 0 <= found <= INT32_MAX:
        raise errors.InvalidPartitions(
            f"{name}: {shown(found)} is no partition's number: they are 0 to {INT32_MAX}"
        )
    return found


def place(value: Any, name: str = "partition") -> TopicPartition:
    """Check a partition; a pair is accepted like a `TopicPartition`."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        its_topic, its_number = value
        its_number = operator.index(its_number)
    except (TypeError, ValueError):
        raise TypeError(
            f"{name} must be a TopicPartition(topic, number), not {shown(value)}"
        ) from None
    return TopicPartition(topic(its_topic, name), number(its_number, name))


def places(given: Iterable[Any], name: str = "partitions") -> list[TopicPartition]:
    """Check a list of partitions."""
    return [place(each, name) for each in items(given, name, "TopicPartition")]


def by_place(given: Mapping[Any, T], name: str, what: str) -> dict[TopicPartition, T]:
    """Check a dict of `what` by partition."""
    if not isinstance(given, Mapping):
        raise TypeError(f"{name} must be a dict of TopicPartition to {what}, not {shown(given)}")
    return {place(each, name): value for each, value in given.items()}


def topic_ids(given: Any, name: str) -> dict[str, str]:
    """Check a dict of topic to topic id."""
    if not isinstance(given, Mapping):
        raise TypeError(f"{name} must be a dict of topic to id, not {shown(given)}")
    return {topic(key, name): text(value, f"{name}[{key!r}]") for key, value in given.items()}


def settings(given: Any, name: str) -> dict[str, str]:
    """Check a dict of settings and return values as text; the server validates them."""
    if not isinstance(given, Mapping):
        raise TypeError(f"{name} must be a dict of settings, not {shown(given)}")
    found = {}
    for key, value in given.items():
        worded = str(value).lower() if isinstance(value, bool) else str(value)
        found[text(key, f"a name in {name}")] = text(worded, f"{name}[{key!r}]")
    return found
