"""Counts of a tier process's requests to its store, by operation."""

from __future__ import annotations

PUT, GET, HEAD, LIST, DELETE = "put", "get", "head", "list", "delete"
#: A call of deltalake, which makes several requests: it opens a table, or creates one.
DELTALAKE = "deltalake"


class StoreCalls:
    """The requests since the start of the process; each attempt counts.

    An upload in parts counts once, and so does a list of many pages.
    """

    def __init__(self) -> None:
        self.made = dict.fromkeys((PUT, GET, HEAD, LIST, DELETE, DELTALAKE), 0)

    def count(self, operation: str) -> None:
        """Counts one request."""
        self.made[operation] += 1
