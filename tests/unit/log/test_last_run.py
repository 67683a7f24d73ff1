"""Rule L10: the file that says when a broker last trusted its clock."""

from __future__ import annotations

from pk.log import last_run
from pk.log.last_run import LastRun


def test_what_was_written_is_read_and_a_flipped_bit_is_noticed() -> None:
    for run in (LastRun(1_800_000_000_000, 5, "boot-1", 7), LastRun(-1, 0, "")):
        raw = last_run.encode(run)
        assert last_run.decode(raw) == run
        for bit in range(8 * len(raw)):
            flipped = bytearray(raw)
            flipped[bit // 8] ^= 1 << bit % 8
            assert last_run.decode(bytes(flipped)) is None
        assert all(last_run.decode(raw[:size]) is None for size in range(len(raw)))
