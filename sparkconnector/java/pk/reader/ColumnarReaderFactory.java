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

  ColumnarReaderFactory(PartitionReaderFactory python, StructType full, StructType required) {
    this.python = python;
    this.full = full;
    this.required = required;
  }

  @Override
  public boolean supportColumnarReads(InputPartition partition) {
    return partition instanceof PlannedPartition;
  }

  @Override
  public PartitionReader<ColumnarBatch> createColumnarReader(InputPartition partition) {
    return new ColumnarReader((PlannedPartition) partition, this, required);
  }

  @Override
  public PartitionReader<InternalRow> createReader(InputPartition partition) {
    InputPartition one =
        partition instanceof PlannedPartition
            ? ((PlannedPartition) partition).python(0, -1, -1)
            : partition;
    return pythonRows(one);
  }

  /** Returns Spark's reader of the Python source, with the columns that the query needs. */
  PartitionReader<InternalRow> pythonRows(InputPartition partition) {
    PartitionReader<InternalRow> all = python.createReader(partition);
    return full.equals(required) ? all : new Projected(all, ordinals());
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
