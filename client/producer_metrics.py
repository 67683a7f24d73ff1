"""The metrics of a producer: totals of batches whose outcome is known, and what waits.

They are counted per batch, never per record.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class ProducedCounts:
    """Totals since the producer was opened; a batch counts once its outcome is known."""

    batches: int = 0  #: stored
    records: int = 0  #: stored
    failed: int = 0  #: records that ended with an error

    def settled(self, records: int, failed: bool) -> None:
        """Count a batch."""
        if failed:
            self.failed += records
            return
        self.batches += 1
        self.records += records


class ProducerMetrics:
    """The part of a producer that concerns its metrics."""

    _engine: Any

    def metrics(self) -> dict[str, int]:
        """Return the metrics as numbers.  Safe in any thread.

        records_acknowledged_total, batches_acknowledged_total, records_failed_total;
        buffer_used_bytes of buffer_memory; requests_in_flight.
        """
        engine = self._engine
        return {
            "records_acknowledged_total": engine.counts.records,
            "batches_acknowledged_total": engine.counts.batches,
            "records_failed_total": engine.counts.failed,
            "buffer_used_bytes": engine.pool.used,
            "requests_in_flight": engine.sender.requests_in_flight,
        }
