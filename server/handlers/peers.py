"""The peer of a control stream, and the requests that only other brokers may send.

Pure.  A broker proves itself by the incarnation id of its registration (rule L17).  The proof is
compared with the metadata image at each request: the image of this broker may learn of a
registration after the stream was opened.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pk import errors
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import Handler, Reply


class Peer(NamedTuple):
    """Who opened a control stream."""

    hello: wire.Hello
    proven: Callable[[], bool]  #: whether the hello proves a registered broker now (rule L17)


def check_broker(peer: Peer, request: str) -> None:
    """Raise unless the peer is a proven broker.

    Raises `InvalidRequest` for a client, and the retriable `BrokerUnavailable` for a broker whose
    registration this broker's metadata does not have, or no longer has.
    """
    if peer.proven():
        return
    if not peer.hello.incarnation_id:
        raise errors.InvalidRequest(f"{request} is a request between brokers; clients may not send")
    raise errors.BrokerUnavailable(
        f"{request}: the metadata of this broker does not have the registration of broker "
        f"{peer.hello.node_id} that the hello names"
    )


def between_brokers(peer: Peer, name: str, handler: Handler) -> Handler:
    """Return `handler` of the request `name` so that it refuses every peer but proven brokers."""

    async def handle(request: Any, frame: frames.Frame) -> Reply:
        check_broker(peer, name)
        return await handler(request, frame)

    return handle
