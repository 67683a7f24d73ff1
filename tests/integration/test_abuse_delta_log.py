"""The short form of tests/abuse/delta_log.py: flipped bits in the Delta log of a real table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "abuse"))

import delta_log

pytestmark = pytest.mark.integration


def test_flipped_bits_of_a_delta_log_are_refused_or_mean_nothing(tmp_path: Path) -> None:
    """Rules T2, T8: no lost row, no altered value, no crash."""
    verdicts = delta_log.run(7, tmp_path, short=True)
    assert len(verdicts) == 2
    assert all(verdict.kept for verdict in verdicts), verdicts
    assert "TierTableChanged" in verdicts[0].figures
