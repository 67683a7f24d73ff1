"""Arguments that are nearly right are refused before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest

from pk.client.admin import AdminClient

CALLS = (
    "create_topics", "delete_topics", "describe_topics", "elect_leaders",
    "list_partition_reassignments", "partition_replicas",
)  # fmt: skip


@pytest.mark.parametrize("given", ["xyz", b"xyz", 5])
@pytest.mark.parametrize("call", CALLS)
def test_a_bare_string_is_no_list_of_names(
    call: str, given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`delete_topics("xyz")` would delete the topics x, y and z."""
    sent: list[Any] = []
    monkeypatch.setattr(AdminClient, "_run", lambda self, work, timeout_s: sent.append(work))
    with AdminClient("127.0.0.1:1") as admin, pytest.raises(TypeError, match=repr(given)):
        getattr(admin, call)(given)
    assert not sent
