"""Reads, through deltalake, what the Delta table of a prepared batch says (rule X11)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
from typing import NamedTuple

from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from pk import errors
from pk.tiering.delta_actions import is_panic, protocol_of, translated
from pk.tiering.store_settings import StoreSettings
from pk.tiering.table import TableProtocol

#: The property after whose time Delta forgets a txn.
RETENTION_PROPERTY = "delta.setTransactionRetentionDuration"
#: Deadline of one read, as a multiple of the store's: a read makes several requests.
DEADLINE_FACTOR = 3


class ApplicationState(NamedTuple):
    """What a table says of one application.

    version: the newest txn version of the application; None = it has none.  retention: the
    value of RETENTION_PROPERTY; "" = txns are kept for ever.
    """

    table_id: str
    version: int | None
    retention: str


class DeltaEvidence:
    """Reads tables with the credentials of the tier's store."""

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "pk-evidence")

    async def read(self, url: str, app: str) -> ApplicationState:
        """Return the newest state of the table at a normal URL (table_urls).

        Raises `TierUnavailable` if the table cannot be read now or is not there, `StoreRefused`
        without permission, and `TierTableChanged` for a protocol that pk does not accept (T8).
        """
        limit_s = self._settings.timeout_ms * DEADLINE_FACTOR / 1000
        options = dataclasses.replace(self._settings, url=url).for_deltalake()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(limit_s):
                return await loop.run_in_executor(self._pool, state_of, url, app, options)
        except TimeoutError:
            # the thread may wait for ever: the next read gets another one
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = concurrent.futures.ThreadPoolExecutor(1, "pk-evidence")
            raise errors.TierUnavailable(f"{url}: no answer within {limit_s:g} s") from None

    async def close(self) -> None:
        """Give up what runs."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def state_of(url: str, app: str, options: dict[str, str] | None = None) -> ApplicationState:
    """Read a table's newest version, as `DeltaEvidence.read`."""
    try:
        table = DeltaTable(url, storage_options=options or None)
        protocol, metadata = protocol_of(table), table.metadata()
        version = table.transaction_version(app)
    except TableNotFoundError as cause:
        raise errors.TierUnavailable(f"{url}: there is no Delta table") from cause
    except BaseException as cause:
        if not isinstance(cause, Exception) and not is_panic(cause):
            raise
        raise translated(url, "reading the table", cause) from cause
    if protocol != TableProtocol():
        raise errors.TierTableChanged(
            f"{url}: the table has reader version {protocol.reader}, writer version "
            f"{protocol.writer} and the features {', '.join(protocol.features) or 'none'}; only "
            "reader version 1 and writer version 2 without features are accepted (rule T8)"
        )
    retention = metadata.configuration.get(RETENTION_PROPERTY) or ""
    return ApplicationState(str(metadata.id), version, retention)
