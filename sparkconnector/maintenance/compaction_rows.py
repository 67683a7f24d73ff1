"""The two passes of a compaction on the executors, as functions over Arrow batches.

The first pass reads keys, offsets, horizons, and which values are null.

    scan      a file → its rows that are the newest of their key in a row group, with a bucket that
              follows from the key; and the decisions about the other rows
    decide    all rows of some buckets → the decisions about them

Spark moves the rows between the two by bucket, and spills what does not fit.  The second pass,
`rewrite`, gets the decisions about the files of a run, and writes the file that replaces them.  No
value is moved between executors, and no row through the driver.

compaction/retain decides: within a row group without times, and for all rows of a key with them.

Invariants
  N1  Memory: `scan` holds one row group, `decide` the rows of its buckets (KEY_BYTES_MAX),
      `rewrite` one output file.
  N2  A decision names an offset.  `rewrite` meets each decision of its files once, or fails.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pk import errors
from pk.compaction import retain
from pk.compaction.offset_map import BYTES_MAX, HashKeys, OffsetMap, key_bytes, key_hasher
from pk.compaction.retain import NO_HORIZON, Cleaning
from pk.sparkconnector.maintenance import tables
from pk.sparkconnector.maintenance.compaction_plan import RewriteRun
from pk.sparkconnector.maintenance.tables import TablePlace
from pk.tiering import convert, layout, row_groups, rowhash
from pk.tiering.data_files import DataFile
from pk.tiering.layout import FILE_SCHEMA, SUM_MODULUS, parse_written_path
from pk.tiering.output_buffer import OutputBuffer, OutputBufferFull
from pk.types import NONE, Offset

#: Bytes of the keys of the buckets of one Spark partition.
KEY_BYTES_MAX = 256 << 20
#: Level of zstd: the file is written once and read often.
LEVEL = 9

#: Decisions about a row; 0 = it stays as it is.
SUPERSEDED, WITHOUT_KEY, TOMBSTONE, HORIZON = 1, 2, 3, 4

DECISIONS = (
    "file int, superseded long, without_key long, tombstones long, horizons long, forgotten long, "
    "offsets binary, codes binary, error binary"
)
ROWS = f"bucket int, key binary, offset long, tombstone boolean, horizon long, {DECISIONS}"
RESULTS = "run int, result binary"

_I64 = npt.NDArray[np.int64]
_Codes = npt.NDArray[np.uint8]
_Batches = Iterable[pa.RecordBatch]
_SCAN_SCHEMA = pa.schema([FILE_SCHEMA.field(n) for n in ("offset", "key", "delete_horizon_ms")])
_NULLABLE_SCHEMA = _SCAN_SCHEMA.append(FILE_SCHEMA.field("value"))
_OFFSET_END = 2**63 - 1


class ScannedFile(NamedTuple):
    """A file of the first pass; its number is its place in the list."""

    file: DataFile
    nulls: bool  #: whether values may be null


class FirstPass(NamedTuple):
    """What the tasks of the first pass need."""

    place: TablePlace
    files: tuple[ScannedFile, ...]
    cleanings: Mapping[int, tuple[Offset, Cleaning]]  #: partition → (first dirty offset, cleaning)
    buckets: int
    secret: bytes  #: of the hash of keys: 32 random bytes
    starts: Mapping[int, Offset]  #: partition → `:start`; rows below it leave


class SecondPass(NamedTuple):
    """What the tasks of the second pass need."""

    place: TablePlace
    runs: Mapping[int, RewriteRun]
    horizons: Mapping[int, int]  #: partition → the new horizon; empty = set none
    times: bool  #: also remove tombstones and set horizons


class RewrittenRun(NamedTuple):
    """What was written for a run."""

    run: int
    add: bytes  #: wire.AddFile; empty = no row is left
    read: tuple[tuple[str, int, int], ...]  #: of each file: path, rows, row sum
    superseded: int
    without_key: int
    tombstones: int
    horizons: int
    forgotten: Offset  #: above the highest removed tombstone

    @property
    def removed(self) -> int:
        return self.superseded + self.without_key + self.tombstones


# -- the first pass --------------------------------------------------------------------------------


def scan(given: FirstPass, numbers: _Batches) -> Iterator[pa.RecordBatch]:
    """Yield the rows (ROWS) of files, whose numbers are in the column `id`."""
    hash_keys = key_hasher(given.secret)
    for batch in numbers:
        for number in batch.column("id").to_pylist():
            try:
                yield from _scan_file(given, number, hash_keys)
            except errors.PkError as error:
                yield _batch(ROWS, 1, bucket=[number % given.buckets], error=[_pickled(error)])


def _scan_file(given: FirstPass, number: int, hash_keys: HashKeys) -> Iterator[pa.RecordBatch]:
    file, nulls = given.files[number]
    first_dirty, cleaning = given.cleanings[file.partition]
    untimed = cleaning._replace(now_ms=None, deadline_ms=None)
    dropped: list[_I64] = []
    codes: list[_Codes] = []
    schema = _NULLABLE_SCHEMA if nulls else _SCAN_SCHEMA
    for group in tables.rows_of(given.place, file, schema):
        found = row_groups.in_offset_order(group, 0, cleaning.end)
        if not found.num_rows:
            continue
        rows = _rows(found, untimed)
        kept, code = _within(rows, first_dirty, untimed, hash_keys)
        dropped.append(rows.offsets[~kept])
        codes.append(code[~kept])
        yield _candidates(rows, kept, number, given.buckets, hash_keys)
    if dropped:
        yield _decided(
            number, np.concatenate(dropped), np.concatenate(codes), 0, number % given.buckets
        )


def _rows(found: pa.RecordBatch, cleaning: Cleaning) -> retain.Rows:
    count = found.num_rows
    nullable = "value" in found.schema.names
    tombstones = found.column("value").is_null() if nullable else pa.array(np.zeros(count, bool))
    names = ["offset", "key", "delete_horizon_ms"]
    columns = [*(found.column(name) for name in names), tombstones]
    table = pa.RecordBatch.from_arrays(columns, [*names, "tombstone"])
    return retain.rows_of_table(table, cleaning)


def _within(
    rows: retain.Rows, first_dirty: Offset, cleaning: Cleaning, hash_keys: HashKeys
) -> tuple[npt.NDArray[np.bool_], _Codes]:
    """Return which rows no other row of this group replaces, and the decisions about the others."""
    latest = OffsetMap(BYTES_MAX, hash_keys)
    if retain.add_dirty_rows(latest, rows, first_dirty, cleaning.end) is not None:
        raise _too_large(rows.keys)
    kept = retain.retain_rows(rows, latest, cleaning).keep
    nulls = rows.keys.is_null().to_numpy(zero_copy_only=False)
    return kept, np.where(kept, 0, np.where(nulls, WITHOUT_KEY, SUPERSEDED)).astype(np.uint8)


def _candidates(
    rows: retain.Rows,
    kept: npt.NDArray[np.bool_],
    number: int,
    buckets: int,
    hash_keys: HashKeys,
) -> pa.RecordBatch:
    keys = rows.keys.filter(pa.array(kept))
    bucket = (hash_keys(keys) % np.uint64(buckets)).astype(np.int32)
    return _batch(
        ROWS,
        len(keys),
        bucket=bucket,
        key=keys,
        offset=rows.offsets[kept],
        tombstone=rows.tombstones[kept],
        horizon=rows.horizons[kept],
        file=np.full(len(keys), number, np.int32),
    )


def decide(given: FirstPass, batches: _Batches) -> Iterator[pa.RecordBatch]:
    """Yield the decisions (DECISIONS) about the rows of some buckets, and those of `scan`."""
    parts: list[pa.RecordBatch] = []
    size = 0
    names = [each.split()[0] for each in DECISIONS.split(", ")]
    for batch in batches:
        decided = batch.column("offset").is_null()
        if decided.true_count:
            yield batch.filter(decided).select(names)
        part = batch.filter(pc.invert(decided)).select(
            ["key", "offset", "tombstone", "horizon", "file"]
        )
        size += key_bytes(part.column("key"))
        parts.append(part)
        if size > KEY_BYTES_MAX:
            error = errors.InvalidOption(
                f"the keys of one task have more than {KEY_BYTES_MAX} bytes: the topic has keys of "
                "several hundred bytes; run the job with more buckets (rows_per_bucket)"
            )
            yield _batch(DECISIONS, 1, error=[_pickled(error)])
            return
    if parts:
        yield from _decide(given, pa.concat_batches(parts))


def _decide(given: FirstPass, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    hash_keys = key_hasher(given.secret)
    files = rows.column("file").to_numpy()
    partition_of = np.array([each.file.partition for each in given.files], np.int64)
    partitions = partition_of[files]
    for partition in np.unique(partitions).tolist():
        first_dirty, cleaning = given.cleanings[partition]
        mine = np.flatnonzero(partitions == partition)
        offsets = rows.column("offset").to_numpy()[mine]
        mine = mine[np.argsort(offsets)]
        some = rows.take(pa.array(mine))
        table = some.rename_columns(["key", "offset", "tombstone", "delete_horizon_ms", "file"])
        codes, forgotten = _of_keys(
            retain.rows_of_table(table, cleaning), first_dirty, cleaning, hash_keys
        )
        # Retention has deleted them.  A file that had only such rows left would count as removed.
        below = offsets[np.argsort(offsets)] < given.starts[partition]
        codes[below], forgotten[below] = SUPERSEDED, 0
        changed = np.flatnonzero(codes)
        by_file = files[mine][changed]
        for number in np.unique(by_file).tolist():
            at = changed[by_file == number]
            named = some.column("offset").to_numpy()[at]
            yield _decided(number, named, codes[at], forgotten[at].max(initial=0))


def _of_keys(
    rows: retain.Rows, first_dirty: Offset, cleaning: Cleaning, hash_keys: HashKeys
) -> tuple[_Codes, _I64]:
    """Return the decisions about all candidates of some keys, and for each removed tombstone the
    offset above it."""
    latest = OffsetMap(BYTES_MAX, hash_keys)
    if retain.add_dirty_rows(latest, rows, first_dirty, cleaning.end) is not None:
        raise _too_large(rows.keys)
    kept = retain.retain_rows(rows, latest, cleaning)
    codes = np.where(kept.keep, 0, SUPERSEDED).astype(np.uint8)
    codes[kept.keep & (kept.horizons != rows.horizons)] = HORIZON
    expired = np.flatnonzero(
        ~kept.keep & rows.tombstones & rows.settled & cleaning.passed(rows.horizons)
    )
    newest = latest.latest(rows.keys.take(pa.array(expired))) <= rows.offsets[expired]
    codes[expired[newest]] = TOMBSTONE
    return codes, np.where(codes == TOMBSTONE, rows.offsets + 1, 0)


def _too_large(keys: pa.Array) -> errors.InvalidOption:
    return errors.InvalidOption(
        f"{len(keys)} keys have {key_bytes(keys)} bytes, more than fit into an offset map of "
        f"{BYTES_MAX} bytes"
    )


def _decided(
    number: int, offsets: _I64, codes: _Codes, forgotten: int, bucket: int | None = None
) -> pa.RecordBatch:
    counts = np.bincount(codes, minlength=HORIZON + 1).tolist()
    more = {} if bucket is None else {"bucket": [bucket]}
    return _batch(
        DECISIONS if bucket is None else ROWS,
        1,
        file=[number],
        superseded=[counts[SUPERSEDED]],
        without_key=[counts[WITHOUT_KEY]],
        tombstones=[counts[TOMBSTONE]],
        horizons=[counts[HORIZON]],
        forgotten=[int(forgotten)],
        offsets=[offsets.astype("<i8").tobytes()],
        codes=[codes.tobytes()],
        **more,
    )


_TYPES = {"int": pa.int32(), "long": pa.int64(), "binary": pa.binary(), "boolean": pa.bool_()}


def _batch(schema: str, count: int, **columns: Any) -> pa.RecordBatch:
    """Return a batch of a Spark schema; columns that are not given are null."""
    arrays, names = [], []
    for each in schema.split(", "):
        name, kind = each.split()
        given = columns.get(name)
        found = pa.nulls(count, _TYPES[kind]) if given is None else pa.array(given, _TYPES[kind])
        arrays.append(found)
        names.append(name)
    return pa.RecordBatch.from_arrays(arrays, names)


def _pickled(error: errors.PkError) -> bytes:
    return pickle.dumps(error.with_traceback(None))


# -- the second pass -------------------------------------------------------------------------------


def rewrite(given: SecondPass, batches: _Batches) -> Iterator[pa.RecordBatch]:
    """Write the files of runs; yield RESULTS.

    batches: the columns run, offsets and codes of DECISIONS, in the order of the runs
    """
    of_run: list[tuple[_I64, _Codes]] = []
    run: int | None = None
    for batch in batches:
        for row in batch.to_pylist():
            if run is not None and row["run"] != run:
                yield _result(given, run, of_run)
                of_run = []
            run = row["run"]
            of_run.append(
                (np.frombuffer(row["offsets"], "<i8"), np.frombuffer(row["codes"], np.uint8))
            )
    if run is not None:
        yield _result(given, run, of_run)


def _result(
    given: SecondPass, run: int, decisions: Sequence[tuple[_I64, _Codes]]
) -> pa.RecordBatch:
    result: RewrittenRun | errors.PkError
    try:
        result = rewrite_run(given, given.runs[run], decisions)
    except errors.PkError as error:
        result = error.with_traceback(None)
    return _batch(RESULTS, 1, run=[run], result=[pickle.dumps(result)])


class _Decisions(NamedTuple):
    """The decisions about the rows of a run, by offset."""

    offsets: _I64
    codes: _Codes

    @classmethod
    def of(cls, given: Sequence[tuple[_I64, _Codes]], *, times: bool) -> _Decisions:
        offsets = np.concatenate([each for each, _ in given])
        codes = np.concatenate([each for _, each in given])
        wanted = np.ones(len(codes), bool) if times else codes <= WITHOUT_KEY
        order = np.argsort(offsets[wanted], kind="stable")
        return cls(offsets[wanted][order], codes[wanted][order])

    def about(self, offsets: _I64) -> _Codes:
        """Return the decision about each offset."""
        found = np.zeros(len(offsets), np.uint8)
        if not len(self.offsets):
            return found
        at = np.minimum(np.searchsorted(self.offsets, offsets), len(self.offsets) - 1)
        hits = self.offsets[at] == offsets
        found[hits] = self.codes[at[hits]]
        return found


def rewrite_run(
    given: SecondPass, run: RewriteRun, decisions: Sequence[tuple[_I64, _Codes]]
) -> RewrittenRun:
    """Write the file that replaces the files of a run, and put it into the store.

    Each attempt of a task draws a name of its own.  Raises `DamagedTierFile`, `TierUnavailable`.
    """
    named = _Decisions.of(decisions, times=given.times)
    buffer = OutputBuffer(2 * sum(file.size for file in run.files) + (1 << 20))
    while True:
        try:
            built, read = _build(given, run, named, buffer)
            break
        except OutputBufferFull:
            buffer.grow()
    counts = np.bincount(named.codes, minlength=HORIZON + 1).tolist()
    gone = named.offsets[named.codes == TOMBSTONE]
    result = RewrittenRun(
        run.number,
        b"",
        tuple(read),
        counts[SUPERSEDED],
        counts[WITHOUT_KEY],
        counts[TOMBSTONE],
        counts[HORIZON],
        int(gone.max()) + 1 if len(gone) else 0,
    )
    if built is None:
        return result
    return result._replace(add=_put(given.place, run, built))


def _build(
    given: SecondPass, run: RewriteRun, named: _Decisions, buffer: OutputBuffer
) -> tuple[convert.BuiltFile | None, list[tuple[str, int, int]]]:
    builder = convert.FileBuilder(LEVEL, buffer)
    read: list[tuple[str, int, int]] = []
    met = left = 0
    for cluster in run.clusters:
        for rows in _in_order(given.place, cluster, read):
            codes = named.about(rows.column("offset").to_numpy())
            met += int(np.count_nonzero(codes))
            kept = _with_horizon(rows, codes == HORIZON, given.horizons.get(run.partition))
            stays = (codes == 0) | (codes == HORIZON)
            kept = kept if stays.all() else kept.filter(pa.array(stays))
            left += kept.num_rows
            builder.add(kept)
    built = builder.finish()
    if met != len(named.offsets) or (0 if built is None else built.rows) != left:
        raise errors.InternalError(
            f"{given.place.uri}: {met} of {len(named.offsets)} decisions about the offsets "
            f"[{run.start}, {run.end}) of partition {run.partition} met their row"
        )
    return built, read


def _with_horizon(
    rows: pa.RecordBatch, fresh: npt.NDArray[np.bool_], horizon: int | None
) -> pa.RecordBatch:
    if not fresh.any():
        return rows
    assert horizon is not None
    known = rows.column("delete_horizon_ms")
    values = np.where(fresh, horizon, pc.fill_null(known, NO_HORIZON).to_numpy())
    column = pa.array(values, mask=values == NO_HORIZON)
    return rows.set_column(
        FILE_SCHEMA.get_field_index("delete_horizon_ms"),
        FILE_SCHEMA.field("delete_horizon_ms"),
        column,
    )


def _in_order(
    place: TablePlace, cluster: Sequence[DataFile], read: list[tuple[str, int, int]]
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a cluster in offset order; append path, rows and row sum of each file to
    `read`."""
    scattered: list[pa.RecordBatch] = []
    for file in cluster:
        count = total = 0
        sorted_file = len(cluster) == 1 and parse_written_path(file.path) is not None
        for rows in tables.rows_of(place, file):
            count += rows.num_rows
            total += rowhash.row_sum(rows)
            if sorted_file:
                yield rows
            else:
                scattered.append(rows)
        read.append((file.path, count, total % SUM_MODULUS))
    if scattered:
        found = row_groups.merge(scattered, 0, _OFFSET_END)
        assert found is not None
        yield found


def _put(place: TablePlace, run: RewriteRun, built: convert.BuiltFile) -> bytes:
    attempt = place.new_attempt()
    name = layout.DataName(
        run.partition, run.start, run.end, NONE, attempt, built.footer_crc, built.row_sum
    )
    return tables.put(place, name, built)
