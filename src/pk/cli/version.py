"""`pk version`: the versions of pk and of the libraries that it stands on."""

from __future__ import annotations

import platform
from importlib import metadata

import typer

import pk
from pk.cli.common import AsJson, quiet_end, say, table

app = typer.Typer(add_completion=False)

_LIBRARIES = ("pyarrow", "deltalake", "pyspark", "delta-spark", "grpcio")


@app.command()
def version(as_json: AsJson = False) -> None:
    """Print the versions of pk, Python and the libraries; `-` for one that is not installed.

    Example: pk version --json
    """
    found = {"pk": pk.__version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "-"
    with quiet_end():
        if as_json:
            say(found)
            return
        table(["part", "version"], list(found.items()))
