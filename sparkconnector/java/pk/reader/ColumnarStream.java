// A stream that delegates every offset call to Spark's stream of the Python source.
//
// Spark asks a stream by its interfaces whether it can limit a batch and whether it can run all that is
// there now.  The wrapper has both interfaces, so it wraps only a stream that has them; pk's readers
// always do.  Any other stream is returned as it is, and is read through Python.
//
// The progress of a query gets the lag of each partition: the newest offset that Python reported at the
// last trigger, less the offset that the query has reached.  Java compares the two offsets' JSON and asks
// no broker.
package pk.reader;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.IOException;
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
  private static final ObjectMapper JSON = new ObjectMapper();

  private final MicroBatchStream inner;
  private final SupportsTriggerAvailableNow limits;
  private final StructType full;
  private final StructType required;
  private final Metrics.Totals totals = new Metrics.Totals(SparkContext.getOrCreate());
  private volatile String way = "";
  private volatile Offset newest;

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
    return wrapped.partitions;
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
    Offset last = newest;
    if (last != null && reached.isPresent()) {
      addLag(found, last.json(), reached.get().json());
    }
    return found;
  }

  private static void addLag(Map<String, String> into, String newest, String reached) {
    long sum = 0;
    long most = 0;
    try {
      JsonNode done = JSON.readTree(reached).path("topics");
      JsonNode topics = JSON.readTree(newest).path("topics");
      for (var names = topics.fieldNames(); names.hasNext(); ) {
        String topic = names.next();
        JsonNode ends = topics.path(topic).path("offsets");
        JsonNode offsets = done.path(topic).path("offsets");
        for (var numbers = ends.fieldNames(); numbers.hasNext(); ) {
          String partition = numbers.next();
          if (!offsets.has(partition)) {
            continue; // not read yet: where it begins, only Python knows
          }
          long lag = ends.path(partition).asLong() - offsets.path(partition).asLong();
          lag = Math.max(0, lag);
          into.put("lag." + topic + "-" + partition, Long.toString(lag));
          sum += lag;
          most = Math.max(most, lag);
        }
      }
    } catch (IOException cause) {
      return; // no offsets of pk: no lag
    }
    into.put("lagMax", Long.toString(most));
    into.put("lagSum", Long.toString(sum));
  }
}
