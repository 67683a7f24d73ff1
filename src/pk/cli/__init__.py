"""The `pk` command line; each module here is one command (see app.py)."""

from __future__ import annotations


def main() -> None:
    """Run the `pk` script."""
    import sys

    from pk.cli.app import run

    sys.exit(run(sys.argv[1:]))
