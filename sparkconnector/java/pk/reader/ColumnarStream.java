// A stream that delegates every offset call to Spark's stream of the Python source.
//
// Spark asks a stream by its interfaces whether it can limit a batch and whether it can run all that is
// there now.  The wrapper has both interfaces, so it wraps only a stream that has them; pk's readers
// always do.  Any other stream is returned as it is, and is read through Python.
package pk.reader;

import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream;
import org.apache.spark.sql.connector.read.streaming.Offset;
import org.apache.spark.sql.connector.read.streaming.ReadLimit;
import org.apache.spark.sql.connector.read.streaming.SupportsTriggerAvailableNow;
import org.apache.spark.sql.types.StructType;

final class ColumnarStream implements MicroBatchStream, SupportsTriggerAvailableNow {
  private final MicroBatchStream inner;
  private final SupportsTriggerAvailableNow limits;
  private final StructType full;
  private final StructType required;

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
    return PlannedPartition.wrap(inner.planInputPartitions(start, end));
  }

  @Override
  public PartitionReaderFactory createReaderFactory() {
    return new ColumnarReaderFactory(inner.createReaderFactory(), full, required);
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
    return limits.reportLatestOffset();
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
}
