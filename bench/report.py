"""What a measurement says: one JSON line, a rich table, and the page docs/bench.md."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.cases import BY_NAME, Result, median
from bench.runs import Sample


def machine() -> dict[str, Any]:
    """The machine in the words of the kernel."""
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
        "load": round(os.getloadavg()[1], 1),
    }


def costs(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """CPU seconds per million records and peak memory, client and server apart; medians."""

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
    """Rates whole, latencies to microseconds."""
    return round(value) if value >= 1000 else round(value, 3)


def facts(result: Result) -> dict[str, Any]:
    """One compression's figures."""
    case = result.case
    pk, peer = result.pk[case.pk_modes[0]], result.peer[result.peer_mode]
    pk_costs, peer_costs = costs(pk), costs(peer)
    found: dict[str, Any] = {
        "pk": rounded(median(pk)),
        "peer": rounded(median(peer)),
        "ratio": round(result.ratio, 2),
        "pk_runs": [rounded(sample.value) for sample in pk],
        "peer_runs": [rounded(sample.value) for sample in peer],
        "peer_client": result.peer_mode,
        "compression": result.compression,
    }
    for key in ("cpu_s_per_m_records", "peak_rss_mb"):
        found[key] = {"pk": pk_costs[key], "peer": peer_costs[key]}
    for mode in case.pk_modes[1:]:
        found[mode] = {
            "pk": rounded(median(result.pk[mode])),
            "pk_runs": [rounded(s.value) for s in result.pk[mode]],
        }
    for mode in result.peer:
        if mode != result.peer_mode:
            found[f"peer_{mode}"] = rounded(median(result.peer[mode]))
    return found


def line(results: Sequence[Result], descriptions: Mapping[str, str]) -> dict[str, Any]:
    """The JSON line of a case: the first codec at the top, the others under their names."""
    case = results[0].case
    first, *others = results
    head = {"name": case.name, "unit": case.unit, **facts(first)}
    head |= {result.compression: facts(result) for result in others}
    head |= {"at_least": case.least, "aim": case.aim, "rounds": len(first.pk[case.pk_modes[0]])}
    head |= {
        "what": case.what,
        "against": case.against,
        "sides": dict(descriptions),
        "machine": machine(),
    }
    head["at"] = datetime.now(UTC).isoformat(timespec="seconds")
    return head


def blocks(
    lines: Sequence[Mapping[str, Any]],
) -> list[tuple[str, str, Mapping[str, Any], Mapping[str, Any]]]:
    """(name, compression, figures, head) of every compression of every line."""
    found = []
    for head in lines:
        found.append((str(head["name"]), str(head["compression"]), head, head))
        found += [
            (str(head["name"]), name, part, head)
            for name, part in head.items()
            if isinstance(part, dict) and part.get("compression") == name
        ]
    return found


def _pair(figures: Mapping[str, Any], key: str, side: str) -> str:
    both = figures[key][side]
    return (
        f"{both['client']:.2f} + {both['server']:.2f}"
        if "cpu" in key
        else f"{both['client']:.0f} + {both['server']:.0f}"
    )


def table(lines: Sequence[Mapping[str, Any]]) -> Any:
    """For people at a terminal."""
    from rich.table import Table

    made = Table(title="pk beside Apache Kafka", caption="medians; CPU and memory: client + server")
    for column in (
        "benchmark",
        "codec",
        "unit",
        "pk",
        "Kafka",
        "ratio",
        "at least",
        "CPU s / M: pk",
        "Kafka",
        "MB: pk",
        "Kafka",
    ):
        made.add_column(
            column, justify="left" if column in ("benchmark", "codec", "unit") else "right"
        )
    for name, compression, figures, head in blocks(lines):
        colour = "green" if figures["ratio"] >= head["at_least"] else "red"
        cells = [name, compression, str(head["unit"]), f"{figures['pk']:,}", f"{figures['peer']:,}"]
        cells += [f"[{colour}]{figures['ratio']:.2f}[/]", f"{head['at_least']:g}"]
        made.add_row(*cells, *_costs_cells(figures))
    return made


def _costs_cells(figures: Mapping[str, Any]) -> list[str]:
    keys = ("cpu_s_per_m_records", "peak_rss_mb")
    return [_pair(figures, key, side) for key in keys for side in ("pk", "peer")]


_INTRODUCTION = """# pk beside Apache Kafka

Made by `make bench` (`python -m bench all --write docs/bench.md`); how a figure is made stands in
`bench/__init__.py`.

Measured {at} on {cores} cores of {cpu}, {memory_gb} GB, Linux {kernel}, Python {python}.  Broker
and client share the machine on both sides; ratios matter, not absolutes.  Figures are medians of
{rounds} interleaved rounds; costs are client + server.  The load average of the last five minutes
was {load}; the benchmark itself makes about 2.
"""

_COLUMNS = ("benchmark", "codec", "pk", "Kafka", "ratio", "at least")
_COST_COLUMNS = ("CPU s / M records: pk", "Kafka", "peak MB: pk", "Kafka")


def page(lines: Sequence[Mapping[str, Any]]) -> str:
    """docs/bench.md from the JSON lines of a run."""
    head = lines[0]
    words = [_INTRODUCTION.format(at=head["at"], rounds=head["rounds"], **head["machine"])]
    words += [*(f"- **{name}**: {text}" for name, text in head["sides"].items()), ""]
    columns = (*_COLUMNS, *_COST_COLUMNS)
    words += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, compression, figures, whole in blocks(lines):
        cells = [name, compression, f"{figures['pk']:,} {whole['unit']}", f"{figures['peer']:,}"]
        cells += [f"**{figures['ratio']:.2f}**", f"{whole['at_least']:g}", *_costs_cells(figures)]
        words.append(f"| {' | '.join(cells)} |")
    words += ["", "What each is, and every run:", ""]
    words += [_runs_line(*block) for block in blocks(lines)]
    return "\n".join(words) + "\n"


def _runs_line(
    name: str, compression: str, figures: Mapping[str, Any], head: Mapping[str, Any]
) -> str:
    runs = f"pk {_runs(figures['pk_runs'])}; Kafka {_runs(figures['peer_runs'])}"
    for mode in BY_NAME[name].pk_modes[1:]:
        if mode in figures:
            runs += f"; pk {mode} {_runs(figures[mode]['pk_runs'])}"
    what = f"{head['what']}, against {head['against']}"
    return f"- {name}, {compression}: {what}. Runs ({head['unit']}): {runs}."


def _runs(numbers: Sequence[float]) -> str:
    return ", ".join(
        f"{number / 1e6:.2f} M" if number > 1e5 else f"{number:g}" for number in numbers
    )


def write_page(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """The page, and the lines it was made from beside it."""
    path.write_text(page(lines))
    path.with_suffix(".jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
