"""The broker's view of the cluster metadata: the image, and the questions that parts ask of it.

Pure.  The publisher (broker/metadata_publisher.py) replaces and extends the image; every other part
only reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pk.server.metadata.image import MetadataImage
from pk.topic_names import is_internal
from pk.types import NONE, NodeId, PartitionKey


class MetadataCache:
    """The metadata image of one broker.

    `topic_defaults`: the broker's values of topic settings.  `tier_enabled`: the server has an
    object store.  `peer_addresses`: the addresses that this node uses instead of advertised ones.
    """

    def __init__(
        self,
        node_id: NodeId,
        incarnation_id: str,
        topic_defaults: Mapping[str, Any],
        *,
        tier_enabled: bool,
        peer_addresses: Mapping[NodeId, str],
    ) -> None:
        self._node_id = node_id
        self._incarnation_id = incarnation_id
        self._topic_defaults = dict(topic_defaults)
        self.tier_enabled = tier_enabled
        self._peer_addresses = peer_addresses
        self.image = MetadataImage()

    def registered(self) -> bool:
        """Whether the image has the registration of this process, by its incarnation id (Q2)."""
        me = self.image.brokers.get(self._node_id)
        return me is not None and me.incarnation_id == self._incarnation_id

    def leader_of(self, key: PartitionKey) -> NodeId:
        """Return the leader of the partition, as far as this broker knows."""
        state = self.image.partition(key)
        return NONE if state is None else state.leader

    def settings_of(self, topic: str) -> dict[str, Any]:
        """Return the current value of every setting of a topic."""
        return self.image.topic_config(topic, self._topic_defaults)

    def is_tiered(self, topic: str, wanted: Mapping[str, Any]) -> bool:
        """Whether a topic with the settings `wanted` has a table in the tier."""
        return self.tier_enabled and bool(wanted["tier_enable"]) and not is_internal(topic)

    def address_of(self, node_id: NodeId) -> str:
        """Return the address at which this broker reaches another one; '' if unknown."""
        direct = self._peer_addresses.get(node_id)
        broker = self.image.brokers.get(node_id)
        return direct or ("" if broker is None else broker.address)
