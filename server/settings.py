"""Where a server's settings come from: file, then environment, then flags; the later wins.

One flat space of names holds the server's own settings and the topic settings that shall be the
cluster's defaults; Kafka's dotted names are the same names.  In a TOML file `retention.ms = 1`
may also be written dotted or under `[server]` and `[topic]`.  Of the environment only
`PK_<NAME>` of known names is read.
"""

from __future__ import annotations

import difflib
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pk import errors, settings

_TABLES = ("server", "topic")
_WILDCARDS = ("0.0.0.0", "::", "")


@dataclass(slots=True, frozen=True)
class Resolved:
    """`server` is complete; `topic_defaults` holds only what was given; `dirs` as the file names
    them.
    """

    server: Mapping[str, Any]
    topic_defaults: Mapping[str, Any]
    dirs: tuple[str, ...] = ()


def resolve(
    file: Mapping[str, Any], environment: Mapping[str, str], flags: Mapping[str, Any]
) -> Resolved:
    """All three layers checked together.  Raises `InvalidConfig` with the nearest right name."""
    given = dict(file)
    dirs = _dirs(given)
    server: dict[str, Any] = {}
    topic: dict[str, Any] = {}
    for layer in (_flat(given), _from(environment), flags):
        seen: dict[str, str] = {}
        for name, value in layer.items():
            scope, key = _scope(name)
            if key in seen:
                raise errors.InvalidConfig(
                    f"{name} and {seen[key]} are the same setting", option=key
                )
            seen[key] = name
            (server if scope is settings.SERVER else topic)[key] = scope.by_name[key].parse(value)
    check_settings(topic, {})
    full = settings.SERVER.resolve(server)
    _check_addresses(full)
    return Resolved(full, topic, dirs)


def _dirs(given: dict[str, Any]) -> tuple[str, ...]:
    found = given.pop("dir", given.pop("dirs", ()))
    return (found,) if isinstance(found, str) else tuple(str(each) for each in found)


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"retention": {"ms": 1}}`, as TOML reads a dotted name, to `{"retention.ms": 1}`."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            inner = "" if not prefix and name in _TABLES else f"{prefix}{name}."
            flat.update(_flat(value, inner))
        else:
            flat[prefix + name] = value
    return flat


def _from(environment: Mapping[str, str]) -> dict[str, str]:
    names = [*settings.SERVER.by_name, *settings.TOPIC.by_name]
    return {
        name: environment[f"PK_{name.upper()}"]
        for name in names
        if f"PK_{name.upper()}" in environment
    }


def _scope(name: str) -> tuple[settings.Options, str]:
    key = name.strip().lower().replace(".", "_").replace("-", "_")
    for scope in (settings.SERVER, settings.TOPIC):
        if key in scope.by_name:
            return scope, key
    near = difflib.get_close_matches(key, [*settings.SERVER.by_name, *settings.TOPIC.by_name], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise errors.InvalidConfig(f"unknown setting {name!r}{hint}", option=name)


def host_of(address: str) -> str:
    """The host of HOST:PORT.  Raises `InvalidConfig` if it is not one."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65_535 or ("]" not in host and ":" in host):
        raise errors.InvalidConfig(f"{address!r} is not HOST:PORT")
    return host.strip("[]")


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach HOST:PORT."""
    host = host_of(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_addresses(server: Mapping[str, Any]) -> None:
    for name in ("listen", "advertise", "metrics"):
        if server[name]:
            host_of(server[name])
    if not server["listen"]:
        raise errors.InvalidConfig("listen is empty: give HOST:PORT", option="listen")
    if host_of(server["listen"]) in _WILDCARDS and not server["advertise"]:
        raise errors.InvalidConfig(
            f"no client can use {server['listen']} as an address: give advertise HOST:PORT too",
            option="advertise",
        )


# -- topic settings --------------------------------------------------------------------------------


def check_settings(given: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, str]:
    """`given` checked and canonical, as text.  Raises `InvalidConfig`, `UnsupportedFeature`."""
    settings.TOPIC.resolve(given, base)
    parsed = settings.TOPIC.parse(given)
    if "compact" in str(parsed.get("cleanup_policy", "")):
        raise errors.UnsupportedFeature("cleanup_policy compact is not in this build")
    return {name: as_text(value) for name, value in parsed.items()}


def as_text(value: Any) -> str:
    """A typed setting as it is stored and shown."""
    return str(value).lower() if isinstance(value, bool) else str(value)
