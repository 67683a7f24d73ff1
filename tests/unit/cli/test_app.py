"""The root of the command line: the listed commands, and how failures reach people and scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec

import pytest
import typer

import pk
from pk import errors
from pk.cli import app

Behaviour = Callable[[], None]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Behaviour], None]:
    """Replace the body of `pk log` by a function."""

    def install(behaviour: Behaviour) -> None:
        module = types.ModuleType("pk.cli.log")
        module.__spec__ = ModuleSpec("pk.cli.log", None)
        module.app = typer.Typer()

        @module.app.command()
        def only(json: bool = typer.Option(False, "--json")) -> None:
            behaviour()

        monkeypatch.setitem(sys.modules, "pk.cli.log", module)

    return install


def raiser(error: BaseException) -> Behaviour:
    def behaviour() -> None:
        raise error

    return behaviour


def test_version_and_help_need_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["--version"]) == 0
    assert capsys.readouterr().out == f"pk {pk.__version__}\n"
    assert app.run([]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in app.available())


def test_what_is_not_built_is_neither_listed_nor_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(app, "COMMANDS", {**app.COMMANDS, "rebalance": "not in this build"})
    assert "rebalance" not in app.help_text()
    assert app.run(["rebalance", "describe"]) == 2
    assert "no command 'rebalance'" in capsys.readouterr().err


def test_a_typo_gets_the_nearest_name(
    command: Callable[[Behaviour], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command(lambda: None)
    assert app.run(["lgo"]) == 2
    assert "did you mean log?" in capsys.readouterr().err


def test_a_pk_error_is_one_line_that_says_who_acts(
    command: Callable[[Behaviour], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command(raiser(errors.DirectoryLocked("/data is\nlocked")))
    assert app.run(["log"]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == "error: /data is locked (the operator of the server must act)\n"


def test_a_pk_error_as_json(
    command: Callable[[Behaviour], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command(raiser(errors.OffsetOutOfRange("offset 9", end="7")))
    assert app.run(["log", "--json"]) == 1
    told = capsys.readouterr()
    assert told.err == ""
    assert json.loads(told.out) == {
        "error": {
            "code": 1,
            "name": "OffsetOutOfRange",
            "message": "offset 9",
            "acts": "user",
            "retriable": False,
            "details": {"end": "7"},
        }
    }


def test_a_missing_topic_is_not_to_be_tried_again(
    command: Callable[[Behaviour], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command(raiser(errors.UnknownTopicOrPartition("no topic nope")))
    assert app.run(["log"]) == 1
    hint = "check the name and number: pk topics describe"
    assert capsys.readouterr().err == f"error: no topic nope ({hint})\n"


def test_stdout_of_consume_holds_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe into `pk produce --json` would take it for a record."""
    assert app.run(["consume", "flights", "--json", "--grep", "("]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("error: --grep '('")


def test_the_help_shows_a_tab_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["consume", "--help"]) == 0
    assert r"a tab, \t" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("behaviour", "code"),
    [
        (lambda: None, 0),
        (raiser(KeyboardInterrupt()), app.INTERRUPTED),
        (raiser(typer.Exit(3)), 3),
        (raiser(SystemExit(4)), 4),
    ],
)
def test_exit_codes(command: Callable[[Behaviour], None], behaviour: Behaviour, code: int) -> None:
    command(behaviour)
    assert app.run(["log"]) == code


def test_wrong_usage_is_two(command: Callable[[Behaviour], None]) -> None:
    command(lambda: None)
    assert app.run(["log", "--nonsense"]) == 2


def test_a_bug_keeps_its_traceback(command: Callable[[Behaviour], None]) -> None:
    command(raiser(ZeroDivisionError("ours")))
    with pytest.raises(ZeroDivisionError):
        app.run(["log"])


def test_everybody_who_must_act_has_words() -> None:
    assert {kind.acts for kind in errors.BY_CODE.values()} | {"pk"} <= set(app.WHO_ACTS)


def test_the_script_is_installed() -> None:
    code = "import sys; sys.argv[1:] = ['--version']; from pk.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.split()[0]) == (0, "pk")


#: `pk log` prints without a `quiet_end`, which click answers with exit 1 when the pipe is closed.
ECHO = """
import sys, types, typer
from importlib.machinery import ModuleSpec
from pk.cli.app import run
module = types.ModuleType("pk.cli.log")
module.__spec__ = ModuleSpec("pk.cli.log", None)
module.app = typer.Typer()
module.app.command()(lambda: typer.echo("x" * 100_000))
sys.modules["pk.cli.log"] = module
sys.exit(run(["log"]))
"""


@pytest.mark.parametrize(
    "command", [["-m", "pk.cli", "version"], ["-m", "pk.cli", "--help"], ["-c", ECHO]]
)
def test_a_closed_pipe_ends_a_command_without_a_word(command: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, *command], stdout=writing, stderr=subprocess.PIPE, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (app.BROKEN_PIPE, b"")


@pytest.mark.parametrize(
    "command", [["version"], ["--help"], ["topics", "create", "--help"], ["topics"]]
)
def test_a_full_disk_below_stdout_is_named(command: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pk.cli", *command],
            stdout=full, stderr=subprocess.PIPE, check=False,
        )  # fmt: skip
    assert done.stderr == b"error: cannot write: No space left on device (make room on the disk)\n"
    assert done.returncode == 1
