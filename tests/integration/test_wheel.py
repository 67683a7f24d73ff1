"""The wheel: what `pip install` gives to a user who has no checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from java_compiler import needs_javac

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]


JAR = "pk/sparkconnector/java/pk-columnar.jar"
SOURCE = "pk/sparkconnector/java/pk/DefaultSource.java"


def copied(copy: Path) -> Path:
    """Copy the checkout's sources, without what an earlier build left there."""
    linked = [path.resolve().name for path in (ROOT / "src" / "pk").iterdir() if path.is_symlink()]
    for name in ("src", *linked):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.jar")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    copy = copied(tmp_path_factory.mktemp("source"))
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


def unpacked(wheel: Path, folder: Path) -> Callable[..., str]:
    """Unpack it; returns a function that runs Python with it, and without the checkout."""
    target = folder / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    given = {**os.environ, "PYTHONPATH": str(target)}

    def python(*arguments: str) -> str:
        ran = subprocess.run(
            [sys.executable, *arguments],
            cwd=folder, env=given, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    return python


def test_it_works_from_anywhere(wheel: Path, tmp_path: Path) -> None:
    """With the libraries of this environment, and without the checkout."""
    python = unpacked(wheel, tmp_path)
    target = tmp_path / "site"
    assert python("-c", "import pk; print(pk.__file__)").startswith(str(target))
    assert "pyarrow" in python("-m", "pk.cli", "version")
    assert "Commands:" in python("-m", "pk.cli", "--help")
    assert "--tail" in python("-m", "pk.cli", "consume", "--help")
    python("-c", "from pk import AdminClient, Consumer, Producer, DeadLetterTopic")
    python("-c", "import pk.server.node.supervisor, pk.sparkconnector.source")


@needs_javac
def test_it_has_the_jar_of_the_columnar_reader(wheel: Path, tmp_path: Path) -> None:
    """`pk jars` compares the jar's build with the sources beside it."""
    assert unpacked(wheel, tmp_path)("-m", "pk.cli", "jars") == f"{tmp_path / 'site' / JAR}\n"


def test_without_javac_the_build_warns_and_goes_on(tmp_path: Path) -> None:
    copy = copied(tmp_path / "source")
    empty = tmp_path / "empty"
    empty.mkdir()
    build = "import sys, setuptools.build_meta as b; print(b.build_wheel(sys.argv[1]))"
    ran = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)],
        cwd=copy, env={**os.environ, "PATH": str(empty), "JAVA_HOME": ""},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "warning: no columnar reader: there is no `javac`" in ran.stderr
    with zipfile.ZipFile(tmp_path / ran.stdout.splitlines()[-1]) as archive:
        names = archive.namelist()
    assert SOURCE in names
    assert JAR not in names
