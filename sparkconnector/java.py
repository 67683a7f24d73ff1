"""Finds the Java runtime that Spark will use, and explains how to install one.

Spark 4.2 needs Java 17 or newer.  `JAVA_HOME` wins over `PATH`, as in Spark's own launch scripts.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from pk import errors

#: The oldest Java that Spark 4.2 runs on.
JAVA_LEAST = 17
_VERSION_TIMEOUT_S = 30

HOW_TO_GET_JAVA = (
    "Install Java 17 or newer: Debian and Ubuntu `sudo apt-get install openjdk-17-jre-headless`, "
    "Fedora `sudo dnf install java-17-openjdk-headless`, macOS `brew install openjdk@17`; "
    "or set JAVA_HOME to one that is there."
)


class Java(NamedTuple):
    """A Java runtime: its launcher and its feature release (8, 17, 21 …)."""

    command: str
    release: int


def find_java() -> Java:
    """Return the Java that Spark would start.  Raises `JavaMissing` if none, or none new enough."""
    home = os.environ.get("JAVA_HOME", "")
    command = str(Path(home) / "bin" / "java") if home else shutil.which("java") or ""
    if home and not os.access(command, os.X_OK):
        raise errors.JavaMissing(
            f"JAVA_HOME is {home}, but {command} cannot be run. {HOW_TO_GET_JAVA}"
        )
    if not command:
        raise errors.JavaMissing(
            f"there is no `java` on PATH and JAVA_HOME is not set. {HOW_TO_GET_JAVA}"
        )
    try:
        ran = subprocess.run(
            [command, "-version"],
            capture_output=True,
            text=True,
            timeout=_VERSION_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as cause:
        raise errors.JavaMissing(
            f"{command} -version failed: {cause}. {HOW_TO_GET_JAVA}"
        ) from cause
    release = release_of(ran.stderr + ran.stdout)
    if release is None:
        raise errors.JavaMissing(f"{command} -version did not name a version. {HOW_TO_GET_JAVA}")
    if release < JAVA_LEAST:
        raise errors.JavaMissing(
            f"{command} is Java {release}; Spark 4.2 needs 17 or newer. {HOW_TO_GET_JAVA}"
        )
    return Java(command, release)


def release_of(version_text: str) -> int | None:
    """Return the feature release in the output of `java -version`; None if it is unknown.

    It is 8 for `1.8.0_402` and 17 for `17.0.15`.
    """
    found = re.search(r'version "(\d+)(?:\.(\d+))?', version_text)
    if found is None:
        return None
    first, second = int(found[1]), found[2]
    return int(second) if first == 1 and second is not None else first
