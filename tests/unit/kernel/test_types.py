"""The shared types, and the public names of the package."""

from __future__ import annotations

import subprocess
import sys

import pytest

import pk
from pk.types import PartitionKey, TopicPartition


def test_partitions_print_as_kafkas_do() -> None:
    assert str(TopicPartition("flights", 3)) == "flights-3"
    assert str(PartitionKey("5f6e", 3)) == "5f6e:3"


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Broker'"):
        pk.Broker


def imported(modules: str, heavy: tuple[str, ...]) -> str:
    """Which modules whose names begin so a fresh process has after it imported `modules`."""
    code = (
        f"import sys, {modules}\nprint([name for name in sys.modules if name.startswith({heavy})])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def test_importing_the_package_loads_no_client_no_server_no_grpc() -> None:
    """An executor that imports pk.sparkconnector pays for what it uses (docs/ARCHITECTURE.md)."""
    heavy = ("grpc", "pyarrow", "numpy", "deltalake", "pk.client", "pk.server")
    assert imported("pk, pk.types, pk.settings, pk.errors", heavy) == "[]"


def test_a_supervisor_loads_no_arrow_and_no_grpc() -> None:
    """It holds no data and speaks no protocol; every node has one more process for it."""
    heavy = ("grpc", "google.protobuf", "pyarrow", "numpy", "deltalake")
    assert imported("pk.server.node.supervisor", heavy) == "[]"


def test_an_admin_client_loads_no_arrow() -> None:
    """A command of an operator starts in half the time."""
    modules = "pk.client.admin, pk.cli.app, pk.cli.topics, pk.cli.groups, pk.cli.brokers"
    assert imported(modules, ("pyarrow", "numpy", "pandas", "deltalake")) == "[]"
