"""The address of a command: options before the subcommand, environment, profiles."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import typer

from pk import errors
from pk.cli import completion, profiles
from pk.cli.app import NO_ADDRESS, available, run

TEXT = """
profile = "dev"
[profiles.dev]
bootstrap = "dev:1"
[profiles.prod]
bootstrap = "a:1,b:1"
[profiles.odd]
port = 5
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "pk").mkdir()
    (tmp_path / "pk" / "config.toml").write_text(TEXT)
    return {"XDG_CONFIG_HOME": str(tmp_path)}


def test_what_is_nearer_to_the_command_counts(environ: dict[str, str]) -> None:
    assert profiles.bootstrap(environ) == "dev:1"
    assert profiles.bootstrap({**environ, "PK_PROFILE": "prod"}) == "a:1,b:1"
    both = {**environ, "PK_PROFILE": "prod", "PK_BOOTSTRAP": "e:1"}
    assert profiles.bootstrap(both) == "e:1"
    assert profiles.bootstrap(both, profile="prod") == "a:1,b:1"
    assert profiles.bootstrap(both, given="o:1") == "o:1"
    assert profiles.bootstrap({"XDG_CONFIG_HOME": "/nonexistent"}) is None


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ("nope", "has no profile 'nope'; there are: dev, prod, odd"),
        ("odd", "profile odd has an unknown setting port"),
    ],
)
def test_a_profile_that_is_not_whole_is_refused(
    environ: dict[str, str], profile: str, words: str
) -> None:
    with pytest.raises(errors.InvalidConfig, match=words):
        profiles.bootstrap(environ, profile=profile)
    with pytest.raises(errors.InvalidOption, match="contradict"):
        profiles.bootstrap(environ, "h:1", profile)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("profile = ", "is not TOML"),
        ("server = 1", r"unknown setting server; there are profile and \[profiles.NAME\]"),
        ("profile = ['a']", "profile is the name of one of the profiles"),
        ("profiles = 1", r"\[profiles.NAME\]"),
        ("[profiles]\ndev = 1", r"\[profiles.NAME\]"),
        ('profile = "a"\n[profiles.a]', "needs bootstrap"),
    ],
)
def test_a_file_with_mistakes_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(errors.InvalidConfig, match=words) as told:
        profiles.bootstrap({"PK_CONFIG": str(path)})
    assert str(path) in str(told.value)


def test_a_file_that_was_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidConfig, match="No such file"):
        profiles.bootstrap({"PK_CONFIG": str(tmp_path / "none.toml")})
    with pytest.raises(errors.InvalidConfig, match="Is a directory"):
        profiles.bootstrap({"PK_CONFIG": str(tmp_path)})


def test_a_user_may_have_no_home_or_one_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(_path: object) -> bool:
        raise PermissionError(13, "Permission denied")

    def homeless(_user: object) -> object:
        raise KeyError("no such user")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", refused)
        patch.setattr(Path, "read_text", refused)
        with pytest.raises(errors.InvalidConfig, match="Permission denied"):
            profiles.bootstrap({"XDG_CONFIG_HOME": "/home/other"})
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", homeless)
    assert profiles.bootstrap({}) is None


@pytest.mark.parametrize(
    "words",
    [
        ["version"],
        ["--help"],
        ["topics", "--help"],
        ["topics", "list", "--help"],
        ["topics", "list", "--bootstrap=127.0.0.1:1", "--timeout-ms", "100ms"],
        ["topics", "--bootstrap", "127.0.0.1:1", "list", "--timeout-ms", "100ms"],
    ],
)
def test_a_file_with_mistakes_stops_no_command_that_needs_none(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "c.toml").write_text("broken [[")
    monkeypatch.setenv("PK_CONFIG", str(tmp_path / "c.toml"))
    monkeypatch.delenv("PK_BOOTSTRAP", raising=False)
    run(words)
    assert "c.toml" not in capsys.readouterr().err
    assert run(["topics", "list", "--json"]) == 1
    assert "c.toml" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_commands_without_an_address_are_known() -> None:
    def asks(command: Any) -> bool:
        if hasattr(command, "commands"):
            return any(asks(each) for each in command.commands.values())
        return any("PK_BOOTSTRAP" in (each.envvar or "") for each in command.params)

    whole: Any = typer.main.get_command(completion.root(available()))
    without = {name for name, each in whole.commands.items() if not asks(each)}
    assert without == NO_ADDRESS


@pytest.mark.parametrize(
    "words",
    [
        ["--bootstrap", "h:7", "topics", "list"],
        ["--bootstrap=h:7", "topics", "list"],
        ["topics", "--bootstrap", "h:7", "list"],
        ["topics", "list", "--bootstrap", "h:7"],
        ["consume", "t", "--bootstrap", "h:7"],
    ],
)
def test_an_address_stands_before_or_behind_the_subcommand(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")
    monkeypatch.setenv("PK_BOOTSTRAP", "e:1")
    assert run([*words, "--timeout-ms", "100ms"]) == 1
    assert "h:7: " in capsys.readouterr().err
    assert os.environ["PK_BOOTSTRAP"] == "e:1"
    assert run(["--bootstrap"]) == 1
    assert "--bootstrap needs a value" in capsys.readouterr().err


def test_version_lists_the_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["version"]) == 0
    shown = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert shown["pk"] == "0.1.0"
    assert shown["pyarrow"] != "-"


@pytest.mark.parametrize(
    ("words", "expected"),
    [("pk to", "topics"), ("pk topics del", "delete-records"), ("pk consume --fo", "--follow")],
)
def test_a_shell_completes_commands_and_options(
    words: str,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("_PK_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    run([])
    assert expected in capsys.readouterr().out.split()
