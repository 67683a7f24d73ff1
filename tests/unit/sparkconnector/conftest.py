"""The fake broker for every test of the connector."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location(
    "pk_fake_broker", Path(__file__).with_name("fake_broker.py")
)
assert _spec is not None
assert _spec.loader is not None
fake_broker = importlib.util.module_from_spec(_spec)
sys.modules["pk_fake_broker"] = fake_broker
_spec.loader.exec_module(fake_broker)


@pytest.fixture
def broker():
    with fake_broker.FakeBroker() as running:
        yield running
