"""Rounds of `kill -9` under load, and what the ledger says afterwards.

    python tests/chaos/run.py --rounds 50 [--seed N] [--json FILE] [--dir DIR]

Each round draws a victim (supervisor, broker, controller, tier, or all of them), a moment, and a
producer's settings.  The driver sends records that carry their ids, kills, lets the supervisor (or
itself, where the supervisor died) bring the node back, waits for acknowledgements of records sent
after the kill, and settles every record.  A long-lived consumer then reads on; at the end a fresh
one reads everything from offset 0, across tier and local log, and the table is read without pk.
Exit 1 = a demand of ledger.py, or of the list below, is broken.  Recovery times are reported only.

  the reconnecting consumer read exactly what the fresh one reads
  the topic's table holds exactly the same offsets and ids, once tiered_end = log_end
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from ledger import Ledger, Outcome, Read, number_of
from load import Load

from pk import AdminClient, Consumer, Producer, TopicPartition, errors
from pk.cli.embedded import EmbeddedServer
from pk.clock import block_s, monotonic_s

TOPIC = "chaos"
PARTITIONS = 3
VICTIMS = ("supervisor", "broker", "controller", "tier", "all")
#: Small everything, so that a kill meets a roll, a tier commit, a local drop, a retention pass.
TOPIC_SETTINGS = {
    "retention_ms": -1,
    "segment_bytes": 262_144,
    "local_retention_bytes": 524_288,
    "tier_max_lag_ms": 300,
    "tier_file_bytes": 131_072,
    "local_drop_delay_ms": 200,
    "file_delete_delay_ms": 500,
}
SERVER_SETTINGS = {
    "log_retention_check_interval_ms": 300,
    "log_flush_offset_checkpoint_interval_ms": 500,
    "tier_retry_backoff_ms": 100,
}
RECORDS_PER_S = 4_000
RECOVERY_MAX_S = 60.0
LOAD_AFTER_KILL_S = 1.5
SETTLE_MAX_S = 150.0
READ_MAX_S = 120.0
TIER_MAX_S = 120.0


@dataclass(slots=True)
class Round:
    """The drawn options of a round, and its outcome."""

    victim: str
    kill_after_s: float
    compression: str
    linger_ms: float
    delivery_timeout_ms: int
    padding: int
    sent: int = 0
    recovery_ms: int = -1

    @staticmethod
    def draw(rng: random.Random, victim: str | None) -> Round:
        return Round(
            victim=victim or rng.choice(VICTIMS),
            kill_after_s=rng.uniform(0.1, 1.5),
            compression=rng.choice(["none", "lz4", "zstd"]),
            linger_ms=rng.choice([0.0, 1.0, 5.0, 20.0]),
            # short ones leave outcomes unknown; long ones must all be acknowledged in the end
            delivery_timeout_ms=rng.choice([300, 1_500, 120_000, 120_000]),
            padding=rng.choice([0, 20, 200, 2_000]),
        )


class Driver:
    """One node, one ledger, and one consumer that reads through every kill."""

    def __init__(self, server: EmbeddedServer, rng: random.Random) -> None:
        self.server = server
        self.rng = rng
        self.ledger = Ledger()
        self.partitions = [TopicPartition(TOPIC, number) for number in range(PARTITIONS)]
        self.read = {number: Read() for number in range(PARTITIONS)}
        self.violations: list[str] = []
        with AdminClient(server.address) as admin:
            admin.create_topic(TOPIC, partitions=PARTITIONS, configs=TOPIC_SETTINGS)
        self.consumer = self.new_consumer()

    def new_consumer(self) -> Consumer:
        consumer = Consumer(self.server.address, auto_offset_reset="none")
        consumer.assign(self.partitions)
        for partition in self.partitions:
            consumer.seek(partition, 0)
        return consumer

    def run_round(self, plan: Round) -> None:
        producer = Producer(
            self.server.address,
            compression=plan.compression,
            linger_ms=plan.linger_ms,
            delivery_timeout_ms=plan.delivery_timeout_ms,
            request_timeout_ms=min(30_000, plan.delivery_timeout_ms - 100),
        )
        load = self.load(producer, os.urandom(plan.padding // 2).hex().encode())
        before = len(self.ledger)
        thread = threading.Thread(target=load.run, daemon=True)
        thread.start()
        try:
            block_s(plan.kill_after_s)
            living = self.living_with(plan.victim)
            killed_at = monotonic_s()  # a restart by the driver counts as recovery, too
            self.kill(plan.victim, living)
            mark = load.mark()
            while load.newest_acknowledged < mark and monotonic_s() - killed_at < RECOVERY_MAX_S:
                block_s(0.01)
            plan.recovery_ms = int((monotonic_s() - killed_at) * 1000)
            recovered = load.newest_acknowledged >= mark
            # a victim that produce does not wait for is restarted under load, too
            block_s(max(0.0, LOAD_AFTER_KILL_S - (monotonic_s() - killed_at)))
        finally:
            load.stop.set()
            thread.join()
            producer.flush(timeout_s=SETTLE_MAX_S)
            producer.close()
        if load.failure is not None:
            raise load.failure
        if not (recovered or self.answers()):
            self.violations.append(
                f"nothing was acknowledged within {RECOVERY_MAX_S:g} s of killing {plan.victim}"
            )
        plan.sent = len(self.ledger) - before
        self.read_on()

    def load(self, producer: Producer, padding: bytes = b"") -> Load:
        return Load(
            producer,
            self.ledger,
            self.rng,
            topic=TOPIC,
            partitions=PARTITIONS,
            records_per_s=RECORDS_PER_S,
            padding=padding,
        )

    def answers(self) -> bool:
        """Return whether a patient producer is served: the drawn one may give up before a busy
        machine answers.
        """
        patience_ms = int(RECOVERY_MAX_S * 1000)
        with Producer(self.server.address, delivery_timeout_ms=patience_ms) as producer:
            load = self.load(producer)
            load.send_one()
            producer.flush(timeout_s=SETTLE_MAX_S)
        return load.newest_acknowledged >= 0

    def living_with(self, victim: str) -> dict[str, int]:
        """Return the processes, once the victim is among them: that of an earlier round may still
        be starting.
        """
        wanted = "broker" if victim == "all" else victim
        deadline = monotonic_s() + RECOVERY_MAX_S
        while wanted not in (living := self.server.pids()):
            if monotonic_s() > deadline:
                raise RuntimeError(f"no {victim} to kill: {living}\n{self.server.tail()}")
            block_s(0.01)
        return living

    def kill(self, victim: str, living: dict[str, int]) -> None:
        if victim == "all":
            self.server.kill("supervisor")
            for role in ("broker", "controller", "tier"):
                self.server.kill(role)
        else:
            self.server.kill(victim)
        if victim in ("supervisor", "all"):
            self.server.wait_gone(living)
            self.server.start()

    def read_on(self) -> None:
        """Let the long-lived consumer read to the present end."""
        self._read_to_end(self.consumer, self.read)
        for number, found in self.read.items():
            self.violations += self.ledger.violations(number, found)

    def _read_to_end(self, consumer: Consumer, into: dict[int, Read]) -> None:
        ends = consumer.end_offsets(self.partitions)
        deadline = monotonic_s() + READ_MAX_S
        while any(consumer.position(each) < ends[each] for each in self.partitions):
            if monotonic_s() > deadline:
                at = {each.partition: consumer.position(each) for each in self.partitions}
                self.violations.append(f"a consumer stands still at {at} of {ends}")
                return
            try:
                batches = consumer.poll_batches(timeout_s=0.5)
            except errors.RetriableError:  # an error that lasts is reported by the deadline here
                continue
            for partition, batch in batches:
                offsets = batch.column("offset").to_pylist()
                values = batch.column("value").to_pylist()
                into[partition.partition].add(offsets, [number_of(value) for value in values])

    def check_everything(self) -> dict[str, int]:
        """Check a fresh consumer from offset 0, and the table without pk."""
        fresh = {number: Read() for number in self.read}
        consumer = self.new_consumer()
        try:
            self._read_to_end(consumer, fresh)
        finally:
            consumer.close()
        for number, found in fresh.items():
            self.violations += self.ledger.violations(number, found)
            if found != self.read[number]:
                self.violations.append(f"partition {number}: two consumers read different logs")
        uri = self.wait_tiered()
        if uri:
            self.check_table(uri, fresh)
        with AdminClient(self.server.address) as admin:
            states = admin.describe_topics([TOPIC])
        return {
            "log_end": sum(state.log_end for state in states),
            "only_in_tier": sum(state.local_log_start for state in states),
        }

    def wait_tiered(self) -> str:
        deadline = monotonic_s() + TIER_MAX_S
        with AdminClient(self.server.address) as admin:
            while True:
                states = admin.describe_topics([TOPIC])
                tiered = [state.tiered_end == state.log_end for state in states]
                if len(tiered) == PARTITIONS and all(tiered):
                    return str(admin.describe_tier(TOPIC).uri)
                if monotonic_s() > deadline:
                    ends = {s.partition: (s.tiered_end, s.log_end) for s in states}
                    self.violations.append(f"tiered_end stays behind log_end: {ends}")
                    return ""
                block_s(0.2)

    def check_table(self, uri: str, fresh: dict[int, Read]) -> None:
        from deltalake import DeltaTable

        rows = DeltaTable(uri).to_pyarrow_table(columns=["partition", "offset", "value"])
        for number in range(PARTITIONS):
            mine = [
                (offset, number_of(value))
                for partition, offset, value in zip(
                    rows["partition"].to_pylist(),
                    rows["offset"].to_pylist(),
                    rows["value"].to_pylist(),
                    strict=True,
                )
                if partition == number
            ]
            if Read(sorted(mine)) != fresh[number]:
                self.violations.append(
                    f"partition {number}: the table has {len(mine)} rows ({len(set(mine))} "
                    f"different), the log {len(fresh[number])}"
                )

    def close(self) -> None:
        self.consumer.close()


def victims(rounds: int, rng: random.Random) -> list[str]:
    """Yield every victim in turn, shuffled within each turn, so that few rounds cover all of
    them.
    """
    drawn: list[str] = []
    while len(drawn) < rounds:
        turn = list(VICTIMS)
        rng.shuffle(turn)
        drawn += turn
    return drawn[:rounds]


def run(rounds: int, seed: int, directory: Path) -> dict[str, Any]:
    rng = random.Random(seed)
    server = EmbeddedServer(
        directory / "node", tier_url=(directory / "tier").as_uri(), settings=SERVER_SETTINGS
    )
    plans = [Round.draw(rng, victim) for victim in victims(rounds, rng)]
    with server:
        driver = Driver(server, rng)
        print(f"{'round':>5} {'victim':<11}{'after':>7}{'sent':>8}{'recovery':>10}", flush=True)
        try:
            for number, plan in enumerate(plans, 1):
                driver.run_round(plan)
                print(
                    f"{number:>5} {plan.victim:<11}{plan.kill_after_s:>6.2f}s{plan.sent:>8}"
                    f"{plan.recovery_ms:>8}ms",
                    flush=True,
                )
                if driver.violations:
                    break
            totals = driver.check_everything()
        finally:
            driver.close()
        exit_code = server.stop()
        if exit_code != 0:
            driver.violations.append(f"the drained server exited with {exit_code}")
    return report(seed, plans, driver, totals)


def report(seed: int, plans: list[Round], driver: Driver, totals: dict[str, int]) -> dict[str, Any]:
    done = sorted(plan.recovery_ms for plan in plans if plan.recovery_ms >= 0)
    outcomes = {outcome.value: driver.ledger.count(outcome) for outcome in Outcome}
    return {
        "seed": seed,
        "verdict": "broken" if driver.violations else "kept",
        "violations": driver.violations[:20],
        "rounds": len(done),
        "records": outcomes,
        "recovery_ms": {"p50": done[len(done) // 2], "max": done[-1]} if done else {},
        **totals,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="kill -9 under load")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None, help="write the verdict there, too")
    parser.add_argument("--dir", type=Path, default=None, help="keep the node's directory there")
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else int.from_bytes(os.urandom(4), "big")
    print(f"SEED={seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="pk-chaos-") as folder:
        verdict = run(given.rounds, seed, given.dir or Path(folder))
    text = json.dumps(verdict, indent=2)
    print(text)
    if given.json:
        given.json.write_text(text + "\n")
    if verdict["violations"]:
        print(f"reproduce: make chaos ROUNDS={given.rounds} SEED={seed}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
