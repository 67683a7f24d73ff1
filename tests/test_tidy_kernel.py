"""What only the kernel may do: compute the wait before another attempt (pk.backoff), and start
tasks of an event loop (pk.tasks).

As in tests/test_tidy.py, a rule is a pure function of a source text and has a canary.
"""

from __future__ import annotations

import ast
from typing import TypeGuard

import pytest

from tests.test_tidy import dotted, module_of, parsed, python_files, report, text_of

#: pk.backoff itself, and election time-outs, which are no waits before another attempt.
OWN_WAITS = {"src/pk/backoff.py", "server/raft/machine.py"}


def _is_power(node: ast.expr) -> TypeGuard[ast.BinOp]:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)


def _doubles(node: ast.AST) -> bool:
    """`2 * x`, `x * 2**n` or `x << n`."""
    if not isinstance(node, ast.BinOp):
        return False
    powers = [each.left for each in (node.left, node.right) if _is_power(each)]
    factors = [node.left, node.right, *powers]
    twice = any(isinstance(each, ast.Constant) and each.value == 2 for each in factors)
    return isinstance(node.op, ast.LShift) or (isinstance(node.op, ast.Mult) and twice)


def _draws(node: ast.AST) -> bool:
    """Calls `random` or `uniform` of some generator."""
    names = {"random", "uniform"}
    calls = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
    return any(isinstance(call, ast.Attribute) and call.attr in names for call in calls)


def own_backoffs(path: str, text: str) -> list[str]:
    """Waits that are doubled up to a bound, or jittered, elsewhere than in pk.backoff."""
    if path in OWN_WAITS or not module_of(path) or module_of(path).startswith("pk.sim"):
        return []
    found = []
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Call) and dotted(node.func) == "min":
            if any(_doubles(part) for each in node.args for part in ast.walk(each)):
                found.append(f"{node.lineno}: doubles up to a bound; use pk.backoff")
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and _draws(node):
            found.append(f"{node.lineno}: jitter of its own; use pk.backoff")
    return found


#: pk.tasks itself, and the façade that hands work to a loop of another thread.
OWN_TASKS = {"src/pk/tasks.py", "client/connection.py"}
STARTS = {"create_task", "ensure_future", "TaskGroup"}


def own_tasks(path: str, text: str) -> list[str]:
    """Tasks that are started elsewhere than in a `TaskRegistry`; simulations own their loop."""
    if path in OWN_TASKS or not module_of(path) or module_of(path).startswith("pk.sim"):
        return []
    return [
        f"{node.lineno}: starts a task by {name}; use pk.tasks.TaskRegistry"
        for node in ast.walk(parsed(text))
        if isinstance(node, ast.Attribute | ast.Name)
        and (name := node.attr if isinstance(node, ast.Attribute) else node.id) in STARTS
    ]


def test_waits_before_another_attempt_come_from_one_module() -> None:
    report({p: own_backoffs(p, text_of(p)) for p in python_files()})


def test_tasks_are_started_by_a_registry() -> None:
    report({p: own_tasks(p, text_of(p)) for p in python_files()})


@pytest.mark.parametrize(
    "line",
    [
        "asyncio.get_running_loop().create_task(work())", "asyncio.create_task(work())",
        "self._loop.create_task(work())", "asyncio.ensure_future(x)", "asyncio.TaskGroup()",
        "from asyncio import create_task\ncreate_task(work())",
    ],
)  # fmt: skip
def test_a_task_without_a_registry_is_caught(line: str) -> None:
    assert own_tasks("log/x.py", line)
    assert not own_tasks("src/pk/tasks.py", line)
    assert not own_tasks("sim/x.py", line)


@pytest.mark.parametrize(
    "line",
    [
        "x = min(2 * x, 1_000)", "x = min(1_000, first * 2 ** min(n, 16))",
        "x = min(first << n, 1_000)", "x = wait_ms * self._rng.uniform(0.5, 1.0)",
        "x = wait_ms * (0.8 + 0.4 * rng.random())",
    ],
)  # fmt: skip
def test_a_hand_made_back_off_is_caught(line: str) -> None:
    assert own_backoffs("log/x.py", line)
    assert not own_backoffs("src/pk/backoff.py", line)


def test_other_arithmetic_is_no_back_off() -> None:
    assert not own_backoffs("log/x.py", "x = min(a + b, 2)\ny = 2 * z\nw = rng.uniform(50, 200)")
