"""`python -m pk.cli …` is the same as `pk …`, for programs that know their interpreter's path only.

A program that starts a server for itself (embedded.py) names its own pid in `PK_SUPERVISOR_PID`.
The server then ends when that program ends, as the server's children end with the server (rule P1).
"""

from __future__ import annotations

import os

from pk.cli import main

if __name__ == "__main__":
    if "PK_SUPERVISOR_PID" in os.environ:
        from pk.server.node.run_config import die_with_parent

        die_with_parent()
    main()
