"""Compares the replicas of a partition on disk: they have the same bytes below the high
watermark.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from pk.log import batch as batches
from pk.log.batch import HEADER_BYTES


def _batches(directory: Path, below: int) -> Iterator[tuple[int, int, int, bytes]]:
    """Return (base offset, next offset, leader epoch, bytes) of the batches of a partition."""
    for path in sorted(directory.glob("*.log")):
        raw = path.read_bytes()
        at = 0
        while len(raw) - at >= HEADER_BYTES:
            header = batches.read_header(raw, at)
            if header.base_offset >= below or header.length == 0:
                return
            yield (
                header.base_offset,
                header.next_offset,
                header.leader_epoch,
                raw[at : at + header.length],
            )
            at += header.length


def compare(directories: dict[int, Path], below: int) -> list[str]:
    """Return violations in words.  `below`: the high watermark, which every replica must reach."""
    told, digests = [], {}
    for node, directory in directories.items():
        digest, end = hashlib.sha256(), 0
        for base, following, _, raw in _batches(directory, below):
            if base != end:
                told.append(f"{directory.name} of node {node}: offset {base} follows {end}")
            digest.update(raw)
            end = following
        if end < below:
            told.append(f"{directory.name} of node {node} ends at {end}, the watermark is {below}")
        digests[node] = digest.hexdigest()
    if len(set(digests.values())) > 1:
        told.append(_first_difference(directories, below))
    return told


def _first_difference(directories: dict[int, Path], below: int) -> str:
    """Return where the logs diverge."""
    readers = [_batches(directory, below) for directory in directories.values()]
    name = next(iter(directories.values())).name
    for found in zip(*readers, strict=False):
        if len({raw for *_, raw in found}) > 1:
            places = {
                node: f"{base}-{following - 1} of epoch {epoch}"
                for node, (base, following, epoch, _) in zip(directories, found, strict=True)
            }
            return f"{name}: replicas differ: {places}"
    return f"{name}: replicas have different lengths below {below}"
