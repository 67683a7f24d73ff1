"""The fake broker for every test of the connector."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.fake_broker import SocketBroker


@pytest.fixture
def broker() -> Iterator[SocketBroker]:
    with SocketBroker() as running:
        yield running
