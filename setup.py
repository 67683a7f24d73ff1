"""Builds the jar of the columnar reader before the wheel; everything else is in pyproject.toml.

An isolated build has no pyspark.  Then the jar needs SPARK_HOME, or was built before
(`make setup`); without either the wheel has no jar, and every read goes through Python.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent


class BuildJar(build_py):
    """Packs the Python files after it has tried to build the jar."""

    def run(self) -> None:
        try:
            sys.path.insert(0, str(HERE / "src"))
            runpy.run_module("pk.sparkconnector.columnar_jar", run_name="pk_jar")["main"]()
        except ImportError as cause:
            print(f"warning: no columnar reader: {cause}", file=sys.stderr)
        finally:
            sys.path.remove(str(HERE / "src"))
        super().run()


setup(cmdclass={"build_py": BuildJar})
