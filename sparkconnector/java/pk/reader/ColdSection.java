// Reads a cold range with Spark's vectorised Parquet reader: the files of the table that the plan lists.
//
// Python plans such a section only if the files are on a local disk, were written by pk, and do not
// overlap.  Then the rows are in offset order as they are stored.  The reader checks this all the same:
// another engine may have replaced a file by one with the same name.
//
// Local invariants
//   C1  Only files with a verified footer are opened (Footer H1), and the pages' checksums are verified.
//   C2  Offsets grow from row to row, lie in the file's range, and only those in [start, end) are
//       returned.
//   C3  A column that is never null has no null: Spark does not look.
package pk.reader;

import com.fasterxml.jackson.databind.JsonNode;
import java.io.IOException;
import java.nio.file.Path;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Deque;
import java.util.List;
import java.util.Locale;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.mapred.FileSplit;
import org.apache.hadoop.mapreduce.TaskAttemptContext;
import org.apache.hadoop.mapreduce.TaskAttemptID;
import org.apache.hadoop.mapreduce.task.TaskAttemptContextImpl;
import org.apache.parquet.hadoop.ParquetInputFormat;
import org.apache.spark.sql.execution.datasources.parquet.ParquetReadSupport;
import org.apache.spark.sql.execution.datasources.parquet.VectorizedParquetRecordReader;
import org.apache.spark.sql.types.ArrayType;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarBatch;

final class ColdSection implements Section {
  private static final int ROWS_MOST = 4096;
  private static final int ROWS_LEAST = 16;
  /** A batch of Spark's reader aims at no more decoded bytes than this. */
  private static final long BYTES_MOST = 16 << 20;

  private final Plan.Section section;
  private final Columns columns;
  private final Deque<Footer.Planned> files = new ArrayDeque<>();
  private final StructType stored;
  /** For each returned column, its index in `stored`; -1 = the same value in every row. */
  private final int[] sources;
  private Footer.Planned file;
  private VectorizedParquetRecordReader reader;
  private long last;
  private long position;
  private long bytes;

  ColdSection(Plan.Section section, StructType required) {
    this.section = section;
    columns = new Columns(section.topic, section.partition, required);
    Path root = Path.of(section.details.path("root").asText());
    for (JsonNode each : section.details.path("files")) {
      files.add(new Footer.Planned(
          root.resolve(each.path("path").asText()),
          each.path("min").asLong(),
          each.path("max").asLong(),
          each.path("size").asLong(),
          each.path("rows").asLong(),
          each.path("crc").asLong(-1)));
    }
    List<StructField> wanted = new ArrayList<>();
    wanted.add(new StructField("offset", DataTypes.LongType, true, columns.noMetadata()));
    sources = new int[required.length()];
    for (int at = 0; at < sources.length; at++) {
      sources[at] = source(required.fields()[at], wanted);
    }
    stored = new StructType(wanted.toArray(new StructField[0]));
    position = section.start;
    last = section.start - 1;
  }

  private int source(StructField field, List<StructField> wanted) {
    String name = field.name().toLowerCase(Locale.ROOT);
    switch (name) {
      case "topic":
      case "partition":
        return -1;
      case "offset":
        return 0;
      default:
        String inFile = name.equals("timestamptype") ? "timestamp_type" : name;
        wanted.add(new StructField(inFile, nullable(field.dataType()), true, columns.noMetadata()));
        return wanted.size() - 1;
    }
  }

  private static DataType nullable(DataType type) {
    return type instanceof ArrayType ? ((ArrayType) type).asNullable() : type;
  }

  @Override
  public ColumnarBatch next() throws IOException {
    while (true) {
      if (reader == null && !open()) {
        return null;
      }
      if (!reader.nextBatch()) {
        close();
        continue;
      }
      ColumnarBatch found = cut(reader.resultBatch());
      if (found != null) {
        return found;
      }
    }
  }

  /** Opens the next file with rows of the range; returns false if there is none. */
  private boolean open() throws IOException {
    while (!files.isEmpty()) {
      file = files.remove();
      if (file.maxOffset < section.start || file.minOffset >= section.end) {
        continue;
      }
      if (file.minOffset <= last && last >= section.start) {
        throw new IOException(file.path + " overlaps the file before it");
      }
      Footer footer = Footer.read(file, section.start, section.end);
      if (footer.size == 0) {
        continue;
      }
      bytes += footer.size;
      long rows = BYTES_MOST / Math.max(1, footer.rowBytes);
      int batch = (int) Math.max(ROWS_LEAST, Math.min(ROWS_MOST, rows));
      reader = new VectorizedParquetRecordReader(
          null, "CORRECTED", "UTC", "CORRECTED", "UTC", false, batch);
      FileSplit split = new FileSplit(
          new org.apache.hadoop.fs.Path(file.path.toUri()), footer.start, footer.size,
          new String[0]);
      try {
        reader.initialize(split, context());
      } catch (InterruptedException cause) {
        Thread.currentThread().interrupt();
        throw new IOException(cause);
      }
      reader.initBatch(new StructType(), null);
      reader.enableReturningBatches();
      return true;
    }
    return false;
  }

  private TaskAttemptContext context() {
    Configuration conf = new Configuration(Configured.BASE);
    conf.set(ParquetInputFormat.READ_SUPPORT_CLASS, ParquetReadSupport.class.getName());
    conf.set("org.apache.spark.sql.parquet.row.requested_schema", stored.json());
    conf.set("spark.sql.session.timeZone", "UTC");
    conf.setBoolean("parquet.page.verify-checksum.enabled", true); // C1
    conf.setBoolean("spark.sql.caseSensitive", true);
    conf.setBoolean("spark.sql.optimizer.nestedSchemaPruning.enabled", true);
    conf.setBoolean("spark.sql.parquet.binaryAsString", false);
    conf.setBoolean("spark.sql.parquet.int96AsTimestamp", false);
    conf.setBoolean("spark.sql.parquet.inferTimestampNTZ.enabled", true);
    conf.setBoolean("spark.sql.legacy.parquet.nanosAsLong", false);
    return new TaskAttemptContextImpl(conf, new TaskAttemptID());
  }

  /** Hadoop's defaults, parsed once. */
  private static final class Configured {
    static final Configuration BASE = new Configuration();
  }

  /** Returns the rows of the range; null if the batch has none. */
  private ColumnarBatch cut(ColumnarBatch batch) throws IOException {
    int count = batch.numRows();
    ColumnVector offsets = batch.column(0);
    if (offsets.hasNull()) {
      throw new IOException(file.path + ": a row has no offset");
    }
    int first = 0;
    int end = 0;
    for (int row = 0; row < count; row++) { // C2
      long offset = offsets.getLong(row);
      if (row > 0 ? offset <= offsets.getLong(row - 1) : false) {
        throw new IOException(file.path + ": its rows are not in offset order");
      }
      first += offset < section.start ? 1 : 0;
      end += offset < section.end ? 1 : 0;
    }
    if (count == 0 || first >= end) {
      return null;
    }
    long least = offsets.getLong(first);
    long most = offsets.getLong(end - 1);
    if (least <= last || least < file.minOffset || most > file.maxOffset) {
      throw new IOException(file.path + ": its offsets are not those of the table's log");
    }
    ColumnVector[] found = new ColumnVector[sources.length];
    for (int at = 0; at < sources.length; at++) {
      found[at] = sources[at] < 0
          ? columns.constant(at, end - first)
          : RowsOf.of(batch.column(sources[at]), first, end - first);
      columns.check(at, found[at]); // C3
    }
    last = most;
    position = most + 1;
    return new ColumnarBatch(found, end - first);
  }

  @Override
  public long position() {
    return position;
  }

  @Override
  public long bytes() {
    return bytes;
  }

  @Override
  public void close() throws IOException {
    if (reader != null) {
      reader.close();
      reader = null;
    }
  }
}
