"""`pk doctor spark` names the cause of DATA_SOURCE_NOT_FOUND and its fix."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from pk import errors
from pk.cli import doctor
from pk.sparkconnector import java

VERSIONS = {
    "pyspark": "4.2.0",
    "pk": "0",
    "pyarrow": "26",
    "pandas": "3",
    "grpc": "1",
    "deltalake": "1",
}
MINE = {"error": None, "name": "pk"}


def found(**given):
    base = {
        "version": list(sys.version_info[:2]), "executable": "/venv/bin/python",
        "modules": dict(VERSIONS), "sources": {"pyspark_pk": dict(MINE)},
    }  # fmt: skip
    return base | given


def failures(answer, environment=None) -> dict[str, doctor.Check]:
    checks = doctor.diagnose(environment or {"PYSPARK_PYTHON": "p"}, lambda command: answer)
    return {check.name: check for check in checks if check.ok is False}


def test_nothing_wrong():
    assert failures(found()) == {}


@pytest.mark.parametrize(
    ("environment", "command", "why"),
    [
        ({}, "python3", "PYSPARK_PYTHON is not set"),
        ({"PYSPARK_PYTHON": "/a"}, "/a", "PYSPARK_PYTHON"),
        ({"PYSPARK_PYTHON": "/a", "PYSPARK_DRIVER_PYTHON": "/b"}, "/b", "PYSPARK_DRIVER_PYTHON"),
    ],
)
def test_the_interpreter_that_spark_would_use(environment, command, why):
    found_command, found_why = doctor.lookup_python(environment)
    assert found_command == command
    assert why in found_why


def test_pyspark_python_unset_is_a_note_about_sessions_that_pk_does_not_build():
    without = {**VERSIONS, "pk": None, "pyspark": None}

    def ask(command):
        return found() if command == sys.executable else found(modules=without)

    checks = {each.name: each for each in doctor.diagnose({"PATH": "/bin"}, ask)}
    assert checks["interpreter"].mark == "ok"
    other = checks["other sessions"]
    assert (other.ok, other.mark) == (True, "note")
    assert "DATA_SOURCE_NOT_FOUND" in other.found
    assert "PYSPARK_PYTHON is not set" in other.found
    assert f"export PYSPARK_PYTHON={sys.executable}" in other.fix
    assert "session()" in other.fix


def test_nothing_is_noted_if_python3_is_the_right_one():
    checks = {each.name: each for each in doctor.diagnose({}, lambda _: found())}
    assert checks["other sessions"].mark == "ok"


def test_an_interpreter_that_was_chosen_and_is_wrong_fails():
    wrong = failures(found(modules={**VERSIONS, "pk": None}))
    assert list(wrong) == ["interpreter"]
    assert "without pk" in wrong["interpreter"].found


def test_jars_that_a_session_will_fetch_are_a_note(monkeypatch):
    monkeypatch.setattr("pk.sparkconnector.jars.installed", lambda _: None)
    check = doctor.check_jars()
    assert (check.ok, check.mark) == (True, "note")
    assert "session() fetches them once" in check.fix


def test_an_interpreter_that_does_not_run():
    def ask(command):
        raise FileNotFoundError(f"{command} is not on PATH")

    checks = {check.name: check for check in doctor.diagnose({"PYSPARK_PYTHON": "/gone"}, ask)}
    assert checks["interpreter"].ok is False
    assert "/gone is not on PATH" in checks["interpreter"].found
    assert checks["registration"].ok is None


def test_another_minor_version():
    assert "must be alike" in failures(found(version=[3, 9]))["interpreter"].found


def test_a_missing_package():
    assert "py-files" in failures(found(sources={}))["registration"].fix


def test_pks_own_package_that_does_not_import():
    broken = {"pyspark_pk": {"error": "ImportError: no", "name": None}}
    assert "ImportError: no" in failures(found(sources=broken))["registration"].found


def test_another_package_that_breaks_every_source():
    sources = {"pyspark_pk": MINE, "pyspark_bad": {"error": "ValueError: oops", "name": None}}
    wrong = failures(found(sources=sources))
    assert list(wrong) == ["other sources"]
    assert "pyspark_bad: ValueError: oops" in wrong["other sources"].found
    assert "pip uninstall pyspark-bad" in wrong["other sources"].fix


@pytest.mark.parametrize(
    ("modules", "words"),
    [({"pyspark": "4.1.0"}, "needs pyspark 4.2"), ({"grpc": None}, "grpc missing")],
)
def test_versions(modules, words):
    assert words in failures(found(modules={**VERSIONS, **modules}))["versions"].found


def test_java_missing(monkeypatch):
    def missing():
        raise errors.JavaMissing(f"there is no `java` on PATH. {java.HOW_TO_GET_JAVA}")

    monkeypatch.setattr(java, "find_java", missing)
    assert "apt-get install" in failures(found())["java"].fix


def test_the_probe_sees_this_environment():
    """The real look-up in this interpreter; a broken package beside ours is seen."""
    seen = doctor.probe(sys.executable)
    assert seen["sources"]["pyspark_pk"] == MINE
    assert seen["modules"]["pk"]


def test_the_probe_sees_a_broken_package(tmp_path, monkeypatch):
    (tmp_path / "pyspark_broken.py").write_text("raise RuntimeError('on import')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    seen = doctor.probe(sys.executable)
    assert seen["sources"]["pyspark_broken"]["error"] == "RuntimeError: on import"


def test_the_command(monkeypatch):
    monkeypatch.setattr(doctor, "diagnose", lambda: [doctor.Check("java", True, "Java 17")])
    told = CliRunner().invoke(doctor.app, ["spark", "--json"])
    assert (told.exit_code, json.loads(told.stdout)["ok"]) == (0, True)
    monkeypatch.setattr(
        doctor, "diagnose", lambda: [doctor.Check("java", False, "none", "get one")]
    )
    told = CliRunner().invoke(doctor.app, ["spark"])
    assert told.exit_code == 1
    assert "FAIL java: none\n     fix: get one" in told.stdout
    assert "DATA_SOURCE_NOT_FOUND" in told.stdout


def test_the_way_of_a_columnar_read_is_a_note_at_most(monkeypatch) -> None:
    monkeypatch.setattr("pk.sparkconnector.columnar_jar.problem", lambda: "x.jar was not built")
    check = doctor.check_columnar()
    assert (check.mark, check.fix) == ("note", "x.jar was not built")
    assert "through Python" in check.found
    monkeypatch.setattr("pk.sparkconnector.columnar_jar.problem", lambda: "")
    assert doctor.check_columnar().mark == "ok"
