// Creates the readers of partitions on executors.
//
// A planned partition is read in columns.  Any other is read by Spark's own reader of the Python
// source; Python returns all columns, and those that the query does not need are dropped here.
package pk.reader;

import java.io.IOException;
import java.util.ArrayList;
import java.util.List;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.ProjectingInternalRow;
import org.apache.spark.sql.connector.metric.CustomTaskMetric;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.vectorized.ColumnarBatch;
import scala.jdk.javaapi.CollectionConverters;

public final class ColumnarReaderFactory implements PartitionReaderFactory {
  private static final long serialVersionUID = 1L;

  private final PartitionReaderFactory python;
  private final StructType full;
  private final StructType required;
  /** Of a stream; null for a batch, whose counts are in the plan's metrics alone. */
  private final Metrics.Totals totals;

  ColumnarReaderFactory(
      PartitionReaderFactory python, StructType full, StructType required, Metrics.Totals totals) {
    this.python = python;
    this.full = full;
    this.required = required;
    this.totals = totals;
  }

  /** Adds the counts of a task that ends to those of its stream. */
  void ended(Metrics task) {
    if (totals != null) {
      totals.add(task);
    }
  }

  @Override
  public boolean supportColumnarReads(InputPartition partition) {
    return partition instanceof PlannedPartition;
  }

  @Override
  public PartitionReader<ColumnarBatch> createColumnarReader(InputPartition partition) {
    return new ColumnarReader((PlannedPartition) partition, this, required);
  }

  /** Returns Spark's reader of the Python source, whose rows are counted. */
  @Override
  public PartitionReader<InternalRow> createReader(InputPartition partition) {
    InputPartition one =
        partition instanceof PlannedPartition
            ? ((PlannedPartition) partition).python(0, -1, -1)
            : partition;
    return new Counted(pythonRows(one));
  }

  /** Returns Spark's reader of the Python source, with the columns that the query needs. */
  PartitionReader<InternalRow> pythonRows(InputPartition partition) {
    PartitionReader<InternalRow> all = python.createReader(partition);
    return full.equals(required) ? all : new Projected(all, ordinals());
  }

  /** Counts the rows of a scan that Python reads as a whole. */
  private final class Counted implements PartitionReader<InternalRow> {
    private final PartitionReader<InternalRow> rows;
    private final Metrics metrics = new Metrics();
    private boolean closed;

    Counted(PartitionReader<InternalRow> rows) {
      this.rows = rows;
    }

    @Override
    public boolean next() throws IOException {
      if (!rows.next()) {
        return false;
      }
      metrics.add(Metrics.Count.PYTHON, 1);
      return true;
    }

    @Override
    public InternalRow get() {
      return rows.get();
    }

    @Override
    public CustomTaskMetric[] currentMetricsValues() {
      return Metrics.joined(rows.currentMetricsValues(), metrics.values());
    }

    @Override
    public void close() throws IOException {
      if (!closed) {
        closed = true;
        ended(metrics);
      }
      rows.close();
    }
  }

  private List<Object> ordinals() {
    List<Object> found = new ArrayList<>();
    for (String name : required.fieldNames()) {
      found.add(full.fieldIndex(name));
    }
    return found;
  }

  private final class Projected implements PartitionReader<InternalRow> {
    private final PartitionReader<InternalRow> all;
    private final ProjectingInternalRow row;

    Projected(PartitionReader<InternalRow> all, List<Object> ordinals) {
      this.all = all;
      row = ProjectingInternalRow.apply(
          required, CollectionConverters.asScala(ordinals).toIndexedSeq());
    }

    @Override
    public boolean next() throws IOException {
      return all.next();
    }

    @Override
    public InternalRow get() {
      row.project(all.get());
      return row;
    }

    @Override
    public CustomTaskMetric[] currentMetricsValues() {
      return all.currentMetricsValues();
    }

    @Override
    public void close() throws IOException {
      all.close();
    }
  }
}
