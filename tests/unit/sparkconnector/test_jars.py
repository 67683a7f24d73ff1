"""Jars through Spark's own Ivy, without a network: what is remembered, asked for and said."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pk import errors
from pk.sparkconnector import jars
from pk.sparkconnector.jars import Coordinate
from pk.sparkconnector.java import release_of


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_402"', 8),
        ('openjdk version "21" 2023-09-19', 21),
        ("no such thing", None),
    ],
)
def test_java_releases(text, release):
    assert release_of(text) == release


def test_coordinates():
    assert Coordinate.parse("io.delta:delta-storage:4.4.0") == (
        "io.delta",
        "delta-storage",
        "4.4.0",
    )
    for bad in ("io.delta:delta-storage", "a::c", "a:b:c:d"):
        with pytest.raises(errors.InvalidOption, match="group:artifact:version"):
            Coordinate.parse(bad)


def fake_java(tmp_path: Path, monkeypatch, script: str) -> None:
    home = tmp_path / "jdk"
    (home / "bin").mkdir(parents=True)
    java = home / "bin" / "java"
    java.write_text(f"#!/bin/sh\n{script}\n")
    java.chmod(java.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("JAVA_HOME", str(home))


#: Says its version, else behaves like Ivy's `-retrieve`: makes the jar where the pattern says.
RETRIEVES = """
[ "$1" = "-version" ] && { echo 'openjdk version "17.0.1"' >&2; exit 0; }
while [ "$1" != "-retrieve" ]; do shift; done
out=$(dirname "$2"); mkdir -p "$out"; echo jar > "$out/one-1.0.jar"; echo '[SUCCESSFUL ] one'
"""


def test_what_was_fetched_is_remembered_and_java_no_longer_needed(tmp_path, monkeypatch):
    fake_java(tmp_path, monkeypatch, RETRIEVES)
    said: list[str] = []
    found = jars.resolve(["g:one:1.0"], folder=tmp_path / "jars", progress=said.append)
    assert [path.name for path in found] == ["one-1.0.jar"]
    assert found[0].read_text() == "jar\n"
    assert any("SUCCESSFUL" in line for line in said)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nothing"))
    assert jars.resolve(["g:one:1.0"], folder=tmp_path / "jars") == found
    assert jars.installed(["g:one:1.0"], transitive=True, folder=tmp_path / "jars") is None
    found[0].unlink()
    with pytest.raises(errors.JavaMissing, match="JAVA_HOME"):
        jars.resolve(["g:one:1.0"], folder=tmp_path / "jars")
    assert sorted(path.name for path in (tmp_path / "jars").iterdir()) == [
        ".lock",
        ".resolved.json",
    ]


def test_what_ivy_cannot_find_is_named(tmp_path, monkeypatch):
    script = (
        RETRIEVES.partition("while")[0]
        + "echo ':: UNRESOLVED DEPENDENCIES ::'; echo 'g#two: not found'"
    )
    fake_java(tmp_path, monkeypatch, script)
    with pytest.raises(errors.JarsMissing, match="g#two: not found"):
        jars.resolve(["g:two:2"], folder=tmp_path / "jars")
    script = RETRIEVES.partition("while")[0] + "exit 0"
    fake_java(tmp_path / "again", monkeypatch, script)
    with pytest.raises(errors.JarsMissing, match="no jar of g:two:2"):
        jars.resolve(["g:two:2"], folder=tmp_path / "jars")


def test_an_old_java_is_refused(tmp_path, monkeypatch):
    fake_java(tmp_path, monkeypatch, "echo 'java version \"1.8.0_1\"' >&2")
    with pytest.raises(errors.JavaMissing, match=r"Java 8; Spark 4\.2 needs 17"):
        jars.resolve(["g:one:1"], folder=tmp_path)


def test_no_java_says_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(errors.JavaMissing, match="apt-get install openjdk-17"):
        jars.resolve(["g:one:1"], folder=tmp_path)


def test_the_module_asks_for_exactly_these():
    xml = ElementTree.fromstring(jars.module_xml([Coordinate("g", "a&b", "1")], False))
    (found,) = xml.iter("dependency")
    assert (found.get("name"), found.get("transitive"), found.get("conf")) == (
        "a&b", "false", "default->master(*)",
    )  # fmt: skip


SETTINGS = """<settings xmlns="http://maven.apache.org/SETTINGS/1.2.0"><mirrors>
<mirror><id>b</id><mirrorOf>external:http:*</mirrorOf>
<url>http://0.0.0.0/</url><blocked>true</blocked></mirror>
<mirror><id>m</id><mirrorOf>{of}</mirrorOf><url>https://mirror.example/maven</url></mirror>
</mirrors></settings>"""


@pytest.mark.parametrize(
    ("of", "expected"),
    [("central", True), ("*", True), ("*,!central", False), ("other", False)],
)
def test_the_users_maven_mirror_is_used(tmp_path, monkeypatch, of, expected):
    monkeypatch.delenv("DEFAULT_ARTIFACT_REPOSITORY", raising=False)
    (tmp_path / "settings.xml").write_text(SETTINGS.format(of=of))
    assert ("mirror.example" in jars.settings_xml(tmp_path, [])) == expected
    monkeypatch.setenv("DEFAULT_ARTIFACT_REPOSITORY", "https://first.example/")
    assert "first.example" in jars.settings_xml(tmp_path, ["https://second.example/"])


def test_sparks_own_settings_and_the_proxy_are_heeded(tmp_path, monkeypatch):
    (tmp_path / "spark-defaults.conf").write_text(
        "# comment\nspark.jars.ivy  /tmp/ivy\nspark.jars.repositories=https://a,https://b\n"
    )
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    assert jars.spark_defaults() == {
        "spark.jars.ivy": "/tmp/ivy", "spark.jars.repositories": "https://a,https://b",
    }  # fmt: skip
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert jars.proxy_properties() == []
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", "localhost,.example")
    assert jars.proxy_properties() == [
        "-Dhttps.proxyHost=proxy.example", "-Dhttps.proxyPort=3128",
        "-Dhttp.nonProxyHosts=localhost|*.example",
    ]  # fmt: skip


def test_the_command_prints_the_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nothing"))
    assert jars.main(["delta", "--into", str(tmp_path)]) == 1
    assert "JavaMissing" in capsys.readouterr().err
    key = json.dumps([sorted(jars.DELTA), False])
    (tmp_path / ".resolved.json").write_text(json.dumps({key: ["x.jar"]}))
    (tmp_path / "x.jar").write_text("")
    assert jars.main(["delta", "--into", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [str(tmp_path / "x.jar")]


def test_a_quick_home_links_the_installed_code(tmp_path):
    """The name Spark puts first on its workers' path leads to code that has compiled forms."""
    pyspark = pytest.importorskip("pyspark")
    from pk.sparkconnector.sessions import quick_home

    home = quick_home(tmp_path / "home")
    assert home == tmp_path / "home"
    assert (home / "bin" / "spark-submit").is_file()
    assert (home / "python/lib/pyspark.zip/pyspark/__init__.py").samefile(pyspark.__file__)
    assert len(list((home / "python/lib").glob("py4j-*-src.zip"))) == 1
    (home / "jars").unlink()
    (home / "jars").symlink_to(tmp_path)
    quick_home(home)
    assert list((home / "jars").glob("ivy-*.jar")), "a stale link is renewed"
    (tmp_path / "file").write_text("")
    assert quick_home(tmp_path / "file" / "below") is None
