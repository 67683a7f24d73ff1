"""Whether a Delta table has a batch: the evidence that ends a prepared batch (rule X11).

The driver that returns and the resolver decide with the same function.

Invariants
  E1  Presence is evidence in the same table only, which its Delta table id names.
  E2  Absence is evidence only if the table keeps its txns for ever.
"""

from __future__ import annotations

from typing import Protocol

from pk import errors


class TableState(Protocol):
    """What a table says of one application (table_evidence.ApplicationState)."""

    @property
    def table_id(self) -> str: ...

    @property
    def version(self) -> int | None: ...

    @property
    def retention(self) -> str: ...


class NamedTable(Protocol):
    """A table that decides a batch, with the version that the batch has there."""

    @property
    def url(self) -> str: ...

    @property
    def table_id(self) -> str: ...

    @property
    def version(self) -> int: ...


def has_batch(table: NamedTable, found: TableState) -> bool:
    """Return whether the table has the batch.

    Raises `InvalidTxnState` if it cannot tell: an operator decides.
    """
    if found.table_id != table.table_id:
        raise errors.InvalidTxnState(
            f"{table.url} has Delta's table id {found.table_id} now, not {table.table_id}: the "
            "table was created again"
        )
    if found.version is not None and found.version >= table.version:
        return True
    if found.retention:
        raise errors.InvalidTxnState(
            f"{table.url} drops txns after {found.retention} "
            "(delta.setTransactionRetentionDuration), so the absence of one proves nothing"
        )
    return False
