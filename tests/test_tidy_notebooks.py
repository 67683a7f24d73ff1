"""The committed notebooks have no outputs, no editor's metadata, and are listed in their README.

`python notebooks/run.py --clean` mends the first two.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from notebooks.run import FOLDER, cleaned, paths, text_of
from tests.test_links import broken
from tests.test_tidy_prose import CONSTRUCTION


@pytest.mark.parametrize("path", paths(), ids=lambda path: path.stem)
def test_a_notebook_is_clean(path: Path) -> None:
    text = path.read_text()
    assert text == text_of(cleaned(json.loads(text))), "python notebooks/run.py --clean"


@pytest.mark.parametrize("path", paths(), ids=lambda path: path.stem)
def test_the_prose_of_a_notebook_is_plain(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    text = " ".join("".join(each["source"]) for each in cells)
    assert not CONSTRUCTION.findall(" ".join(text.split()))


@pytest.mark.parametrize("path", paths(), ids=lambda path: path.stem)
def test_links_of_a_notebook_lead_somewhere(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    pages = ["".join(each["source"]) for each in cells if each["cell_type"] == "markdown"]
    assert broken(path, "\n".join(pages)) == []


def test_the_readme_lists_every_notebook() -> None:
    readme = (FOLDER / "README.md").read_text()
    assert [path.name for path in paths() if f"]({path.name})" not in readme] == []


def test_outputs_counts_and_foreign_metadata_are_removed() -> None:
    path = paths()[0]
    clean = json.loads(path.read_text())
    dirty = copy.deepcopy(clean)
    code = next(each for each in dirty["cells"] if each["cell_type"] == "code")
    code |= {"outputs": [{"output_type": "stream"}], "execution_count": 3, "id": "f00"}
    code["metadata"]["collapsed"] = False
    dirty["metadata"]["language_info"]["version"] = "3.13.1"
    assert cleaned(dirty) == clean
