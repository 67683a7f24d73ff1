"""The transport of a stream, measured alone: sockets compared with grpc.aio
(docs/design/0003-transport.md).

    python -m bench.transport  # 4 GiB in 4 MiB frames, 5,000 echoes of 100 bytes, both ways

One process serves both kinds of stream at one address, and this process reads.  There is no log and
no codec.
"""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import subprocess
import sys
import time

from pk import limits
from pk.wire.grpc_network import GrpcNetwork
from pk.wire.socket_network import PkNetwork
from pk.world import Network, Stream, StreamKind

FRAME = bytes(limits.FRAME_BYTES)
FRAMES = 1024
ECHOES = 5_000
ROUNDS = 5


async def _serve(_kind: StreamKind, stream: Stream) -> None:
    """`b"give"` asks for all frames and the CPU seconds they cost here; the rest is echoed."""
    while (asked := await stream.recv()) is not None:
        begin = _cpu_s()
        if asked == b"give":
            for _ in range(FRAMES):
                await stream.send(FRAME)
            await stream.send(str(_cpu_s() - begin).encode())
        else:
            await stream.send(bytes(asked))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def _child() -> None:
    direct = await GrpcNetwork().listen("127.0.0.1:0", _serve)
    both = await PkNetwork().listen("127.0.0.1:0", _serve)
    print(direct.address, both.address, flush=True)
    await asyncio.Event().wait()


async def _bulk(network: Network, address: str, kind: StreamKind) -> dict[str, float]:
    stream = await network.connect(address, kind)
    begin, cpu = time.perf_counter(), _cpu_s()
    await stream.send(b"give")
    for _ in range(FRAMES):
        await stream.recv()
    took, ours = time.perf_counter() - begin, _cpu_s() - cpu
    theirs = float(bytes(await stream.recv() or b"0"))
    stream.close()
    size = FRAMES * len(FRAME) / 1e9
    return {"gb_per_s": size / took, "cpu_s_per_gb": (ours + theirs) / size}


async def _echo(network: Network, address: str, kind: StreamKind) -> dict[str, float]:
    stream = await network.connect(address, kind)
    frame, took = bytes(100), []
    for _ in range(ECHOES):
        begin = time.perf_counter()
        await stream.send(frame)
        await stream.recv()
        took.append(1e6 * (time.perf_counter() - begin))
    stream.close()
    took.sort()
    return {"echo_p50_us": took[len(took) // 2], "echo_p99_us": took[len(took) * 99 // 100]}


async def _measure(direct: str, both: str) -> dict[str, dict[str, float]]:
    ways: dict[str, tuple[Network, str, StreamKind]] = {
        "sockets": (PkNetwork(), both, StreamKind.FETCH),
        "grpc": (GrpcNetwork(), direct, StreamKind.FETCH),
        "grpc behind the one port": (PkNetwork(), both, StreamKind.CONTROL),
    }
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            runs[name].append({**await _bulk(*way), **await _echo(*way)})
    return {
        name: {key: round(statistics.median(run[key] for run in each), 2) for key in each[0]}
        for name, each in runs.items()
    }


def main() -> None:
    """Print one JSON line per transport: medians of five interleaved rounds."""
    if sys.argv[1:] == ["serve"]:
        asyncio.run(_child())
        return
    command = [sys.executable, "-m", "bench.transport", "serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            direct, both = child.stdout.readline().split()
            for name, figures in asyncio.run(_measure(direct, both)).items():
                print(json.dumps({"transport": name, **figures}))
        finally:
            child.kill()


if __name__ == "__main__":
    main()
