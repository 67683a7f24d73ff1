"""The jar of the columnar reader: only the build of the present sources is used."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from java_compiler import needs_javac

from pk import errors
from pk.cli.app import run
from pk.sparkconnector import columnar_jar, sessions


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one source, in place of the real ones."""
    (tmp_path / "pk").mkdir()
    (tmp_path / "pk" / "One.java").write_text("package pk; class One {}\n")
    monkeypatch.setattr(columnar_jar, "SOURCES", tmp_path)
    columnar_jar.build_of_sources.cache_clear()
    yield tmp_path
    columnar_jar.build_of_sources.cache_clear()


def write_jar(build: str) -> None:
    with zipfile.ZipFile(columnar_jar.path(), "w") as jar:
        jar.writestr("pk/build.txt", build + "\n")


def test_a_session_gets_the_jar_of_its_sources_and_no_other(sources: Path, capsys) -> None:
    assert "was not built" in columnar_jar.problem()
    assert "spark.jars" not in sessions.settings("local", False, False, {})  # silently
    write_jar(columnar_jar.build_of_sources())
    assert not columnar_jar.problem()
    given = {"spark_jars": "/mine.jar"}
    found = sessions.settings("local", False, False, given)["spark.jars"]
    assert found == f"{columnar_jar.path()},/mine.jar"
    run(["jars"])
    assert capsys.readouterr().out == f"{columnar_jar.path()}\n"

    (sources / "pk" / "One.java").write_text("package pk; class One { int x; }\n")
    columnar_jar.build_of_sources.cache_clear()
    assert "another build" in columnar_jar.problem()
    with pytest.warns(UserWarning, match="reads through Python"):
        assert "spark.jars" not in sessions.settings("local", False, False, {})
    assert run(["jars"]) == 1
    assert "another build" in capsys.readouterr().err


def test_a_file_that_is_no_jar_has_no_build(sources: Path) -> None:
    columnar_jar.path().write_bytes(b"not a zip file")
    assert columnar_jar.build_of(columnar_jar.path()) is None
    with zipfile.ZipFile(columnar_jar.path(), "w") as jar:
        jar.writestr("other", "")
    assert columnar_jar.build_of(columnar_jar.path()) is None


def test_without_javac_the_build_says_what_to_install(
    sources: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(columnar_jar, "find_javac", lambda: None)
    with pytest.raises(errors.JavaMissing, match="openjdk-17-jdk-headless"):
        columnar_jar.build()
    assert columnar_jar.main() == 0  # `make setup` goes on
    assert "warning: no columnar reader" in capsys.readouterr().err


@needs_javac
def test_what_javac_refuses_leaves_no_jar_behind(sources: Path, tmp_path: Path) -> None:
    columnar_jar.build(tmp_path)
    first = columnar_jar.path().read_bytes()
    columnar_jar.path().unlink()
    columnar_jar.build(tmp_path)
    assert columnar_jar.path().read_bytes() == first  # the same sources, the same jar
    columnar_jar.path().unlink()
    (sources / "pk" / "One.java").write_text("package pk; class One { Missing x; }\n")
    columnar_jar.build_of_sources.cache_clear()
    with pytest.raises(errors.JarsMissing, match="class Missing"):
        columnar_jar.build(tmp_path)
    assert [each.name for each in sources.iterdir()] == ["pk"]
