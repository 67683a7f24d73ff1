"""`python -m pk.server ROLE --run DIR/run`: one child of the supervisor."""

from __future__ import annotations

import argparse
import sys

from pk.server.node import role_process


def main() -> int:
    """Run one role until it is asked to stop; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m pk.server", description=__doc__)
    parser.add_argument("role", choices=role_process.ROLES)
    parser.add_argument("--run", required=True, help="the run directory that holds config.json")
    given = parser.parse_args()
    return role_process.run(given.role, given.run)


if __name__ == "__main__":
    sys.exit(main())
