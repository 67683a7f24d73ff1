"""The rows of the demo's input."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import pytest

from pk import errors
from pk.cli import flights

COLUMNS = ["year", "dep_delay", "carrier", "tailnum", "time_hour"]


def test_a_row_is_json_keyed_by_carrier() -> None:
    flight = flights.flight_of(COLUMNS, ["2013", "-4.0", "UA", "NA", "2013-01-01T10:00:00Z"])
    assert flight.key == b"UA"
    assert json.loads(flight.value) == {
        "year": 2013,
        "dep_delay": -4,
        "carrier": "UA",
        "tailnum": None,
        "time_hour": "2013-01-01T10:00:00Z",
    }
    assert b" " not in flight.value


def test_a_row_of_another_width_is_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        flights.flight_of(COLUMNS, ["2013"])


def test_the_archive_is_read_in_order_and_may_be_cut(tmp_path: Path) -> None:
    path = tmp_path / "flights.csv.zip"
    lines = [",".join(COLUMNS), *(f"{year},0,AA,N1,2013-01-01T10:00:00Z" for year in range(5))]
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("flights.csv", "\n".join(lines))
    years = [json.loads(flight.value)["year"] for flight in flights.read_flights(path)]
    assert years == [0, 1, 2, 3, 4]
    assert len(list(flights.read_flights(path, limit=2))) == 2


def test_the_installed_package_is_found_without_importing_it() -> None:
    path = flights.archive()
    first = next(flights.read_flights(path))
    assert (first.key, json.loads(first.value)["time_hour"]) == (b"UA", "2013-01-01T10:00:00Z")
    assert flights.PACKAGE not in sys.modules


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flights, "PACKAGE", "no_such_package_of_flights")
    with pytest.raises(errors.InvalidRequest, match="pip install"):
        flights.archive()
