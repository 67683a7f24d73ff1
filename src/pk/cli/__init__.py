"""The `pk` command line; each module here is one command (see app.py)."""

from __future__ import annotations


def main() -> None:
    """Run the `pk` script."""
    import os
    import sys

    from pk.cli.app import run

    # show the traceback of a bug as plain text
    os.environ.setdefault("TYPER_STANDARD_TRACEBACK", "1")
    sys.exit(run(sys.argv[1:]))
