"""The types of the options of `Producer` and `Consumer`, for type checkers and editors.

Made by `make docs` from `src/pk/settings.py`; edit that.  Times in ms and sizes in bytes
may have a unit, as text: `90s`, `64MiB` (pk.units).  Kafka's dotted names are accepted
at run time, in a dict of Any.
"""

from __future__ import annotations

from typing import Literal, TypedDict


class ProducerOptions(TypedDict, total=False):
    """Keyword arguments of `Producer`."""

    #: replicas that must have a record before it is acknowledged
    acks: Literal["0", "1", "all", "-1"]
    #: how long a batch may wait for more records (ms)
    linger_ms: float | str
    #: bytes of a full batch
    batch_size: int | str
    #: bytes of records that are not yet acknowledged; above it send blocks
    buffer_memory: int | str
    #: how long send may block while it waits for memory, a broker or a topic (ms)
    max_block_ms: int | str
    #: codec of batches
    compression: Literal["none", "lz4", "zstd"]
    compression_type: Literal["none", "lz4", "zstd"]  #: compression, under Kafka's name
    #: zstd level
    compression_level: int
    #: frames in flight per broker; a frame without answers for 500 ms does not count
    max_in_flight: int
    max_in_flight_requests_per_connection: int  #: max_in_flight, under Kafka's name
    #: a record that is not acknowledged after this time fails (ms)
    delivery_timeout_ms: int | str
    #: a request without an answer after this time is retried (ms)
    request_timeout_ms: int | str
    #: first wait before a retry (ms)
    retry_backoff_ms: int | str
    #: longest wait before a retry (ms)
    retry_backoff_max_ms: int | str
    #: store no duplicates and keep the order of sends, also with retries
    enable_idempotence: bool
    #: largest batch this producer builds
    max_request_size: int | str
    #: name in logs and metrics
    client_id: str
    #: name of the producer across restarts; with it the producer writes in transactions
    transactional_id: str
    #: the coordinator aborts a transaction that is open for longer (ms)
    transaction_timeout_ms: int | str
    bootstrap_servers: str  #: the argument `bootstrap`, under Kafka's name


class ConsumerOptions(TypedDict, total=False):
    """Keyword arguments of `Consumer`."""

    #: consumer group: its members share the partitions of their subscriptions
    group_id: str
    #: name of a static member, which restarts without a rebalance (KIP-345)
    group_instance_id: str
    #: range, roundrobin, sticky, cooperative-sticky: the preferred assignor first
    partition_assignment_strategy: str
    #: the group removes a member that is not heard for this time (ms)
    session_timeout_ms: int | str
    #: how often a member sends a heartbeat; it waits for news at most so long (ms)
    heartbeat_interval_ms: int | str
    #: a member that does not poll for this time leaves its group (ms)
    max_poll_interval_ms: int | str
    #: a poll commits, every auto_commit_interval_ms, what was returned before it
    enable_auto_commit: bool
    #: how often offsets are committed by themselves (ms)
    auto_commit_interval_ms: int | str
    #: where a consumer without a position starts
    auto_offset_reset: Literal["earliest", "latest", "none"]
    #: read_committed hides open and aborted transactions
    isolation_level: Literal["read_committed", "read_uncommitted"]
    #: the broker answers once it has this much
    fetch_min_bytes: int | str
    #: the broker answers after this time at the latest (ms)
    fetch_max_wait_ms: int | str
    #: bytes of one frame
    fetch_max_bytes: int | str
    #: bytes of one partition in a frame
    max_partition_fetch_bytes: int | str
    #: bytes that are fetched and not yet polled, per broker
    fetch_buffer_bytes: int | str
    #: the largest number of records in the result of one poll
    max_poll_records: int
    #: verify every batch's checksum
    check_crcs: bool
    #: largest size of a batch after decompression
    decoded_bytes_max: int | str
    #: a request without an answer after this time is retried (ms)
    request_timeout_ms: int | str
    #: how long a blocking call retries before it fails (ms)
    default_api_timeout_ms: int | str
    #: first wait before a retry (ms)
    retry_backoff_ms: int | str
    #: longest wait before a retry (ms)
    retry_backoff_max_ms: int | str
    #: metadata is refreshed at least this often (ms)
    metadata_max_age_ms: int | str
    #: name in logs and metrics
    client_id: str
    bootstrap_servers: str  #: the argument `bootstrap`, under Kafka's name
