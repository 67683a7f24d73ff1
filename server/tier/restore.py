"""`pk tier restore`: makes a cluster from the tier of one that was lost (rule T13).

    look      the copies of the lost cluster's metadata, its tables, whether its brokers answer
    begin     a generation of the store, by put-if-absent
    claim     every table: earlier clusters commit nothing from now on
    seed      the first metadata of the restored cluster, by put-if-absent
    format    the directories of this node, with the seed

The look changes nothing.  A restore that was interrupted goes on with `join`, and so does the
format of the other nodes.  All nodes are formatted before the first one starts.

Invariants
  J1  Nothing is changed before every check of the look has passed.
  J2  A step that was done is not done again with another outcome: the generation names the restored
      cluster, a claim is kept, and the seed never changes.
  J3  `join` is refused once the restored cluster has started: a voter that begins again with the
      seed could vote twice.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote

from google.protobuf.message import Message

import pk
from pk import errors, generations
from pk.server.metadata import snapshot
from pk.server.metadata.image import MetadataImage, VoterState
from pk.server.node.format import Formatted, Seed, format_node, require_new
from pk.server.node.settings import (
    Resolved,
    is_clustered,
    voter_directory_id,
    voters_of,
)
from pk.server.raft.snapshot_files import LOAD, SNAPSHOT_BYTES_MAX
from pk.server.raft.snapshot_framing import check
from pk.server.raft.snapshot_id import SnapshotId, file_name
from pk.server.tier.restored_metadata import RestorePlan, seed_of
from pk.tiering import metadata_copies, restore_fence, restore_records
from pk.tiering.cluster_directory import CLUSTER_DIRECTORY, owner_path
from pk.tiering.metadata_copies import MetadataName
from pk.tiering.objects import ObjectStore
from pk.tiering.restore_records import RestoreRecord
from pk.tiering.stored_metadata import metadata_in
from pk.tiering.table import Snapshot, Table, TableFactory
from pk.types import NodeId
from pk.wire import pk_pb2 as wire
from pk.wire.calls import PROTOCOL, Caller
from pk.world import World

ANSWER_MS = 2_000
Progress = Callable[[str], None]


@dataclass(slots=True, frozen=True)
class Wishes:
    """What the operator asked for."""

    cluster_id: str = ""  #: of the lost cluster; "" = the only one of the store
    new_cluster_id: str = ""  #: of the restored cluster; "" = a fresh one
    brokers: tuple[NodeId, ...] = ()  #: of the restored cluster; () = its voters, or this node
    dry_run: bool = False
    fence: bool = False
    join: bool = False


@dataclass(slots=True, frozen=True)
class TopicReport:
    """What becomes of one topic."""

    topic: str
    topic_id: str
    partitions: int
    has_table: bool  #: False = nothing of it is stored; it begins empty, with a new id
    rows: int  #: of the table
    #: The end of the table by partition: what was acknowledged above it is lost.
    table_ends: tuple[int, ...] = ()


@dataclass(slots=True)
class RestoreReport:
    """What a restore did, or would do."""

    source: str
    copy: str
    generation: int
    cluster_id: str
    first_offset: int  #: of every partition with a table
    topics: list[TopicReport] = field(default_factory=list)
    alive: list[str] = field(default_factory=list)  #: addresses of the lost cluster that answer
    formatted: Formatted | None = None


@dataclass(slots=True, frozen=True)
class _Found:
    """The outcome of the look."""

    source: str
    copy: str
    image: MetadataImage
    tables: dict[str, Snapshot]  #: by topic id


class Restore:
    """One restore."""

    def __init__(
        self,
        store: ObjectStore,
        tables: TableFactory,
        world: World,
        dirs: Sequence[str],
        resolved: Resolved,
        wishes: Wishes,
        say: Progress,
    ) -> None:
        self._store = store
        self._tables = tables
        self._world = world
        self._dirs = dirs
        self._resolved = resolved
        self._wishes = wishes
        self._say = say

    async def run(self) -> RestoreReport:
        """Restore, or with `dry_run` only look.

        Raises `NothingToRestore`, `ClusterAlive`, `RestoreUnderWay`, `DirectoryFormatted`,
        `InvalidConfig`, `DamagedTierFile`, `NewerFormat`, `TierTableChanged`, and the refusals of
        the store.
        """
        require_new(self._dirs)
        report, seed = await self.begin()
        if seed is None:
            return report
        self._say(f"formatting {', '.join(self._dirs)}")
        report.formatted = format_node(
            self._dirs,
            self._resolved,
            cluster_id=report.cluster_id,
            initial_controllers=is_clustered(self._resolved.server),
            ignore_formatted=False,
            seed=seed,
        )
        return report

    async def begin(self) -> tuple[RestoreReport, Seed | None]:
        """Do all but the format; return the first metadata of this node, None = a dry run."""
        wishes, server = self._wishes, self._resolved.server
        found = await self._look()
        begun = await restore_records.restores_in(self._store)
        mine = [each for each in begun if each.source == found.source]
        claims = [restore_fence.generation_of(each) for each in found.tables.values()]
        generation = max([0, *(each.generation for each in begun), *claims]) + 1
        record = RestoreRecord(
            generation,
            found.source,
            found.copy,
            wishes.new_cluster_id or str(server["cluster_id"]) or self._world.new_id(),
            self._world.new_id(),
            self._world.clock.wall_ms(),
        )
        if wishes.join:
            record = await self._joined(mine)
        self._check_id(found, record)
        report = self._report(found, record)
        report.alive = await self._alive(found)
        if wishes.dry_run:
            return report, None
        self._check(found, mine, report, generation)
        await self._probe()
        if not wishes.join and not await restore_records.put_record(self._store, record):
            raise _under_way(f"generation {generation} was begun at the same time")
        raw = await self._seed(found, record)
        return report, Seed(file_name(check(raw).id) + LOAD, raw, self._alone_id(record))

    # -- the look ----------------------------------------------------------------------------------

    async def _look(self) -> _Found:
        source = self._wishes.cluster_id or await self._only_cluster()
        copies = await metadata_in(self._store, source)
        if not copies:
            raise errors.NothingToRestore(
                f"{self._store.url}/{CLUSTER_DIRECTORY} has no copy of the metadata of a cluster "
                f"{source!r}: give the --tier-url and the --cluster-id that the lost cluster had"
            )
        path = copies[max(copies)]
        self._say(f"reading {path}")
        image = await read_copy(self._store, path)
        tables: dict[str, Snapshot] = {}
        for topic in image.topics.values():
            if topic.internal:
                continue
            table = self._tables.table(topic.name, topic.topic_id)
            known = await restore_fence.load(table, len(topic.partitions))
            if known is not None:
                tables[topic.topic_id] = known
        return _Found(source, path, image, tables)

    async def _only_cluster(self) -> str:
        """Return the id of the only cluster with copies.  Raises `NothingToRestore`."""
        ids: dict[str, None] = {}
        for each in await self._store.list(CLUSTER_DIRECTORY):
            if metadata_copies.parse_metadata_path(each.path) is not None:
                ids[unquote(each.path.split("/")[1])] = None
        if len(ids) == 1:
            return next(iter(ids))
        where = f"{self._store.url}/{CLUSTER_DIRECTORY}"
        if ids:
            raise errors.NothingToRestore(
                f"{where} has several clusters: {', '.join(ids)}; give --cluster-id of the cluster "
                "that was lost"
            )
        raise errors.NothingToRestore(
            f"{where} has no copy of the metadata of any cluster: give the --tier-url that the "
            "lost cluster had. If it made no copies (tier_metadata_interval_ms=0), its tables can "
            "only be read as Delta tables"
        )

    async def _alive(self, found: _Found) -> list[str]:
        """Return the brokers of the lost cluster that answer."""
        addresses = [broker.address for broker in found.image.brokers.values() if broker.address]
        answers = await asyncio.gather(*(self._answers(each, found.source) for each in addresses))
        return [where for where, alive in zip(addresses, answers, strict=True) if alive]

    async def _answers(self, address: str, cluster_id: str) -> bool:
        answer = await self._ask(address, wire.MetadataRequest())
        return answer is not None and answer.metadata_reply.cluster_id == cluster_id

    async def _ask(self, address: str, request: Message) -> wire.Head | None:
        """Return the answer of a node; None = no node answers there, or it refuses."""
        world = self._world
        hello = wire.Hello(client_id="pk-restore", build=pk.__version__, protocol=PROTOCOL)
        caller = Caller(world.network, world.clock, address, hello)
        try:
            return (await caller.call(request, timeout_ms=ANSWER_MS)).head
        except errors.PkError:
            return None
        finally:
            await caller.close()

    def _report(self, found: _Found, record: RestoreRecord) -> RestoreReport:
        first = record.generation * generations.OFFSETS
        report = RestoreReport(
            found.source, found.copy, record.generation, record.cluster_id, first
        )
        for topic in found.image.topics.values():
            if topic.internal:
                continue
            table = found.tables.get(topic.topic_id)
            count = len(topic.partitions)
            ends: tuple[int, ...] = ()
            rows = 0
            if table is not None:
                count = restore_fence.partitions_of(table, count)
                ends = tuple(table.partition(each).end for each in range(count))
                rows = sum(file.rows for file in table.files.values())
            report.topics.append(
                TopicReport(topic.name, topic.topic_id, count, table is not None, rows, ends)
            )
        return report

    def _check_id(self, found: _Found, record: RestoreRecord) -> None:
        """Raise `InvalidConfig` unless the settings fit the id of the restored cluster."""
        named = str(self._resolved.server["cluster_id"])
        if record.cluster_id == found.source:
            raise errors.InvalidConfig(
                f"the restored cluster cannot have the id of the lost one, {found.source}, whose "
                "nodes and clients may come back: choose another cluster_id",
                option="cluster_id",
            )
        if named and named != record.cluster_id:
            raise errors.InvalidConfig(
                f"the restored cluster is {record.cluster_id}, and cluster_id is {named}",
                option="cluster_id",
            )

    def _check(
        self, found: _Found, mine: list[RestoreRecord], report: RestoreReport, generation: int
    ) -> None:
        """Raise unless the restore may begin (J1)."""
        wishes = self._wishes
        if generation > generations.GENERATION_MAX:
            raise errors.UnsupportedFeature(f"this tier was restored {generation} times (T13)")
        if report.alive and not wishes.fence:
            raise errors.ClusterAlive(
                f"cluster {found.source} answers at {', '.join(report.alive)}: stop it. With "
                "--fence its tables are taken from it while it runs"
            )
        if mine and not wishes.join and not wishes.fence:
            last = mine[-1]
            raise _under_way(
                f"a restore of cluster {last.source} as {last.cluster_id} (generation "
                f"{last.generation}) began before; restore that cluster if it was lost, too"
            )

    # -- the changes -------------------------------------------------------------------------------

    async def _probe(self) -> None:
        """Raise `StoreRefused` unless put-if-absent works here (rule T14)."""
        await self._tables.probe(self._world.new_id())

    async def _joined(self, mine: list[RestoreRecord]) -> RestoreRecord:
        """Return the restore to go on with.  Raises `RestoreUnderWay` if it is over (J3)."""
        if not mine:
            raise errors.NothingToRestore("no restore has begun that --join could go on with")
        record = mine[-1]
        # The owner object is older than the first copy, and a cluster may make none.
        owned = await self._store.head(owner_path(record.cluster_id)) is not None
        if owned or await self._is_led():
            raise errors.RestoreUnderWay(
                f"cluster {record.cluster_id} has started, so no node begins with the restored "
                "metadata any more: format this node with `pk server format`"
            )
        return record

    async def _is_led(self) -> bool:
        """Return whether a voter of the restored cluster is its active controller."""
        voters = voters_of(self._resolved.server).values()
        answers = await asyncio.gather(
            *(self._ask(each, wire.DescribeQuorumRequest()) for each in voters)
        )
        return any(answer is not None for answer in answers)  # the others refuse

    async def _seed(self, found: _Found, record: RestoreRecord) -> bytes:
        """Return the first metadata; claim the tables and make them if they are not there (J2)."""
        path = restore_records.seed_path(record.generation)
        if await self._store.head(path) is None:
            counts: dict[str, int] = {}
            for topic_id in found.tables:
                topic = found.image.topics[topic_id]
                self._say(f"claiming the table of {topic.name}")
                table: Table = self._tables.table(topic.name, topic_id)
                claimed = await restore_fence.claim(table, len(topic.partitions), record.generation)
                counts[topic_id] = restore_fence.partitions_of(claimed, len(topic.partitions))
            plan = RestorePlan(
                record.generation,
                record.cluster_id,
                record.genesis,
                self._brokers(),
                self._voters(record),
                counts,
            )
            await self._store.put_if_absent(path, seed_of(found.image, plan))
        return await self._store.get_range(path, 0, SNAPSHOT_BYTES_MAX)

    def _brokers(self) -> tuple[NodeId, ...]:
        server = self._resolved.server
        given = self._wishes.brokers or tuple(voters_of(server))
        return given or (self._node_id,)

    def _voters(self, record: RestoreRecord) -> tuple[VoterState, ...]:
        """Return the first voters, which the seed names."""
        voters = voters_of(self._resolved.server)
        if not voters:
            return (VoterState(self._node_id, self._alone_id(record), ""),)
        return tuple(
            VoterState(node, voter_directory_id(record.cluster_id, node), address)
            for node, address in voters.items()
        )

    def _alone_id(self, record: RestoreRecord) -> str:
        """Return the id of the metadata's directory of a node that is alone."""
        return str(uuid.uuid5(uuid.UUID(record.genesis), f"metadata of {self._node_id}"))

    @property
    def _node_id(self) -> NodeId:
        return int(self._resolved.server["node_id"])


def _under_way(why: str) -> errors.RestoreUnderWay:
    return errors.RestoreUnderWay(
        f"{why}. --join goes on with it, or formats another node of it; --fence begins another "
        "one, which takes the tables from it"
    )


async def read_copy(store: ObjectStore, path: str) -> MetadataImage:
    """Return the image in a copy of the metadata.

    Raises `DamagedTierFile`, and `NewerFormat` for a copy of a newer build.
    """
    raw = await store.get_range(path, 0, SNAPSHOT_BYTES_MAX)
    name = metadata_copies.parse_metadata_path(path)
    assert name is not None
    image = MetadataImage()
    try:
        check(raw, _id_of(name))
        for rows in snapshot.batches_of(raw):
            for offset, record in rows:
                image.apply(offset, record)
    except errors.NewerFormat as newer:
        raise errors.NewerFormat(f"{path}: {newer.message}") from newer
    except (errors.CorruptLog, errors.CorruptBatch, errors.InvalidRecord) as cause:
        raise errors.DamagedTierFile(f"{path} is damaged: {cause.message}", path=path) from cause
    return image


def _id_of(name: MetadataName) -> SnapshotId:
    return SnapshotId(name.end, name.epoch)
