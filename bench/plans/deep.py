"""Does a deep log cost anything?  pk is compared with itself: the same rounds on a topic of many
gigabytes and on a new one, in the same server.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from bench.plans import Base
from bench.runs import Sample
from bench.sides import Side
from bench.values import VALUE_BYTES

#: What a record of the deep log takes on disk beside its value, about.
_OVERHEAD_BYTES = 4
_FILL_RUN = 20_000_000  #: records a run of the filling client


class Deep(Base):
    """A round produces, then fetches the produced records.  `deep` continues at the end of the
    log.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._topic = ""

    def side(self, role: str) -> Side:
        return self.bench.pk

    def prepare(self) -> None:
        """Fill the deep topic with values that no codec or file system compresses; wait until the
        disk has written them.
        """
        side, bench = self.bench.pk, self.bench
        bench.wake(side)
        topic = bench.fresh("deep")
        side.create_topic(topic)
        self._topic = topic
        left = int(bench.size_gb * 1e9 / (VALUE_BYTES + _OVERHEAD_BYTES))
        while left > 0:
            run = min(left, _FILL_RUN)
            side.produce(topic, bench.values, run, "none", "random")
            left -= run
            size = sum(path.stat().st_size for path in side.segment_files(topic))
            bench.say(f"filling {topic}: {size / 1e9:.1f} of {bench.size_gb:g} GB")
        os.sync()
        # untimed: the first timed run would wait for a disk that is still writing
        for role in ("peer", "pk"):
            self.round(role, "")

    def round(self, role: str, mode: str) -> Sample:
        side, records = self.bench.pk, self.counts[role]
        topic = self._topic if role == "pk" else self.bench.fresh("shallow")
        if role == "peer":
            side.create_topic(topic)
        try:
            starts = side.ends(topic)
            produced = side.produce(topic, self.bench.values, records, "none", "lists")
            fetched = side.consume(topic, records, "batches", starts=starts)
        finally:
            if role == "peer":
                side.delete_topic(topic)
        os.sync()  # else the next round would write back the dirty pages of this one
        return replace(produced, parts={"produce": produced, "tail fetch": fetched})

    def close(self) -> None:
        if self._topic:
            self.bench.pk.delete_topic(self._topic)
