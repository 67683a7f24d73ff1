"""A fetch that the JVM carries out: the leader's address and the frames to send, ready-made.

The JVM encodes nothing but grants of credit.  It fetches each range on a connection of its own, so
the position has a fixed id.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from pk import limits
from pk.log.columns import DECODED_BYTES_MAX
from pk.sparkconnector.offsets import Range
from pk.sparkconnector.scan import CREDIT_BYTES, fetch_request
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.addresses import split_address
from pk.wire.calls import PROTOCOL, PROTOCOL_MIN, head_of

POSITION_ID = 1


def details(
    address: str, one: Range, isolation: int, hello: wire.Hello, settings: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return what a section of a plan says about a fetch; None if the JVM cannot reach the address.

    address: of the leader.  hello, settings: of the client in whose place the JVM fetches.
    """
    if address.startswith("unix"):
        return None
    try:
        host, port = split_address(address)
    except ValueError:
        return None
    offer = wire.Hello()
    offer.CopyFrom(hello)
    offer.protocol_min = hello.protocol_min or PROTOCOL_MIN
    request = fetch_request(one, isolation, settings, POSITION_ID, CREDIT_BYTES)
    return {
        "host": host,
        "port": port,
        "hello": _frame(offer),
        "fetch": _frame(request),
        "position_id": POSITION_ID,
        "protocol_min": PROTOCOL_MIN,
        "protocol": PROTOCOL,
        "frame_bytes_max": limits.WIRE_FRAME_BYTES_MAX,
        "decoded_bytes_max": min(int(settings["decoded_bytes_max"]), DECODED_BYTES_MAX),
    }


def _frame(message: Any) -> str:
    return base64.b64encode(frames.encode(head_of(message))).decode()
