"""Shell completion, by typer: all commands in one application, built only to complete a line.

pk --install-completion     writes it into the shell's start-up file
pk --show-completion        prints it
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module

import typer

#: typer's scripts call the program with this variable.
ASKED = "_PK_COMPLETE"
OPTIONS = ("--install-completion", "--show-completion")


def wanted(argv: Iterable[str], environ: Mapping[str, str]) -> bool:
    """Return whether a command line asks for completion."""
    return ASKED in environ or any(item in OPTIONS for item in list(argv)[:1])


def root(commands: Mapping[str, str]) -> typer.Typer:
    """Return one application with all commands.  Their modules are imported."""
    whole = typer.Typer(name="pk")
    for name, text in commands.items():
        app: typer.Typer = import_module(f"pk.cli.{name}").app
        if len(app.registered_commands) == 1 and not app.registered_groups:
            only = app.registered_commands[0].callback
            assert only is not None
            whole.command(name, help=text)(only)
        else:
            whole.add_typer(app, name=name, help=text)
    return whole
