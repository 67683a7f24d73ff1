// A scan that delegates to Spark's Python scan everything but the partitions and their readers.
//
// Local invariants
//   G1  Python plans.  A partition is read in columns only if Python put a plan into it.
//   G2  Either all partitions of a scan have a plan or Spark reads the scan row by row: Spark refuses
//       to mix the two.
package pk.reader;

import org.apache.spark.sql.connector.metric.CustomMetric;
import org.apache.spark.sql.connector.metric.CustomTaskMetric;
import org.apache.spark.sql.connector.read.Batch;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.streaming.ContinuousStream;
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream;
import org.apache.spark.sql.internal.connector.SupportsMetadata;
import org.apache.spark.sql.types.StructType;
import scala.collection.immutable.Map;
import scala.collection.immutable.Map$;

/** Wraps the scan that Spark built for the Python source. */
public final class ColumnarScan implements Scan, SupportsMetadata {
  private final Scan inner;
  private final StructType full;
  private final StructType required;
  private volatile String way = "JVM, where Python's plan allows it";
  /** The stream of this scan; null for a batch. */
  private volatile ColumnarStream stream;

  ColumnarScan(Scan inner, StructType full, StructType required) {
    this.inner = inner;
    this.full = full;
    this.required = required;
  }

  @Override
  public StructType readSchema() {
    return required;
  }

  @Override
  public String description() {
    return inner.description();
  }

  @Override
  public Batch toBatch() {
    return new PlannedBatch(inner.toBatch());
  }

  @Override
  public MicroBatchStream toMicroBatchStream(String checkpoint) {
    MicroBatchStream found =
        ColumnarStream.around(inner.toMicroBatchStream(checkpoint), full, required);
    stream = found instanceof ColumnarStream ? (ColumnarStream) found : null;
    return found;
  }

  @Override
  public ContinuousStream toContinuousStream(String checkpoint) {
    return inner.toContinuousStream(checkpoint);
  }

  @Override
  public CustomMetric[] supportedCustomMetrics() {
    CustomMetric[] found = Metrics.with(inner.supportedCustomMetrics());
    return stream == null ? found : Metrics.joined(found, Lag.metrics());
  }

  @Override
  public CustomTaskMetric[] reportDriverMetrics() {
    CustomTaskMetric[] found = inner.reportDriverMetrics();
    Lag lag = lag();
    return lag == null ? found : Metrics.joined(found, lag.values());
  }

  private Lag lag() {
    ColumnarStream streamed = stream;
    return streamed == null ? null : streamed.lag();
  }

  @Override
  public ColumnarSupportMode columnarSupportMode() {
    return ColumnarSupportMode.PARTITION_DEFINED; // G2
  }

  @Override
  @SuppressWarnings("unchecked") // Scala's Map.updated has a lower bound, which Java sees as Object
  public Map<String, String> getMetaData() {
    Map<String, String> found =
        inner instanceof SupportsMetadata
            ? ((SupportsMetadata) inner).getMetaData()
            : Map$.MODULE$.<String, String>empty();
    Map<String, String> pruned = found.updated("ReadSchema", required.simpleString());
    ColumnarStream streamed = stream;
    String taken = streamed == null || streamed.way().isEmpty() ? way : streamed.way();
    Map<String, String> read = pruned.updated("Reader", taken);
    Lag lag = lag();
    return lag == null ? read : read.updated("Lag", lag.inWords());
  }

  private final class PlannedBatch implements Batch {
    private final Batch batch;
    private InputPartition[] planned;

    PlannedBatch(Batch batch) {
      this.batch = batch;
    }

    @Override
    public InputPartition[] planInputPartitions() {
      if (planned == null) {
        PlannedPartition.Wrapped wrapped = PlannedPartition.wrap(batch.planInputPartitions());
        planned = wrapped.partitions;
        way = wrapped.way;
      }
      return planned;
    }

    @Override
    public PartitionReaderFactory createReaderFactory() {
      return new ColumnarReaderFactory(batch.createReaderFactory(), full, required, null);
    }
  }
}
