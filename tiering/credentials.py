"""Credentials of a store for a process that is no server: Spark, or a client that reads a table.

Pure.  The server describes its store without secrets.
"""

from __future__ import annotations

from collections.abc import Mapping


def completed(storage_options: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the storage options with credentials from the environment.

    The store's own variables (AWS_…) win over those of a pk server (PK_TIER_…).
    """
    found = dict(storage_options)
    if found and "AWS_ACCESS_KEY_ID" not in {*found, *environment}:
        for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
            value = environment.get(f"PK_TIER_{name}")
            if value:
                found[f"AWS_{name}"] = value
    return found
