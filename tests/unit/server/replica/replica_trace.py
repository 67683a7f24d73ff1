"""Golden traces of one partition's replicas: who is in sync, what is committed, what is truncated.

The file format and `--rewrite` are those of tests/unit/server/raft/raft_trace.py.  A trace drives
the production cores: the leader's view (`pk.server.replica.leader`), where two logs diverge
(`find_divergence`), and how far a follower may truncate (`follower`).  A log is a list of leader
epochs, one a record, so a trace can print it: `1 1 2` holds two records of epoch 1 and one of epoch
2.

Commands (replica numbers)
  replicas N              replicas 1..N with empty logs
  lead R epoch=E isr=LIST [min=M] [flush=1] [unclean=1]
                          R leads epoch E; followers must compare their logs again
  append K                the leader appends K records (WRITTEN)
  sync                    what the leader has is SYNCED
  position R              follower R names its end and last epoch; the leader compares the logs
  fetch R [K]             R copies at most K records (default: all) and confirms its end
  tick MS                 time passes; the leader says which ISR it would ask for
  propose LIST            the leader asks the controller for an ISR: additions count from now on
  commit LIST             the metadata log commits an ISR
  refuse                  the controller refused the ISR that was proposed
  drop-start OFFSET       the leader deletes its records below OFFSET
  status                  the leader's ends, and every log
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pk.errors import PkError
from pk.log.divergence import StartAt, find_divergence
from pk.log.epochs import LeaderEpochs
from pk.server.replica import follower
from pk.server.replica.leader import Leader
from pk.types import NONE

LAG_MAX_MS = 10_000
BROKER_EPOCH = 7


@dataclass
class _Log:
    """A replica's log: the records [start, end), each given by its leader epoch."""

    start: int = 0
    records: list[int] = field(default_factory=list)
    high_watermark: int = 0
    compared: bool = False  #: with the log of the present leader epoch

    @property
    def end(self) -> int:
        return self.start + len(self.records)

    @property
    def last_epoch(self) -> int:
        return self.records[-1] if self.records else NONE

    @property
    def epochs(self) -> LeaderEpochs:
        found = LeaderEpochs()
        for offset, epoch in enumerate(self.records, self.start):
            found.assign(epoch, offset)
        return found

    def text(self) -> str:
        records = " ".join(map(str, self.records)) or "empty"
        return f"[{self.start}, {self.end}) {records}"


class Trace:
    """Performs commands and notes the answers of the cores."""

    def __init__(self) -> None:
        self.out: list[str] = []
        self.now = 0
        self.logs: dict[int, _Log] = {}
        self.leader: Leader | None = None
        self.partition_epoch = 0
        self.synced = 0
        self.unclean = False
        self.proposed: tuple[int, ...] = ()

    def command(self, line: str) -> None:
        word, *args = line.split()
        before = self.leader.high_watermark if self.leader else None
        leader = self.leader
        getattr(self, "_" + word.replace("-", "_"))(*args)
        if leader is self.leader and leader is not None and leader.high_watermark != before:
            self._note_watermark()

    def _replicas(self, count: str) -> None:
        self.logs = {number: _Log() for number in range(1, int(count) + 1)}

    def _lead(self, number: str, *options: str) -> None:
        told = dict(option.split("=") for option in options)
        log = self.logs[int(number)]
        self.partition_epoch += 1
        self.unclean = told.get("unclean") == "1"
        self.synced = log.end
        self.leader = Leader(
            node_id=int(number),
            leader_epoch=int(told["epoch"]),
            partition_epoch=self.partition_epoch,
            replicas=tuple(self.logs),
            isr=_numbers(told["isr"]),
            log_end=log.end,
            synced_end=log.end,
            high_watermark=log.high_watermark,
            min_insync_replicas=int(told.get("min", "1")),
            flush_on_ack=told.get("flush") == "1",
            now_ms=self.now,
        )
        for other in self.logs.values():
            other.compared = other is log
        self._note_watermark()

    def _append(self, count: str) -> None:
        leader = self._now_leads()
        try:
            leader.check_acks(-1)
        except PkError as error:
            self.out.append(f"refused: {type(error).__name__}: {error}")
            return
        log = self.logs[leader.node_id]
        log.records += [leader.leader_epoch] * int(count)
        leader.on_local_end(log.end, self.synced)
        self.out.append(f"{leader.node_id} log {log.text()}")

    def _sync(self) -> None:
        leader = self._now_leads()
        self.synced = self.logs[leader.node_id].end
        leader.on_local_end(self.synced, self.synced)

    def _position(self, number: str) -> None:
        """Run the rounds of truncation on fetch, until both logs agree (KIP-595)."""
        leader, log = self._now_leads(), self.logs[int(number)]
        theirs = self.logs[leader.node_id]
        while True:
            self.out.append(f"{number}>{leader.node_id} position ({log.last_epoch}, {log.end})")
            apart = find_divergence(
                theirs.epochs, theirs.start, theirs.end, log.last_epoch, log.end
            )
            if apart is None:
                log.compared = True
                self.out.append(f"{leader.node_id}>{number} the logs agree up to {log.end}")
                return
            if not self._reconcile(number, log, apart):
                return

    def _reconcile(self, number: str, log: _Log, apart: object) -> bool:
        source = self._now_leads().node_id
        watermark = {"high_watermark": log.high_watermark, "unclean": self.unclean}
        try:
            if isinstance(apart, StartAt):
                self.out.append(f"{source}>{number} START_AT {apart.offset}")
                follower.check_start(apart.offset, **watermark)
                log.start, log.records, log.high_watermark = apart.offset, [], apart.offset
                return True
            self.out.append(f"{source}>{number} epoch {apart[0]} ended at {apart[1]}")
            cut = follower.cut_at(apart, log.epochs, log_end=log.end, **watermark)
        except PkError as error:
            self.out.append(f"{number} refuses: {type(error).__name__}: {error}")
            return False
        del log.records[max(0, cut.offset - log.start) :]
        log.high_watermark = min(log.high_watermark, cut.offset)
        below = ", below its high watermark" if cut.below_watermark else ""
        self.out.append(f"{number} truncates to {cut.offset}{below}")
        return True

    def _fetch(self, number: str, count: str = "") -> None:
        leader, log = self._now_leads(), self.logs[int(number)]
        if not log.compared:
            self.out.append(f"{number} must compare its log first")
            return
        theirs = self.logs[leader.node_id]
        records = theirs.records[log.end - theirs.start :]
        log.records += records[: int(count)] if count else records
        leader.on_follower_end(int(number), log.end, self.now, BROKER_EPOCH, log.start)
        log.high_watermark = min(leader.high_watermark, log.end)
        self.out.append(f"{number}>{leader.node_id} confirms {log.end}")

    def _tick(self, wait_ms: str) -> None:
        self.now += int(wait_ms)
        leader = self._now_leads()
        eligible = dict.fromkeys(self.logs, BROKER_EPOCH)
        start = self.logs[leader.node_id].start
        wanted = leader.wanted_isr(eligible, self.now, LAG_MAX_MS, start)
        self.out.append(f"wanted ISR: {_list(wanted) if wanted else 'no change'}")

    def _propose(self, wanted: str) -> None:
        self.proposed = _numbers(wanted)
        self._now_leads().on_isr_proposed(self.proposed)

    def _refuse(self) -> None:
        self._now_leads().on_isr_refused(self.proposed)

    def _commit(self, wanted: str) -> None:
        self.partition_epoch += 1
        isr, replicas = _numbers(wanted), tuple(self.logs)
        self._now_leads().on_isr_committed(isr, replicas, self.partition_epoch, self.now)
        self.out.append(f"ISR is {_list(isr)}")

    def _drop_start(self, offset: str) -> None:
        log = self.logs[self._now_leads().node_id]
        del log.records[: int(offset) - log.start]
        log.start = int(offset)

    def _status(self) -> None:
        leader = self._now_leads()
        ready = "ready" if leader.ready else f"not ready below {leader.start_offset}"
        self.out.append(
            f"leader {leader.node_id}@{leader.leader_epoch} isr={_list(leader.isr)} "
            f"hw={leader.high_watermark} {ready}"
        )
        for number, log in self.logs.items():
            self.out.append(f"{number} log {log.text()} hw={log.high_watermark}")

    def _now_leads(self) -> Leader:
        assert self.leader is not None, "no leader yet"
        return self.leader

    def _note_watermark(self) -> None:
        leader = self._now_leads()
        log = self.logs[leader.node_id]
        log.high_watermark = max(log.high_watermark, leader.high_watermark)
        self.out.append(f"{leader.node_id} high watermark {leader.high_watermark}")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(","))


def _list(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))
