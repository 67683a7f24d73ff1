// Rows of Spark's Python reader, copied into columns: for the rest of a section that failed, and for
// sections that only Python can read.  It costs more than reading a whole scan through Python, because
// each row is copied twice.
package pk.reader;

import java.io.IOException;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.execution.RowToColumnConverter;
import org.apache.spark.sql.execution.vectorized.OnHeapColumnVector;
import org.apache.spark.sql.execution.vectorized.WritableColumnVector;
import org.apache.spark.sql.types.BinaryType;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.vectorized.ColumnarBatch;

final class PythonSection implements Section {
  private static final int ROWS_MOST = 4096;
  /** A batch ends with the row that takes its keys or its values above this size. */
  private static final int BYTES_MOST = 16 << 20;

  private final PartitionReader<InternalRow> rows;
  private final RowToColumnConverter converter;
  private final OnHeapColumnVector[] columns;
  private final ColumnarBatch batch;

  PythonSection(PartitionReader<InternalRow> rows, StructType schema) {
    this.rows = rows;
    converter = new RowToColumnConverter(schema);
    columns = OnHeapColumnVector.allocateColumns(ROWS_MOST, schema);
    batch = new ColumnarBatch(columns);
  }

  @Override
  public ColumnarBatch next() throws IOException {
    for (WritableColumnVector each : columns) {
      each.reset();
    }
    int count = 0;
    while (count < ROWS_MOST && widest() < BYTES_MOST && rows.next()) {
      converter.convert(rows.get(), columns);
      count++;
    }
    if (count == 0) {
      return null;
    }
    batch.setNumRows(count);
    return batch;
  }

  private int widest() {
    int found = 0;
    for (WritableColumnVector each : columns) {
      if (each.dataType() instanceof BinaryType) {
        found = Math.max(found, each.arrayData().getElementsAppended());
      }
    }
    return found;
  }

  @Override
  public long position() {
    throw new IllegalStateException("Python is the last resort"); // it is never handed over
  }

  @Override
  public long bytes() {
    return 0; // Python does not tell
  }

  @Override
  public void close() throws IOException {
    rows.close();
    batch.close();
  }
}
