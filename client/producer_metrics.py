"""The metrics of a producer: totals of batches whose outcome is known.

They are counted per batch, never per record.
"""

from __future__ import annotations

from dataclasses import dataclass


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

    def metrics(self, buffer_used: int, requests_in_flight: int) -> dict[str, int]:
        """Return the numbers of `Producer.metrics`."""
        return {
            "records_acknowledged_total": self.records,
            "batches_acknowledged_total": self.batches,
            "records_failed_total": self.failed,
            "buffer_used_bytes": buffer_used,
            "requests_in_flight": requests_in_flight,
        }
