"""Elections that an operator asks for (KIP-460), in decisions of bounded size.

World-generic.  Part of the active controller (controller/active.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from pk import errors
from pk.clock import Clock
from pk.server.controller import commands, leaders
from pk.server.controller.reports import Reports
from pk.server.metadata.image import MetadataImage
from pk.types import PartitionKey
from pk.wire import pk_pb2 as wire

#: Wait before the next try of an election for which replicas have not reported their log ends.
AGAIN_MS = 100

Ask = Callable[[commands.ElectLeaders], Awaitable[wire.ElectLeadersReply]]


class RequestedElections:
    """Carries out the requests of one term.

    ask: has a command decided and committed.  image, reports: the current ones.
    wait_ms: how long an unclean election waits for the reports of the replicas.
    """

    def __init__(
        self,
        clock: Clock,
        ask: Ask,
        image: Callable[[], MetadataImage],
        reports: Callable[[], Reports],
        wait_ms: int,
    ) -> None:
        self._clock = clock
        self._ask = ask
        self._image = image
        self._reports = reports
        self._wait_ms = wait_ms
        self.unclean: dict[PartitionKey, None] = {}  #: an operator asks for an unclean election

    async def elect(self, request: wire.ElectLeadersRequest) -> wire.ElectLeadersReply:
        """Elect leaders as an operator asks.

        An unclean election waits until the replicas have reported their log ends.
        """
        keys = [PartitionKey(each.topic_id, each.partition) for each in request.partitions]
        if not request.partitions:
            image = self._image()
            keys = list(image.leaderless if request.unclean else leaders.imbalanced(image))
        keys = list(dict.fromkeys(keys))
        reply = wire.ElectLeadersReply()
        if request.unclean:
            self.unclean.update(dict.fromkeys(keys))
        try:
            for start in range(0, len(keys), leaders.MOVES_MAX):
                chunk = keys[start : start + leaders.MOVES_MAX]
                part = await self._elect_some(chunk, unclean=request.unclean)
                reply.results.extend(part.results)
                reply.metadata_offset = part.metadata_offset
        finally:
            for key in keys:
                self.unclean.pop(key, None)
        return reply

    async def _elect_some(
        self, keys: Sequence[PartitionKey], *, unclean: bool
    ) -> wire.ElectLeadersReply:
        until_ms = self._clock.monotonic_ms() + self._wait_ms
        done: dict[PartitionKey, wire.ReassignmentResult] = {}
        left = list(keys)
        while True:
            request = wire.ElectLeadersRequest(unclean=unclean)
            for key in left:
                request.partitions.add(topic_id=key.topic_id, partition=key.partition)
            reply = await self._ask(commands.ElectLeaders(request, self._reports()))
            done.update(zip(left, reply.results, strict=True))
            late = self._clock.monotonic_ms() >= until_ms
            pending = errors.EligibleLeadersNotAvailable.code
            left = [key for key in left if done[key].error.code == pending]
            if not left or late:
                break
            await self._clock.sleep_ms(AGAIN_MS)
        answer = wire.ElectLeadersReply(metadata_offset=reply.metadata_offset)
        answer.results.extend(done[key] for key in dict.fromkeys(keys))
        return answer
