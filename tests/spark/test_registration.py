"""How `format("pk")` is found, and the error if it is not.  The tests are slow, because each has a
session of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

SCRIPT = """
import json, os, subprocess, sys
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").config(
    "spark.driver.host", "127.0.0.1").getOrCreate()
def count():
    try:
        return spark.read.format("pk").option("pk.bootstrap.servers", sys.argv[1]).option(
            "subscribe", sys.argv[2]).load().count()
    except Exception as cause:
        return str(cause)[:3000]
found = [count()]
if "DATA_SOURCE_NOT_FOUND" in str(found[0]):
    from pk.sparkconnector import register
    register(spark)
    found.append(count())
print("RESULT " + json.dumps(found))
"""


def run(cluster, topic, tmp_path, **environment) -> list:
    """Run code in a fresh interpreter; `environment` None = unset."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    variables = {**os.environ, **environment}
    variables = {name: value for name, value in variables.items() if value is not None}
    ran = subprocess.run(
        [sys.executable, str(script), cluster.address, topic],
        env=variables, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    lines = [line for line in ran.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, ran.stderr[-3000:]
    return json.loads(lines[-1][len("RESULT ") :])


def bare_python(tmp_path) -> str:
    """Return a PATH whose python3 has neither pyspark nor pk, as outside an activated
    environment.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    python = folder / "python3"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_no_registration_is_needed_with_the_right_interpreter(cluster, tmp_path):
    topic = cluster.topic(tier_enable=False)
    cluster.fill(topic, 7)
    right = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": None, "SPARK_HOME": None}
    found = run(cluster, topic, tmp_path, **right)
    assert found == [7]


def test_without_it_the_doctor_names_the_cause_and_register_helps(cluster, tmp_path):
    topic = cluster.topic(tier_enable=False)
    cluster.fill(topic, 7)
    # a session of another test in this process has set the first three
    unset = dict.fromkeys(("SPARK_HOME", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"))
    unset |= {"PATH": bare_python(tmp_path)}
    found = run(cluster, topic, tmp_path, **unset)
    assert "DATA_SOURCE_NOT_FOUND" in found[0]
    assert found[1:] == [7]
    variables = {n: v for n, v in {**os.environ, **unset}.items() if v is not None}
    told = subprocess.run(
        [sys.executable, "-m", "pk.cli", "doctor", "spark", "--json"],
        env=variables, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr  # a session of pk finds it
    checks = {check["name"]: check for check in json.loads(told.stdout)["checks"]}
    assert "DATA_SOURCE_NOT_FOUND" in checks["other sessions"]["found"]
    assert "PYSPARK_PYTHON is not set" in checks["other sessions"]["found"]
    assert f"export PYSPARK_PYTHON={sys.executable}" in checks["other sessions"]["fix"]
