"""Makes the documentation site from the pages of the repository (mkdocs.yml, `make docs-site`).

The pages are written for a reader of the repository, with links to files and in GitHub's Markdown.
This hook of mkdocs makes them fit for the site:

  - The pages outside docs/ (README, CHANGELOG …) and the generated ones are added to docs/.
  - A link to a page of the site stays a link.  A link to any other file becomes the file's path,
    because the site has no address of the repository.
  - Lists get the layout that Python-Markdown wants: four columns for each level, and an empty line
    before the first item.  Headings have the ids that GitHub gives them.

Pictures are SVG files of the repository.  Mermaid is not used: drawing its diagrams needs a script
from another host.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import site_reference
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent

#: Pages of the repository that are not in docs/, and their names in the site.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "notebooks/README.md": "notebooks.md",
    "examples/monitoring/README.md": "monitoring.md",
    "examples/deploy/README.md": "deploy.md",
}
#: Pages that are made when the site is built.
MADE = {
    "commands.md": site_reference.commands_page,
    "metrics.md": site_reference.metrics_page,
}
#: Folders that links name, and the page that is shown for each.
FOLDERS = {"docs/design": "design/0001-interfaces.md"}
PICTURES = (".png", ".svg")

LINK = re.compile(r"(`[^`]*`)|(!?\[((?:\\.|[^\]\\])*)\]\(([^)\s]+)\))")
ITEM = re.compile(r"(?:[-*+]|\d+\.) ")


def on_config(config: Any) -> Any:
    """Give headings GitHub's ids, and list the pages of decisions in the navigation."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = heading_id
    designs = sorted(path.name for path in (ROOT / "docs" / "design").glob("[0-9]*.md"))
    for section in config.nav:
        for entry in next(iter(section.values())):
            if isinstance(entry, dict) and entry.get("Decisions") == "design/":
                entry["Decisions"] = [f"design/{name}" for name in designs]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and pictures that are not in docs/."""
    for source, name in PAGES.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    for name, page in MADE.items():
        files.append(File.generated(config, name, content=page()))
    for path in sorted((ROOT / "notebooks" / "pictures").glob("*.png")):
        name = f"pictures/{path.name}"
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the text of a page as Python-Markdown reads it."""
    name = page.file.src_uri
    if name in MADE:
        return markdown
    source = {made: source for source, made in PAGES.items()}.get(name, f"docs/{name}")
    return for_python_markdown(markdown, source, name)


def heading_id(heading: str, separator: str) -> str:
    """Return the id that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", separator)


def for_python_markdown(text: str, source: str, name: str) -> str:
    """Return GitHub's Markdown with links and lists as the site needs them; code is unchanged.

    source: the page's path in the repository.  name: its path in the site.
    """
    lines: list[str] = []
    fence: str | None = None  # the indentation of the code block that is open
    before = ""
    for line in text.splitlines():
        bare = line.lstrip(" ")
        indent = line[: len(line) - len(bare)]
        if bare.startswith("```"):
            fence = indent if fence is None else None
            lines.append(indent + line)
        elif fence is not None:
            lines.append(fence + line if line.strip() else "")
        else:
            if ITEM.match(bare) and not indent and before and not _in_list(before):
                lines.append("")
            lines.append(indent + relinked(line, source, name))
        before = line
    return "\n".join(lines) + "\n"


def _in_list(line: str) -> bool:
    return line.startswith(" ") or ITEM.match(line) is not None


def relinked(line: str, source: str, name: str) -> str:
    """Return a line whose links lead to pages of the site, or name files of the repository."""

    def link(found: re.Match[str]) -> str:
        code, whole, words, target = found.groups()
        if code is not None or "://" in target or target.startswith(("#", "mailto:")):
            return found[0]
        path, _, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        place = in_site(path)
        if place is None:
            return f"`{path}`" if _names(words, path) else f"{words} (`{path}`)"
        relative = posixpath.relpath(place, posixpath.dirname(name) or ".")
        mark = "!" if whole.startswith("!") else ""
        return f"{mark}[{words}]({relative}{f'#{anchor}' if anchor else ''})"

    return LINK.sub(link, line)


def in_site(path: str) -> str | None:
    """Return where a file of the repository is in the site; None if it is not there."""
    if path in PAGES:
        return PAGES[path]
    if path in FOLDERS:
        return FOLDERS[path]
    if path.startswith("notebooks/pictures/"):
        return path.removeprefix("notebooks/")
    inside = path.startswith("docs/") and path.endswith((".md", *PICTURES))
    return path.removeprefix("docs/") if inside else None


def _names(words: str, path: str) -> bool:
    plain = words.replace("\\", "").strip("`").rstrip("/")
    return path.endswith(plain)
