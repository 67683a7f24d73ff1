"""Makes Spark show the sentence of a pk error without Python's traceback above it.

Spark calls a data source in a separate Python process.  An exception ends that process, and its
text becomes part of the JVM's exception that the user sees: first the traceback, last the sentence.
The frames are Spark's and pk's, and do not help with a mistyped option.  Spark omits the traceback
if SPARK_HIDE_TRACEBACK is set when the process answers.

Invariants
  J1  The variable is set only in a process that ends with this error, so no other error of the
      session loses its traceback.
  J2  An error that is a bug of pk keeps its traceback.
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
#: A process that has loaded one of these modules answers one question of the JVM, or ends (J1).
_ASKED = ("pyspark.sql.worker.utils", "pyspark.sql.streaming.python_streaming_source_runner")


def sentence_alone(call: Callable[P, T]) -> Callable[P, T]:
    """Wrap `call`, which Spark makes while planning: its errors show without a traceback."""

    @functools.wraps(call)
    def wrapped(*given: P.args, **named: P.kwargs) -> T:
        try:
            return call(*given, **named)
        except errors.PkError as error:
            if error.acts != "pk" and any(name in sys.modules for name in _ASKED):
                os.environ[HIDE] = "1"
            raise

    return wrapped
