"""Rule L17 on real processes: the short form of the area "frames" of `make abuse`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.integration

ABUSE = Path(__file__).parent.parent / "abuse"


def _area(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ABUSE))
    spec = importlib.util.spec_from_file_location(f"abuse_{name}", ABUSE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_hostile_peers_take_no_more_than_the_budget_and_neighbours_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # rule L17
    verdicts = _area("frames", monkeypatch).run(0, tmp_path, True)
    assert len(verdicts) == 4
    for verdict in verdicts:
        assert verdict.kept, f"{verdict.case}: {verdict.figures}"
