"""What a single broker answers, whatever the other brokers say: frames on two streams, without the
client library.

The library would leave a leader that was replaced.  The witness stays with it, as a client would
that has not learnt of the election.  One stream asks for acks=1 again and again, and the witness
notes when it was last served.  The other stream sends one acks=all batch, which an isolated leader
can only park, and the witness keeps the answer.
"""

from __future__ import annotations

import asyncio
import threading

import pyarrow as pa

from pk import errors
from pk.clock import SystemClock, monotonic_s
from pk.log import columns
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import PROTOCOL, head_of, open_stream
from pk.wire.socket_network import PkNetwork
from pk.world import Disconnected, Stream, StreamKind

CLOCK = SystemClock()
HELLO = wire.Hello(client_id="witness", protocol=PROTOCOL)
PAUSE_MS = 50
PARKED_MAX_S = 120.0
ANSWER_MAX_S = 30.0
STARTED_MAX_S = 30.0
#: A session that is accepted gets no message.
REFUSED_MAX_S = 2.0


class Witness:
    """A partition's client that uses one broker only, from its own thread."""

    def __init__(self, address: str, topic_id: str, partition: int) -> None:
        self.address, self.topic_id, self.partition = address, topic_id, partition
        #: When the last acknowledged acks=1 request was sent.  The reply may come late on a busy
        #: machine: the moment says until when the broker still accepted.
        self.served_at = 0.0
        self.refused: dict[str, int] = {}  #: answers that were none, by error
        self.parked = ""  #: the answer to acks=all: an error's name, or `acknowledged`
        self.parked_at = 0.0
        self._ready = threading.Event()
        self._park = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def start(self) -> None:
        """Return once acks=1 was served."""
        self._thread.start()
        if not self._ready.wait(STARTED_MAX_S):
            raise RuntimeError(f"{self.address} does not serve: {self.refused}")

    def park(self) -> None:
        """Send the acks=all batch."""
        self._park.set()

    def end(self) -> None:
        """Return once the parked batch was answered, or can no longer be answered."""
        self._stop.set()
        self._thread.join()

    def refused_session(self) -> str:
        """Return the error that a new session gets; '' = it is accepted."""
        return asyncio.run(self._knock())

    async def _knock(self) -> str:
        network = PkNetwork(lambda where, bug: None)
        try:
            stream, _ = await open_stream(network, self.address, StreamKind.PRODUCE, HELLO)
            async with asyncio.timeout(REFUSED_MAX_S):
                raw = await stream.recv()
            stream.close()
            return (
                ""
                if raw is None
                else type(frames.raise_error(frames.decode(raw).head.error)).__name__
            )
        except TimeoutError:
            return ""
        except errors.PkError as refusal:
            return type(refusal).__name__
        finally:
            await network.close()

    async def _run(self) -> None:
        network = PkNetwork(lambda where, bug: None)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._ask_on(network))
                tasks.create_task(self._wait_parked(network))
        finally:
            await network.close()

    async def _open(self, network: PkNetwork) -> Stream:
        """Open a stream; a broker of a busy machine may be silent for longer than one attempt."""
        while True:
            try:
                stream, _ = await open_stream(network, self.address, StreamKind.PRODUCE, HELLO)
            except errors.BrokerUnavailable as silent:
                name = type(silent).__name__
                self.refused[name] = self.refused.get(name, 0) + 1
                if self._stop.is_set():
                    raise
                await CLOCK.sleep_ms(PAUSE_MS)
            else:
                return stream

    async def _ask_on(self, network: PkNetwork) -> None:
        stream = await self._open(network)
        while not self._stop.is_set():
            sent_at = monotonic_s()
            try:
                async with asyncio.timeout(ANSWER_MAX_S):
                    answer = await self._ask(stream, 1)
            except (Disconnected, TimeoutError) as cause:
                answer = type(cause).__name__
            if answer == "acknowledged":
                self.served_at = sent_at
                self._ready.set()
            else:
                self.refused[answer] = self.refused.get(answer, 0) + 1
            if answer in ("Disconnected", "TimeoutError"):  # its reply would pass for the next one
                return
            await CLOCK.sleep_ms(PAUSE_MS)
        stream.close()

    async def _wait_parked(self, network: PkNetwork) -> None:
        stream = await self._open(network)
        while not self._park.is_set():
            if self._stop.is_set():
                return
            await CLOCK.sleep_ms(PAUSE_MS)
        try:
            async with asyncio.timeout(PARKED_MAX_S):
                self.parked = await self._ask(stream, -1)
        except (Disconnected, TimeoutError) as cause:
            self.parked = type(cause).__name__
        self.parked_at = monotonic_s()
        stream.close()

    async def _ask(self, stream: Stream, acks: int) -> str:
        rows = pa.RecordBatch.from_pydict({"value": pa.array([b"witness"], pa.binary())})
        raw = b"".join(columns.encode(rows, default_timestamp=CLOCK.wall_ms()))
        request = wire.ProduceRequest(acks=acks)
        request.partitions.add(
            topic_id=self.topic_id,
            partition=self.partition,
            current_leader_epoch=-1,
            batch_bytes=len(raw),
        )
        await stream.send(frames.encode(head_of(request, correlation_id=1), [raw]))
        reply = await stream.recv()
        if reply is None:
            raise Disconnected("the stream ended")
        head = frames.decode(reply).head
        if head.HasField("error"):
            return type(frames.raise_error(head.error)).__name__
        result = head.produce_reply.results[0]
        return (
            type(frames.raise_error(result.error)).__name__
            if result.HasField("error")
            else "acknowledged"
        )
