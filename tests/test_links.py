"""Every relative link of a Markdown page leads to a file, and to a heading where it names one."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+\s+(.+?)\s*$", re.MULTILINE)


def pages() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return sorted(set(listed.stdout.split()))


def anchors(text: str) -> set[str]:
    """The ids that GitHub gives to the headings of a page."""
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(text))
    return {each.replace(" ", "-") for each in kept}


def broken(page: Path, text: str) -> list[str]:
    """The links of `page` that lead nowhere.  Links to other hosts are not followed."""
    found = []
    for target in LINK.findall(FENCE.sub("", text)):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name) if name else page
        names_heading = anchor and file.suffix == ".md"
        if not file.exists() or (names_heading and anchor not in anchors(file.read_text())):
            found.append(target)
    return found


@pytest.mark.parametrize("page", pages())
def test_links_of_a_page_lead_somewhere(page: str) -> None:
    assert broken(ROOT / page, (ROOT / page).read_text()) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = "# One two\n[a](page.md) [b](gone.md) [c](#one-two) [d](#three) [e](https://x.org/y)\n"
    page.write_text(text)
    assert broken(page, text) == ["gone.md", "#three"]
