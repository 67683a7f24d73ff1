"""A broker in memory behind real grpc, for what a test must break: streams, offsets, topics.

It keeps whole batches, as the real one does: a fetch may begin below its position and pass its end.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field

from pk import errors
from pk.log import batch as batches
from pk.log import columns
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import accept_stream, error_head, head_of, serve_control
from pk.wire.socket_network import PkNetwork
from pk.world import Disconnected, StreamKind


@dataclass
class Log:
    """One partition."""

    batches: list[bytes] = field(default_factory=list)
    log_start: int = 0
    end: int = 0
    lso: int | None = None
    aborted: list[tuple[int, int, int]] = field(default_factory=list)

    def append(self, parts) -> int:
        raw = b"".join(bytes(part) for part in parts)
        base = self.end
        patched = b"".join(bytes(part) for part in batches.patched(raw, base, 0))
        self.end = base + batches.read_header(patched).last_offset_delta + 1
        self.batches.append(patched)
        return base

    @property
    def bound(self) -> int:
        return self.end if self.lso is None else self.lso


class FakeBroker:
    """`with FakeBroker() as broker:`; topics may be changed at any time from the test's thread."""

    def __init__(self) -> None:
        self.topics: dict[str, tuple[str, list[Log]]] = {}
        self.frame_bytes = 1 << 20
        self.break_after: list[int] = []  # frames after which a fetch stream breaks, one per stream
        self.streams = 0
        self.cold_ends: list[int] = []  # the next frames end there, be it inside a batch
        self.behind: list[dict[str, tuple[str, list[Log]]]] = []  # topics of who is behind, by call
        self.unknown_topics = 0  # so many positions are answered by who has not heard of the topic
        self.fail_calls: list[errors.PkError] = []  # answers of the next control calls
        self.deleted: dict[tuple[str, int], int] = {}
        self.producer_ids = 100
        self.grants: list[int] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> FakeBroker:
        self._thread.start()
        self._network = PkNetwork()
        serve = self._network.listen("127.0.0.1:0", self._handle)
        self._listener = asyncio.run_coroutine_threadsafe(serve, self._loop).result(10)
        self.address = self._listener.address
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._listener.close(100), self._loop).result(10)
        asyncio.run_coroutine_threadsafe(self._network.close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def create(self, topic: str, partitions: int = 1, topic_id: str = "") -> list[Log]:
        logs = [Log() for _ in range(partitions)]
        self.topics[topic] = (topic_id or f"id-of-{topic}", logs)
        return logs

    def log(self, topic_id: str, partition: int) -> Log:
        for known, logs in self.topics.values():
            if known == topic_id:
                return logs[partition]
        raise errors.UnknownTopicId(f"no topic has the id {topic_id}")

    # -- serving -----------------------------------------------------------------------------------

    async def _handle(self, kind, stream) -> None:
        hello = wire.HelloReply(cluster_id="fake", node_id=1, protocol=1, role="broker")
        if await accept_stream(stream, hello) is None:
            return
        if kind is StreamKind.CONTROL:
            await serve_control(stream, self._handlers())
        elif kind is StreamKind.FETCH:
            await self._fetch(stream)
        else:
            await self._produce(stream)

    def _handlers(self):
        async def failing(name, request, frame):
            if self.fail_calls:
                raise self.fail_calls.pop(0)
            return getattr(self, f"_{name}")(request)

        names = (
            "metadata", "list_offsets", "byte_offsets", "describe_tier", "delete_records",
            "init_producer_id",
        )  # fmt: skip
        return {n: (lambda request, frame, n=n: failing(n, request, frame)) for n in names}

    def _metadata(self, request):
        reply = wire.MetadataReply(cluster_id="fake", controller_id=1, metadata_offset=10)
        reply.brokers.add(node_id=1, address=self.address)
        topics = self.topics
        if self.behind and "-" not in request.topic_ids:
            topics, reply.metadata_offset = self.behind.pop(0), 9
        names = list(request.topics)
        names += [n for n, (known, _) in topics.items() if known in request.topic_ids]
        there = [known for known, _ in topics.values()]
        for topic_id in request.topic_ids:
            if topic_id not in there:
                gone = errors.UnknownTopicId(f"no topic has the id {topic_id}")
                reply.topics.add(topic_id=topic_id, error=frames.error_of(gone))
        for name in names or ([] if request.topic_ids else topics):
            info = reply.topics.add(name=name)
            if name not in topics:
                info.error.CopyFrom(
                    frames.error_of(errors.UnknownTopicOrPartition("no such topic"))
                )
                continue
            info.topic_id, logs = topics[name]
            for number in range(len(logs)):
                info.partitions.add(partition=number, leader=1, leader_epoch=0)
        return reply

    def _list_offsets(self, request):
        reply = wire.ListOffsetsReply()
        for query in request.queries:
            log = self.log(query.topic_id, query.partition)
            special = {-1: log.bound, -2: log.log_start, -4: log.log_start, -5: 0}
            offset = special.get(query.timestamp_ms)
            if offset is None:
                offset = -1
                for raw in log.batches:
                    header = batches.read_header(raw)
                    if header.max_timestamp >= query.timestamp_ms:
                        offset = header.base_offset
                        break
            reply.answers.add(topic_id=query.topic_id, partition=query.partition, offset=offset)
        return reply

    def _byte_offsets(self, request):
        reply = wire.ByteOffsetsReply()
        for query in request.queries:
            answer = reply.answers.add(topic_id=query.topic_id, partition=query.partition)
            answer.offsets.append(query.start)
            answer.cumulative_bytes.append(0)
            total = 0
            for raw in self.log(query.topic_id, query.partition).batches:
                header = batches.read_header(raw)
                if query.start <= header.base_offset < query.end:
                    total += len(raw)
                    answer.offsets.append(min(header.next_offset, query.end))
                    answer.cumulative_bytes.append(total)
        return reply

    def _describe_tier(self, request):
        return wire.DescribeTierReply(topic=request.topic, version=-1, status="off")

    def _delete_records(self, request):
        reply = wire.DeleteRecordsReply()
        for item in request.items:
            self.deleted[item.topic_id, item.partition] = item.before_offset
            reply.results.add(topic_id=item.topic_id, partition=item.partition)
        return reply

    def _init_producer_id(self, request):
        self.producer_ids += 1
        return wire.InitProducerIdReply(producer_id=self.producer_ids, producer_epoch=0)

    # -- data --------------------------------------------------------------------------------------

    async def _fetch(self, stream) -> None:
        self.streams += 1
        frames_left = self.break_after.pop(0) if self.break_after else -1
        credit = 0
        positions: list[wire.FetchPosition] = []
        while True:
            while positions and credit > 0:
                if frames_left == 0:
                    stream._context.cancel() if hasattr(stream, "_context") else stream.close()
                    return
                frames_left -= 1
                position = positions.pop(0)
                raw, payload, more = self._answer(position)
                credit -= payload
                try:
                    await stream.send(raw)
                except Disconnected:
                    return
                if more:
                    positions.append(position)
            try:
                raw = await stream.recv()
            except Disconnected:
                return
            if raw is None:
                return
            request = frames.decode(raw).head.fetch
            credit += request.credit_bytes
            self.grants.append(request.credit_bytes)
            positions += list(request.positions)

    def _answer(self, position):
        reply = wire.FetchReply()
        entry = reply.partitions.add(
            topic_id=position.topic_id,
            partition=position.partition,
            position_id=position.position_id,
            next_offset=position.fetch_offset,
        )
        try:
            if self.unknown_topics:
                self.unknown_topics -= 1
                raise errors.UnknownTopicId("not known here yet")
            log = self.log(position.topic_id, position.partition)
        except errors.PkError as error:
            entry.error.CopyFrom(frames.error_of(error))
            return frames.encode(head_of(reply)), 0, False
        if position.fetch_offset < log.log_start:
            entry.error.CopyFrom(frames.error_of(errors.OffsetOutOfRange("below log_start")))
            return frames.encode(head_of(reply)), 0, False
        pieces, size = [], 0
        for raw in log.batches:
            header = batches.read_header(raw)
            if header.next_offset <= position.fetch_offset or header.base_offset >= log.bound:
                continue
            if position.end_offset and header.base_offset >= position.end_offset:
                break
            if pieces and size + len(raw) > self.frame_bytes:
                break
            pieces.append(raw)
            size += len(raw)
            entry.next_offset = header.next_offset
        entry.payload_bytes = size
        for producer_id, first, last in log.aborted:
            entry.aborted.add(producer_id=producer_id, first_offset=first, last_offset=last)
        if self.cold_ends:
            start, end = position.fetch_offset, self.cold_ends.pop(0)
            raw = b"".join(map(bytes, columns.encode_lists([b"cold"] * (end - start))))
            pieces = list(batches.patched(raw, start, 0))
            size, entry.next_offset = sum(map(len, pieces)), end
            entry.payload_bytes = size
        position.fetch_offset = entry.next_offset
        more = entry.next_offset < min(position.end_offset or log.bound, log.bound)
        return frames.encode(head_of(reply), pieces), size, more

    async def _produce(self, stream) -> None:
        while True:
            try:
                raw = await stream.recv()
            except Disconnected:
                return
            if raw is None:
                return
            frame = frames.decode(raw)
            reply = wire.ProduceReply()
            at = 0
            for index, entry in enumerate(frame.head.produce.partitions):
                payload = frame.payload[at : at + entry.batch_bytes]
                at += entry.batch_bytes
                try:
                    log = self.log(entry.topic_id, entry.partition)
                except errors.PkError as error:
                    reply.results.add(index=index, error=frames.error_of(error))
                    continue
                base = log.append([payload])
                reply.results.add(index=index, base_offset=base, last_offset=log.end - 1)
            head = head_of(reply, correlation_id=frame.head.correlation_id)
            await stream.send(frames.encode(head))


__all__ = ["FakeBroker", "Log", "error_head"]
