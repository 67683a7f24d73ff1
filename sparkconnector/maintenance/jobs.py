"""The jobs by name, for the command line and the runner.

A job is a function of a Spark session, a cluster and a topic.  A session is started when the first
job needs one, and is used by all later ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from pk import errors, schedules

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class JobReport(Protocol):
    """The result of a run."""

    @property
    def outcome(self) -> str:
        """`done` or `damaged`."""

    def summary(self) -> str:
        """Return one line for people."""


class SparkHolder:
    """A Spark session that is started at its first use.

    Another thread than that of the job may call `cancel`.
    """

    def __init__(self, master: str) -> None:
        self._master = master
        self._session: SparkSession | None = None

    def session(self) -> SparkSession:
        """Return the session.  Raises `JavaMissing`, `JarsMissing`."""
        if self._session is None:
            from pk.sparkconnector import session

            self._session = session("pk maintenance", master=self._master)
            self._session.sparkContext.setLogLevel("ERROR")
        return self._session

    def cancel(self) -> None:
        """Cancel the Spark jobs that run; what called them gets an error."""
        if self._session is not None:
            self._session.sparkContext.cancelAllJobs()

    def stop(self) -> None:
        """End the session and its JVM."""
        if self._session is not None:
            self._session.stop()
            self._session = None


Work = Callable[..., JobReport]


def _optimize(spark: SparkHolder, bootstrap: str, topic: str, **options: Any) -> JobReport:
    from pk.sparkconnector.maintenance.optimize import optimize

    return optimize(spark.session(), bootstrap, topic, **options)


def _compaction(spark: SparkHolder, bootstrap: str, topic: str, **options: Any) -> JobReport:
    from pk.sparkconnector.maintenance.compaction import compaction

    return compaction(spark.session(), bootstrap, topic, **options)


def _audit(spark: SparkHolder, bootstrap: str, topic: str) -> JobReport:
    from pk.sparkconnector.maintenance.audit import audit

    return audit(spark.session(), bootstrap, topic)


def _sweep(_spark: SparkHolder, bootstrap: str, topic: str, **options: Any) -> JobReport:
    from pk.sparkconnector.maintenance.sweep import sweep

    return sweep(bootstrap, topic, **options)


def _snapshot(spark: SparkHolder, bootstrap: str, topic: str, **options: Any) -> JobReport:
    from pk.sparkconnector.maintenance.snapshot import snapshot

    return snapshot(spark.session(), bootstrap, topic, **options)


def _retention(_spark: SparkHolder, bootstrap: str, topic: str) -> JobReport:
    from pk.sparkconnector.maintenance.owner_jobs import retention

    return retention(bootstrap, topic)


def _vacuum(_spark: SparkHolder, bootstrap: str, topic: str) -> JobReport:
    from pk.sparkconnector.maintenance.owner_jobs import vacuum

    return vacuum(bootstrap, topic)


#: job → its function, and the options that it takes
WORK: dict[str, tuple[Work, tuple[str, ...]]] = {
    "optimize": (_optimize, ("target_bytes",)),
    "compaction": (_compaction, ("target_bytes", "force", "progress")),
    "audit": (_audit, ()),
    "sweep": (_sweep, ("older_than_ms",)),
    "snapshot": (_snapshot, ("whole",)),
    "retention": (_retention, ()),
    "vacuum": (_vacuum, ()),
}
assert WORK.keys() == schedules.JOBS.keys()


def run_job(
    spark: SparkHolder, bootstrap: str, topic: str, job: str, options: dict[str, Any] | None = None
) -> JobReport:
    """Run a job.  Raises `InvalidRequest` for an unknown one, and the errors of the job."""
    check_options(job, options or {})
    work, _ = WORK[job]
    return work(spark, bootstrap, topic, **(options or {}))


def check_options(job: str, options: dict[str, Any]) -> None:
    """Raise `InvalidRequest` for an unknown job, `InvalidOption` for an option of another job."""
    schedules.check_job(job)
    for name in options:
        if name not in WORK[job][1]:
            of = ", ".join(each for each, (_, names) in WORK.items() if name in names)
            shown = f"--{name.removesuffix('_ms').replace('_', '-')}"
            raise errors.InvalidOption(f"{shown} is an option of {of}, not of {job}", option=name)
