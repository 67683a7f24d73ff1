"""The jar of the columnar reader: builds it from sparkconnector/java, finds it, names its build.

The jar holds classes that extend Spark's own, so `javac` compiles them against the jars of pyspark.
It lies beside its sources and travels in the wheel with them.  `session()` adds it to the classpath
of Spark.  Without it, and without `javac` to build it, every read goes through Python.

Invariants
  I1  The build of a jar is the hash of the sources that it was compiled from.  A jar of another
      build than the sources' is never used.
  I2  The jar appears under its name only when it is complete (rename).  The same sources always
      give a jar with the same entries and dates.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path

from pk import errors

SOURCES = Path(__file__).resolve().parent / "java"
NAME = "pk-columnar.jar"
#: The oldest Java of Spark 4.
RELEASE = "17"
_BUILD_ENTRY = "pk/build.txt"
_JAVAC_TIMEOUT_S = 300
_EPOCH = (1980, 1, 1, 0, 0, 0)


def path() -> Path:
    """Return where the jar lies if it was built."""
    return SOURCES / NAME


@cache
def build_of_sources() -> str:
    """Return the build that a jar of the present sources has (I1)."""
    hashed = hashlib.sha256()
    for source in _sources():
        text = source.read_bytes()
        hashed.update(f"{source.relative_to(SOURCES)} {len(text)}\n".encode())
        hashed.update(text)
    return hashed.hexdigest()[:16]


def build_of(jar: Path) -> str | None:
    """Return the build of a jar; None if the file is missing or is no jar of this reader."""
    try:
        with zipfile.ZipFile(jar) as opened:
            return opened.read(_BUILD_ENTRY).decode("ascii", "replace").strip()
    except (OSError, KeyError, zipfile.BadZipFile):
        return None


def problem() -> str:
    """Return why there is no jar to use; empty if there is one."""
    build = build_of(path())
    if build is None:
        return f"{path()} was not built ({_how()})"
    if build != build_of_sources():
        return f"{path()} is of another build than its sources ({_how()})"
    return ""


def build(spark_jars: Path | None = None) -> Path:
    """Compile the jar if it is missing or of another build, and return its path.

    spark_jars: the folder of the jars to compile against; None = pyspark's
    Raises `JavaMissing` without javac, `JarsMissing` without Spark's jars or if javac refuses the
    sources.
    """
    if not problem():
        return path()
    compiler = find_javac()
    if compiler is None:
        raise errors.JavaMissing(
            "there is no `javac` beside the java that Spark starts, nor on PATH: install a JDK 17 "
            "(Debian, Ubuntu: openjdk-17-jdk-headless)"
        )
    folder = spark_jars or _spark_jars()
    with tempfile.TemporaryDirectory(prefix=".pk-columnar-", dir=SOURCES) as scratch:
        classes = Path(scratch) / "classes"
        _compile(compiler, folder, classes)
        fresh = Path(scratch) / NAME
        _pack(classes, fresh)
        os.replace(fresh, path())  # I2
    return path()


def _compile(compiler: str, spark_jars: Path, classes: Path) -> None:
    command = [compiler, "--release", RELEASE, "-proc:none", "-nowarn", "-d", str(classes)]
    command += ["-classpath", f"{spark_jars}/*", *map(str, _sources())]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=_JAVAC_TIMEOUT_S, check=False
    )
    if ran.returncode:
        raise errors.JarsMissing(
            f"javac refuses the sources of the columnar reader against {spark_jars}:\n"
            + (ran.stderr + ran.stdout)[-3000:]
        )


def _pack(classes: Path, jar: Path) -> None:
    """Write the jar: a zip file with fixed dates and a sorted list of entries (I2)."""
    files = {str(each.relative_to(classes)): each for each in classes.rglob("*.class")}
    with zipfile.ZipFile(jar, "w", zipfile.ZIP_DEFLATED) as opened:
        opened.writestr(_entry("META-INF/MANIFEST.MF"), "Manifest-Version: 1.0\n")
        opened.writestr(_entry(_BUILD_ENTRY), build_of_sources() + "\n")
        for name in sorted(files):
            opened.writestr(_entry(name), files[name].read_bytes())


def _entry(name: str) -> zipfile.ZipInfo:
    found = zipfile.ZipInfo(name, _EPOCH)
    found.compress_type = zipfile.ZIP_DEFLATED
    return found


def find_javac() -> str | None:
    """Return the compiler: beside the java of JAVA_HOME, else on PATH; None if there is none."""
    home = os.environ.get("JAVA_HOME", "")
    beside = Path(home) / "bin" / "javac"
    if home and os.access(beside, os.X_OK):
        return str(beside)
    return shutil.which("javac")


def _sources() -> list[Path]:
    return sorted(SOURCES.rglob("*.java"))


def _spark_jars() -> Path:
    from pk.sparkconnector.jars import spark_jars_folder

    return spark_jars_folder()


def _how() -> str:
    return f"{sys.executable} -m pk.sparkconnector.columnar_jar builds it; that needs javac"


def main() -> int:
    """Run `python -m pk.sparkconnector.columnar_jar`: build if needed, print the jar's path.

    A machine without javac, or without Spark, gets a warning and goes on: reads then go through
    Python.
    """
    try:
        print(build())
    except errors.PkError as error:
        print(f"warning: no columnar reader: {error.message}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
