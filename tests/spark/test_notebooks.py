"""Runs the cells of every notebook, in this process and with the session of the Spark tests.

A fresh kernel for each notebook would start a JVM for each; `make notebooks` does that.  Here the
notebooks get less data: the test changes the variables of the cell with the tag `parameters`, right
after that cell has run.  Each notebook ends with assertions about its own result.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from notebooks.run import paths
from pk.cli.embedded import EmbeddedCluster, EmbeddedServer

#: The variables of each notebook that the test changes.
SMALL: dict[str, dict[str, Any]] = {
    "01_first_stream": {"FLIGHTS": 2_000},
    "02_exactly_once": {"FLIGHTS": 1_200, "BATCHES": 3},
    "03_topic_as_table": {"FLIGHTS": 2_000, "REPEATS": 1},
    "04_maintenance": {"FLIGHTS": 3_000, "RETIRED": 20},
    "05_operating_a_cluster": {"RATE": 200, "SECONDS": 0.5},
    "06_tuning_the_producer": {"RECORDS": 3_000, "RATE": 1_000, "SECONDS": 0.3},
    "07_consumer_groups": {"RATE": 200, "SECONDS": 0.5},
}


def run_cells(name: str, cells: list[dict[str, Any]], given: dict[str, Any]) -> dict[str, Any]:
    """Run the code cells in their order; return the variables at the end."""
    variables: dict[str, Any] = {"__name__": "__main__"}
    changed = False
    try:
        for number, cell in enumerate(cells, 1):
            if cell["cell_type"] != "code":
                continue
            exec(compile("".join(cell["source"]), f"{name}[{number}]", "exec"), variables)
            if "parameters" in cell["metadata"].get("tags", ()):
                assert given.keys() <= variables.keys(), "the cell lacks a parameter"
                variables.update(given)
                changed = True
    finally:
        if "ended" in variables:  # the threads of a notebook that failed
            variables["ended"].set()
        for process in variables.get("members", {}).values():
            process.kill()
        for each in list(variables.values()):
            if isinstance(each, EmbeddedServer | EmbeddedCluster):
                each.stop()
    assert changed or not given, "no cell has the tag parameters"
    return variables


@pytest.fixture
def quietly(spark, monkeypatch, tmp_path):
    """Leave the shared session as it was, and draw pictures without a screen."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    monkeypatch.chdir(tmp_path)
    before = spark.conf.getAll
    yield
    pyplot.close("all")
    for query in spark.streams.active:
        query.stop()
    for name, value in spark.conf.getAll.items():
        if name.startswith(("spark.sql.", "spark.databricks.")) and name not in before:
            spark.conf.unset(name)
        elif name.startswith("spark.sql.") and before[name] != value:
            spark.conf.set(name, before[name])
    spark.sparkContext.setLogLevel("ERROR")


@pytest.mark.parametrize("path", paths(), ids=lambda path: path.stem)
def test_a_notebook_runs_to_its_end(path: Path, quietly) -> None:
    from matplotlib import pyplot

    run_cells(path.stem, json.loads(path.read_text())["cells"], SMALL[path.stem])
    assert pyplot.get_fignums(), "the notebook draws nothing"


def cell(source: str, *tags: str) -> dict[str, Any]:
    return {"cell_type": "code", "metadata": {"tags": list(tags)}, "source": [source]}


def test_a_failing_cell_is_noticed_and_parameters_are_changed() -> None:
    cells = [cell("n = 10", "parameters"), cell("assert n == 10")]
    assert run_cells("good", cells, {})["n"] == 10
    with pytest.raises(AssertionError):
        run_cells("bad", cells, {"n": 11})
    with pytest.raises(AssertionError, match="lacks a parameter"):
        run_cells("other", cells, {"m": 1})
    with pytest.raises(AssertionError, match="no cell has the tag"):
        run_cells("untagged", [cell("n = 10")], {"n": 1})
