"""Runs the notebooks, each in a fresh kernel, and writes them as HTML with their pictures.

    python notebooks/run.py [NAME …] [--into build/notebooks]
    python notebooks/run.py --clean

NAME: a part of a file's name, such as `01`; without names, all notebooks run.  `--clean` removes
the outputs of the files in this folder, as they are committed; it runs nothing.

Exit 1 = a cell raised, or a closing assertion failed.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
#: What a committed notebook says about its kernel.
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
CELL_TIMEOUT_S = 600
#: The lines of an error that a reader needs.
TAIL_LINES = 15


def paths(names: Sequence[str] = ()) -> list[Path]:
    """Return the notebooks whose name contains one of `names`, in order; all without names."""
    found = sorted(FOLDER.glob("[0-9]*.ipynb"))
    return [path for path in found if not names or any(name in path.name for name in names)]


def cleaned(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return the notebook without outputs, with this project's metadata and ids in order."""
    cells = []
    for number, cell in enumerate(notebook["cells"], 1):
        tags = cell.get("metadata", {}).get("tags")
        kept = {
            "cell_type": cell["cell_type"],
            "id": f"cell-{number:02d}",
            "metadata": {"tags": tags} if tags else {},
            "source": cell["source"],
        }
        if cell["cell_type"] == "code":
            kept |= {"execution_count": None, "outputs": []}
        cells.append(kept)
    return {"cells": cells, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}


def text_of(notebook: dict[str, Any]) -> str:
    """Return the text of a notebook's file."""
    return json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def run(path: Path, into: Path) -> str:
    """Run a notebook in a fresh kernel and write `<name>.html` and its pictures.

    Returns the end of the error, or "" if every cell ran.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError
    from nbconvert import HTMLExporter

    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(into)}}
    problem = ""
    try:
        NotebookClient(notebook, timeout=CELL_TIMEOUT_S, resources=place).execute()
    except CellExecutionError as cause:
        problem = "\n".join(str(cause).rstrip().splitlines()[-TAIL_LINES:])
    (into / f"{path.stem}.html").write_text(HTMLExporter().from_notebook_node(notebook)[0])
    outputs = [each for cell in notebook.cells for each in cell.get("outputs", ())]
    shown = [each.data["image/png"] for each in outputs if "image/png" in each.get("data", {})]
    for number, picture in enumerate(shown, 1):
        (into / f"{path.stem}-{number}.png").write_bytes(base64.b64decode(picture))
    return problem


def main(arguments: Sequence[str] | None = None) -> int:
    """Run or clean the notebooks; return the exit code."""
    parser = argparse.ArgumentParser(description="Run the notebooks, each in a fresh kernel.")
    parser.add_argument("names", nargs="*", help="parts of file names; without them, all")
    parser.add_argument("--into", type=Path, default=FOLDER.parent / "build" / "notebooks")
    parser.add_argument("--clean", action="store_true", help="only remove outputs, in place")
    given = parser.parse_args(arguments)
    failed = False
    for path in paths(given.names):
        if given.clean:
            path.write_text(text_of(cleaned(json.loads(path.read_text()))))
            continue
        given.into.mkdir(parents=True, exist_ok=True)
        problem = run(path, given.into)
        failed = failed or bool(problem)
        print(f"{path.name}: {problem or 'ok'} ({given.into / path.stem}.html)", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
