"""One process of simulated members: `python -m bench.group_swarm …` (bench/many_groups).

It reads its groups, one a line, until an empty line, and prints JSON lines: `stable`, with the
number of stable groups, when that changed; and for each further line `commit` that it reads,
`committed`, once a member of each group has committed an offset after that line.  At a line `mark`
it sets its counts to 0.  At the end of its input it prints `ended` with the counts, and ends.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import sys
import uuid
from typing import Any

from bench.simulated_group import Coordinators, Counts, Member
from pk.clock import SystemClock
from pk.wire.socket_network import PkNetwork
from pk.world import World

#: Groups of this process whose members join at the same time.
JOINING = 20
#: A broker accepts `limits.CONTROL_STREAMS_MAX` control streams of a connection, 256.  A connection
#: for each member would take more descriptors than a broker has.
STREAMS_PER_CONNECTION = 200
_TOLD_S = 0.2


def _say(what: str, **more: Any) -> None:
    print(json.dumps({"what": what, **more}), flush=True)


def _world() -> World:
    return World(
        clock=SystemClock(),
        network=PkNetwork(),
        rng=random.Random(),
        new_id=lambda: uuid.UUID(bytes=os.urandom(16), version=4).hex,
    )


class Swarm:
    """The groups of this process."""

    def __init__(self, given: argparse.Namespace, groups: list[str]) -> None:
        self._given = given
        self._world = _world()
        self._counts = Counts()
        bootstrap = given.bootstrap.split(",")
        self._coordinators = Coordinators(self._world, bootstrap, self._counts)
        size = max(1, STREAMS_PER_CONNECTION // given.members)
        parts = [groups[at : at + size] for at in range(0, len(groups), size)]
        self._groups = [group for part in parts for group in self._connected(part)]
        self._joining = asyncio.Semaphore(JOINING)
        self._offset = 0

    def _connected(self, groups: list[str]) -> list[list[Member]]:
        """Return the members of groups that share a TCP connection to each broker."""
        world, given = dataclasses.replace(self._world, network=PkNetwork()), self._given
        topic = (given.topic, given.topic_id)
        return [
            [
                Member(
                    world, self._coordinators, self._counts, group, number, topic,
                    given.heartbeat_ms,
                )
                for number in range(given.members)
            ]
            for group in groups
        ]  # fmt: skip

    async def run(self) -> None:
        """Run until the end of the input."""
        async with asyncio.TaskGroup() as tasks:  # a member that fails ends the process
            work = [tasks.create_task(self._begin(members)) for members in self._groups]
            work.append(tasks.create_task(self._tell()))
            while (line := await asyncio.to_thread(sys.stdin.readline)).strip():
                if line.strip() == "commit":
                    await self._commit()
                else:  # mark
                    self._counts.forget()
            _say("ended", **dataclasses.asdict(self._counts))
            for task in work:
                task.cancel()

    async def _begin(self, members: list[Member]) -> None:
        """Let the members of a group join, and go on as members."""
        async with asyncio.TaskGroup() as tasks, self._joining:
            for member in members:
                tasks.create_task(member.run())
            for member in members:
                await member.stable.wait()

    async def _tell(self) -> None:
        told = -1
        while True:
            count = sum(all(each.stable.is_set() for each in group) for group in self._groups)
            if count != told:
                told = count
                _say("stable", groups=count)
            await asyncio.sleep(_TOLD_S)

    async def _commit(self) -> None:
        """Let the first member of each group commit."""
        self._offset += 1
        clock = self._world.clock
        begin_ms = clock.monotonic_ms()
        found = await asyncio.gather(*(group[0].commit(self._offset) for group in self._groups))
        _say("committed", groups=len(found), at_ms=max(found), took_ms=max(found) - begin_ms)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--topic-id", required=True)
    parser.add_argument("--members", type=int, required=True)
    parser.add_argument("--heartbeat-ms", type=int, default=3_000)
    given = parser.parse_args()
    groups = []
    while group := sys.stdin.readline().strip():
        groups.append(group)
    asyncio.run(_run(given, groups))
    return 0


async def _run(given: argparse.Namespace, groups: list[str]) -> None:
    await Swarm(given, groups).run()


if __name__ == "__main__":
    sys.exit(main())
