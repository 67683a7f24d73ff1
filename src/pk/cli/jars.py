"""`pk jars`: prints the jar of the columnar reader, for Spark sessions that pk did not create."""

from __future__ import annotations

import typer

from pk import errors
from pk.cli.common import AsJson, quiet_end, say
from pk.sparkconnector import columnar_jar

app = typer.Typer(add_completion=False)


@app.command()
def jars(as_json: AsJson = False) -> None:
    """Print the path of the jar that lets Spark's JVM read topics in columns.

    `pk.sparkconnector.session()` adds the jar by itself.  A read uses it with the option
    `columnar` = `true`, or with PK_SPARK_COLUMNAR=true in the environment.  Others get it by
    `spark-submit --jars "$(pk jars)"`.

    Example: pk jars --json
    """
    problem = columnar_jar.problem()
    if problem:
        raise errors.JarsMissing(problem)
    path = columnar_jar.path()
    with quiet_end():
        if as_json:
            say({"path": str(path), "build": columnar_jar.build_of_sources()})
            return
        print(path)
