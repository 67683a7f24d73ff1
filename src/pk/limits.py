"""Every bound of pk that is not a user's setting, and the relations between bounds."""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB

#: Bytes of a batch's fixed header.
HEADER_BYTES = 64
#: A frame aims at this many payload bytes; one larger batch travels alone (rule P4).
FRAME_BYTES = 4 * MIB
#: The bytes reserved for the head of a frame (protobuf).
FRAME_HEAD_BYTES_MAX = 8 * MIB
#: The largest `max_message_bytes` that may be configured.
MESSAGE_BYTES_MAX = 256 * MIB
#: The largest frame any transport takes: the largest batch, its frame head and some slack.
WIRE_FRAME_BYTES_MAX = MESSAGE_BYTES_MAX + FRAME_HEAD_BYTES_MAX + MIB
#: The largest control request that a server accepts (rule L17).  A reply may be larger: the client
#: asked that server for it, and the tier's replies carry batches.
CONTROL_BYTES_MAX = 4 * MIB
#: Records per batch: deltas are u32, Spark wants batches of at most some 10 k rows, and memory is
#: bounded.
BATCH_RECORDS_MAX = 1_000_000
#: Batches in one produce frame; a producer puts the others into the next frame.
PRODUCE_BATCHES_MAX = 10_000
#: Produce frames per stream that may wait for the log; beyond it the socket is not read.
PRODUCE_FRAMES_QUEUED_MAX = 4
#: Bytes that may wait for a log directory's writer thread; beyond it produce streams are not read.
WRITE_QUEUE_BYTES_MAX = 64 * MIB
#: Replies parked in purgatory per broker; beyond it requests fail with THROTTLED.
PURGATORY_MAX = 100_000
#: Credits that a consumer grants to one broker at the start, and a follower for in-sync replicas.
FETCH_CREDIT_BYTES = 16 * MIB
#: Credits that a follower grants for replicas that catch up: one frame is written while the next is
#: on the way.  More would let in-sync replicas of the same directory wait longer for their writes.
CATCH_UP_CREDIT_BYTES = 2 * FRAME_BYTES
#: Control streams that share a connection.  Over grpc each may hold a half-received request.
CONTROL_STREAMS_MAX = 256
#: Open connections per listener, of all peers together, if file descriptors allow.
CONNECTIONS_MAX = 16_384
#: Streams that a broker serves to clients at once.  A producer or a consumer has a few, one of them
#: to the coordinator of its group.
STREAMS_MAX = 16_384
#: Streams beyond STREAMS_MAX: of other brokers, and of peers that have not said yet who they are.
STREAMS_RESERVED = 1_024
#: Batches of one producer that the broker remembers per partition (KIP-98: five).
PRODUCER_BATCHES_REMEMBERED = 5
#: Largest producer epoch (i16) that a producer gets; after it the producer gets a new id (KIP-360).
#: The marker of its transaction has the epoch above it (X1).
PRODUCER_EPOCH_LAST = 2**15 - 2
#: Bytes (utf-8) of the longest transactional id: it is in every record of its transactions.
TRANSACTIONAL_ID_BYTES_MAX = 249
#: Partitions of one transaction: each registration writes a record with all of them.
TRANSACTION_PARTITIONS_MAX = 10_000
#: Participants of one transaction: each of its partitions gets a control batch with a row for each.
PARTICIPANTS_MAX = 5_000
#: Bytes (utf-8) of the longest query id or run id of a job.
JOB_NAME_BYTES_MAX = 249
#: Bytes (utf-8) of the longest URL of a table that decides a batch.
TABLE_URL_BYTES_MAX = 2_048
#: Requests in flight per (producer, partition) that idempotence can keep in order.
IN_FLIGHT_MAX = 5
#: Bytes (utf-8) of the longest group id, member id or group instance id: records have them.
GROUP_ID_BYTES_MAX = 249
#: Bytes of the subscription of a member: each rebalance writes a record with it, and the leader of
#: the group gets those of all members.
SUBSCRIPTION_BYTES_MAX = 128 * KIB
#: Bytes of the ids and subscriptions of all members of a group: the leader gets them in one reply,
#: whose head has FRAME_HEAD_BYTES_MAX.
GROUP_MEMBERS_BYTES_MAX = FRAME_HEAD_BYTES_MAX // 2
#: Assignors that a member lists.
ASSIGNORS_MAX = 16
#: Partitions of one commit, or of one fetch of offsets: each committed one is a record.
OFFSETS_PER_REQUEST_MAX = 10_000
#: Bytes of an assignment: it is one record.
ASSIGNMENT_BYTES_MAX = 512 * KIB
#: Largest number of groups that a request may name.
GROUPS_DESCRIBED_MAX = 1_000
#: Largest number of transactional ids that a request may name.
TRANSACTIONS_DESCRIBED_MAX = 1_000
#: Largest number of markers times partitions of one request between brokers.
TXN_MARKERS_MAX = 10_000
#: Producer ids per block that the controller grants to a broker.
PRODUCER_ID_BLOCK = 1000
#: Largest number of partitions of one topic.
PARTITIONS_PER_TOPIC_MAX = 10_000
#: Largest length of a topic name (Kafka's).
TOPIC_NAME_MAX = 249
#: Largest number of metadata records in one atomic append.
METADATA_RECORDS_PER_APPEND_MAX = 10_000

assert PRODUCER_BATCHES_REMEMBERED >= IN_FLIGHT_MAX, (
    "a retry of any batch in flight must be recognised"
)
assert FRAME_BYTES + FRAME_HEAD_BYTES_MAX <= WIRE_FRAME_BYTES_MAX
assert METADATA_RECORDS_PER_APPEND_MAX * 200 <= CONTROL_BYTES_MAX, "one request may fill an append"


def frame_bytes_max(message_bytes_max: int) -> int:
    """Return the largest frame if batches have at most `message_bytes_max`.

    A frame aims at FRAME_BYTES; one larger batch is sent alone (rule P4).
    """
    return max(FRAME_BYTES, message_bytes_max) + FRAME_HEAD_BYTES_MAX
