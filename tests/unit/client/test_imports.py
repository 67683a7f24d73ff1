"""The modules that a client's process imports to send and to read."""

from __future__ import annotations

import subprocess
import sys

#: Rows with timestamps and headers, as `send_batch` takes them and as `poll` gives them.
STORY = """
import array
import sys
import pyarrow as pa
from pk.client import record_arguments
from pk.client.records import ConsumerRecords
from pk.log import columns
from pk.types import TopicPartition

def column(kind, data, count, *more):
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(data), *more])

ends = array.array("i", [0, 1, 3]).tobytes()
values = column(pa.binary(), ends, 2, pa.py_buffer(b"abb"))
stamps = [1_700_000_000_000, 1_700_000_000_001]
given = pa.RecordBatch.from_arrays(
    [values, column(pa.int64(), array.array("q", stamps).tobytes(), 2)],
    names=["value", "timestamp"],
)
rows, _ = record_arguments.normalise(given, 1)
raw = b"".join(columns.encode(rows, default_timestamp=1))
found = columns.decode(raw, decoded_bytes_max=1 << 20)
lines = ConsumerRecords(TopicPartition("t", 0), found, None, None)
assert [record.timestamp_ms for record in lines] == stamps
print("pandas" in sys.modules)
"""


def test_a_record_does_not_cost_the_import_of_pandas() -> None:
    """The import takes a third of a second on the client's loop, which handles no acknowledgement
    meanwhile.
    """
    done = subprocess.run(
        [sys.executable, "-c", STORY], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "False", done.stderr


def test_a_shell_completes_the_public_names() -> None:
    """They are imported at their first use, so `dir` of a fresh process must list them."""
    story = "import pk; assert set(pk.__all__) <= set(dir(pk)); assert 'Producer' not in vars(pk); "
    story += "assert all(getattr(pk, name).__name__ == name for name in pk.__all__)"
    subprocess.run([sys.executable, "-c", story], check=True)
