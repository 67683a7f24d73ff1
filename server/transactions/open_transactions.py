"""Asks coordinators about transactions that are open in the logs of this broker (rule X3).

World-generic.  A coordinator sends the markers of a transaction to every partition that it knows
of.  This check finds the transactions that no marker would end: after a leader took office, and
later for each one that is older than any transaction may be.

Invariants
  O1  A leader asks about every transaction that is open in its log once per leader epoch, until
      each question has an answer.
  O2  A leader appends a marker of its own only for a transaction that the coordinator, fully
      replayed, has answered as ended.  An error leaves the transaction open.
  O3  A coordinator that does not answer delays the questions of one partition only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

from pk import errors
from pk.log.control_rows import Marker
from pk.server.replica.context import BrokerClocks, Environment
from pk.server.replica.markers import write_markers
from pk.server.replica.partition import Partition
from pk.server.transactions.verifier import Asked, TransactionVerifier
from pk.tasks import TaskRegistry
from pk.transactional_ids import is_transactional
from pk.types import NONE, Epoch, PartitionKey

CHECK_MS = 2_000
MARKER_WAIT_MS = 8_000
#: Status of a question that only verifies (pk.proto, TxnAnswer).
ENDED = 3
#: Transactions of one partition that are asked about in one check.
ASKED_MAX = 500


class OpenTransactionChecks:
    """The checks of one broker."""

    def __init__(
        self,
        env: Environment,
        partitions: Mapping[PartitionKey, Partition],
        clocks: BrokerClocks,
        verifier: TransactionVerifier,
    ) -> None:
        self._env = env
        self._partitions = partitions
        self._clocks = clocks
        self._verifier = verifier
        self._asked: dict[PartitionKey, Epoch] = {}  #: the leader epoch that was checked (O1)
        self._tasks = TaskRegistry(partial(env.bug, "checking open transactions"))

    def start(self) -> None:
        self._tasks.spawn(self._run())

    async def close(self) -> None:
        await self._tasks.close()

    async def _run(self) -> None:
        while True:
            await self._env.clock.sleep_ms(CHECK_MS)
            for key in self._asked.keys() - self._partitions.keys():
                del self._asked[key]  # this broker has the partition no longer
            for key, partition in self._partitions.items():
                if partition.leader is None:
                    continue
                if not partition.log.producers.open_count:
                    self._asked[key] = partition.leader_epoch
                elif key not in self._tasks:  # O3
                    self._tasks.spawn(self._check(key, partition), key)

    async def _check(self, key: PartitionKey, partition: Partition) -> None:
        """Ask about the transactions of one partition that must be asked about."""
        epoch = partition.leader_epoch
        fresh = self._asked.get(key) != epoch
        producers = partition.log.producers
        found = producers.open_transactions
        old_ms = self._clocks.now().wall_ms - self._env.server["transaction_max_timeout_ms"]
        asked = [
            Asked(producer_id, entry.epoch, key, epoch, NONE, verify_only=True)
            for producer_id in found
            if is_transactional(producer_id)
            and (entry := producers.get(producer_id)) is not None
            and (fresh or entry.transaction_began_ms < old_ms)
        ]
        answered = await asyncio.gather(*(self._ask(partition, each) for each in asked[:ASKED_MAX]))
        if all(answered) and len(asked) <= ASKED_MAX:
            self._asked[key] = epoch

    async def _ask(self, partition: Partition, asked: Asked) -> bool:
        """Ask about one transaction and end it here if it has ended (O2); False: ask again."""
        try:
            answer = await self._verifier.ask(asked)
            if answer.status != ENDED:
                return True
            marker = Marker(
                asked.producer_id,
                answer.producer_epoch,
                answer.commit,
                self._verifier.newest(asked.producer_id),
            )
            deadline_ms = self._env.now_ms + MARKER_WAIT_MS
            (refusal,) = await write_markers(
                partition, [marker], asked.leader_epoch, self._clocks.now(), deadline_ms
            )
        except errors.PkError:
            return False
        self._env.warn(
            "transaction_ended_by_leader",
            partition=str(partition),
            producer_id=asked.producer_id,
            commit=answer.commit,
        )
        return refusal is None
