"""Closes the logs of a data directory, many in one visit, and opens what such a stop vouches for.

A sync costs waiting and hardly any work: a file system commits all syncs that wait together at
once (log/creation).  So a visit first writes what the next opening of each log needs, and then
syncs the files and directories of all these logs together.

Rules
  N1  A log that cannot be closed properly does not stop the others of its visit, and is examined by
      the next start (log/manager M4).  A failed sync stops them all (rule L2).
  N2  The size of a visit is bounded: it holds the descriptors of its logs (log/descriptor_pool).
  N3  The lines (log/closed_logs) are written behind everything that they describe, and in front of
      the mark of a clean stop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from pk import errors
from pk.log import closed_logs, closed_logs_file
from pk.log.directory import Directory
from pk.log.identity import HERE, Identity
from pk.log.loading import Loaded
from pk.log.partition_log import PartitionLog
from pk.log.plan import LogConfig
from pk.log.storage import Disk, File, Storage
from pk.types import PartitionKey, TopicPartition

#: N2: the most logs of one visit.
VISIT_MAX = 256
#: What the storage raises for one log; the second if its directory was removed.
_FAILURES = (errors.PkError, FileNotFoundError)


class Closed(NamedTuple):
    """A log for which a clean stop vouches.  config: the topic's; None = not known yet."""

    name: str
    path: str
    identity: Identity
    line: str
    config: LogConfig | None = None

    @property
    def key(self) -> PartitionKey:
        return self.identity.key


class OpenLog(Protocol):
    """Opens a log of `directory`, from `loaded` if that is given."""

    def __call__(
        self,
        directory: Directory,
        path: str,
        tp: TopicPartition,
        topic_id: str,
        config: LogConfig,
        loaded: Loaded | None = None,
        /,
    ) -> PartitionLog: ...


async def close_all(
    disk: Disk, logs: Sequence[PartitionLog], clean: bool
) -> tuple[dict[str, str], list[bool]]:
    """Close logs: flush all of each if `clean`.  Return the lines of those that have one, by path,
    and whether each was closed without an error.
    """
    lines: dict[str, str] = {}
    closed: list[bool] = []
    for log in logs:
        log.retire()
    for at in range(0, len(logs), VISIT_MAX):
        some = logs[at : at + VISIT_MAX]
        found = await disk.write(partial(_close, disk.storage, some, clean))
        lines |= {log.path: line for log, line in zip(some, found, strict=True) if line}
        closed += [line is not None for line in found]
    return lines, closed


def _close(storage: Storage, logs: Sequence[PartitionLog], clean: bool) -> list[str | None]:
    """In the write lane: close logs.  Return the line of each, "" = none; None = it failed."""
    found: dict[PartitionLog, str | None] = dict.fromkeys(logs)
    ready: list[PartitionLog] = []
    files, directories = list[File](), list[str]()
    try:
        for log in logs if clean else ():
            with contextlib.suppress(*_FAILURES):
                more = log.begin_close(vouched=True)
                files, directories = files + more[0], directories + more[1]
                ready.append(log)
        try:
            storage.sync_all(files, directories)
        except FileNotFoundError:  # the directory of a log was removed: find out which
            ready = [log for log in ready if storage.exists(log.path)]
            for log in ready:
                storage.sync_all(*log.begin_close(vouched=True))
        for log in ready:
            with contextlib.suppress(*_FAILURES):
                found[log] = log.end_close()
    except errors.PkError:
        pass  # N1: none of them is closed properly
    finally:
        for log in logs:
            with contextlib.suppress(*_FAILURES):
                log.close(False)
                if not clean:
                    found[log] = ""
    return [found[log] for log in logs]


async def write_lines(disk: Disk, lines: Mapping[str, str]) -> None:
    """Write the lines, SYNCED (N3).  Without room for them the next start reads every log."""
    with contextlib.suppress(errors.StorageFull):
        await disk.write(partial(closed_logs_file.write, disk.storage, lines))


def closed(directory: Directory, name: str, path: str) -> Closed | None:
    """Return what the last stop says about the log in the directory `name`; None = nothing that is
    certain.
    """
    line, known = directory.closed_logs.get(name), directory.identities.get(name)
    if line is None or known is None or known.state != HERE:
        return None
    identity = known.identity
    mine = str(identity.topic_partition) == name
    if not mine or identity.topic_id != closed_logs.topic_id_of(line):
        return None
    return Closed(name, path, identity, line)


def wanted(
    jobs: Sequence[tuple[Directory, str]],
    path_of: Callable[[str], str],
    named: Callable[[PartitionKey], str],
    config_of: Callable[[str, TopicPartition], LogConfig | None],
) -> dict[Directory, list[Closed]]:
    """Return the logs among `jobs` for which a clean stop vouches, by their directory: logs of the
    cluster that lie where the metadata say (rule R11).
    """
    several: dict[Directory, list[Closed]] = {}
    for directory, name in jobs:
        found = closed(directory, name, path_of(name))
        if found is not None and named(found.key) in ("", directory.directory_id):
            config = config_of(found.key.topic_id, found.identity.topic_partition)
            if config is not None:  # otherwise it is a stray
                several.setdefault(directory, []).append(found._replace(config=config))
    return several


async def open_all(
    jobs: Sequence[tuple[Directory, str]],
    wanted: Mapping[Directory, Sequence[Closed]],
    open_log: OpenLog,
    take: Callable[[Directory, Identity, PartitionLog], bool],
) -> list[tuple[Directory, str]]:
    """Open the logs `wanted` as the stop left them.  Return the jobs that are left: the files of
    these logs have to be read.
    """
    done = set[tuple[int, str]]()
    for directory, several in wanted.items():
        for at in range(0, len(several), VISIT_MAX):
            some = several[at : at + VISIT_MAX]
            logs = await directory.disk.read(partial(_open, directory, some, open_log))
            done.update(
                (id(directory), found.name)
                for found, log in zip(some, logs, strict=True)
                if log is not None and take(directory, found.identity, log)
            )
    for directory, _ in jobs:
        directory.closed_logs.clear()
    return [(directory, name) for directory, name in jobs if (id(directory), name) not in done]


def _open(
    directory: Directory, wanted: Sequence[Closed], open_log: OpenLog
) -> list[PartitionLog | None]:
    logs: list[PartitionLog | None] = []
    for _, path, (topic_id, tp, *_), line, config in wanted:
        key = PartitionKey(topic_id, tp.partition)
        log = None
        with contextlib.suppress(errors.PkError):  # it is opened as ever, and then says why
            loaded = closed_logs.opened(
                line,
                directory.disk.storage,
                path,
                directory.recovery_points.get(key, 0),
                directory.log_starts.get(key, 0),
            )
            if loaded is not None and config is not None:
                log = open_log(directory, path, tp, topic_id, config, loaded)
        logs.append(log)
    return logs
