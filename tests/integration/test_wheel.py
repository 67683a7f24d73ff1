"""The wheel: what `pip install` gives to a user who has no checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built from a copy, so that no earlier build is in it."""
    copy = tmp_path_factory.mktemp("source")
    linked = [path.resolve().name for path in (ROOT / "src" / "pk").iterdir() if path.is_symlink()]
    for name in ("src", *linked):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    built = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", str(built), str(copy)], check=True, timeout=300)
    (found,) = built.glob("pk_log-*.whl")
    return found


def test_it_holds_the_product_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        text = archive.read(metadata).decode()
    parts = {tuple(name.split("/")[:2]) for name in names}
    for part in ("cli", "client", "log", "server", "sparkconnector", "tiering", "compaction"):
        assert ("pk", part) in parts
    assert ("pk", "sim") not in parts
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {
        "pk",
        "pyspark_pk",
    }
    assert "pk/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "License-Expression: Apache-2.0" in text
    assert "Provides-Extra: spark" in text


def test_it_works_from_anywhere(wheel: Path, tmp_path: Path) -> None:
    """With the libraries of this environment, and without the checkout."""
    target = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    given = {**os.environ, "PYTHONPATH": str(target)}

    def python(*arguments: str) -> str:
        ran = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path, env=given, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    assert python("-c", "import pk; print(pk.__file__)").startswith(str(target))
    assert "pyarrow" in python("-m", "pk.cli", "version")
    assert "Commands:" in python("-m", "pk.cli", "--help")
    assert "--tail" in python("-m", "pk.cli", "consume", "--help")
    python("-c", "from pk import AdminClient, Consumer, Producer, DeadLetterTopic")
    python("-c", "import pk.server.node.supervisor, pk.sparkconnector.source")
