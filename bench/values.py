"""The records of all benchmarks: lines of exactly 100 bytes, like small JSON events.

The same file feeds both sides (ProducerPerformance takes it as `--payload-file`).  The lines are
seeded, distinct, without newlines, and compress about as well as events do (LZ4 to some 45 %).
"""

from __future__ import annotations

import random
from pathlib import Path

VALUE_BYTES = 100
#: More than a processor's second-level cache holds, little enough for a JVM's list.
DISTINCT = 100_000
_CARRIERS = ("UA", "AA", "B6", "DL", "EV", "MQ", "US", "9E", "WN", "VX")


def make(count: int = DISTINCT, seed: int = 7) -> list[bytes]:
    """Return `count` distinct values."""
    rng = random.Random(seed)
    values = []
    for number in range(count):
        text = (
            f'{{"id":{number:08d},"carrier":"{rng.choice(_CARRIERS)}",'
            f'"flight":{rng.randrange(9000):04d},'
            f'"delay":{rng.randrange(-60, 900)},"tail":"N{rng.randrange(10**6):06d}","note":"'
        )
        pad = VALUE_BYTES - len(text) - 2
        values.append((text + f"{rng.getrandbits(64):x}".ljust(pad, "x")[:pad] + '"}').encode())
    return values


def write(path: Path, values: list[bytes]) -> None:
    """Write one value per line, as ProducerPerformance expects it."""
    path.write_bytes(b"\n".join(values) + b"\n")


def read(path: Path) -> list[bytes]:
    """Read what `write` wrote."""
    return path.read_bytes().splitlines()
