"""Compiles the columnar reader against several releases of Spark: `make columnar-versions`.

The classes extend internals of Spark, which no release promises to keep.  The jars of a release
are downloaded once, into the environment; everything that is not Spark's comes from pyspark.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from pk import errors
from pk.sparkconnector import columnar_jar, jars

VERSIONS = ("4.0.1", "4.1.1", "4.2.0")
#: javac runs for seconds: the first of its compilers alone takes half the CPU time.
QUICK = ("-J-XX:TieredStopAtLevel=1", "-J-XX:+UseSerialGC")
_ARTIFACTS = (
    "core_2.13",
    "catalyst_2.13",
    "sql_2.13",
    "sql-api_2.13",
    "common-utils_2.13",
    "unsafe_2.13",
)


def classpath(version: str) -> list[Path]:
    """Return the jars of a release; those of the installed pyspark need no download."""
    ours = sorted(jars.spark_jars_folder().glob("*.jar"))
    if any(each.name == f"spark-sql_2.13-{version}.jar" for each in ours):
        return ours
    names = list(_ARTIFACTS)
    if version >= "4.1":
        names.append("common-utils-java_2.13")
    wanted = [f"org.apache.spark:spark-{name}:{version}" for name in names]
    folder = jars.default_folder().parent / f"spark-{version}"
    found = jars.resolve(wanted, folder=folder, progress=print)
    return found + [each for each in ours if not each.name.startswith("spark-")]


def main(versions: list[str]) -> int:
    """Compile against each release; 1 if javac refuses the sources, or a release is missing."""
    compiler = columnar_jar.find_javac()
    if compiler is None:
        print("error: no javac (Debian: apt-get install openjdk-17-jdk-headless)")
        return 1
    failed = 0
    for version in versions or VERSIONS:
        with tempfile.TemporaryDirectory() as classes:
            try:
                path = ":".join(map(str, classpath(version)))
            except errors.PkError as cause:
                print(f"{version}: {cause.message}")
                failed = 1
                continue
            command = [compiler, *QUICK, "--release", columnar_jar.RELEASE, "-proc:none", "-nowarn"]
            command += ["-d", classes, "-classpath", path]
            ran = subprocess.run(
                [*command, *map(str, sorted(columnar_jar.SOURCES.rglob("*.java")))],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            print(f"{version}: {'refused' if ran.returncode else 'compiled'}")
            if ran.returncode:
                print(ran.stderr + ran.stdout)
                failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
