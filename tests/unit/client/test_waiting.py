"""client/waiting W1: Ctrl-C at any instruction of a wait leaves no lock held."""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from pk.client import waiting
from pk.client.waiting import Monitor, WakeupSignal

#: After these instructions CPython checks for signals.
LOOKS = {"RESUME", "CALL", "CALL_KW", "CALL_FUNCTION_EX", "JUMP_BACKWARD"}


#: Where the interrupt may come.  Not in what happens to run in between: a garbage collection's
#: callbacks swallow what is raised in them.
INSIDE = {__file__, waiting.__file__, threading.__file__}


class Interrupt:
    """Raises KeyboardInterrupt at the n-th place where a signal handler could run."""

    def __init__(self, after: int) -> None:
        self.left = after
        self.behind: dict[Any, str] = {}  #: frame → the instruction before

    def __call__(self, frame: Any, event: str, _argument: Any) -> Any:
        if frame.f_code.co_filename not in INSIDE:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            if self.behind.get(frame) in LOOKS:
                if not self.left:
                    raise KeyboardInterrupt
                self.left -= 1
            self.behind[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        return self


def interrupted_everywhere(work: Callable[[], Any], check: Callable[[], None]) -> int:
    """Run `work` once for each such place, interrupted there; return the number of places."""
    for number in count():
        before = sys.gettrace()
        sys.settrace(Interrupt(number))
        try:
            work()
        except (KeyboardInterrupt, RuntimeError):
            sys.settrace(before)
            check()
        else:
            return number
        finally:
            sys.settrace(before)
    raise AssertionError


def test_a_signal_can_be_set_and_ends_a_wait_after_any_interrupt() -> None:
    wakeup = WakeupSignal()

    def check() -> None:
        wakeup.set()
        wakeup.set()
        answers = iter([False, True])
        assert wakeup.wait_for(lambda: next(answers), 60.0)

    assert interrupted_everywhere(lambda: wakeup.wait_for(lambda: False, 0.001), check) > 5


def test_a_monitor_is_free_after_any_interrupt() -> None:
    monitor = Monitor()

    def work() -> None:
        with monitor.lock:
            monitor.wait_for(lambda: False, 0.001)
            monitor.notify_all()

    def check() -> None:
        assert monitor.lock.acquire(timeout=10)
        monitor.notify_all()
        monitor.lock.release()

    assert interrupted_everywhere(work, check) > 10


def test_the_test_would_find_what_a_plain_condition_does() -> None:
    condition = threading.Condition(threading.Lock())

    def work() -> None:
        with condition:
            pass

    def check() -> None:
        assert condition.acquire(blocking=False)
        condition.release()

    with pytest.raises(AssertionError):
        interrupted_everywhere(work, check)


def test_a_signal_before_the_wait_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_LOOK_AGAIN_S", 3600.0)
    wakeup, seen = WakeupSignal(), threading.Event()
    wakeup.set()
    answers = iter([False, True])
    assert wakeup.wait_for(lambda: next(answers), 3600.0)

    def set_both() -> None:
        seen.set()
        wakeup.set()

    thread = threading.Thread(target=set_both)
    thread.start()
    assert wakeup.wait_for(seen.is_set, 3600.0)
    thread.join()
    assert not wakeup.wait_for(lambda: False, 0.0)
