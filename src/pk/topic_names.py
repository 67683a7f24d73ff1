"""What a topic may be called: Kafka's rules."""

from __future__ import annotations

import re

from pk import limits

_NAME = re.compile(r"[a-zA-Z0-9._-]+")


def what_is_wrong(name: str) -> str:
    """Why no topic can have this name; "" if one can."""
    if not name:
        return "is empty"
    if name in (".", ".."):
        return "is a directory's name"
    if len(name) > limits.TOPIC_NAME_MAX:
        return f"has {len(name)} characters, more than {limits.TOPIC_NAME_MAX}"
    if not _NAME.fullmatch(name):
        return "has characters other than a-z A-Z 0-9 . _ -"
    return ""
