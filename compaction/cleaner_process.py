"""`python -m pk.compaction.cleaner_process`: the process in which a broker's logs are cleaned.

The broker writes one job per line to the standard input, and reads one line for each: the result,
or the error.  The process ends with its input: if the broker dies during a job, the process ends at
once, and the next start of the broker removes what it had written.
"""

from __future__ import annotations

import importlib.abc
import json
import os
import queue
import secrets
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from pk import errors, priority

#: More than that of the tier process: readers wait for the tier, and never for a cleaning.
NICENESS = 10


class _WithoutPandas(importlib.abc.MetaPathFinder):
    """Hides pandas from pyarrow, as in the server's processes (pk.server.__main__)."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "pandas":
            raise ModuleNotFoundError("pandas is not used in this process", name=name)
        return None


def main() -> None:
    """Do jobs until the input ends."""
    priority.lower(NICENESS)
    sys.meta_path.insert(0, _WithoutPandas())
    jobs: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(jobs,), daemon=True).start()
    hash_secret = secrets.token_bytes(32)
    while True:
        answer = _done(jobs.get(), hash_secret)
        try:
            sys.stdout.write(answer + "\n")
            sys.stdout.flush()
        except BrokenPipeError:  # the broker has died, and the other thread has not seen it yet
            os._exit(0)


def _read(jobs: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        jobs.put(line)
    os._exit(0)


def _done(line: str, hash_secret: bytes) -> str:
    """Do one job; return the line that answers it."""
    from pk.compaction import cleaning_job, local_cleaner
    from pk.compaction.offset_map import key_hasher
    from pk.log.files import RealStorage

    try:
        job = cleaning_job.job_from_json(line)
        result = local_cleaner.clean(RealStorage(job.root), job, key_hasher(hash_secret))
    except FileNotFoundError as missing:
        return json.dumps({"missing": str(missing)})
    except errors.PkError as error:
        failure = {"failed": error.code, "message": error.message, "details": error.details}
        return json.dumps(failure)
    except Exception as bug:
        failed = errors.InternalError(f"cleaning: {bug!r}")
        return json.dumps({"failed": failed.code, "message": failed.message})
    return cleaning_job.result_to_json(result)


if __name__ == "__main__":
    main()
