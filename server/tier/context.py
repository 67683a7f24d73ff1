"""The interface of the broker that the parts of its tier use (see replica/context.py)."""

from __future__ import annotations

from typing import Protocol

from pk.server.replica.context import BrokerContext
from pk.server.tier.client import TierClient


class TierContext(BrokerContext, Protocol):
    """A broker that calls its tier process."""

    @property
    def tier(self) -> TierClient: ...
