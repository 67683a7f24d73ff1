"""Profiles of the command line: names for clusters, in `~/.config/pk/config.toml`.

    profile = "dev"                      # used if none is named

    [profiles.dev]
    bootstrap = "127.0.0.1:9292"

    [profiles.prod]
    bootstrap = "pk1:9292,pk2:9292"

The address of a command is, in this order: --bootstrap, --profile, PK_BOOTSTRAP, PK_PROFILE, the
file's `profile`, 127.0.0.1:9292.  PK_CONFIG names another file, which must exist.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pk import errors
from pk.cli.common import toml_file

BOOTSTRAP, PROFILE, CONFIG = "PK_BOOTSTRAP", "PK_PROFILE", "PK_CONFIG"
_KEYS = ("bootstrap",)


def path_of(environ: Mapping[str, str]) -> Path:
    """Return where the file with the profiles is."""
    if environ.get(CONFIG):
        return Path(environ[CONFIG])
    # a user without a home directory, as in some containers, has no such file
    home = environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(home) / "pk" / "config.toml"


def bootstrap(
    environ: Mapping[str, str], given: str | None = None, profile: str | None = None
) -> str | None:
    """Return the address that a command has for a default; None if nothing names one.

    given, profile: the options before the subcommand.  Raises `InvalidConfig`, `InvalidOption`.
    """
    if given is not None and profile is not None:
        raise errors.InvalidOption("--bootstrap and --profile contradict each other: give one")
    if given is not None:
        return given
    if profile is None and environ.get(BOOTSTRAP):
        return environ[BOOTSTRAP]
    name = profile or environ.get(PROFILE)
    path = path_of(environ)
    if not name and not environ.get(CONFIG) and not _exists(path):
        return None
    return _of_file(path, name)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # reading it names the cause
        return True


def _of_file(path: Path, name: str | None) -> str | None:
    found = toml_file(path)
    profiles = found.get("profiles", {})
    if unknown := sorted(set(found) - {"profile", "profiles"}):
        raise errors.InvalidConfig(
            f"{path}: unknown setting {unknown[0]}; there are profile and [profiles.NAME]"
        )
    if not isinstance(profiles, dict) or not all(isinstance(p, dict) for p in profiles.values()):
        raise errors.InvalidConfig(f"{path}: write profiles as tables, [profiles.NAME]")
    name = name or found.get("profile")
    if not name:
        return None
    if not isinstance(name, str):
        raise errors.InvalidConfig(f"{path}: profile is the name of one of the profiles")
    chosen: dict[str, Any] | None = profiles.get(name)
    if chosen is None:
        known = ", ".join(profiles) or "none"
        raise errors.InvalidConfig(f"{path} has no profile {name!r}; there are: {known}")
    if unknown := sorted(set(chosen) - set(_KEYS)):
        raise errors.InvalidConfig(f"{path}: profile {name} has an unknown setting {unknown[0]}")
    address = chosen.get("bootstrap")
    if not isinstance(address, str):
        raise errors.InvalidConfig(f'{path}: profile {name} needs bootstrap = "HOST:PORT"')
    return address
