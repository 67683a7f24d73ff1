"""Translates a store's error for a person: one sentence that names the cause and the remedy.

Object stores answer with XML.  Their libraries wrap it in Python's and Rust's error chains, with
terminal colours, whole requests and signatures.  None of that helps the operator who reads it.
"""

from __future__ import annotations

import re

WORDS_MAX = 200

#: Texts that an error may contain, in lower case → its meaning.  The first match counts: a store
#: says "forbidden" for a wrong clock, too.
_MEANINGS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("requesttimetooskewed", "difference between the request time"),
        "the clocks of this machine and of the store differ too much: synchronise them",
    ),
    (
        ("invalidaccesskeyid", "xadminusernotfound", "access key id you provided does not exist",
         "no user exists with the provided access key"),
        "the store does not know the access key: check tier_access_key_id",
    ),
    (
        ("signaturedoesnotmatch", "signature we calculated does not match"),
        "the secret key does not belong to the access key: check tier_secret_access_key",
    ),
    (
        ("nosuchbucket", "specified bucket does not exist"),
        "the bucket does not exist: create it",
    ),
    (
        ("read-only file system",),
        "the file system is read-only: give pk write access",
    ),
    (
        ("permission denied", "access denied", "accessdenied", "access_denied", "forbidden"),
        "access is denied: give pk's credentials read and write access",
    ),
    (
        ("slowdown", "slow_down", "reduce your request rate", "service unavailable",
         "service_unavailable"),
        "the store asks for fewer requests",
    ),
    (
        ("could not connect to the endpoint", "connection refused", "tcp connect error",
         "could not connect to server", "could not resolve host", "dns error",
         "failed to lookup address", "error sending request"),
        "no connection to the store's endpoint: is it running, and is tier_endpoint_url right?",
    ),
)  # fmt: skip
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>", re.IGNORECASE)
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_TAG = re.compile(r"<[^>]*>")
_ENTITY = re.compile(r"&(#x?[0-9A-Fa-f]+|[a-z]+);")
_REQUEST = re.compile(r"\s*Error performing [A-Z]+ \S+ in \S+?(, after [^-]*)? -\s*")


def error_text(text: str) -> str:
    """Returns the sentence for a store's error, without a full stop."""
    low = text.lower()
    for signs, meaning in _MEANINGS:
        if any(sign in low for sign in signs):
            return meaning
    message = _MESSAGE.search(text)
    plain = message[1] if message else text
    for pattern in (_ESCAPE, _REQUEST, _TAG, _ENTITY):
        plain = pattern.sub(" ", plain)
    plain = " ".join(plain.replace("↳", " ").split()).rstrip(".")
    if len(plain) > WORDS_MAX:
        plain = plain[:WORDS_MAX].rsplit(" ", 1)[0] + " …"
    return plain
