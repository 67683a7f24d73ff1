"""Rounds of `rebalance`: how long a group needs after each kind of change.

A member is a process (bench/rebalance_member), because one of them is killed.  Nothing is
committed, and each partition has a record.  So a partition counts as polled when its new owner has
read it from its first record.
"""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from typing import IO

from bench import rebalance_member
from bench.group_members import Writer
from bench.ownership import Told, longest_pause, owned_at, settled_at
from bench.plans import Base
from bench.runs import ROOT, RunFailed, Sample, bare
from bench.sides import Side

MEMBERS = 10
FEW, MANY = 100, 1_000  #: partitions before and after the topic grew
_SETTLED_S = 120.0
#: After each change: a pause that has begun ends.
_REST_S = 1.5


class Members:
    """The processes of a group, and what those that live have told."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._processes: list[subprocess.Popen[bytes]] = []
        self._errors: list[IO[bytes]] = []
        self._living: dict[int, Told] = {}
        self._joined: set[int] = set()
        self._lock = threading.Lock()  #: of all `Told`: a thread for each member writes

    def start(self, count: int) -> list[int]:
        """Start processes, which do not join yet; returns their numbers."""
        made = list(range(len(self._processes), len(self._processes) + count))
        for number in made:
            self._errors.append(tempfile.TemporaryFile())  # noqa: SIM115 - see `close`
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors[-1],
                cwd=ROOT,
            )
            told = self._living[number] = Told()
            self._processes.append(process)
            threading.Thread(target=self._listen, args=(process, told), daemon=True).start()
        self._until(lambda: all(self._living[number].ready for number in made), "start")
        return made

    def _listen(self, process: subprocess.Popen[bytes], told: Told) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.endswith(b"\n"):  # kill -9 may cut the last one
                with self._lock:
                    told.hear(json.loads(line))

    def join(self, numbers: Iterable[int]) -> None:
        """Let members subscribe; from now on the group is not settled without them."""
        for number in numbers:
            with self._lock:
                self._joined.add(number)
            pipe = self._processes[number].stdin
            assert pipe is not None
            pipe.write(b"\n")
            pipe.flush()

    def end(self, number: int, how: signal.Signals) -> None:
        """End a member; what it told does not count any more."""
        with self._lock:
            del self._living[number]
        self._processes[number].send_signal(how)

    def settled(self, partitions: int) -> float:
        """Return when each partition was owned and polled, once that is so."""
        self._until(lambda: self._settled_at(partitions) > 0, f"own {partitions} partitions")
        return self._settled_at(partitions)

    def _settled_at(self, partitions: int) -> float:
        with self._lock:
            return settled_at(self._members(), partitions) or 0.0

    def owned_at(self) -> float:
        """Return when the last partition was assigned."""
        with self._lock:
            return owned_at(self._members())

    def pause(self, begin: float, end: float) -> float:
        """Return the longest pause of members that lost nothing; seconds."""
        with self._lock:
            return longest_pause(self._members(), begin, end)

    def _members(self) -> list[Told]:
        return [told for number, told in self._living.items() if number in self._joined]

    def _until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _SETTLED_S
        while not holds():
            ended = [n for n in self._living if self._processes[n].poll() is not None]
            if ended or time.monotonic() > deadline:
                raise RunFailed(f"the members do not {what}: {self._state(ended)}")
            time.sleep(0.02)

    def _state(self, ended: list[int]) -> str:
        with self._lock:
            owned = {number: len(told.owned) for number, told in self._living.items()}
            unread = sum(
                len(each.owned.keys() - each.polled.keys()) for each in self._living.values()
            )
        errors = self._errors[ended[0] if ended else min(self._living)]
        errors.seek(0)
        words = errors.read().decode(errors="replace")[-2000:]
        return f"ended {ended}, owned {owned}, of these {unread} not polled\n{words}"

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
            process.wait()
        for each in self._errors:
            each.close()


class Pulses:
    """Writes to partitions in turn, so that each member has a record due every `TICK_S`."""

    TICK_S = 0.025
    RECORDS = 10  #: of a tick
    STRIDE = 397  #: spreads the records of a tick over the members, whatever partitions they own

    def __init__(self) -> None:
        self._target: tuple[Writer, int] | None = None
        self._stopped = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def write_to(self, writer: Writer, partitions: int) -> None:
        self._target = writer, partitions

    def _run(self) -> None:
        turn = 0
        try:
            while not self._stopped.wait(self.TICK_S):
                if self._target is None:
                    continue
                writer, partitions = self._target
                for _ in range(self.RECORDS):
                    turn += 1
                    writer.send(turn * self.STRIDE % partitions)
        except BaseException as failure:
            self._failure = failure

    def close(self) -> BaseException | None:
        """End; return what went wrong."""
        self._stopped.set()
        self._thread.join()
        return self._failure


class Round:
    """A group goes through four changes, one after the other."""

    def __init__(self, side: Side, topic: str, protocol: str) -> None:
        self._side, self._topic = side, topic
        command = rebalance_member.command(side.kind, side.address, topic, protocol)
        self._members = Members(command)
        self._writers: list[Writer] = []
        self._pulses = Pulses()
        self._parts: dict[str, Sample] = {}
        self._written_at = 0.0
        self._pauses_s: list[float] = []

    def run(self) -> Sample:
        """Return the figures by variant."""
        self._fill(0, FEW)
        first, *others = self._members.start(MEMBERS)
        self._members.join([first, *others])
        self._members.settled(FEW)
        (spare,) = self._members.start(1)
        time.sleep(_REST_S)
        self._after("grow", self._grow)
        self._after("kill -9", lambda: self._members.end(others[0], signal.SIGKILL))
        self._after("join", lambda: self._members.join([spare]))
        self._after("leave", lambda: self._members.end(others[1], signal.SIGTERM))
        parts = self._parts | {"pause": bare(1000 * max(self._pauses_s, default=0.0))}
        return Sample(parts["grow"].value, 0, 0, 0, 0, 0, parts=parts)

    def _after(self, name: str, change: Callable[[], None]) -> None:
        """Time a change.  `owned_s` is its part until the last assignment; `written_s` of `grow`,
        until each new partition has its record.
        """
        begin = time.monotonic()
        change()
        end = self._members.settled(MANY)
        figures = {"owned_s": self._members.owned_at() - begin}
        if name == "grow":
            figures["written_s"] = self._written_at - begin
        self._parts[name] = bare(end - begin, figures)
        time.sleep(_REST_S)
        self._pauses_s.append(self._members.pause(begin, end))

    def _grow(self) -> None:
        self._side.grow_topic(self._topic, MANY)
        self._fill(FEW, MANY)

    def _fill(self, begin: int, end: int) -> None:
        """Write a record to each of these partitions, with a client that knows them.

        The client before it goes on writing to the older partitions until all are acknowledged.
        """
        writer = Writer(self._side.kind, self._side.address, self._topic, end)
        self._writers.append(writer)
        for partition in range(begin, end):
            writer.send(partition)
        writer.flush()
        self._written_at = time.monotonic()
        self._pulses.write_to(writer, end)

    def close(self) -> None:
        """End all processes and clients.  Raises `RunFailed` if the writer failed."""
        failure = self._pulses.close()
        self._members.close()
        for writer in self._writers:
            writer.close()
        if failure is not None:
            raise RunFailed(f"the writer failed: {failure!r}") from failure


class Rebalance(Base):
    """A group and a topic of its own in every round."""

    def round(self, role: str, mode: str) -> Sample:
        side = self.side(role)
        topic = self.bench.fresh("rebalance")
        side.create_topic(topic, partitions=FEW)
        try:
            played = Round(side, topic, mode if role == "peer" else "classic")
            try:
                return played.run()
            finally:
                played.close()
        finally:
            side.delete_topic(topic)
