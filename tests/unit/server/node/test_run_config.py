"""The frame of `main` in which a role's process runs."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from pk.server.node.run_config import raise_descriptor_limit


@pytest.fixture
def soft_limit() -> Iterator[None]:
    """Set a soft limit below the hard one during the test."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard) - 1, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("soft_limit")
def test_a_role_may_open_what_the_operator_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a thousand partitions, or connections, would take the data directories offline."""
    raise_descriptor_limit()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == hard

    def refused(*_args: object) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr("resource.setrlimit", refused)
    raise_descriptor_limit()  # as it is, then
