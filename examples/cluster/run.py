"""Three nodes on this machine, in the foreground: `make cluster`.

Each node is one `pk server start --config examples/cluster/nodeN.toml`; on three machines the same
three files, with their own addresses, are all there is to it.  Directories are formatted once,
into `.cluster/`; what the nodes say is in `.cluster/nodeN.log`.  The first Ctrl-C drains, the
second kills.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from types import FrameType

from pk import errors
from pk.cli.embedded import ServerProcess, pk_command

FILES = sorted(Path(__file__).parent.glob("node*.toml"))
LOGS = Path(".cluster")
START_TIMEOUT_S = 120.0

USE = """
Three nodes serve; any of them knows the others:
  export PK_BOOTSTRAP={brokers}
  pk quorum describe                            # who leads, who votes, how far each is
  pk topics create flights --partitions 3
  printf 'AA:1\\nUA:2\\n' | pk produce flights --key-separator :
  pk consume flights --from-beginning --max 2
Kill one and try again: kill -9 $(cat .cluster/node1/run/supervisor.pid); start it again in another
shell: pk server start --config examples/cluster/node1.toml
Ctrl-C drains and stops all three; rm -r .cluster forgets them."""


def main() -> int:
    """Format, start, wait; the exit code."""
    LOGS.mkdir(exist_ok=True)
    for file in FILES:
        options = ["--config", str(file), "--initial-controllers", "--ignore-formatted"]
        subprocess.run(pk_command("server", "format", *options), check=True)
    nodes = {file: ServerProcess(file, LOGS / f"{file.stem}.log") for file in FILES}

    def stop(_number: int = 0, _frame: FrameType | None = None) -> None:
        for node in nodes.values():
            node.ask_to_stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    for node in nodes.values():
        node.spawn()
    failed = False
    for file, node in nodes.items():
        try:
            print(
                f"{file.stem} serves on {node.wait_ready(START_TIMEOUT_S)['address']}", flush=True
            )
        except errors.PkError as problem:
            print(f"{file.stem} did not start: {problem}", file=sys.stderr)
            failed = True
            stop()
            break
    if not failed:
        brokers = ",".join(tomllib.loads(file.read_text())["listen"] for file in FILES)
        print(USE.format(brokers=brokers), flush=True)
    codes = {file.stem: node.wait() for file, node in nodes.items()}
    print(", ".join(f"{name} ended ({code})" for name, code in codes.items()))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
