"""The results of a measurement: one JSON line per case, a table, and the store of all lines.

A line is the figures of its first variant, flat, with the other variants under their names.  The
store (docs/bench.jsonl) keeps one line per case.  A new run replaces only the variants that it
measured, so every variant carries its own time, rounds and load.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from bench.cases import BY_NAME, Case
from bench.measuring import Result, median
from bench.runs import Sample

Figures = Mapping[str, Any]
_AMONG: Mapping[str, Callable[[Sequence[float]], float]] = {"worst": max, "least": min}
_HEAD = ("name", "what", "against", "sides", "machine")


class Row(NamedTuple):
    """One variant of one line."""

    name: str
    variant: str
    figures: Figures
    head: Figures


def machine() -> dict[str, Any]:
    """Return a description of the machine, as the kernel gives it."""
    model, cores = platform.machine(), 0
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model, cores = line.partition(":")[2].strip(), cores + 1
    memory = next(
        line
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal")
    )
    return {
        "cpu": model,
        "cores": cores,
        "memory_gb": round(int(memory.split()[1]) / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def costs(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Return CPU seconds per million records and peak memory, of client and server separately;
    medians.
    """

    def per_million(seconds: float, sample: Sample) -> float:
        return seconds / (sample.records / 1e6) if sample.records else 0.0

    cpu = {
        "client": statistics.median(per_million(each.client_cpu_s, each) for each in samples),
        "server": statistics.median(per_million(each.server_cpu_s, each) for each in samples),
    }
    peak = {
        "client": statistics.median(each.client_peak_mb for each in samples),
        "server": statistics.median(each.server_peak_mb for each in samples),
    }
    return {
        "cpu_s_per_m_records": {name: round(number, 3) for name, number in cpu.items()},
        "peak_rss_mb": {name: round(number, 1) for name, number in peak.items()},
    }


def rounded(value: float) -> float:
    """Round rates to whole numbers, latencies to microseconds."""
    return round(value) if value >= 1000 else round(value, 3)


def _middle(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the medians of the other figures of a round, and the extremes of its extremes."""
    return {
        name: rounded(_AMONG.get(name, statistics.median)([each.figures[name] for each in samples]))
        for name in samples[0].figures
    }


def facts(result: Result, sides: Figures | None = None) -> dict[str, Any]:
    """Return one variant's figures."""
    case, variant = result.case, result.variant
    pk, peer = result.pk[case.pk_modes[0]], result.peer[result.peer_mode]
    pk_costs, peer_costs = costs(pk), costs(peer)
    found: dict[str, Any] = {
        "variant": variant.name,
        "unit": variant.unit,
        "pk": rounded(median(pk)),
        "peer": rounded(median(peer)),
        "ratio": round(result.ratio, 2),
        "at_least": variant.least,
        "aim": variant.aim,
        "at_most": variant.most,
        "less_is_better": variant.less_is_better,
        "pk_runs": [rounded(sample.value) for sample in pk],
        "peer_runs": [rounded(sample.value) for sample in peer],
        "peer_client": result.peer_mode,
    }
    for key in ("cpu_s_per_m_records", "peak_rss_mb"):
        found[key] = {"pk": pk_costs[key], "peer": peer_costs[key]}
    found["figures"] = {"pk": _middle(pk), "peer": _middle(peer)}
    others = {mode: result.pk[mode] for mode in case.pk_modes[1:]}
    found["pk_modes"] = {
        mode: {
            "pk": rounded(median(runs)),
            "pk_runs": [rounded(s.value) for s in runs],
            **costs(runs),
        }
        for mode, runs in others.items()
    }
    found["peer_modes"] = {
        mode: {"peer": rounded(median(runs)), "peer_runs": [rounded(s.value) for s in runs]}
        for mode, runs in result.peer.items()
        if mode != result.peer_mode
    }
    found |= {"rounds": len(pk), "load": round(os.getloadavg()[1], 1)}
    found["at"] = datetime.now(UTC).isoformat(timespec="seconds")
    return found


def line(
    results: Sequence[Result], descriptions: Mapping[str, str], size_gb: float = 20.0
) -> dict[str, Any]:
    """Return the JSON line of a case: its first variant at the top, the others under their
    names.
    """
    case = results[0].case
    what = case.what.format(size_gb=size_gb)
    head = {"what": what, "against": case.against, "sides": dict(descriptions)}
    head["machine"] = machine()
    return _composed(case, {each.variant.name: facts(each) for each in results}, head)


def _composed(case: Case, by_variant: Mapping[str, Figures], head: Figures) -> dict[str, Any]:
    names = [each.name for each in case.variants if each.name in by_variant]
    whole: dict[str, Any] = {"name": case.name, **by_variant[names[0]]}
    whole |= {name: by_variant[name] for name in names[1:]}
    return whole | dict(head)


def _parts(whole: Figures) -> dict[str, Figures]:
    """Return the figures by variant: the inverse of `_composed`."""
    under = {
        name: part
        for name, part in whole.items()
        if isinstance(part, dict) and part.get("variant") == name
    }
    flat = {k: v for k, v in whole.items() if k not in under and k not in _HEAD}
    return {whole["variant"]: flat, **under}


def rows(lines: Sequence[Figures]) -> list[Row]:
    """Yield every variant of every line."""
    return [
        Row(str(head["name"]), variant, figures, head)
        for head in lines
        for variant, figures in _parts(head).items()
    ]


# -- the store -------------------------------------------------------------------------------------


def stored(path: Path) -> list[Figures]:
    """Return the lines of the store; none if there is no store."""
    if not path.exists():
        return []
    return [json.loads(text) for text in path.read_text().splitlines() if text.strip()]


def merged(old: Sequence[Figures], new: Sequence[Figures]) -> list[dict[str, Any]]:
    """Return `old` with the variants that `new` measured, in the order of the cases; removed cases
    are left out.
    """
    found: dict[str, dict[str, Any]] = {}
    for whole in (*old, *new):
        name = str(whole["name"])
        case = BY_NAME.get(name)
        if case is None:
            continue
        known = found.get(name, {})
        parts = {**(_parts(known) if known else {}), **_parts(whole)}
        valid = {each.name for each in case.variants}
        parts = {variant: part for variant, part in parts.items() if variant in valid}
        if parts:
            head = {key: whole[key] for key in _HEAD[1:]}
            head["sides"] = {**known.get("sides", {}), **whole["sides"]}
            found[name] = _composed(case, parts, head)
    return [found[name] for name in BY_NAME if name in found]


# -- a terminal ------------------------------------------------------------------------------------


def pair(figures: Figures, key: str, side: str) -> str:
    """Return client + server; a dash if nothing was counted."""
    both = figures[key][side]
    if not both["client"] and not both["server"]:
        return "–"
    digits = 2 if "cpu" in key else 0
    return f"{both['client']:.{digits}f} + {both['server']:.{digits}f}"


def floor(figures: Figures, name: str = "at_least") -> str:
    return f"{figures[name]:g}" if figures[name] else "–"


def most(figures: Figures) -> float:
    """Return the largest figure of pk that is allowed; 0 = any."""
    return float(figures.get("at_most", 0.0))  # older lines of the store have none


def goal(figures: Figures) -> str:
    """Return what must be reached: the ratio, and the largest figure of pk; a dash = nothing."""
    limit = f"pk ≤ {most(figures):g} {figures['unit']}" if most(figures) else ""
    parts = [f"{figures['at_least']:g}" if figures["at_least"] else "", limit]
    return ", ".join(part for part in parts if part) or "–"


def reached(figures: Figures) -> bool:
    """Return whether both goals are reached."""
    within = not most(figures) or figures["pk"] <= most(figures)
    return bool(figures["ratio"] >= figures["at_least"]) and within


def costs_cells(figures: Figures) -> list[str]:
    keys = ("cpu_s_per_m_records", "peak_rss_mb")
    return [pair(figures, key, side) for key in keys for side in ("pk", "peer")]


def table(lines: Sequence[Figures]) -> Any:
    """Return the table for people at a terminal."""
    from rich.table import Table

    made = Table(title="pk beside Apache Kafka", caption="medians; CPU and memory: client + server")
    left = ("benchmark", "variant", "unit")
    numbers = ("pk", "peer", "ratio", "at least", "CPU s / M: pk", "peer", "MB: pk", "peer")
    for column in (*left, *numbers):
        made.add_column(column, justify="left" if column in left else "right")
    for row in rows(lines):
        figures = row.figures
        colour = "green" if reached(figures) else "red"
        cells = [row.name, row.variant, str(figures["unit"])]
        cells += [f"{figures['pk']:,}", f"{figures['peer']:,}"]
        cells += [f"[{colour}]{figures['ratio']:.2f}[/]", goal(figures)]
        made.add_row(*cells, *costs_cells(figures))
    return made
