"""`python -m pk.cli …` is `pk …`, for programs that know their interpreter and not their PATH.

A server that a program starts for itself (embedded.py) names that program in `PK_SUPERVISOR_PID`,
and dies with it, as the server's own children do with theirs (rule P1).
"""

from __future__ import annotations

import os

from pk.cli import main

if __name__ == "__main__":
    if "PK_SUPERVISOR_PID" in os.environ:
        from pk.server.node.run_config import die_with_parent

        die_with_parent()
    main()
