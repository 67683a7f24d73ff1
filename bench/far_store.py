"""An S3 server on loopback that is as far away as a proxy makes it: versitygw behind a delay.

    python -m bench.far_store PORT TARGET_PORT

runs the proxy.  Each line on its standard input is the round trip in ms from then on; it answers
`ok`.  Half of it delays each byte on its way to the server, the other half on its way back.  Bytes
that follow each other closely arrive as closely: the distance costs time, and no bandwidth.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from bench.runs import ROOT
from bench.sides import SideFailed

HOST = "127.0.0.1"
BUCKET = "bench-tier"
ACCESS_KEY, SECRET_KEY = "pk-bench-key", "pk-bench-secret"
_CHUNK = 256 * 1024
#: Chunks of one direction that are under way.
_UNDER_WAY = 256
_START_TIMEOUT_S = 20.0


class FarStore:
    """The server and the proxy, as processes of their own."""

    def __init__(self, folder: Path, port: int, target_port: int) -> None:
        binary = _binary()
        data = folder / "s3"
        (data / BUCKET).mkdir(parents=True)
        keys = {"ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY}
        self._server = subprocess.Popen(
            [binary, "--port", f"{HOST}:{target_port}", "posix", str(data)],
            env={**os.environ, **keys},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._proxy = subprocess.Popen(
            [sys.executable, "-m", "bench.far_store", str(port), str(target_port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.endpoint = f"http://{HOST}:{port}"
        self.pids = [self._server.pid, self._proxy.pid]
        _await_port(target_port)
        self.delay(0)

    def delay(self, round_trip_ms: float) -> None:
        """Put the server so far away."""
        assert self._proxy.stdin is not None
        assert self._proxy.stdout is not None
        print(round_trip_ms, file=self._proxy.stdin, flush=True)
        if self._proxy.stdout.readline() != "ok\n":
            raise SideFailed("the proxy before the S3 server has ended")

    def close(self) -> None:
        for process in (self._proxy, self._server):
            process.kill()
            process.wait()


def _binary() -> str:
    built = ROOT / ".venv" / "bin" / "versitygw"
    found = os.environ.get("PK_VERSITYGW") or (str(built) if built.exists() else None)
    found = found or shutil.which("versitygw")
    if found is None:
        raise SideFailed("versitygw is missing: `make test-s3` builds it")
    return found


def _await_port(port: int) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)) == 0:
                return
        time.sleep(0.05)
    raise SideFailed("versitygw does not answer")


# -- the proxy's process ---------------------------------------------------------------------------


class _Proxy:
    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._one_way_s = 0.0

    async def run(self, port: int) -> None:
        server = await asyncio.start_server(self._serve, HOST, port)
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            self._one_way_s = float(line) / 2000
            print("ok", flush=True)
        server.close()

    async def _serve(self, near: asyncio.StreamReader, reply: asyncio.StreamWriter) -> None:
        far, ahead = await asyncio.open_connection(HOST, self._target_port)
        ways = [self._pass(near, ahead), self._pass(far, reply)]
        await asyncio.gather(*ways, return_exceptions=True)
        for writer in (reply, ahead):
            writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward bytes, each chunk so long after its arrival."""
        loop = asyncio.get_running_loop()
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_UNDER_WAY)

        async def arrive() -> None:
            while True:
                due_s, chunk = await under_way.get()
                if (left_s := due_s - loop.time()) > 0:
                    await asyncio.sleep(left_s)
                if not chunk:
                    writer.write_eof()
                    return
                writer.write(chunk)
                await writer.drain()

        async def depart() -> None:
            chunk = b"-"
            while chunk:
                chunk = await reader.read(_CHUNK)
                await under_way.put((loop.time() + self._one_way_s, chunk))

        await asyncio.gather(arrive(), depart())


if __name__ == "__main__":
    asyncio.run(_Proxy(int(sys.argv[2])).run(int(sys.argv[1])))
