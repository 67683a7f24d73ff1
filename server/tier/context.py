"""The broker as the parts of its tier see it (replica/context.py)."""

from __future__ import annotations

from typing import Protocol

from pk.server.replica.context import BrokerContext
from pk.server.tier.client import TierClient


class TierContext(BrokerContext, Protocol):
    """A broker that calls its tier process."""

    @property
    def tier(self) -> TierClient: ...
