"""How Spark shows an error of pk: the sentence alone, without Python's traceback above it.

Spark asks a data source in a Python process of its own.  An exception ends that process; what it
answers before goes into the JVM's exception, and with that before the user's eyes: the traceback
first, the sentence last.  The frames are Spark's and pk's and help nobody with a mistyped option.
Spark leaves the traceback out where SPARK_HIDE_TRACEBACK is set when the process answers.

Invariants
  J1  only a process that ends with this error is changed: no other error of the session loses its
      traceback
  J2  a bug of pk keeps its traceback
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from pk import errors

P = ParamSpec("P")
T = TypeVar("T")

HIDE = "SPARK_HIDE_TRACEBACK"
#: A process that has loaded one of these answers one question of the JVM, or ends (J1).
_ASKED = ("pyspark.sql.worker.utils", "pyspark.sql.streaming.python_streaming_source_runner")


def sentence_alone(call: Callable[P, T]) -> Callable[P, T]:
    """`call`, which Spark makes while it plans, with errors that show without a traceback."""

    @functools.wraps(call)
    def wrapped(*given: P.args, **named: P.kwargs) -> T:
        try:
            return call(*given, **named)
        except errors.PkError as error:
            if error.acts != "pk" and any(name in sys.modules for name in _ASKED):
                os.environ[HIDE] = "1"
            raise

    return wrapped
