"""Finds circles in a directed graph.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping


def cyclic_groups(edges: Mapping[int, Iterable[int]]) -> list[list[int]]:
    """Return the groups of nodes that reach each other (strongly connected components of more than
    one node), by Tarjan's algorithm without recursion.
    """
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    groups: list[list[int]] = []
    for root in edges:
        if root in index:
            continue
        work: list[tuple[int, Iterator[int]]] = []

        def enter(node: int, work: list[tuple[int, Iterator[int]]] = work) -> None:
            index[node] = low[node] = len(index)
            stack.append(node)
            on_stack.add(node)
            work.append((node, iter(edges.get(node, ()))))

        enter(root)
        while work:
            node, rest = work[-1]
            for target in rest:
                if target not in index:
                    enter(target)
                    break
                if target in on_stack:
                    low[node] = min(low[node], index[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    group = _pop_to(node, stack, on_stack)
                    if len(group) > 1:
                        groups.append(group)
    return groups


def _pop_to(node: int, stack: list[int], on_stack: set[int]) -> list[int]:
    """Remove a group from the stack: everything above `node`, and `node`."""
    at = len(stack) - 1
    while stack[at] != node:
        at -= 1
    group = stack[at:]
    del stack[at:]
    on_stack.difference_update(group)
    return sorted(group)
