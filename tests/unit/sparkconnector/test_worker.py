"""What a reused worker of Spark pays once: sparkconnector/worker W1."""

from __future__ import annotations

import gc
import os

import pytest

pytest.importorskip("pyspark")

from pk.sparkconnector import sessions, worker


@pytest.fixture
def frozen(monkeypatch):
    """Whether a task runs (`frozen.task`), and how often memory was set apart (`frozen.times`)."""

    class Seen:
        task: object | None = object()
        times = 0

        def freeze(self) -> None:
            self.times += 1

    seen = Seen()
    monkeypatch.setattr(gc, "freeze", seen.freeze)
    monkeypatch.setattr(worker.TaskContext, "get", lambda: seen.task)
    monkeypatch.setattr(worker, "_tasks", 0)
    monkeypatch.setattr(worker, "_pid", 0)
    return seen


def test_memory_is_set_apart_once_at_the_second_task(frozen):
    counts = []
    for _ in range(4):
        worker.begin_task()
        counts.append(frozen.times)
    assert counts == [0, 1, 1, 1]


def test_a_forked_worker_counts_its_own_tasks(frozen, monkeypatch):
    worker.begin_task()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    worker.begin_task()
    assert frozen.times == 0
    worker.begin_task()
    assert frozen.times == 1


def test_outside_a_task_memory_is_left_alone(frozen):
    frozen.task = None
    for _ in range(3):
        worker.begin_task()
    assert frozen.times == 0


def test_executors_skip_arrows_checks_unless_told_otherwise(monkeypatch):
    names = ("ARROW_ENABLE_UNSAFE_MEMORY_ACCESS", "ARROW_ENABLE_NULL_CHECK_FOR_GET")
    keys = [f"spark.executorEnv.{name}" for name in names]
    for name in names:
        monkeypatch.delenv(name, raising=False)

    def found(**conf: object) -> list[str]:
        built = sessions.settings("local[2]", False, False, conf)
        return [built[key] for key in keys]

    assert found() == ["true", "false"]
    assert found(**{keys[0]: "false"}) == ["false", "false"], "a setting of the user wins"
    monkeypatch.setenv(names[0], "false")
    assert found() == ["false", "false"], "so does a variable"
