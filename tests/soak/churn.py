"""An administrator that keeps working: topics are created and deleted, so that the metadata log is
written.

A majority of controllers syncs every change, on disks that the load keeps busy.  Registrations of
brokers wait as long as such a sync takes, and heartbeats queue behind it.
"""

from __future__ import annotations

import threading
from typing import Any

from pk import AdminClient, errors
from pk.clock import monotonic_s

TIMEOUT_S = 60.0


class Churn:
    """Creates a topic every `every_s` and deletes the one before, in its own thread."""

    def __init__(self, address: str, every_s: float, partitions: int) -> None:
        self._address, self._every_s, self._partitions = address, every_s, partitions
        #: operation, seconds since the start, duration
        self.took_ms: list[tuple[str, int, int]] = []
        self.errors: dict[str, int] = {}
        self._begin_s = monotonic_s()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        with AdminClient(self._address) as admin:
            while not self._stop.wait(self._every_s):
                self._try("create", admin.create_topic, f"churn-{number}", self._partitions)
                if number:
                    self._try("delete", admin.delete_topic, f"churn-{number - 1}")
                number += 1

    def _try(self, what: str, call: Any, *arguments: Any) -> None:
        begin = monotonic_s()
        try:
            call(*arguments, timeout_s=TIMEOUT_S)
        except errors.PkError as trouble:
            name = f"{what} {type(trouble).__name__}"
            self.errors[name] = self.errors.get(name, 0) + 1
        now = monotonic_s()
        self.took_ms.append((what, round(now - self._begin_s), round(1000 * (now - begin))))

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def found(self) -> dict[str, Any]:
        times = sorted(took for _, _, took in self.took_ms)
        return {
            "changes": len(times),
            "median_ms": times[len(times) // 2] if times else 0,
            "longest_ms": times[-1] if times else 0,
            "errors": self.errors,
            "took_ms": self.took_ms,
        }
