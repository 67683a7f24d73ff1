"""The fixtures of the suites that run against each kind of table."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.table_kit import Run, running


@pytest.fixture(params=["memory", "file", pytest.param("s3", marks=pytest.mark.s3)])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Run a test against each kind of table."""
    return running(request.param, request, tmp_path)
