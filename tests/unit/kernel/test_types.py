"""The nouns, and the public names of the package."""

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


def test_importing_the_package_loads_no_client_no_server_no_grpc() -> None:
    """An executor that imports pk.sparkconnector pays for what it uses (docs/ARCHITECTURE.md)."""
    code = (
        "import sys, pk, pk.types, pk.settings, pk.errors\n"
        "heavy = ('grpc', 'pyarrow', 'numpy', 'deltalake', 'pk.client', 'pk.server')\n"
        "print([name for name in sys.modules if name.startswith(heavy)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
