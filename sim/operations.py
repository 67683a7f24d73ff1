"""The operator of a simulated cluster: does what only a person may decide, when nothing else helps.

A partition whose last promised copies are gone, a rotten one among them, waits for somebody who
says that the rest may be lost (rules R3, L9): an unclean election.  Nothing else is done here that
the promise (promise.py) does not allow.
"""

from __future__ import annotations

import random
from typing import Any

from pk import errors
from pk.sim.promise import PartitionFacts
from pk.sim.samples import Observer
from pk.sim.workload import ADMIN_TIMEOUT_MS, cluster_of
from pk.types import NONE
from pk.wire import pk_pb2 as wire
from pk.world import World

#: Between two looks, in ms.
LOOK_MS = (300.0, 900.0)


class Operator:
    """See the module.  `counts`: what was done."""

    def __init__(
        self,
        world: World,
        bootstrap: str,
        observer: Observer,
        rng: random.Random,
        counts: dict[str, int],
    ) -> None:
        self._world = world
        self._cluster = cluster_of(world, bootstrap, "operator")
        self._observer = observer
        self._rng = rng
        self._counts = counts
        self._begun = False

    def _count(self, name: str) -> None:
        self._counts[name] = self._counts.get(name, 0) + 1

    async def run(self) -> None:
        while True:
            await self._world.clock.sleep_ms(self._rng.uniform(*LOOK_MS))
            stranded = self._stranded()
            try:
                if stranded:
                    await self._elect(stranded)
            except errors.PkError:
                continue  # nobody answers: looked at again

    async def _ask(self, request: Any) -> Any:
        if not self._begun:  # a run in which nobody is needed has no streams of an operator
            self._begun = True
            self._cluster.start()
        return await self._cluster.call_any(request, timeout_ms=ADMIN_TIMEOUT_MS)

    def _stranded(self) -> list[PartitionFacts]:
        allowed = self._observer.promise.stranded
        if not allowed:
            return []
        facts = list(self._observer.facts())
        return [each for each in facts if each.key in allowed and each.leader == NONE]

    async def _elect(self, stranded: list[PartitionFacts]) -> None:
        request = wire.ElectLeadersRequest(unclean=True)
        for facts in stranded:
            request.partitions.add(topic_id=facts.key.topic_id, partition=facts.key.partition)
        reply = await self._ask(request)
        for result in reply.results:
            if not result.HasField("error"):
                self._count("elections asked for")
