"""The documentation site has every page, and its hook keeps their meaning (docs/site_hook.py)."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import pytest
import yaml

from tests.test_tidy import ROOT


@pytest.fixture(scope="module")
def hook() -> Any:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return import_module("site_hook")
    finally:
        sys.path.pop(0)


def pages_of(nav: list[Any]) -> list[str]:
    found = []
    for entry in nav:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        found += pages_of(value) if isinstance(value, list) else [value]
    return found


def missing(nav: list[Any], names: set[str]) -> set[str]:
    return names - set(pages_of(nav))


def test_every_page_of_docs_is_in_the_navigation(hook: Any) -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    there = {path.name for path in (ROOT / "docs").glob("*.md")}
    made = set(hook.PAGES.values()) | set(hook.MADE)
    assert not missing(nav, there | made | {"design/"})
    assert len(pages_of(nav)) == len(set(pages_of(nav)))
    assert missing(nav, {"forgotten.md"}) == {"forgotten.md"}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("see [a](docs/errors.md#x)", "see [a](errors.md#x)"),
        ("[c](CONTRIBUTING.md) ![p](docs/bench.svg)", "[c](contributing.md) ![p](bench.svg)"),
        ("[o](https://x.org/y) [h](#here)", "[o](https://x.org/y) [h](#here)"),
        ("[src/pk/clock.py](src/pk/clock.py)", "`src/pk/clock.py`"),
        ("[the clock](src/pk/clock.py)", "the clock (`src/pk/clock.py`)"),
        ("`[a](docs/errors.md)`", "`[a](docs/errors.md)`"),
    ],
)
def test_links_lead_to_pages_or_name_files(hook: Any, line: str, found: str) -> None:
    assert hook.relinked(line, "README.md", "index.md") == found


def test_links_between_folders(hook: Any) -> None:
    assert (
        hook.relinked("[p](../PROTOCOL.md)", "docs/design/0001-interfaces.md", "design/0001.md")
        == "[p](../PROTOCOL.md)"
    )
    assert hook.relinked("[r](../README.md#a)", "docs/x.md", "x.md") == "[r](index.md#a)"
    assert (
        hook.relinked(r"[sim/\_\_main\_\_.py](../sim/__main__.py)", "docs/x.md", "x.md")
        == "`sim/__main__.py`"
    )


def test_lists_are_laid_out_as_python_markdown_reads_them(hook: Any) -> None:
    text = (
        "words\n- a\n  more\n  - b\n    - c\n\n  ```\n  x\n    y\n  ```\n```\n- [a](b)\n  z\n```\n"
    )
    assert hook.for_python_markdown(text, "README.md", "index.md") == (
        "words\n\n- a\n    more\n    - b\n        - c\n\n"
        "    ```\n    x\n      y\n    ```\n```\n- [a](b)\n  z\n```\n"
    )
    assert hook.heading_id("12. Spark – `a_b`", "-") == "12-spark--a_b"
