"""When an owner looks at its table although no request asks for it (rule T3).  Pure.

An owner learns of the versions of others when its own commit meets one, when a reader or a job
asks, and by looks.  A look costs two requests.  While looks find nothing, each comes after twice
the time of the one before, up to `most_ms`; a table at rest then costs less than half a request a
minute.

Invariants
  N1  The time between two looks is at least `least_ms`, and at most `most_ms`.
  N2  Whatever is asked or found brings the next look back to `least_ms`.
  N3  The looks of many tables that came to rest together are spread over a tenth of `most_ms`.
"""

from __future__ import annotations

from crc32c import crc32c

from pk.backoff import Backoff

#: The share of the time by which the looks of tables differ (N3).
SPREAD = 0.1


class LookPace:
    """The pace of one table's looks; `name` is the table's."""

    def __init__(self, name: str, least_ms: int, most_ms: int) -> None:
        most_ms -= int(most_ms * SPREAD * (crc32c(name.encode()) / 2**32))
        self._backoff = Backoff((least_ms, max(least_ms, most_ms)))
        self.wait_ms = 0  #: how long after a look the next one comes
        self.asked()

    def asked(self) -> None:
        """Notes that a request needs the newest version, or that a look has found one."""
        self._backoff.reset()
        self.found_nothing()

    def found_nothing(self) -> None:
        """Notes that a look has found the known version."""
        self.wait_ms = int(self._backoff.next_ms())
