"""Which errors Spark shows without a traceback (sparkconnector/worker_errors)."""

from __future__ import annotations

import os
import sys
import types

import pytest

from pk import errors
from pk.sparkconnector.worker_errors import HIDE, sentence_alone

WORKER = "pyspark.sql.worker.utils"


@pytest.mark.parametrize(
    ("error", "worker", "hidden"),
    [
        (errors.InvalidOption("mistyped"), True, True),
        (errors.BrokerUnavailable("nobody there"), True, True),
        (errors.InternalError("a bug"), True, False),  # a bug keeps it
        (ValueError("a bug"), True, False),
        (errors.InvalidOption("mistyped"), False, False),  # the driver
    ],
)
def test_a_typed_error_hides_the_traceback_of_the_process_that_ends_with_it(
    monkeypatch: pytest.MonkeyPatch, error: Exception, worker: bool, hidden: bool
) -> None:
    monkeypatch.setenv(HIDE, "")
    monkeypatch.delitem(sys.modules, WORKER, raising=False)
    if worker:
        monkeypatch.setitem(sys.modules, WORKER, types.ModuleType(WORKER))

    @sentence_alone
    def work() -> None:
        raise error

    with pytest.raises(type(error)) as told:
        work()
    assert told.value is error
    assert os.environ[HIDE] == ("1" if hidden else "")
