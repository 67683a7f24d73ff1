"""The tier's real store and tables, and the threads of both."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pk.clock import Clock
from pk.log.files import RealStorage
from pk.log.storage import Storage
from pk.tiering.delta import DeltaTables
from pk.tiering.fsspec_store import open_store
from pk.tiering.store_calls import StoreCalls
from pk.tiering.store_settings import StoreSettings
from pk.tiering.table_evidence import DeltaEvidence
from pk.tiering.worker import Executors

UPLOAD_THREADS = 2


class RealTier:
    """The store, tables and threads of a tier process on this operating system.

    Raises `StoreRefused` for a URL of a kind that pk has not been tried on.
    """

    def __init__(self, server: Mapping[str, Any], clock: Clock) -> None:
        chosen = StoreSettings.of(server)
        self.calls = StoreCalls()
        self.store = open_store(chosen, clock, self.calls)
        self.tables = DeltaTables(chosen, self.store, clock, self.calls)
        self.evidence = DeltaEvidence(chosen)
        self._reads = ThreadPoolExecutor(int(server["cold_read_threads"]), "pk-cold-read")
        self._uploads = ThreadPoolExecutor(UPLOAD_THREADS, "pk-upload")
        self._whole = RealStorage("/")
        loop = asyncio.get_running_loop()
        self.executors = Executors(
            read=lambda work: loop.run_in_executor(self._reads, work),
            upload=lambda work: loop.run_in_executor(self._uploads, work),
        )

    def view(self, path: str) -> tuple[Storage, str]:
        """Returns the storage and path of a live partition's directory."""
        return self._whole, path.lstrip("/")

    async def close(self) -> None:
        """Releases threads and connections; running calls end by their own deadlines."""
        self._reads.shutdown(wait=False, cancel_futures=True)
        self._uploads.shutdown(wait=False, cancel_futures=True)
        await self.evidence.close()
        await self.tables.close()
        await self.store.close()
