"""Rule L10 on real processes: nodes whose wall clocks are wrong, by libfaketime.

The cases are those of `make abuse` (tests/abuse/clocks.py), in their short form.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from wrong_clock import needs_faketime

pytestmark = [
    pytest.mark.integration,
    pytest.mark.long,
    pytest.mark.timeout(900),  # nodes start again and again, and libfaketime makes them slow
    needs_faketime,
]

ABUSE = Path(__file__).resolve().parents[1] / "abuse"


@pytest.fixture(scope="module")
def cases() -> Any:
    """Return the module, whose neighbours can be imported while it is loaded."""
    sys.path.insert(0, str(ABUSE))
    try:
        spec = importlib.util.spec_from_file_location("abuse_clocks", ABUSE / "clocks.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(ABUSE))


@pytest.mark.parametrize("case", ["a_single_node", "one_of_three", "the_active_controller"])
def test_a_wrong_clock_deletes_nothing_and_is_named(case: str, cases: Any, tmp_path: Path) -> None:
    verdicts = getattr(cases, case)(tmp_path / case)
    assert verdicts
    assert not [verdict for verdict in verdicts if not verdict.kept], verdicts
