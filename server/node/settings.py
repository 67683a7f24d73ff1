"""The settings of a server: file, then environment, then flags; the later source wins.

The module also reads the settings of a cluster: roles, voters, addresses.

One flat space of names has the server's own settings and the topic settings that become the
cluster's defaults.  Kafka's dotted names are the same names.  In a TOML file `retention.ms = 1` may
also be written as a table, or under `[server]` and `[topic]`.  From the environment only
`PK_<NAME>` of known names is read.
"""

from __future__ import annotations

import difflib
import ipaddress
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pk import errors, settings
from pk.types import NodeId

_TABLES = ("server", "topic")
_WILDCARDS = ("0.0.0.0", "::", "")


@dataclass(slots=True, frozen=True)
class Resolved:
    """Resolved settings.

    `server` is complete.  `topic_defaults` has only the given settings.  `dirs`: as in the file.
    """

    server: Mapping[str, Any]
    topic_defaults: Mapping[str, Any]
    dirs: tuple[str, ...] = ()


def resolve(
    file: Mapping[str, Any], environment: Mapping[str, str], flags: Mapping[str, Any]
) -> Resolved:
    """Merge and check all three sources.  Raises `InvalidConfig`, with the nearest known name."""
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
    _check_cluster(full)
    return Resolved(full, topic, dirs)


def _dirs(given: dict[str, Any]) -> tuple[str, ...]:
    found = given.pop("dir", given.pop("dirs", ()))
    listed = [found] if isinstance(found, str) else found
    if not isinstance(listed, list | tuple) or not all(isinstance(each, str) for each in listed):
        raise errors.InvalidConfig(
            f"dir is the path of a data directory, or a list of paths, not {found!r}", option="dir"
        )
    return tuple(listed)


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn `{"retention": {"ms": 1}}`, as TOML reads a dotted name, into `{"retention.ms": 1}`."""
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
    """Return the host of HOST:PORT.  Raises `InvalidConfig` for anything else."""
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


# -- clusters --------------------------------------------------------------------------------------

ROLES = ("controller", "broker")
_FIRST_VOTERS = uuid.UUID("6f1dcb0a-5a0c-4b1e-9c63-1d5a3c2f7e11")


def roles_of(server: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the roles of this node.  Raises `InvalidConfig`."""
    given = [each.strip() for each in str(server["process_roles"]).split(",")]
    if not set(given) <= set(ROLES) or len(set(given)) < len(given):
        raise errors.InvalidConfig(
            f"process_roles is broker, controller or broker,controller, not "
            f"{server['process_roles']!r}",
            option="process_roles",
        )
    return tuple(role for role in ROLES if role in given)


def voters_of(server: Mapping[str, Any]) -> dict[NodeId, str]:
    """Return node id → HOST:PORT of the first voters; {} = alone.  Raises `InvalidConfig`."""
    return _by_node(server, "controller_quorum_voters", "@")


def voter_directory_id(cluster_id: str, node_id: NodeId) -> str:
    """Compute the uuid of a first voter's metadata directory, which every node can compute."""
    return str(uuid.uuid5(_FIRST_VOTERS, f"{cluster_id}/{node_id}"))


def peers_of(server: Mapping[str, Any], option: str) -> dict[NodeId, str]:
    """Parse `peer_addresses` or `peer_controller_addresses`.  Raises `InvalidConfig`."""
    return _by_node(server, option, "=")


def is_clustered(server: Mapping[str, Any]) -> bool:
    """Whether the node belongs to a cluster, so that its start creates no metadata."""
    names = ("controller_quorum_voters", "controller_quorum_bootstrap_servers")
    return any(server[name] for name in names)


def bootstrap_of(server: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the addresses in `controller_quorum_bootstrap_servers`.  Raises `InvalidConfig`."""
    given = str(server["controller_quorum_bootstrap_servers"])
    found = tuple(each.strip() for each in given.split(",") if each.strip())
    for each in found:
        _reachable(each, "controller_quorum_bootstrap_servers")
    return found


def _by_node(server: Mapping[str, Any], option: str, sign: str) -> dict[NodeId, str]:
    found: dict[NodeId, str] = {}
    for each in str(server[option]).split(","):
        if not each.strip():
            continue
        node, separator, address = each.strip().partition(sign)
        if not separator or not node.isdigit() or int(node) in found:
            raise errors.InvalidConfig(
                f"{option} is ID{sign}HOST:PORT,… with each id once; {each.strip()!r} is not that",
                option=option,
            )
        _reachable(address, option)
        found[int(node)] = address
    return found


def _reachable(address: str, option: str) -> None:
    """Raise if an address that other nodes will use cannot be reached from them."""
    if host_of(address) in _WILDCARDS or address.endswith(":0"):
        raise errors.InvalidConfig(
            f"{option}: no other node can connect to {address}", option=option
        )


def _check_cluster(server: Mapping[str, Any]) -> None:
    """Check relations between the settings of a cluster."""
    roles, voters, bootstrap = roles_of(server), voters_of(server), bootstrap_of(server)
    for option in ("peer_addresses", "peer_controller_addresses"):
        peers_of(server, option)
    node_id, listen = int(server["node_id"]), str(server["controller_listen"])
    if listen and (not host_of(listen) or listen.endswith(":0")):
        raise errors.InvalidConfig(
            f"controller_listen must name the port that other nodes connect to, not {listen}",
            option="controller_listen",
        )
    if "controller" not in roles:
        if not voters and not bootstrap:
            raise errors.InvalidConfig(
                "a broker without a controller needs controller_quorum_voters or "
                "controller_quorum_bootstrap_servers",
                option="controller_quorum_voters",
            )
        if node_id in voters:
            raise errors.InvalidConfig(
                f"node {node_id} is a voter, so process_roles must name controller",
                option="process_roles",
            )
        return
    if bootstrap and not voters:
        raise errors.InvalidConfig(
            "a controller that joins others needs controller_quorum_voters",
            option="controller_quorum_voters",
        )
    if voters and node_id not in voters and not listen:
        raise errors.InvalidConfig(
            f"node {node_id} is no voter: give controller_listen HOST:PORT",
            option="controller_listen",
        )
    if listen and node_id not in voters:  # as the voters record will name it
        _reachable(listen, "controller_listen")
    if "broker" not in roles and not voters and not listen:
        raise errors.InvalidConfig(
            "a controller without a broker serves other nodes: give controller_listen HOST:PORT",
            option="controller_listen",
        )


# -- topic settings --------------------------------------------------------------------------------


def check_settings(given: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, str]:
    """Check defaults for topics, return canonical text.  Raises `InvalidConfig`,
    `UnsupportedFeature`.
    """
    settings.TOPIC.resolve(given, base)
    parsed = settings.TOPIC.parse(given)
    if "compact" in str(parsed.get("cleanup_policy", "")):
        raise errors.UnsupportedFeature(
            "cleanup_policy compact is a setting of single topics, not a default"
        )
    return {name: as_text(value) for name, value in parsed.items()}


def check_topic_settings(
    given: Mapping[str, Any],
    base: Mapping[str, Any],
    so_far: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Check the settings of one topic, return canonical text.

    so_far: the settings that the topic has; None = it is being created

    Raises `InvalidConfig`.
    """
    wanted = settings.TOPIC.resolve(given, base)
    if so_far is not None:
        check_kept(wanted, so_far)
    return {name: as_text(value) for name, value in settings.TOPIC.parse(given).items()}


def check_kept(wanted: Mapping[str, Any], so_far: Mapping[str, Any]) -> None:
    """Raise `InvalidConfig` if `wanted` changes what a compacted topic has to keep (rule C2)."""
    if "compact" not in so_far["cleanup_policy"]:
        return
    if so_far["tier_enable"] != wanted["tier_enable"]:
        raise errors.InvalidConfig(
            "a compacted topic keeps its tier_enable: its log or its table has lost the tombstones "
            "of keys that the other one may still have",
            option="tier_enable",
        )
    if "compact" not in wanted["cleanup_policy"]:
        raise errors.InvalidConfig(
            "a compacted topic stays compacted, because offsets of removed records are missing in "
            "its log: choose compact,delete to delete old records as well",
            option="cleanup_policy",
        )


def as_text(value: Any) -> str:
    """Return a typed setting as the text that is stored and shown."""
    return str(value).lower() if isinstance(value, bool) else str(value)
