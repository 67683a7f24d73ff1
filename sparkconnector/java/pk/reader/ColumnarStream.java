// A stream that delegates every offset call to Spark's stream of the Python source.
//
// Spark asks a stream by its interfaces whether it can limit a batch and whether it can run all that is
// there now.  The wrapper has both interfaces, so it wraps only a stream that has them; pk's readers
// always do.  Any other stream is returned as it is, and is read through Python.
//
// The lag (Lag.java) after a batch is in the plan of the batch, and that after the last committed one in the
// progress of the query.
package pk.reader;

import java.util.Map;
import java.util.Optional;
import java.util.TreeMap;
import org.apache.spark.SparkContext;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream;
import org.apache.spark.sql.connector.read.streaming.Offset;
import org.apache.spark.sql.connector.read.streaming.ReadLimit;
import org.apache.spark.sql.connector.read.streaming.ReportsSourceMetrics;
import org.apache.spark.sql.connector.read.streaming.SupportsTriggerAvailableNow;
import org.apache.spark.sql.types.StructType;

final class ColumnarStream
    implements MicroBatchStream, SupportsTriggerAvailableNow, ReportsSourceMetrics {
  private final MicroBatchStream inner;
  private final SupportsTriggerAvailableNow limits;
  private final StructType full;
  private final StructType required;
  private final Metrics.Totals totals = new Metrics.Totals(SparkContext.getOrCreate());
  private volatile String way = "";
  private volatile Offset newest;
  private volatile Lag lag;

  private ColumnarStream(
      MicroBatchStream inner,
      SupportsTriggerAvailableNow limits,
      StructType full,
      StructType required) {
    this.inner = inner;
    this.limits = limits;
    this.full = full;
    this.required = required;
  }

  /** Returns a stream around `inner`; `inner` itself if it cannot limit its batches. */
  static MicroBatchStream around(MicroBatchStream inner, StructType full, StructType required) {
    if (!(inner instanceof SupportsTriggerAvailableNow) || !full.equals(required)) {
      return inner;
    }
    return new ColumnarStream(inner, (SupportsTriggerAvailableNow) inner, full, required);
  }

  @Override
  public InputPartition[] planInputPartitions(Offset start, Offset end) {
    PlannedPartition.Wrapped wrapped =
        PlannedPartition.wrap(inner.planInputPartitions(start, end));
    way = wrapped.way;
    lag = lagAt(end);
    return wrapped.partitions;
  }

  /** Returns the way of the last batch that was planned. */
  String way() {
    return way;
  }

  /** Returns the lag after the last batch that was planned; null if it is not known. */
  Lag lag() {
    return lag;
  }

  private Lag lagAt(Offset reached) {
    Offset last = newest;
    return last == null ? null : Lag.between(last.json(), reached.json());
  }

  @Override
  public PartitionReaderFactory createReaderFactory() {
    return new ColumnarReaderFactory(inner.createReaderFactory(), full, required, totals);
  }

  @Override
  public Offset initialOffset() {
    return inner.initialOffset();
  }

  @Override
  public Offset latestOffset() {
    return inner.latestOffset();
  }

  @Override
  public Offset latestOffset(Offset start, ReadLimit limit) {
    return limits.latestOffset(start, limit);
  }

  @Override
  public ReadLimit getDefaultReadLimit() {
    return limits.getDefaultReadLimit();
  }

  @Override
  public Offset reportLatestOffset() {
    newest = limits.reportLatestOffset();
    return newest;
  }

  @Override
  public void prepareForTriggerAvailableNow() {
    limits.prepareForTriggerAvailableNow();
  }

  @Override
  public Offset deserializeOffset(String json) {
    return inner.deserializeOffset(json);
  }

  @Override
  public void commit(Offset end) {
    inner.commit(end);
  }

  @Override
  public void stop() {
    inner.stop();
  }

  @Override
  public Map<String, String> metrics(Optional<Offset> reached) {
    Map<String, String> found = new TreeMap<>();
    found.put("reader", way);
    totals.since(found);
    Lag left = reached.map(this::lagAt).orElse(null);
    if (left != null) {
      left.addTo(found);
    }
    return found;
  }
}
