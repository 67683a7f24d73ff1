"""Three nodes on this machine, in the foreground: `make cluster`.

Each node is one `pk server start --config examples/cluster/nodeN.toml`; on three machines the same
three files, with their own addresses, are all there is to it.  Directories are formatted once,
into `.cluster/`; what the nodes say is in `.cluster/nodeN.log`.  The first Ctrl-C drains, the
second kills.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from types import FrameType

PK = (sys.executable, "-m", "pk.cli")
FILES = sorted(Path(__file__).parent.glob("node*.toml"))
LOGS = Path(".cluster")

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


def start(file: Path) -> subprocess.Popen[str]:
    """One node; Ctrl-C reaches this process only, which hands it on."""
    with (LOGS / f"{file.stem}.log").open("a") as log:
        return subprocess.Popen(
            [*PK, "server", "start", "--json", "--config", str(file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )


def main() -> int:
    """Format, start, wait; the exit code."""
    LOGS.mkdir(exist_ok=True)
    for file in FILES:
        options = ["--config", str(file), "--initial-controllers", "--ignore-formatted"]
        subprocess.run([*PK, "server", "format", *options], check=True)
    nodes = {file: start(file) for file in FILES}

    def stop(_number: int = 0, _frame: FrameType | None = None) -> None:
        for node in nodes.values():
            if node.poll() is None:
                node.send_signal(signal.SIGTERM)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    failed = []
    for file, node in nodes.items():
        assert node.stdout is not None
        said = json.loads(node.stdout.readline() or "{}")
        if said.get("ready") == "server":
            print(f"{file.stem} serves on {said['address']}", flush=True)
        elif not failed:
            failed.append(file)
            why = said.get("error", {}).get("message", f"see {LOGS}/{file.stem}.log")
            print(f"{file.stem} did not start: {why}", file=sys.stderr)
            stop()
    if not failed:
        brokers = ",".join(tomllib.loads(file.read_text())["listen"] for file in FILES)
        print(USE.format(brokers=brokers), flush=True)
    codes = {file.stem: node.wait() for file, node in nodes.items()}
    print(", ".join(f"{name} ended ({code})" for name, code in codes.items()))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
