"""Downloads Maven artefacts for Spark sessions and tests, with the Ivy that ships inside pyspark.

It needs only Java and pyspark.  After the first download it needs no network: the file
`<folder>/.resolved.json` records which jars belong to which coordinates.  While those jars exist,
`resolve` starts no Java and sends no request.

The source of artefacts is the first of these that applies; each is what Spark itself would use:
  1. the argument `ivy_settings`, or `spark.jars.ivySettings` of spark-defaults.conf: that file,
     unchanged;
  2. else the local Maven repository (`~/.m2/repository`), the repositories of
     `spark.jars.repositories`, then `DEFAULT_ARTIFACT_REPOSITORY` if set, else the mirror that
     `~/.m2/settings.xml` names for central, else Ivy's own default (Maven Central).
Java does not read `https_proxy`/`http_proxy`, so they are passed to it as system properties.

Invariants
  J1  A jar appears in the folder under its final name only when it is complete (rename).
  J2  Concurrent `resolve` calls on one folder run one after another (lock file).
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import quoteattr

from pk import errors
from pk.sparkconnector.java import find_java

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Delta for Spark 4.2: Delta needs only these two beside the jars that Spark ships.
DELTA = ("io.delta:delta-spark_4.2_2.13:4.4.0", "io.delta:delta-storage:4.4.0")
#: Spark's Kafka connector; its other dependencies are among Spark's own jars. The token provider is
#: of version 4.0, because some mirrors lack 4.2's; the connector uses nothing of it that changed.
SPARK_KAFKA = (
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
    "org.apache.kafka:kafka-clients:3.9.2",
    "org.apache.commons:commons-pool2:2.13.1",
)
#: Apache Kafka's broker; its dependencies are downloaded too (`transitive=True`).
KAFKA_BROKER = ("org.apache.kafka:kafka_2.13:4.1.0",)

_SETS: dict[str, tuple[tuple[str, ...], bool]] = {
    "delta": (DELTA, False),
    "spark-kafka": (SPARK_KAFKA, False),
    "kafka": (KAFKA_BROKER, True),
}
_RESOLVE_TIMEOUT_S = 900
_MANIFEST = ".resolved.json"

Printer = Callable[[str], None]


class Coordinate(NamedTuple):
    """A Maven coordinate, `group:artifact:version`."""

    group: str
    artifact: str
    version: str

    @classmethod
    def parse(cls, text: str) -> Coordinate:
        parts = text.strip().split(":")
        if len(parts) != 3 or not all(parts):
            raise errors.InvalidOption(
                f"a Maven coordinate is group:artifact:version, not {text!r}"
            )
        return cls(*parts)


def default_folder() -> Path:
    """Return the default folder for jars.

    It lies inside the Python environment, so deleting the environment deletes the jars.
    """
    return Path(sys.prefix) / "share" / "pk" / "jars"


def resolve(
    coordinates: Sequence[str],
    *,
    transitive: bool = False,
    folder: Path | None = None,
    ivy_settings: Path | None = None,
    progress: Printer | None = None,
) -> list[Path]:
    """Return the jars of `coordinates`; download those that are missing.

    If `transitive`, the dependencies are included.  Raises `JavaMissing`, or `JarsMissing` with
    Ivy's last lines if an artefact cannot be downloaded.
    """
    wanted = [Coordinate.parse(text) for text in coordinates]
    into = default_folder() if folder is None else Path(folder)
    key = json.dumps([sorted(map(":".join, wanted)), transitive])
    present = _remembered(into, key)
    if present is not None:
        return present
    say = progress or (lambda line: None)
    into.mkdir(parents=True, exist_ok=True)
    with _locked(into / ".lock"):
        # another process may have downloaded them while this one waited for the lock
        present = _remembered(into, key)
        if present is not None:
            return present
        with tempfile.TemporaryDirectory(prefix=".ivy-", dir=into) as scratch:
            jars = _fetch(wanted, transitive, into, Path(scratch), ivy_settings, say)
            placed = []
            for jar in jars:
                os.replace(jar, into / jar.name)  # J1
                placed.append(into / jar.name)
        _remember(into, key, placed)
    say(f"{len(placed)} jars in {into}")
    return placed


def installed(
    coordinates: Sequence[str], *, transitive: bool = False, folder: Path | None = None
) -> list[Path] | None:
    """Return what `resolve` would return, without downloading; None if a jar is missing."""
    wanted = [Coordinate.parse(text) for text in coordinates]
    key = json.dumps([sorted(map(":".join, wanted)), transitive])
    return _remembered(default_folder() if folder is None else Path(folder), key)


def _manifest(folder: Path) -> dict[str, list[str]]:
    try:
        found = json.loads((folder / _MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _remembered(folder: Path, key: str) -> list[Path] | None:
    names = _manifest(folder).get(key)
    if not names:
        return None
    jars = [folder / name for name in names]
    return jars if all(jar.is_file() for jar in jars) else None


def _remember(folder: Path, key: str, jars: Sequence[Path]) -> None:
    manifest = _manifest(folder)
    manifest[key] = [jar.name for jar in jars]
    fresh = folder / f"{_MANIFEST}.new"
    fresh.write_text(json.dumps(manifest, indent=1, sort_keys=True))
    os.replace(fresh, folder / _MANIFEST)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def spark_jars_folder() -> Path:
    """Return the folder of pyspark's jars.  Raises `JarsMissing` without pyspark."""
    home = os.environ.get("SPARK_HOME")
    if home and (Path(home) / "jars").is_dir():
        return Path(home) / "jars"
    from importlib.util import find_spec

    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise errors.JarsMissing("pyspark is not installed: pip install 'pk-log[spark]'")
    return Path(spec.origin).parent / "jars"


def _ivy_jar() -> Path:
    found = sorted(spark_jars_folder().glob("ivy-[0-9]*.jar"))
    if not found:
        raise errors.JarsMissing(
            f"no ivy-*.jar in {spark_jars_folder()}: this is not a complete pyspark"
        )
    return found[-1]


def _fetch(
    wanted: Sequence[Coordinate],
    transitive: bool,
    into: Path,
    scratch: Path,
    ivy_settings: Path | None,
    say: Printer,
) -> list[Path]:
    java, ivy = find_java(), _ivy_jar()
    defaults = spark_defaults()
    settings = ivy_settings or (
        Path(defaults["spark.jars.ivySettings"]) if "spark.jars.ivySettings" in defaults else None
    )
    if settings is None:
        settings = scratch / "settings.xml"
        extra = [
            url for url in defaults.get("spark.jars.repositories", "").split(",") if url.strip()
        ]
        settings.write_text(settings_xml(Path.home() / ".m2", extra))
    elif not settings.is_file():
        raise errors.JarsMissing(f"the Ivy settings file {settings} does not exist")
    module = scratch / "ivy.xml"
    module.write_text(module_xml(wanted, transitive))
    cache = Path(defaults.get("spark.jars.ivy") or into.parent / "ivy") / "cache"
    retrieved = scratch / "out"
    command = [
        java.command,
        *proxy_properties(),
        "-jar",
        str(ivy),
        "-settings",
        str(settings),
        "-ivy",
        str(module),
    ]
    command += ["-cache", str(cache), "-confs", "default", "-types", "jar", "bundle"]
    command += ["-retrieve", f"{retrieved}/[artifact]-[revision](-[classifier]).[ext]"]
    say(f"resolving {', '.join(map(':'.join, wanted))}{' with dependencies' if transitive else ''}")
    _run_ivy(command, say)
    jars = sorted(retrieved.glob("*.jar")) if retrieved.is_dir() else []
    names = {jar.name for jar in jars}
    lacking = [c for c in wanted if f"{c.artifact}-{c.version}.jar" not in names]
    if lacking:
        raise errors.JarsMissing(f"Ivy found no jar of {', '.join(map(':'.join, lacking))}")
    return jars


def _run_ivy(command: Sequence[str], say: Printer) -> None:
    """Run Ivy and show what it downloads; raise `JarsMissing` if it fails."""
    tail: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as ivy:
        assert ivy.stdout is not None
        for line in ivy.stdout:
            line = line.strip()
            tail = [*tail[-200:], line]
            if line.startswith(("downloading", "[SUCCESSFUL")):
                say(line)
        code = ivy.wait(timeout=_RESOLVE_TIMEOUT_S)
    troubles = [
        line for line in tail if "UNRESOLVED" in line or "FAILED" in line or "not found" in line
    ]
    if code != 0 or any("UNRESOLVED DEPENDENCIES" in line for line in tail):
        reason = "\n  ".join(dict.fromkeys(troubles or tail[-10:]))
        raise errors.JarsMissing(
            f"Ivy could not fetch the jars:\n  {reason}\nIs the network up, "
            "and are a proxy or mirror set (https_proxy, ~/.m2/settings.xml, "
            "DEFAULT_ARTIFACT_REPOSITORY, spark.jars.ivySettings)?"
        )


def module_xml(wanted: Sequence[Coordinate], transitive: bool) -> str:
    """Return the Ivy module file whose dependencies are exactly `wanted`."""
    conf = "default->default" if transitive else "default->master(*)"
    lines = [
        f"<dependency org={quoteattr(c.group)} name={quoteattr(c.artifact)} "
        f"rev={quoteattr(c.version)} "
        f'force="true" conf="{conf}" transitive="{str(transitive).lower()}"/>'
        for c in wanted
    ]
    return (
        '<ivy-module version="2.0"><info organisation="pk" module="jars" revision="1"/>'
        '<configurations><conf name="default"/></configurations>'
        f"<dependencies>{''.join(lines)}</dependencies></ivy-module>"
    )


def settings_xml(m2: Path, repositories: Sequence[str]) -> str:
    """Return Ivy settings: Spark's default chain of repositories, the user's mirror before central.

    `dual`: a local Maven repository may hold a POM without its jar; then Ivy looks for the jar in
    the next repositories.
    """
    local = (m2 / "repository").as_uri() + "/"
    chain = [
        '<ibiblio name="local-m2" m2compatible="true" checkmodified="true" '
        f"root={quoteattr(local)}/>"
    ]
    for number, url in enumerate(repositories):
        chain.append(
            f'<ibiblio name="repo-{number}" m2compatible="true" root={quoteattr(url.strip())}/>'
        )
    central = os.environ.get("DEFAULT_ARTIFACT_REPOSITORY") or maven_mirror(m2 / "settings.xml")
    root = f" root={quoteattr(central)}" if central else ""
    chain.append(f'<ibiblio name="central" m2compatible="true"{root}/>')
    return (
        '<ivysettings><settings defaultResolver="chain"/><resolvers>'
        f'<chain name="chain" returnFirst="true" dual="true">{"".join(chain)}</chain>'
        "</resolvers></ivysettings>"
    )


def maven_mirror(settings: Path) -> str | None:
    """Return the URL of the mirror of central in Maven's settings; None if there is none."""
    try:
        root = ElementTree.parse(settings).getroot()
    except (OSError, ElementTree.ParseError):
        return None
    space = root.tag[: root.tag.index("}") + 1] if root.tag.startswith("{") else ""
    for mirror in root.iter(f"{space}mirror"):
        covers = (mirror.findtext(f"{space}mirrorOf") or "").replace(" ", "").split(",")
        url = (mirror.findtext(f"{space}url") or "").strip()
        matches = {"*", "central", "external:*"} & set(covers) and "!central" not in covers
        if matches and url and (mirror.findtext(f"{space}blocked") or "") != "true":
            return url
    return None


def spark_defaults() -> dict[str, str]:
    """Return the settings in `spark-defaults.conf`, at Spark's place for it; {} without it."""
    folder = os.environ.get("SPARK_CONF_DIR")
    home = os.environ.get("SPARK_HOME")
    path = Path(folder) if folder else Path(home) / "conf" if home else None
    found: dict[str, str] = {}
    if path is None or not (path / "spark-defaults.conf").is_file():
        return found
    for line in (path / "spark-defaults.conf").read_text().splitlines():
        name, _, value = line.strip().replace("=", " ", 1).partition(" ")
        if name and not name.startswith("#"):
            found[name] = value.strip()
    return found


def proxy_properties() -> list[str]:
    """Return the environment's proxy as Java system properties."""
    properties = []
    for scheme in ("https", "http"):
        url = urlsplit(
            os.environ.get(f"{scheme}_proxy") or os.environ.get(f"{scheme.upper()}_PROXY") or ""
        )
        if url.hostname:
            properties += [
                f"-D{scheme}.proxyHost={url.hostname}",
                f"-D{scheme}.proxyPort={url.port or 80}",
            ]
    spared = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if properties and spared:
        hosts = "|".join(
            f"*{h.strip()}" if h.strip().startswith(".") else h.strip() for h in spared.split(",")
        )
        properties.append(f"-Dhttp.nonProxyHosts={hosts}")
    return properties


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `python -m pk.sparkconnector.jars [SET | COORDINATE …]`: download, print the paths."""
    parser = argparse.ArgumentParser(
        prog="python -m pk.sparkconnector.jars", description="Fetch jars with Spark's own Ivy."
    )
    parser.add_argument(
        "what", nargs="*", default=["delta"], help=f"{', '.join(_SETS)} or group:artifact:version"
    )
    parser.add_argument("--transitive", action="store_true", help="with all dependencies")
    parser.add_argument("--into", type=Path, help=f"folder (default {default_folder()})")
    parser.add_argument("--json", action="store_true", help="print the paths as JSON")
    given = parser.parse_args(arguments)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    jars: list[Path] = []
    loose = [name for name in given.what if name not in _SETS]
    try:
        for name in given.what:
            if name in _SETS:
                jars += resolve(
                    _SETS[name][0], transitive=_SETS[name][1], folder=given.into, progress=say
                )
        if loose:
            jars += resolve(loose, transitive=given.transitive, folder=given.into, progress=say)
    except errors.PkError as error:
        print(f"{type(error).__name__}: {error.message}", file=sys.stderr)
        return 1
    paths = [str(jar) for jar in dict.fromkeys(jars)]
    print(json.dumps(paths) if given.json else "\n".join(paths))
    return 0


if __name__ == "__main__":
    sys.exit(main())
