"""Rule L9 among three real nodes: bits flip in one replica's log files.

The cases are those of `make abuse`, area log_damage (tests/abuse/_replica_damage.py).
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "abuse"))

import _replica_damage as replica_damage

pytestmark = pytest.mark.integration


def test_damage_in_a_replica_is_copied_nowhere_and_heals(tmp_path: Path) -> None:
    """A follower and the copier are the first to read a leader's damaged batches; another replica
    is undamaged.
    """
    (verdict,) = replica_damage.run(random.Random(5), tmp_path / "leader", 2, "leader")
    assert verdict.kept, verdict


def test_damage_that_nobody_else_has_stops_followers_and_table(tmp_path: Path) -> None:
    """Readers get the range as an error and continue; `pk log repair` makes all three logs the
    same.
    """
    (verdict,) = replica_damage.run(random.Random(5), tmp_path / "only", 1, "only copy")
    assert verdict.kept, verdict
