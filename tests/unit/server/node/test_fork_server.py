"""The fork server, each time in a program of its own: what its children are, and how it is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

START = """
import asyncio, json, os, signal, sys, threading
from pk.server.node import fork_server, role_process
from pk.server.node.fork_server import ForkServer, ForkServerLostError

role_process.load = lambda roles: None
def serve(role, run_dir):
    # what a child says of itself
    said = {
        "argv": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"),
        "parent": os.getppid(), "session": os.getsid(0), "pid": os.getpid(),
        "stdin": os.readlink("/proc/self/fd/0"), "owner": int(os.environ["PK_SUPERVISOR_PID"]),
        "descriptors": sum(os.path.exists(f"/proc/self/fd/{n}") for n in range(64)),
        "threads": len(os.listdir("/proc/self/task")),
    }
    print(json.dumps(said), flush=True)
    if role == "tier":
        raise ValueError("a bug of the tier")
    if role == "broker":
        signal.pause()
    return 7
role_process.run = serve
held = open(os.devnull)  # a descriptor that no child may have
"""

CHILDREN = """
async def main():
    forks = ForkServer.start(["broker", "controller", "tier"])
    broker = await forks.fork("broker", "/x/run")
    one, two = await asyncio.gather(forks.fork("controller", "/x/run"), forks.fork("tier", "/"))
    said = [json.loads(await each.stdout.readline()) for each in (broker, one, two)]
    codes = [await one.wait(), await two.wait()]
    forks.close()
    try:
        await forks.fork("tier", "/")
    except ForkServerLostError:
        codes.append("lost")
    codes.append(broker.returncode)  # it lives on
    broker.send_signal(signal.SIGTERM)
    codes.append(await broker.wait())
    broker.send_signal(signal.SIGTERM)  # to nothing
    try:
        os.waitpid(-1, 0)
    except ChildProcessError:
        codes.append("no child is left")
    print(json.dumps({"me": os.getpid(), "said": said, "codes": codes}))
asyncio.run(main())
"""

LOST = """
async def lost(change):
    forks = ForkServer.start([])
    change(forks)
    try:
        await forks.fork("controller", "/")
        return "forked"
    except (ForkServerLostError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        forks.close()
def killed(forks):
    os.kill(forks.pid, signal.SIGKILL)
def stopped(forks):
    fork_server.ANSWER_TIMEOUT_S = 0.1
    os.kill(forks.pid, signal.SIGSTOP)
async def closed():
    fork_server.ANSWER_TIMEOUT_S = 60
    forks = ForkServer.start([])
    os.kill(forks.pid, signal.SIGSTOP)
    asyncio.get_running_loop().call_later(0.05, forks.close)
    try:
        await forks.fork("controller", "/")
    except ForkServerLostError as error:
        return str(error)
def refuses(wanted, real=fork_server._adopt_orphans):
    return not wanted
said = [asyncio.run(lost(each)) for each in (lambda _: None, killed, stopped)]
said.append(asyncio.run(closed()))
role_process.load = lambda roles: threading.Thread(target=signal.pause, daemon=True).start()
said.append(asyncio.run(lost(lambda _: None)))
role_process.load = lambda roles: 1 / 0
said.append(asyncio.run(lost(lambda _: None)))
role_process.load = lambda roles: setattr(os, "fork", no_memory)
def no_memory():
    raise BlockingIOError(11, "Resource temporarily unavailable")
said.append(asyncio.run(lost(lambda _: None)))
role_process.load = lambda roles: None
fork_server._adopt_orphans = refuses
said.append(asyncio.run(lost(lambda _: None)))
threading.Thread(target=signal.pause, daemon=True).start()
said.append(ForkServer.start([]) is None)
print(json.dumps(said))
"""

LOADED = """
import os, sys
from pk.server.node import fork_server, role_process
for name, value in fork_server._NO_THREADS.items():
    os.environ.setdefault(name, value)
role_process.load(role_process.ROLES)
print(len(os.listdir("/proc/self/task")), "deltalake" in sys.modules, "pandas" in sys.modules)
"""


def run(program: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_a_forked_process_is_as_a_spawned_one() -> None:
    """node/fork_server E2–E4.  A role that raises ends its own process only."""
    out, err = run(START + CHILDREN)
    (line,) = out.splitlines()  # no child has come back into the program
    told: dict[str, Any] = json.loads(line)
    for said in told["said"]:
        assert said["parent"] == said["owner"] == told["me"]
        assert said["session"] == said["pid"]
        assert (said["stdin"], said["descriptors"], said["threads"]) == ("/dev/null", 3, 1)
    broker = told["said"][0]["argv"]
    assert broker == [sys.executable, "-m", "pk.server", "broker", "--run", "/x/run"]
    assert told["codes"] == [7, 1, "lost", None, -15, "no child is left"]
    assert "ValueError: a bug of the tier" in err


def test_a_fork_server_that_is_lost_says_so_and_does_not_hang() -> None:
    """node/fork_server E1, E2: ended, stopped, closed meanwhile, with a thread, with modules that
    fail, without memory, on a kernel that leaves it its children, and from a process with threads.
    """
    out, _ = run(START + LOST)
    assert json.loads(out) == [
        "forked",
        "ForkServerLostError: it has ended",
        "ForkServerLostError: it does not answer",
        "it has ended",
        "ForkServerLostError: it has 2 threads",
        "ForkServerLostError: it has ended",
        "OSError: fork: Resource temporarily unavailable",
        "ForkServerLostError: the kernel leaves it its children",
        True,
    ]


def test_what_it_loads_starts_no_thread() -> None:
    """node/fork_server E1.  deltalake stays out: its allocator would read its settings."""
    assert run(LOADED)[0] == "1 False False\n"
