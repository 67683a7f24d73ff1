"""The rules for topic names, as in Kafka."""

from __future__ import annotations

import re

from pk import limits

_NAME = re.compile(r"[a-zA-Z0-9._-]+")


def is_internal(name: str) -> bool:
    """Whether the topic is pk's own.  Clients can read such a topic and cannot change it."""
    return name.startswith("__")


def what_is_wrong(name: str) -> str:
    """Return why a topic name is invalid; "" if it is valid."""
    if not name:
        return "is empty"
    if name in (".", ".."):
        return "is a directory's name"
    if len(name) > limits.TOPIC_NAME_MAX:
        return f"has {len(name)} characters, more than {limits.TOPIC_NAME_MAX}"
    if not _NAME.fullmatch(name):
        return "has characters other than a-z A-Z 0-9 . _ -"
    return ""
