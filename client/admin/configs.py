"""The calls of `AdminClient` that concern the settings of topics and brokers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pk import errors, settings
from pk.client import arguments
from pk.client.admin.connection import AdminConnection, only
from pk.client.endings import refusal
from pk.wire import pk_pb2 as wire


@dataclass(slots=True, frozen=True)
class ConfigEntry:
    """One setting of a resource; `source`: where its value comes from (topic, server, default)."""

    name: str
    value: str
    source: str
    read_only: bool = False
    doc: str = ""


class ConfigCalls:
    """The calls that concern settings; `AdminClient` documents their arguments."""

    def __init__(self, connection: AdminConnection) -> None:
        self._connection = connection

    def describe_configs(self, name: str, resource: str, timeout_s: float) -> list[ConfigEntry]:
        """Return all settings of a resource."""
        request = wire.DescribeConfigsRequest()
        request.resources.add(
            type=arguments.text(resource, "resource"), name=arguments.text(name, "name")
        )
        reply = self._connection.ask(request, wire.DescribeConfigsReply, timeout_s)
        result = only(reply.results)
        if result.HasField("error"):
            raise refusal(result.error)
        return [ConfigEntry(e.name, e.value, e.source, e.read_only, e.doc) for e in result.entries]

    def alter_configs(
        self,
        name: str,
        set: Mapping[str, Any] | None,
        unset: Iterable[str],
        resource: str,
        validate_only: bool,
        timeout_s: float,
    ) -> None:
        """Change the named settings of a resource."""
        request = wire.AlterConfigsRequest(
            validate_only=arguments.flag(validate_only, "validate_only")
        )
        change = request.changes.add(
            set=settings_of({} if set is None else set, "set"),
            unset=[_dotless(arguments.text(n, "unset")) for n in arguments.items(unset, "unset")],
        )
        change.resource.type = arguments.text(resource, "resource")
        change.resource.name = arguments.text(name, "name")
        result = only(self._connection.ask(request, wire.AlterConfigsReply, timeout_s).results)
        if result.HasField("error"):
            raise refusal(result.error)


def settings_of(given: Mapping[str, Any], argument: str) -> dict[str, str]:
    """Return names in pk's spelling and values as text; the controller validates both."""
    found: dict[str, str] = {}
    for name, value in arguments.settings(given, argument).items():
        key = _dotless(name)
        if key in found:
            raise errors.InvalidConfig(f"topic setting {key} is given twice", option=key)
        found[key] = value
    return found


def _dotless(name: str) -> str:
    return settings.TOPIC.canonical(name) if "." in name or "-" in name else name
