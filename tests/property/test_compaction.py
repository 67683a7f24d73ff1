"""Cleanings of a log compared with a naive oracle, for any history of producers.

The log is cleaned again and again: up to any offset, at any time, with any memory.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from pk.compaction.offset_map import ENTRY_BYTES
from pk.compaction.retain import Cleaning
from tests.kit.compacted_log import RETENTION_MS, ROOMY, History

KEYS = [b"", b"a", b"b", b"key-of-16-bytes!", b"key-of-16-bytes?!"]
SMALL = 3 * (ENTRY_BYTES + 17)
SEEDS = st.integers(0, 2**32)


class Step(NamedTuple):
    """One step of a history; `options` are the arguments of `History.clean`."""

    kind: str
    who: int = 0
    rows: tuple[tuple[bytes | None, bytes | None], ...] = ()
    ids: tuple[int, ...] = ()
    commit: bool = False
    wait_ms: int = 0
    back: int = 0
    unsettled: int = 0
    options: dict[str, Any] | None = None


def steps_of(seed: int, count: int = 40) -> list[Step]:
    """Draw a history: few keys, and a cleaning after every few batches."""
    rng = random.Random(seed)
    keys = [*rng.sample(KEYS, 3), None] if rng.random() < 0.2 else rng.sample(KEYS, 3)
    return [_step(rng, keys) for _ in range(count)]


def _step(rng: random.Random, keys: list[bytes | None]) -> Step:
    kind = rng.choices(["write", "end", "repeat", "forget", "clean"], [47, 15, 12, 2, 24])[0]
    if kind == "write":
        rows = tuple(
            (rng.choice(keys), rng.choice([b"1", b"2", None])) for _ in range(rng.randint(1, 3))
        )
        return Step(kind, rng.randrange(6), rows)
    if kind == "end":
        ids = tuple(sorted(rng.sample([3, 4, 5], rng.choice([1, 1, 2]))))
        return Step(kind, ids=ids, commit=rng.random() < 0.6)
    if kind == "clean":
        return cleaning(rng)
    return Step(kind, rng.choice([3, 4, 5]) if kind == "repeat" else rng.randint(1, 5))


def cleaning(rng: random.Random) -> Step:
    """Draw a cleaning."""
    options = {
        "memory": rng.choice([ROOMY, ROOMY, SMALL]),
        "block": rng.choice([5, 50, 50]),
        "delay_ms": rng.choice([0, 30]),
        "clock": rng.random() < 0.8,
    }
    wait_ms = rng.choice([0, 30, RETENTION_MS, 3 * RETENTION_MS])
    back, unsettled = rng.choice([0, 0, 1, 3, 6]), rng.choice([0, 0, 0, 2, 5, 10])
    return Step("clean", wait_ms=wait_ms, back=back, unsettled=unsettled, options=options)


def apply(history: History, step: Step) -> Cleaning | None:
    """Do one step."""
    if step.kind == "write":
        history.write(step.who, step.rows)
    elif step.kind == "end":
        history.finish(step.ids, commit=step.commit)
    elif step.kind == "repeat":
        history.repeat_marker(step.who)
    elif step.kind == "forget":
        history.forget(step.who)
    else:
        assert step.options is not None
        history.now_ms += step.wait_ms
        end = history.end - step.back
        return history.clean(end, history.end - step.unsettled, **step.options)
    return None


@given(SEEDS)
def test_every_reader_sees_the_latest_record_of_each_key(seed: int) -> None:
    history = History()
    for step in steps_of(seed):
        if apply(history, step) is not None:
            history.check()
    history.check()


@given(SEEDS)
def test_a_repeated_cleaning_changes_nothing(seed: int) -> None:
    history = History()
    for step in steps_of(seed):
        apply(history, step)
    cleaned_end = history.cleaned_end
    step = cleaning(random.Random(seed))
    first = apply(history, step)
    assert first is not None
    assert step.options is not None
    log = list(history.log)
    for start in (first.end, cleaned_end, 0):
        history.cleaned_end = start
        history.clean(first.end, first.settled_end, **{**step.options, "memory": ROOMY})
        assert history.log == log, start


@given(SEEDS, st.integers(1, 6))
def test_blocks_make_no_difference(seed: int, block: int) -> None:
    """Markers find the batches of their transaction in earlier blocks."""
    logs = []
    for size in (block, 1000):
        history = History()
        for step in steps_of(seed):
            options = {**(step.options or {}), "block": size, "memory": ROOMY}
            apply(history, step._replace(options=options))
        logs.append(history.log)
    assert logs[0] == logs[1]


@given(SEEDS)
def test_all_that_is_left_in_the_end_is_needed(seed: int) -> None:
    """Once all transactions ended, all producers are forgotten, and enough time has passed, the log
    has the latest values, and the markers of the batches that have them.
    """
    history = History()
    for step in steps_of(seed):
        apply(history, step)
    history.finish(sorted(history.open), commit=True)
    for who in range(1, 6):
        history.forget(who)
    for _ in range(3):
        history.now_ms += 10 * RETENTION_MS
        history.clean(history.end, history.end, memory=ROOMY, block=9, delay_ms=0, clock=True)
        history.check()
    assert {r.offset for batch in history.log for r in batch.records} == {
        r.offset for r in history.latest().values() if r.value is not None
    }
    transactions = {b.header.producer_id for b in history.log if b.header.transactional}
    for batch in history.log:
        assert batch.records or {m.producer_id for m in batch.markers} & transactions
