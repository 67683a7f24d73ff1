"""The documentation site is built without a warning, and a browser needs no other host for it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOREIGN = re.compile(
    r'<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"'
)


@pytest.mark.integration
def test_the_site_is_whole_and_needs_no_network(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    pages = {
        path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*.html")
    }
    assert {"index.html", "settings.html", "design/0001-interfaces.html"} <= set(pages)
    foreign = [found for text in pages.values() for found in FOREIGN.findall(text)]
    assert not foreign
    assert 'id="pk-topics-create"' in pages["commands.html"]
    assert "Example:" not in pages["commands.html"], "an example is a code block"
    assert "pk_spark_lag" in pages["metrics.html"]
    # the theme's script would load Mermaid from another host for such an element, and its text is
    # no picture
    assert not [name for name, text in pages.items() if "mermaid" in text]
    for name, picture in [("index.html", "overview.svg"), ("ARCHITECTURE.html", "processes.svg")]:
        assert f'src="{picture}"' in pages[name]
        assert (tmp_path / picture).is_file()
