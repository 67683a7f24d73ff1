"""Each `pk …` command line in the documents names commands and options that exist."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from pk.cli import completion
from pk.cli.app import COMMANDS

ROOT = Path(__file__).parents[3]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`(pk [^`]+)`")
_LINE = re.compile(r"^\s*(pk [^\n#|]+)", re.MULTILINE)
#: The options before the subcommand, and how many words follow them.
_LEADING = {"--bootstrap": 1, "--profile": 1}


def command_lines(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command line of a page."""
    text = page.read_text()
    blocks = "\n".join(_BLOCK.findall(text))
    for line in [*_SPAN.findall(_BLOCK.sub("", text)), *_LINE.findall(blocks)]:
        words = line.split()[1:]
        while words and words[0] in _LEADING:
            words = words[1 + _LEADING[words[0]] :]
        if words and re.fullmatch(r"[a-z][a-z-]*", words[0]):
            yield words


@pytest.fixture(scope="module")
def root() -> Any:
    return typer.main.get_command(completion.root(COMMANDS))


def problem(root: Any, words: list[str]) -> str | None:
    """Return what is wrong with a command line; None = it exists."""
    command, rest = root, list(words)
    while hasattr(command, "commands"):
        if not rest or not re.fullmatch(r"[a-z][a-z-]*", rest[0]):
            break
        found = command.commands.get(rest[0])
        if found is None:
            return f"{rest[0]!r} is no command" if command is root else f"{rest[0]!r} is unknown"
        command = found
        rest.pop(0)
    known = {"--help", "--install-completion", "--show-completion", "--version"}
    known |= {name for each in command.params for name in each.opts}
    for word in rest:
        if word in ("|", ";", "&&"):
            break
        name = re.match(r"--[a-z][a-z-]*", word)
        if name and not hasattr(command, "commands") and name[0] not in known:
            return f"no option {name[0]}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_a_page_exist(root: Any, page: Path) -> None:
    wrong = [
        f"pk {' '.join(words)}: {what}"
        for words in command_lines(page)
        if (what := problem(root, words)) is not None
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_the_check_finds_mistakes(root: Any) -> None:
    assert problem(root, ["topics", "describe", "t", "--all-configs"]) is None
    assert problem(root, ["topic", "list"]) == "'topic' is no command"
    assert problem(root, ["topics", "show"]) == "'show' is unknown"
    assert problem(root, ["consume", "t", "--tial", "3"]) == "no option --tial"
    listed = list(command_lines(ROOT / "docs" / "from-kafka.md"))
    assert ["topics", "list"] in listed
    assert len(listed) > 20


def commands(command: Any, *path: str) -> Iterator[tuple[list[str], str]]:
    """Yield the words of each command and its help."""
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, *path, name)
    if not hasattr(command, "commands"):
        yield list(path), inspect.getdoc(command.callback) or ""


def test_the_help_of_each_command_has_an_example_that_exists(root: Any) -> None:
    found = dict.fromkeys(" ".join(path) for path, _ in commands(root))
    assert len(found) > 50
    for path, text in commands(root):
        line = re.search(r"^Examples?: (?:.*\| )?pk (.+)$", text, re.MULTILINE)
        assert line is not None, path
        words = line[1].split(" > ")[0].split()
        assert words[: len(path)] == path
        assert problem(root, words) is None, words
