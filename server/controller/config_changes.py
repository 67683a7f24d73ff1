"""Decisions about settings: alter and describe, for topics and for the cluster (broker "").

Precedence, strongest first: the setting of the topic, the setting of the cluster (resource broker
with an empty name), the configuration file, the default.  The settings of one broker come from its
file and flags and are read-only.  min_insync_replicas is not read from files while the cluster
runs: the first active controller records the value of its file as the cluster's (`record_min_isr`).
"""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf.message import Message

from pk import errors, settings
from pk.server.controller.commands import AlterConfigs, DescribeConfigs, Out, Rules, decision
from pk.server.controller.elections import PartitionChangeBuilder
from pk.server.controller.internal_topics import ALTERABLE
from pk.server.controller.topics import cluster_base
from pk.server.metadata.image import BROKER_RESOURCE, TOPIC_RESOURCE, MetadataImage
from pk.server.node.settings import as_text, check_kept, check_settings, check_topic_settings
from pk.topic_names import is_internal
from pk.types import PartitionKey
from pk.wire import frames
from pk.wire import pk_pb2 as wire

#: Settings whose values `describe` shows as HIDDEN.
_SECRET = ("tier_access_key_id", "tier_secret_access_key")
HIDDEN = "[hidden]"
#: What `describe` says of a stored setting that this build does not know (rule Q7).
UNKNOWN = "not known to this build: it is kept, and has no effect here"
MIN_ISR = "min_insync_replicas"


def alter_configs(image: MetadataImage, rules: Rules, command: AlterConfigs) -> Out:
    """Alter settings.  Each resource changes completely or not at all; its result has the error."""
    bodies: list[Message] = []
    reply = wire.AlterConfigsReply()
    seen: dict[tuple[str, str], None] = {}
    for change in command.request.changes:
        result = reply.results.add(resource=change.resource)
        resource = (change.resource.type, change.resource.name)
        try:
            if resource in seen:
                raise errors.InvalidRequest(f"{resource} is named twice in one request")
            seen[resource] = None
            bodies += _change(image, rules, change)
        except errors.PkError as error:
            result.error.CopyFrom(frames.error_of(error))
    if command.request.validate_only:
        bodies = []
    reply.metadata_offset = image.offset + len(bodies)
    return decision(reply, bodies)


def _change(image: MetadataImage, rules: Rules, change: wire.ConfigChange) -> list[Message]:
    kind, name = change.resource.type, change.resource.name
    _check_resource(image, kind, name)
    stored = dict(image.configs.get((kind, name), {}))
    unset = [
        option if option in stored else settings.TOPIC.canonical(option) for option in change.unset
    ]
    base = cluster_base(image, rules) if kind == TOPIC_RESOURCE else rules.topic_defaults
    given = settings.TOPIC.parse(change.set)
    if kind == TOPIC_RESOURCE and is_internal(name) and not ALTERABLE.issuperset({*given, *unset}):
        raise errors.InvalidTopic(
            f"topic {name} is pk's own: of its settings only {', '.join(sorted(ALTERABLE))} can be "
            "changed",
            topic=name,
        )
    both = [option for option in unset if option in given]
    if both:
        raise errors.InvalidConfig(f"{both[0]} is set and unset at once", option=both[0])
    known = settings.TOPIC.known(stored)
    kept = {option: value for option, value in known.items() if option not in unset}
    if kind == TOPIC_RESOURCE:
        so_far = image.topic_config(name, rules.topic_defaults)
        check_topic_settings({**kept, **given}, base, so_far)
    else:
        check_settings({**kept, **given}, base)
    if kind == BROKER_RESOURCE:
        _check_topics_under(image, rules, {**kept, **{k: as_text(v) for k, v in given.items()}})
    values = {option: as_text(value) for option, value in given.items()}
    bodies: list[Message] = [
        wire.ConfigRecord(resource_type=kind, resource_name=name, name=option, value=values[option])
        for option in sorted(values)
        if stored.get(option) != values[option]
    ]
    bodies += [
        wire.ConfigRecord(resource_type=kind, resource_name=name, name=option)
        for option in sorted(set(unset))
        if option in stored
    ]
    if any(isinstance(body, wire.ConfigRecord) and body.name == MIN_ISR for body in bodies):
        bodies += _forget_eligible(image, rules, kind, name)
    return bodies


def _check_resource(image: MetadataImage, kind: str, name: str) -> None:
    if kind == TOPIC_RESOURCE:
        if image.topic(name) is None:
            raise errors.UnknownTopicOrPartition(f"topic {name[:300]} does not exist")
    elif kind != BROKER_RESOURCE:
        raise errors.InvalidRequest(f"resource type {kind[:40]!r}: topic or broker")
    elif name:
        raise errors.InvalidConfig(
            "a broker's own settings come from its configuration file and its flags; "
            'the cluster\'s defaults are those of broker ""'
        )


def _check_topics_under(image: MetadataImage, rules: Rules, cluster: Mapping[str, str]) -> None:
    """Refuse a cluster default that contradicts a setting of some topic."""
    base = {**rules.topic_defaults, **settings.TOPIC.parse(cluster)}
    for name in image.topic_ids:
        own = image.settings_of(TOPIC_RESOURCE, name)
        if own:
            try:
                check_kept(
                    settings.TOPIC.resolve(own, base),
                    image.topic_config(name, rules.topic_defaults),
                )
            except errors.InvalidConfig as error:
                raise errors.InvalidConfig(f"topic {name}: {error.message}") from None


def _forget_eligible(image: MetadataImage, rules: Rules, kind: str, name: str) -> list[Message]:
    """Clear the ELR of the partitions whose min_insync_replicas changes (rule R1)."""
    bodies: list[Message] = []
    one = image.topic(name) if kind == TOPIC_RESOURCE else None
    for topic in image.topics.values() if one is None else (one,):
        for number, state in topic.partitions.items():
            if not state.elr and not state.last_known:
                continue
            key = PartitionKey(topic.topic_id, number)
            builder = PartitionChangeBuilder(key, state, rules.min_isr(image, topic.name))
            builder.forget_eligible()
            change = builder.record()
            if change is not None:
                bodies.append(change)
    return bodies


def record_min_isr(image: MetadataImage, rules: Rules) -> list[Message]:
    """Record min_insync_replicas of the file as the cluster's, if the cluster has none yet."""
    value = rules.topic_defaults.get(MIN_ISR)
    if value is None or MIN_ISR in image.configs.get((BROKER_RESOURCE, ""), {}):
        return []
    record = wire.ConfigRecord(
        resource_type=BROKER_RESOURCE, resource_name="", name=MIN_ISR, value=as_text(value)
    )
    return [record, *_forget_eligible(image, rules, BROKER_RESOURCE, "")]


# -- describe --------------------------------------------------------------------------------------


def describe_configs(image: MetadataImage, rules: Rules, command: DescribeConfigs) -> Out:
    """Return every setting of each resource with its value and the source of the value."""
    reply = wire.DescribeConfigsReply()
    for resource in command.request.resources:
        result = reply.results.add(resource=resource)
        try:
            result.entries.extend(_entries(image, rules, resource.type, resource.name))
        except errors.PkError as error:
            result.error.CopyFrom(frames.error_of(error))
    return decision(reply)


def _entries(image: MetadataImage, rules: Rules, kind: str, name: str) -> list[wire.ConfigEntry]:
    if kind == BROKER_RESOURCE and name:
        if name != str(rules.node_id):
            raise errors.InvalidRequest(f"broker {name[:40]!r} is not known here")
        return [_server_entry(option, rules) for option in settings.SERVER.by_name.values()]
    _check_resource(image, kind, name)
    cluster = image.configs.get((BROKER_RESOURCE, ""), {})
    own = image.configs.get((kind, name), {}) if kind == TOPIC_RESOURCE else {}
    entries = []
    for option in settings.TOPIC.by_name.values():
        if option.name in own:
            source, value = "topic", own[option.name]
        elif option.name in cluster:
            source, value = "cluster", cluster[option.name]
        elif option.name in rules.topic_defaults:
            source, value = "file", as_text(rules.topic_defaults[option.name])
        else:
            source, value = "default", as_text(option.default)
        entries.append(
            wire.ConfigEntry(name=option.name, value=value, source=source, doc=option.doc)
        )
    for source, stored in (("topic", own), ("cluster", cluster)):
        entries += [
            wire.ConfigEntry(name=name, value=stored[name], source=source, doc=UNKNOWN)
            for name in sorted(stored.keys() - settings.TOPIC.by_name.keys())
        ]
    return entries


def _server_entry(option: settings.Option, rules: Rules) -> wire.ConfigEntry:
    value = rules.server.get(option.name, option.default)
    hidden = option.name in _SECRET and value
    return wire.ConfigEntry(
        name=option.name,
        value=HIDDEN if hidden else as_text(value),
        source="default" if value == option.default else "file",
        read_only=True,
        doc=option.doc,
    )
